"""GOAT's Fig. 2: three switches with one slot each, four workers, three fragments.

W1 and W2 are plugged into S1, W3 and W4 into S2, the PS into S3; S1 and S2 have a direct link (GINA program). Counted are
the packets that leave switches. Both schemes run through the same little machine; only where a fragment may be aggregated
differs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Table
from inanet.planning.goat.instance import from_graph
from inanet.planning.goat.krgs import schedule
from inanet.planning.goat.relaxation import solve_exactly
from inanet.planning.goat.submodels import partition
from inanet.planning.goat.topologies import empty_graph

if TYPE_CHECKING:
    from inanet.planning.goat.topologies import Graph

FRAGMENTS = "ABC"
#: The arrival order of Fig. 2(b): the first worker of a switch is three fragments ahead of the second.
ASYNCHRONOUS = {"S1": ("A1", "B1", "C1", "A2", "B2", "C2"), "S2": ("A3", "B3", "C3", "A4", "B4", "C4")}
SYNCHRONOUS = {"S1": ("A1", "A2", "B1", "B2", "C1", "C2"), "S2": ("A3", "A4", "B3", "B4", "C3", "C4")}
#: The switch next towards a switch or the PS, with the direct link between S1 and S2.
NEXT = {
    ("S1", "S2"): "S2",
    ("S2", "S1"): "S1",
    ("S1", "S3"): "S3",
    ("S2", "S3"): "S3",
    ("S3", "S1"): "S1",
    ("S3", "S2"): "S2",
    ("S1", "PS"): "S3",
    ("S2", "PS"): "S3",
    ("S3", "PS"): "PS",
}
#: Everything through S3 instead.
NEXT_WITHOUT_DIRECT_LINK = NEXT | {("S1", "S2"): "S3", ("S2", "S1"): "S3"}
BEHIND = {"S1": frozenset({1, 2}), "S2": frozenset({3, 4}), "S3": frozenset({1, 2, 3, 4})}


@dataclass(frozen=True, slots=True)
class Packet:
    """A fragment with the workers summed in it."""

    fragment: str
    workers: frozenset[int]

    @property
    def label(self) -> str:
        """As the figure writes it: ``A12``, and ``A`` for the sum over all."""
        names = "".join(str(worker) for worker in sorted(self.workers))
        return self.fragment if len(self.workers) == 4 else f"{self.fragment}{names}"


@dataclass(slots=True)
class _Switch:
    fragment: str = ""
    workers: frozenset[int] = frozenset()
    held: bool = False


@dataclass(slots=True)
class Replay:
    """Packets that left each switch, in order, and those that reached the PS."""

    left: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in BEHIND})
    at_ps: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Packets that left switches."""
        return sum(len(packets) for packets in self.left.values())


def replay(
    arrivals: Mapping[str, Sequence[str]],
    nodes: Mapping[str, str] | None = None,
    *,
    acknowledged: bool = False,
    next_hop: Mapping[tuple[str, str], str] = NEXT,
) -> Replay:
    """Let the workers' packets arrive, S1's and S2's in turn, and follow each packet until it waits or arrives.

    ``nodes`` names the switch of every fragment (GOAT). Without it any switch on the way to the PS may take a fragment
    into its free slot (ATP). A slot is free again when its sum has left (``acknowledged``: the PS's answer is quick),
    or only after the burst, since the answer takes a round trip.
    """
    found = Replay()
    switches = {name: _Switch() for name in BEHIND}
    queues = {name: deque(packets) for name, packets in arrivals.items()}
    inbound: dict[str, deque[Packet]] = {name: deque() for name in BEHIND}
    while any(queues.values()) or any(inbound.values()):
        for name in ("S1", "S2"):
            if queues.get(name):
                text = queues[name].popleft()
                inbound[name].append(Packet(text[0], frozenset({int(text[1:])})))
        for name in BEHIND:
            for packet in [inbound[name].popleft() for _ in range(len(inbound[name]))]:
                out = _process(switches[name], name, packet, nodes, acknowledged)
                if out is None:
                    continue
                found.left[name].append(out.label)
                node = nodes[out.fragment] if nodes is not None and len(out.workers) == 1 else "PS"
                hop = next_hop[name, node]
                if hop == "PS":
                    found.at_ps.append(out.label)
                else:
                    inbound[hop].append(out)
    return found


