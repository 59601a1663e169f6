"""The tag and the checksum of a big-endian packet at a byte of an arena, as framings have them that seal like XAgg's."""

from typing import Any

import numpy as np
from numba import types

from inanet.kernels.bigendian import load32
from inanet.kernels.jit import njit
from inanet.proto.tree.engine import tag_of

_OPTIONS = {"cache": True, "nogil": True, "_nrt": False, "inline": "always"}
_arena, _i64 = types.uint8[::1], types.int64


@njit(types.uint32(_arena, _i64, types.uint64), **_OPTIONS)
def tag_at(arena: Any, at: int, key: int) -> Any:
    """:func:`inanet.wire.xagg.header_tag` of the five header words from byte ``at`` on."""
    return tag_of(
        load32(arena, at),
        load32(arena, at + 4),
        load32(arena, at + 8),
        load32(arena, at + 12),
        load32(arena, at + 16),
        key,
    )


@njit(types.uint32(_arena, _i64, _i64), **_OPTIONS)
def checksum_at(arena: Any, at: int, words: int) -> Any:
    """The sum of ``words`` words from byte ``at`` on, times 1, 3, 5 and so on, modulo 2^32."""
    total = np.uint32(0)
    weight = np.uint32(1)
    for j in range(words):
        total = np.uint32(total + np.uint32(load32(arena, at + 4 * j) * weight))
        weight = np.uint32(weight + np.uint32(2))
    return total
