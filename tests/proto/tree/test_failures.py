"""Rounds that fail anywhere and anyhow, tensors and jobs that come and go, and a node that does not grow (one outcome)."""

import gc
import random
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from inanet.coordinator.settings import Settings
from inanet.proto.common.events import PeerSilent, RoundCommitted
from inanet.proto.common.plan import ExponentMode, Fold, NodePlan, Parent, Part, Placement, TensorSpec
from inanet.proto.tree.node import Node
from inanet.proto.tree.rounds import MAX_DEAD
from inanet.proto.tree.slots import MAX_JOBS, MAX_SHARDS_PER_JOB, MAX_TREES, OutOfSlots, State
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.xagg import Kind
from tests.proto.tree.rig import JOB, PARENT, SHARD, TENSOR, Rig, child_at, integers, snapshot
from tests.proto.tree.rig import TREE as TREE_ID
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * 7 + 5
A = TensorSpec("a", "f32", (COUNT,), "sum", ExponentMode.CARRIED)
B = TensorSpec("b", "i32", (900,), "sum", ExponentMode.NONE)
C = TensorSpec("c", "f32", (700,), "max", ExponentMode.NONE)


def arrays_for(spec: TensorSpec, seed: int) -> dict[int, np.ndarray]:
    arrays = float_arrays(spec.elements, 4, seed=seed)
    return {
        rank: (array * 1000).astype(spec.dtype.replace("f", "float").replace("i", "int"))
        for rank, array in arrays.items()
    }


def check(spec: TensorSpec, arrays: dict[int, np.ndarray], seed: int) -> None:
    before = [array.astype(np.float64) for array in arrays_for(spec, seed).values()]
    assert len({array.tobytes() for array in arrays.values()}) == 1
    want = np.max(before, axis=0) if spec.op == "max" else np.sum(before, axis=0)
    np.testing.assert_allclose(arrays[0], want, rtol=0, atol=0.01 if spec is A else 0)


def committed(fabric: VirtualFabric) -> set[int]:
    """Rounds that the root has committed."""
    return {event.round for _, event in fabric.log if isinstance(event, RoundCommitted)}


@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
@pytest.mark.parametrize("seed", range(8))
def test_rounds_fail_at_any_point_and_in_any_order_of_nodes(parents, seed):
    """Failures reach the root, and then the other nodes one by one, while packets fly; hosts go on as soon as they know.
    Other rounds, of this and of other tensors, begun before and after, are right."""
    rng = random.Random(seed)
    fabric = VirtualFabric(parents, ONE_EACH, window=16, wrap=impaired(seed, drop=0.03 * (seed % 2)))
    good: list[tuple[int, TensorSpec, dict[int, np.ndarray], int]] = []
    failing: list[tuple[int, list[str], TensorSpec, dict[int, np.ndarray]]] = []
    owed: dict[str, list[tuple[int, TensorSpec, dict[int, np.ndarray]]]] = {name: [] for name in ONE_EACH}

    def begin(spec: TensorSpec) -> None:
        number = fabric.next_round
        arrays = arrays_for(spec, number)
        fabric.layout(spec)
        fabric.next_round += 1
        for name in ONE_EACH:
            owed[name].append((number, spec, arrays))
        if rng.random() < 0.45:
            failing.append((number, list(fabric.nodes), spec, arrays))
        else:
            good.append((number, spec, arrays, number))

    for _ in range(14):
        begin(rng.choice([A, A, B, C]))
    while any(owed.values()) or failing:
        choice = rng.random()
        if choice < 0.4:
            name = rng.choice(list(ONE_EACH))
            for number, spec, arrays in owed[name][: rng.randint(1, 4)]:
                owed[name].pop(0)
                mine = [arrays[rank] for rank in ONE_EACH[name]]
                fabric.nodes[name].begin(
                    fabric.job, fabric.layout(spec).tensor, number, mine, fabric.clock.now
                )
        elif choice < 0.6 and failing:
            entry = failing[rng.randrange(min(3, len(failing)))]
            number, left, spec, arrays = entry
            # a host hears of the failure after it has begun the round: before that it has nothing to abandon
            able = [n for n in left if n not in owed or all(number != other[0] for other in owed[n])]
            if "ps" in left and number in committed(fabric):
                # too late to fail (one outcome)
                good.append((number, spec, arrays, number))
                left.clear()
            elif able:
                name = "ps" if "ps" in left else rng.choice(able)
                left.remove(name)
                tensor = fabric.layout(spec).tensor
                fabric.nodes[name].fail_round(fabric.job, number, [tensor], fabric.clock.now)
            failing = [entry for entry in failing if entry[1]]
        elif choice < 0.9:
            fabric.step()
        else:
            fabric.clock.advance(0.003)
            for node in fabric.nodes.values():
                if (at := node.timer()) is not None and at <= fabric.clock.now:
                    node.on_timer(fabric.clock.now)
    fabric.run(lambda: all(fabric.done(number) for number, *_ in good), deadline=20.0)
    for _, spec, arrays, data in good:
        check(spec, arrays, data)
    for spec in (A, B, C, A):
        number = fabric.next_round
        arrays = arrays_for(spec, number)
        fabric.all_reduce(spec, arrays, deadline=10.0)
        check(spec, arrays, number)
    fabric.settle()
    for node in fabric.nodes.values():
        for state in node.state.by_row.values():
            assert not state.waiting
            assert not (state.dead and state.data and state.committed)
        assert node.state.jobs[fabric.job].collectives == {}
        assert all(
            tensor.used or not tensor._failed for tensor in node.state.jobs[fabric.job].tensors.values()
        )


