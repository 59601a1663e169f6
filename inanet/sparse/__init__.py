"""Sparse jobs for whoever trains: a group in one process, or a rank whose switch and PS shards are other processes."""
