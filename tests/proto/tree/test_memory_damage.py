"""Linear checksum: a bit that flips in a node's memory is found before it reaches a result, and what it spoilt is fetched again."""

import numpy as np
import pytest

from inanet.proto.common.encoding import MISFIT
from inanet.proto.common.plan import ExponentMode, Fold, TensorSpec
from inanet.proto.tree.slots import ROW, ShardColumn, State
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind
from tests.proto.tree.rig import PARENT, Rig, child_at, integers
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import ONE_EACH, TREE, spec_of

COUNT = 256 * 9 + 3
PLACES = [
    ("a0", State.COLLECT),
    ("a0", State.SENT),
    ("a0", State.RESULT),
    ("ps", State.COLLECT),
    ("ps", State.RESULT),
    ("w0", State.SENT),
    ("w0", State.RESULT),
]
SPECS = {
    "carried": spec_of(COUNT),
    "prologue": spec_of(COUNT, mode=ExponentMode.PROLOGUE),
    "fixed": spec_of(COUNT, mode=ExponentMode.FIXED),
    "integer": TensorSpec("t", "i32", (COUNT // 2,), "sum", ExponentMode.NONE),
}


def arrays_of(spec: TensorSpec, seed: int) -> dict[int, np.ndarray]:
    arrays = float_arrays(spec.elements, 4, seed=seed)
    if spec.dtype == "i32":
        return {rank: (array * 1e6).astype(np.int32) for rank, array in arrays.items()}
    # a block that no longer fits in the second round
    arrays[1][:256] *= np.float32(1 + 5000 * (seed % 2))
    return arrays


@pytest.fixture(scope="module", params=SPECS)
def clean(request) -> tuple[TensorSpec, list[bytes]]:
    """A tensor, and its results in two rounds without damage."""
    spec = SPECS[request.param]
    fabric = VirtualFabric(TREE, ONE_EACH)
    return spec, [fabric.all_reduce(spec, arrays_of(spec, seed))[0].tobytes() for seed in range(2)]


class Damage:
    """Flips one bit of a random row in a certain state, the first time there is one after ``skip`` chances.

    Rows of maxima (exponents) are left alone while they collect: only sums have a checksum that adds up.
    """

    def __init__(self, fabric: VirtualFabric, name: str, state: State, rng: np.random.Generator) -> None:
        self.fabric, self.name, self.state, self.rng = fabric, name, state, rng
        self.skip = int(rng.integers(0, 3))
        self.done = False

    def __call__(self, round_: int) -> None:
        if self.done:
            return
        memory = self.fabric.nodes[self.name].memory
        collect = self.state is State.COLLECT
        exact = (
            (memory.state == self.state)
            & (memory.round == round_)
            & ~(collect & (memory.misfit & MISFIT != 0))
        )
        slots = np.flatnonzero(exact)
        if collect:
            rows = [memory.shard_row[0, shard] for shard in range(2)]
            data = next(row for row in rows if row >= 0 and memory.shards[row, ShardColumn.FOLD] == Fold.SUM)
            first, count = memory.shards[data, ShardColumn.SLOT0], memory.shards[data, ShardColumn.COUNT]
            slots = slots[(slots >= first) & (slots < first + count)]
        if len(slots) == 0:
            return
        self.skip -= 1
        if self.skip >= 0:
            return
        header = not collect and self.rng.random() < 0.3
        word = int(self.rng.integers(0, 6)) if header else int(self.rng.integers(6, ROW))
        flip_bit(memory.rows, int(self.rng.choice(slots)), word, int(self.rng.integers(0, 32)))
        self.done = True


def flip_bit(rows: np.ndarray, slot: int, word: int, bit: int) -> None:
    rows.view(np.uint32)[slot, word] ^= np.uint32(1 << bit)


def total(fabric: VirtualFabric, *names: str) -> int:
    return sum(figures.get(name, 0) for figures in fabric.figures().values() for name in names)


@pytest.mark.parametrize(("name", "state"), PLACES, ids=[f"{n}-{s.name.lower()}" for n, s in PLACES])
def test_one_flipped_bit_changes_no_result(name, state, clean):
    spec, want = clean
    found = hits = 0
    for seed in range(2):
        rng = np.random.default_rng([seed, *name.encode(), state])
        fabric = VirtualFabric(TREE, ONE_EACH, window=4, wrap=impaired(seed, drop=0.1))
        damage = Damage(fabric, name, state, rng)
        for round_ in range(2):
            arrays = arrays_of(spec, round_)
            number = fabric.begin(spec, arrays)

            def until(number=number, round_=round_, fabric=fabric, damage=damage) -> bool:
                if round_ == 1:
                    damage(number)
                return fabric.done(number)

            fabric.run(until)
            assert {array.tobytes() for array in arrays.values()} == {want[round_]}, (seed, round_)
        hits += damage.done
        reasons = ("drop_bad_checksum", "drop_bad_tag", "drop_bad_magic", "drop_bad_type", "drop_foreign_job")
        found += total(fabric, "corrupt_slots", *reasons, "drop_short", "drop_oversized")
    # a partial sum is always checked when it is complete, another row only if it is asked for again
    assert hits > 0
    assert found > 0 or state is not State.COLLECT


def test_every_word_of_a_partial_sum_is_guarded():
    """Exhaustive over the words, a bit of each: header words are written anew, payload and checksum are found."""
    values = integers(1)
    for word in range(ROW):
        rig = Rig(count=1)
        rig.feed(rig.data(0, 0, values[0]))
        flip_bit(rig.node.memory.rows, 0, word, word % 32)
        rig.feed(rig.data(1, 0, values[0]))
        rows = [s for s in rig.sent() if s.kind is Kind.DATA]
        assert rig.node.stats()["corrupt_slots"] == (word >= 6)
        if word >= 6:
            assert rows == []
            lost = [s for s in rig.wait(0.1) if s.kind is Kind.LOST]
            assert {s.destination for s in lost} == {child_at(0), child_at(1)}
            rig.feed(rig.data(0, 0, values[0]), rig.data(1, 0, values[0]))
            rows = [s for s in rig.sent() if s.kind is Kind.DATA]
        assert [s.packet.payload for s in rows] == [(values[0] * np.int32(2)).tobytes()]


@pytest.mark.parametrize("word", [0, 1, 2, 3, 4, 5, 6, 100, 261, 262])
@pytest.mark.parametrize("state", [State.SENT, State.RESULT])
def test_a_row_that_is_asked_for_again_is_checked_whole(state, word):
    """A damaged header would be refused for ever by the neighbour that needs the row."""
    rig = Rig(count=1)
    values = integers(1)[0]
    rig.feed(rig.data(0, 0, values), rig.data(1, 0, values))
    total_ = values * np.int32(2)
    ask = (rig.packet(Kind.LOST, host=8, values=np.array([1])), PARENT)
    if state is State.RESULT:
        rig.feed((rig.packet(Kind.RESULT, host=0, values=total_), PARENT))
        ask = (rig.packet(Kind.LOST, host=1, flags=2, values=np.array([1])), child_at(0))
    rig.sent()
    flip_bit(rig.node.memory.rows, 0, word, 7)
    rig.feed(ask)
    assert rig.node.stats()["corrupt_slots"] == 1
    want = Kind.DATA if state is State.SENT else Kind.RESULT
    if word >= 6:
        asked = {s.destination for s in rig.wait(0.1) if s.kind is Kind.LOST}
        if state is State.SENT:
            assert asked == {child_at(0), child_at(1)}
            rig.feed(rig.data(0, 0, values), rig.data(1, 0, values))
        else:
            assert asked == {PARENT}
            rig.feed((rig.packet(Kind.RESULT, host=0, values=total_), PARENT))
    rows = [s for s in rig.sent() if s.kind is want]
    assert rows
    assert {s.packet.payload for s in rows} == {total_.tobytes()}


def test_a_partial_sum_never_leaves_under_the_header_of_a_whole_one():
    """A row is queued to leave again; before there is room its slot collects anew, for another attempt."""
    rig = Rig(count=3, window=1)
    values = integers(3)
    rig.feed(*[rig.data(c, f, values[f]) for f in range(3) for c in (0, 1)])
    assert [s.packet.gradient for s in rig.sent() if s.kind is Kind.DATA] == [0]
    credit = rig.packet(Kind.CREDIT, host=8, shard=0, round=0, gradient=1, values=np.array([2]))
    rig.feed((credit, PARENT))
    assert [s.packet.gradient for s in rig.sent() if s.kind is Kind.DATA] == [1]
    rig.feed((rig.packet(Kind.LOST, host=8, values=np.array([0b010])), PARENT))
    rig.feed((rig.packet(Kind.RESTART, host=0, gradient=1, attempt=1, values=np.array([0])), PARENT))
    rig.feed(rig.data(0, 1, values[1], attempt=1))
    (tree,) = rig.node.state.jobs[7].trees.values()
    assert list(tree.up.resend) == [(0, 1)]
    rig.now += 1.0
    rig.node.on_timer(rig.now)
    sent = [s.packet for s in rig.sent() if s.kind is Kind.DATA]
    assert not tree.up.resend
    assert sent
    for packet in sent:
        assert packet.payload == (values[packet.gradient] * np.int32(2)).tobytes()


def test_a_pending_transmission_does_not_show_the_next_content_of_its_row():
    """A full device holds rows by reference; the slot is emptied for a new attempt, or a new round, meanwhile."""
    rig = Rig(root=True, count=1)
    values = integers(1)[0]
    rig.feed(rig.data(0, 0, values), rig.data(1, 0, values))
    pending = [t for t in rig.node.transmit(rig.now) if t.length > 1000]
    assert len(pending) == 2
    rig.node.fail_round(7, 5, [1], rig.now)
    rig.feed(rig.data(0, 0, values, round=6))
    child = Rig(count=1)
    packet = rig.packet(Kind.DATA)
    for transmission in pending:
        assert transmission.packet(0)[0] != packet[0]
    del child
    assert rig.node.drops[Drop.OK] == 3


def test_a_result_that_is_mended_never_becomes_a_contribution():
    """A worker's contribution is gone once the result has overwritten its array: the row must come from elsewhere."""
    fabric = VirtualFabric(TREE, ONE_EACH, window=4)
    spec = SPECS["carried"]
    fabric.all_reduce(spec, arrays_of(spec, 0))
    fabric.settle()
    arrays = arrays_of(spec, 1)
    number = fabric.begin(spec, arrays)
    worker = fabric.nodes["w0"].memory
    fabric.run(lambda: bool(((worker.state == State.RESULT) & (worker.round == number)).any()))
    for slot in np.flatnonzero((worker.state == State.RESULT) & (worker.round == number)):
        flip_bit(worker.rows, int(slot), 77, 30)
    fabric.restart_root("ps")
    fabric.run(lambda: fabric.done(number))
    plain = VirtualFabric(TREE, ONE_EACH)
    plain.all_reduce(spec, arrays_of(spec, 0))
    want = plain.all_reduce(spec, arrays_of(spec, 1))[0].tobytes()
    assert {array.tobytes() for array in arrays.values()} == {want}
