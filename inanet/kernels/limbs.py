"""Exact integer sums: values split into limbs that 32-bit addition cannot overflow.

An int32 becomes a low limb of 16 bits (unsigned) and a high limb of 16 bits (signed); an int64 becomes limbs
of 22, 22 (unsigned) and 20 bits (signed). Each limb is one payload word, so sums of up to :data:`MAX_RANKS32`
or :data:`MAX_RANKS64` contributions are exact, and a sum that exceeds the element type is seen when limbs are
merged.

Limbs of one weight lie together: a fragment holds the low limbs of all its elements, then the next limbs.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS

#: int32 elements in a fragment
VALUES32 = PAYLOAD_WORDS // 2
#: int64 elements in a fragment; one payload word is left over and 0
VALUES64 = PAYLOAD_WORDS // 3
#: contributions whose limbs cannot wrap: 2**15 * (2**16 - 1) < 2**31
MAX_RANKS32 = 1 << 15
#: contributions whose limbs cannot wrap: 2**9 * (2**22 - 1) < 2**31
MAX_RANKS64 = 1 << 9

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
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        start = (lo + i) * VALUES32
        part = values[start : min(start + VALUES32, values.size)]
        if first:
            payload[:] = 0
        for j in range(part.size):
            payload[j] += part[j] & np.int32(_LOW16)
            payload[VALUES32 + j] += part[j] >> np.int32(16)
        if last:
            row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


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
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        start = (lo + i) * VALUES64
        part = values[start : min(start + VALUES64, values.size)]
        if first:
            payload[:] = 0
        for j in range(part.size):
            payload[j] += np.int32(part[j] & _LOW22)
            payload[VALUES64 + j] += np.int32((part[j] >> 22) & _LOW22)
            payload[2 * VALUES64 + j] += np.int32(part[j] >> 44)
        if last:
            row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


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
        payload = rows[slots[k], HEADER_WORDS:CHECKSUM_WORD]
        start = fragments[k] * VALUES32
        part = out[start : min(start + VALUES32, out.size)]
        bad = 0
        for j in range(part.size):
            total = (np.int64(payload[VALUES32 + j]) << 16) + payload[j]
            part[j] = np.int32(total)
            bad += part[j] != total
        if bad:
            overflowed += bad
            j = 0
            while part[j] == (np.int64(payload[VALUES32 + j]) << 16) + payload[j]:
                j += 1
            lowest[0] = min(lowest[0], start + j)
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
        payload = rows[slots[k], HEADER_WORDS:CHECKSUM_WORD]
        lows, middles, highs = payload[:VALUES64], payload[VALUES64:], payload[2 * VALUES64 :]
        start = fragments[k] * VALUES64
        part = out[start : min(start + VALUES64, out.size)]
        bad = 0
        for j in range(part.size):
            top = _top64(lows[j], middles[j], highs[j])
            middle = np.int64(middles[j]) + (lows[j] >> 22)
            part[j] = (top << 44) | ((middle & _LOW22) << 22) | (lows[j] & _LOW22)
            bad += (top >> 19) != (top >> 63)
        if bad:
            overflowed += bad
            j = 0
            while True:
                top = _top64(lows[j], middles[j], highs[j])
                if (top >> 19) != (top >> 63):
                    break
                j += 1
            lowest[0] = min(lowest[0], start + j)
    return overflowed
