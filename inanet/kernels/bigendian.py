"""Payloads in network byte order: what public switch programs add up.

Slots and tensors hold integers in the host's order; only packets are big-endian. ``at`` is always the byte of an arena
(1-D uint8) at which something lies, at any alignment: payloads of these framings begin at odd places. Functions on one
packet are called from other kernels' loops over a batch; :func:`place` and :func:`take` are loops of their own, between
packets and the rows of a tensor (:mod:`inanet.kernels.layout`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.kernels.layout import HEAD, WORDS

Arena = NDArray[np.uint8]
Slots = NDArray[np.int32]
Index = NDArray[np.int64]

_HEADER = {"cache": True, "nogil": True, "_nrt": False, "inline": "always"}
_PAYLOAD = {"cache": True, "nogil": True, "_nrt": False}


@njit("uint32(uint8[::1], int64)", **_HEADER)
def load16(arena: Arena, at: int) -> Any:
    """The unsigned 16-bit integer at a byte."""
    i = np.uint64(at)
    return np.uint32(arena[i]) << np.uint32(8) | np.uint32(arena[i + np.uint64(1)])


@njit("uint32(uint8[::1], int64)", **_HEADER)
def load32(arena: Arena, at: int) -> Any:
    """The unsigned 32-bit integer at a byte."""
    return load16(arena, at) << np.uint32(16) | load16(arena, at + 2)


@njit("void(uint8[::1], int64, uint32)", **_HEADER)
def store16(arena: Arena, at: int, value: int) -> None:
    """Write an unsigned 16-bit integer at a byte."""
    i = np.uint64(at)
    arena[i] = np.uint8(value >> np.uint32(8) & np.uint32(0xFF))
    arena[i + np.uint64(1)] = np.uint8(value & np.uint32(0xFF))


@njit("void(uint8[::1], int64, uint32)", **_HEADER)
def store32(arena: Arena, at: int, value: int) -> None:
    """Write an unsigned 32-bit integer at a byte."""
    store16(arena, at, value >> np.uint32(16))
    store16(arena, at + 2, value & np.uint32(0xFFFF))


@njit("int32(int32)", **_HEADER)
def swapped(word: int) -> Any:
    """A 32-bit integer with its bytes in the opposite order."""
    x = np.uint32(word)
    return np.int32(
        np.uint32(x << np.uint32(24))
        | np.uint32((x & np.uint32(0xFF00)) << np.uint32(8))
        | np.uint32((x >> np.uint32(8)) & np.uint32(0xFF00))
        | np.uint32(x >> np.uint32(24))
    )


@njit("void(int32[:, ::1], int64, uint8[::1], int64)", **_PAYLOAD)
def copy_in(values: Slots, slot: int, arena: Arena, at: int) -> None:
    """Overwrite a slot with a packet's values."""
    target = values[slot]
    source = arena[at : at + 4 * target.size].view(np.int32)
    for j in range(target.size):
        target[j] = swapped(source[j])


@njit("void(int32[:, ::1], int64, uint8[::1], int64)", **_PAYLOAD)
def add_in(values: Slots, slot: int, arena: Arena, at: int) -> None:
    """Add a packet's values to a slot's, modulo 2**32; scales are chosen so that nothing wraps (number format)."""
    target = values[slot]
    source = arena[at : at + 4 * target.size].view(np.int32)
    for j in range(target.size):
        target[j] += swapped(source[j])


@njit("void(int32[:, ::1], int64, uint8[::1], int64)", **_PAYLOAD)
def copy_out(values: Slots, slot: int, arena: Arena, at: int) -> None:
    """Overwrite a packet's values with a slot's."""
    source = values[slot]
    target = arena[at : at + 4 * source.size].view(np.int32)
    for j in range(source.size):
        target[j] = swapped(source[j])


@njit("void(int32[:, ::1], int64, int64[::1], int64, uint8[::1], int64, int64)", **_PAYLOAD)
def place(
    rows: Slots, words: int, fragments: Index, width: int, arena: Arena, first_at: int, stride: int
) -> None:
    """Write fragment ``fragments[k]``, ``width`` words, big-endian at byte ``first_at + k * stride``.

    A tensor's words are the payloads of ``rows`` one after the other, ``words`` of them; what a last fragment lacks is 0.
    """
    for k in range(fragments.size):
        at = first_at + k * stride
        target = arena[at : at + 4 * width].view(np.int32)
        start = np.uint64(fragments[k] * width)
        count = np.uint64(max(0, min(width, words - fragments[k] * width)))
        j = np.uint64(0)
        while j < count:
            row, column = (start + j) // WORDS, (start + j) % WORDS
            run = min(count - j, WORDS - column)
            for i in range(run):
                target[j + i] = swapped(rows[row, HEAD + column + i])
            j += run
        for i in range(count, np.uint64(width)):
            target[i] = 0


@njit("void(uint8[::1], int64[::1], int64[::1], int64, int64, int32[:, ::1])", **_PAYLOAD)
def take(arena: Arena, ats: Index, fragments: Index, width: int, words: int, rows: Slots) -> None:
    """The inverse of :func:`place`: fragment ``fragments[k]`` lies at byte ``ats[k]``."""
    for k in range(fragments.size):
        source = arena[ats[k] : ats[k] + 4 * width].view(np.int32)
        start = np.uint64(fragments[k] * width)
        count = np.uint64(max(0, min(width, words - fragments[k] * width)))
        j = np.uint64(0)
        while j < count:
            row, column = (start + j) // WORDS, (start + j) % WORDS
            run = min(count - j, WORDS - column)
            for i in range(run):
                rows[row, HEAD + column + i] = swapped(source[j + i])
            j += run


@njit("void(uint8[::1], int64[::1], uint8[:, ::1])", **_PAYLOAD)
def gather(arena: Arena, ats: Index, out: NDArray[np.uint8]) -> None:
    """Copy the bytes from ``ats[k]`` on to row *k* of ``out``: headers of packets, side by side."""
    for k in range(ats.size):
        for j in range(out.shape[1]):
            out[k, j] = arena[ats[k] + j]
