"""Sums and means of floats: the error bound, and everything that could break bit-identity (number format)."""

from fractions import Fraction
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.kernels.layout import PROLOGUE_BLOCK, ROW_WORDS
from inanet.kernels.quantise import MINUS, PLUS
from inanet.proto.common.encoding import LARGE, MISFIT
from inanet.proto.common.formats import FIXED_FACTOR, make_format
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.common.quantised import SLACK, carried_over

from .arrays import exact_sums, exchange, from_floats, make_spec, random_array, to_floats

#: significant bits and the smallest exponent of a last place
PRECISION = {"f32": (24, -149), "f16": (11, -24), "bf16": (8, -133)}
LARGEST = {
    "f32": Fraction(2**128 - 2**104),
    "f16": Fraction(65504),
    "bf16": Fraction(2**128 - 2**120),
}


def half_ulp(dtype: str, value: Fraction) -> Fraction:
    """Half a unit in the last place of the binade of ``value``."""
    digits, smallest = PRECISION[dtype]
    magnitude = abs(value)
    if magnitude == 0:
        return Fraction(2) ** (smallest - 1)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    return Fraction(2) ** (max(exponent - digits + 1, smallest) - 1)


def check_bound(
    dtype: str,
    op: str,
    arrays: list[np.ndarray],
    results: list[np.ndarray],
    integers: int = 1,
    width: int = PROLOGUE_BLOCK,
) -> None:
    """Every result within ``n * 2**(L - 32) * 2**e`` plus half a unit in the last place.

    ``e`` is taken from the values of each block of ``width``. ``integers`` = 2 doubles the first term: beyond 256 ranks.
    """
    ranks = len(arrays)
    values = np.stack([to_floats(dtype, array) for array in arrays])
    totals = exact_sums(dtype, arrays)
    got = to_floats(dtype, results[0]).tolist()
    for start in range(0, len(totals), width):
        # the smallest e with |x| < 2**e in the block, not below that of denormals
        peak = np.abs(values[:, start : start + width]).max()
        e = max(int(np.frexp(peak)[1]), -126) if peak else -126
        bound = integers * ranks * Fraction(2) ** (ceil(log2(ranks)) - 32 + e)
        for total, result in zip(totals[start : start + width], got[start : start + width], strict=True):
            wanted, slack = (total / ranks, bound / ranks) if op == "mean" else (total, bound)
            if abs(result) == float("inf"):
                assert abs(wanted) + slack >= LARGEST[dtype] + half_ulp(dtype, LARGEST[dtype])
            else:
                value = Fraction(result)
                assert abs(value - wanted) <= slack + half_ulp(dtype, value)
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
#: values in a narrow band, so that the bound is tight and sums cancel
narrow = st.floats(-2.0, 2.0, width=32)
scales = st.sampled_from([1.0, 1e-40, 1e30, 2.0**-126, 2.0**100])


@st.composite
def contributions(draw: st.DrawFn) -> list[np.ndarray]:
    """1 to 33 float32 arrays of the same few elements, of mixed or of similar magnitude."""
    ranks = draw(st.integers(1, 33))
    length = draw(st.integers(1, 6))
    element = draw(st.sampled_from([floats32, narrow]))
    scale = draw(scales) if element is narrow else 1.0
    rows = draw(st.lists(st.lists(element, min_size=length, max_size=length), min_size=ranks, max_size=ranks))
    return [(np.array(row, np.float64) * scale).astype(np.float32) for row in rows]


@given(contributions(), st.sampled_from(["sum", "mean"]))
def test_error_bound_f32(arrays: list[np.ndarray], op: str) -> None:
    made = make_format(make_spec("f32", op, len(arrays[0])), len(arrays))
    results, _ = exchange(made, [[array] for array in arrays])
    check_bound("f32", op, arrays, results)


