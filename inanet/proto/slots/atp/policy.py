"""ATP's policy, with the two points at which A2TP and ESA differ: what a collision does to the slot's occupant.

resolve: the slot that the sender has hashed the fragment to, among slots that jobs share; who may say so is bound to
addresses. admit: a free slot is claimed; the slot of another fragment is a collision, and the newcomer goes to the PS as it
is. A repeated packet takes what its slot holds along to the PS, and so does one that bypasses the switch. fold: add.
emit: the last contribution leaves with the sum, to the PS, and so does a duplicate of a complete slot. release: when the
PS's answer passes through, which goes on to all workers.

- **ATP** does nothing to the occupant.
- **A2TP** marks it (Col), and the newcomer as well; marks leave with the sum, set before they are read.
- **ESA** evicts it if the newcomer is more urgent: the partial sum goes to the PS.

A slot that is freed keeps its values; nobody can read them, because only the owner's fragment can, and the first
contribution of the next owner overwrites them.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from inanet.kernels.bigendian import add_in, copy_in, copy_out, load16, load32, store16, store32
from inanet.kernels.header import lowest_bit
from inanet.kernels.jit import njit
from inanet.proto.common.program import Action
from inanet.proto.slots.program import Count
from inanet.proto.slots.registers import FREE, REGISTERS, Register, Registers
from inanet.proto.slots.tenants import BINDINGS, Bindings
from inanet.wire import a2tp
from inanet.wire.atp import APP_AT, FLAGS_AT, JOB_MASK, MARK_AT, SECOND_HALF, SEQ_AT, TRAILER_BYTES, Flag
from inanet.wire.drops import Drop


class Variant(NamedTuple):
    """Which system's framing and collisions."""

    #: bytes before the values
    head: int
    #: the byte at offset 10 holds A2TP's marks
    marks: bool
    #: the byte at offset 10 holds ESA's priority
    preempts: bool


VARIANT: Any = types.NamedTuple((types.int64, types.boolean, types.boolean), Variant)


class Spill(NamedTuple):
    """Packets that leave beside those of the batch: ``used[0]`` of them in ``arena``, bound for ``to``."""

    arena: Any
    to: Any
    used: Any


SPILL: Any = types.NamedTuple((types.uint8[::1], types.int64[::1], types.int64[::1]), Spill)

SHORT, OVERSIZED, BAD_SLOT = int(Drop.SHORT), int(Drop.OVERSIZED), int(Drop.BAD_SLOT)
FOREIGN_JOB, FOREIGN_HOST = int(Drop.FOREIGN_JOB), int(Drop.FOREIGN_HOST)
DUPLICATE, OVERLAP, UNMATCHED = int(Drop.DUPLICATE), int(Drop.OVERLAP), int(Drop.UNMATCHED)
DROP, UNICAST, GROUP, REPLY = (
    int(Action.DROP),
    int(Action.UNICAST),
    int(Action.GROUP),
    int(Action.REPLY),
)
FOLDED, COMPLETED, ANSWERED = int(Count.FOLDED), int(Count.COMPLETED), int(Count.ANSWERED)
COLLISIONS, FLUSHED, EVICTED = int(Count.COLLISIONS), int(Count.FLUSHED), int(Count.EVICTED)
AGED, BYPASSED, FIRST = int(Count.AGED), int(Count.BYPASSED), int(Count.FIRST)
KEY, BITMAP, MARKS, VALUES = (
    int(Register.KEY),
    int(Register.BITMAP),
    int(Register.MARKS),
    int(Register.VALUES),
)
ACK, COLLISION, RESEND = int(Flag.ACK), int(Flag.COLLISION), int(Flag.RESEND)
ECN, PASSING = int(Flag.ECN), int(Flag.OVERFLOW)
COL, BYPASS = int(a2tp.Mark.COL), int(a2tp.Mark.BYPASS)
_FLAGS, _APP, _SEQ, _MARK, _JOB = FLAGS_AT, APP_AT, SEQ_AT, MARK_AT, JOB_MASK
_TRAILER, _SECOND = TRAILER_BYTES, SECOND_HALF

