"""The slot engine: what every system shares.

All systems have one primitive in four stages, and differ in policy only:

1. **resolve**: which slot does this packet concern? It may refuse.
2. **admit**: may the packet use the slot; is it new, a duplicate, a collision; is the slot complete with it?
3. **fold**: combine its values with the slot's.
4. **emit**: what is complete leaves the node: a header is written into the slot's row and the fragment enters the
   emission log that the senders of :mod:`inanet.proto.tree.reliability` follow.

Fold and emit are here. A system's own ``policy`` module holds its resolve and admit and one driver that strings the
four together over a batch, a packet at a time, so that a packet's payload is still in the cache when it is folded.

Kernels work on :class:`Tables`, the arrays of :class:`~inanet.proto.tree.slots.SlotMemory` as a named tuple, and report what
Python has to look at as rows of an event array (:class:`Event`). Nothing here allocates, so kernels are compiled with
``_nrt=False``: without numba's reference counting, which would pay two atomic operations for each of the two dozen
arrays at every call (measured: 1.9 us a fragment with it, 0.3 us without).
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.fold import fold_add, fold_copy, fold_max8, fold_max32, fold_max64
from inanet.kernels.header import tag_of
from inanet.kernels.jit import njit
from inanet.proto.common.encoding import LARGE
from inanet.proto.common.plan import Fold
from inanet.proto.tree.slots import (
    CHECK,
    GROUP_SHIFT,
    HEAD,
    LOGGED_DOWN,
    LOGGED_UP,
    JobColumn,
    ShardColumn,
    SlotMemory,
    State,
    TreeColumn,
)
from inanet.wire.xagg import FLAG_SHIFT, INDEX_BITS, MAGIC_VERSION, Flag, Kind


class Tables(NamedTuple):
    """The arrays of a :class:`~inanet.proto.tree.slots.SlotMemory`, in the order kernels expect."""

    rows: NDArray[np.int32]
    bitmap: NDArray[np.uint32]
    round: NDArray[np.uint32]
    state: NDArray[np.uint8]
    attempt: NDArray[np.uint8]
    exponent: NDArray[np.uint8]
    misfit: NDArray[np.uint8]
    announced: NDArray[np.uint8]
    logged: NDArray[np.uint8]
    up_log: NDArray[np.uint32]
    down_log: NDArray[np.uint32]
    up_left: NDArray[np.int32]
    down_left: NDArray[np.int32]
    shards: NDArray[np.int64]
    trees: NDArray[np.int64]
    since: NDArray[np.uint8]
    child_endpoint: NDArray[np.int64]
    mask: NDArray[np.uint32]
    jobs: NDArray[np.int64]
    keys: NDArray[np.uint64]
    job_row: NDArray[np.int32]
    shard_row: NDArray[np.int32]
    taken: NDArray[np.int64]


def tables_of(memory: SlotMemory) -> Tables:
    """The kernels' view of a node's memory."""
    return Tables(*(getattr(memory, name) for name in Tables._fields))


_u8, _u32, _i32, _i64, _u64 = (
    types.uint8[::1],
    types.uint32[::1],
    types.int32[::1],
    types.int64[::1],
    types.uint64[::1],
)
TABLES: Any = types.NamedTuple(
    (
        types.int32[:, ::1],
        _u32,
        _u32,
        _u8,
        _u8,
        _u8,
        _u8,
        _u8,
        _u8,
        _u32,
        _u32,
        _i32,
        _i32,
        types.int64[:, ::1],
        types.int64[:, ::1],
        types.uint8[:, ::1],
        types.int64[:, ::1],
        types.uint32[:, ::1],
        types.int64[:, ::1],
        _u64,
        _i32,
        types.int32[:, ::1],
        types.int64[:, ::1],
    ),
    Tables,
)


class Event(IntEnum):
    """What a kernel reports: rows ``(code, shard row, a, b)``."""

    #: a control packet for Python; a = packet index in the batch
    CONTROL = 0
    #: the last fragment of a group has come from a child; a = child index (-1: from the parent), b = group, or
    #: -1 - group if it had come before
    GROUP_END = 1
    #: a duplicate for a slot that holds the result; a = fragment, b = child index
    ANSWER = 2
    #: a fragment logged before is complete again (restart); a = fragment
    AGAIN_UP = 3
    AGAIN_DOWN = 4
    #: all children are in and the block is a misfit; a = fragment, b = the exponent that it needs (root only)
    RESTART = 5
    #: a contribution of a later attempt than this root knows of; a = fragment, b = attempt
    AMNESIA = 6
    #: a slot failed its own checksum on completion and was emptied; a = fragment
    CORRUPT_SLOT = 7
    #: a packet opened a new round; a = round
    OPENED = 8
    #: rows have left by a link, the last ones of a round or exponents; a = index of the link in its tree
    LEFT = 9
    #: this host's own values are not to be summed; a = first fragment of the tensor that may hold them, b = that behind the last
    REFUSED = 10


class Count(IntEnum):
    """Counters that kernels keep beside the drop reasons."""

    #: DATA and EXPONENT packets of children taken for the first time
    CONTRIBUTIONS = 0
    #: slots completed by folding
    COMPLETED = 1
    #: RESULT fragments taken for the first time
    RESULTS = 2
    #: slots that failed their own checksum
    CORRUPT_SLOTS = 3
    #: contributions that were the first in their slot, so that nothing was summed
    FIRST = 4


SUM, MAX32, MAX64, MAX8 = int(Fold.SUM), int(Fold.MAX32), int(Fold.MAX64), int(Fold.MAX8)
FREE, COLLECT, SENT, RESULT = int(State.FREE), int(State.COLLECT), int(State.SENT), int(State.RESULT)
SLOT0, COUNT_, FOLD = int(ShardColumn.SLOT0), int(ShardColumn.COUNT), int(ShardColumn.FOLD)
TREE, JOB, SHARD = int(ShardColumn.TREE), int(ShardColumn.JOB), int(ShardColumn.SHARD)
ACTIVE, COMMITTED = int(ShardColumn.ACTIVE), int(ShardColumn.COMMITTED)
UP_LOGGED, DOWN_LOGGED, GROUP0 = (
    int(ShardColumn.UP_LOGGED),
    int(ShardColumn.DOWN_LOGGED),
    int(ShardColumn.GROUP0),
)
LIVE, RETIRED, BIT = int(TreeColumn.LIVE), int(TreeColumn.RETIRED), int(TreeColumn.BIT)
PARENT_ENDPOINT, IS_ROOT = int(TreeColumn.PARENT_ENDPOINT), int(TreeColumn.IS_ROOT)
JOB_ID, VERSION = int(JobColumn.JOB), int(JobColumn.VERSION)
_UP, _DOWN = LOGGED_UP, LOGGED_DOWN
_LARGE = LARGE
K_DATA = int(Kind.DATA)
_LARGE_FLAG = int(Flag.LARGE) << FLAG_SHIFT
_LAST_GROUP_SIZE_MASK = (1 << GROUP_SHIFT) - 1


@njit(
    "void(int64[:, ::1], int64[::1], int64, int64, int64, int64)",
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def report(events: Any, used: Any, code: int, row: int, a: int, b: int) -> None:
    """Append one event; the array is sized so that a batch cannot overflow it."""
    i = used[0]
    events[i, 0] = code
    events[i, 1] = row
    events[i, 2] = a
    events[i, 3] = b
    used[0] = i + 1


@njit(numba.void(TABLES, types.int64, types.uint32), cache=True, nogil=True, _nrt=False)
def open_round(t: Tables, row: int, round_: int) -> None:
    """Give a shard's slots to a new round: empty logs, full group counts. Slots reset when first touched."""
    shard = t.shards[row]
    shard[ACTIVE] = np.int64(round_)
    shard[COMMITTED] = 0
    shard[UP_LOGGED] = 0
    shard[DOWN_LOGGED] = 0
    count = shard[COUNT_]
    groups = (count + _LAST_GROUP_SIZE_MASK) >> GROUP_SHIFT
    for group in range(groups):
        size = min(count - (group << GROUP_SHIFT), 1 << GROUP_SHIFT)
        t.up_left[shard[GROUP0] + group] = size
        t.down_left[shard[GROUP0] + group] = size


