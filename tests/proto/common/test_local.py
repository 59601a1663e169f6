"""All ranks on one host: the bits are those of the network, however the work is cut into parts."""

import itertools

import numpy as np
import pytest

from inanet.proto.common.local import CHUNK, LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.testing.fabric import VirtualFabric
from tests.proto.common.arrays import DTYPES, from_floats, make_spec, random_array

TREE = {"ps": None, "a0": "ps", "w0": "a0", "w1": "a0", "w2": "ps"}
#: one rank each, and two hosts of several
PLACES = [
    ({"ps": None, "w0": "ps", "w1": "ps", "w2": "ps", "w3": "ps"}, {f"w{k}": [k] for k in range(4)}),
    (TREE, {"w0": [0], "w1": [1, 2], "w2": [3]}),
    ({"ps": None, "w0": "ps", "w1": "ps"}, {"w0": [0, 1], "w1": [2, 3]}),
]
FLOAT_MODES = [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED]
KINDS = [
    *itertools.product(("f32", "f16", "bf16"), ("sum", "mean"), FLOAT_MODES),
    *itertools.product(("f32", "f16", "bf16"), ("max", "min"), [ExponentMode.NONE]),
    *itertools.product(("i32", "i64"), ("sum", "max", "min"), [ExponentMode.NONE]),
]
RANKS = 4


def spec_of(dtype, op, mode, elements, propagate=False):
    factor = 1e4 if mode is ExponentMode.FIXED else 0.0
    return TensorSpec("t", dtype, (elements,), op, mode, factor, propagate)


