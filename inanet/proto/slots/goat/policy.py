"""GOAT's policy: a switch takes what its own number is in the tag of, and passes the rest on.

resolve: node, sub-model and fragment; the slot is the base address that the controller has published plus the fragment
(published addresses). Memory is a sub-model's own: nothing collides, and whoever is late finds the slot of its fragment. admit:
the number of the fragment tells a new round, which takes the slot over, from a late packet, whose round is complete: the PS has
its result, so it goes there as a sum of one. fold: add, checksum and all. complete: when the workers are in that the controller
lets send here; the sum goes to the PS, which adds up what nodes and single workers send. A repeated contribution to a complete
slot sends the sum again, with the number of the worker that asks, unless that has just been done. release: by the next round.

A slot is checked when it is complete (linear checksum): values that do not suit the checksum which was added up beside them are
forgotten, and the workers send again.

A packet is forwarded by its tag and by nothing else: a contribution towards its node, a sum to the PS, a result to the
workers behind. It is taken only from the neighbour that such a packet has to come from (bound endpoints).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import add_in, copy_in, copy_out, load16, load32, store32
from inanet.kernels.checksum import slot_checksum
from inanet.kernels.header import newer32, only_bit, tag_at
from inanet.kernels.jit import njit
from inanet.proto.common.program import Action
from inanet.proto.slots.goat.frames import ARENA, INLINE, OPTIONS, examine
from inanet.proto.slots.program import Count
from inanet.proto.slots.registers import FREE, REGISTERS, Register, Registers
from inanet.wire.drops import Drop
from inanet.wire.goat import (
    ASKER_AT,
    BITMAP_AT,
    FRAGMENT_AT,
    MAX_NODES,
    NODE_AT,
    NUMBER_AT,
    PS_NODE,
    SUBMODEL_AT,
    TAG_AT,
    VALUES,
    VALUES_AT,
    Kind,
)


class Routes(NamedTuple):
    """The jobs as kernels see them, one entry per job number; sub-models of all jobs lie one after the other."""

    known: NDArray[np.uint8]
    key: NDArray[np.uint64]
    #: number of this switch among the job's nodes
    own: NDArray[np.int64]
    #: next hop to the PS
    to_ps: NDArray[np.int64]
    #: int64[256, 64]: next hop to each other node, 0 where there is none
    to_node: NDArray[np.int64]
    #: int64[256, 32]: next hop to each worker, -1 where there is none
    way: NDArray[np.int64]
    #: group of the next hops to all workers
    group: NDArray[np.int64]
    #: first of the job's sub-models in the three arrays below, and how many it has
    at: NDArray[np.int64]
    many: NDArray[np.int64]
    #: first slot, -1 for a sub-model that is not held here
    base: NDArray[np.int64]
    size: NDArray[np.int64]
    #: workers that send it here
    full: NDArray[np.uint32]


_i64 = types.int64[::1]
ROUTES: Any = types.NamedTuple(
    (
        types.uint8[::1],
        types.uint64[::1],
        _i64,
        _i64,
        types.int64[:, ::1],
        types.int64[:, ::1],
        _i64,
        _i64,
        _i64,
        _i64,
        _i64,
        types.uint32[::1],
    ),
    Routes,
)

BAD_TYPE, FOREIGN_HOST, NO_ROUTE = int(Drop.BAD_TYPE), int(Drop.FOREIGN_HOST), int(Drop.NO_ROUTE)
BAD_SLOT, DUPLICATE, BAD_CHECKSUM = int(Drop.BAD_SLOT), int(Drop.DUPLICATE), int(Drop.BAD_CHECKSUM)
DROP, UNICAST, GROUP = int(Action.DROP), int(Action.UNICAST), int(Action.GROUP)
FOLDED, COMPLETED, ANSWERED = int(Count.FOLDED), int(Count.COMPLETED), int(Count.ANSWERED)
BYPASSED, ALONE = int(Count.BYPASSED), int(Count.FIRST)
KEY, BITMAP, REGISTER_VALUES = int(Register.KEY), int(Register.BITMAP), int(Register.VALUES)
#: seconds in which a sum is not sent again: workers who wait for another node's sum repeat themselves together
HOLD = 0.005
_SUM, _RESULT = int(Kind.SUM), int(Kind.RESULT)
_NODE, _SUBMODEL, _FRAGMENT = NODE_AT, SUBMODEL_AT, FRAGMENT_AT
_NUMBER, _BITMAP, _TAG, _ASKER = NUMBER_AT, BITMAP_AT, TAG_AT, ASKER_AT
_AT, _VALUES, _PS, _NODES = VALUES_AT, VALUES, PS_NODE, MAX_NODES
_INT = types.int64


@njit(types.boolean(REGISTERS, _INT), **INLINE)
def sound(r: Registers, slot: int) -> Any:
    """Whether the values of a slot suit the checksum that was added up beside them."""
    return slot_checksum(r.values, slot, 0, _VALUES) == np.uint32(r.values[slot, _VALUES])


@njit(types.void(REGISTERS, ROUTES, ARENA, _INT, _INT, _INT, _INT), **INLINE)
def load_sum(r: Registers, t: Routes, arena: Any, at: int, job: int, slot: int, asker: int) -> None:
    """Emit: the sum of a slot into a packet of its fragment."""
    arena[at + 1] = np.uint8(_SUM)
    arena[at + _ASKER] = np.uint8(asker)
    store32(arena, at + _BITMAP, r.bitmap[slot])
    copy_out(r.values, slot, arena, at + _AT)
    store32(arena, at + _TAG, tag_at(arena, at, t.key[job]))


@njit(_INT(ROUTES, ARENA, _INT, _INT, types.uint32), **INLINE)
def resolve(t: Routes, arena: Any, at: int, job: int, bit: int) -> Any:
    """The slot of a contribution to this switch; or minus the reason why it has none."""
    submodel = np.int64(load16(arena, at + _SUBMODEL))
    if submodel >= t.many[job]:
        return -BAD_SLOT
    place = t.at[job] + submodel
    fragment = np.int64(load32(arena, at + _FRAGMENT))
    if t.base[place] < 0 or fragment >= t.size[place]:
        return -BAD_SLOT
    if not bit & t.full[place]:
        return -FOREIGN_HOST
    return t.base[place] + fragment


@njit(
    _INT(REGISTERS, ROUTES, ARENA, _INT, _INT, _INT, types.uint32, types.int64[::1], types.float64), **OPTIONS
)
def contribute(
    r: Registers, t: Routes, arena: Any, at: int, job: int, worker: int, bit: int, counts: Any, now: float
) -> Any:
    """Take a contribution to this switch: UNICAST if the packet leaves (to the PS), 0 if it is absorbed, or minus the
    reason why it is dropped.
    """
    slot = resolve(t, arena, at, job, bit)
    if slot < 0:
        return slot
    number = load32(arena, at + _NUMBER)
    r.accesses[KEY] += 1
    r.accesses[BITMAP] += 1
    if r.owner[slot] != job or newer32(number, r.key[slot]):
        if r.owner[slot] != job or r.complete[slot]:
            r.occupied[job] += 1
        r.owner[slot] = job
        r.key[slot] = number
        r.bitmap[slot] = 0
        r.complete[slot] = 0
    elif number != r.key[slot]:
        # its round is complete, or the next one could not have begun: the PS has the result, and is asked for it
        counts[BYPASSED] += 1
        arena[at + 1] = np.uint8(_SUM)
        arena[at + _ASKER] = np.uint8(worker + 1)
        store32(arena, at + _TAG, tag_at(arena, at, t.key[job]))
        return UNICAST
    if r.complete[slot]:
        if now - r.touched[slot] < HOLD:
            return -DUPLICATE
        r.touched[slot] = now
        counts[ANSWERED] += 1
        r.accesses[REGISTER_VALUES] += 1
        load_sum(r, t, arena, at, job, slot, worker + 1)
        return UNICAST
    r.touched[slot] = now
    if bit & r.bitmap[slot]:
        return -DUPLICATE
    r.accesses[REGISTER_VALUES] += 1
    counts[FOLDED] += 1
    if r.bitmap[slot] == 0:
        counts[ALONE] += 1
        copy_in(r.values, slot, arena, at + _AT)
    else:
        add_in(r.values, slot, arena, at + _AT)
    r.bitmap[slot] |= bit
    if r.bitmap[slot] != t.full[t.at[job] + np.int64(load16(arena, at + _SUBMODEL))]:
        return 0
    r.occupied[job] -= 1
    if not sound(r, slot):
        r.owner[slot] = FREE
        return -BAD_CHECKSUM
    r.complete[slot] = 1
    counts[COMPLETED] += 1
    load_sum(r, t, arena, at, job, slot, 0)
    return UNICAST


@njit(
    types.void(
        REGISTERS,
        ROUTES,
        ARENA,
        _i64,
        _i64,
        types.uint64[::1],
        types.uint8[::1],
        _i64,
        types.uint8[::1],
        _i64,
        types.float64,
    ),
    **OPTIONS,
)
def run(
    r: Registers,
    t: Routes,
    arena: Any,
    offsets: Any,
    lengths: Any,
    sources: Any,
    action: Any,
    target: Any,
    reason: Any,
    counts: Any,
    now: float,
) -> None:
    """The four stages over a batch, and the forwarding of what is for others."""
    for i in range(offsets.size):
        at = offsets[i]
        action[i] = DROP
        wrong = examine(arena, at, lengths[i], t.known, t.key)
        if wrong:
            reason[i] = np.uint8(wrong)
            continue
        job = np.int64(arena[at + 2])
        kind = arena[at + 1]
        source = np.int64(sources[i])
        node = np.int64(load16(arena, at + _NODE))
        bitmap = load32(arena, at + _BITMAP)
        worker = only_bit(bitmap)
        if kind == _RESULT:
            if source != t.to_ps[job]:
                reason[i] = FOREIGN_HOST
            elif worker >= 0:
                action[i] = UNICAST
                target[i] = t.way[job, worker]
            else:
                action[i] = GROUP
                target[i] = t.group[job]
            continue
        target[i] = t.to_ps[job]
        if kind == _SUM:
            if node >= _NODES or node == _PS or t.to_node[job, node] != source:
                reason[i] = FOREIGN_HOST
            else:
                action[i] = UNICAST
            continue
        if worker < 0 or t.way[job, worker] != source:
            reason[i] = FOREIGN_HOST
        elif node == _PS:
            action[i] = UNICAST
        elif node != t.own[job]:
            if node >= _NODES or t.to_node[job, node] <= 0:
                reason[i] = NO_ROUTE
            else:
                action[i] = UNICAST
                target[i] = t.to_node[job, node]
        else:
            verdict = contribute(r, t, arena, at, job, worker, bitmap, counts, now)
            if verdict > 0:
                action[i] = UNICAST
            else:
                reason[i] = np.uint8(-verdict)
