"""Floats to integers (number format).

With exponent ``E`` of a block and ``n`` contributing ranks an element becomes ``q = rint(x * scale[E])``,
clamped to ``limit = floor((2**31 - 1) / n)``: no sum of ``n`` such integers can wrap. Scales are powers of
two from 2**-112 to 2**157, beyond float32; the product is taken in float64, where it is exact, and so is the
clamp. Where float32 gives the same (``scale32[E]`` is not 0) that is done: twice as many elements fit a vector.

Tables (``scale``, ``scale32``, ...) have 256 entries, one for each exponent; :mod:`inanet.proto.common.quantised` makes
them. ``exps`` is uint8, the exponents of a whole tensor, ``blocks`` for each fragment of 256 elements. *Vectors* are eight
neighbouring elements (:data:`~inanet.kernels.lanes.LANES`), whether or not they are a block.

A block of exponent 255 holds a NaN or infinity on some rank. Its integers are no values but marks: 1 for infinity, 2^16 for
minus infinity, both for NaN, 0 for what is finite. Sums of up to 2^15 of them tell what an element was on any rank.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import slot_checksum
from inanet.kernels.half import widen16
from inanet.kernels.jit import njit
from inanet.kernels.lanes import LANES, add_scaled8
from inanet.kernels.layout import CHECK, HEAD, HEADER_WORDS, PAYLOAD_WORDS, POISON

#: marks of elements in poisoned blocks
PLUS, MINUS = 1, 1 << 16

_LANES = np.uint64(LANES)
#: vectors of eight elements in a fragment
VECTORS = PAYLOAD_WORDS // LANES
_VECTORS = np.uint64(VECTORS)


@njit("float32(int64)", cache=True, nogil=True, inline="always")
def largest_float32(limit: int) -> np.float32:
    """Largest float32 that is not above ``limit``, a positive integer."""
    nearest = np.float32(limit)
    # the next one down: the product is off by half a unit in the last place at least, whatever the mantissa
    return nearest if nearest <= np.float64(limit) else np.float32(nearest * np.float32(1 - 2**-24))


@njit("int32(float32)", cache=True, nogil=True, inline="always")
def mark(value: float) -> Any:
    """What an element of a poisoned block becomes."""
    if value != value:
        return np.int32(PLUS + MINUS)
    if value == np.inf:
        return np.int32(PLUS)
    return np.int32(MINUS) if value == -np.inf else np.int32(0)


@njit("boolean(float32[::1], uint8[::1], int64, int64, float32[::1])", cache=True, nogil=True, _nrt=False)
def spread_factors(
    table: NDArray[np.float32], exps: NDArray[np.uint8], first: int, blocks: int, factors: NDArray[np.float32]
) -> bool:
    """Write the factor of each vector of a fragment, ``table[E]``, into ``factors`` (float32[:data:`VECTORS`]).

    The fragment's ``blocks`` exponents begin at ``exps[first]``. False if one of them has no factor in float32 (0).
    """
    whole = True
    if blocks == factors.size:
        for block in range(_VECTORS):
            factor = table[exps[np.uint64(first) + block]]
            whole &= factor != 0
            factors[block] = factor
    else:
        each = factors.size // blocks
        for block in range(blocks):
            factor = table[exps[first + block]]
            whole &= factor != 0
            factors[block * each : (block + 1) * each] = factor
    return whole


@njit(
    "void(float32[::1], boolean, float32[::1], uint8[::1], int64, int64, float64[::1], int64, int32[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def add_quantised(
    values: NDArray[np.float32],
    quick: bool,
    factors: NDArray[np.float32],
    exps: NDArray[np.uint8],
    first: int,
    blocks: int,
    scale: NDArray[np.float64],
    limit: int,
    sums: NDArray[np.int32],
) -> None:
    """Add one rank's elements of a fragment (``values``, 256 of them or less at a tensor's end) to ``sums``, int32[256].

    ``quick``, for whole fragments: in float32, by ``factors`` (:func:`spread_factors`). Else in float64, by ``scale`` of the
    fragment's ``blocks`` exponents, which begin at ``exps[first]``.
    """
    if quick:
        bound32 = largest_float32(limit)
        for vector in range(_VECTORS):
            add_scaled8(values, vector * _LANES, factors[vector], bound32, sums)
        return
    bound, each = np.float64(limit), _VECTORS // np.uint64(blocks)
    for vector in range(_VECTORS):
        exponent, start = exps[np.uint64(first) + vector // each], vector * _LANES
        factor = scale[exponent]
        if exponent != POISON and start + _LANES <= np.uint64(values.size):
            add_scaled8(values, start, factor, bound, sums)
        else:
            for at in range(start, min(start + _LANES, np.uint64(values.size))):
                if exponent == POISON:
                    sums[at] += mark(values[at])
                else:
                    q = np.rint(np.float64(values[at]) * factor)
                    # comparisons, because the NaN rules of min and max cost time
                    q = q if q < bound else bound
                    q = q if q > -bound else -bound
                    sums[at] += np.int32(q)


@njit(
    "void(uint16[::1], boolean, int64, int64, uint8[::1], int64, float64[::1], float32[::1], int64, uint8[::1],"
    " int32[:, ::1], int64, boolean, boolean)",
    cache=True,
    nogil=True,
)
def quantise(
    values: NDArray[np.uint16],
    brain: bool,
    lo: int,
    hi: int,
    exps: NDArray[np.uint8],
    blocks: int,
    scale: NDArray[np.float64],
    scale32: NDArray[np.float32],
    limit: int,
    misfit: NDArray[np.uint8],
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """Quantise fragments ``lo`` to ``hi - 1`` of one rank's elements into rows ``row0`` onwards.

    ``values`` holds patterns of f16 (``brain`` False) or bf16 (``brain`` True); float32 has a kernel that takes all
    ranks at once (:func:`inanet.kernels.together.quantise_together`). ``exps`` holds ``blocks`` exponents per fragment of the
    tensor. ``rows`` is slot memory, int32[slots, 263]. The ``first`` rank of a host clears the payload, each adds to it, the
    ``last`` one writes the checksum; what a short last fragment leaves over stays 0.

    A fragment ``lo + i`` with ``misfit[i] != 0`` is not quantised; its payload is that exponent, then zeros.
    """
    wide, factors = np.empty(PAYLOAD_WORDS, np.float32), np.empty(VECTORS, np.float32)
    for i in range(hi - lo):
        payload = rows[row0 + i, HEADER_WORDS : HEADER_WORDS + PAYLOAD_WORDS]
        if first:
            payload[:] = 0
        if misfit[i] != 0:
            rows[row0 + i, HEAD] = misfit[i]
        else:
            start = (lo + i) * PAYLOAD_WORDS
            count = min(PAYLOAD_WORDS, values.size - start)
            for j in range(count):
                wide[j] = widen16(values[start + j], brain)
            where = (lo + i) * blocks
            quick = count == PAYLOAD_WORDS and spread_factors(scale32, exps, where, blocks, factors)
            add_quantised(wide[:count], quick, factors, exps, where, blocks, scale, limit, payload)
        if last:
            rows[row0 + i, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))