def test_a_failed_round_is_not_opened_again_by_a_child_that_has_not_heard():
    rig = Rig()
    values = integers(5)
    rig.node.fail_round(JOB, 6, [TENSOR], rig.now)
    # round 5 is still to come, and not hindered
    rig.feed(*[rig.data(c, f, values[f]) for c in (0, 1) for f in range(5)])
    assert len([s for s in rig.sent() if s.kind is Kind.DATA]) == 5
    rig.node.fail_round(JOB, 5, [TENSOR], rig.now)
    rig.sent()
    rig.feed(rig.data(0, 0, values[0], round=6), (rig.packet(Kind.SENT, round=6), child_at(0)))
    assert [s for s in rig.sent() if s.kind is Kind.DATA] == []
    rig.feed(*[rig.data(c, f, values[f], round=7) for c in (0, 1) for f in range(5)])
    rows = [s.packet for s in rig.sent() if s.kind is Kind.DATA]
    assert [packet.payload for packet in rows] == [(values[f] * np.int32(2)).tobytes() for f in range(5)]
    assert {packet.round for packet in rows} == {7}


def test_failures_of_rounds_that_never_come_are_forgotten():
    rig = Rig()
    for round_ in range(6, 6 + 10 * MAX_DEAD):
        rig.node.fail_round(JOB, round_, [TENSOR], rig.now)
    (state,) = rig.node.state.by_row.values()
    assert len(state.dead) == MAX_DEAD
    rig.feed(rig.data(0, 0, integers(1)[0], round=6 + 10 * MAX_DEAD))
    rig.node.fail_round(JOB, 6 + 10 * MAX_DEAD, [TENSOR], rig.now)
    assert state.dead == set()


def test_what_is_unknown_can_fail_and_be_dropped():
    rig = Rig()
    before = rig.snapshot()
    rig.node.fail_round(99, 5, [TENSOR], rig.now)
    rig.node.fail_round(JOB, 5, [77], rig.now)
    rig.node.drop_layout(JOB, 77)
    rig.node.drop_job(99)
    assert rig.snapshot() == before


# ---------------------------------------------------------------- tensors and jobs


def test_a_tensor_is_dropped_and_laid_out_again_in_the_middle_of_a_round():
    fabric = VirtualFabric(TREE, ONE_EACH, window=8)
    free = {name: node.stats()["slots_free"] for name, node in fabric.nodes.items()}
    for cycle in range(3):
        number = fabric.begin(A, arrays_for(A, cycle))
        for _ in range(3 + cycle):
            fabric.step()
        layout = fabric.layouts.pop(A)
        for node in fabric.nodes.values():
            node.fail_round(fabric.job, number, [layout.tensor], fabric.clock.now)
        fabric.settle(0.1)
        for node in fabric.nodes.values():
            node.drop_layout(fabric.job, layout.tensor)
        assert {name: node.stats()["slots_free"] for name, node in fabric.nodes.items()} == free
        fabric.settle()
        number = fabric.next_round
        arrays = arrays_for(B, number)
        fabric.all_reduce(B, arrays)
        check(B, arrays, number)
        gone = fabric.layouts.pop(B)
        fabric.settle()
        for node in fabric.nodes.values():
            node.drop_layout(fabric.job, gone.tensor)


def test_a_job_is_dropped_with_packets_in_flight_and_its_number_used_again():
    fabric = VirtualFabric(TREE, ONE_EACH, window=8)
    for cycle in range(3):
        fabric.begin(A, arrays_for(A, cycle))
        for _ in range(2 + cycle):
            fabric.step()
        for node in fabric.nodes.values():
            node.drop_job(fabric.job)
            assert (node.jobs, node.stats()["slots_free"]) == (0, node.memory.capacity)
        fabric.step()
        assert sum(node.drops_by_reason()["foreign_job"] for node in fabric.nodes.values()) > 0
        # packets of the old job are still on their way to the new one with the same number
        fabric.begin_again = None
        fabric.key += 1
        fabric.layouts.clear()
        fabric.publish()
    number = fabric.next_round
    arrays = arrays_for(A, number)
    fabric.all_reduce(A, arrays)
    check(A, arrays, number)


