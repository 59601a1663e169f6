"""What a switch does with the packets of a ring: resolve, admit, fold, emit (stages, message takeover).

*Resolve*: a first packet says which message it is; others are found by their PSN. *Admit*: a message newer
than what holds its place takes that over, one older is stale. *Fold*: the packet goes into its rank's buffer;
the last one makes the sum. *Emit*: at the root of the aggregation, n packets under their own headers; below
it, one to the switch above. A packet whose place is complete already is answered on its own connection alone,
or, below the root, asks upward again.

Packets that leave a switch: the headers they came under, others' translated, or ones made from a message's
first.

*Own*: in one rack a sum leaves under each rank's original headers; payload and ICRC are all that changes
(section 3.2). *Translated*: between switches sums and results travel on virtual connections (section 3.3).
*Regenerated*: a switch above has merged the ranks' packets into one, so the switch of the receiver makes
their headers again from those of the message's first packet, which the sender's switch has sent ahead as a
*notice*: PSNs follow each other, lengths are fixed, and the immediate data of a message is its MsgID.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types

from inanet.kernels.icrc import seal
from inanet.kernels.jit import njit
from inanet.proto.netreduce.ring import Connection, RingAt
from inanet.proto.netreduce.tables import (
    MEMORY,
    NOTICE_OPCODE,
    ROOM,
    TABLE,
    TEMPLATE_BYTES,
    Count,
    Kind,
    Memory,
    Shape,
    State,
    Table,
    add_up,
    claim,
    load,
)
from inanet.wire.batch import I64, U8, Transmission
from inanet.wire.drops import Drop
from inanet.wire.netreduce import HEADER_BYTES, TAG, VERSION, Operation
from inanet.wire.roce import PORT

#: bytes of headers before a packet's payload, or its RETH; with RETH
PLAIN_HEAD, FIRST_HEAD = 40, 56
_FIRST, _MIDDLE, _LAST, _LAST_IMMEDIATE, _ONLY = 0x06, 0x07, 0x08, 0x09, 0x0A
_ACK_REQUEST = 0x80


class Out(NamedTuple):
    """Packets that leave, and how much there is room for."""

    #: uint8: the packets, one behind the other
    arena: U8
    #: int64, per packet: where it begins, its length, and its way: a connection's row, or a negative number for a
    #: virtual connection or a notice (see :mod:`.program`)
    offsets: I64
    lengths: I64
    ways: I64
    #: int64: packets so far, and bytes of the arena used
    used: I64


_u8, _i64 = types.uint8[::1], types.int64[::1]
OUT: Any = types.NamedTuple((_u8, _i64, _i64, _i64, _i64), Out)
#: way to the switch above
UP_WAY = -1
#: way of a notice of the connection in row *r*: ``NOTICE_WAY - r``; of virtual connection *v*: ``-1 - v``
NOTICE_WAY = -(1 << 20)


def new_out(packets: int, packet_bytes: int) -> Out:
    """Room for so many packets."""
    return Out(
        np.zeros(packets * (packet_bytes + ROOM), np.uint8),
        np.zeros(packets, np.int64),
        np.zeros(packets, np.int64),
        np.zeros(packets, np.int64),
        np.zeros(2, np.int64),
    )


@njit("void(uint8[::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def store(arena: U8, at: int, value: int, size: int) -> None:
    """Write a number of ``size`` bytes, big-endian."""
    for j in range(size):
        arena[np.uint64(at + j)] = np.uint8(value >> (8 * (size - 1 - j)) & 0xFF)


@njit("void(uint8[::1], int64, uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False)
def copy(target: U8, at: int, source: U8, begin: int, count: int) -> None:
    """Copy bytes."""
    to, of = target[at : at + count], source[begin : begin + count]
    for j in range(count):
        to[j] = of[j]


@njit(types.void(OUT, types.int64, types.int64), cache=True, nogil=True, _nrt=False)
def leave(out: Out, length: int, way: int) -> None:
    """Seal the packet that has been written at the end of the arena, and take it into account."""
    at = out.used[1]
    # the ICRC protects what the UDP checksum would; that is optional, and no longer right
    out.arena[at + 26], out.arena[at + 27] = 0, 0
    seal(out.arena, at, length)
    row = out.used[0]
    out.offsets[row], out.lengths[row], out.ways[row] = at, length, way
    out.used[0], out.used[1] = row + 1, at + length


@njit("void(uint8[::1], int64, int64, int64)", cache=True, nogil=True, _nrt=False)
def relength(arena: U8, at: int, length: int, identification: int) -> None:
    """Make the IPv4 and UDP headers at ``at`` those of a packet of ``length`` bytes."""
    store(arena, at + 2, length, 2)
    # never 0, which a kernel would fill in
    store(arena, at + 4, identification & 0x7FFF | 0x8000, 2)
    store(arena, at + 10, 0, 2)
    store(arena, at + 24, length - 20, 2)
    total = np.int64(0)
    for j in range(0, 20, 2):
        total += load(arena, at + j, 2)
    total = (total & 0xFFFF) + (total >> 16)
    total = (total & 0xFFFF) + (total >> 16)
    store(arena, at + 10, ~total & 0xFFFF, 2)


@njit(
    types.void(OUT, types.int64, _u8, types.int64, types.int64, types.boolean, _i64, _u8, types.int64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def send_own(
    out: Out,
    way: int,
    source: U8,
    begin: int,
    head: int,
    first: bool,
    shape: I64,
    values: U8,
    values_at: int,
) -> None:
    """A packet under its original headers, ``source[begin:][:head]``, with a sum for a payload."""
    at = out.used[1]
    width = shape[Shape.PACKET] - (HEADER_BYTES if first else 0)
    copy(out.arena, at, source, begin, head)
    if first:
        store(out.arena, at + head - HEADER_BYTES + 16, shape[Shape.RANKS], 2)
    copy(out.arena, at + head, values, values_at, width)
    leave(out, head + width + 4, way)


@njit(types.void(OUT, types.int64, _u8, types.int64), cache=True, nogil=True, _nrt=False)
def send_notice(out: Out, way: int, source: U8, begin: int) -> None:
    """The headers of the first packet at ``source[begin:]``, to the switch of its receiver."""
    at, length = out.used[1], TEMPLATE_BYTES + 4
    copy(out.arena, at, source, begin, TEMPLATE_BYTES)
    out.arena[at + 28] = NOTICE_OPCODE
    relength(out.arena, at, length, load(source, begin + 4, 2))
    leave(out, length, way)


@njit(
    types.void(
        OUT,
        types.int64,
        _u8,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        _i64,
        _u8,
        types.int64,
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def send_translated(
    out: Out,
    way: int,
    headers: U8,
    headers_at: int,
    message: int,
    offset: int,
    operation: int,
    aggregated: int,
    shape: I64,
    values: U8,
    values_at: int,
) -> None:
    """A packet on a virtual connection with these headers (IPv4 to RETH); its PSNs count packets of all messages."""
    at = out.used[1]
    length, first = shape[Shape.LENGTH], offset == 0
    head = FIRST_HEAD + HEADER_BYTES if first else PLAIN_HEAD
    copy(out.arena, at, headers, headers_at, FIRST_HEAD if first else PLAIN_HEAD)
    opcode = _FIRST if first else (_LAST if offset == length - 1 else _MIDDLE)
    out.arena[at + 28] = opcode
    store(out.arena, at + 37, (message * length + offset) & 0xFFFFFF, 3)
    if first:
        store(out.arena, at + FIRST_HEAD, TAG, 4)
        out.arena[at + FIRST_HEAD + 4] = VERSION
        out.arena[at + FIRST_HEAD + 5] = operation
        store(out.arena, at + FIRST_HEAD + 6, shape[Shape.RING], 2)
        store(out.arena, at + FIRST_HEAD + 8, message, 4)
        store(out.arena, at + FIRST_HEAD + 12, length, 2)
        # who contributes; results come from the one switch above
        store(out.arena, at + FIRST_HEAD + 14, shape[Shape.NUMBER] if way == UP_WAY else 0, 2)
        store(out.arena, at + FIRST_HEAD + 16, aggregated, 2)
        store(out.arena, at + FIRST_HEAD + 18, 0, 2)
        store(out.arena, at + FIRST_HEAD + 20, shape[Shape.EPOCH], 4)
    width = shape[Shape.PACKET] - (HEADER_BYTES if first else 0)
    copy(out.arena, at + head, values, values_at, width)
    relength(out.arena, at, head + width + 4, message * length + offset)
    leave(out, head + width + 4, way)


@njit(
    types.void(OUT, types.int64, _u8, types.int64, types.int64, types.int64, _i64, _u8, types.int64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def send_regenerated(
    out: Out,
    way: int,
    template: U8,
    template_at: int,
    message: int,
    offset: int,
    shape: I64,
    values: U8,
    values_at: int,
) -> None:
    """Packet ``offset`` of a message on a rank's own connection, made from the headers of the message's first packet."""
    at = out.used[1]
    first, last = offset == 0, offset == shape[Shape.LENGTH] - 1
    head = TEMPLATE_BYTES if first else PLAIN_HEAD
    copy(out.arena, at, template, template_at, head)
    out.arena[at + 28] = _FIRST if first else (_LAST_IMMEDIATE if last else _MIDDLE)
    psn = load(template, template_at + 37, 3) + offset
    store(out.arena, at + 37, psn & 0xFFFFFF, 3)
    if first:
        store(out.arena, at + FIRST_HEAD + 16, shape[Shape.RANKS], 2)
    if last:
        out.arena[at + 36] |= _ACK_REQUEST
        store(out.arena, at + head, message, 4)
        head += 4
    width = shape[Shape.PACKET] - (HEADER_BYTES if first else 0)
    copy(out.arena, at + head, values, values_at, width)
    relength(out.arena, at, head + width + 4, psn)
    leave(out, head + width + 4, way)


def virtual_headers(plan: RingAt) -> U8:
    """Headers of all virtual connections that packets leave on, each as of a first packet up to its RETH."""
    ways = [plan.above.to if plan.above is not None else Connection(0, 0, 0), *plan.below]
    rows: U8 = np.zeros(len(ways) * FIRST_HEAD, np.uint8)
    for number, way in enumerate(ways):
        at = number * FIRST_HEAD
        rows[at], rows[at + 1] = 0x45, 0x02
        rows[at + 6], rows[at + 8], rows[at + 9] = 0x40, 64, 17
        store(rows, at + 12, way.source, 4)
        store(rows, at + 16, way.destination, 4)
        store(rows, at + 20, 0xC000 | way.queue_pair & 0x3FFF, 2)
        store(rows, at + 22, PORT, 2)
        rows[at + 29] = 0x40
        store(rows, at + 30, 0xFFFF, 2)
        store(rows, at + 33, way.queue_pair, 3)
        store(rows, at + 52, plan.sizes.length * plan.sizes.packet_bytes, 4)
        relength(rows, at, FIRST_HEAD, 1)
    return rows


def transmissions(arena: U8, offsets: I64, lengths: I64, ways: I64) -> Sequence[Transmission]:
    """Packets that leave, those of one way together and in order."""
    if not len(offsets):
        return []
    order = np.argsort(ways, kind="stable")
    offsets, lengths, ways = offsets[order], lengths[order], ways[order]
    cuts = np.flatnonzero((np.diff(ways) != 0) | (np.diff(lengths) != 0)) + 1
    made = []
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(offsets)], strict=True):
        at = int(offsets[first])
        destination = int.from_bytes(arena[at + 16 : at + 20].tobytes(), "big") << 16 | PORT
        made.append(Transmission(destination, arena, offsets[first:last], int(lengths[first])))
    return made


#: opcodes from here on are those of messages of one packet
_OK, _SHORT, _BAD_FRAGMENT = int(Drop.OK), int(Drop.SHORT), int(Drop.BAD_FRAGMENT)
_FOREIGN_JOB, _FOREIGN_HOST, _BAD_TYPE = int(Drop.FOREIGN_JOB), int(Drop.FOREIGN_HOST), int(Drop.BAD_TYPE)
_UNRESOLVED, _STALE, _OTHER_MODE = int(Drop.UNRESOLVED), int(Drop.STALE_MSG), int(Drop.OTHER_MODE)
_TAGGED, _PLAIN = int(State.TAGGED), int(State.PLAIN)
_PARENT = int(Kind.PARENT)
_MOST_OPERATION = int(max(Operation))
#: results of :func:`resolve` that are no places: the packet passes, or is dropped for the reason ``-2 - result``
PASS, REFUSED = -1, -2


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
