"""Every plan worth a price for a fleet: the planner's candidates (section 5 of the design)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from inanet.planning.network import Network
from inanet.planning.plans import Downlink, Kind, Plan, beside, star, tree_of
from inanet.planning.topology import Tree
from inanet.planning.trees import CORE_BPS, Server, TreeError, build
from inanet.planning.trees import candidates as able
from inanet.wire.xagg import MAX_CHILDREN


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts that take part. ``workers`` in the order of :func:`inanet.planning.trees.by_performance`, as far as known.

    ``servers`` can sum and have no worker. ``late``: seconds by which a worker has its tensor later than the others.
    ``configured``: trees that are there already. ``shared_cores``: processors that all hosts share, as in a lab.
    """

    network: Network
    workers: tuple[str, ...]
    servers: tuple[Server, ...]
    late: Mapping[str, float] = field(default_factory=dict)
    configured: tuple[Tree, ...] = ()
    shared_cores: int | None = None
    #: whether aggregators may run beside workers
    colocate: bool = True
    #: a server that is to be a root, whatever its rate
    root: str | None = None


def candidates(
    fleet: Fleet, *, ks: Sequence[int] = range(2, 6), model: int = 0, core_bps: float = CORE_BPS
) -> list[Plan]:
    """A ring, and with results by unicast and by multicast: the configured trees; a PS; shards over 2, 3, ... servers,
    over aggregators on the workers' hosts, or over both; k-ary trees of servers, one or one for each shard; an aggregator for every
    switch. Plans that come to the same trees as one before them are left out.
    """
    plans = [Plan("ring", "ring")]
    seen: set[object] = set()
    for kind, name, trees, hosts in _tree_plans(fleet, ks, model, core_bps):
        shape = tuple((tree.root, tuple(sorted(tree.parents.items()))) for tree in trees)
        crowd = max(len(children) for tree in trees for children in tree.children.values())
        if shape in seen or crowd > MAX_CHILDREN:
            continue
        seen.add(shape)
        for downlink in _downlinks(fleet, trees, hosts):
            plans.append(Plan(kind, f"{name}, {downlink}", trees, downlink, hosts))
    return plans


def _downlinks(fleet: Fleet, trees: tuple[Tree, ...], hosts: Mapping[str, str]) -> Iterator[Downlink]:
    yield "unicast"
    groups = [(parent, below) for tree in trees for parent, below in tree.children.items() if len(below) > 1]
    reach = all(
        fleet.network.reaches(hosts.get(parent, parent), [hosts.get(child, child) for child in below])
        for parent, below in groups
    )
    if groups and reach:
        yield "multicast"


_Found = tuple[Kind, str, tuple[Tree, ...], Mapping[str, str]]


def _tree_plans(fleet: Fleet, ks: Sequence[int], model: int, core_bps: float) -> Iterator[_Found]:
    if fleet.configured:
        yield "configured", "configured trees", fleet.configured, {}
    workers = fleet.workers
    servers = able(fleet.servers, model, core_bps)
    # stable: the others stay in their order
    servers = tuple(sorted(servers, key=lambda server: server.name != fleet.root))
    if servers:
        yield "ps", f"PS on {servers[0].name}", (star(0, servers[0].name, workers),), {}
    for count in range(2, len(servers) + 1):
        trees = tuple(star(index, servers[index].name, workers) for index in range(count))
        yield "sharded", f"{count} shards on servers", trees, {}
    if fleet.colocate and len(workers) > 1:
        hosts = {beside(host): host for host in workers}
        trees = tuple(star(index, root, workers) for index, root in enumerate(hosts))
        yield "colocated", f"{len(trees)} shards on workers", trees, hosts
        roots = (*(server.name for server in servers), *hosts)
        trees = tuple(star(index, root, workers) for index, root in enumerate(roots))
        yield "mixed", f"{len(trees)} shards on servers and workers", trees, hosts
    if len(servers) > 1 and len(workers) > 1:
        yield from _k_trees(workers, servers, ks)
        yield from _rack_trees(fleet, servers)


def _k_trees(workers: Sequence[str], servers: Sequence[Server], ks: Sequence[int]) -> Iterator[_Found]:
    """XAgg's trees; with several roots, the other servers are dealt out among the trees.

    Beside the ``ks`` the one with which the servers just suffice, if there are so few that they need more children.
    """
    for roots in range(1, len(servers)):
        enough = -(-len(workers) // ((len(servers) - roots) // roots or 1))
        for k in (*ks, *([enough] if max(ks) < enough <= MAX_CHILDREN else [])):
            trees = []
            with contextlib.suppress(TreeError):
                for index in range(roots):
                    inner = servers[roots + index :: roots]
                    found = build(servers[index].name, workers, inner, k)
                    trees.append(tree_of(index, found.root, found.parents))
            if len(trees) != roots or all(len(tree.children) == 1 for tree in trees):
                continue
            if roots == 1:
                yield "tree", f"server tree, k = {k}", tuple(trees), {}
            else:
                yield "sharded-tree", f"{roots} shards over server trees, k = {k}", tuple(trees), {}


def _rack_trees(fleet: Fleet, servers: Sequence[Server]) -> Iterator[_Found]:
    """The best server of every switch sums for the workers there; the best of all for these."""
    ports = fleet.network.ports
    by_switch: dict[str, list[str]] = {}
    for worker in fleet.workers:
        by_switch.setdefault(ports[worker].switch, []).append(worker)
    if len(by_switch) < 2:
        return
    for root in dict.fromkeys(ports[server.name].switch for server in servers):
        top = next(server.name for server in servers if ports[server.name].switch == root)
        parents: dict[str, str] = {}
        for switch, members in by_switch.items():
            near = [s.name for s in servers if ports[s.name].switch == switch and s.name != top]
            if near and len(members) > 1:
                parents |= dict.fromkeys(members, near[0]) | {near[0]: top}
            else:
                parents |= dict.fromkeys(members, top)
        if set(parents.values()) != {top}:
            yield "racks", f"a server for every switch, under {top}", (tree_of(0, top, parents),), {}
