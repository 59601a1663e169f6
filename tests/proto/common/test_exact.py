"""Integer sums, maxima and minima: exact, or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.proto.common.formats import make_format

from .arrays import DTYPES, exchange, from_floats, make_spec, random_array, to_floats

INTEGERS = {"i32": (2**31, 512), "i64": (2**63, 512)}


def edges(dtype: str) -> list[int]:
    top = INTEGERS[dtype][0]
    limbs = [1 << 16, 1 << 22, 1 << 44]
    near = [0, 1, -1, top - 1, -top, *limbs, *(-limb for limb in limbs), *(limb - 1 for limb in limbs)]
    return [value for value in near if -top <= value < top]


@st.composite
def integers(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    dtype = draw(st.sampled_from(sorted(INTEGERS)))
    top = INTEGERS[dtype][0]
    value = st.integers(-top, top - 1) | st.sampled_from(edges(dtype))
    length = draw(st.integers(1, 4))
    ranks = draw(st.lists(st.lists(value, min_size=length, max_size=length), min_size=1, max_size=9))
    return dtype, ranks


@given(integers())
def test_sums_are_exact_or_reported(case: tuple[str, list[list[int]]]) -> None:
    dtype, ranks = case
    top = INTEGERS[dtype][0]
    made = make_format(make_spec(dtype, "sum", len(ranks[0])), len(ranks))
    results, _ = exchange(made, [[np.array(rank, DTYPES[dtype])] for rank in ranks])
    totals = [sum(column) for column in zip(*ranks, strict=True)]
    overflowed = [k for k, total in enumerate(totals) if not -top <= total < top]
    assert made.overflow == (overflowed[0] if overflowed else -1)
    # what does not fit is the sum modulo 2**bits, and only that element
    for got, total in zip(results[0].tolist(), totals, strict=True):
        assert got == (total + top) % (2 * top) - top


@pytest.mark.parametrize("dtype", sorted(INTEGERS))
def test_limbs_of_the_most_ranks_do_not_wrap(dtype: str) -> None:
    top, ranks = INTEGERS[dtype]
    made = make_format(make_spec(dtype, "sum", 3), ranks)
    # every limb at its largest and at its smallest, on all ranks; pairs cancel so that the sum fits
    up, down = np.array([top - 1, -1, 0], DTYPES[dtype]), np.array([-top, 1, 0], DTYPES[dtype])
    results, _ = exchange(made, [[up] * (ranks // 2), [down] * (ranks // 2)])
    assert made.overflow == -1
    assert results[-1].tolist() == [-ranks // 2, 0, 0]
    minus = np.full(3, -1, DTYPES[dtype])
    results, _ = exchange(made, [[minus] * ranks])
    assert results[0].tolist() == [-ranks] * 3


def test_overflow_keeps_the_lowest_index_until_cleared() -> None:
    made = make_format(make_spec("i32", "sum", 500), 2)
    array = np.zeros(500, np.int32)
    array[[200, 450]] = 2**31 - 1
    exchange(made, [[array], [array]])
    assert made.overflow == 200
    exchange(made, [[np.zeros(500, np.int32)]] * 2)
    assert made.overflow == 200
    made.clear()
    assert made.overflow == -1


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_integers(dtype: str, op: str) -> None:
    made = make_format(make_spec(dtype, op, 700), 5)
    arrays = [random_array(dtype, 700, seed) for seed in range(5)]
    for k, array in enumerate(arrays):
        array[k : k + len(edges(dtype))] = edges(dtype)
    expected = getattr(np, f"{op}imum").reduce(arrays)
    results, _ = exchange(made, [arrays[:2], arrays[2:]])
    for result in results:
        np.testing.assert_array_equal(result, expected)
    assert made.poisoned == -1


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_floats(dtype: str, op: str) -> None:
    made = make_format(make_spec(dtype, op, 700), 5)
    arrays = [random_array(dtype, 700, seed) for seed in range(5)]
    expected = getattr(np, f"{op}imum").reduce([to_floats(dtype, array) for array in arrays])
    results, _ = exchange(made, [arrays[:3], arrays[3:]])
    np.testing.assert_array_equal(to_floats(dtype, results[4]), expected)
    assert made.poisoned == -1


SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 2.0**-24, -(2.0**-24)]


def ieee(op: str, a: float, b: float) -> float:
    """IEEE 754-2019 maximum and minimum: NaN wins, -0.0 is below 0.0."""
    if np.isnan(a) or np.isnan(b):
        return np.nan
    if a == b == 0:
        negative = np.signbit(a) and np.signbit(b) if op == "max" else np.signbit(a) or np.signbit(b)
        return -0.0 if negative else 0.0
    return max(a, b) if op == "max" else min(a, b)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema_of_special_values(dtype: str, op: str) -> None:
    left, right = (np.array(side) for side in zip(*((a, b) for a in SPECIAL for b in SPECIAL), strict=True))
    arrays = [from_floats(dtype, left), from_floats(dtype, right)]
    expected = np.array([ieee(op, a, b) for a, b in zip(left, right, strict=True)])
    made = make_format(make_spec(dtype, op, len(left), propagate=True), 2)
    for hosts in ([arrays], [[arrays[0]], [arrays[1]]]):
        made.clear()
        results, _ = exchange(made, hosts)
        got = to_floats(dtype, results[0])
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.signbit(got)[expected == 0], np.signbit(expected)[expected == 0])
        assert made.poisoned == np.flatnonzero(np.isnan(expected))[0]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_what_must_not_propagate_poisons_its_element_on_all_ranks(dtype: str, op: str, what: float) -> None:
    """Also an infinity that would lose: otherwise the other ranks would not learn of the refusal."""
    made = make_format(make_spec(dtype, op, 300), 3)
    arrays = [random_array(dtype, 300, seed) for seed in range(3)]
    arrays[1][270:271] = from_floats(dtype, [what])
    results, _ = exchange(made, [[array] for array in arrays])
    assert made.poisoned == 270
    for result in results:
        assert np.flatnonzero(np.isnan(to_floats(dtype, result))).tolist() == [270]
