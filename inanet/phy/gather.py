"""Copying packets together, for decorators that keep or alter them."""

import numpy as np
from numba import types

from inanet.kernels.jit import njit
from inanet.phy.device import aligned_offsets
from inanet.wire.batch import I64, U8, PacketBatch

#: kernel argument for packet bytes: a view of immutable bytes will do
READABLE = types.Array(types.uint8, 1, "C", readonly=True)
_INDEX = types.int64[::1]


@njit(
    types.void(READABLE, _INDEX, _INDEX, types.uint8[::1], _INDEX),
    cache=True,
    nogil=True,
)
def copy_packets(arena: U8, offsets: I64, lengths: I64, target: U8, places: I64) -> None:
    """Copy packet *i*, ``arena[offsets[i]:][:lengths[i]]``, to ``target[places[i]:]``."""
    for i in range(len(offsets)):
        source, place = offsets[i], places[i]
        for j in range(lengths[i]):
            target[place + j] = arena[source + j]


def join(batches: list[PacketBatch]) -> PacketBatch:
    """One batch with copies of all packets, in order, each at an offset divisible by 4."""
    lengths = np.concatenate([batch.lengths for batch in batches])
    sources = np.concatenate([batch.sources for batch in batches])
    places, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    at = 0
    for batch in batches:
        count = len(batch)
        copy_packets(batch.arena, batch.offsets, batch.lengths, arena, places[at : at + count])
        at += count
    return PacketBatch(arena, places, lengths, sources)


def select(batch: PacketBatch, chosen: I64) -> PacketBatch:
    """The packets with these indices, in this order, without copying them."""
    return PacketBatch(batch.arena, batch.offsets[chosen], batch.lengths[chosen], batch.sources[chosen])
