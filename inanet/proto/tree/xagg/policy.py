"""XAgg's policy for the slot engine: Algorithm 1, with the linear checksum, slot states and re-parenting.

resolve: the fragment index, in a region as large as the tensor. admit: one bit per child; a duplicate is refused, a
duplicate of a finished fragment is answered; retired ids stand for their replacements. A collision cannot happen.
Also the receiving side of the downlink, where a result overwrites the partial sum (slot states).
"""

from typing import Any

import numba
import numpy as np
from numba import types

from inanet.kernels.checksum import row_checksum
from inanet.kernels.header import newer8, newer32, only_bit, tag_of
from inanet.kernels.jit import njit
from inanet.proto.common.encoding import LARGE, MISFIT
from inanet.proto.tree.engine import (
    ACTIVE,
    COMMITTED,
    COUNT_,
    FOLD,
    FREE,
    IS_ROOT,
    LIVE,
    PARENT_ENDPOINT,
    RESULT,
    RETIRED,
    SLOT0,
    SUM,
    TABLES,
    TREE,
    VERSION,
    Count,
    Event,
    Tables,
    claim,
    emit_down,
    emit_up,
    fold,
    open_round,
    report,
    row_is_sound,
    seal,
)
from inanet.proto.tree.slots import CHECK, HEAD
from inanet.wire.drops import Drop
from inanet.wire.xagg import (
    CONTROL_BYTES,
    FLAG_SHIFT,
    INDEX_BITS,
    INDEX_WORD,
    LOST_BYTES,
    MAGIC_VERSION,
    ROW_BYTES,
    Flag,
    Kind,
)

K_DATA, K_EXPONENT, K_RESULT, K_RESTART = (
    int(Kind.DATA),
    int(Kind.EXPONENT),
    int(Kind.RESULT),
    int(Kind.RESTART),
)
K_LOST, K_LAST = int(Kind.LOST), max(map(int, Kind))
OK, SHORT, OVERSIZED = int(Drop.OK), int(Drop.SHORT), int(Drop.OVERSIZED)
BAD_MAGIC, BAD_TYPE, FOREIGN_JOB = int(Drop.BAD_MAGIC), int(Drop.BAD_TYPE), int(Drop.FOREIGN_JOB)
BAD_TAG, BAD_CHECKSUM = int(Drop.BAD_TAG), int(Drop.BAD_CHECKSUM)
UNKNOWN_SHARD, BAD_FRAGMENT, FOREIGN_HOST = (
    int(Drop.UNKNOWN_SHARD),
    int(Drop.BAD_FRAGMENT),
    int(Drop.FOREIGN_HOST),
)
STALE_PLAN, FUTURE_PLAN = int(Drop.STALE_PLAN), int(Drop.FUTURE_PLAN)
STALE_ROUND, NOT_OPEN = int(Drop.STALE_ROUND), int(Drop.NOT_OPEN)
STALE_ATTEMPT, FUTURE_ATTEMPT, DUPLICATE = (
    int(Drop.STALE_ATTEMPT),
    int(Drop.FUTURE_ATTEMPT),
    int(Drop.DUPLICATE),
)
E_CONTROL, E_GROUP_END, E_ANSWER = int(Event.CONTROL), int(Event.GROUP_END), int(Event.ANSWER)
E_RESTART, E_AMNESIA, E_CORRUPT, E_OPENED = (
    int(Event.RESTART),
    int(Event.AMNESIA),
    int(Event.CORRUPT_SLOT),
    int(Event.OPENED),
)
C_CONTRIBUTIONS, C_COMPLETED = int(Count.CONTRIBUTIONS), int(Count.COMPLETED)
C_RESULTS, C_CORRUPT, C_FIRST = int(Count.RESULTS), int(Count.CORRUPT_SLOTS), int(Count.FIRST)
_ROW, _LOST, _CONTROL, _MAGIC = ROW_BYTES, LOST_BYTES, CONTROL_BYTES, MAGIC_VERSION
INDEX = INDEX_WORD
_INDEX_BITS, _INDEX_MASK = np.uint32(INDEX_BITS), np.uint32((1 << INDEX_BITS) - 1)
_LARGE_FLAG = np.uint32(int(Flag.LARGE) << 8 + FLAG_SHIFT)

_BATCH_ARGS = (TABLES, types.int32[::1], types.int64, types.int64, types.int64)


@njit("int64(int64, int64)", cache=True, nogil=True, _nrt=False, inline="always")
def ended_group(fragment: int, verdict: int) -> Any:
    """What is reported of a group's end; see :attr:`~inanet.proto.tree.engine.Event.GROUP_END`."""
    group = fragment >> 10
    return -1 - group if verdict == DUPLICATE else group


