"""The values that ``ina bench allreduce`` sums, and what their sum must be: block by block, so that nothing but the
measured tensor is ever held as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

#: Elements that are made and checked at a time: little memory beside the tensor's, whose use is measured as well.
CHUNK = 1 << 15


def blocks(count: int) -> Iterator[tuple[int, slice]]:
    """Number and place of every block of ``count`` elements."""
    for number, start in enumerate(range(0, count, CHUNK)):
        yield number, slice(start, min(start + CHUNK, count))


class Bfloat16(np.ndarray):
    """uint16 bits that say that they are bfloat16, as packages' dtypes do that numpy itself has not."""

    class Named:
        """Stands for such a dtype."""

        name, isnative = "bfloat16", True

    @property
    def dtype(self) -> Any:
        """What collectives ask for."""
        return self.Named()


def stored(dtype: str) -> "np.dtype[Any]":
    """The dtype of the bits: uint16 for bfloat16."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def tensor(array: Any, dtype: str) -> Any:
    """What a collective is given: the array, or the same memory as bfloat16."""
    return array.view(Bfloat16) if dtype == "bfloat16" else array


def wide(array: Any, dtype: str) -> Any:
    """Values in float64."""
    if dtype == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def source(dtype: str, count: int, rank: int, block: int = 0) -> Any:
    """A rank's values of one block: normally distributed, or small integers. Shape (count,)."""
    generator = np.random.default_rng((rank, block))
    if stored(dtype).kind == "i":
        return generator.integers(-1000, 1000, count).astype(dtype)
    values = generator.standard_normal(count, np.float32)
    if dtype != "bfloat16":
        return values.astype(dtype)
    # to the nearest, ties to even; there are no NaNs here
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def fill(array: Any, rank: int, dtype: str = "") -> None:
    """Write a rank's values into a one-dimensional array; ``dtype`` where it is not the array's."""
    for number, place in blocks(len(array)):
        array[place] = source(dtype or array.dtype.name, place.stop - place.start, rank, number)


def check(array: Any, op: str, world: int, dtype: str = "") -> tuple[int, float]:
    """How many elements are out of the format's bound for the sum of all ranks' values, and the largest error."""
    dtype = dtype or array.dtype.name
    wrong, worst = 0, 0.0
    for number, place in blocks(len(array)):
        values = [wide(source(dtype, place.stop - place.start, rank, number), dtype) for rank in range(world)]
        error = np.abs(wide(array[place], dtype) - exact(op, values))
        # not "greater than": a NaN is wrong too
        wrong += int((~(error <= tolerance(dtype, op, values))).sum())
        worst = max(worst, float(error.max(initial=0.0)))
    return wrong, worst


def exact(op: str, values: Sequence[Any]) -> Any:
    """The result in float64 (int64 values of these sizes are exact in it)."""
    wide = np.stack([value.astype(np.float64) for value in values])
    return {"sum": wide.sum(0), "mean": wide.mean(0), "max": wide.max(0), "min": wide.min(0)}[op]


def tolerance(dtype: str, op: str, values: Sequence[Any]) -> float:
    """Largest error that the number format allows for these values of all ranks; 0 where it is exact."""
    if stored(dtype).kind == "i" or op in ("max", "min"):
        return 0.0
    peak = max(float(np.abs(value.astype(np.float64)).max(initial=0.0)) for value in values)
    n = len(values)
    digits = {"float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    # carried exponents lie up to eight bits above the block's own (inanet.proto.common.quantised)
    return float(n * 2.0 ** ((n - 1).bit_length() - 32) * peak * 2 * 256 + n * peak * 2.0**-digits)
