"""Integers back to floats, straight into the caller's tensor (number format).

The sum ``R`` of an element becomes ``R * multiply[E] / divide[E]`` in float64, then one rounding to the element
type. A power-of-two ``multiply`` is exact in float64, so a sum is rounded once. Where rounding ``R`` to float32 first
gives the same (``multiply32[E]`` is not 0), that is done.

In a block of exponent 255 integers are sums of marks (:mod:`inanet.kernels.quantise`): an element that was infinite on
some rank is infinite, one that was NaN, or infinite with both signs, is NaN. Values of the others did not travel: they are 0.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.half import narrow16
from inanet.kernels.jit import njit
from inanet.kernels.lanes import LANES, write_quotient8, write_scaled8
from inanet.kernels.layout import HEADER_WORDS, PAYLOAD_WORDS, POISON
from inanet.kernels.quantise import VECTORS, spread_factors

_LANES, _VECTORS = np.uint64(LANES), np.uint64(VECTORS)
_NOWHERE = np.iinfo(np.int64).max


@njit("float64(int32)", cache=True, nogil=True, inline="always")
def unmark(marks: int) -> float:
    """What an element of a poisoned block is."""
    plus, minus = np.uint32(marks) & np.uint32(0xFFFF), np.uint32(marks) >> np.uint32(16)
    if plus != 0:
        return np.nan if minus != 0 else np.inf
    return -np.inf if minus != 0 else 0.0


@njit(
    [
        "int64(int32[::1], boolean, float32[::1], uint8[::1], int64, int64, float64[::1], float64[::1], float32[::1])",
        "int64(int32[::1], boolean, float32[::1], uint8[::1], int64, int64, float64[::1], float64[::1], float64[::1])",
    ],
    cache=True,
    nogil=True,
    _nrt=False,
)
def read_sums(
    sums: NDArray[np.int32],
    quick: bool,
    factors: NDArray[np.float32],
    exps: NDArray[np.uint8],
    first: int,
    blocks: int,
    multiply: NDArray[np.float64],
    divide: NDArray[np.float64],
    out: NDArray[np.float32] | NDArray[np.float64],
) -> int:
    """Write the elements of a fragment, as float32, or in float64 without rounding.

    ``quick``, for whole fragments of float32: by ``factors``. Else by the tables and the fragment's ``blocks`` exponents, which
    begin at ``first``. Returns the first poisoned element that is not finite, or -1.
    """
    poisoned = -1
    if quick:
        for vector in range(_VECTORS):
            write_scaled8(sums, vector * _LANES, factors[vector], out)
        return poisoned
    size, each = np.uint64(out.size), _VECTORS // np.uint64(blocks)
    for vector in range(_VECTORS):
        exponent, start = exps[np.uint64(first) + vector // each], vector * _LANES
        factor, divisor = multiply[exponent], divide[exponent]
        if exponent == POISON or start + _LANES > size:
            for at in range(start, min(start + _LANES, size)):
                if exponent == POISON:
                    out[at] = unmark(sums[at])
                    if sums[at] != 0 and poisoned < 0:
                        poisoned = int(at)
                else:
                    out[at] = sums[at] * factor / divisor
        elif divisor == 1:
            write_scaled8(sums, start, factor, out)
        else:
            write_quotient8(sums, start, factor, divisor, out)
    return poisoned


@njit(
    "int64(int32[:, ::1], int64[::1], int64[::1], uint8[::1], int64, float64[::1], float64[::1], float32[::1],"
    " float32[::1])",
    cache=True,
    nogil=True,
)
def dequantise32(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    exps: NDArray[np.uint8],
    blocks: int,
    multiply: NDArray[np.float64],
    divide: NDArray[np.float64],
    multiply32: NDArray[np.float32],
    out: NDArray[np.float32],
) -> int:
    """Write fragment ``fragments[k]`` of ``out`` from row ``slots[k]``; ``exps`` has ``blocks`` exponents per fragment.

    Returns the lowest poisoned element that is not finite, or 2^63 - 1.
    """
    lowest, factors = _NOWHERE, np.empty(VECTORS, np.float32)
    for k in range(slots.size):
        start = fragments[k] * PAYLOAD_WORDS
        part = out[start : start + PAYLOAD_WORDS]
        sums = rows[slots[k], HEADER_WORDS : HEADER_WORDS + PAYLOAD_WORDS]
        where = fragments[k] * blocks
        quick = part.size == PAYLOAD_WORDS and spread_factors(multiply32, exps, where, blocks, factors)
        found = read_sums(sums, quick, factors, exps, where, blocks, multiply, divide, part)
        if found >= 0:
            lowest = min(lowest, start + found)
    return lowest


@njit(
    "int64(int32[:, ::1], int64[::1], int64[::1], uint8[::1], int64, float64[::1], float64[::1], boolean,"
    " uint16[::1])",
    cache=True,
    nogil=True,
)
def dequantise16(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    exps: NDArray[np.uint8],
    blocks: int,
    multiply: NDArray[np.float64],
    divide: NDArray[np.float64],
    brain: bool,
    out: NDArray[np.uint16],
) -> int:
    """:func:`dequantise32` for f16 (``brain`` False) and bf16 (``brain`` True) bit patterns, rounded once."""
    lowest = _NOWHERE
    wide, factors = np.empty(PAYLOAD_WORDS, np.float64), np.empty(0, np.float32)
    for k in range(slots.size):
        start = fragments[k] * PAYLOAD_WORDS
        part = out[start : start + PAYLOAD_WORDS]
        sums = rows[slots[k], HEADER_WORDS : HEADER_WORDS + PAYLOAD_WORDS]
        exact = wide[: part.size]
        where = fragments[k] * blocks
        found = read_sums(sums, False, factors, exps, where, blocks, multiply, divide, exact)
        for j in range(part.size):
            part[j] = narrow16(exact[j], brain)
        if found >= 0:
            lowest = min(lowest, start + found)
    return lowest


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
