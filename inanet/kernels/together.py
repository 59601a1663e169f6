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
from inanet.kernels.exponents import carried_exponent
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
    "void(uint64[::1], int64, int64, int64, boolean, uint8[::1], uint32[::1], int64, float64[::1], float32[::1],"
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
    largest: NDArray[np.uint32],
    limit: int,
    scale: F64,
    scale32: F32,
    misfit: U8,
    rows: NDArray[np.int32],
    row0: int,
) -> None:
    """Payload and checksum of rows ``row0`` on: blocks ``lo`` to ``hi - 1`` of tensors of ``size`` elements at ``bases``.

    With ``check``, ``misfit[i]`` becomes the exponent that block ``lo + i`` needs if it does not fit ``exps[lo + i]``,
    else 0. Such a block is not quantised; its payload is that exponent, then zeros. A block of exponent 255
    contributes zeros. Tables as in :mod:`inanet.proto.common.quantised`.
    """
    for i in range(hi - lo):
        block = lo + i
        start = block * BLOCK
        count = min(size - start, BLOCK)
        exponent = exps[block]
        misfit[i] = 0
        if check:
            peak = _peak(bases, np.uint64(start), count)
            if peak > largest[exponent]:
                misfit[i] = np.uint8(peak >> np.uint32(23))
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        if misfit[i] != 0 or exponent == POISON:
            payload[:] = 0
            payload[0] = misfit[i]
        else:
            _sum(bases, np.uint64(start), count, scale32[exponent], scale[exponent], limit, payload)
            payload[count:] = 0
        row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


@njit(
    "int64(uint64[::1], int64, int64, int64, boolean, boolean, int64, uint8[::1], uint8[::1], uint32[::1], int64,"
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
    shift: int,
    exps: U8,
    following: U8,
    largest: NDArray[np.uint32],
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
    they need, which is noted there. ``following`` gets the next round's exponents, unless it is empty (``shift`` as
    for :func:`~inanet.kernels.exponents.carried_exponents`). Tables as in :mod:`inanet.proto.common.quantised`. ``sums`` is
    room for one block. Returns -1, or with ``refuse`` the first block that holds a NaN or infinity: from there on
    nothing has been written.
    """
    for block in range(lo, hi):
        start = block * BLOCK
        count = min(size - start, BLOCK)
        peak = _peak(bases, np.uint64(start), count)
        if prologue or peak > largest[exps[block]]:
            exps[block] = np.uint8(peak >> np.uint32(23))
        exponent = exps[block]
        if exponent == POISON:
            if refuse:
                return block
            sums[:] = 0
        else:
            _sum(bases, np.uint64(start), count, scale32[exponent], scale[exponent], limit, sums)
        if len(following):
            following[block] = carried_exponent(sums[:count], exponent, shift)
        _spread(
            bases, np.uint64(start), count, multiply32[exponent], multiply[exponent], divide[exponent], sums
        )
    return -1