def test_a_parent_that_never_answers_is_told_of_until_the_coordinator_believes_it():
    """Each report has the whole time: what was said before counts, or no time would ever be long enough."""
    rig = Rig()
    values = integers(5)
    rig.feed(*[rig.data(c, f, values[f]) for f in range(5) for c in (0, 1)])
    rig.wait(30.0)
    told = [event for event in rig.node.events() if isinstance(event, PeerSilent)]
    assert {(event.job, event.name) for event in told} == {(JOB, "up")}
    seconds = [event.seconds for event in told]
    assert 5.0 < seconds[0] < 6.0
    assert all(5.0 < later - earlier < 6.0 for earlier, later in pairwise(seconds))
    assert seconds[1] >= next(field.default for field in fields(Settings) if field.name == "silence")
    # one that answers in between begins anew
    rig.feed((rig.packet(Kind.LOST, host=8, values=np.full(32, -1)), PARENT))
    rig.wait(9.0)
    (again,) = [event for event in rig.node.events() if isinstance(event, PeerSilent)]
    assert again.seconds < 7.0


def test_the_driver_holds_a_half_sent_burst_while_the_plan_changes():
    """A full device pauses ``transmit`` anywhere: links, layouts and jobs may be gone when it goes on."""
    for act in ("layout", "job", "plan"):
        rig = Rig(count=300, window=300)
        values = integers(1)[0]
        rig.feed(*[rig.data(c, f, values) for f in range(300) for c in (0, 1)])
        (lost,) = [rig.packet(Kind.LOST, host=8, values=np.full(32, -1))]
        list(rig.node.transmit(rig.now))
        # by then all of it has arrived or is lost
        rig.now += 1.0
        rig.feed((lost, 0x0A00_0001 << 16 | 7000))
        paused = rig.node.transmit(rig.now)
        next(paused)
        if act == "layout":
            rig.node.drop_layout(JOB, TENSOR)
        elif act == "job":
            rig.node.drop_job(JOB)
        else:
            rig.node.apply(rig.plan(6, parent=0x0A00_0009 << 16 | 1), rig.now, attach=[2])
            rig.node.drop_layout(JOB, TENSOR)
        rest = list(paused)
        assert all(len(transmission) for transmission in rest)


# ---------------------------------------------------------------- limits


def test_a_tensor_that_does_not_fit_leaves_nothing_behind():
    fabric = VirtualFabric(TREE, ONE_EACH, capacity=40)
    small, large = spec_of(256 * 30), TensorSpec("l", "f32", (256 * 39,), "sum", ExponentMode.PROLOGUE)
    layout = fabric.layout(small)
    node = fabric.nodes["a0"]
    before = snapshot(node)
    with pytest.raises(OutOfSlots, match=r"needs 41028 B of slots in one piece; 9468 B of 42080 B are free"):
        fabric.layout(large)
    assert snapshot(node) == before
    node.drop_layout(fabric.job, layout.tensor)
    # the data fits now, the exponents do not
    with pytest.raises(OutOfSlots):
        node.add_layout(fabric.job, VirtualFabric(STAR, ONE_EACH).layout(spec_of(256 * 40)))
    assert node.stats()["slots_free"] == 40
    assert (node.memory.shard_row >= 0).sum() == 0


def plan_of(job: int, trees: int = 1) -> NodePlan:
    return NodePlan(job, 1, 5, 1, tuple(Placement(i, Parent("p", 1 << 16, 1, 4)) for i in range(trees)))


def test_jobs_and_trees_beyond_the_tables_are_refused_and_leave_nothing_behind():
    node = Node("n", 1)
    for job in range(MAX_JOBS):
        node.apply(plan_of(job * 1000), 0.0)
    before = snapshot(node)
    with pytest.raises(OutOfSlots, match="65: this node already serves 64 jobs"):
        node.apply(plan_of(65), 0.0)
    assert snapshot(node) == before
    node.drop_job(0)
    with pytest.raises(OutOfSlots, match="job 65: this node already takes part in 256 trees"):
        node.apply(plan_of(65, MAX_TREES - MAX_JOBS + 2), 0.0)
    assert node.jobs == MAX_JOBS - 1
    node.apply(plan_of(65, MAX_TREES - MAX_JOBS + 1), 0.0)
    assert node.jobs == MAX_JOBS


