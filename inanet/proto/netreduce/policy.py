"""What a switch does with the packets of a ring: resolve, admit, fold, emit (stages, message takeover).

*Resolve*: a first packet says which message it is; others are found by their PSN. *Admit*: a message newer than what holds
its place takes that over, one older is stale. *Fold*: the packet goes into its rank's buffer; the last one makes the sum.
*Emit*: at the root of the aggregation, n packets under their own headers; below it, one to the switch above. A packet whose
place is complete already is answered on its own connection alone, or, below the root, asks upward again.
"""

from typing import Any

import numpy as np
from numba import types

from inanet.kernels.jit import njit
from inanet.proto.netreduce.connections import TABLE, Kind, State, Table, load
from inanet.proto.netreduce.headers import (
    FIRST_HEAD,
    NOTICE_WAY,
    OUT,
    PLAIN_HEAD,
    UP_WAY,
    Out,
    copy,
    send_notice,
    send_own,
    send_regenerated,
    send_translated,
)
from inanet.proto.netreduce.memory import (
    MEMORY,
    ROOM,
    TEMPLATE_BYTES,
    Count,
    Memory,
    Shape,
    add_up,
    claim,
)
from inanet.wire.batch import I64, U8
from inanet.wire.drops import Drop
from inanet.wire.netreduce import HEADER_BYTES, TAG, VERSION, Operation

#: opcodes from here on are those of messages of one packet
_FIRST, _LAST, _LAST_IMMEDIATE, _ONLY = 0x06, 0x08, 0x09, 0x0A
_OK, _SHORT, _BAD_FRAGMENT = int(Drop.OK), int(Drop.SHORT), int(Drop.BAD_FRAGMENT)
_FOREIGN_JOB, _FOREIGN_HOST, _BAD_TYPE = int(Drop.FOREIGN_JOB), int(Drop.FOREIGN_HOST), int(Drop.BAD_TYPE)
_UNRESOLVED, _STALE, _OTHER_MODE = int(Drop.UNRESOLVED), int(Drop.STALE_MSG), int(Drop.OTHER_MODE)
_TAGGED, _PLAIN = int(State.TAGGED), int(State.PLAIN)
_PARENT = int(Kind.PARENT)
_MOST_OPERATION = int(max(Operation))
#: results of :func:`resolve` that are no places: the packet passes, or is dropped for the reason ``-2 - result``
PASS, REFUSED = -1, -2

_u8, _i64 = types.uint8[::1], types.int64[::1]


@njit("int64(uint8)", cache=True, nogil=True, _nrt=False, inline="always")
def packet_head(opcode: int) -> int:
    """Bytes of a packet before its values."""
    if opcode == _FIRST or opcode >= _ONLY:
        return FIRST_HEAD + HEADER_BYTES
    return PLAIN_HEAD + (4 if opcode == _LAST_IMMEDIATE else 0)


@njit(types.int64(TABLE, types.int64, _i64, _u8, types.int64), cache=True, nogil=True, _nrt=False)
def begin(table: Table, row: int, shape: I64, arena: U8, at: int) -> Any:
    """Check the INA header of a message's first packet and note it in the table; the operation, or as :func:`resolve`."""
    ina = at + FIRST_HEAD
    state = table.state[row]
    if load(arena, ina, 4) != TAG or arena[ina + 4] != VERSION:
        if state == _TAGGED:
            return REFUSED - _OTHER_MODE
        table.state[row] = _PLAIN
        return PASS
    if state == _PLAIN:
        return REFUSED - _OTHER_MODE
    if load(arena, ina + 6, 2) != shape[Shape.RING] or load(arena, ina + 20, 4) != shape[Shape.EPOCH]:
        return REFUSED - _FOREIGN_JOB
    if load(arena, ina + 14, 2) != table.rank[row] or load(arena, ina + 16, 2) != table.weight[row]:
        return REFUSED - _FOREIGN_HOST
    operation = np.int64(arena[ina + 5])
    if operation > _MOST_OPERATION:
        return REFUSED - _BAD_TYPE
    if load(arena, ina + 12, 2) != shape[Shape.LENGTH] or arena[at + 28] != _FIRST:
        return REFUSED - _BAD_FRAGMENT
    message, psn = np.uint32(load(arena, ina + 8, 4)), load(arena, at + 37, 3)
    ahead = np.int64(np.int32(message - table.message[row]))
    if state == _TAGGED:
        # not where this message is or was: forged, or left over from another life of the queue pair
        if (table.begin[row] + ahead * shape[Shape.LENGTH] - psn) & 0xFFFFFF:
            return REFUSED - _STALE
        # its sender lacks the sum of a message that it has not begun here, so it cannot be a window beyond that
        if ahead > shape[Shape.WINDOW]:
            return REFUSED - _STALE
    if state != _TAGGED or ahead > 0:
        table.state[row] = _TAGGED
        table.message[row] = message
        table.begin[row] = psn
    return operation


