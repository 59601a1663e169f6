"""Devices: what carries packets between nodes, behind the one interface of :mod:`inanet.phy.device`."""
