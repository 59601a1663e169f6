"""Exponent agreement in whole rounds: no barrier, values of every size, restarts under stress, refusals."""

import numpy as np
import pytest

from inanet.kernels.layout import PROLOGUE_BLOCK
from inanet.proto.common.events import RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.xagg import Kind
from tests.proto.tree.rig import Recorder
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

BLOCKS = 24
COUNT = 256 * BLOCKS
CARRIED, PROLOGUE, FIXED = ExponentMode.CARRIED, ExponentMode.PROLOGUE, ExponentMode.FIXED


def bits_of(arrays: dict[int, np.ndarray]) -> bytes:
    """The result, equal on all ranks."""
    assert len({array.tobytes() for array in arrays.values()}) == 1
    return arrays[0].tobytes()


# ---------------------------------------------------------------- no barrier


@pytest.mark.parametrize(("mode", "waits"), [(CARRIED, False), (FIXED, False), (PROLOGUE, True)])
def test_a_straggler_delays_the_sending_of_nobody(mode, waits):
    """Three workers have everything out, and acknowledged, before the fourth begins; a prologue makes them wait for it."""
    spec = spec_of(COUNT, mode=mode)
    fabric = VirtualFabric(TREE, ONE_EACH, window=16)
    fabric.all_reduce(spec, float_arrays(COUNT, 4, seed=0))
    fabric.settle()
    before = {name: node.stats()["leaf_contributions"] for name, node in fabric.nodes.items()}
    arrays = float_arrays(COUNT, 4, seed=1)
    number = fabric.begin(spec, arrays, ["w0", "w1", "w2"])
    fabric.settle(30.0)
    data = spec.elements // 256
    for name in ("w0", "w1", "w2"):
        out = fabric.nodes[name].stats()["leaf_contributions"] - before[name]
        assert out == (1 if waits else data)
        link = next(iter(fabric.nodes[name].state.jobs[fabric.job].trees.values())).up
        assert link is not None
        # credit comes a quarter of the window at a time
        assert link.in_flight < 4 or waits
    # the aggregator of the first two has summed them, the one of the third holds its part: neither waits for the fourth
    assert fabric.nodes["a0"].stats()["fragments_completed"] >= (0 if waits else 2 * data)
    assert not fabric.silent()
    fabric.next_round = number
    fabric.begin(spec, arrays, ["w3"])
    fabric.next_round = number + 1
    fabric.run(lambda: fabric.done(number), deadline=5.0)
    clean = VirtualFabric(STAR, ONE_EACH)
    clean.all_reduce(spec, float_arrays(COUNT, 4, seed=0))
    assert bits_of(arrays) == bits_of(dict(clean.all_reduce(spec, float_arrays(COUNT, 4, seed=1))))


# ---------------------------------------------------------------- values


def of_kind(kind: str, round_: int) -> dict[int, np.ndarray]:
    arrays = float_arrays(COUNT, 4, seed=round_)
    rng = np.random.default_rng(round_)
    for rank, array in arrays.items():
        if kind == "huge":
            array *= np.float32(1e30)
        elif kind == "denormal":
            array *= np.float32(1e-40)
        elif kind == "zeros":
            array[:] = 0 if round_ % 2 == 0 else array
        elif kind == "growing":
            array *= np.float32(2.0 ** (40 * round_ - 60))
        elif kind == "shrinking":
            array *= np.float32(2.0 ** (60 - 40 * round_))
        elif kind == "mixed":
            array *= np.exp2(rng.integers(-120, 60, COUNT)).astype(np.float32)
        elif kind == "one block each":
            array[256 * rank : 256 * (rank + 1)] *= np.float32(2.0 ** (20 * rank + 10 * round_))
            array[256 * 10 :] = 0
    return arrays


KINDS = ["huge", "denormal", "zeros", "growing", "shrinking", "mixed", "one block each"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [CARRIED, PROLOGUE, FIXED])
def test_values_of_every_size(mode, kind):
    """Within the bound of the format in every round, and the same bits over a tree that loses packets."""
    spec = TensorSpec("t", "f32", (COUNT,), "sum", mode, 1e4 if mode is FIXED else 0.0)
    fabrics = [
        VirtualFabric(STAR, ONE_EACH),
        VirtualFabric(DEEP, ONE_EACH, window=24, wrap=impaired(3, drop=0.05)),
    ]
    for round_ in range(3):
        exact = sum(array.astype(np.float64) for array in of_kind(kind, round_).values())
        largest = np.max([np.abs(array) for array in of_kind(kind, round_).values()], axis=0).reshape(-1, 256)
        results = [dict(fabric.all_reduce(spec, of_kind(kind, round_))) for fabric in fabrics]
        assert bits_of(results[0]) == bits_of(results[1])
        # exponents are carried with some headroom, and only grow when they must: a bound relative to the block, for a
        # block that does not shrink from round to round
        bound = 4 * 2.0**-30 * 2.0 ** np.ceil(np.log2(np.maximum(largest.max(axis=1), 1e-45))) + 1e-45
        error = np.abs(results[0][0].astype(np.float64) - exact).reshape(-1, 256).max(axis=1)
        ulp = np.spacing(np.abs(exact).reshape(-1, 256).max(axis=1).astype(np.float32)).astype(np.float64)
        if mode is PROLOGUE:
            assert (error <= bound + ulp).all()
        elif mode is CARRIED and kind in ("huge", "denormal", "growing"):
            assert (error <= 64 * bound + ulp).all()
        elif mode is FIXED and kind == "denormal":
            assert (error <= 4 / 1e4).all()


