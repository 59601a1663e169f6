"""float32 tensors of all ranks on one host, a block at a time, so that each is read from memory once.

:func:`quantise_together` fills the rows of packets. :func:`reduce_together` does a whole round for a job that has no
other hosts; its bits are those of the network, for a fifth of the memory traffic of separate kernels with four ranks.
"""

from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.exponents import exponent_of
from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK, CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, POISON
from inanet.kernels.quantise import largest_float32

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
F32 = NDArray[np.float32]


@intrinsic
def _float32_pointer(typing_context: Any, address: Any) -> Any:
    """A memory address as a pointer, because kernels cannot take as many arrays as there are ranks."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.uint64), generate


@njit("uint32(uint64[::1], uint64, int64)", cache=True, nogil=True, inline="always")
def _peak(bases: NDArray[np.uint64], start: int, count: int) -> Any:
    """float32 bits of the largest magnitude that any rank has in ``count`` elements from ``start`` on."""
    peak = np.uint32(0)
    for rank in range(len(bases)):
        values = carray(_float32_pointer(bases[rank] + start * np.uint64(4)), (count,), np.float32)
        bits = values.view(np.uint32)
        for j in range(count):
            peak = max(peak, np.uint32(bits[j] & np.uint32(0x7FFFFFFF)))
    return peak


@njit(
    "void(uint64[::1], uint64, int64, float32, float64, int64, int32[::1])",
    cache=True,
    nogil=True,
    inline="always",
)
def _sum(
    bases: NDArray[np.uint64],
    start: int,
    count: int,
    fast: float,
    scale: float,
    limit: int,
    sums: NDArray[np.int32],
) -> None:
    """Quantised sum over all ranks; see :func:`inanet.kernels.quantise.quantise` for the two ways to scale."""
    bound, bound32 = np.float64(limit), largest_float32(limit)
    for rank in range(len(bases)):
        values = carray(_float32_pointer(bases[rank] + start * np.uint64(4)), (count,), np.float32)
        if rank == 0:
            for j in range(count):
                sums[j] = 0
        if fast != 0:
            for j in range(count):
                r = np.rint(values[j] * fast)
                r = r if r < bound32 else bound32
                r = r if r > -bound32 else -bound32
                sums[j] += np.int32(r)
        else:
            for j in range(count):
                q = np.rint(np.float64(values[j]) * scale)
                q = q if q < bound else bound
                q = q if q > -bound else -bound
                sums[j] += np.int32(q)


@njit(
    "void(uint64[::1], uint64, int64, float32, float64, float64, int32[::1])",
    cache=True,
    nogil=True,
    inline="always",
)
def _spread(
    bases: NDArray[np.uint64],
    start: int,
    count: int,
    fast: float,
    multiply: float,
    divide: float,
    sums: NDArray[np.int32],
) -> None:
    """Dequantise into every rank's array; see :mod:`inanet.kernels.dequantise`."""
    for rank in range(len(bases)):
        values = carray(_float32_pointer(bases[rank] + start * np.uint64(4)), (count,), np.float32)
        if fast != 0:
            for j in range(count):
                values[j] = np.float32(sums[j]) * fast
        else:
            for j in range(count):
                values[j] = np.float32(sums[j] * multiply / divide)


@njit(
    "void(uint64[::1], int64, int64, int64, boolean, uint8[::1], uint8[::1], int64, float64[::1], float32[::1],"
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
    top: U8,
    limit: int,
    scale: F64,
    scale32: F32,
    needs: U8,
    rows: NDArray[np.int32],
    row0: int,
) -> None:
    """Payload and checksum of rows ``row0`` on: blocks ``lo`` to ``hi - 1`` of tensors of ``size`` elements at ``bases``.

    With ``check``, ``needs[i]`` becomes the exponent of block ``lo + i`` over all ranks. If that is more than
    ``top[exps[lo + i]]``, the block is not quantised; its payload is what it needs, then zeros. A block of exponent 255
    contributes zeros. Tables as in :mod:`inanet.proto.common.quantised`.
    """
    for i in range(hi - lo):
        block = lo + i
        start = block * BLOCK
        count = min(size - start, BLOCK)
        exponent = exps[block]
        fits = True
        if check:
            needs[i] = exponent_of(_peak(bases, np.uint64(start), count))
            fits = needs[i] <= top[exponent]
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        if not fits or exponent == POISON:
            payload[:] = 0
            payload[0] = np.int32(0) if fits else np.int32(needs[i])
        else:
            _sum(bases, np.uint64(start), count, scale32[exponent], scale[exponent], limit, payload)
            payload[count:] = 0
        row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


@njit(
    "int64(uint64[::1], int64, int64, int64, boolean, boolean, uint8[::1], uint8[::1], uint8[::1], uint8[::1], int64,"
    " float64[::1], float32[::1], float64[::1], float64[::1], float32[::1], int32[::1])",
    cache=True,
    nogil=True,
)
def reduce_together(
    bases: NDArray[np.uint64],
    size: int,
    lo: int,
    hi: int,
    prologue: bool,
    refuse: bool,
    exps: U8,
    needs: U8,
    top: U8,
    least: U8,
    limit: int,
    scale: F64,
    scale32: F32,
    multiply: F64,
    divide: F64,
    multiply32: F32,
    sums: NDArray[np.int32],
) -> int:
    """A whole round for blocks ``lo`` to ``hi - 1`` of float32 tensors of ``size`` elements at addresses ``bases``.

    ``prologue``: exponents are what the blocks need; otherwise ``exps`` has them, and blocks that do not fit get what
    they need, which is noted there: those above ``top`` of their exponent, and those below its ``least`` but for zeros.
    ``needs`` gets what all blocks need, unless it is empty. Tables as in :mod:`inanet.proto.common.quantised`. ``sums`` is
    room for one block. Returns -1, or with ``refuse`` the first block that holds a NaN or infinity: from there on
    nothing has been written.
    """
    for block in range(lo, hi):
        start = block * BLOCK
        count = min(size - start, BLOCK)
        need = exponent_of(_peak(bases, np.uint64(start), count))
        exponent = exps[block]
        if prologue or need > top[exponent] or (need != 0 and need < least[exponent]):
            exps[block] = exponent = need
        if len(needs):
            needs[block] = need
        if exponent == POISON:
            if refuse:
                return block
            sums[:] = 0
        else:
            _sum(bases, np.uint64(start), count, scale32[exponent], scale[exponent], limit, sums)
        _spread(
            bases, np.uint64(start), count, multiply32[exponent], multiply[exponent], divide[exponent], sums
        )
    return -1
