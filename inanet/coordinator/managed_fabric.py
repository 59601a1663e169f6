"""The manager's fabric: the trees of every job are planned among the nodes that are there when it starts.

Servers are what has registered as an aggregator or parameter server and is connected, with what it last reported to be
idle; section V of XAgg screens and sorts them (:mod:`inanet.planning.trees`), the planner prices what they could be
(:mod:`inanet.planning.selection`). One parameter server is the root, or the first of several.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inanet.coordinator.registry import Entry, Registry
from inanet.messages.registration import Register, Report
from inanet.messages.text import clip
from inanet.planning.candidates import Fleet
from inanet.planning.costs import Costs
from inanet.planning.network import Network, Port
from inanet.planning.plans import Downlink, Plan, star, tree_of
from inanet.planning.selection import Selection, cheapest
from inanet.planning.topology import Arrangement, Topology, Tree
from inanet.planning.trees import (
    MEMORY_SHARE,
    WORTHWHILE,
    Performance,
    Server,
    build,
    by_performance,
    candidates,
    choose_k,
    communication_share,
    worthwhile,
)
from inanet.proto.common.plan import NodePlan

#: A root is one because it was made one: section V screens the servers under it.
_ROOT_CORES, _ROOT_MEMORY = 1 << 20, 1 << 50


@dataclass(frozen=True, slots=True)
class Policy:
    """How to plan: see ``[planning]`` of the manager's file. Rates in bits per second, ``tensor`` in bytes."""

    kind: str = "auto"
    tensor: int = 100 << 20
    rate: int = 10 * 10**9
    downlinks: Sequence[Downlink] = ("unicast",)
    #: begin with the PS alone, and build trees once the workers are known (XAgg, section V)
    evaluate: bool = False
    #: running jobs take in servers that come, and leave out those that are busy with something else
    dynamic: bool = False


#: A machine with a smaller share of idle cores is busy: a daemon that sums is one thread, so on more than one core this
#: is not its own work.
IDLE_SHARE = 0.1
#: Reports in a row that say the same before it is believed.
REPORTS = 3


@dataclass(slots=True)
class BusyServers:
    """Who is busy, by the reports so far."""

    _streaks: dict[str, int] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)

    def report(self, card: Register, load: Report) -> str:
        """One more report of a node: why it is busy, empty if it is not."""
        name = card.name
        cores = load.idle_cores < IDLE_SHARE * card.cores
        memory = card.memory > 0 and load.memory_used > MEMORY_SHARE * card.memory
        changed = (cores or memory) != (name in self._busy)
        self._streaks[name] = self._streaks.get(name, 0) + 1 if changed else 0
        if self._streaks[name] >= REPORTS:
            self._busy ^= {name}
            self._streaks[name] = 0
        if name not in self._busy:
            return ""
        if memory:
            return f"{load.memory_used / card.memory:.0%} of its memory is in use"
        return f"{load.idle_cores:g} of its {card.cores} cores are idle"


