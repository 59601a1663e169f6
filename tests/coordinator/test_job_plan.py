"""Ids over plan versions (re-parenting): whoever dies, whatever comes late or twice, every leaf counts exactly once."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.coordinator.job_plan import JobPlan, PlanError
from inanet.coordinator.receive_buffers import Destination, ReceiveBuffers
from inanet.messages.control import Plan
from inanet.planning.topology import Topology
from inanet.proto.common.plan import NodePlan, Placement

WIDE = Topology(
    roots=("ps",),
    aggregators={"a0": "ps", "a1": "ps"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("ps",)},
)
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "left": "top", "right": "top", "low": "left"},
    workers={"w0": ("low",), "w1": ("low",), "w2": ("left",), "w3": ("right",), "w4": ("top",)},
)


def destination(name: str) -> Destination:
    return Destination(9000 + len(name), 10)


def plan_for(topology: Topology) -> JobPlan:
    plan = JobPlan(7, 99, len(topology.workers), topology.ancestors)
    plan.advance(topology.trees(topology.workers))
    return plan


def place(plan: JobPlan, name: str) -> Placement:
    (placement,) = plan.view(name, destination).placements
    return placement


def bits(plan: JobPlan, name: str) -> dict[str, int]:
    return {child.name: child.bit for child in place(plan, name).children}


def retired(plan: JobPlan, name: str) -> dict[int, int]:
    return {gone.bit: gone.mask for gone in place(plan, name).retired}


def test_the_first_version_numbers_children_by_name() -> None:
    plan = plan_for(WIDE)
    assert plan.version == 1
    assert bits(plan, "ps") == {"a0": 1, "a1": 2, "w3": 4}
    assert bits(plan, "a0") == {"w0": 1, "w1": 2}
    above = place(plan, "w1").parent
    assert above is not None
    assert (above.name, above.bit) == ("a0", 2)
    assert place(plan, "w1").children == ()
    assert place(plan, "ps").parent is None


def test_a_lost_child_retires_and_stands_for_its_heirs() -> None:
    plan = plan_for(WIDE)
    plan.advance(WIDE.trees(WIDE.workers, {"a0"}))
    assert bits(plan, "ps") == {"a1": 2, "w0": 8, "w1": 16, "w3": 4}
    assert retired(plan, "ps") == {1: 24}
    assert {child.name: child.since for child in place(plan, "ps").children} == {
        "a1": 1,
        "w3": 1,
        "w0": 2,
        "w1": 2,
    }
    assert plan.retires


def test_cascade_child_first() -> None:
    plan = plan_for(DEEP)
    plan.advance(DEEP.trees(DEEP.workers, {"low"}))
    assert retired(plan, "left") == {1: 4 | 8}
    plan.advance(DEEP.trees(DEEP.workers, {"low", "left"}))
    # what left had sent to top stands for all that came from it, wherever they were meanwhile
    heirs = bits(plan, "top")
    assert retired(plan, "top") == {1: heirs["w0"] | heirs["w1"] | heirs["w2"]}


def test_cascade_heir_retires_too() -> None:
    plan = plan_for(DEEP)
    plan.advance(DEEP.trees(DEEP.workers, {"left"}))
    heirs = bits(plan, "top")
    assert retired(plan, "top") == {1: heirs["low"] | heirs["w2"]}
    plan.advance(DEEP.trees(DEEP.workers, {"left", "low"}))
    now = bits(plan, "top")
    assert retired(plan, "top") == {
        1: now["w0"] | now["w1"] | now["w2"],
        heirs["low"]: now["w0"] | now["w1"],
    }


def test_ids_are_free_again_when_their_version_is_settled() -> None:
    plan = plan_for(WIDE)
    plan.advance(WIDE.trees(WIDE.workers, {"a0"}))
    plan.advance(WIDE.trees(WIDE.workers, {"a0"}), settled=1)
    assert retired(plan, "ps") == {1: 24}
    plan.advance(WIDE.trees(WIDE.workers, {"a0", "a1"}), settled=2)
    assert retired(plan, "ps") == {2: 1}
    assert bits(plan, "ps") == {"w0": 8, "w1": 16, "w2": 1, "w3": 4}


def test_nothing_retires_while_nothing_is_on_its_way() -> None:
    plan = plan_for(WIDE)
    plan.advance(WIDE.trees(WIDE.workers, {"a0"}))
    plan.advance(WIDE.trees(WIDE.workers), quiet=True)
    assert retired(plan, "ps") == {}
    assert bits(plan, "ps") == {"a0": 1, "a1": 2, "w3": 4}
    assert not plan.retires


def test_running_out_of_ids_names_who_cannot_move_and_changes_nothing() -> None:
    topology = Topology(
        roots=("ps",),
        aggregators={"a": "ps", "b": "ps"},
        workers={f"w{index:02d}": ("a" if index < 16 else "b",) for index in range(31)},
    )
    plan = plan_for(topology)
    plan.advance(topology.trees(topology.workers, {"a"}))
    with pytest.raises(
        PlanError, match=r"'ps' cannot take over 'w16', .* and 'w30': 16 of its 32 ids .* 2 to"
    ):
        plan.advance(topology.trees(topology.workers, {"a", "b"}))
    assert plan.version == 2
    plan.advance(topology.trees(topology.workers, {"a", "b"}), settled=2)
    assert len(bits(plan, "ps")) == 31


def test_windows_share_a_receive_buffer_over_trees_and_jobs() -> None:
    buffers = ReceiveBuffers()
    buffers.declare(1, {9000: 3})
    buffers.declare(2, {9000: 2, 9001: 1})
    assert buffers.destination(9000, 100) == Destination(9000, 20)
    assert buffers.destination(9001, 100) == Destination(9001, 100)
    assert buffers.destination(9002, 100) == Destination(9002, 100)
    assert buffers.destination(9000, 2).window == 1
    before = buffers.generation
    buffers.withdraw(2)
    assert buffers.destination(9000, 99).window == 33
    assert buffers.generation == before + 1


@dataclass(frozen=True)
class Packet:
    to: str
    bit: int
    plan: int
    leaves: tuple[str, ...]


@dataclass
class ModelNode:
    """One slot of one round at one node, by re-parenting's rules and nothing else."""

    name: str
    own: tuple[str, ...]
    plan: NodePlan
    bitmap: int = 0
    sum: Counter[str] = field(default_factory=Counter)
    todo: list[NodePlan] = field(default_factory=list)

    @property
    def place(self) -> Placement:
        return self.plan.placements[0]

    def stands_for(self) -> int:
        return self.bitmap | _or([gone.mask for gone in self.place.retired if gone.bit & self.bitmap])

    def receive(self, packet: Packet) -> None:
        child = next((c for c in self.place.children if c.bit == packet.bit), None)
        if packet.plan > self.plan.version or child is None or packet.plan < child.since:
            return
        if not packet.bit & self.stands_for():
            self.bitmap |= packet.bit
            self.sum.update(packet.leaves)

    def contribution(self) -> Packet | None:
        """What it sends to its parent: nothing before its whole leaf set is in it."""
        live = _or([child.bit for child in self.place.children])
        if self.place.parent is None or self.stands_for() & live != live:
            return None
        leaves = (*self.own, *self.sum.elements())
        return Packet(self.place.parent.name, self.place.parent.bit, self.plan.version, tuple(sorted(leaves)))

    @property
    def complete(self) -> bool:
        live = _or([child.bit for child in self.place.children])
        return self.stands_for() & live == live