@given(contributions(), st.sampled_from(["sum", "mean"]), st.sampled_from(["f16", "bf16"]))
def test_error_bound_16_bits(arrays: list[np.ndarray], op: str, dtype: str) -> None:
    if dtype == "f16":
        narrowed = [np.clip(array, -65504, 65504).astype(np.float16) for array in arrays]
    else:
        narrowed = [from_floats("bf16", array) for array in arrays]
    made = make_format(make_spec(dtype, op, len(arrays[0])), len(arrays))
    results, _ = exchange(made, [[array] for array in narrowed])
    check_bound(dtype, op, narrowed, results)


@pytest.mark.parametrize("ranks", range(1, 34))
@pytest.mark.parametrize(
    "magnitude",
    ["1e30", "denormals", "mixed in a block", "one block of each", "zeros", "largest"],
)
def test_error_bound_by_magnitude(magnitude: str, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    x = rng.standard_normal((ranks, 300)).astype(np.float32)
    if magnitude == "1e30":
        x *= np.float32(1e30)
    elif magnitude == "denormals":
        x = (x.astype(np.float64) * 2.0**-140).astype(np.float32)
    elif magnitude == "mixed in a block":
        x *= np.float32(10.0) ** rng.integers(-30, 30, x.shape).astype(np.float32)
    elif magnitude == "one block of each":
        x[:, 256:] *= np.float32(1e-30)
        x[:, :256] *= np.float32(1e30)
    elif magnitude == "zeros":
        x[:] = np.where(rng.random(x.shape) < 0.5, np.float32(0), np.float32(-0.0))
    else:
        x = np.copysign(np.finfo(np.float32).max, x)
    arrays = list(x)
    for op in ("sum", "mean"):
        made = make_format(make_spec("f32", op, 300), ranks)
        results, _ = exchange(made, [[array] for array in arrays])
        check_bound("f32", op, arrays, results)


@pytest.mark.parametrize("ranks", [4, 128, 256, 512, 3, 255, 257])
def test_the_largest_values_never_wrap(ranks: int) -> None:
    """Number format: with INT32_MAX/(n 2^e) rounded up, four values next to 2^e would sum to 2^31."""
    for sign in (1, -1):
        value = sign * np.nextafter(np.float32(8.0), np.float32(0))
        arrays = [np.full(1, value, np.float32)] * ranks
        made = make_format(make_spec("f32", "sum", 1), ranks)
        results, rows = exchange(made, [[array] for array in arrays])
        assert rows[0, 6] * sign > 0
        check_bound("f32", "sum", arrays, results[:1], integers=1 if ranks <= 256 else 2)


@pytest.mark.parametrize(("size", "limit"), [(256, 2**29 - 32), (4, 2**29 - 1)], ids=["whole", "short"])
def test_contributions_beyond_the_exponent_are_clamped_not_wrapped(size: int, limit: int) -> None:
    """Values changed between prologue and encoding spoil their own sum at worst, never wrap.

    The limit is (2^31 - 1) / 4, or the largest float32 up to it where float32 is calculated with.
    """
    made = make_format(make_spec("f32", "sum", size), 4)
    exps = np.full(made.blocks, 127, np.uint8)
    rows = np.zeros((1, ROW_WORDS), np.int32)
    values = np.resize(np.array([1e30, -1e30, np.inf, -np.inf], np.float32), size)
    made.encode([values], 0, 1, exps, rows, 0)
    assert rows[0, 6:10].tolist() == [limit, -limit, limit, -limit]


SPECIAL = [0.0, 1.5, -2.0, np.inf, -np.inf, np.nan]


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.sampled_from(SPECIAL), min_size=5, max_size=5), min_size=1, max_size=40),
    st.sampled_from(["f32", "f16", "bf16"]),
    st.sampled_from(["sum", "mean"]),
)
def test_infinity_and_nan_are_what_float32_addition_gives(
    ranks: int, columns: list[list[float]], dtype: str, op: str
) -> None:
    """Element by element; only finite neighbours within the block may be lost, as 0."""
    arrays = [from_floats(dtype, [column[rank] for column in columns]) for rank in range(ranks)]
    made = make_format(make_spec(dtype, op, len(columns), propagate=True), ranks)
    results, _ = exchange(made, [[array] for array in arrays])
    got = to_floats(dtype, results[0])
    with np.errstate(invalid="ignore"):
        exact = sum(to_floats(dtype, array) for array in arrays) / (ranks if op == "mean" else 1)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(got[~finite], exact[~finite])
    for start in range(0, len(columns), PROLOGUE_BLOCK):
        block = slice(start, start + PROLOGUE_BLOCK)
        whole = all(np.isfinite(to_floats(dtype, array)[block]).all() for array in arrays)
        if whole:
            np.testing.assert_allclose(got[block], exact[block], rtol=2.0**-8)
        else:
            assert not got[block][finite[block]].any()