_OPTIONS = {"cache": True, "nogil": True, "_nrt": False}
_INLINE = _OPTIONS | {"inline": "always"}
_ARENA = types.uint8[::1]
_INT = types.int64


@njit(types.int64(BINDINGS, _ARENA, _INT, _INT, _INT, _INT), **_INLINE)
def resolve(t: Bindings, arena: Any, at: int, length: int, source: int, head: int) -> Any:
    """The slot of a packet; or minus the reason why it has none. An answer without a slot has one beyond all."""
    size = head + 248 + _TRAILER
    if length != size:
        return -SHORT if length < size else -OVERSIZED
    job = np.int64(load16(arena, at + _APP)) & _JOB
    if not t.known[job]:
        return -FOREIGN_JOB
    bitmap = load32(arena, at)
    index = np.int64(load16(arena, at + head - 4))
    if arena[at + _FLAGS] & ACK:
        if t.ps[job] != source:
            return -FOREIGN_HOST
        return t.first[job] + min(index, t.share[job] - 1)
    worker = lowest_bit(bitmap)
    if worker == 32 or t.source[job, worker] != source or bitmap & ~t.allowed[job, worker]:
        return -FOREIGN_HOST
    if index >= t.share[job]:
        return -BAD_SLOT
    return t.first[job] + index


@njit(types.void(REGISTERS, _INT), **_INLINE)
def release(r: Registers, slot: int) -> None:
    """Free a slot."""
    r.occupied[r.owner[slot]] -= 1
    r.owner[slot] = FREE


@njit(types.void(REGISTERS, _INT, _INT, types.uint32, types.uint8, types.float64), **_INLINE)
def claim(r: Registers, slot: int, job: int, key: int, priority: int, now: float) -> None:
    """Give a free slot to a fragment; its first contribution overwrites the values."""
    r.owner[slot] = job
    r.key[slot] = key
    r.bitmap[slot] = 0
    r.complete[slot] = 0
    r.ecn[slot] = 0
    r.col[slot] = 0
    r.priority[slot] = priority
    r.touched[slot] = now
    r.occupied[job] += 1


@njit(types.void(REGISTERS, _INT, _ARENA, _INT, VARIANT), **_INLINE)
def load_sum(r: Registers, slot: int, arena: Any, at: int, v: Variant) -> None:
    """Emit: values, bitmap and marks of a slot into a packet of its fragment."""
    copy_out(r.values, slot, arena, at + v.head)
    store32(arena, at, r.bitmap[slot])
    if r.ecn[slot]:
        arena[at + _FLAGS] |= np.uint8(ECN)
    if v.marks and r.col[slot]:
        arena[at + _MARK] |= np.uint8(COL)


@njit(types.void(REGISTERS, BINDINGS, _INT, SPILL, VARIANT), **_OPTIONS)
def spill(r: Registers, t: Bindings, slot: int, s: Spill, v: Variant) -> None:
    """Send a partial sum to its job's PS in a packet of its own."""
    job = np.int64(r.owner[slot])
    size = v.head + 248 + _TRAILER
    at = s.used[0] * size
    s.arena[at : at + size] = 0
    s.to[s.used[0]] = t.ps[job]
    s.used[0] += 1
    app = np.uint32((r.key[slot] >> np.uint32(16)) << np.uint32(8)) | np.uint32(job)
    store16(s.arena, at + _APP, app)
    store16(s.arena, at + _SEQ, r.key[slot])
    if v.preempts:
        s.arena[at + _MARK] = r.priority[slot]
    index = np.uint32(slot - t.first[job])
    store16(s.arena, at + v.head - 4, index)
    store16(s.arena, at + v.head - 2, np.uint32(index + np.uint32(_SECOND)))
    load_sum(r, slot, s.arena, at, v)