@njit(types.int64(TABLE, types.int64, _i64, _u8, types.int64), cache=True, nogil=True, _nrt=False)
def resolve(table: Table, row: int, shape: I64, arena: U8, at: int) -> Any:
    """Message and place in it of a packet that is not the first: ``message << 24 | offset``; or :data:`PASS`, or less:
    :data:`REFUSED` minus the reason.
    """
    state = table.state[row]
    if state == _PLAIN:
        return PASS
    length = shape[Shape.LENGTH]
    ahead = (load(arena, at + 37, 3) - table.begin[row]) & 0xFFFFFF
    if ahead >= 1 << 23:
        ahead -= 1 << 24
    if state != _TAGGED or ahead >= length or ahead < -shape[Shape.WINDOW] * length:
        return REFUSED - _UNRESOLVED
    back = ahead // length
    offset = ahead - back * length
    opcode = arena[at + 28]
    if offset == 0 or (offset == length - 1) != (_LAST <= opcode <= _LAST_IMMEDIATE):
        return REFUSED - _BAD_FRAGMENT
    message = (np.int64(table.message[row]) + back) & 0xFFFFFFFF
    return message << 24 | offset


@njit(
    types.void(MEMORY, _i64, _u8, _i64, types.int64, types.int64, types.int64, _u8, types.int64, OUT, _i64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def send_down(
    memory: Memory,
    shape: I64,
    virtual: U8,
    ends: I64,
    slot: int,
    message: int,
    offset: int,
    values: U8,
    values_at: int,
    out: Out,
    counts: I64,
) -> None:
    """A result to every switch below, or on every connection that ends at a host here."""
    if shape[Shape.OVER_SWITCHES]:
        for child in range(shape[Shape.CHILDREN]):
            send_translated(
                out,
                UP_WAY - (child + 1),
                virtual,
                (child + 1) * FIRST_HEAD,
                message,
                offset,
                memory.operation[slot],
                shape[Shape.RANKS],
                shape,
                values,
                values_at,
            )
            counts[Count.TRANSLATED] += 1
        return
    for end in range(shape[Shape.ENDS]):
        known = slot * shape[Shape.ENDS] + end
        if memory.known[known]:
            send_regenerated(
                out,
                ends[end],
                memory.templates,
                known * TEMPLATE_BYTES,
                message,
                offset,
                shape,
                values,
                values_at,
            )
            counts[Count.EMITTED] += 1


@njit(
    types.void(MEMORY, _i64, _u8, _i64, types.int64, types.int64, OUT, _i64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def send_sum(
    memory: Memory,
    shape: I64,
    virtual: U8,
    rows: I64,
    slot: int,
    offset: int,
    out: Out,
    counts: I64,
) -> None:
    """What a complete place makes: one packet for the switch above, one for every switch below, or all ranks' own."""
    size, children = shape[Shape.PACKET], shape[Shape.CHILDREN]
    place = slot * shape[Shape.LENGTH] + offset
    message = np.int64(memory.message[slot])
    if shape[Shape.UP]:
        send_translated(
            out,
            UP_WAY,
            virtual,
            0,
            message,
            offset,
            memory.operation[slot],
            shape[Shape.BELOW],
            shape,
            memory.sums,
            place * size,
        )
        counts[Count.TRANSLATED] += 1
        return
    if shape[Shape.OVER_SWITCHES]:
        send_down(memory, shape, virtual, rows, slot, message, offset, memory.sums, place * size, out, counts)
        return
    for child in range(children):
        buffer = place * children + child
        send_own(
            out,
            rows[child],
            memory.packets,
            buffer * (size + ROOM),
            memory.head[buffer],
            offset == 0,
            shape,
            memory.sums,
            place * size,
        )
        counts[Count.EMITTED] += 1


@njit(
    types.int64(TABLE, types.int64, _i64, _u8, types.int64, types.int64), cache=True, nogil=True, _nrt=False
)
def find_place(table: Table, row: int, shape: I64, arena: U8, at: int, length: int) -> Any:
    """Message, operation and place of a packet: ``message << 24 | offset``, with the operation of a first packet from bit 56
    on; or :data:`PASS`; or :data:`REFUSED` minus the reason.
    """
    opcode = arena[at + 28]
    first = opcode == _FIRST or opcode >= _ONLY
    # whole packets, without padding
    right = length == packet_head(opcode) + shape[Shape.PACKET] + 4 - (HEADER_BYTES if first else 0)
    right = right and not arena[at + 29] & 0x30
    if not first:
        found = resolve(table, row, shape, arena, at)
        return found if found < 0 or right else REFUSED - _SHORT
    if right:
        operation = begin(table, row, shape, arena, at)
        if operation < 0:
            return operation
        return operation << 56 | load(arena, at + FIRST_HEAD + 8, 4) << 24
    # a message that is none of NetReduce's
    if table.state[row] == _TAGGED:
        return REFUSED - _SHORT
    table.state[row] = _PLAIN
    return PASS


@njit(
    types.void(MEMORY, TABLE, types.int64, _i64, types.int64, _u8, types.int64, OUT, _i64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def tell(
    memory: Memory, table: Table, row: int, shape: I64, slot: int, arena: U8, at: int, out: Out, counts: I64
) -> None:
    """Let the switch of a first packet's receiver know its headers (section 3.3, table populating): this one, or another."""
    end = table.end[row]
    if end < 0:
        send_notice(out, NOTICE_WAY - row, arena, at)
        counts[Count.NOTICES] += 1
        return
    known = slot * shape[Shape.ENDS] + end
    copy(memory.templates, known * TEMPLATE_BYTES, arena, at, TEMPLATE_BYTES)
    memory.known[known] = 1


@njit(
    types.boolean(MEMORY, TABLE, types.int64, _i64, types.int64, _u8, types.int64, types.int64, _i64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def fold(
    memory: Memory,
    table: Table,
    row: int,
    shape: I64,
    place: int,
    arena: U8,
    at: int,
    length: int,
    counts: I64,
) -> bool:
    """Put a packet into its rank's buffer; whether that made the sum."""
    children = shape[Shape.CHILDREN]
    buffer = place * children + table.child[row]
    copy(memory.packets, buffer * (shape[Shape.PACKET] + ROOM), arena, at, length)
    memory.head[buffer] = packet_head(arena[at + 28])
    bit = np.uint32(1) << np.uint32(table.child[row])
    if memory.bitmap[place] & bit:
        counts[Count.REPEATED] += 1
        return False
    counts[Count.CONTRIBUTIONS] += 1
    if memory.bitmap[place] == 0:
        counts[Count.FIRST] += 1
    memory.bitmap[place] |= bit
    if memory.bitmap[place] != np.uint32((np.int64(1) << children) - 1):
        return False
    add_up(memory, shape, place, np.int64(memory.operation[place // shape[Shape.LENGTH]]))
    memory.done[place] = 1
    counts[Count.COMPLETED] += 1
    return True


@njit(
    types.int64(
        MEMORY, TABLE, _i64, _u8, _i64, _u8, _i64, _i64, _i64, _i64, types.int64, _u8, _u8, OUT, _i64
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def run(
    memory: Memory,
    table: Table,
    shape: I64,
    virtual: U8,
    rows: I64,
    arena: U8,
    offsets: I64,
    lengths: I64,
    chosen: I64,
    connections: I64,
    start: int,
    passed: U8,
    reasons: U8,
    out: Out,
    counts: I64,
) -> int:
    """Take the packets ``chosen[start:]`` of a batch, all of this ring; returns the first that was not looked at because
    ``out`` may be too small for what it could make.

    ``connections`` has a row of the table for every packet of the batch. ``rows`` are the rows of the children or, at a
    switch over hosts and below another, of the connections that end here. ``virtual`` has the headers of virtual
    connections: to the switch above, then to each below. ``passed[i]`` becomes 1 for packets that go on as they came,
    ``reasons[i]`` why one is dropped; all others are absorbed, and what leaves is in ``out``.
    """
    size, root = shape[Shape.PACKET], not shape[Shape.UP] and not shape[Shape.OVER_SWITCHES]
    most = max(shape[Shape.CHILDREN], shape[Shape.ENDS]) + 2
    for index in range(start, len(chosen)):
        if out.used[0] + most > len(out.offsets):
            return index
        i = chosen[index]
        at, row, opcode = offsets[i], connections[i], arena[offsets[i] + 28]
        found = find_place(table, row, shape, arena, at, lengths[i])
        if found < 0:
            if found == PASS:
                passed[i] = 1
                counts[Count.PLAIN] += 1
            else:
                reasons[i] = REFUSED - found
            continue
        message, offset = found >> 24 & 0xFFFFFFFF, found & 0xFFFFFF
        slot = message & (2 * shape[Shape.WINDOW] - 1)
        parent = table.kind[row] == _PARENT
        if (
            offset == 0
            and not parent
            and not claim(memory, shape, slot, np.uint32(message), found >> 56, counts)
        ):
            reasons[i] = _STALE
            continue
        if not memory.held[slot] or memory.message[slot] != np.uint32(message):
            older = memory.held[slot] and np.int32(np.uint32(message) - memory.message[slot]) < 0
            reasons[i] = _STALE if older else _UNRESOLVED
            continue
        if offset == 0 and memory.operation[slot] != found >> 56:
            reasons[i] = _BAD_TYPE
            continue
        head = packet_head(opcode)
        if parent:
            send_down(memory, shape, virtual, rows, slot, message, offset, arena, at + head, out, counts)
            continue
        if offset == 0 and shape[Shape.UP] and not shape[Shape.OVER_SWITCHES]:
            tell(memory, table, row, shape, slot, arena, at, out, counts)
        place = slot * shape[Shape.LENGTH] + offset
        if not memory.done[place]:
            if fold(memory, table, row, shape, place, arena, at, lengths[i], counts):
                send_sum(memory, shape, virtual, rows, slot, offset, out, counts)
            continue
        counts[Count.ANSWERED] += 1
        if root:
            send_own(out, row, arena, at, head, offset == 0, shape, memory.sums, place * size)
            counts[Count.EMITTED] += 1
        else:
            send_sum(memory, shape, virtual, rows, slot, offset, out, counts)
    return len(chosen)
