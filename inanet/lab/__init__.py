"""A network on one machine: hosts and switches as network namespaces, links as rate-limited veth pairs.

A topology is a TOML file (:mod:`inanet.lab.model`). It becomes a list of operations as plain data
(:mod:`inanet.lab.layout`), which :mod:`inanet.lab.build` applies through netlink. Everything lives inside
namespaces named ``ina.<lab>.<node>``, so nothing of the machine's own network is ever touched, and removing
these names removes the lab.
"""
