"""Which formats exist, and that each keeps to the range it is given."""

import mmap

import numpy as np
import pytest

from inanet.kernels.checksum import verify_rows
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, ROW_WORDS
from inanet.proto.common.formats import Format, make_format, needs_exponents
from inanet.proto.common.plan import ExponentMode, Fold, TensorSpec

from .arrays import DTYPES, make_spec, random_array

COMBINATIONS = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("sum", "mean", "max", "min")
    if not (op == "mean" and dtype in ("i32", "i64"))
]


@pytest.mark.parametrize(
    ("dtype", "op", "fold", "values"),
    [
        ("f32", "sum", Fold.SUM, 256),
        ("f16", "mean", Fold.SUM, 256),
        ("bf16", "sum", Fold.SUM, 256),
        ("f32", "max", Fold.MAX32, 256),
        ("bf16", "min", Fold.MAX32, 256),
        ("i32", "sum", Fold.SUM, 128),
        ("i32", "min", Fold.MAX32, 256),
        ("i64", "sum", Fold.SUM, 85),
        ("i64", "max", Fold.MAX64, 128),
    ],
)
def test_table_of_formats(dtype: str, op: str, fold: Fold, values: int) -> None:
    made = make_format(make_spec(dtype, op, 1000), 4)
    assert made.fold is fold
    assert made.values == values
    assert made.fragments == -(-1000 // values)
    assert made.uses_exponents is needs_exponents(dtype, op)
    assert made.uses_exponents is (op in ("sum", "mean") and dtype in ("f32", "f16", "bf16"))


@pytest.mark.parametrize(
    ("mode", "elements", "fragments"),
    [
        (ExponentMode.PROLOGUE, 32 * 256, 1),
        (ExponentMode.PROLOGUE, 32 * 256 + 1, 2),
        (ExponentMode.CARRIED, 1024 * 256, 1),
        (ExponentMode.CARRIED, 1024 * 256 + 1, 2),
        (ExponentMode.CARRIED, 1, 1),
        (ExponentMode.CARRIED, 0, 1),
        (ExponentMode.FIXED, 1024 * 256, 0),
    ],
)
def test_fragments_of_a_prologue(mode: ExponentMode, elements: int, fragments: int) -> None:
    factor = 1e8 if mode is ExponentMode.FIXED else 0.0
    made = make_format(TensorSpec("t", "f32", (elements,), "sum", mode, factor), 4)
    assert made.exponent_fragments == fragments
    assert len(made.initial_exponents()) == made.fragments * made.blocks
    assert made.blocks == (32 if mode is ExponentMode.PROLOGUE else 1)


@pytest.mark.parametrize(
    ("dtype", "op", "mode", "factor", "ranks", "message"),
    [
        ("f64", "sum", ExponentMode.PROLOGUE, 0.0, 4, "f64 is not supported.*f32, f16, bf16 with sum"),
        ("c64", "sum", ExponentMode.PROLOGUE, 0.0, 4, "sum of c64 is not supported.*i32, i64 with sum"),
        ("f32", "prod", ExponentMode.NONE, 0.0, 4, "prod of f32 is not supported.*max, min"),
        ("i32", "mean", ExponentMode.NONE, 0.0, 4, "mean of i32 is not supported.*sum and divide"),
        ("f32", "sum", ExponentMode.NONE, 0.0, 4, "sum of f32 does not go with exponent mode none"),
        ("f32", "max", ExponentMode.CARRIED, 0.0, 4, "max of f32 does not go with exponent mode carried"),
        ("i32", "sum", ExponentMode.PROLOGUE, 0.0, 4, "sum of i32 does not go with exponent mode prologue"),
        ("f32", "sum", ExponentMode.FIXED, 0.0, 4, "factor must be between .*, not 0.0"),
        ("f32", "sum", ExponentMode.FIXED, -1e8, 4, "factor must be between .*, not -1"),
        ("f32", "sum", ExponentMode.FIXED, 2.0**101, 4, "factor must be between"),
        ("f32", "sum", ExponentMode.FIXED, float("nan"), 4, "factor must be between .*, not nan"),
        ("f32", "sum", ExponentMode.PROLOGUE, 0.0, 0, "takes 1 to 32768 ranks, not 0"),
        ("f32", "sum", ExponentMode.PROLOGUE, 0.0, 32769, "takes 1 to 32768 ranks, not 32769"),
        ("i64", "sum", ExponentMode.NONE, 0.0, 513, "sum of i64 takes 1 to 512 ranks, not 513"),
    ],
)
def test_refusals_say_what_is_supported(
    dtype: str, op: str, mode: ExponentMode, factor: float, ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)tensor 'w.bias'.*{message}"):
        make_format(TensorSpec("w.bias", dtype, (8,), op, mode, factor), ranks)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(9, np.float32),
        np.zeros((2, 4), np.float32),
        np.zeros(16, np.float32)[::2],
        np.zeros(8, np.float64),
        np.zeros(8, np.int32),
    ],
)
def test_wrong_arrays_are_refused(wrong: np.ndarray) -> None:
    made = make_format(make_spec("f32", "sum", 8), 1)
    rows = np.zeros((1, ROW_WORDS), np.int32)
    with pytest.raises(
        ValueError, match="tensor 't' needs a contiguous 1-D float32 array of 8 elements, got"
    ):
        made.encode([wrong], 0, 1, made.initial_exponents(), rows, 0)


