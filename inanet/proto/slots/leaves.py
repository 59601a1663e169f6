"""The table of a PS behind switches that pass incomplete sums on: which workers are in, and the sum so far (leaf bitmaps).

A switch sends what it has: a sum of all workers, of some, a lone contribution, the same one again. The table keeps the
workers of every fragment as a bitmap and decides by it:

- workers that are not in yet: added;
- all of them are in already: dropped, and answered if the fragment is complete;
- those that are in and more: the packet replaces the sum, for nothing else can be told apart;
- some that are in and some that are not, but not all that are in: ignored and counted. It resolves itself, because the
  missing workers repeat themselves alone.

Entries are a ring over fragment numbers, two windows long: a worker that sends fragment *s* has results up to *s* minus the
window, so everybody has sent those, so nobody can ask for *s* minus two windows any more.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import add_in, copy_in, copy_out
from inanet.kernels.jit import njit
from inanet.wire.drops import Drop


class Leaves(NamedTuple):
    """One entry per place of the ring."""

    #: int32[n, width]
    values: NDArray[np.int32]
    #: fragment that the entry is for, -1 at first
    number: NDArray[np.int64]
    bitmap: NDArray[np.uint32]
    ecn: NDArray[np.uint8]
    col: NDArray[np.uint8]
    #: a contribution of it has found its slot taken
    collided: NDArray[np.uint8]
    #: slot that the fragment was sent to
    slot: NDArray[np.int64]
    #: slot that its entry uses from now on, or -1; decided once
    instead: NDArray[np.int64]
    touched: NDArray[np.float64]
    #: how often the PS has asked the switch for what it holds
    pulls: NDArray[np.int64]


_u8, _i64 = types.uint8[::1], types.int64[::1]
LEAVES: Any = types.NamedTuple(
    (
        types.int32[:, ::1],
        _i64,
        types.uint32[::1],
        _u8,
        _u8,
        _u8,
        _i64,
        _i64,
        types.float64[::1],
        _i64,
    ),
    Leaves,
)


def make_leaves(places: int, width: int) -> Leaves:
    """An empty table."""
    return Leaves(
        values=np.zeros((places, width), np.int32),
        number=np.full(places, -1, np.int64),
        bitmap=np.zeros(places, np.uint32),
        ecn=np.zeros(places, np.uint8),
        col=np.zeros(places, np.uint8),
        collided=np.zeros(places, np.uint8),
        slot=np.zeros(places, np.int64),
        instead=np.full(places, -1, np.int64),
        touched=np.zeros(places),
        pulls=np.zeros(places, np.int64),
    )


class Sums(NamedTuple):
    """Packets with sums, one entry each."""

    #: byte of the arena at which the values begin
    ats: NDArray[np.int64]
    number: NDArray[np.int64]
    bitmap: NDArray[np.uint32]
    ecn: NDArray[np.uint8]
    col: NDArray[np.uint8]
    collided: NDArray[np.uint8]
    slot: NDArray[np.int64]


SUMS: Any = types.NamedTuple((_i64, _i64, types.uint32[::1], _u8, _u8, _u8, _i64), Sums)
_STALE, _DUPLICATE, _OVERLAP = int(Drop.STALE_SEQUENCE), int(Drop.DUPLICATE), int(Drop.OVERLAP)
_OPTIONS = {"cache": True, "nogil": True, "_nrt": False}


@njit(types.void(LEAVES, types.int64, types.int64), **_OPTIONS)
def reset(t: Leaves, place: int, number: int) -> None:
    """Give a place to a fragment."""
    t.number[place] = number
    t.bitmap[place] = 0
    t.ecn[place] = 0
    t.col[place] = 0
    t.collided[place] = 0
    t.instead[place] = -1
    t.pulls[place] = 0


@njit(types.int64(LEAVES, types.int64, SUMS, types.int64, types.uint8[::1]), **_OPTIONS)
def add(t: Leaves, place: int, s: Sums, k: int, arena: Any) -> Any:
    """Add one packet to its place; the reason why it was not added, or 0."""
    there, mine = t.bitmap[place], s.bitmap[k]
    if not mine & ~there:
        return _DUPLICATE
    if there & ~mine and there & mine:
        return _OVERLAP
    if there & ~mine:
        add_in(t.values, place, arena, s.ats[k])
    else:
        copy_in(t.values, place, arena, s.ats[k])
    t.bitmap[place] = there | mine
    return 0


@njit(
    types.int64(
        LEAVES,
        SUMS,
        types.uint8[::1],
        types.uint32,
        types.float64,
        types.uint8[::1],
        types.int64[::1],
        types.int64[::1],
    ),
    **_OPTIONS,
)
def fold(t: Leaves, s: Sums, arena: Any, full: int, now: float, reason: Any, out: Any, completed: Any) -> Any:
    """Take packets; ``reason[k]`` says what became of each, ``completed[0]`` counts fragments that are complete now.

    Places of those, and of complete ones that were asked for again, go to ``out``; returns how many.
    """
    found = 0
    for k in range(s.ats.size):
        place = s.number[k] % t.number.size
        if s.number[k] < t.number[place]:
            reason[k] = _STALE
            continue
        if s.number[k] != t.number[place]:
            reset(t, place, s.number[k])
        t.ecn[place] |= s.ecn[k]
        t.col[place] |= s.col[k]
        t.collided[place] |= s.collided[k]
        t.slot[place] = s.slot[k]
        t.touched[place] = now
        reason[k] = add(t, place, s, k, arena)
        if t.bitmap[place] == full:
            out[found] = place
            found += 1
            completed[0] += 1 if reason[k] == 0 else 0
    return found


@njit(types.void(LEAVES, types.int64[::1], types.uint8[::1], types.int64, types.int64), **_OPTIONS)
def give(t: Leaves, places: Any, arena: Any, at: int, stride: int) -> None:
    """Write the sums of these places, big-endian, ``stride`` bytes apart from byte ``at`` on."""
    for k in range(places.size):
        copy_out(t.values, places[k], arena, at + k * stride)
