"""Tensors for format tests: arrays of every dtype, their exact values, and a whole exchange in one call."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from inanet.kernels.layout import ROW_WORDS
from inanet.proto.common.formats import Format
from inanet.proto.common.plan import ExponentMode, TensorSpec

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i32": np.int32, "i64": np.int64}


def make_spec(dtype: str, op: str, elements: int, factor: float = 0.0, propagate: bool = False) -> TensorSpec:
    """A tensor named ``t`` in the mode its kind needs: fixed if there is a factor, else prologue or none."""
    mode = ExponentMode.NONE
    if op in ("sum", "mean") and not dtype.startswith("i"):
        mode = ExponentMode.FIXED if factor else ExponentMode.PROLOGUE
    return TensorSpec("t", dtype, (elements,), op, mode, factor, propagate)


def random_array(dtype: str, elements: int, seed: int) -> np.ndarray:
    """Seeded values: normal floats, integers from a quarter of the type's range."""
    rng = np.random.default_rng(seed)
    if dtype.startswith("i"):
        limit = np.iinfo(DTYPES[dtype]).max // 4
        return rng.integers(-limit, limit, elements, dtype=DTYPES[dtype])
    return from_floats(dtype, rng.standard_normal(elements))


def from_floats(dtype: str, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Floats as an array of the dtype; bf16 by cutting off the lower half."""
    wide = np.asarray(values, np.float32)
    return (wide.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else wide.astype(DTYPES[dtype])


def to_floats(dtype: str, array: np.ndarray) -> np.ndarray:
    """The array's values as float64, exactly."""
    if dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def exact(dtype: str, array: np.ndarray) -> list[int]:
    """The array's values in units of 2**-149, which every finite float32 is a multiple of."""
    fractions, exponents = np.frexp(to_floats(dtype, array))
    whole = (fractions * 2.0**24).astype(np.int64)
    return [
        value << (e + 125) if e >= -125 else value >> (-125 - e)
        for value, e in zip(whole.tolist(), exponents.tolist(), strict=True)
    ]


def exact_sums(dtype: str, arrays: Sequence[np.ndarray]) -> list[Fraction]:
    """The exact sum of each element over the arrays."""
    return [Fraction(sum(column), 2**149) for column in zip(*(exact(dtype, a) for a in arrays), strict=True)]


def exchange(
    made: Format, hosts: Sequence[Sequence[np.ndarray]], exps: np.ndarray | None = None
) -> tuple[list[np.ndarray], np.ndarray]:
    """One round without a network: hosts encode their ranks' arrays, rows are folded, ranks decode.

    Arrays are not changed. Returns the results of all ranks in order, and the rows of the result. Without
    ``exps`` a prologue agrees on them.
    """
    copies = [[array.copy() for array in host] for host in hosts]
    if exps is None:
        exps = made.initial_exponents()
        if made.uses_exponents:
            for host in copies:
                mine = np.zeros_like(exps)
                made.exponents(host, 0, made.fragments, mine)
                np.maximum(exps, mine, out=exps)
    total: np.ndarray | None = None
    for host in copies:
        rows = np.zeros((made.fragments, ROW_WORDS), np.int32)
        made.encode(host, 0, made.fragments, exps, rows, 0)
        if total is None:
            total = rows
        elif made.fold.name == "SUM":
            total = np.add(total, rows, dtype=np.int32)
        elif made.fold.name == "MAX32":
            total = np.maximum(total, rows)
        else:
            payload = np.maximum(total[:, 6:262].copy().view("<i8"), rows[:, 6:262].copy().view("<i8"))
            total[:, 6:262] = payload.view(np.int32)
    assert total is not None
    everything = np.arange(made.fragments)
    for host in copies:
        made.decode(total, everything, everything, exps, host)
    return [array for host in copies for array in host], total
