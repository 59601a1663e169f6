"""float32 tensors of all ranks on one host, a fragment at a time, so that each is read from memory once.

:func:`quantise_together` fills the rows of packets. :func:`reduce_together` does a whole round for a job that has no
other hosts; its bits are those of the network, for a fifth of the memory traffic of separate kernels with four ranks.

``bases`` holds one address for each rank, uint64, where its tensor of ``size`` float32 begins; whoever calls keeps the tensors
alive. Exponents, tables and vectors are as in :mod:`inanet.kernels.quantise`.
"""

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.dequantise import read_sums
from inanet.kernels.exponents import exponent_of, raise_peaks
from inanet.kernels.jit import njit
from inanet.kernels.lanes import LANES, add_scaled8, raise_peaks8, write_scaled8
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, POISON
from inanet.kernels.pointers import pointer_to
from inanet.kernels.quantise import VECTORS, add_quantised, largest_float32, spread_factors

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

_LANES = np.uint64(LANES)


_float32_pointer = pointer_to(types.float32)


@njit("void(uint64[::1], int64, int64, int64, uint32[::1])", cache=True, nogil=True, inline="always")
def _find_peaks(bases: NDArray[np.uint64], start: int, count: int, blocks: int, peaks: U32) -> None:
    """Set ``peaks[:blocks]`` to the float32 bits of the largest magnitude that any rank has in each block of a fragment.

    The fragment is elements ``start`` to ``start + count - 1`` of the tensors. ``peaks`` has room for one of each vector.
    """
    peaks[:] = 0
    for rank in range(len(bases)):
        base = bases[rank] + np.uint64(start) * np.uint64(4)
        if count == PAYLOAD_WORDS:
            for vector in range(np.uint64(0), np.uint64(VECTORS), _LANES):
                raise_peaks8(base, vector * _LANES, peaks, vector)
        else:
            bits = carray(_float32_pointer(base), (count,), np.float32).view(np.uint32)
            raise_peaks(bits, LANES, VECTORS, peaks)
    each = VECTORS // blocks
    if each > 1:
        for block in range(blocks):
            peaks[block] = peaks[block * each : (block + 1) * each].max()


@njit(
    "void(uint64[::1], int64, int64, boolean, float32[::1], uint8[::1], int64, int64, float64[::1], int64, int32[::1])",
    cache=True,
    nogil=True,
    inline="always",
)
def _sum(
    bases: NDArray[np.uint64],
    start: int,
    count: int,
    quick: bool,
    factors: F32,
    exps: U8,
    first: int,
    blocks: int,
    scale: F64,
    limit: int,
    sums: NDArray[np.int32],
) -> None:
    """Quantised sum of elements ``start`` to ``start + count - 1`` over all ranks into ``sums``, int32[256]; the rest is as in
    :func:`inanet.kernels.quantise.add_quantised`.
    """
    sums[:] = 0
    bound32 = largest_float32(limit)
    for rank in range(len(bases)):
        base = bases[rank] + np.uint64(start) * np.uint64(4)
        if quick:
            for vector in range(np.uint64(VECTORS)):
                add_scaled8(base, vector * _LANES, factors[vector], bound32, sums)
        else:
            part = carray(_float32_pointer(base), (count,), np.float32)
            add_quantised(part, False, factors, exps, first, blocks, scale, limit, sums)


