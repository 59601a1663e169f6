"""The linear checksum of a payload.

``c(x) = sum of (2j + 1) * x_j`` modulo 2**32 over the payload words. Because it is linear, the checksum of a
sum of payloads is the sum of their checksums, so the checksum word is aggregated like a value and verified
end to end. Every weight is odd, hence invertible: any single flipped bit changes the checksum, wherever it
happened.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import load32
from inanet.kernels.jit import njit


@njit("uint32(int32[::1], int64, int64)", cache=True, nogil=True)
def row_checksum(words: NDArray[np.int32], start: int, count: int) -> Any:
    """Checksum of ``words[start : start + count]``, as an unsigned 32-bit number."""
    base = np.uint64(start)
    total = np.uint32(0)
    weight = np.uint32(1)
    for j in range(np.uint64(count)):
        # numba widens 32-bit products to 64; narrowing at every step lets LLVM use 32-bit lanes
        total = np.uint32(total + np.uint32(np.uint32(words[base + j]) * weight))
        weight = np.uint32(weight + np.uint32(2))
    return total


@njit("uint32(int32[:, ::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def slot_checksum(rows: NDArray[np.int32], slot: int, head: int, body: int) -> Any:
    """Checksum of ``rows[slot, head : head + body]``, as an unsigned 32-bit number."""
    return row_checksum(rows[slot], head, body)


@njit("uint32(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False, inline="always")
def checksum_at(arena: NDArray[np.uint8], at: int, words: int) -> Any:
    """Checksum of ``words`` big-endian words from byte ``at`` of an arena on, as an unsigned 32-bit number."""
    total = np.uint32(0)
    weight = np.uint32(1)
    for j in range(words):
        total = np.uint32(total + np.uint32(load32(arena, at + 4 * j) * weight))
        weight = np.uint32(weight + np.uint32(2))
    return total


@njit("void(int32[:, ::1], int64[::1], int64, int64)", cache=True, nogil=True)
def seal_rows(rows: NDArray[np.int32], index: NDArray[np.int64], head: int, body: int) -> None:
    """Write the checksum of ``rows[i, head : head + body]`` into the next word, for ``i`` in ``index``."""
    for k in range(index.size):
        rows[index[k], head + body] = np.int32(slot_checksum(rows, index[k], head, body))


@njit("int64(int32[:, ::1], int64[::1], int64, int64, uint8[::1])", cache=True, nogil=True)
def verify_rows(
    rows: NDArray[np.int32], index: NDArray[np.int64], head: int, body: int, ok: NDArray[np.uint8]
) -> int:
    """Set ``ok[k]`` to whether row ``index[k]`` matches its checksum word; return how many do not."""
    bad = 0
    for k in range(index.size):
        sound = slot_checksum(rows, index[k], head, body) == np.uint32(rows[index[k], head + body])
        ok[k] = sound
        if not sound:
            bad += 1
    return bad
