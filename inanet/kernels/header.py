"""What kernels compute of packet headers: the keyed tag, serial-number comparisons, positions in bitmaps.

The plain counterparts for decoders and tests are in :mod:`inanet.wire.integrity`.
"""

from typing import Any

import numpy as np

from inanet.kernels.bigendian import load32
from inanet.kernels.jit import njit

_INLINE = {"cache": True, "nogil": True, "_nrt": False, "inline": "always"}


@njit("boolean(uint32, uint32)", **_INLINE)
def newer32(a: int, b: int) -> Any:
    """Whether ``a`` comes after ``b`` in serial-number arithmetic on 32 bits (RFC 1982)."""
    return a != b and np.uint32(a - b) < np.uint32(0x80000000)


@njit("boolean(uint8, uint8)", **_INLINE)
def newer8(a: int, b: int) -> Any:
    """Whether ``a`` comes after ``b`` in serial-number arithmetic on 8 bits (RFC 1982)."""
    return a != b and np.uint8(a - b) < np.uint8(0x80)


@njit("int64(uint32)", **_INLINE)
def lowest_bit(bitmap: int) -> Any:
    """Index of the lowest bit that is set; 32 if none is."""
    index = 0
    while index < 32 and not (bitmap >> np.uint32(index)) & np.uint32(1):
        index += 1
    return index


@njit("int64(uint32)", **_INLINE)
def only_bit(bitmap: int) -> Any:
    """Index of the bit of a bitmap that has one; -1 if it has none or several."""
    if bitmap == 0 or bitmap & np.uint32(bitmap - np.uint32(1)):
        return -1
    return lowest_bit(bitmap)


@njit("int64(uint32)", **_INLINE)
def count_bits(bitmap: Any) -> Any:
    """How many bits of a bitmap are set."""
    count = 0
    while bitmap:
        bitmap = np.uint32(bitmap & np.uint32(bitmap - np.uint32(1)))
        count += 1
    return count


@njit("uint32(uint32, uint32, uint32, uint32, uint32, uint64)", **_INLINE)
def tag_of(w0: int, w1: int, w2: int, w3: int, w4: int, key: int) -> Any:
    """:func:`inanet.wire.integrity.header_tag` over five header words."""
    h = np.uint64(key)
    m = np.uint64(0x9E3779B97F4A7C15)
    s = np.uint64(29)
    h = (h ^ np.uint64(w0)) * m
    h ^= h >> s
    h = (h ^ np.uint64(w1)) * m
    h ^= h >> s
    h = (h ^ np.uint64(w2)) * m
    h ^= h >> s
    h = (h ^ np.uint64(w3)) * m
    h ^= h >> s
    h = (h ^ np.uint64(w4)) * m
    h ^= h >> s
    h = h * np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(32)
    return np.uint32(h & np.uint64(0xFFFFFFFF))


@njit("uint32(uint8[::1], int64, uint64)", **_INLINE)
def tag_at(arena: Any, at: int, key: int) -> Any:
    """:func:`tag_of` the five big-endian header words from byte ``at`` on."""
    return tag_of(
        load32(arena, at),
        load32(arena, at + 4),
        load32(arena, at + 8),
        load32(arena, at + 12),
        load32(arena, at + 16),
        key,
    )