@njit(
    types.int64(TABLES, types.int32[::1], types.int64, types.int64),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def parse(t: Tables, arena: Any, offset: int, length: int) -> Any:
    """Length, magic, type, job, tag and checksum of one packet, each before anything that relies on it."""
    if length < _CONTROL or offset & 3:
        return SHORT
    o = offset >> 2
    w0 = np.uint32(arena[o])
    if w0 & np.uint32(0xFF) != _MAGIC:
        return BAD_MAGIC
    kind = np.int64(w0 >> np.uint32(8)) & 0xF
    if kind == 0 or kind > K_LAST:
        return BAD_TYPE
    want = _CONTROL
    if kind <= K_RESTART:
        want = _ROW
    elif kind == K_LOST:
        want = _LOST
    if length < want:
        return SHORT
    if length > want:
        return OVERSIZED
    job_row = t.job_row[np.int64(w0 >> np.uint32(16))]
    if job_row < 0:
        return FOREIGN_JOB
    tag = tag_of(
        w0,
        np.uint32(arena[o + 1]),
        np.uint32(arena[o + 2]),
        np.uint32(arena[o + 3]),
        np.uint32(arena[o + 4]),
        t.keys[job_row],
    )
    if tag != np.uint32(arena[o + 5]):
        return BAD_TAG
    body = (want >> 2) - HEAD - 1
    if np.uint32(arena[o + HEAD + body]) != np.uint32(row_checksum(arena, o + HEAD, body)):
        return BAD_CHECKSUM
    return OK


@njit(types.uint32(TABLES, types.int64, types.uint32), cache=True, nogil=True, _nrt=False, inline="always")
def effective(t: Tables, tree: int, bitmap: int) -> Any:
    """Bitmap with every retired id in it replaced by the ids it stands for (re-parenting)."""
    retired = np.uint32(t.trees[tree, RETIRED])
    done = np.uint32(0)
    # a replacement may have retired as well: once more for what has come in
    while bitmap & retired & ~done:
        todo = np.uint32(bitmap & retired & ~done)
        for i in range(32):
            if (todo >> np.uint32(i)) & np.uint32(1):
                bitmap |= t.mask[tree, i]
        done |= todo
    return np.uint32(bitmap)


@njit(
    types.int64(TABLES, types.int64, types.int64, types.uint32, types.int64, types.uint8),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def resolve_child(t: Tables, tree: int, job_row: int, host: int, source: int, plan: int) -> Any:
    """Child index of an uplink packet, or minus the reason why it is none of ours."""
    child = only_bit(host)
    if child < 0:
        return -FOREIGN_HOST
    if not np.uint32(t.trees[tree, LIVE]) & host:
        return -STALE_PLAN if np.uint32(t.trees[tree, RETIRED]) & host else -FOREIGN_HOST
    if t.child_endpoint[tree, child] != source:
        return -FOREIGN_HOST
    if newer8(t.since[tree, child], plan):
        return -STALE_PLAN
    if newer8(plan, np.uint8(t.jobs[job_row, VERSION])):
        return -FUTURE_PLAN
    return child


@njit(
    types.int64(TABLES, types.int64, types.uint32, types.int64[:, ::1], types.int64[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def admit_round(t: Tables, row: int, round_: int, events: Any, used: Any) -> Any:
    """Whether a shard takes packets of this round; a newer one opens it if the last one is committed (confirmed rounds)."""
    active = np.uint32(t.shards[row, ACTIVE])
    if not t.shards[row, COMMITTED]:
        if round_ == active:
            return OK
        return NOT_OPEN if newer32(round_, active) else STALE_ROUND
    if not newer32(round_, active):
        return STALE_ROUND
    open_round(t, row, round_)
    report(events, used, E_OPENED, row, np.int64(round_), 0)
    return OK


@njit("void(int32[:, ::1], int64, uint8)", cache=True, nogil=True, _nrt=False)
def exponent_row(rows: Any, slot: int, exponent: int) -> None:
    """Fill a row with one exponent: payload word 0, zeros behind it, checksum."""
    row = rows[slot]
    row[HEAD] = np.int32(exponent)
    for word in range(HEAD + 1, CHECK):
        row[word] = 0
    row[CHECK] = np.int32(exponent)


@njit(
    numba.void(TABLES, types.int64, types.int64, types.int64[:, ::1], types.int64[::1], types.int64[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def complete(t: Tables, row: int, fragment: int, events: Any, used: Any, counts: Any) -> None:
    """Every live child is in: hand the fragment on, or start it again with the exponent that it needs.

    It is too large for the one it has, or not zeros and nowhere large enough.
    """
    shard = t.shards[row]
    slot = shard[SLOT0] + fragment
    root = t.trees[shard[TREE], IS_ROOT] != 0
    counts[C_COMPLETED] += 1
    misfit = t.misfit[slot] & MISFIT
    if root and (misfit or (t.exponent[slot] and not t.misfit[slot] & LARGE)):
        report(events, used, E_RESTART, row, fragment, np.int64(t.exponent[slot]))
        return
    if misfit:
        exponent_row(t.rows, slot, t.exponent[slot])
        emit_up(t, row, fragment, K_EXPONENT, events, used)
        return
    if shard[FOLD] == SUM and not row_is_sound(t.rows, slot):
        t.bitmap[slot] = 0
        counts[C_CORRUPT] += 1
        report(events, used, E_CORRUPT, row, fragment, 0)
        return
    seal(t, slot, shard[FOLD])
    if root:
        emit_down(t, row, fragment, K_RESULT, events, used)
    else:
        emit_up(t, row, fragment, K_DATA, events, used)


@njit(
    types.int64(
        TABLES,
        types.int32[::1],
        types.int64,
        types.int64,
        types.int64,
        types.uint8,
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def adopt(
    t: Tables, arena: Any, o: int, row: int, fragment: int, attempt: int, events: Any, used: Any, counts: Any
) -> Any:
    """A result takes a slot over, whoever it comes from (slot states).

    One of an older attempt is the same, bit for bit, if this attempt has the exponent of the one before it.
    """
    slot = t.shards[row, SLOT0] + fragment
    if not newer8(t.attempt[slot], attempt):
        t.attempt[slot] = attempt
    elif t.announced[slot]:
        return STALE_ATTEMPT
    fold(t.rows, slot, arena, o, t.shards[row, FOLD], True)
    t.exponent[slot] = np.uint8(np.uint32(arena[o + INDEX]) >> _INDEX_BITS)
    counts[C_RESULTS] += 1
    emit_down(t, row, fragment, K_RESULT, events, used)
    return OK


@njit(
    types.int64(
        TABLES,
        types.int32[::1],
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def take_contribution(
    t: Tables,
    arena: Any,
    o: int,
    row: int,
    fragment: int,
    child: int,
    kind: int,
    events: Any,
    used: Any,
    counts: Any,
) -> Any:
    """Admit, fold and emit one packet of a child (Algorithm 1, lines 5 to 13)."""
    shard = t.shards[row]
    tree = shard[TREE]
    verdict = admit_round(t, row, np.uint32(arena[o + 3]), events, used)
    if verdict != OK:
        return verdict
    slot = shard[SLOT0] + fragment
    round_ = np.uint32(arena[o + 3])
    untouched = t.state[slot] == FREE or t.round[slot] != round_
    if t.state[slot] == RESULT and not untouched:
        if kind != K_RESULT:
            report(events, used, E_ANSWER, row, fragment, child)
        return DUPLICATE
    attempt = np.uint8(np.uint32(arena[o + 4]) >> np.uint32(24))
    if kind == K_RESULT:
        claim(t, slot, round_)
        return adopt(t, arena, o, row, fragment, attempt, events, used, counts)
    known = np.uint8(0) if untouched else t.attempt[slot]
    if attempt != known:
        if newer8(known, attempt):
            return STALE_ATTEMPT
        if t.trees[tree, IS_ROOT]:
            report(events, used, E_AMNESIA, row, fragment, np.int64(attempt))
        return FUTURE_ATTEMPT
    claim(t, slot, round_)
    host = np.uint32(np.uint32(1) << np.uint32(child))
    present = effective(t, tree, t.bitmap[slot])
    if present & host:
        return DUPLICATE
    first = t.bitmap[slot] == 0
    t.bitmap[slot] |= host
    counts[C_CONTRIBUTIONS] += 1
    counts[C_FIRST] += first
    if kind == K_EXPONENT:
        t.misfit[slot] |= MISFIT
        t.exponent[slot] = max(t.exponent[slot], np.uint8(arena[o + HEAD]))
    else:
        t.exponent[slot] = max(t.exponent[slot], np.uint8(np.uint32(arena[o + INDEX]) >> _INDEX_BITS))
        if np.uint32(arena[o]) & _LARGE_FLAG:
            t.misfit[slot] |= LARGE
    if kind != K_EXPONENT or first:
        fold(t.rows, slot, arena, o, shard[FOLD], first)
    live = np.uint32(t.trees[tree, LIVE])
    if (present | host) & live == live:
        complete(t, row, fragment, events, used, counts)
    return OK


@njit(
    types.int64(
        TABLES,
        types.int32[::1],
        types.int64,
        types.int64,
        types.int64,
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def take_result(
    t: Tables, arena: Any, o: int, row: int, fragment: int, events: Any, used: Any, counts: Any
) -> Any:
    """One result from the parent: it overwrites whatever the slot held and goes on downwards (slot states)."""
    shard = t.shards[row]
    round_ = np.uint32(arena[o + 3])
    active = np.uint32(shard[ACTIVE])
    if round_ != active:
        return NOT_OPEN if newer32(round_, active) else STALE_ROUND
    if shard[COMMITTED]:
        return STALE_ROUND
    slot = shard[SLOT0] + fragment
    claim(t, slot, round_)
    if t.state[slot] == RESULT:
        return DUPLICATE
    attempt = np.uint8(np.uint32(arena[o + 4]) >> np.uint32(24))
    return adopt(t, arena, o, row, fragment, attempt, events, used, counts)


@njit(
    types.int64(
        TABLES,
        types.int32[::1],
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def take(
    t: Tables,
    arena: Any,
    index: int,
    offset: int,
    length: int,
    source: int,
    events: Any,
    used: Any,
    counts: Any,
) -> Any:
    """One packet through the four stages; its drop reason, 0 if it was used."""
    verdict = parse(t, arena, offset, length)
    if verdict != OK:
        return verdict
    o = offset >> 2
    w0 = np.uint32(arena[o])
    kind = np.int64(w0 >> np.uint32(8)) & 0xF
    job_row = np.int64(t.job_row[np.int64(w0 >> np.uint32(16))])
    if kind > K_RESTART:
        report(events, used, E_CONTROL, -1, index, 0)
        return OK
    w4 = np.uint32(arena[o + 4])
    shard_id = np.int64(w4 & np.uint32(0xFFFF))
    row = np.int64(-1)
    if shard_id < t.shard_row.shape[1]:
        row = np.int64(t.shard_row[job_row, shard_id])
    if row < 0:
        return UNKNOWN_SHARD
    fragment = np.int64(np.uint32(arena[o + INDEX]) & _INDEX_MASK)
    if kind != K_RESTART and fragment >= t.shards[row, COUNT_]:
        return BAD_FRAGMENT
    tree = t.shards[row, TREE]
    host = np.uint32(arena[o + 1])
    ended = w0 & np.uint32(0x1000)
    if kind == K_DATA or kind == K_EXPONENT or (kind == K_RESULT and host != 0):
        child = resolve_child(t, tree, job_row, host, source, np.uint8(w4 >> np.uint32(16)))
        if child == -FUTURE_PLAN:
            # dropped, but off the wire: the sender gets its credit back and repeats it
            t.taken[tree, only_bit(host)] += 1
        if child < 0:
            return -child
        t.taken[tree, child] += 1
        verdict = take_contribution(t, arena, o, row, fragment, child, kind, events, used, counts)
        if ended and (verdict == OK or verdict == DUPLICATE):
            report(events, used, E_GROUP_END, row, child, ended_group(fragment, verdict))
        return verdict
    if t.trees[tree, PARENT_ENDPOINT] != source:
        return FOREIGN_HOST
    if kind == K_RESTART:
        report(events, used, E_CONTROL, row, index, 0)
        return OK
    t.taken[tree, 32] += 1
    verdict = take_result(t, arena, o, row, fragment, events, used, counts)
    if ended and (verdict == OK or verdict == DUPLICATE):
        report(events, used, E_GROUP_END, row, -1, ended_group(fragment, verdict))
    return verdict


@njit(
    numba.void(
        TABLES,
        types.int32[::1],
        types.int64[::1],
        types.int64[::1],
        types.uint64[::1],
        types.int64[:, ::1],
        types.int64[::1],
        types.int64[::1],
        types.int64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def ingest(
    t: Tables,
    arena: Any,
    offsets: Any,
    lengths: Any,
    sources: Any,
    events: Any,
    used: Any,
    counts: Any,
    drops: Any,
) -> None:
    """The driver: a whole batch. ``used[0]`` is the number of events, ``drops`` is indexed by reason."""
    for i in range(len(offsets)):
        verdict = take(t, arena, i, offsets[i], lengths[i], np.int64(sources[i]), events, used, counts)
        drops[verdict] += 1