@njit(types.int64(REGISTERS, BINDINGS, _ARENA, _INT, _INT, types.uint32, VARIANT), **_OPTIONS)
def answer(r: Registers, t: Bindings, arena: Any, at: int, slot: int, key: int, v: Variant) -> Any:
    """What to do with a packet of the PS: an action, or minus the reason why it is dropped."""
    job = np.int64(load16(arena, at + _APP)) & _JOB
    flags = arena[at + _FLAGS]
    if flags & PASSING:
        return UNICAST
    r.accesses[KEY] += 1
    held = r.owner[slot] == job and r.key[slot] == key
    if flags & RESEND:
        if not held:
            return -UNMATCHED
        arena[at + _FLAGS] = 0
        r.accesses[VALUES] += 1
        load_sum(r, slot, arena, at, v)
        release(r, slot)
        return REPLY
    if held:
        release(r, slot)
    return GROUP


@njit(types.void(REGISTERS, _ARENA, _INT, _INT, types.uint32, types.int64[::1], VARIANT), **_OPTIONS)
def flush(r: Registers, arena: Any, at: int, slot: int, bitmap: int, counts: Any, v: Variant) -> None:
    """A packet takes what its slot holds along to the PS; it is added only if it is not in there already."""
    r.accesses[BITMAP] += 1
    if not bitmap & r.bitmap[slot]:
        counts[FOLDED] += 1
        add_in(r.values, slot, arena, at + v.head)
        r.bitmap[slot] |= bitmap
    elif bitmap & ~r.bitmap[slot]:
        # some of a rack's workers are in the slot: neither can be taken out, so they go one by one
        return
    counts[FLUSHED] += 1
    r.accesses[VALUES] += 1
    load_sum(r, slot, arena, at, v)
    release(r, slot)


@njit(
    types.int64(
        REGISTERS,
        BINDINGS,
        _ARENA,
        _INT,
        _INT,
        _INT,
        types.uint32,
        types.uint32,
        SPILL,
        types.int64[::1],
        VARIANT,
        types.float64,
    ),
    **_INLINE,
)
def admit(
    r: Registers,
    t: Bindings,
    arena: Any,
    at: int,
    slot: int,
    job: int,
    key: int,
    bitmap: int,
    s: Spill,
    counts: Any,
    v: Variant,
    now: float,
) -> Any:
    """Whether the slot is this fragment's now. On a collision the occupant stays, is marked, or gives way."""
    if r.owner[slot] == job and r.key[slot] == key:
        return True
    priority = arena[at + _MARK] if v.preempts else np.uint8(0)
    may = r.occupied[job] < t.quota[job]
    if r.owner[slot] == FREE and may:
        claim(r, slot, job, key, priority, now)
        return True
    # evicting a fragment of its own job leaves a job within its quota
    may = may or r.owner[slot] == job
    if v.preempts and may and r.owner[slot] != FREE and priority > r.priority[slot]:
        # a complete sum has left already; if it was lost, its workers ask for it
        if not r.complete[slot]:
            spill(r, t, slot, s, v)
        release(r, slot)
        counts[EVICTED] += 1
        claim(r, slot, job, key, priority, now)
        return True
    counts[COLLISIONS] += 1
    arena[at + _FLAGS] |= np.uint8(COLLISION)
    if v.marks:
        r.col[slot] = 1
        arena[at + _MARK] |= np.uint8(COL)
    return False


