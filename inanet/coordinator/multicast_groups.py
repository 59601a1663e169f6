"""Multicast groups of all jobs of a coordinator: one for every parent in every tree of every job.

A switch that snoops, and a host's interface, filter by address. So parents have addresses of their own, or a worker's
link would carry results of others; one port serves all.
"""

import hashlib
from ipaddress import IPv4Network

from inanet.wire.endpoint import endpoint


def probing_group(network: IPv4Network) -> str:
    """The group to which nothing but probes of multicast go, unless a job has come upon it as well: the range's last."""
    return str(network[-1])


class Groups:
    """Gives out groups of ``network`` with one ``port``. No two parents have the same one at a time."""

    def __init__(self, network: IPv4Network, port: int) -> None:
        self._network = network
        self._port = port
        self._given: dict[tuple[int, int, str], int] = {}
        self._taken: set[int] = set()

    def of(self, job: int, key: int, tree: int, parent: str) -> int:
        """Endpoint of the group to which ``parent`` sends the results of a job's tree; 0 if there is none left.

        It follows from the job's ``key``, so that coordinators with the same range on one network, or one that has
        started again, hardly ever choose the group of another job. Asked again, it is the same.
        """
        wanted = (job, tree, parent)
        number = self._given.get(wanted)
        if number is None:
            size = self._network.num_addresses
            if len(self._taken) == size:
                return 0
            digest = hashlib.blake2b(f"{key} {tree} {parent}".encode(), digest_size=8).digest()
            number = int.from_bytes(digest, "little") % size
            while number in self._taken:
                number = (number + 1) % size
            self._given[wanted] = number
            self._taken.add(number)
        return endpoint(str(self._network[number]), self._port)

    def withdraw(self, job: int) -> None:
        """A job is over: its groups are free."""
        for wanted in [wanted for wanted in self._given if wanted[0] == job]:
            self._taken.discard(self._given.pop(wanted))
