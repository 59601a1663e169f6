"""What lies before the values of ATP's frames, A2TP's and ESA's: read and written for a batch in one call each."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import load16, load32, store16, store32
from inanet.kernels.jit import njit
from inanet.wire.atp import APP_AT, FLAGS_AT, HEADER_BYTES, MARK_AT, SECOND_HALF, SEQ_AT, TRAILER_BYTES

Index = NDArray[np.int64]
_FLAGS, _APP, _SEQ, _MARK = FLAGS_AT, APP_AT, SEQ_AT, MARK_AT
_SECOND, _TRAILER, _PLAIN = SECOND_HALF, TRAILER_BYTES, HEADER_BYTES
_OPTIONS = {"cache": True, "nogil": True, "_nrt": False}


class Heads(NamedTuple):
    """One entry per packet. ``low`` is what travels of a fragment's number: sequence number and generation."""

    job: Index
    low: Index
    #: uint32
    bitmap: NDArray[np.uint32]
    #: uint8, see :class:`~inanet.wire.atp.Flag`
    flags: NDArray[np.uint8]
    #: uint8: the byte at offset 10, 0 in ATP's frames
    mark: NDArray[np.uint8]
    slot: Index

    def part(self, which: NDArray[np.bool_] | Index) -> "Heads":
        return Heads(
            self.job[which],
            self.low[which],
            self.bitmap[which],
            self.flags[which],
            self.mark[which],
            self.slot[which],
        )


@njit(
    "void(uint8[::1], int64[::1], int64, int64[::1], int64[::1], uint32[::1], uint8[::1], uint8[::1], int64[::1])",
    **_OPTIONS,
)
def _read(
    arena: Any, offsets: Any, head: int, job: Any, low: Any, bitmap: Any, flags: Any, mark: Any, slot: Any
) -> None:
    for k in range(offsets.size):
        at = offsets[k]
        app = load16(arena, at + _APP)
        job[k] = app & np.uint32(0xFF)
        low[k] = np.int64(app >> np.uint32(8)) << 16 | np.int64(load16(arena, at + _SEQ))
        bitmap[k] = load32(arena, at)
        flags[k] = arena[at + _FLAGS]
        mark[k] = arena[at + _MARK] if head > _PLAIN else np.uint8(0)
        slot[k] = load16(arena, at + head - 4)


def read_heads(arena: NDArray[np.uint8], offsets: Index, head: int) -> Heads:
    """The heads, ``head`` bytes long, of packets that begin at these bytes; their lengths have been checked."""
    count = len(offsets)
    heads = Heads(
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.uint32),
        np.empty(count, np.uint8),
        np.empty(count, np.uint8),
        np.empty(count, np.int64),
    )
    _read(arena, offsets, head, *heads)
    return heads


@njit(
    "void(uint8[:, ::1], int64[::1], int64[::1], uint8[::1], int64, int64, int64, int64)",
    **_OPTIONS,
)
def write_heads(
    frames: Any, numbers: Any, slots: Any, flags: Any, bitmap: int, fan_in: int, job: int, head: int
) -> None:
    """Write the heads of ``frames``, uint8[n, frame_bytes], for fragments with these numbers; not the byte at offset 10."""
    flat = frames.reshape(frames.size)
    size = frames.shape[1]
    for k in range(numbers.size):
        at, number, slot = k * size, numbers[k], slots[k]
        store32(flat, at, np.uint32(bitmap))
        frames[k, 4] = np.uint8(fan_in)
        frames[k, _FLAGS] = flags[k]
        store16(flat, at + _APP, np.uint32(job | (number >> 16 & 0xFF) << 8))
        store16(flat, at + _SEQ, np.uint32(number & 0xFFFF))
        store16(flat, at + head - 4, np.uint32(slot))
        store16(flat, at + head - 2, np.uint32((slot + _SECOND) & 0xFFFF))


@njit("void(uint8[:, ::1], int64[::1], int64, int64, int64)", **_OPTIONS)
def write_tails(frames: Any, numbers: Any, first: int, tensor: int, elements: int) -> None:
    """Write what lies behind the values of the fragments from number ``first`` on: their tensor and its elements."""
    flat = frames.reshape(frames.size)
    size = frames.shape[1]
    for k in range(numbers.size):
        if numbers[k] >= first:
            at = (k + 1) * size - _TRAILER
            for j in range(8):
                frames[k, size - _TRAILER + j] = np.uint8(tensor >> 8 * j & 0xFF)
            store32(flat, at + 8, np.uint32(elements))