class ManagedFabric:
    """A :class:`~inanet.planning.topology.Fabric` over a registry. ``expect``: nodes that jobs wait for until all of them
    have been there once.
    """

    def __init__(self, registry: Registry, policy: Policy, costs: Costs, expect: Sequence[str] = ()) -> None:
        self._registry = registry
        self._policy = policy
        self._costs = costs
        self._expect = tuple(expect)
        self._complete = False
        self._busy_servers = BusyServers()

    # ---------- as a Fabric

    def refusal(self, role: str, name: str) -> str:
        """See :class:`~inanet.planning.topology.Fabric`: whoever has registered as something else."""
        entry = self._registry.get(name)
        if entry is None or entry.card.role == role:
            return ""
        return f"{name!r} has registered as {entry.card.role}, it cannot be {role} as well; give each its own name"

    def fits(self, workers: Collection[str]) -> None:
        """See :class:`~inanet.planning.topology.Fabric`: who fits under whom is known when all are there."""

    def missing(self) -> tuple[str, ...]:
        """Expected nodes that have not registered, until all have."""
        missing = self._registry.missing(self._expect)
        self._complete = self._complete or not missing
        return () if self._complete else missing

    def awaited(self, workers: Collection[str], connected: Collection[str]) -> tuple[str, ...]:
        """See :class:`~inanet.planning.topology.Fabric`: expected nodes, servers that are still connecting, and a root."""
        words = [f"node {name}" for name in self.missing()]
        for name in self._expect:
            entry = self._registry.get(name)
            if entry is not None and entry.card.role in ("aggregator", "ps") and name not in connected:
                words.append(f"{entry.card.role} {name}")
        if not words and not self._roots(connected):
            words.append("a parameter server")
        return tuple(words)

    def arrange(self, workers: Collection[str], connected: Collection[str]) -> Arrangement:
        """See :class:`~inanet.planning.topology.Fabric`: what the policy asks for, or the PS alone if that cannot be."""
        root = self._roots(connected)[0]
        if self._policy.evaluate:
            why = f"the first step goes to {root} directly, to see how the workers fare"
            return Arrangement(_under(root, workers), why)
        fleet = self._fleet(root, workers, connected)
        try:
            found = cheapest(
                fleet,
                root,
                self._policy.kind,
                size=self._policy.tensor,
                downlinks=self._policy.downlinks,
                costs=self._costs,
            )
        except ValueError as error:
            return Arrangement(_under(root, workers), f"all send to {root}: {error}")
        return Arrangement(found.plan.topology(), found.reason)

    def improve(
        self, topology: Topology, workers: Sequence[Performance], size: int, connected: Collection[str]
    ) -> Arrangement:
        """See :class:`~inanet.planning.topology.Fabric`: the 10 % rule, then a tree with like workers side by side."""
        part = communication_share(workers)
        if not worthwhile(part):
            return Arrangement(
                topology,
                f"communication is {part:.1%} of a step, less than {WORTHWHILE:.0%}: aggregation cannot make steps "
                "noticeably shorter, the trees stay as they are",
            )
        root, order = topology.roots[0], by_performance(workers)
        soonest = min(worker.training for worker in workers)
        late = {worker.name: worker.training - soonest for worker in workers}
        fleet = replace(self._fleet(root, order, connected), workers=order, late=late)
        try:
            found = self._tree(fleet, root, size)
        except ValueError as error:
            return Arrangement(topology, f"the trees stay as they are: {error}")
        ranking = ", ".join(f"{w.name} {w.training:.3f} + {w.transmission:.3f} s" for w in _sorted(workers))
        reason = (
            f"{found.reason}; communication is {part:.1%} of a step; workers, the fastest first: {ranking}"
        )
        return Arrangement(found.plan.topology(), clip(reason))

    def _tree(self, fleet: Fleet, root: str, size: int) -> Selection:
        """XAgg's tree, or with ``auto`` the cheapest of all plans with this one root. Raises ``ValueError``."""
        if self._policy.kind != "tree":
            kind = "auto" if self._policy.kind == "auto" else "ps"
            costs, downlinks = self._costs, self._policy.downlinks
            return cheapest(fleet, root, kind, size=size, downlinks=downlinks, costs=costs, trees=1)
        under = [server for server in fleet.servers if server.name != root]
        able = candidates(under, size, self._costs.core_bps)
        if not able:
            idle = ", ".join(f"{s.name} ({s.cores} idle cores, {s.free >> 20} MiB free)" for s in under)
            raise ValueError(f"no server has the cores and the memory for a tree; there are {idle or 'none'}")
        k = choose_k(len(fleet.workers), len(able))
        tree = build(root, fleet.workers, able, k)
        plan = Plan("tree", f"XAgg's tree, k = {k}", (tree_of(0, root, tree.parents),))
        return Selection(plan, f"{plan.name} of {', '.join(tree.servers) or 'no server'} under {root}")

    def renew(
        self, topology: Topology, workers: Collection[str], connected: Collection[str]
    ) -> Arrangement | None:
        """See :class:`~inanet.planning.topology.Fabric`: what a new job would get, if it has this job's root and takes in a
        server that it does not have."""
        if not self._policy.dynamic or self._policy.evaluate:
            return None
        root = topology.roots[0]
        if self._roots(connected)[:1] != [root]:
            return None
        chosen = self.arrange(workers, connected)
        found = chosen.topology
        if found.roots != topology.roots or found.aggregators.keys() <= topology.aggregators.keys():
            return None
        return chosen

    def busy(self, name: str) -> str:
        entry = self._registry.get(name)
        if not self._policy.dynamic or entry is None or entry.load is None:
            return ""
        return self._busy_servers.report(entry.card, entry.load)

    def recall(self, plans: Mapping[str, NodePlan], workers: Collection[str]) -> Topology | None:
        roots = [name for name in self._registry if self._role(name) == "ps"]
        return topology_of(plans, workers, roots)

    # ---------- nodes

    def _role(self, name: str) -> str:
        entry = self._registry.get(name)
        return entry.card.role if entry is not None else ""

    def _rate(self, name: str) -> int:
        entry = self._registry.get(name)
        return (entry.card.link_bps if entry is not None else 0) or self._policy.rate

    def _roots(self, connected: Collection[str]) -> list[str]:
        """Parameter servers that are there, the best link first."""
        found = [name for name in self._registry if self._role(name) == "ps" and name in connected]
        return sorted(found, key=lambda name: (-self._rate(name), name))

    def _fleet(self, root: str, workers: Collection[str], connected: Collection[str]) -> Fleet:
        names = [
            name for name in self._registry if self._role(name) in ("ps", "aggregator") and name in connected
        ]
        servers = tuple(self._server(name, name == root) for name in names)
        ports = {name: Port("switch", self._rate(name), self._rate(name)) for name in (*workers, *names)}
        order = tuple(sorted(workers, key=lambda name: (-ports[name].sends, name)))
        return Fleet(Network(ports, {}), order, servers, colocate=False, root=root)

    def _server(self, name: str, root: bool) -> Server:
        """What a server has to spare, by its last report."""
        entry = self._registry.get(name)
        assert entry is not None
        rate = self._rate(name)
        if root or entry.load is None:
            return Server(name, rate, _ROOT_CORES, _ROOT_MEMORY)
        return Server(
            name,
            _idle_rate(entry, rate),
            round(entry.load.idle_cores),
            entry.card.memory,
            entry.load.memory_used,
        )