def test_shard_numbers_beyond_the_table_are_refused():
    rig = Rig()
    with pytest.raises(OutOfSlots, match="too many tensors"):
        rig.node.memory.add_shard(JOB, MAX_SHARDS_PER_JOB, 0, 0, 1, 0)


def test_control_packets_outlive_a_device_that_takes_nothing_for_a_long_time():
    rig = Rig(count=1024 * 3)
    held = []
    for _ in range(700):
        rig.feed(
            (rig.packet(Kind.READY, round=9), child_at(0)),
            (rig.packet(Kind.READY, round=9, host=2), child_at(1)),
        )
        held += list(rig.node.transmit(rig.now))
    assert len(held) == 1400
    packets = {(t.destination, t.packet(0)) for t in held}
    assert len(packets) == 2
    assert all(packet[4] == 1 << (destination & 0xFFFF) - 8000 for destination, packet in packets)


# ---------------------------------------------------------------- growth


def sizes(fabric: VirtualFabric) -> dict[str, list[int]]:
    """Everything in a node that could grow."""
    out = {}
    for name, node in fabric.nodes.items():
        links = [
            link for job in node.state.jobs.values() for tree in job.trees.values() for link in tree.links()
        ]
        out[name] = [
            len(node.state.jobs),
            len(node.state.by_row),
            len(node.state.events),
            len(node.slots.reported.rows),
            len(node.state.outbox.take()),
            *(len(job.collectives) for job in node.state.jobs.values()),
            *(len(job.shards) for job in node.state.jobs.values()),
            *(len(link.resend) + len(link.queued) for link in links),
            *(len(state.waiting) + len(state.dead) for state in node.state.by_row.values()),
            len(node.memory._free_slots),
            len(node.memory._free_groups),
            len(node.memory._free_shard_rows),
        ]
    return out


def test_hundreds_of_rounds_leave_no_trace():
    spec = TensorSpec("t", "i32", (200,), "sum", ExponentMode.NONE)
    floats = spec_of(300)
    fabric = VirtualFabric({"ps": None, "a0": "ps", "w0": "a0", "w1": "ps"}, {"w0": [0], "w1": [1]}, window=8)
    arrays = {rank: np.ones(200, np.int32) for rank in range(2)}
    values = float_arrays(300, 2)

    def rounds(count: int) -> None:
        for round_ in range(count):
            number = fabric.begin(spec, arrays)
            also = fabric.begin(floats, values)
            if round_ % 10 == 0:
                for node in fabric.nodes.values():
                    node.fail_round(fabric.job, number, [fabric.layout(spec).tensor], fabric.clock.now)
            fabric.run(lambda n=number, a=also, r=round_: fabric.done(a) and (r % 10 == 0 or fabric.done(n)))
            values[0][:] = values[1][:] = 1.0
            fabric.log.clear()
        fabric.settle(1.0)

    rounds(40)
    before = sizes(fabric)
    gc.collect()
    objects = len(gc.get_objects())
    rounds(360)
    assert sizes(fabric) == before
    gc.collect()
    assert len(gc.get_objects()) - objects < 200
    assert all(node.stats()["slots_free"] == fabric.capacity - 5 for node in fabric.nodes.values())


def test_dropped_shards_are_free_slots_in_one_piece():
    rig = Rig(count=4096)
    assert rig.node.memory.free_slots() == 0
    rig.node.drop_layout(JOB, TENSOR)
    assert rig.node.memory._free_slots == [(0, 4096)]
    assert rig.node.memory.shard_row[0, SHARD] == -1
    assert (rig.node.memory.state == State.FREE).all()


def test_a_parent_that_takes_everything_is_not_silent_however_often_exponents_pause():
    """It says nothing to a pause in which all has come; credit shows that it lives."""
    rig = Rig(count=400, children=1, window=512, fold=Fold.MAX8)
    (state,) = rig.node.state.by_row.values()
    state.shard = replace(state.shard, part=Part.EXPONENTS)
    zeros, taken, pauses = np.zeros(256, np.int32), 0, 0
    for fragment in range(300):
        rig.feed(rig.data(0, fragment, zeros))
        sent = [one for one in rig.wait(0.05) if one.destination == PARENT]
        taken += sum(one.kind is Kind.DATA for one in sent)
        pauses += sum(one.kind is Kind.SENT for one in sent)
        rig.feed(
            (rig.packet(Kind.CREDIT, host=8, gradient=taken, values=np.array([TREE_ID], np.int32)), PARENT)
        )
        assert not [event for event in rig.node.events() if isinstance(event, PeerSilent)]
    assert pauses
