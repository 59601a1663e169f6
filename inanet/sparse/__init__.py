"""Ranks of sparse jobs in a fabric of daemons: what :mod:`inanet.client` gives to a rank, found by :mod:`inanet.aio`'s connection."""