def _process(
    switch: _Switch, name: str, packet: Packet, nodes: Mapping[str, str] | None, acknowledged: bool
) -> Packet | None:
    """What leaves a switch for a packet that came in; ``None``: it waits in the slot."""
    everyone = BEHIND[name] if nodes is None else frozenset({1, 2, 3, 4})
    if nodes is not None and (nodes[packet.fragment] != name or len(packet.workers) > 1):
        return packet
    if switch.fragment not in ("", packet.fragment) or switch.held:
        return packet
    switch.fragment, switch.workers = packet.fragment, switch.workers | packet.workers
    if switch.workers != everyone:
        return None
    out = Packet(switch.fragment, switch.workers)
    if acknowledged:
        switch.fragment, switch.workers = "", frozenset()
    else:
        switch.held = True
    return out


def network() -> "Graph":
    """The figure's network with room for one fragment of 256 B on each switch."""
    graph = empty_graph()
    for name in ("S1", "S2", "S3"):
        graph.add_node(name, kind="switch", memory=256)
    for name, switch in (("PS", "S3"), ("W1", "S1"), ("W2", "S1"), ("W3", "S2"), ("W4", "S2")):
        graph.add_node(name, kind="server", memory=0)
        graph.add_edge(name, switch)
    graph.add_edges_from([("S1", "S2"), ("S1", "S3"), ("S2", "S3")])
    return graph


def run() -> Outcome:
    """Replay the figure, and let the scheduler find its schedule."""
    nodes = dict(zip(FRAGMENTS, BEHIND, strict=True))
    synchronous = replay(SYNCHRONOUS, acknowledged=True)
    atp, goat = replay(ASYNCHRONOUS), replay(ASYNCHRONOUS, nodes)
    detour = replay(ASYNCHRONOUS, nodes, next_hop=NEXT_WITHOUT_DIRECT_LINK)
    runs = {
        "ATP, synchronous": synchronous,
        "ATP": atp,
        "GOAT": goat,
        "GOAT, no link S1-S2": detour,
    }
    parts = partition([(name, 256) for name in FRAGMENTS], 256)
    instance = from_graph(network(), "PS", ["W1", "W2", "W3", "W4"], parts)
    planned, exact = schedule(instance, 0), solve_exactly(instance)
    # a worker's own link is in the scheduler's cost and not in the figure's
    egress = planned.cost / 256 - 12
    claims = (
        Claim("ATP: fragments at the PS", 7, len(atp.at_ps), "=="),
        Claim("GOAT: fragments at the PS", 3, len(goat.at_ps), "=="),
        Claim("ATP: fragments that leave switches", 17, atp.total, "=="),
        Claim("GOAT: fragments that leave switches", 13, goat.total, "=="),
        Claim("KRGS finds a schedule of this cost", 13, egress, "<="),
        Claim("the exact optimum is this cost", 13, exact.cost / 256 - 12, "=="),
    )
    rows = tuple(
        (name, *(len(its.left[switch]) for switch in BEHIND), its.total, len(its.at_ps), " ".join(its.at_ps))
        for name, its in runs.items()
    )
    table = Table("packets that leave", ("scheme", *BEHIND, "total", "at the PS", "which"), rows)
    notes = (
        "ATP: a slot is free again when the PS has answered, which takes longer than the burst.",
        "17 -> 13 needs the direct link S1-S2; through S3 GOAT's total is ATP's, its load of the PS is not.",
    )
    return Outcome(claims, (table,), (), notes)