@njit(
    "void(uint64[::1], int64, int64, int64, boolean, uint8[::1], int64, uint8[::1], int64, float64[::1], float32[::1],"
    " uint8[::1], int32[:, ::1], int64)",
    cache=True,
    nogil=True,
)
def quantise_together(
    bases: NDArray[np.uint64],
    size: int,
    lo: int,
    hi: int,
    check: bool,
    exps: U8,
    blocks: int,
    top: U8,
    limit: int,
    scale: F64,
    scale32: F32,
    needs: U8,
    rows: NDArray[np.int32],
    row0: int,
) -> None:
    """Payload and checksum of rows ``row0`` on: fragments ``lo`` to ``hi - 1`` of tensors of ``size`` elements at ``bases``.

    ``exps`` has ``blocks`` exponents per fragment. With ``check``, for one block per fragment only, ``needs[i]`` becomes the
    exponent of fragment ``lo + i`` over all ranks. If that is more than ``top[exps[lo + i]]``, the fragment is not quantised;
    its payload is what it needs, then zeros. Without ``check``, ``needs`` is not touched and may be empty.
    """
    peaks, factors = np.empty(VECTORS, np.uint32), np.empty(VECTORS, np.float32)
    for i in range(hi - lo):
        start, first = (lo + i) * PAYLOAD_WORDS, (lo + i) * blocks
        count = max(min(size - start, PAYLOAD_WORDS), 0)
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        fits = True
        if check:
            _find_peaks(bases, start, count, 1, peaks)
            needs[i] = exponent_of(peaks[0])
            fits = needs[i] <= top[exps[first]]
        if fits:
            quick = count == PAYLOAD_WORDS and spread_factors(scale32, exps, first, blocks, factors)
            _sum(bases, start, count, quick, factors, exps, first, blocks, scale, limit, payload)
        else:
            payload[:] = 0
            payload[0] = needs[i]
        row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


@njit(
    "int64(uint64[::1], uint64[::1], int64, int64, int64, boolean, boolean, uint8[::1], int64, uint8[::1], uint8[::1], uint8[::1],"
    " int64, float64[::1], float32[::1], float64[::1], float64[::1], float32[::1])",
    cache=True,
    nogil=True,
)
def reduce_together(
    bases: NDArray[np.uint64],
    outs: NDArray[np.uint64],
    size: int,
    lo: int,
    hi: int,
    prologue: bool,
    refuse: bool,
    exps: U8,
    blocks: int,
    needs: U8,
    top: U8,
    least: U8,
    limit: int,
    scale: F64,
    scale32: F32,
    multiply: F64,
    divide: F64,
    multiply32: F32,
) -> int:
    """A whole round for fragments ``lo`` to ``hi - 1`` of float32 tensors of ``size`` elements at addresses ``bases``.

    The result is written to each of the addresses ``outs``, which may be those of the tensors.
    ``prologue``: exponents are what the blocks need; otherwise ``exps``, ``blocks`` per fragment, has them, and blocks that do
    not fit get what they need, which is noted there: those above ``top`` of their exponent, and those below its ``least`` but
    for zeros. ``needs`` gets what all blocks need, unless it is empty. Tables as in :mod:`inanet.proto.common.quantised`.
    Returns -1, or with ``refuse`` the first fragment that holds a NaN or infinity: from there on nothing has been written.
    """
    sums, peaks = np.empty(PAYLOAD_WORDS, np.int32), np.empty(VECTORS, np.uint32)
    factors = np.empty(VECTORS, np.float32)
    for fragment in range(lo, hi):
        start, first = fragment * PAYLOAD_WORDS, fragment * blocks
        count = max(min(size - start, PAYLOAD_WORDS), 0)
        _find_peaks(bases, start, count, blocks, peaks)
        mine = exps[first : first + blocks]
        if prologue:
            for block in range(np.uint64(blocks)):
                mine[block] = exponent_of(peaks[block])
        else:
            for block in range(np.uint64(blocks)):
                need, exponent = exponent_of(peaks[block]), mine[block]
                if need > top[exponent] or (need != 0 and need < least[exponent]):
                    mine[block] = need
        if len(needs):
            for block in range(np.uint64(blocks)):
                needs[np.uint64(first) + block] = exponent_of(peaks[block])
        if refuse:
            for block in range(np.uint64(blocks)):
                if exponent_of(peaks[block]) == POISON:
                    return fragment
        quick = count == PAYLOAD_WORDS and spread_factors(scale32, exps, first, blocks, factors)
        _sum(bases, start, count, quick, factors, exps, first, blocks, scale, limit, sums)
        quick = count == PAYLOAD_WORDS and spread_factors(multiply32, exps, first, blocks, factors)
        for copy in range(len(outs)):
            base = outs[copy] + np.uint64(start) * np.uint64(4)
            if quick:
                for vector in range(np.uint64(VECTORS)):
                    write_scaled8(sums, vector * _LANES, factors[vector], base)
            else:
                part = carray(_float32_pointer(base), (count,), np.float32)
                read_sums(sums, False, factors, exps, first, blocks, multiply, divide, part)
    return -1
