"""The aggregator array of a ring (section 3.1): 2N messages, with a buffer for each rank's packet.

Sums are idempotent because packets are kept and not accumulated: one that comes twice overwrites itself. A message's place
is its MsgID modulo 2N; it is taken over by a newer message and freed by nothing else (message takeover). Packets of one place
are summed in the order of ranks when all are there, so floats, too, come out the same whatever arrives first.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8
from inanet.wire.netreduce import HEADER_BYTES, Operation

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


_u8, _i64 = types.uint8[::1], types.int64[::1]
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