@njit(
    types.int64(REGISTERS, BINDINGS, _ARENA, _INT, _INT, _INT, types.uint32, types.int64[::1], VARIANT),
    **_INLINE,
)
def fold(
    r: Registers, t: Bindings, arena: Any, at: int, slot: int, job: int, bitmap: int, counts: Any, v: Variant
) -> Any:
    """Add a packet to the slot of its fragment; UNICAST if it leaves with the sum, else minus the reason it is dropped."""
    if arena[at + _FLAGS] & ECN:
        r.ecn[slot] = 1
    if v.marks and arena[at + _MARK] & COL:
        r.col[slot] = 1
    if bitmap & r.bitmap[slot]:
        if bitmap & ~r.bitmap[slot]:
            return -OVERLAP
        if not r.complete[slot]:
            return -DUPLICATE
        counts[ANSWERED] += 1
        r.accesses[VALUES] += 1
        load_sum(r, slot, arena, at, v)
        return UNICAST
    counts[FOLDED] += 1
    # one access, also where a sum has just been evicted: what was there comes out as this goes in
    r.accesses[VALUES] += 1
    if r.bitmap[slot] == 0:
        counts[FIRST] += 1
        copy_in(r.values, slot, arena, at + v.head)
    else:
        add_in(r.values, slot, arena, at + v.head)
    r.bitmap[slot] |= bitmap
    if r.bitmap[slot] != t.full[job]:
        return DROP
    r.complete[slot] = 1
    counts[COMPLETED] += 1
    load_sum(r, slot, arena, at, v)
    return UNICAST


@njit(
    types.void(
        REGISTERS,
        BINDINGS,
        VARIANT,
        SPILL,
        _ARENA,
        types.int64[::1],
        types.int64[::1],
        types.uint64[::1],
        types.uint8[::1],
        types.uint8[::1],
        types.int64[::1],
        types.uint8[::1],
        types.int64[::1],
        types.float64,
    ),
    **_OPTIONS,
)
def run(
    r: Registers,
    t: Bindings,
    v: Variant,
    s: Spill,
    arena: Any,
    offsets: Any,
    lengths: Any,
    sources: Any,
    congested: Any,
    action: Any,
    target: Any,
    reason: Any,
    counts: Any,
    now: float,
) -> None:
    """The four stages over a batch."""
    for i in range(offsets.size):
        at = offsets[i]
        action[i] = DROP
        slot = resolve(t, arena, at, lengths[i], np.int64(sources[i]), v.head)
        if slot < 0:
            reason[i] = np.uint8(-slot)
            continue
        if congested[i]:
            arena[at + _FLAGS] |= np.uint8(ECN)
        flags = arena[at + _FLAGS]
        app = load16(arena, at + _APP)
        job = np.int64(app) & _JOB
        key = np.uint32((app >> np.uint32(8)) << np.uint32(16)) | load16(arena, at + _SEQ)
        bitmap = load32(arena, at)
        target[i] = t.ps[job]
        if flags & ACK:
            verdict = answer(r, t, arena, at, slot, key, v)
            if verdict == GROUP:
                target[i] = t.group[job]
            elif flags & PASSING:
                worker = lowest_bit(bitmap)
                if worker == 32 or t.source[job, worker] < 0:
                    verdict = -FOREIGN_HOST
                else:
                    target[i] = t.source[job, worker]
        elif flags & PASSING:
            verdict = UNICAST
        else:
            bypasses = v.marks and arena[at + _MARK] & BYPASS
            r.accesses[KEY] += 1
            r.accesses[MARKS] += 1
            if flags & RESEND or bypasses:
                counts[BYPASSED] += 1 if bypasses else 0
                if r.owner[slot] == job and r.key[slot] == key:
                    flush(r, arena, at, slot, bitmap, counts, v)
                verdict = UNICAST
            elif admit(r, t, arena, at, slot, job, key, bitmap, s, counts, v, now):
                r.touched[slot] = now
                r.accesses[BITMAP] += 1
                verdict = fold(r, t, arena, at, slot, job, bitmap, counts, v)
            else:
                verdict = UNICAST
        if verdict < 0:
            reason[i] = np.uint8(-verdict)
        else:
            action[i] = np.uint8(verdict)


@njit(
    types.void(REGISTERS, BINDINGS, VARIANT, SPILL, types.int64[::1], types.int64[::1]),
    **_OPTIONS,
)
def expire(r: Registers, t: Bindings, v: Variant, s: Spill, slots: Any, counts: Any) -> None:
    """Give slots up: their sums go to the PS with their bitmaps, nothing is discarded (partial flushes)."""
    for k in range(slots.size):
        spill(r, t, slots[k], s, v)
        release(r, slots[k])
        counts[AGED] += 1