@njit(numba.void(TABLES, types.int64), cache=True, nogil=True, _nrt=False, inline="always")
def blank(t: Tables, slot: int) -> None:
    """Spoil a row's header: a device that still holds the row must not send a new partial sum under it."""
    t.rows[slot, 0] = 0


@njit(numba.void(TABLES, types.int64, types.uint32), cache=True, nogil=True, _nrt=False, inline="always")
def claim(t: Tables, slot: int, round_: int) -> None:
    """Reset a slot when a packet of another round than its own is the first to touch it."""
    if t.state[slot] == FREE or t.round[slot] != round_:
        t.round[slot] = round_
        t.state[slot] = COLLECT
        t.bitmap[slot] = 0
        t.attempt[slot] = 0
        t.exponent[slot] = 0
        t.misfit[slot] = 0
        t.announced[slot] = 0
        t.logged[slot] = 0
        blank(t, slot)


@njit(
    numba.void(types.int32[:, ::1], types.int64, types.int32[::1], types.int64, types.int64, types.boolean),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def fold(rows: Any, slot: int, arena: Any, offset: int, how: int, first: bool) -> None:
    """Fold stage: payload (and, for sums, the linear checksum) of the packet at word ``offset`` into a slot."""
    if first:
        fold_copy(rows, slot, arena, offset)
    elif how == SUM:
        fold_add(rows, slot, arena, offset)
    elif how == MAX8:
        fold_max8(rows, slot, arena, offset)
    elif how == MAX32:
        fold_max32(rows, slot, arena, offset)
    else:
        fold_max64(rows, slot, arena, offset)


@njit(numba.void(TABLES, types.int64, types.int64), cache=True, nogil=True, _nrt=False, inline="always")
def seal(t: Tables, slot: int, fold_: int) -> None:
    """Recompute the checksum where folding does not keep it (maxima)."""
    if fold_ != SUM:
        t.rows[slot, CHECK] = np.int32(row_checksum(t.rows[slot], HEAD, CHECK - HEAD))


@njit("boolean(int32[:, ::1], int64)", cache=True, nogil=True, _nrt=False)
def row_is_sound(rows: Any, slot: int) -> Any:
    """Whether a row's payload still matches its linear checksum."""
    return np.uint32(rows[slot, CHECK]) == np.uint32(row_checksum(rows[slot], HEAD, CHECK - HEAD))


@njit(
    numba.void(TABLES, types.int64, types.int64, types.int64, types.uint32),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def stamp(t: Tables, row: int, fragment: int, kind: int, host: int) -> None:
    """Write the header of a slot's row for its next hop; ``kind`` includes the flags in its high nibble.

    With the index goes what the block needs, as far as it is known.
    """
    shard = t.shards[row]
    job_row = shard[JOB]
    slot = shard[SLOT0] + fragment
    if kind & 0xF == K_DATA and t.misfit[slot] & _LARGE:
        kind |= _LARGE_FLAG
    w0 = (
        np.uint32(MAGIC_VERSION)
        | np.uint32(kind) << np.uint32(8)
        | np.uint32(t.jobs[job_row, JOB_ID]) << np.uint32(16)
    )
    w1 = np.uint32(host)
    w2 = np.uint32(fragment) | np.uint32(t.exponent[slot]) << np.uint32(INDEX_BITS)
    w3 = np.uint32(t.round[slot])
    w4 = (
        np.uint32(shard[SHARD])
        | np.uint32(t.jobs[job_row, VERSION]) << np.uint32(16)
        | np.uint32(t.attempt[slot]) << np.uint32(24)
    )
    r = t.rows[slot]
    r[0] = np.int32(w0)
    r[1] = np.int32(w1)
    r[2] = np.int32(w2)
    r[3] = np.int32(w3)
    r[4] = np.int32(w4)
    r[5] = np.int32(tag_of(w0, w1, w2, w3, w4, t.keys[job_row]))


@njit(
    numba.void(TABLES, types.int64, types.int64, types.int64, types.int64[:, ::1], types.int64[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def emit_up(t: Tables, row: int, fragment: int, kind: int, events: Any, used: Any) -> None:
    """Emit stage towards the parent: stamp the row and log the fragment, once a round; a restart is sent again."""
    shard = t.shards[row]
    slot = shard[SLOT0] + fragment
    t.state[slot] = SENT
    host = np.uint32(t.trees[shard[TREE], BIT])
    if t.logged[slot] & _UP:
        stamp(t, row, fragment, kind, host)
        report(events, used, 3, row, fragment, 0)
        return
    t.logged[slot] |= _UP
    group = shard[GROUP0] + (fragment >> GROUP_SHIFT)
    t.up_left[group] -= 1
    if t.up_left[group] == 0:
        kind |= 0x10
    stamp(t, row, fragment, kind, host)
    t.up_log[shard[SLOT0] + shard[UP_LOGGED]] = fragment
    shard[UP_LOGGED] += 1


@njit(
    numba.void(TABLES, types.int64, types.int64, types.int64, types.int64[:, ::1], types.int64[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def emit_down(t: Tables, row: int, fragment: int, kind: int, events: Any, used: Any) -> None:
    """Emit stage towards the children, and towards the node's own sink: the slot now holds the result."""
    shard = t.shards[row]
    slot = shard[SLOT0] + fragment
    t.state[slot] = RESULT
    t.misfit[slot] = 0
    if t.logged[slot] & _DOWN:
        stamp(t, row, fragment, kind, np.uint32(0))
        report(events, used, 4, row, fragment, 0)
        return
    t.logged[slot] |= _DOWN
    group = shard[GROUP0] + (fragment >> GROUP_SHIFT)
    t.down_left[group] -= 1
    if t.down_left[group] == 0:
        kind |= 0x10
    stamp(t, row, fragment, kind, np.uint32(0))
    t.down_log[shard[SLOT0] + shard[DOWN_LOGGED]] = fragment
    shard[DOWN_LOGGED] += 1