def table(made: Format, arrays: list[np.ndarray]) -> np.ndarray:
    exps = made.initial_exponents()
    if made.uses_exponents:
        made.exponents(arrays, 0, made.fragments, exps)
    return exps


@pytest.mark.parametrize("tail", [1, 2, -1, 0])
@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS)
def test_chunks_touch_only_their_range(dtype: str, op: str, tail: int) -> None:
    """Any cut of the fragments gives the rows of one call, and no other row or element is written."""
    values = make_format(make_spec(dtype, op, 1), 2).values
    elements = 3 * values + tail
    made = make_format(make_spec(dtype, op, elements), 2)
    arrays = [random_array(dtype, elements, seed) for seed in (1, 2)]
    exps = table(made, arrays)
    whole = np.full((made.fragments + 2, ROW_WORDS), 0x33333333, np.int32)
    made.encode(arrays, 0, made.fragments, exps, whole, 1)
    for lo in range(made.fragments):
        for hi in range(lo, made.fragments + 1):
            rows = np.full_like(whole, 0x33333333)
            made.encode(arrays, lo, hi, exps, rows, 1 + lo)
            expected = np.full_like(whole, 0x33333333)
            expected[1 + lo : 1 + hi] = whole[1 + lo : 1 + hi]
            np.testing.assert_array_equal(rows, expected)
    assert (whole[:, :HEADER_WORDS] == 0x33333333).all()

    results = [array.copy() for array in arrays]
    everything = np.arange(made.fragments)
    made.decode(whole, everything + 1, everything, exps, results)
    for fragment in range(made.fragments):
        parts = [array.copy() for array in arrays]
        index = np.array([fragment])
        made.decode(whole, index + 1, index, exps, parts)
        for part, result, array in zip(parts, results, arrays, strict=True):
            start, stop = fragment * values, (fragment + 1) * values
            np.testing.assert_array_equal(part[start:stop], result[start:stop])
            np.testing.assert_array_equal(part[:start], array[:start])
            np.testing.assert_array_equal(part[stop:], array[stop:])
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("elements", [1, 255, 256, 257])
@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS)
def test_tails_are_padded_with_zeros_and_sealed(dtype: str, op: str, elements: int) -> None:
    made = make_format(make_spec(dtype, op, elements), 1)
    array = random_array(dtype, elements, 3)
    rows = np.full((made.fragments, ROW_WORDS), 0x33333333, np.int32)
    made.encode([array], 0, made.fragments, table(made, [array]), rows, 0)
    ok = np.zeros(made.fragments, np.uint8)
    assert verify_rows(rows, np.arange(made.fragments), HEADER_WORDS, PAYLOAD_WORDS, ok) == 0
    # the same elements followed by zeros fill the fragment with the same words
    full = np.zeros(made.fragments * made.values, array.dtype)
    full[:elements] = array
    padded = make_format(make_spec(dtype, "max" if op == "max" else "sum", len(full)), 1)
    if op in ("sum", "mean", "max"):
        other = np.zeros_like(rows)
        padded.encode([full], 0, made.fragments, table(padded, [full]), other, 0)
        np.testing.assert_array_equal(rows[:, HEADER_WORDS:], other[:, HEADER_WORDS:])


