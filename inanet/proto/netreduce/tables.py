"""What a switch has of a ring as tables: the lookup table of connections, and the aggregator array.

The connection lookup table (section 3.2): from <source, destination, destination's queue pair> to a place in
a message.

Only the first packet of a message has an INA header, so a row remembers the message that was last begun on
its connection and the sequence number (PSN) it began at. All messages of a ring have the same number of
packets, so a packet's PSN says which message it belongs to, as far as a window back (PSN window): go-back-N may start
in the middle of a message after the next one has begun.

The aggregator array of a ring (section 3.1): 2N messages, with a buffer for each rank's packet.

Sums are idempotent because packets are kept and not accumulated: one that comes twice overwrites itself. A
message's place is its MsgID modulo 2N; it is taken over by a newer message and freed by nothing else (message takeover).
Packets of one place are summed in the order of ranks when all are there, so floats, too, come out the same
whatever arrives first.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.icrc import is_sound
from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8
from inanet.wire.drops import Drop
from inanet.wire.netreduce import HEADER_BYTES, Operation

#: connections at one switch; a power of two, and places of the hash table over them
CONNECTIONS = 2048
PLACES = 4 * CONNECTIONS
#: what :func:`classify` says of packets that belong to no connection, or tell of one (see :mod:`.headers`)
FOREIGN, NOTICE = -1, -2
#: transport opcode, of those left to manufacturers, of a first packet's headers on their way to the switch of its receiver
NOTICE_OPCODE = 0xC0

_UDP, _PORT = 17, 4791
_SHORT, _BAD_TYPE, _BAD_ICRC = int(Drop.SHORT), int(Drop.BAD_TYPE), int(Drop.BAD_ICRC)


class Kind(IntEnum):
    """What a connection means to this switch."""

    #: brings contributions: of a rank, or of the ranks below another switch
    CHILD = 0
    #: brings results from the switch above
    PARENT = 1


class State(IntEnum):
    """What a connection carries, as far as it is known."""

    UNKNOWN = 0
    #: messages with INA headers
    TAGGED = 1
    #: messages without: they pass as they come (ring mode)
    PLAIN = 2


class Table(NamedTuple):
    """The rows, one entry per connection."""

    #: uint64: source and destination, IPv4, in one
    addresses: NDArray[np.uint64]
    #: int64
    queue_pairs: I64
    #: int64, :class:`Kind`
    kind: I64
    #: int64: position among the children
    child: I64
    #: int64: ranks that a contribution holds, if it comes from another switch; else 0
    weight: I64
    #: int64: position among the connections that end here (see :class:`~.memory.Memory`), or -1
    end: I64
    #: int64: the rank, or the switch's number, that stands in its INA headers
    rank: I64
    #: int64, :class:`State`
    state: I64
    #: uint32: the newest message begun
    message: NDArray[np.uint32]
    #: int64: PSN of its first packet
    begin: I64


_i64 = types.int64[::1]
TABLE: Any = types.NamedTuple(
    (types.uint64[::1], _i64, _i64, _i64, _i64, _i64, _i64, _i64, types.uint32[::1], _i64), Table
)


def new_table() -> Table:
    """An empty table for :data:`CONNECTIONS` connections."""
    return Table(
        addresses=np.zeros(CONNECTIONS, np.uint64),
        queue_pairs=np.zeros(CONNECTIONS, np.int64),
        kind=np.zeros(CONNECTIONS, np.int64),
        child=np.zeros(CONNECTIONS, np.int64),
        weight=np.zeros(CONNECTIONS, np.int64),
        end=np.zeros(CONNECTIONS, np.int64),
        rank=np.zeros(CONNECTIONS, np.int64),
        state=np.zeros(CONNECTIONS, np.int64),
        message=np.zeros(CONNECTIONS, np.uint32),
        begin=np.zeros(CONNECTIONS, np.int64),
    )


@njit("int64(uint8[::1], int64, int64)", cache=True, nogil=True, _nrt=False, inline="always")
def load(arena: U8, at: int, size: int) -> Any:
    """The big-endian number of ``size`` bytes at ``at``."""
    value = np.int64(0)
    for j in range(size):
        value = value << 8 | np.int64(arena[np.uint64(at + j)])
    return value


@njit("int64(uint64, int64)", cache=True, nogil=True, _nrt=False)
def place_of(addresses: int, queue_pair: int) -> Any:
    """Where a search for a connection begins."""
    mix = (addresses ^ (np.uint64(queue_pair) * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    return np.int64(mix >> np.uint64(40)) & (PLACES - 1)


@njit("int64(int64[::1], uint64[::1], int64[::1], uint64, int64)", cache=True, nogil=True, _nrt=False)
def find(places: I64, addresses: NDArray[np.uint64], queue_pairs: I64, pair: int, queue_pair: int) -> Any:
    """The connection's row, or -1."""
    at = place_of(pair, queue_pair)
    while places[at] >= 0:
        row = places[at]
        if addresses[row] == pair and queue_pairs[row] == queue_pair:
            return row
        at = (at + 1) & (PLACES - 1)
    return np.int64(-1)


