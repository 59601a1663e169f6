"""Folding one packet into one slot: add, maximum, copy.

All functions take ``(rows, slot, arena, offset)``: the slot's row, and the index in a 1-D int32 arena of the
*first header word* of a packet that has a row's shape. They are meant to be called from another kernel's loop
over a batch. The header words of the slot are left alone. Sums carry the checksum word along (linear checksum); after a
maximum the checksum is stale until the caller seals the row.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, ROW_WORDS

_SIGNATURE = "void(int32[:, ::1], int64, int32[::1], int64)"


@njit(_SIGNATURE, cache=True, nogil=True, _nrt=False)
def fold_copy(rows: NDArray[np.int32], slot: int, arena: NDArray[np.int32], offset: int) -> None:
    """Overwrite the slot's payload and checksum with the packet's."""
    target = rows[slot, HEADER_WORDS:ROW_WORDS]
    source = arena[offset + HEADER_WORDS : offset + ROW_WORDS]
    for j in range(PAYLOAD_WORDS + 1):
        target[j] = source[j]


@njit(_SIGNATURE, cache=True, nogil=True, _nrt=False)
def fold_add(rows: NDArray[np.int32], slot: int, arena: NDArray[np.int32], offset: int) -> None:
    """Add the packet's payload and checksum to the slot's, modulo 2**32."""
    target = rows[slot, HEADER_WORDS:ROW_WORDS]
    source = arena[offset + HEADER_WORDS : offset + ROW_WORDS]
    # the checksum word outside the loop: 256 iterations are whole vectors, 257 are not
    for j in range(PAYLOAD_WORDS):
        target[j] += source[j]
    target[PAYLOAD_WORDS] += source[PAYLOAD_WORDS]


@njit(_SIGNATURE, cache=True, nogil=True, _nrt=False)
def fold_max32(rows: NDArray[np.int32], slot: int, arena: NDArray[np.int32], offset: int) -> None:
    """Keep the larger of each pair of signed 32-bit payload words."""
    target = rows[slot, HEADER_WORDS:CHECKSUM_WORD]
    source = arena[offset + HEADER_WORDS : offset + CHECKSUM_WORD]
    for j in range(PAYLOAD_WORDS):
        target[j] = max(target[j], source[j])


@njit(_SIGNATURE, cache=True, nogil=True, _nrt=False)
def fold_max64(rows: NDArray[np.int32], slot: int, arena: NDArray[np.int32], offset: int) -> None:
    """Keep the larger of each pair of signed 64-bit values (two payload words, the low one first)."""
    target = rows[slot, HEADER_WORDS:CHECKSUM_WORD]
    source = arena[offset + HEADER_WORDS : offset + CHECKSUM_WORD]
    for j in range(PAYLOAD_WORDS // 2):
        # put together from halves, because rows are only 4-byte aligned
        mine = (np.int64(target[2 * j + 1]) << 32) | np.int64(np.uint32(target[2 * j]))
        other = (np.int64(source[2 * j + 1]) << 32) | np.int64(np.uint32(source[2 * j]))
        mine = max(mine, other)
        target[2 * j] = np.int32(mine)
        target[2 * j + 1] = np.int32(mine >> 32)


@njit(_SIGNATURE, cache=True, nogil=True, _nrt=False)
def fold_max8(rows: NDArray[np.int32], slot: int, arena: NDArray[np.int32], offset: int) -> None:
    """Keep the larger of each pair of unsigned payload bytes (block exponents, 1024 a fragment)."""
    target = rows[slot, HEADER_WORDS:CHECKSUM_WORD]
    source = arena[offset + HEADER_WORDS : offset + CHECKSUM_WORD]
    for j in range(PAYLOAD_WORDS):
        mine, other = np.uint32(target[j]), np.uint32(source[j])
        merged = np.uint32(0)
        for shift in range(0, 32, 8):
            mask = np.uint32(0xFF << shift)
            merged |= max(mine & mask, other & mask)
        target[j] = np.int32(merged)
