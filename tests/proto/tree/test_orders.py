"""Results do not depend on the order, repetition and batching of packets, nor on how many rounds are on their way."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.phy.fault import FaultInjector
from inanet.phy.wrapper import Wrapper
from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, Fold, TensorSpec
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.xagg import Flag, Kind
from tests.proto.tree.rig import PARENT, Rig, child_at, integers
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 4


def everything(rig: Rig, children: int, values: list[np.ndarray]) -> list[tuple[bytes, int]]:
    """All contributions of a round; child c sends (c + 1) times the values."""
    return [rig.data(c, f, values[f] * np.int32(c + 1)) for c in range(children) for f in range(COUNT)]


def totals(children: int, values: list[np.ndarray], fold: Fold) -> list[bytes]:
    if fold is Fold.SUM:
        return [(value * np.int32(children * (children + 1) // 2)).tobytes() for value in values]
    return [np.maximum(value, value * np.int32(children)).tobytes() for value in values]


shuffled = st.randoms(use_true_random=False)


@settings(max_examples=40)
@given(shuffled, st.booleans(), st.integers(1, 6), st.sampled_from([Fold.SUM, Fold.MAX32]))
def test_order_repetition_and_batching_do_not_matter(rng, root, children, fold):
    values = integers(COUNT, seed=children)
    rig = Rig(root=root, children=children, count=COUNT, fold=fold)
    packets = everything(rig, children, values)
    packets += rng.sample(packets, rng.randint(0, len(packets)))
    rng.shuffle(packets)
    sent = []
    while packets:
        size = rng.randint(1, 2 * COUNT)
        rig.feed(*packets[:size])
        packets = packets[size:]
        if rng.random() < 0.5:
            sent += rig.sent()
    sent += rig.sent()
    rows = [s for s in sent if s.kind in (Kind.DATA, Kind.RESULT)]
    assert {s.kind for s in rows} == {Kind.RESULT if root else Kind.DATA}
    assert {s.destination for s in rows} == ({child_at(c) for c in range(children)} if root else {PARENT})
    want = totals(children, values, fold)
    assert all(s.packet.payload == want[s.packet.gradient] for s in rows)
    for destination in {s.destination for s in rows}:
        mine = [s.packet for s in rows if s.destination == destination]
        assert {packet.gradient for packet in mine} == set(range(COUNT))
        # the last of its group to leave for the first time says so (emission groups)
        ended = {packet.gradient for packet in mine if packet.flags & Flag.GROUP_END}
        assert len(ended) == 1
        # an answer to a duplicate may overtake what has not left yet
        assert ended == {mine[-1].gradient} or rig.drops
    assert set(rig.drops) <= {"duplicate"}


@settings(max_examples=40)
@given(shuffled)
def test_results_reach_children_in_any_order_and_once(rng):
    rig = Rig(count=COUNT)
    values = integers(COUNT)
    rig.feed(*everything(rig, 2, values))
    rig.sent()
    results = [(rig.packet(Kind.RESULT, host=0, gradient=f, values=values[f]), PARENT) for f in range(COUNT)]
    results += results[:2]
    rng.shuffle(results)
    for result in results:
        rig.feed(result)
    rows = [s for s in rig.sent() if s.kind is Kind.RESULT]
    assert sorted((s.destination, s.packet.gradient) for s in rows) == [
        (child_at(c), f) for c in (0, 1) for f in range(COUNT)
    ]
    assert all(s.packet.payload == values[s.packet.gradient].tobytes() and s.packet.host == 0 for s in rows)
    assert rig.drops == {"duplicate": 2}


def test_32_children_at_one_node_and_their_sum_does_not_wrap():
    values = [np.full(256, 2**21 - 1, np.int32) for _ in range(COUNT)]
    rig = Rig(root=True, children=32, count=COUNT)
    rig.feed(*everything(rig, 32, values))
    rows = [s for s in rig.sent() if s.kind is Kind.RESULT]
    assert len(rows) == 32 * COUNT
    assert {s.packet.payload for s in rows} == {np.full(256, (2**21 - 1) * 528, np.int32).tobytes()}


def test_32_workers_under_one_root():
    parents = {"ps": None, **{f"w{i}": "ps" for i in range(32)}}
    fabric = VirtualFabric(parents, {f"w{i}": [i] for i in range(32)}, window=16)
    for round_ in range(3):
        arrays = float_arrays(256 * 20, 32, seed=round_)
        exact = sum(array.astype(np.float64) for array in arrays.values())
        fabric.all_reduce(spec_of(256 * 20), arrays)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        np.testing.assert_allclose(arrays[9], exact, atol=2e-5)


# ---------------------------------------------------------------- many rounds at once


def start_many(fabric: VirtualFabric, specs: list[TensorSpec], rounds: int, seed: int) -> dict[int, tuple]:
    """Begin ``rounds`` rounds of every tensor at once; number to (tensor, arrays, copy of the arrays)."""
    running = {}
    for round_ in range(rounds):
        for index, spec in enumerate(specs):
            arrays = float_arrays(spec.elements, 4, seed=seed + 100 * round_ + index)
            if spec.dtype == "i32":
                arrays = {rank: (array * 1000).astype(np.int32) for rank, array in arrays.items()}
            copy = {rank: array.copy() for rank, array in arrays.items()}
            running[fabric.begin(spec, arrays)] = (index, arrays, copy)
    return running


def several() -> list[TensorSpec]:
    return [
        TensorSpec("a", "f32", (256 * 30,), "sum", ExponentMode.CARRIED),
        TensorSpec("b", "f32", (5,), "mean", ExponentMode.CARRIED),
        TensorSpec("c", "i32", (128 * 20 + 1,), "sum", ExponentMode.NONE),
        TensorSpec("d", "f32", (256 * 9,), "max", ExponentMode.NONE),
        TensorSpec("e", "f32", (256 * 17,), "sum", ExponentMode.FIXED, 1e6),
        TensorSpec("f", "f32", (256 * 11,), "sum", ExponentMode.PROLOGUE),
    ]


def results_of(fabric: VirtualFabric, rounds: int) -> list[bytes]:
    running = start_many(fabric, several(), rounds, seed=3)
    fabric.run(lambda: all(fabric.done(number) for number in running))
    for index, arrays, before in running.values():
        assert len({array.tobytes() for array in arrays.values()}) == 1
        if several()[index].op == "sum":
            exact = sum(array.astype(np.float64) for array in before.values())
            np.testing.assert_allclose(arrays[0], exact, rtol=0, atol=1e-4)
    return [arrays[0].tobytes() for _, arrays, _ in running.values()]


@functools.cache
def one_by_one() -> list[bytes]:
    """Results of four rounds of six tensors, each begun when the one before was over."""
    fabric = VirtualFabric(STAR, ONE_EACH)
    want = []
    for round_ in range(4):
        for index, spec in enumerate(several()):
            arrays = float_arrays(spec.elements, 4, seed=3 + 100 * round_ + index)
            if spec.dtype == "i32":
                arrays = {rank: (array * 1000).astype(np.int32) for rank, array in arrays.items()}
            fabric.all_reduce(spec, arrays)
            want.append(arrays[0].tobytes())
    return want


@pytest.mark.parametrize("parents", [STAR, TREE, DEEP], ids=["star", "tree", "deep"])
def test_rounds_of_one_tensor_may_be_begun_before_the_last_is_over(parents):
    """Four rounds of six tensors, all begun at once, equal the same rounds one after the other, bit for bit."""
    want = one_by_one()
    assert results_of(VirtualFabric(parents, ONE_EACH, window=40), 4) == want
    impairments = {"drop": 0.1, "duplicate": 0.1, "reorder": 0.1, "corrupt": 0.05}
    assert results_of(VirtualFabric(parents, ONE_EACH, window=40, wrap=impaired(5, **impairments)), 4) == want


@pytest.mark.parametrize("slow", ["w0", "w3"])
def test_workers_that_run_ahead_choose_the_same_exponents(slow):
    """One worker begins its second round when the first is over, the others before it has even begun: nobody may decide
    by what it knows at that moment whether exponents are carried or agreed on first (exponent agreement)."""
    spec = spec_of(256 * 20)
    fabric = VirtualFabric(TREE, ONE_EACH)
    fast = [worker for worker in ONE_EACH if worker != slow]
    first, second = float_arrays(256 * 20, 4, seed=1), float_arrays(256 * 20, 4, seed=2)
    fabric.layout(spec)
    for number, arrays in ((1, first), (2, second)):
        fabric.next_round = number
        fabric.begin(spec, arrays, fast)
    fabric.settle()
    fabric.next_round = 1
    fabric.begin(spec, first, [slow])
    fabric.run(lambda: fabric.done(1))
    fabric.settle()
    fabric.next_round = 2
    fabric.begin(spec, second, [slow])
    fabric.run(lambda: fabric.done(2))
    clean = VirtualFabric(STAR, ONE_EACH)
    for seed, arrays in ((1, first), (2, second)):
        want = float_arrays(256 * 20, 4, seed=seed)
        clean.all_reduce(spec, want)
        assert {array.tobytes() for array in arrays.values()} == {want[0].tobytes()}


class Loses(Wrapper):
    """Spoils the first six packets of a kind that a device receives."""

    def __init__(self, device, kind: Kind) -> None:
        super().__init__(device)
        self.kind, self.left = kind, 6

    def receive(self):
        batch = self._device.receive()
        for i in range(len(batch) if batch is not None else 0):
            if self.left and batch.arena[batch.offsets[i] + 1] & 15 == self.kind:
                batch.arena[batch.offsets[i] + 20] ^= 1
                self.left -= 1
        return batch


@pytest.mark.parametrize("lost", [Kind.OPEN, Kind.DONE, Kind.READY, Kind.SENT, Kind.CREDIT, Kind.LOST])
def test_the_first_packets_of_a_kind_are_lost_on_every_hop(lost):
    """Nothing waits for one control packet for ever."""
    losers = {}

    def wrap(device, name, clock):
        losers[name] = Loses(FaultInjector(device, len(losers), clock, drop=0.1), lost)
        return losers[name]

    fabric = VirtualFabric(DEEP, ONE_EACH, wrap=wrap, window=8)
    spec = spec_of(256 * 12)
    numbers = []
    for round_ in range(4):
        arrays = float_arrays(256 * 12, 4, seed=round_)
        numbers.append(fabric.begin(spec, arrays))
        if round_ % 2:
            fabric.run(lambda: all(fabric.done(number) for number in numbers), deadline=20)
            fabric.settle()
    assert sum(6 - loser.left for loser in losers.values()) >= 6


def test_rounds_wrap_in_a_whole_fabric():
    fabric = VirtualFabric(TREE, ONE_EACH)
    spec = spec_of(256 * 3)
    fabric.next_round = first = 2**32 - 3
    form = fabric.layout(spec)
    for node in fabric.nodes.values():
        node.drop_layout(fabric.job, form.tensor)
        node.add_layout(fabric.job, form, last_round=first - 1)
    numbers = []
    for round_ in range(6):
        arrays = float_arrays(256 * 3, 4, seed=round_)
        exact = sum(array.astype(np.float64) for array in arrays.values())
        numbers.append(fabric.begin(spec, arrays))
        if round_ % 2:
            fabric.run(lambda: all(fabric.done(number) for number in numbers), deadline=5)
            np.testing.assert_allclose(arrays[1], exact, atol=2e-6)
    done = [event.round for name, event in fabric.log if name == "w0" and isinstance(event, RoundDone)]
    assert done == list(range(first, first + 6))


# ---------------------------------------------------------------- senders that pause


def _asked(sent, child: int) -> list[int]:
    """How many fragments each LOST for a child names."""
    return [
        int(np.unpackbits(np.frombuffer(one.packet.payload, np.uint8)).sum())
        for one in sent
        if one.kind is Kind.LOST and one.destination == child_at(child)
    ]


def test_a_sender_that_pauses_is_told_that_nothing_is_lost_when_it_asks_again():
    """What has not left yet is not asked for, however long the pause is."""
    rig = Rig(count=5)
    values = integers(5)
    rig.feed(rig.data(0, 0, values[0]), rig.data(0, 1, values[1]))
    rig.feed((rig.packet(Kind.SENT, values=np.array([2], np.int32)), child_at(0)))
    assert _asked(rig.wait(1.0), 0) == []
    rig.feed((rig.packet(Kind.SENT, values=np.array([2], np.int32)), child_at(0)))
    assert _asked(rig.wait(3.0), 0) == [0]
    rig.feed(*(rig.data(0, k, values[k]) for k in range(2, 5)))
    rig.feed((rig.packet(Kind.SENT, values=np.array([5], np.int32)), child_at(0)))
    assert {one.kind for one in rig.wait(1.0) if one.destination == child_at(0)} == {Kind.CREDIT, Kind.DONE}


def test_what_a_sender_has_lost_before_it_pauses_is_asked_for_until_it_comes():
    rig = Rig(count=5)
    values = integers(5)
    rig.feed(rig.data(0, 0, values[0]))
    rig.feed((rig.packet(Kind.SENT, values=np.array([2], np.int32)), child_at(0)))
    asked = _asked(rig.wait(0.2), 0)
    assert len(asked) > 1
    assert set(asked) == {4}
    rig.feed(rig.data(0, 1, values[1]))
    rig.wait(0.6)
    assert _asked(rig.wait(3.0), 0) == []


def test_a_restart_that_is_lost_is_said_again_beside_other_traffic():
    """What comes from a child may be another tensor: a restarted group waits for it no longer than the longest timeout."""
    rig = Rig(root=True, count=40, window=512)
    values = integers(2)
    rig.feed(rig.data(0, 0, values[0]), rig.data(1, 0, values[1]), rig.data(0, 1, values[0]))
    rig.sent()
    (state,) = rig.node.state.by_row.values()
    rig.node.control.misfits(state, np.array([1]), np.array([100]), rig.now)
    assert Kind.RESTART in {one.kind for one in rig.sent()}
    again = []
    for _ in range(60):
        rig.feed(rig.data(0, 0, values[0]), rig.data(1, 0, values[1]))
        again += [one for one in rig.wait(0.015) if one.kind in (Kind.LOST, Kind.RESTART)]
    assert {one.kind for one in again} == {Kind.LOST, Kind.RESTART}
    assert {one.destination for one in again} == {child_at(0), child_at(1)}