def tensors(dtype, elements, round_):
    """One array per rank whose magnitudes change from round to round, from block to block and from rank to rank."""
    if dtype.startswith("i"):
        return [random_array(dtype, elements, 10 * round_ + rank) for rank in range(RANKS)]
    made = []
    for rank in range(RANKS):
        rng = np.random.default_rng(100 * round_ + rank)
        values = rng.standard_normal(elements)
        blocks = np.repeat(rng.integers(-3, 4, -(-elements // 256)), 256)[:elements]
        values *= np.exp2(blocks - 2.0 * round_ if round_ % 2 else blocks)
        # blocks of zeros on one rank, on all of them, and denormals
        values[256 * rank : 256 * rank + 256] = 0
        values[1024 : 1024 + 256 * (round_ % 2)] = 0
        values[1280:1536] *= 1e-40 if dtype != "f16" else 1e-7
        made.append(from_floats(dtype, values))
    return made


def over_the_network(places, spec, rounds):
    fabric = VirtualFabric(*places)
    return [fabric.all_reduce(spec, {rank: a.copy() for rank, a in enumerate(arrays)}) for arrays in rounds]


def bits(arrays):
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize(("dtype", "op", "mode"), KINDS)
def test_bits_are_those_of_the_network(dtype, op, mode):
    elements = 256 * 9 + 77
    spec = spec_of(dtype, op, mode, elements)
    rounds = [tensors(dtype, elements, round_) for round_ in range(4)]
    expected = [over_the_network(places, spec, rounds) for places in PLACES]
    local = LocalTensor(spec, RANKS)
    for number, arrays in enumerate(rounds):
        assert local.reduce(arrays) is None
        for network in expected:
            assert bits(arrays) == bits(network[number][rank] for rank in range(RANKS))


@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_what_is_propagated_is_propagated_alike(dtype, mode):
    elements = 1500
    spec = spec_of(dtype, "sum", mode, elements, propagate=True)
    rounds = [tensors(dtype, elements, round_) for round_ in range(3)]
    rounds[1][2][300] = from_floats(dtype, [np.nan])[0]
    rounds[1][0][700] = from_floats(dtype, [np.inf])[0]
    expected = over_the_network(PLACES[0], spec, rounds)
    local = LocalTensor(spec, RANKS)
    for number, arrays in enumerate(rounds):
        assert local.reduce(arrays) is None
        assert bits(arrays) == bits(expected[number][rank] for rank in range(RANKS))


@pytest.mark.parametrize("op", ["max", "min"])
def test_propagated_maxima(op):
    spec = spec_of("f32", op, ExponentMode.NONE, 600, propagate=True)
    arrays = tensors("f32", 600, 0)
    arrays[1][5], arrays[2][6], arrays[3][7] = np.nan, np.inf, -np.inf
    [expected] = over_the_network(PLACES[0], spec, [arrays])
    assert LocalTensor(spec, RANKS).reduce(arrays) is None
    assert bits(arrays) == bits(expected[rank] for rank in range(RANKS))


def test_after_a_refusal_the_next_round_starts_afresh_as_over_the_network():
    """What a refused round did to the exponents must not depend on where the ranks are."""
    spec = spec_of("f32", "sum", ExponentMode.CARRIED, 2000)
    rounds = [tensors("f32", 2000, round_) for round_ in range(4)]
    rounds[1][2][300] = np.nan
    fabric, local = VirtualFabric(*PLACES[0]), LocalTensor(spec, RANKS)
    for number, arrays in enumerate(rounds):
        theirs = {rank: array.copy() for rank, array in enumerate(arrays)}
        refusal = local.reduce(arrays)
        assert (refusal is None) == (number != 1)
        if refusal is None:
            fabric.all_reduce(spec, theirs)
            assert bits(arrays) == bits(theirs.values())
        else:
            round_ = fabric.begin(spec, theirs)
            fabric.run(lambda: bool(fabric.refusals()))
            for node in fabric.nodes.values():
                node.fail_round(fabric.job, round_, [fabric.layout(spec).tensor], fabric.clock.now)
            fabric.settle()


@pytest.mark.parametrize(("dtype", "op", "mode"), KINDS)
def test_the_cut_changes_no_bit(dtype, op, mode):
    elements = 256 * (2 * CHUNK + 3) + 1
    spec = spec_of(dtype, op, mode, elements)
    whole, cut = LocalTensor(spec, RANKS), LocalTensor(spec, RANKS)
    for number, parts in enumerate((1, 7, 2)):
        first = tensors(dtype, elements, number)
        second = [array.copy() for array in first]
        assert whole.reduce(first) is None
        round_ = cut.begin(second, parts)
        for part in reversed(round_.parts):
            round_.work(part)
        assert round_.finish() is None
        assert bits(second) == bits(first)


def test_read_only_arrays_are_refused_and_not_written_through():
    arrays = tensors("f32", 300, 0)
    before = [array.copy() for array in arrays]
    arrays[2].flags.writeable = False
    with pytest.raises(ValueError, match="'t' needs arrays that its result can be written into"):
        LocalTensor(spec_of("f32", "sum", ExponentMode.CARRIED, 300), RANKS).reduce(arrays)
    assert all((now == then).all() for now, then in zip(arrays, before, strict=True))


def test_no_more_parts_than_fragments():
    spec = make_spec("f32", "sum", 500)
    assert [(part.low, part.high) for part in LocalTensor(spec, 2).begin([], 9).parts] == [(0, 1), (1, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_elements(dtype):
    arrays = [np.zeros(0, DTYPES[dtype])] * 2
    assert LocalTensor(make_spec(dtype, "sum", 0), 2).reduce(arrays) is None


class TestRefusals:
    """Which rank and which element, whatever has been overwritten by then."""

    ELEMENTS = 256 * 3 * CHUNK

    @pytest.mark.parametrize("parts", [1, 5])
    @pytest.mark.parametrize(
        ("op", "mode"), [*(("sum", mode) for mode in FLOAT_MODES), ("max", ExponentMode.NONE)]
    )
    @pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
    def test_the_first_rank_and_its_first_element(self, dtype, mode, op, parts):
        tensor = LocalTensor(spec_of(dtype, op, mode, self.ELEMENTS), RANKS)
        for poison in (None, np.nan, -np.inf):
            arrays = tensors(dtype, self.ELEMENTS, 0)
            if poison is not None:
                at = 256 * 2 * CHUNK
                arrays[3][at + 1] = arrays[1][at + 900] = arrays[1][at + 5] = from_floats(dtype, [poison])[0]
            round_ = tensor.begin(arrays, parts)
            for part in round_.parts:
                round_.work(part)
            refusal = round_.finish()
            if poison is None:
                assert refusal is None
                continue
            assert (refusal.position, refusal.index, refusal.tensor) == (1, at + 5, "t")
            assert f"has {poison} at element {at + 5} of tensor 't'" in refusal.text

    def test_a_result_that_became_infinite_is_nobody_s_fault(self):
        """f16 sums beyond the range are infinite, as IEEE sums would be; the culprit is looked for elsewhere."""
        elements = 256 * 2 * CHUNK
        arrays = [np.full(elements, 60000, np.float16) for _ in range(2)]
        arrays[1][-1] = np.nan
        refusal = LocalTensor(make_spec("f16", "sum", elements), 2).reduce(arrays)
        assert np.isinf(arrays[0][0])
        assert (refusal.position, refusal.index) == (1, elements - 1)

    def test_an_unnamed_tensor_is_named_by_what_it_is(self):
        spec = TensorSpec("", "f32", (2, 3), "max", ExponentMode.NONE)
        refusal = LocalTensor(spec, 1).reduce([np.full(6, np.nan, np.float32)])
        assert refusal.tensor == "f32[2, 3]"

    @pytest.mark.parametrize("parts", [1, 4])
    @pytest.mark.parametrize("dtype", ["i32", "i64"])
    def test_the_first_sum_that_does_not_fit(self, dtype, parts):
        elements = 128 * CHUNK
        tensor = LocalTensor(make_spec(dtype, "sum", elements), 2)
        for large in (True, False):
            arrays = [np.ones(elements, DTYPES[dtype]) for _ in range(2)]
            if large:
                for at in (elements - 1, 4000, 70):
                    arrays[0][at] = np.iinfo(DTYPES[dtype]).max
            round_ = tensor.begin(arrays, parts)
            for part in reversed(round_.parts):
                round_.work(part)
            refusal = round_.finish()
            assert (refusal is None) == (not large)
            if large:
                assert (refusal.position, refusal.index) == (-1, 70)
                assert "the exact sum of element 70 does not fit" in refusal.text

    def test_what_no_format_can_do(self):
        with pytest.raises(ValueError, match="mean of i32 is not supported"):
            LocalTensor(TensorSpec("t", "i32", (4,), "mean", ExponentMode.NONE), 2)