@njit(
    types.int64(types.uint8[::1], _i64, _i64, _i64, types.uint64[::1], _i64, _i64, types.uint8[::1]),
    cache=True,
    nogil=True,
    _nrt=False,
)
def classify(
    arena: U8,
    offsets: I64,
    lengths: I64,
    places: I64,
    addresses: NDArray[np.uint64],
    queue_pairs: I64,
    rows: I64,
    reasons: U8,
) -> Any:
    """Set ``rows[i]`` to the connection of packet *i*, a whole IPv4 packet; returns how many are of one.

    :data:`FOREIGN` is everything else: other protocols, acknowledgements, other connections. :data:`NOTICE` is a first
    packet's headers from another switch. Damaged packets of a connection get their reason and no row: what was summed would
    leave with a good checksum.
    """
    found = np.int64(0)
    for i in range(len(offsets)):
        at, length = offsets[i], lengths[i]
        rows[i] = FOREIGN
        if (
            length < 44
            or arena[at] != 0x45
            or arena[at + 9] != _UDP
            or load(arena, at + 22, 2) != _PORT
            or load(arena, at + 6, 2) & 0x3FFF
        ):
            continue
        opcode = arena[at + 28]
        if opcode == NOTICE_OPCODE:
            rows[i] = NOTICE
            found += 1
            continue
        if not 0x06 <= opcode <= 0x0B:
            continue
        pair = np.uint64(load(arena, at + 12, 8))
        row = find(places, addresses, queue_pairs, pair, load(arena, at + 33, 3))
        if row < 0:
            continue
        # what the receiver would refuse must not count: the sum would leave under its headers
        if load(arena, at + 2, 2) != length or load(arena, at + 24, 2) != length - 20:
            reasons[i] = _SHORT
        elif arena[at + 29] & 0x0F:
            reasons[i] = _BAD_TYPE
        elif not is_sound(arena, at, length):
            reasons[i] = _BAD_ICRC
        else:
            rows[i] = row
            found += 1
    return found


#: room for one packet: headers of a first one, the values, the ICRC
HEAD_BYTES = 20 + 8 + 12 + 16 + 4
ROOM = 96
#: bytes of a first packet's headers that others of its message can be made from, the INA header included
TEMPLATE_BYTES = 56 + HEADER_BYTES

_ADD, _MAX32, _MAX64, _MAX8, _FLOAT = (int(operation) for operation in Operation)


class Shape(IntEnum):
    """Numbers about a ring at one switch, as kernels see them."""

    RING = 0
    EPOCH = 1
    #: packets in a message
    LENGTH = 2
    #: messages in flight, N
    WINDOW = 3
    #: payload bytes of a packet
    PACKET = 4
    #: contributions to a place
    CHILDREN = 5
    #: ranks of the whole ring
    RANKS = 6
    #: ranks below this switch
    BELOW = 7
    #: 1: sums go to a switch above
    UP = 8
    #: 1: children are switches
    OVER_SWITCHES = 9
    #: this switch's number at the one above
    NUMBER = 10
    #: connections that end at hosts here, of a switch that has one above it
    ENDS = 11


class Count(IntEnum):
    """What happened to packets."""

    #: taken into a buffer for the first time
    CONTRIBUTIONS = 0
    #: of those, first of their place, so that nothing was summed
    FIRST = 1
    #: overwrote themselves in a place that waits for others
    REPEATED = 2
    #: places that got their last packet
    COMPLETED = 3
    #: found their place complete and were answered from it
    ANSWERED = 4
    #: messages that gave way to a newer one
    TAKEN_OVER = 5
    #: packets sent: sums on the ranks' own connections
    EMITTED = 6
    #: sums to the switch above, and results to those below
    TRANSLATED = 7
    #: first packets' headers sent to other switches
    NOTICES = 8
    #: packets of connections without INA headers
    PLAIN = 9


