"""Exact integer sums: values split into limbs that 32-bit addition cannot overflow.

An int32 becomes a low limb of 16 bits (unsigned) and a high limb of 16 bits (signed); an int64 becomes limbs
of 22, 22 (unsigned) and 20 bits (signed). Each limb is one payload word, so sums of up to :data:`MAX_RANKS32`
or :data:`MAX_RANKS64` contributions are exact, and a sum that exceeds the element type is seen when limbs are
merged.

Limbs of one weight lie together: a fragment holds the low limbs of all its elements, then the next limbs.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import slot_checksum
from inanet.kernels.jit import njit
from inanet.kernels.layout import CHECK, HEAD, HEADER_WORDS, PAYLOAD_WORDS, WORDS

#: int32 elements in a fragment
VALUES32 = PAYLOAD_WORDS // 2
#: int64 elements in a fragment; one payload word is left over and 0
VALUES64 = PAYLOAD_WORDS // 3
#: contributions whose limbs cannot wrap: 2**15 * (2**16 - 1) < 2**31
MAX_RANKS32 = 1 << 15
#: contributions whose limbs cannot wrap: 2**9 * (2**22 - 1) < 2**31
MAX_RANKS64 = 1 << 9

_N32 = np.uint64(VALUES32)
_N64 = np.uint64(VALUES64)
_LOW16 = (1 << 16) - 1
_LOW22 = (1 << 22) - 1


@njit("void(int32[::1], int64, int64, int32[:, ::1], int64, boolean, boolean)", cache=True, nogil=True)
def split32(
    values: NDArray[np.int32],
    lo: int,
    hi: int,
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """Write (``first``) or add fragments ``lo`` to ``hi - 1`` to rows ``row0`` on; ``last`` seals them."""
    for i in range(hi - lo):
        row = np.uint64(row0 + i)
        if first:
            for j in range(WORDS):
                rows[row, HEAD + j] = 0
        start = np.uint64((lo + i) * VALUES32)
        for j in range(min(_N32, np.uint64(values.size) - start)):
            value = values[start + j]
            rows[row, HEAD + j] += value & np.int32(_LOW16)
            rows[row, HEAD + _N32 + j] += value >> np.int32(16)
        if last:
            rows[row, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))


@njit("void(int64[::1], int64, int64, int32[:, ::1], int64, boolean, boolean)", cache=True, nogil=True)
def split64(
    values: NDArray[np.int64],
    lo: int,
    hi: int,
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """:func:`split32` for int64."""
    for i in range(hi - lo):
        row = np.uint64(row0 + i)
        if first:
            for j in range(WORDS):
                rows[row, HEAD + j] = 0
        start = np.uint64((lo + i) * VALUES64)
        for j in range(min(_N64, np.uint64(values.size) - start)):
            value = values[start + j]
            rows[row, HEAD + j] += np.int32(value & _LOW22)
            rows[row, HEAD + _N64 + j] += np.int32((value >> 22) & _LOW22)
            rows[row, HEAD + _N64 + _N64 + j] += np.int32(value >> 44)
        if last:
            rows[row, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))


@njit("int64(int32, int32)", cache=True, nogil=True)
def _join32(low: int, high: int) -> np.int64:
    """The sum of two summed limbs."""
    return (np.int64(high) << 16) + low


@njit("int64(int32[:, ::1], int64[::1], int64[::1], int32[::1], int64[::1])", cache=True, nogil=True)
def merge32(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    out: NDArray[np.int32],
    lowest: NDArray[np.int64],
) -> int:
    """Write fragment ``fragments[k]`` of ``out`` from row ``slots[k]``; return how many sums exceed int32.

    ``lowest[0]`` is lowered to the smallest element index that does; such elements hold the sum modulo 2**32.
    """
    overflowed = 0
    for k in range(slots.size):
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * VALUES32)
        bad = 0
        for j in range(min(_N32, np.uint64(out.size) - start)):
            total = _join32(rows[row, HEAD + j], rows[row, HEAD + _N32 + j])
            out[start + j] = np.int32(total)
            bad += np.int32(total) != total
        if bad:
            overflowed += bad
            element = fragments[k] * VALUES32
            j = HEADER_WORDS
            while out[element] == _join32(rows[slots[k], j], rows[slots[k], j + VALUES32]):
                element += 1
                j += 1
            lowest[0] = min(lowest[0], element)
    return overflowed


@njit("int64(int32, int32, int32)", cache=True, nogil=True)
def _top64(low: int, middle: int, high: int) -> np.int64:
    """The top limb with all carries; it fits 20 bits exactly if the sum fits int64."""
    return np.int64(high) + ((np.int64(middle) + (low >> 22)) >> 22)


@njit("int64(int32[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1])", cache=True, nogil=True)
def merge64(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    out: NDArray[np.int64],
    lowest: NDArray[np.int64],
) -> int:
    """:func:`merge32` for int64."""
    overflowed = 0
    for k in range(slots.size):
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * VALUES64)
        bad = 0
        for j in range(min(_N64, np.uint64(out.size) - start)):
            low, middle = rows[row, HEAD + j], rows[row, HEAD + _N64 + j]
            top = _top64(low, middle, rows[row, HEAD + _N64 + _N64 + j])
            carried = np.int64(middle) + (low >> 22)
            out[start + j] = (top << 44) | ((carried & _LOW22) << 22) | (low & _LOW22)
            bad += (top >> 19) != (top >> 63)
        if bad:
            overflowed += bad
            j = HEADER_WORDS
            while True:
                top = _top64(
                    rows[slots[k], j], rows[slots[k], j + VALUES64], rows[slots[k], j + 2 * VALUES64]
                )
                if (top >> 19) != (top >> 63):
                    break
                j += 1
            lowest[0] = min(lowest[0], fragments[k] * VALUES64 + j - HEADER_WORDS)
    return overflowed