@pytest.mark.parametrize(("dtype", "op"), COMBINATIONS)
def test_an_empty_tensor_has_an_empty_fragment(dtype: str, op: str) -> None:
    """So that no host is done before all have said that they reduce the same."""
    made = make_format(make_spec(dtype, op, 0), 3)
    array = random_array(dtype, 0, 4)
    only = np.zeros(1, np.int64)
    rows = np.full((1, ROW_WORDS), 7, np.int32)
    assert made.fragments == 1
    made.encode([array], 0, 1, made.initial_exponents(), rows, 0)
    assert len(np.unique(rows[0, HEADER_WORDS:-1])) == 1
    made.decode(rows, only, only, made.initial_exponents(), [array])
    assert (made.overflow, made.poisoned) == (-1, -1)
    assert made.first_nonfinite(array) == -1


def test_fragments_beyond_2_31_elements() -> None:
    """Index arithmetic of the last fragments; the pages before them are never touched, so cost nothing."""
    elements = 2**31 + 300
    reserve_nothing = 0x4000  # MAP_NORESERVE, which mmap names only from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve_nothing
    array = np.frombuffer(mmap.mmap(-1, 2 * elements, flags), np.float16)
    array[2**31 - 1 :] = np.arange(301)
    made = make_format(make_spec("f16", "sum", elements), 1)
    lo, hi = 2**23 - 1, 2**23 + 2
    assert made.fragments == hi
    assert made.exponent_fragments == 2**18 + 1
    exps = made.initial_exponents()
    made.exponents([array], lo, hi, exps[lo * made.blocks : hi * made.blocks])
    rows = np.zeros((3, ROW_WORDS), np.int32)
    made.encode([array], lo, hi, exps, rows, 0)
    expected = array[2**31 - 256 :].copy()
    array[2**31 - 1 :] = 0
    made.decode(rows, np.arange(3), np.arange(lo, hi), exps, [array])
    np.testing.assert_array_equal(array[2**31 - 256 :], expected)


def test_seal_writes_the_checksums() -> None:
    made = make_format(make_spec("f32", "sum", 1024), 1)
    rows = np.random.default_rng(8).integers(-(2**31), 2**31, (4, ROW_WORDS)).astype(np.int32)
    before = rows.copy()
    made.seal(rows, 1, 2)
    assert np.flatnonzero((rows != before).any(axis=1)).tolist() == [1, 2]
    assert verify_rows(rows, np.array([1, 2]), HEADER_WORDS, PAYLOAD_WORDS, np.zeros(2, np.uint8)) == 0
    np.testing.assert_array_equal(rows[:, :CHECKSUM_WORD], before[:, :CHECKSUM_WORD])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("where", [0, 255, 256, 700])
@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_first_nonfinite_is_found(dtype: str, op: str, where: int, what: float) -> None:
    made = make_format(make_spec(dtype, op, 701), 2)
    clean, dirty = random_array(dtype, 701, 5), random_array(dtype, 701, 6)
    assert made.first_nonfinite(clean) == -1
    assert made.locate_nonfinite([clean, clean]) == (-1, -1)
    pattern = np.float32(what).view(np.uint32) >> 16
    dirty[where:] = what if dtype != "bf16" else pattern
    assert made.first_nonfinite(dirty) == where
    assert made.locate_nonfinite([clean, dirty]) == (1, where)


def test_integers_are_always_finite() -> None:
    made = make_format(make_spec("i32", "max", 3), 2)
    assert made.locate_nonfinite([np.array([-1, 0x7F800000, 0x7FFFFFFF], np.int32)]) == (-1, -1)