class Memory(NamedTuple):
    """Places of messages (2N), of packets (2N * length), and buffers (times children), all flat and in this order."""

    #: uint32: MsgID that holds the place
    message: NDArray[np.uint32]
    #: 1: one does
    held: U8
    operation: U8
    #: uint32: children whose packet is here
    bitmap: NDArray[np.uint32]
    #: 1: the sum is complete
    done: U8
    #: int64: where values begin in a buffered packet
    head: I64
    #: uint8: buffered packets, ``stride`` apart
    packets: U8
    #: uint8: sums, a packet's payload apart
    sums: U8
    #: uint8: per message and connection that ends here, headers of its first packet, and whether they are known
    templates: U8
    known: U8


_u8 = types.uint8[::1]
MEMORY: Any = types.NamedTuple(
    (types.uint32[::1], _u8, _u8, types.uint32[::1], _u8, _i64, _u8, _u8, _u8, _u8), Memory
)


def stride(packet_bytes: int) -> int:
    """Bytes between buffered packets."""
    return packet_bytes + ROOM


def new_memory(messages: int, length: int, children: int, packet_bytes: int, ends: int) -> Memory:
    """Memory for so many messages (2N) of ``length`` packets of ``packet_bytes`` payload from so many children."""
    places = messages * length
    return Memory(
        message=np.zeros(messages, np.uint32),
        held=np.zeros(messages, np.uint8),
        operation=np.zeros(messages, np.uint8),
        bitmap=np.zeros(places, np.uint32),
        done=np.zeros(places, np.uint8),
        head=np.zeros(places * children, np.int64),
        packets=np.zeros(places * children * stride(packet_bytes), np.uint8),
        sums=np.zeros(places * packet_bytes, np.uint8),
        templates=np.zeros(messages * ends * TEMPLATE_BYTES, np.uint8),
        known=np.zeros(messages * ends, np.uint8),
    )


@njit(
    types.boolean(MEMORY, _i64, types.int64, types.uint32, types.int64, _i64),
    cache=True,
    nogil=True,
    _nrt=False,
)
def claim(memory: Memory, shape: I64, slot: int, message: int, operation: int, counts: I64) -> bool:
    """Take a message's place over if it holds an older one; ``False``: it holds a newer one."""
    if memory.held[slot]:
        ahead = np.int32(message - memory.message[slot])
        if ahead <= 0:
            return bool(ahead == 0)
        counts[Count.TAKEN_OVER] += 1
    memory.held[slot] = 1
    memory.message[slot] = message
    memory.operation[slot] = operation
    length, ends = shape[Shape.LENGTH], shape[Shape.ENDS]
    for place in range(slot * length, (slot + 1) * length):
        memory.bitmap[place] = 0
        memory.done[place] = 0
    for end in range(slot * ends, (slot + 1) * ends):
        memory.known[end] = 0
    return True


@njit(types.void(MEMORY, _i64, types.int64, types.int64), cache=True, nogil=True, _nrt=False)
def add_up(memory: Memory, shape: I64, place: int, operation: int) -> None:
    """Sum the packets of a place in the order of children."""
    children, size = shape[Shape.CHILDREN], shape[Shape.PACKET]
    step = size + ROOM
    width = size - HEADER_BYTES if place % shape[Shape.LENGTH] == 0 else size
    target = memory.sums[place * size : place * size + width]
    for child in range(children):
        row = place * children + child
        at = row * step + memory.head[row]
        source = memory.packets[at : at + width]
        if child == 0:
            for j in range(width):
                target[j] = source[j]
        elif operation == _ADD:
            total, more = target.view(np.int32), source.view(np.int32)
            for j in range(total.size):
                total[j] += more[j]
        elif operation == _FLOAT:
            sums, floats = target.view(np.float32), source.view(np.float32)
            for j in range(sums.size):
                sums[j] += floats[j]
        elif operation == _MAX32:
            most, words = target.view(np.int32), source.view(np.int32)
            for j in range(most.size):
                most[j] = max(most[j], words[j])
        elif operation == _MAX64:
            most64, words64 = target.view(np.int64), source.view(np.int64)
            for j in range(most64.size):
                most64[j] = max(most64[j], words64[j])
        else:
            for j in range(width):
                target[j] = max(target[j], source[j])