@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=5))
def test_order_and_placement_do_not_change_bits(order: list[int], cuts: list[int]) -> None:
    """Ranks on one host sum quantised integers, so moving a rank between hosts changes nothing (number format)."""
    made = make_format(make_spec("f32", "mean", 300), 6)
    arrays = [random_array("f32", 300, seed) * np.float32(10.0) ** (seed - 3) for seed in range(6)]
    expected, rows = exchange(made, [[array] for array in arrays])
    edges = [0, *sorted(set(cuts)), 6]
    hosts = [[arrays[k] for k in order[a:b]] for a, b in pairwise(edges)]
    results, same = exchange(made, hosts)
    np.testing.assert_array_equal(same, rows)
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), expected[0].view(np.uint32))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_16_bit_number_survives_alone(dtype: str) -> None:
    """With one rank, values whose magnitudes lie within a block's 31 bits come back bit for bit."""
    infinity = 0x7C00 if dtype == "f16" else 0x7F80
    magnitudes = np.arange(1, infinity, dtype=np.uint16)
    patterns = np.stack([magnitudes, magnitudes | np.uint16(0x8000)], axis=1).ravel()
    made = make_format(make_spec(dtype, "sum", len(patterns)), 1)
    array = patterns.view(np.float16) if dtype == "f16" else patterns
    results, _ = exchange(made, [[array]])
    np.testing.assert_array_equal(results[0].view(np.uint16), patterns)


def test_f16_sums_round_once() -> None:
    """Two f16 values whose sum needs 12 bits: half-way cases go to even, as the exact sum would."""
    made = make_format(make_spec("f16", "sum", 2), 2)
    a, b = np.array([2049.0, 2051.0]) / 2, np.array([2048.0, 2048.0]) / 2
    results, _ = exchange(made, [[a.astype(np.float16)], [b.astype(np.float16)]])
    assert results[0].tolist() == (a + b).astype(np.float16).tolist()


def test_sums_beyond_the_type_are_infinite() -> None:
    made = make_format(make_spec("f16", "sum", 2), 2)
    array = np.array([60000, -60000], np.float16)
    results, _ = exchange(made, [[array], [array]])
    assert results[0].tolist() == [np.inf, -np.inf]
    mean = make_format(make_spec("f16", "mean", 2), 2)
    results, _ = exchange(mean, [[array], [array]])
    assert results[0].tolist() == array.tolist()