def _or(values: list[int]) -> int:
    result = 0
    for value in values:
        result |= value
    return result


@pytest.mark.parametrize("topology", [WIDE, DEEP], ids=["wide", "deep"])
@settings(max_examples=150)
@given(data=st.data())
def test_every_leaf_counts_exactly_once(topology: Topology, data: st.DataObject) -> None:
    plan = plan_for(topology)
    nodes = {
        name: ModelNode(name, (name,) if name in topology.workers else (), plan.view(name, destination))
        for name in plan.nodes()
    }
    flying: list[Packet] = []
    absent: set[str] = set()

    def step(kind: str) -> None:
        if kind == "send":
            packet = nodes[data.draw(st.sampled_from(sorted(nodes)))].contribution()
            if packet is not None:
                flying.append(packet)
        elif kind == "deliver" and flying:
            index = data.draw(st.integers(0, len(flying) - 1))
            # duplicates: a packet may stay on the wire after it has been delivered
            packet = flying[index] if data.draw(st.booleans()) else flying.pop(index)
            if packet.to in nodes:
                nodes[packet.to].receive(packet)
        elif kind == "plan":
            node = nodes[data.draw(st.sampled_from(sorted(nodes)))]
            if node.todo:
                node.plan = node.todo.pop(0)
        elif kind == "kill":
            alive = sorted(set(topology.aggregators) & set(nodes))
            if alive:
                victim = data.draw(st.sampled_from(alive))
                absent.add(victim)
                del nodes[victim]
                plan.advance(topology.trees(topology.workers, absent))
                for name, node in nodes.items():
                    node.todo.append(plan.view(name, destination))

    kinds = st.sampled_from(["send"] * 6 + ["deliver"] * 8 + ["plan"] * 3 + ["kill"])
    for kind in data.draw(st.lists(kinds, max_size=80)):
        step(kind)
        assert all(count == 1 for count in nodes["ps"].sum.values())

    for node in nodes.values():
        node.plan = node.todo[-1] if node.todo else node.plan
    for _ in range(8):
        for node in list(nodes.values()):
            packet = node.contribution()
            if packet is not None:
                nodes[packet.to].receive(packet)
    for packet in flying:
        if packet.to in nodes:
            nodes[packet.to].receive(packet)
    assert nodes["ps"].complete
    assert nodes["ps"].sum == Counter(list(topology.workers))


def test_views_pass_the_limits_of_the_wire() -> None:
    for topology in (WIDE, DEEP):
        plan = plan_for(topology)
        for name in plan.nodes():
            view = plan.view(name, destination)
            assert Plan(plan=view).plan == view
