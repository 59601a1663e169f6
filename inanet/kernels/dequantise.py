"""Integers back to floats, straight into the caller's tensor (number format).

The sum ``R`` of a block becomes ``R * multiply[E] / divide[E]`` in float64, then one rounding to the element
type. A power-of-two ``multiply`` is exact in float64, so a sum is rounded once. NaN in ``multiply`` poisons
the block. Where rounding ``R`` to float32 first gives the same (``fast[E]`` is not 0), that is done.

Both kernels also find the first block that is poisoned.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.half import narrow16
from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK, HEAD, POISON, WORDS

_NO_FRAGMENT = np.iinfo(np.int64).max


@njit(
    "int64(int32[:, ::1], int64[::1], int64[::1], uint8[::1], float64[::1], float64[::1], float32[::1],"
    " float32[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def dequantise32(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    exps: NDArray[np.uint8],
    multiply: NDArray[np.float64],
    divide: NDArray[np.float64],
    fast: NDArray[np.float32],
    out: NDArray[np.float32],
) -> int:
    """Write block ``fragments[k]`` of ``out`` from row ``slots[k]``, with exponent table ``exps``.

    Returns the lowest poisoned fragment, or 2^63 - 1.
    """
    poisoned = _NO_FRAGMENT
    for k in range(slots.size):
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * BLOCK)
        count = min(WORDS, np.uint64(out.size) - start)
        exponent = exps[fragments[k]]
        scale, divisor, quick = multiply[exponent], divide[exponent], fast[exponent]
        if quick != 0:
            for j in range(count):
                out[start + j] = np.float32(rows[row, HEAD + j]) * quick
        elif divisor == 1.0:
            for j in range(count):
                out[start + j] = np.float32(rows[row, HEAD + j] * scale)
        else:
            for j in range(count):
                out[start + j] = np.float32(rows[row, HEAD + j] * scale / divisor)
        if exponent == POISON:
            poisoned = min(poisoned, fragments[k])
    return poisoned


@njit(
    "int64(int32[:, ::1], int64[::1], int64[::1], uint8[::1], float64[::1], float64[::1], boolean,"
    " uint16[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def dequantise16(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    exps: NDArray[np.uint8],
    multiply: NDArray[np.float64],
    divide: NDArray[np.float64],
    brain: bool,
    out: NDArray[np.uint16],
) -> int:
    """:func:`dequantise32` for f16 (``brain`` False) and bf16 (``brain`` True) bit patterns."""
    poisoned = _NO_FRAGMENT
    for k in range(slots.size):
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * BLOCK)
        count = min(WORDS, np.uint64(out.size) - start)
        exponent = exps[fragments[k]]
        scale, divisor = multiply[exponent], divide[exponent]
        if divisor == 1.0:
            for j in range(count):
                out[start + j] = narrow16(rows[row, HEAD + j] * scale, brain)
        else:
            for j in range(count):
                out[start + j] = narrow16(rows[row, HEAD + j] * scale / divisor, brain)
        if exponent == POISON:
            poisoned = min(poisoned, fragments[k])
    return poisoned


@njit(
    [
        "void(uint16[::1], uint16[::1], int64[::1], int64)",
        "void(uint32[::1], uint32[::1], int64[::1], int64)",
        "void(uint64[::1], uint64[::1], int64[::1], int64)",
    ],
    cache=True,
    nogil=True,
)
def copy_fragments(
    source: NDArray[np.unsignedinteger],
    target: NDArray[np.unsignedinteger],
    fragments: NDArray[np.int64],
    values: int,
) -> None:
    """Copy whole fragments, of ``values`` elements each, from one rank's tensor to another's."""
    for k in range(fragments.size):
        start = np.uint64(fragments[k] * values)
        for j in range(min(np.uint64(values), np.uint64(source.size) - start)):
            target[start + j] = source[start + j]