def _idle_rate(entry: Entry, rate: int) -> float:
    """What is left of a link, in the direction that is busier; never nothing, which would be no server at all."""
    assert entry.load is not None
    return max(rate - max(entry.load.send_bps, entry.load.receive_bps), rate / 100)


def _sorted(workers: Sequence[Performance]) -> list[Performance]:
    known = {worker.name: worker for worker in workers}
    return [known[name] for name in by_performance(workers)]


def _under(root: str, workers: Collection[str]) -> Topology:
    """All workers send to the root."""
    tree: Tree = star(0, root, tuple(sorted(workers)))
    return Topology(roots=(root,), workers=dict.fromkeys(tree.parents, (tree.root,)))


def topology_of(
    plans: Mapping[str, NodePlan], workers: Collection[str], roots: Collection[str]
) -> Topology | None:
    """The trees that the ``plans`` of members, by name, are views of.

    A member knows its parent and its children, so one that has not come back is known by its neighbours. ``roots``:
    parameter servers of the fabric, for trees of which nobody above is back. None if the plans do not tell, or do not
    fit together yet.
    """
    parents: dict[int, dict[str, str]] = {}
    tops: dict[int, str] = {}
    for name, plan in plans.items():
        for place in plan.placements:
            tree = parents.setdefault(place.tree, {})
            if place.parent is None:
                tops[place.tree] = name
            else:
                tree[name] = place.parent.name
            tree.update((child.name, name) for child in place.children if child.name not in tree)
    found: dict[str, str] = {}
    chosen: list[str] = []
    for index in sorted(parents):
        tree = parents[index]
        above = sorted({parent for parent in tree.values() if parent not in tree})
        top = tops.get(index) or next((name for name in above if name in roots), None)
        if top is None and len(above) == 1:
            top = above[0]
        if top is None:
            return None
        # whoever stood between, and is not back: its own parent is known to nobody
        tree.update(dict.fromkeys((name for name in above if name != top), top))
        chosen.append(top)
        inner = {parent for parent in tree.values() if parent != top}
        found.update((name, tree[name]) for name in inner)
    hosts = {name: tuple(parents[index].get(name, "") for index in sorted(parents)) for name in workers}
    if not chosen or any("" in above for above in hosts.values()):
        return None
    try:
        return Topology(roots=tuple(chosen), aggregators=found, workers=hosts)
    except ValueError:
        return None