@pytest.mark.parametrize("ranks", [3, 4, 5, 7, 33, 49])
def test_means_are_rounded_correctly(ranks: int) -> None:
    """The float64 quotient is rounded again, but never to another float32 than the exact quotient.

    For 49, and only there among these, ``1 / n`` is too far off to multiply by.
    """
    made = make_format(make_spec("f32", "mean", 256), ranks)
    rng = np.random.default_rng(ranks)
    rows = np.zeros((1, ROW_WORDS), np.int32)
    sums = rng.integers(-(2**31) + 1, 2**31, 256)
    # multiples of n times odd 25-bit numbers: their quotients are exactly half-way
    sums[:64] = ranks * (2 * rng.integers(2**23, 2**24, 64) + 1)
    sums = np.where(abs(sums) < 2**31, sums, 12345)
    rows[0, 6:262] = sums
    array = np.zeros(256, np.float32)
    one = np.zeros(1, np.int64)
    made.decode(rows, one, one, np.full(made.blocks, 127, np.uint8), [array])
    shift = 30 - (ranks - 1).bit_length()
    for total, got in zip(sums.tolist(), array.tolist(), strict=True):
        quotient = Fraction(total, ranks) / 2**shift
        assert abs(Fraction(got) - quotient) <= half_ulp("f32", quotient)
        if abs(Fraction(got) - quotient) == half_ulp("f32", quotient):
            assert np.float32(got).view(np.uint32) % 2 == 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("value", "exponent"),
    [(0.0, 0), (-0.0, 0), (1.0, 127), (-1.5, 127), (0.75, 126), (np.inf, 255), (-np.inf, 255), (np.nan, 255)],
)
def test_exponents(dtype: str, value: float, exponent: int) -> None:
    made = make_format(make_spec(dtype, "sum", 257), 2)
    array = from_floats(dtype, np.append(np.zeros(256), value))
    out = np.full(2 * made.blocks, 77, np.uint8)
    made.exponents([np.zeros_like(array), array], 0, 2, out)
    assert out.tolist() == [0] * 32 + [exponent] + [0] * 31


@pytest.mark.parametrize(
    ("dtype", "pattern", "exponent"),
    [
        ("f32", 0x007FFFFF, 1),
        ("f32", 0x00000001, 1),
        ("f32", 0x00800000, 1),
        ("f32", 0x7F7FFFFF, 254),
        ("f16", 1, 103),
        ("f16", 0x3FF, 112),
    ],
)
def test_exponents_at_the_edges(dtype: str, pattern: int, exponent: int) -> None:
    made = make_format(make_spec(dtype, "sum", 1), 1)
    array = np.array([pattern], np.uint32 if dtype == "f32" else np.uint16)
    out = np.zeros(made.blocks, np.uint8)
    made.exponents([array.view(np.float32) if dtype == "f32" else array], 0, 1, out)
    assert out[0] == exponent


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_an_infinity_stays_one_and_costs_its_small_block_at_most(dtype: str) -> None:
    made = make_format(make_spec(dtype, "sum", 700), 2)
    arrays = [random_array(dtype, 700, 1), random_array(dtype, 700, 2)]
    arrays[1][300:301] = from_floats(dtype, [np.inf])
    results, rows = exchange(made, [[arrays[0]], [arrays[1]]])
    assert np.flatnonzero(rows[1, 6 + 40 : 6 + 48]).tolist() == [4]
    got, exact = to_floats(dtype, results[0]), sum(to_floats(dtype, array) for array in arrays)
    assert got[300] == np.inf
    far = np.delete(np.arange(700), np.arange(296, 304))
    np.testing.assert_allclose(got[far], exact[far], rtol=2.0**-6, atol=1e-6)
    assert not got[296:300].any()
    assert not got[301:304].any()
    assert made.poisoned == 300
    made.clear()
    assert made.poisoned == -1


