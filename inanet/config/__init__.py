"""Configuration files of all daemons and of sparse jobs."""