# ---------------------------------------------------------------- restarts


def storm(round_: int, ranks: tuple[int, ...]) -> dict[int, np.ndarray]:
    """From the second round on, every block of these ranks misfits, each rank by another factor."""
    arrays = float_arrays(COUNT, 4, seed=round_)
    if round_:
        for rank in ranks:
            arrays[rank] *= np.float32(2.0 ** (12 * round_ + 7 * rank))
    return arrays


@pytest.mark.parametrize("ranks", [(2,), (0, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("shares", [{}, {"drop": 0.05, "duplicate": 0.05, "reorder": 0.05, "corrupt": 0.05}])
@pytest.mark.parametrize("mode", [CARRIED, FIXED])
def test_restart_storms(mode, ranks, shares):
    spec = spec_of(COUNT, mode=mode)
    clean = VirtualFabric(STAR, ONE_EACH)
    fabric = VirtualFabric(DEEP, ONE_EACH, window=24, wrap=impaired(9, **shares))
    for round_ in range(3):
        want = bits_of(dict(clean.all_reduce(spec, storm(round_, ranks))))
        assert bits_of(dict(fabric.all_reduce(spec, storm(round_, ranks)))) == want
    attempts = clean.nodes["ps"].memory.attempt[:BLOCKS]
    assert (attempts == 1).all()


@pytest.mark.parametrize("when", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("victim", ["a0", "a1", "ps", "a1+ps", "ps+ps"])
def test_restarts_while_nodes_die(victim, when):
    """Failures in the middle of a storm: orphans with restarted fragments, a root that has forgotten the attempts."""
    spec = spec_of(COUNT)
    clean = VirtualFabric(STAR, ONE_EACH)
    fabric = VirtualFabric(TREE, ONE_EACH, window=8, wrap=impaired(4, drop=0.03))
    for round_ in range(2):
        want = bits_of(dict(clean.all_reduce(spec, storm(round_, (0, 3)))))
        arrays = storm(round_, (0, 3))
        number = fabric.begin(spec, arrays)
        if round_ == 1:
            for name in victim.split("+"):
                base = fabric.nodes["ps"].stats()["contributions_in"]
                # every block comes twice to the root from two children
                goal = base + int(when * 4 * BLOCKS)
                fabric.run(
                    lambda g=goal, n=number: (
                        fabric.nodes["ps"].stats()["contributions_in"] >= g or fabric.done(n)
                    )
                )
                if name == "ps":
                    fabric.restart_root("ps")
                else:
                    fabric.lose_aggregator(name)
        fabric.run(lambda n=number: fabric.done(n))
        assert bits_of(arrays) == want
    arrays = storm(2, (1,))
    clean.all_reduce(spec, arrays)
    again = storm(2, (1,))
    assert bits_of(dict(fabric.all_reduce(spec, again))) == bits_of(arrays)


def test_a_restart_repeats_what_was_announced_and_not_what_is_proposed():
    """A child that missed a RESTART must get the exponent of that attempt, not what others have asked for since."""
    from tests.proto.tree.rig import Rig, child_at

    rig = Rig()
    rig.feed(rig.restart(1, 130, 1))
    assert rig.drops == {"not_open": 1}
    rig.feed(rig.data(0, 0, np.zeros(256, np.int32)))
    rig.feed(rig.restart(1, 130, 1))
    assert {(s.destination, s.packet.payload[:3]) for s in rig.sent() if s.kind is Kind.RESTART} == {
        (child_at(0), bytes([0, 130, 0])),
        (child_at(1), bytes([0, 130, 0])),
    }
    asked = rig.packet(Kind.EXPONENT, gradient=1, attempt=1, values=np.array([140], np.int32))
    rig.feed((asked, child_at(0)), (rig.packet(Kind.SENT, host=2), child_at(1)))
    repeated = [s.packet for s in rig.wait(0.1) if s.kind is Kind.RESTART]
    assert repeated
    assert {(packet.payload[1], packet.attempt) for packet in repeated} == {(130, 1)}


# ---------------------------------------------------------------- NaN and infinity


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("mode", "op"),
    [
        (CARRIED, "sum"),
        (PROLOGUE, "mean"),
        (FIXED, "sum"),
        (ExponentMode.NONE, "max"),
        (ExponentMode.NONE, "min"),
    ],
)
def test_a_rank_that_holds_nan_or_infinity_is_named_and_the_fabric_goes_on(mode, op, bad):
    spec = TensorSpec("t", "f32", (COUNT,), op, mode, 1e6 if mode is FIXED else 0.0)
    fabric = VirtualFabric(TREE, {"w0": [0], "w1": [1, 2], "w2": [3], "w3": [4]})
    clean = VirtualFabric(STAR, {"w0": [0], "w1": [1, 2], "w2": [3], "w3": [4]})
    for round_ in range(4):
        arrays = float_arrays(COUNT, 5, seed=round_)
        if round_ == 2:
            arrays[2][COUNT - 30] = bad
            number = fabric.begin(spec, arrays)
            fabric.run(lambda: bool(fabric.refusals()))
            fabric.settle()
            (refused,) = fabric.refusals()
            assert (refused.round, refused.local_rank, refused.index) == (number, 1, COUNT - 30)
            assert not any(isinstance(event, RoundDone) and event.round == number for _, event in fabric.log)
            for node in fabric.nodes.values():
                node.fail_round(fabric.job, number, [refused.tensor], fabric.clock.now)
            fabric.settle()
            continue
        fabric.all_reduce(spec, arrays)
        want = float_arrays(COUNT, 5, seed=round_)
        if round_ == 3 and mode is CARRIED:
            # after a failed round exponents are agreed on anew
            clean = VirtualFabric(STAR, {"w0": [0], "w1": [1, 2], "w2": [3], "w3": [4]})
        clean.all_reduce(spec, want)
        assert bits_of(arrays) == bits_of(want)


@pytest.mark.parametrize("mode", [CARRIED, PROLOGUE, FIXED])
def test_nan_and_infinity_arrive_as_they_are_and_cost_their_block_at_most(mode):
    spec = TensorSpec("t", "f32", (COUNT,), "sum", mode, 1e6 if mode is FIXED else 0.0, propagate=True)
    fabric = VirtualFabric(TREE, ONE_EACH, wrap=impaired(2, drop=0.05))
    for round_ in range(4):
        arrays = float_arrays(COUNT, 4, seed=round_)
        exact = sum(array.astype(np.float64) for array in arrays.values())
        width = PROLOGUE_BLOCK if mode is PROLOGUE else 256
        if round_ in (1, 2):
            arrays[1][256 * 7 + 3] = np.nan
            arrays[3][256 * 20] = np.inf
            exact[256 * 7 : 256 * 7 + width] = exact[256 * 20 : 256 * 20 + width] = 0
            exact[256 * 7 + 3], exact[256 * 20] = np.nan, np.inf
        fabric.all_reduce(spec, arrays)
        result = np.frombuffer(bits_of(arrays), np.float32)
        np.testing.assert_allclose(result, exact, atol=1e-5)
    assert fabric.refusals() == []


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_propagate_nan_element_by_element(op):
    spec = TensorSpec("t", "f32", (COUNT,), op, ExponentMode.NONE, 0.0, propagate=True)
    arrays = float_arrays(COUNT, 4, seed=1)
    want = (np.maximum if op == "max" else np.minimum).reduce([*arrays.values()])
    arrays[2][77] = want[77] = np.nan
    arrays[0][5] = want[5] = np.inf if op == "max" else -np.inf
    VirtualFabric(TREE, ONE_EACH, wrap=impaired(2, drop=0.05)).all_reduce(spec, arrays)
    assert np.array_equal(np.frombuffer(bits_of(arrays), np.float32), want, equal_nan=True)


def test_carried_rounds_send_no_exponents_and_restart_only_what_grew():
    recorders = {}

    def wrap(device, name, clock):
        recorders[name] = Recorder(device)
        return recorders[name]

    fabric = VirtualFabric(STAR, ONE_EACH, wrap=wrap)
    spec = spec_of(COUNT)
    for round_ in range(3):
        arrays = float_arrays(COUNT, 4, seed=round_)
        if round_ == 2:
            arrays[1][256 * 3] = 2.0**40
        fabric.all_reduce(spec, arrays)
        fabric.settle()
        kinds = [packet[1] & 15 for packet, _ in recorders["ps"].drain()]
        assert kinds.count(Kind.DATA) == 4 * (BLOCKS + (round_ == 0)) + (3 if round_ == 2 else 0)
        assert kinds.count(Kind.EXPONENT) == (round_ == 2)