def test_misfits_name_the_exponent_they_need() -> None:
    made = make_format(TensorSpec("t", "f32", (1024,), "sum", ExponentMode.CARRIED), 4)
    small, large = np.full(1024, 0.9, np.float32), np.full(1024, 0.9, np.float32)
    large[256] = 1.0
    large[512] = 5.0
    large[1023] = np.nan
    exps = np.full(4, 126, np.uint8)
    rows = np.full((4, ROW_WORDS), 0x33333333, np.int32)
    needs = np.full(4, 9, np.uint8)
    made.encode([small, large], 0, 4, exps, rows, 0, needs)
    assert needs.tolist() == [126, 127, 129, 255]
    assert made.judge(needs, exps).tolist() == [LARGE, MISFIT, MISFIT, MISFIT]
    assert rows[1:, 6].tolist() == [127, 129, 255]
    assert not rows[1:, 7:262].any()
    assert rows[0, 6:262].all()
    # announced, it fits; a poisoned block contributes nothing
    exps[:] = [126, 127, 129, 255]
    made.encode([small, large], 0, 4, exps, rows, 0, needs)
    assert not made.misfits(needs, exps).any()
    assert rows[:3, 6:262].all()
    assert not rows[3, 6:261].any()
    assert rows[3, 261] == PLUS + MINUS


def test_fixed_factor() -> None:
    made = make_format(make_spec("f32", "sum", 3, factor=1e8), 4)
    arrays = [np.array([0.1 * k, -1e-8, 5.0], np.float32) for k in range(1, 5)]
    exps = made.initial_exponents()
    assert exps.tolist() == [FIXED_FACTOR]
    results, rows = exchange(made, [[array] for array in arrays], exps)
    assert rows[0, 6:9].tolist() == [sum(round(float(a[0]) * 1e8) for a in arrays), -4, 2000000000]
    assert results[0].tolist() == [np.float32(rows[0, 6] / 1e8), np.float32(-4e-8), 20.0]


@pytest.mark.parametrize(
    ("factor", "ranks"), [(1e8, 4), (1e6, 3), (2.0**100, 33), (2.0**-96, 1), (1.0, 1000), (0.7, 5)]
)
def test_fixed_factor_fits_up_to_the_last_integer(factor: float, ranks: int) -> None:
    """A block fits if no |rint(x * factor)| of its binade exceeds the limit; else it asks for its own exponent."""
    made = make_format(make_spec("f32", "sum", 1, factor=factor), ranks)
    limit = (2**31 - 1) // ranks
    largest = np.float32(min(limit / factor, float(np.finfo(np.float32).max)))
    rows = np.zeros((1, ROW_WORDS), np.int32)
    seen = set()
    for step in (0.5, 1.5):
        x = largest
        for _ in range(4):
            needs = np.zeros(1, np.uint8)
            made.encode([np.array([x])], 0, 1, made.initial_exponents(), rows, 0, needs)
            assert needs[0] == x.view(np.uint32) >> 23
            highest = np.uint32(int(needs[0]) << 23 | 0x7FFFFF).view(np.float32)
            fits = np.isfinite(x) and round(Fraction(float(highest)) * Fraction(factor)) <= limit
            assert (made.judge(needs, made.initial_exponents())[0] == MISFIT) is not fits
            if fits:
                assert abs(int(rows[0, 6])) <= limit
            seen.add(bool(fits))
            with np.errstate(over="ignore"):
                x = x * np.float32(step)
    assert seen == {True, False}


def test_a_block_that_outgrew_the_factor_uses_its_announced_exponent() -> None:
    made = make_format(make_spec("f32", "sum", 512, factor=1e8), 2)
    arrays = [random_array("f32", 512, 1), random_array("f32", 512, 2)]
    arrays[1][300] = 1e20
    exps = made.initial_exponents()
    rows = np.zeros((2, ROW_WORDS), np.int32)
    needs = np.zeros(2, np.uint8)
    made.encode([arrays[0]], 0, 2, exps, rows, 0, needs)
    assert not made.misfits(needs, exps).any()
    made.encode([arrays[1]], 0, 2, exps, rows, 0, needs)
    assert made.judge(needs, exps).tolist() == [LARGE, MISFIT]
    assert needs[1] == int(np.float32(1e20).view(np.uint32) >> 23)
    exps[1] = needs[1]
    for array in arrays:
        made.encode([array], 0, 2, exps, rows, 0, needs)
        assert not (made.judge(needs, exps) == MISFIT).any()
    results, _ = exchange(made, [[array] for array in arrays], exps)
    halves = [[array[256:] for array in arrays], [result[256:] for result in results]]
    check_bound("f32", "sum", *halves, width=256)


