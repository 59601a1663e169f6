"""The connection lookup table (section 3.2): from <source, destination, destination's queue pair> to a place in a message.

Only the first packet of a message has an INA header, so a row remembers the message that was last begun on its connection
and the sequence number (PSN) it began at. All messages of a ring have the same number of packets, so a packet's PSN says
which message it belongs to, as far as a window back (PSN window): go-back-N may start in the middle of a message after the next
one has begun.
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
