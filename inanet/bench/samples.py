"""The values that ``ina bench allreduce`` sums, and what their sum must be: block by block, so that nothing but the
measured tensor is ever held as a whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

#: Elements that are made and checked at a time: little memory beside the tensor's, whose use is measured as well.
BLOCK = 1 << 15


def blocks(count: int) -> Iterator[tuple[int, slice]]:
    """Number and place of every block of ``count`` elements."""
    for number, start in enumerate(range(0, count, BLOCK)):
        yield number, slice(start, min(start + BLOCK, count))


def source(dtype: str, count: int, rank: int, block: int = 0) -> Any:
    """A rank's values of one block: normally distributed, or small integers. Shape (count,)."""
    generator = np.random.default_rng((rank, block))
    if np.dtype(dtype).kind == "i":
        return generator.integers(-1000, 1000, count).astype(dtype)
    return generator.standard_normal(count, np.float32).astype(dtype)


def fill(array: Any, rank: int) -> None:
    """Write a rank's values into a one-dimensional array."""
    for number, place in blocks(len(array)):
        array[place] = source(array.dtype.name, place.stop - place.start, rank, number)


def check(array: Any, op: str, world: int) -> tuple[int, float]:
    """How many elements are out of the format's bound for the sum of all ranks' values, and the largest error."""
    wrong, worst = 0, 0.0
    for number, place in blocks(len(array)):
        values = [source(array.dtype.name, place.stop - place.start, rank, number) for rank in range(world)]
        error = np.abs(array[place].astype(np.float64) - exact(op, values))
        # not "greater than": a NaN is wrong too
        wrong += int((~(error <= tolerance(array.dtype.name, op, values))).sum())
        worst = max(worst, float(error.max(initial=0.0)))
    return wrong, worst


def exact(op: str, values: Sequence[Any]) -> Any:
    """The result in float64 (int64 values of these sizes are exact in it)."""
    wide = np.stack([value.astype(np.float64) for value in values])
    return {"sum": wide.sum(0), "mean": wide.mean(0), "max": wide.max(0), "min": wide.min(0)}[op]


def tolerance(dtype: str, op: str, values: Sequence[Any]) -> float:
    """Largest error that the number format allows for these values of all ranks; 0 where it is exact."""
    if np.dtype(dtype).kind == "i" or op in ("max", "min"):
        return 0.0
    peak = max(float(np.abs(value.astype(np.float64)).max(initial=0.0)) for value in values)
    n = len(values)
    digits = {"float32": 24, "float16": 11}[dtype]
    # carried exponents lie up to six bits above the block's own (inanet.kernels.exponents)
    return float(n * 2.0 ** ((n - 1).bit_length() - 32) * peak * 2 * 64 + n * peak * 2.0**-digits)
