"""GOAT's program for asynchronous training: slots that leave with K_t^s contributions, not with those of all.

resolve: as in synchronous training (:mod:`inanet.proto.slots.goat.policy`). admit: a gradient's number tells a new one from a
late copy. Each worker has at most one gradient under way, and begins the next one only when all of this one is at the PS; so
for a slot gradients alternate, and the parity of the last one seen of every worker (one register of 32 bits), with the
number of the newest one for the sub-model, tells them apart however late a copy is. fold: add, and send the packet back as
the worker's acknowledgement. complete: when as many are in as published for the epoch, once an epoch, or when somebody is
in whose gradient the PS waits for no longer. The packet leaves as the sum, and the slot keeps it until the PS has it; what
else comes for the slot meanwhile is passed on to the PS, unsummed. release: by the PS's word that it has the sum, or, if that
is lost, by the next gradient of a worker that is in it.

What is published may complete sums without a packet of theirs coming in: a switch's control plane sends these, here they
are *drawn* and leave beside the batch.

A slot is checked when it is complete (linear checksum), and when its sum is sent again. If its values do not suit their
checksum, it is forgotten with all that are in it; their workers send again when the PS misses them.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import add_in, copy_in, load16, load32, store32
from inanet.kernels.header import count_bits, newer32, only_bit, tag_at
from inanet.kernels.jit import njit
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.slots.goat.frames import ARENA, LAST_OF_EPOCHS, OPTIONS, examine_up_to
from inanet.proto.slots.goat.policy import HOLD, ROUTES, Routes, load_sum, resolve, sound
from inanet.proto.slots.goat.program import GoatProgram
from inanet.proto.slots.program import Count
from inanet.proto.slots.registers import DEFAULT_BUDGET, REGISTERS, Register, Registers
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.goat import (
    ASKER_AT,
    BITMAP_AT,
    FRAGMENT_AT,
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    MAX_NODES,
    NODE_AT,
    NUMBER_AT,
    PS_NODE,
    SUBMODEL_AT,
    TAG_AT,
    VALUES,
    VALUES_AT,
    EpochKind,
    Kind,
)


class Calls(NamedTuple):
    """What is published, and what tells gradients apart; one entry per sub-model as in :class:`Routes`, or per slot."""

    #: K_t^s, the workers who are waited for no longer, the epoch and its revision
    need: NDArray[np.int64]
    mask: NDArray[np.uint32]
    epoch: NDArray[np.uint32]
    revision: NDArray[np.uint32]
    #: uint32[n, 32]: each worker's newest gradient
    newest: NDArray[np.uint32]
    #: per slot: parity of every worker's last gradient, and the epoch in which the slot's last sum left
    parity: NDArray[np.uint32]
    sent: NDArray[np.uint32]


_i64, _u32 = types.int64[::1], types.uint32[::1]
CALLS: Any = types.NamedTuple((_i64, _u32, _u32, _u32, types.uint32[:, ::1], _u32, _u32), Calls)

DROP, UNICAST = int(Action.DROP), int(Action.UNICAST)
BAD_TYPE, FOREIGN_HOST, NO_ROUTE = int(Drop.BAD_TYPE), int(Drop.FOREIGN_HOST), int(Drop.NO_ROUTE)
BAD_SLOT, DUPLICATE, BAD_CHECKSUM = int(Drop.BAD_SLOT), int(Drop.DUPLICATE), int(Drop.BAD_CHECKSUM)
STALE, UNMATCHED = int(Drop.STALE_SEQUENCE), int(Drop.UNMATCHED)
FOLDED, COMPLETED, ANSWERED = int(Count.FOLDED), int(Count.COMPLETED), int(Count.ANSWERED)
BYPASSED, ALONE = int(Count.BYPASSED), int(Count.FIRST)
KEY, BITMAP, REGISTER_VALUES = int(Register.KEY), int(Register.BITMAP), int(Register.VALUES)
_DATA, _SUM, _RESULT = int(Kind.DATA), int(Kind.SUM), int(Kind.RESULT)
_ACK, _TAKEN, _PUBLISH = int(EpochKind.ACK), int(EpochKind.TAKEN), int(EpochKind.PUBLISH)
_READY, _REPEAT, _PASSED = int(EpochKind.READY), int(EpochKind.REPEAT), int(EpochKind.PASSED)
_NODE, _SUBMODEL, _FRAGMENT = NODE_AT, SUBMODEL_AT, FRAGMENT_AT
_NUMBER, _BITMAP, _TAG, _ASKER = NUMBER_AT, BITMAP_AT, TAG_AT, ASKER_AT
_AT, _VALUES, _PS, _NODES, _LAST = VALUES_AT, VALUES, PS_NODE, MAX_NODES, LAST_OF_EPOCHS
#: what :func:`contribute` says of a packet that leaves
TO_PS, TO_WORKER, TO_NODE = 1, 2, 3
_INT = types.int64


@njit(types.boolean(REGISTERS, CALLS, _INT, _INT), **OPTIONS)
def due(r: Registers, c: Calls, row: int, slot: int) -> Any:
    """Whether the sum of a slot has to leave now."""
    bitmap = r.bitmap[slot]
    if bitmap == 0 or r.complete[slot]:
        return False
    if bitmap & c.mask[row]:
        return True
    if c.need[row] == 0 or c.sent[slot] == c.epoch[row]:
        return False
    return count_bits(bitmap) >= c.need[row]


@njit(types.boolean(REGISTERS, CALLS, _i64, _INT, _INT, _INT, types.float64), **OPTIONS)
def close(r: Registers, c: Calls, counts: Any, job: int, row: int, slot: int, now: float) -> Any:
    """Have the sum of a slot leave; False if it is damaged, and forgotten."""
    if not sound(r, slot):
        c.parity[slot] ^= r.bitmap[slot]
        r.bitmap[slot] = 0
        r.occupied[job] -= 1
        return False
    r.complete[slot] = 1
    r.key[slot] = np.uint32(r.key[slot] + np.uint32(1))
    r.touched[slot] = now
    c.sent[slot] = c.epoch[row]
    counts[COMPLETED] += 1
    return True


@njit(types.void(REGISTERS, ROUTES, ARENA, _INT, _INT, _INT, _INT), **OPTIONS)
def leave(r: Registers, t: Routes, arena: Any, at: int, job: int, slot: int, asker: int) -> None:
    """Emit: the sum under way of a slot into a packet of its fragment."""
    r.accesses[REGISTER_VALUES] += 1
    store32(arena, at + _NUMBER, r.key[slot])
    load_sum(r, t, arena, at, job, slot, asker)


@njit(types.void(ROUTES, ARENA, _INT, _INT, _INT), **OPTIONS)
def turn(t: Routes, arena: Any, at: int, job: int, kind: int) -> None:
    """Make a packet one of another kind."""
    arena[at + 1] = np.uint8(kind)
    arena[at + _ASKER] = np.uint8(0)
    store32(arena, at + _TAG, tag_at(arena, at, t.key[job]))


@njit(_INT(REGISTERS, ROUTES, CALLS, ARENA, _INT, _INT, _INT, types.uint32, _i64, types.float64), **OPTIONS)
def contribute(
    r: Registers,
    t: Routes,
    c: Calls,
    arena: Any,
    at: int,
    job: int,
    worker: int,
    bit: int,
    counts: Any,
    now: float,
) -> Any:
    """Take a contribution to this switch: where the packet goes, or minus the reason why it is dropped."""
    slot = resolve(t, arena, at, job, bit)
    if slot < 0:
        return slot
    row = t.at[job] + np.int64(load16(arena, at + _SUBMODEL))
    serial = load32(arena, at + _NUMBER)
    r.accesses[KEY] += 1
    r.accesses[BITMAP] += 1
    ahead = np.uint32(serial - c.newest[row, worker])
    if ahead > 1:
        # an old copy; the next gradient begins when all of this one is at the PS
        return -STALE
    if r.owner[slot] != job:
        r.owner[slot] = job
        r.bitmap[slot] = 0
        r.complete[slot] = 0
        r.key[slot] = 0
        c.parity[slot] = 0
        c.sent[slot] = 0
    seen = (c.parity[slot] & bit != 0) == (serial & np.uint32(1) != 0)
    if r.complete[slot] and bit & r.bitmap[slot]:
        again = seen and now - r.touched[slot] >= HOLD
        if not seen or (again and not sound(r, slot)):
            # a new gradient: the one before has counted, and only the PS's word of it is lost; a damaged sum: what the PS has not
            # got of it goes there one by one, for it may have it
            r.complete[slot] = 0
            r.bitmap[slot] = 0
            r.occupied[job] -= 1
    if seen and bit & r.bitmap[slot]:
        if r.complete[slot]:
            if now - r.touched[slot] < HOLD:
                return -DUPLICATE
            r.touched[slot] = now
            counts[ANSWERED] += 1
            leave(r, t, arena, at, job, slot, worker + 1)
            return TO_PS
        turn(t, arena, at, job, _ACK)
        return TO_WORKER
    if seen or r.complete[slot]:
        # its sum has left, or is about to: the PS knows
        c.newest[row, worker] = serial
        c.parity[slot] = c.parity[slot] & ~bit | (bit if serial & np.uint32(1) else np.uint32(0))
        counts[BYPASSED] += 1
        turn(t, arena, at, job, _PASSED)
        return TO_PS
    c.newest[row, worker] = serial
    c.parity[slot] ^= bit
    r.accesses[REGISTER_VALUES] += 1
    counts[FOLDED] += 1
    if r.bitmap[slot] == 0:
        counts[ALONE] += 1
        r.occupied[job] += 1
        copy_in(r.values, slot, arena, at + _AT)
    else:
        add_in(r.values, slot, arena, at + _AT)
    r.bitmap[slot] |= bit
    if not due(r, c, row, slot):
        turn(t, arena, at, job, _ACK)
        return TO_WORKER
    if not close(r, c, counts, job, row, slot, now):
        return -BAD_CHECKSUM
    leave(r, t, arena, at, job, slot, worker + 1)
    return TO_PS


@njit(_INT(REGISTERS, ROUTES, CALLS, ARENA, _INT, _INT), **OPTIONS)
def free(r: Registers, t: Routes, c: Calls, arena: Any, at: int, job: int) -> Any:
    """The PS has a sum: the worker whose packet it left with is told, if there is one; its index + 1, 0 for none, or minus the
    reason why the packet is dropped.
    """
    submodel = np.int64(load16(arena, at + _SUBMODEL))
    if submodel >= t.many[job]:
        return -BAD_SLOT
    row = t.at[job] + submodel
    fragment = np.int64(load32(arena, at + _FRAGMENT))
    if t.base[row] < 0 or fragment >= t.size[row]:
        return -BAD_SLOT
    slot = t.base[row] + fragment
    r.accesses[KEY] += 1
    r.accesses[BITMAP] += 1
    if r.owner[slot] != job or not r.complete[slot] or r.key[slot] != load32(arena, at + _NUMBER):
        return -UNMATCHED
    r.complete[slot] = 0
    r.bitmap[slot] = 0
    r.occupied[job] -= 1
    asker = np.int64(arena[at + _ASKER])
    if asker == 0 or asker > 32:
        return 0
    bit = np.uint32(1) << np.uint32(asker - 1)
    serial = c.newest[row, asker - 1]
    if (c.parity[slot] & bit != 0) != (serial & np.uint32(1) != 0):
        # its next gradient has begun to come here, with other fragments
        serial = np.uint32(serial - np.uint32(1))
    store32(arena, at + _NUMBER, serial)
    store32(arena, at + _BITMAP, bit)
    turn(t, arena, at, job, _ACK)
    return asker


@njit(
    _INT(REGISTERS, ROUTES, CALLS, ARENA, _INT, _INT, _i64, types.int64[:, ::1], _INT, types.float64),
    **OPTIONS,
)
def publish(
    r: Registers,
    t: Routes,
    c: Calls,
    arena: Any,
    at: int,
    job: int,
    counts: Any,
    drawn: Any,
    many: int,
    now: float,
) -> Any:
    """Take numbers that are newer than what is known, and draw the sums that they complete: rows of job, sub-model, fragment,
    slot behind the first ``many``. Returns how many there are then.
    """
    epoch, revision = load32(arena, at + _NUMBER), load32(arena, at + _FRAGMENT)
    first = np.int64(load16(arena, at + _SUBMODEL))
    for k in range(min(_VALUES, t.many[job] - first)):
        row = t.at[job] + first + k
        if newer32(c.epoch[row], epoch) or (epoch == c.epoch[row] and revision <= c.revision[row]):
            continue
        c.epoch[row] = epoch
        c.revision[row] = revision
        c.need[row] = np.int64(load32(arena, at + _AT + 4 * k))
        c.mask[row] = load32(arena, at + _BITMAP)
        if t.base[row] < 0:
            continue
        for fragment in range(t.size[row]):
            slot = t.base[row] + fragment
            if r.owner[slot] != job or many == drawn.shape[0] or not due(r, c, row, slot):
                continue
            if close(r, c, counts, job, row, slot, now):
                drawn[many, 0], drawn[many, 1], drawn[many, 2], drawn[many, 3] = (
                    job,
                    first + k,
                    fragment,
                    slot,
                )
                many += 1
    return many


@njit(types.void(REGISTERS, ROUTES, ARENA, types.int64[:, ::1], _INT), **OPTIONS)
def draw(r: Registers, t: Routes, arena: Any, drawn: Any, stride: int) -> None:
    """The drawn sums as packets, side by side in an arena that has magic, kind, job, node, sub-model and fragment."""
    for k in range(drawn.shape[0]):
        leave(r, t, arena, k * stride, drawn[k, 0], drawn[k, 3], 0)


@njit(
    types.UniTuple(_INT, 2)(
        REGISTERS, ROUTES, CALLS, ARENA, _INT, _INT, _INT, _i64, types.int64[:, ::1], _i64, types.float64
    ),
    **OPTIONS,
)
def decide(
    r: Registers,
    t: Routes,
    c: Calls,
    arena: Any,
    at: int,
    job: int,
    source: int,
    counts: Any,
    drawn: Any,
    many: Any,
    now: float,
) -> Any:
    """What becomes of a sound packet: a direction, 0 for nothing or minus the reason why it is dropped; and the worker, by
    index, that it is of or for.
    """
    kind = np.int64(arena[at + 1])
    node = np.int64(load16(arena, at + _NODE))
    bitmap = load32(arena, at + _BITMAP)
    worker = np.int64(only_bit(bitmap))
    refused = np.int64(-FOREIGN_HOST)
    if node >= _NODES:
        return np.int64(-NO_ROUTE), worker
    # whoever speaks as a node, or for all that it has summed, is where the way to this node leads (bound endpoints)
    behind = t.to_ps[job] if node == _PS else t.to_node[job, node]
    if kind in (_SUM, _PASSED):
        return (refused if node == _PS or behind != source else np.int64(TO_PS)), worker
    if kind == _ACK:
        wrong = node == t.own[job] or behind != source or worker < 0
        return (refused if wrong else np.int64(TO_WORKER)), worker
    if kind in (_DATA, _READY):
        if worker < 0 or t.way[job, worker] != source:
            return refused, worker
        if kind == _READY or node == _PS:
            return np.int64(TO_PS), worker
        if node == t.own[job]:
            return np.int64(contribute(r, t, c, arena, at, job, worker, bitmap, counts, now)), worker
        return np.int64(TO_NODE), worker
    if source != t.to_ps[job]:
        return refused, worker
    if kind in (_RESULT, _REPEAT):
        return np.int64(TO_WORKER), worker
    if node != t.own[job]:
        return np.int64(TO_NODE), worker
    if kind == _PUBLISH:
        many[0] = publish(r, t, c, arena, at, job, counts, drawn, many[0], now)
        return np.int64(0), worker
    asker = np.int64(free(r, t, c, arena, at, job))
    return (np.int64(TO_WORKER) if asker > 0 else asker), asker - 1


@njit(
    types.void(
        REGISTERS,
        ROUTES,
        CALLS,
        ARENA,
        _i64,
        _i64,
        types.uint64[::1],
        types.uint8[::1],
        _i64,
        types.uint8[::1],
        _i64,
        types.int64[:, ::1],
        _i64,
        types.float64,
    ),
    **OPTIONS,
)
def run(
    r: Registers,
    t: Routes,
    c: Calls,
    arena: Any,
    offsets: Any,
    lengths: Any,
    sources: Any,
    action: Any,
    target: Any,
    reason: Any,
    counts: Any,
    drawn: Any,
    many: Any,
    now: float,
) -> None:
    """A batch. ``many[0]`` is how many rows of ``drawn`` are taken."""
    for i in range(offsets.size):
        at = offsets[i]
        action[i] = DROP
        wrong = examine_up_to(arena, at, lengths[i], t.known, t.key, _LAST)
        if wrong:
            reason[i] = np.uint8(wrong)
            continue
        job = np.int64(arena[at + 2])
        verdict, worker = decide(r, t, c, arena, at, job, np.int64(sources[i]), counts, drawn, many, now)
        hop = np.int64(-1)
        if verdict == TO_PS:
            hop = t.to_ps[job]
        elif verdict == TO_WORKER and worker >= 0:
            hop = t.way[job, worker]
        elif verdict == TO_NODE:
            node = np.int64(load16(arena, at + _NODE))
            hop = t.to_ps[job] if node == _PS else t.to_node[job, node]
            # 0 is where there is none
            hop = hop if hop > 0 else np.int64(-1)
        if verdict < 0:
            reason[i] = np.uint8(-verdict)
        elif verdict and hop < 0:
            reason[i] = NO_ROUTE
        elif verdict:
            action[i] = UNICAST
            target[i] = hop


#: register bytes of a slot beside those of synchronous training: parities, and the epoch of the last sum
PARITY_BYTES = 8
_WORKERS = 32


class EpochProgram(GoatProgram):
    """See :class:`~inanet.proto.slots.goat.program.GoatProgram`, and :mod:`inanet.proto.slots.goat_async.program`.

    Counters as there: ``bypassed`` are contributions that were passed on to the PS because their slot's sum was on its way,
    ``first`` those that opened a slot, ``answered`` sums that were sent again.
    """

    name = "goat-async"
    extra = PARITY_BYTES

    def __init__(self, *, budget: int = DEFAULT_BUDGET, age: float = 1.0) -> None:
        super().__init__(budget=budget, age=age)
        self.calls = _silence(0, np.zeros(self.file.slots, np.uint32), np.zeros(self.file.slots, np.uint32))
        #: jobs and their sub-models, as the rows of :attr:`calls` have them
        self._rows: list[tuple[int, int]] = []
        self._drawn: NDArray[np.int64] = np.zeros((self.file.slots, 4), np.int64)
        self._many: NDArray[np.int64] = np.zeros(1, np.int64)

    def register_bytes(self) -> int:
        return super().register_bytes() + PARITY_BYTES * self.file.slots

    def _lay_out(self) -> None:
        super()._lay_out()
        before, rows = (
            self.calls,
            [(job, k) for job in sorted(self._held) for k in range(len(self._held[job]))],
        )
        after = _silence(len(rows), before.parity, before.sent)
        was = {key: row for row, key in enumerate(self._rows)}
        for row, key in enumerate(rows):
            old = was.get(key)
            if old is not None:
                for name in ("need", "mask", "epoch", "revision", "newest"):
                    getattr(after, name)[row] = getattr(before, name)[old]
        self.calls, self._rows = after, rows

    # ---------------------------------------------------------------- packets

    def _run(self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float) -> None:
        run(
            self.file.registers,
            self.routes,
            self.calls,
            batch.arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            verdicts.action,
            verdicts.target,
            verdicts.reason,
            self.counts,
            self._drawn,
            self._many,
            now,
        )

    def spilled(self) -> list[Transmission]:
        many = int(self._many[0])
        if not many:
            return []
        self._many[0] = 0
        drawn = self._drawn[:many]
        frames = np.zeros(many, FRAME)
        jobs = drawn[:, 0]
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.SUM, jobs
        frames["node"], frames["submodel"] = self.routes.own[jobs], drawn[:, 1]
        frames["fragment"] = drawn[:, 2]
        arena = frames.view(np.uint8).reshape(-1)
        draw(self.file.registers, self.routes, arena, drawn, FRAME_BYTES)
        out = []
        for job in np.unique(jobs).tolist():
            offsets = np.flatnonzero(jobs == job) * FRAME_BYTES
            out.append(Transmission(int(self.routes.to_ps[job]), arena, offsets, FRAME_BYTES))
        return out

    def published(self, job: int) -> dict[int, tuple[int, int, int]]:
        """What is known of a job's sub-models: (epoch, revision, K_t^s) by number."""
        first = self.routes.at[job]
        calls = self.calls
        return {
            k: (int(calls.epoch[first + k]), int(calls.revision[first + k]), int(calls.need[first + k]))
            for k in range(len(self._held[job]))
        }


def _silence(rows: int, parity: NDArray[np.uint32], sent: NDArray[np.uint32]) -> Calls:
    """Nothing is published yet."""
    return Calls(
        need=np.zeros(rows, np.int64),
        mask=np.zeros(rows, np.uint32),
        epoch=np.zeros(rows, np.uint32),
        revision=np.zeros(rows, np.uint32),
        newest=np.zeros((rows, _WORKERS), np.uint32),
        parity=parity,
        sent=sent,
    )
