"""Packets on their way together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.phy.device import aligned_offsets
from inanet.wire.batch import I64, U8, PacketBatch, Transmission


@dataclass(frozen=True, slots=True)
class Burst:
    """``data`` uint8[n, length]: n packets of one length, a copy of their own; ``source`` and ``destination`` endpoints;
    ``marked`` bool[n]: congestion experienced.
    """

    source: int
    destination: int
    data: U8
    marked: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.data)

    @property
    def length(self) -> int:
        """Bytes of each packet, without what the network adds."""
        return int(self.data.shape[1])

    def part(self, which: slice | NDArray[np.bool_]) -> "Burst":
        """Some of the packets."""
        return Burst(self.source, self.destination, self.data[which], self.marked[which])

    @staticmethod
    def of(source: int, transmission: Transmission, first: int = 0) -> "Burst":
        """A copy of a transmission's packets from ``first`` on."""
        data = rows_of(transmission.arena, transmission.offsets[first:], transmission.length)
        return Burst(source, transmission.destination, data, np.zeros(len(data), np.bool_))


def rows_of(arena: U8, offsets: I64, length: int) -> U8:
    """uint8[n, length]: copies of the packets at ``offsets``."""
    if not len(offsets):
        return np.zeros((0, length), np.uint8)
    count, first = len(offsets), int(offsets[0])
    if count == 1:
        return arena[first : first + length].reshape(1, length).copy()
    step = int(offsets[1]) - first
    # packets mostly lie one behind the other; telling so is cheaper than a window at every byte
    if step >= length and first + step * count <= len(arena) and (offsets[1:] - offsets[:-1] == step).all():
        return arena[first : first + step * count].reshape(count, step)[:, :length].copy()
    rows: U8 = np.lib.stride_tricks.sliding_window_view(arena, length)[offsets]
    return rows


def batch_of(bursts: Sequence[Burst]) -> PacketBatch:
    """One batch with copies of all packets, in order."""
    size = bursts[0].length
    if all(burst.data.shape[1] == size for burst in bursts):
        return _alike(bursts, size)
    counts = [len(burst) for burst in bursts]
    lengths = np.repeat(np.array([burst.length for burst in bursts], np.int64), counts)
    sources = np.repeat(np.array([burst.source for burst in bursts], np.uint64), counts)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size, np.uint8)
    first = 0
    for burst in bursts:
        stride = (burst.length + 3) & ~3
        begin = int(offsets[first])
        room = arena[begin : begin + len(burst) * stride].reshape(len(burst), stride)
        room[:, : burst.length] = burst.data
        first += len(burst)
    return PacketBatch(arena, offsets, lengths, sources)


def _alike(bursts: Sequence[Burst], length: int) -> PacketBatch:
    """:func:`batch_of` packets of one length."""
    counts = [burst.data.shape[0] for burst in bursts]
    total, stride = sum(counts), (length + 3) & ~3
    rows, sources = np.empty((total, stride), np.uint8), np.empty(total, np.uint64)
    rows[:, length:] = 0
    first = 0
    for burst, count in zip(bursts, counts, strict=True):
        end = first + count
        rows[first:end, :length] = burst.data
        sources[first:end] = burst.source
        first = end
    offsets = np.arange(0, total * stride, stride) if stride else np.zeros(total, np.int64)
    return PacketBatch(rows.reshape(total * stride), offsets, np.full(total, length), sources)
