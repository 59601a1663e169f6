"""What the plan of a GOAT job says: its switches, and the next hops along the tree of ways to its PS.

Every node has one neighbour towards the PS. Packets between two nodes go up from one of them and down to the other, so what
comes from a node at a switch always comes from the neighbour that the way to it leads to: that is how a switch tells whose
packets are whose (bound endpoints).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inanet.proto.common.checks import are_endpoints, in_range, need
from inanet.proto.common.plan import TensorJob


@dataclass(frozen=True, slots=True)
class Site:
    """One of several switches that sum for a job (GOAT); its number among the job's nodes is its place in the list plus 1.

    Next hops are endpoints: to the PS, to every site of the list (0: to itself), to every worker.
    """

    name: str
    endpoint: int
    to_ps: int
    to_sites: tuple[int, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoatJob(TensorJob):
    """``ps`` is the system's PS, ``sites`` the switches; worker *k* is at ``entries[k]``."""

    ps: int
    sites: tuple[Site, ...] = ()
    entries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        TensorJob.__post_init__(self)
        are_endpoints((self.ps, *self.entries))
        need(len(self.entries) == len(self.workers), "a worker without a switch")
        for site in self.sites:
            need(
                len(site.to_sites) == len(self.sites),
                f"switch {site.name!r}: ways to other switches are missing",
            )
            need(len(site.ways) == len(self.workers), f"switch {site.name!r}: ways to workers are missing")
            are_endpoints((site.endpoint, site.to_ps, *site.to_sites, *site.ways))

    def way(self, worker: int) -> tuple[int, int]:
        """See :meth:`TensorJob.way`: both are the switch that the worker is at."""
        return self.entries[worker], self.entries[worker]

    def node_at(self, endpoint: int) -> int:
        """The number, from 1, of the switch at an endpoint. Raises ``ValueError`` for one that does not sum for the job."""
        for number, site in enumerate(self.sites, 1):
            if site.endpoint == endpoint:
                return number
        raise ValueError(f"job {self.number}: this switch is none of those that sum for it")


@dataclass(frozen=True, slots=True)
class GoatAsyncJob(GoatJob):
    """Asynchronous training; ``departed`` are workers that have left, by index: the job goes on without them."""

    departed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        GoatJob.__post_init__(self)
        for index in self.departed:
            in_range("departed worker", index, 0, len(self.workers) - 1)

    def without(self, worker: int) -> "GoatAsyncJob":
        """See :meth:`SwitchedJob.without`: the PS may wait for this one's gradient."""
        return replace(self, departed=(*self.departed, worker))


def towards(parents: Mapping[str, str], here: str, there: str) -> str:
    """The neighbour of ``here`` on the way to another node. ``parents`` has every node's neighbour towards the PS."""
    node = there
    while node in parents:
        if parents[node] == here:
            return node
        node = parents[node]
    return parents[here]


def sites(
    parents: Mapping[str, str],
    switches: Sequence[str],
    workers: Sequence[str],
    endpoints: Mapping[str, int],
) -> tuple[tuple[Site, ...], tuple[int, ...]]:
    """The switches, and the endpoint that each worker sends to. ``parents`` as for :func:`towards`; ``endpoints`` of all."""
    found = tuple(
        Site(
            name=here,
            endpoint=endpoints[here],
            to_ps=endpoints[parents[here]],
            to_sites=tuple(
                0 if there == here else endpoints[towards(parents, here, there)] for there in switches
            ),
            ways=tuple(endpoints[towards(parents, here, worker)] for worker in workers),
        )
        for here in switches
    )
    return found, tuple(endpoints[parents[worker]] for worker in workers)


def below(site: Site) -> tuple[int, ...]:
    """Where a switch sends what is for all workers that are not on the PS's side of it."""
    return tuple(dict.fromkeys(way for way in site.ways if way != site.to_ps))


def neighbours(site: Site) -> tuple[int, ...]:
    """All endpoints that a switch exchanges packets with."""
    return tuple(dict.fromkeys((site.to_ps, *site.ways, *(hop for hop in site.to_sites if hop))))
