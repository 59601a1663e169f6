"""Next hops of a job that is summed in several switches, along the tree of ways to its PS.

Every node has one neighbour towards the PS. Packets between two nodes go up from one of them and down to the other, so what
comes from a node at a switch always comes from the neighbour that the way to it leads to: that is how a switch tells whose
packets are whose (bound endpoints).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inanet.proto.common.plan import Site, Switched
from inanet.proto.slots.tenants import Tenant


@dataclass(frozen=True, slots=True)
class SiteTenant(Tenant):
    """A job at one of its switches. ``members`` maps neighbours to the bits of the workers behind them, the next hop to the
    PS left out where none is; ``ps`` is that next hop.

    ``node`` is this switch's number in the job, ``to_nodes`` the next hops to nodes 1, 2 and so on (0: none), ``key`` the
    job's secret.
    """

    node: int = 0
    to_nodes: tuple[int, ...] = ()
    key: int = 0


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


def tenant(facts: Switched, node: int, key: int) -> SiteTenant:
    """A job at its switch number ``node`` (1 for the first)."""
    site = facts.sites[node - 1]
    members: dict[int, int] = {}
    for worker, way in enumerate(site.ways):
        members[way] = members.get(way, 0) | 1 << worker
    return SiteTenant(
        facts.number,
        members,
        facts.number,
        site.to_ps,
        node=node,
        to_nodes=site.to_sites,
        key=key,
    )