def test_only_zeros_need_exponent_0() -> None:
    """Why 0 can stand for the factor, and why zeros alone fit anything."""
    made = make_format(make_spec("f32", "sum", 512, factor=2.0**100), 32768)
    array = np.zeros(512, np.float32)
    array[256:] = np.array([1], np.uint32).view(np.float32)
    needs = np.zeros(2, np.uint8)
    made.exponents([array], 0, 2, needs)
    assert needs.tolist() == [0, 1]
    exps = made.initial_exponents()
    assert made.judge(needs, exps).tolist() == [0, 0]
    assert made.misfits(needs, exps).tolist() == [False, True]


@given(st.integers(0, 255), st.integers(0, 255))
def test_a_carried_exponent_lies_two_to_six_bits_above_what_the_block_needed(need: int, used: int) -> None:
    following = int(carried_over(np.array([need], np.uint8), np.array([used], np.uint8))[0])
    if used == 255:
        assert following == 0
    elif need == 0:
        # zeros: what the block had, fading
        assert following == max(used - 1, 0)
    else:
        assert following == min(max(need + 2, min(used - 1, need + 6)), 254)


@given(st.integers(1, 254), st.integers(0, 254), st.integers(1, 300))
def test_what_does_not_suit_its_exponent_in_either_direction_is_a_misfit(
    need: int, used: int, ranks: int
) -> None:
    made = make_format(TensorSpec("t", "f32", (256,), "sum", ExponentMode.CARRIED), ranks)
    misfit = bool(made.misfits(np.array([need], np.uint8), np.array([used], np.uint8))[0])
    assert misfit is not (need <= used <= need + SLACK)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 100, 128, 129, 512])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_float32_arithmetic_gives_the_bits_of_float64(ranks: int, op: str) -> None:
    """For every exponent, with values up to the largest it admits and down to ones that round to nothing."""
    generator = np.random.default_rng(ranks)
    blocks = 255
    bits = generator.integers(0, 1 << 23, (blocks, 256), np.uint32)
    # exponents at and below the block's, both signs, and values of a few low bits
    fields = np.maximum(np.arange(blocks)[:, None] - generator.integers(0, 40, (blocks, 256)), 0)
    bits[:, :4] = [0x7FFFFF, 0, 1, 0x400000]
    fields[:, :4] = np.arange(blocks)[:, None]
    bits |= fields.astype(np.uint32) << 23 | generator.integers(0, 2, (blocks, 256), np.uint32) << 31
    array = bits.reshape(-1).view(np.float32)
    quick, exact = (make_format(make_spec("f32", op, array.size), ranks) for _ in range(2))
    exact._scale32[:] = 0
    exact._multiply32[:] = 0
    # 0 is for zeros alone
    exps = np.repeat(np.maximum(np.arange(blocks), 1).astype(np.uint8), quick.blocks)
    everything = np.arange(blocks)
    outcomes = []
    for made in (quick, exact):
        rows, out = np.zeros((blocks, ROW_WORDS), np.int32), np.zeros_like(array)
        made.encode([array], 0, blocks, exps, rows, 0)
        outcomes.append(rows[:, 6:262].copy())
        # any sum may come back, not only what one rank sent
        generator = np.random.default_rng(7)
        rows[:, 6:262] = generator.integers(-(2**31) + 1, 2**31, (blocks, 256), np.int32)
        made.decode(rows, everything, everything, exps, [out])
        outcomes.append(out.view(np.uint32).copy())
    np.testing.assert_array_equal(outcomes[0], outcomes[2])
    np.testing.assert_array_equal(outcomes[1], outcomes[3])
    # most exponents can be done the quick way, as long as the clamp never bites
    assert (np.count_nonzero(quick._scale32) > 200) == (ranks <= 128)
