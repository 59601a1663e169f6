"""The plan that a PS's configuration asks for: as it is written, or the cheapest of a kind, or of all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inanet.planning.candidates import Fleet, candidates
from inanet.planning.costs import Costs
from inanet.planning.network import Network, Port
from inanet.planning.plans import Downlink, Plan
from inanet.planning.prices import price
from inanet.planning.topology import Topology
from inanet.planning.trees import Server

#: Servers of a fabric are meant to sum: their cores and memory are not what a choice here depends on.
_CORES, _MEMORY = 1 << 20, 1 << 50


@dataclass(frozen=True, slots=True)
class Selection:
    """A plan, and a sentence that says why."""

    plan: Plan
    reason: str


def select(
    fabric: Topology,
    ps: str,
    kind: str,
    *,
    rates: Mapping[str, int],
    default_rate: int,
    size: int,
    downlinks: Sequence[Downlink],
    costs: Costs,
) -> Selection:
    """The cheapest plan of a ``kind`` ("auto": of any) for tensors of ``size`` bytes over the nodes of ``fabric``.

    All nodes are taken to be on one switch, with the ``rates`` of their links in bits per second. ``ps`` stays a root,
    since it coordinates. A ring is no plan for daemons: where it would be as fast, the reason says so. Raises
    ``ValueError`` if there is no plan of the kind.
    """
    names = (*fabric.roots, *fabric.aggregators, *fabric.workers)
    ports = {
        name: Port("switch", rates.get(name, default_rate), rates.get(name, default_rate)) for name in names
    }
    servers = tuple(
        Server(name, ports[name].sends, _CORES, _MEMORY) for name in (*fabric.roots, *fabric.aggregators)
    )
    workers = tuple(sorted(fabric.workers, key=lambda name: (-ports[name].sends, name)))
    # a tree that stands there already would hide an equal one of the kind that is asked for
    configured = fabric.trees(fabric.workers) if kind == "auto" else ()
    fleet = Fleet(Network(ports, {}), workers, servers, configured=configured, colocate=False, root=ps)
    return cheapest(fleet, ps, kind, size=size, downlinks=downlinks, costs=costs)


def cheapest(
    fleet: Fleet,
    root: str,
    kind: str,
    *,
    size: int,
    downlinks: Sequence[Downlink],
    costs: Costs,
    trees: int | None = None,
) -> Selection:
    """The cheapest plan of a ``kind`` ("auto": of any) with ``root`` among its roots, and with so many ``trees``, if that
    is given. Raises ``ValueError`` if there is none.
    """
    plans = [
        plan
        for plan in candidates(fleet, model=size, core_bps=costs.core_bps)
        if plan.trees
        and trees in (None, len(plan.trees))
        and plan.downlink in downlinks
        and root in [tree.root for tree in plan.trees]
        and kind in ("auto", plan.kind)
    ]
    if not plans:
        raise ValueError(
            f"plan = {kind!r} is not possible with {len(fleet.workers)} workers and {len(fleet.servers)} servers; "
            "allowed: 'auto', or more aggregators"
        )
    prices = sorted((price(plan, fleet, size, costs) for plan in plans), key=lambda found: found.seconds)
    best = prices[0]
    ring = price(Plan("ring", "ring"), fleet, size, costs)
    reason = f"{best.plan.name} takes {best.seconds:.4f} s in mode {best.mode}, bound by {best.bound}"
    if ring.seconds <= best.seconds:
        reason += f"; a ring without a fabric would take {ring.seconds:.4f} s"
    return Selection(best.plan, reason)
