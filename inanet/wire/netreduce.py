"""NetReduce's INA header: what stands in front of the tensor of every message (paper, section 3.2 and Fig. 4).

A message is what one RDMA WRITE carries: this header, then values. The transport cuts it into packets, so only the first
packet of a message has the header; a switch recovers it for the others from its connection lookup table. All fields are
big-endian, values little-endian, as they lie in the hosts' memory:

====== ========== ==== ==================================================================================
byte   field      bits
====== ========== ==== ==================================================================================
0      tag        32   ``"INET"``: the paper's InetTag, tells first packets of messages from other writes
4      version    8    1
5      operation  8    how values combine, :class:`Operation`
6      ring       16   RingID
8      message    32   MsgID, increases by one for the life of a ring, modulo 2**32
12     length     16   MsgLen: packets of the message, the same for all messages of a ring; the step, if it is plain
14     rank       16   position of the sender on its ring
16     aggregated 16   0 as sent; a switch that has summed the message says over how many ranks
18     --         16   0
20     epoch      32   which life of the ring this is: a ring whose worker was restarted has another
====== ========== ==== ==================================================================================

The paper's header has neither ``aggregated`` (without it a neighbour's raw gradient would pass for a sum while a switch
does not know the ring: marked sums) nor ``epoch``. With 24 bytes, values of 64 bits never lie across two packets.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from inanet.wire.netreduce_sizes import PACKET_BYTES

#: the paper's InetTag
TAG = 0x494E4554
#: ``"RING"``: a message for the neighbour alone, which switches leave as it is
PLAIN_TAG = 0x52494E47
VERSION = 1
HEADER_BYTES = 24

HEADER = np.dtype(
    [
        ("tag", ">u4"),
        ("version", "u1"),
        ("operation", "u1"),
        ("ring", ">u2"),
        ("message", ">u4"),
        ("length", ">u2"),
        ("rank", ">u2"),
        ("aggregated", ">u2"),
        ("zero", ">u2"),
        ("epoch", ">u4"),
    ]
)
assert HEADER.itemsize == HEADER_BYTES


class Operation(IntEnum):
    """How the values of a message combine. The first four are numbered as :class:`inanet.proto.common.plan.Fold`."""

    #: signed 32-bit addition
    ADD = 0
    #: signed 32-bit maximum
    MAX32 = 1
    #: maximum of signed 64-bit values
    MAX64 = 2
    #: unsigned maximum of bytes: block exponents
    MAX8 = 3
    #: float32 addition in the order of ranks, as the FPGA adds
    ADD_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Header:
    """One INA header; see the module for the fields."""

    ring: int
    message: int
    length: int
    rank: int
    operation: Operation = Operation.ADD
    aggregated: int = 0
    epoch: int = 0
    tag: int = TAG

    def encode(self) -> bytes:
        """The 24 bytes."""
        row = np.zeros(1, HEADER)
        row["tag"], row["version"], row["operation"] = self.tag, VERSION, self.operation
        row["ring"], row["message"], row["length"] = self.ring, self.message, self.length
        row["rank"], row["aggregated"] = self.rank, self.aggregated
        row["epoch"] = self.epoch
        return row.tobytes()


class NoHeader(ValueError):
    """These bytes do not begin with an INA header; says why."""


def decode(data: bytes) -> Header:
    """The header at the beginning of a message.

    Raises :class:`NoHeader` for fewer than 24 bytes, another tag or version, and operations that do not exist.
    """
    if len(data) < HEADER_BYTES:
        raise NoHeader(f"{len(data)} bytes are no INA header of {HEADER_BYTES}")
    row = np.frombuffer(data[:HEADER_BYTES], HEADER)[0]
    if int(row["tag"]) not in (TAG, PLAIN_TAG) or int(row["version"]) != VERSION:
        raise NoHeader(f"tag {int(row['tag']):#x}, version {int(row['version'])}: no INA header")
    if int(row["operation"]) not in Operation.__members__.values():
        raise NoHeader(f"operation {int(row['operation'])} does not exist")
    return Header(
        ring=int(row["ring"]),
        message=int(row["message"]),
        length=int(row["length"]),
        rank=int(row["rank"]),
        operation=Operation(int(row["operation"])),
        aggregated=int(row["aggregated"]),
        epoch=int(row["epoch"]),
        tag=int(row["tag"]),
    )


def message_values(packets: int, packet_bytes: int = PACKET_BYTES) -> int:
    """32-bit values that a message of so many packets carries."""
    return (packets * packet_bytes - HEADER_BYTES) // 4


def least_window(round_trip: float, rate: float, packets: int, packet_bytes: int = PACKET_BYTES) -> int:
    """Messages that must be in flight for a link never to idle (section 3.2): N >= RTT * rate / (MsgLen * packet).

    ``round_trip`` in seconds, ``rate`` in bits per second. A power of two, so that MsgIDs may wrap.
    """
    needed = max(1, int(np.ceil(round_trip * rate / 8 / (packets * packet_bytes))))
    return 1 << (needed - 1).bit_length()
