"""Packets that leave a switch: the headers they came under, others' translated, or ones made from a message's first.

*Own*: in one rack a sum leaves under each rank's original headers; payload and ICRC are all that changes (section 3.2).
*Translated*: between switches sums and results travel on virtual connections (section 3.3). *Regenerated*: a switch above
has merged the ranks' packets into one, so the switch of the receiver makes their headers again from those of the message's
first packet, which the sender's switch has sent ahead as a *notice*: PSNs follow each other, lengths are fixed, and the
immediate data of a message is its MsgID.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types

from inanet.kernels.icrc import seal
from inanet.kernels.jit import njit
from inanet.proto.netreduce.connections import NOTICE_OPCODE, load
from inanet.proto.netreduce.memory import ROOM, TEMPLATE_BYTES, Shape
from inanet.proto.netreduce.plan import Connection, RingAt
from inanet.wire.batch import I64, U8, Transmission
from inanet.wire.netreduce import HEADER_BYTES, TAG, VERSION
from inanet.wire.roce import PORT

#: bytes of headers before a packet's payload, or its RETH; with RETH
PLAIN_HEAD, FIRST_HEAD = 40, 56
_FIRST, _MIDDLE, _LAST, _LAST_IMMEDIATE = 0x06, 0x07, 0x08, 0x09
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
