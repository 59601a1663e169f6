"""ATP's framing, bit for bit, and what A2TP's and ESA's have in common with it.

====== ==== ========== =============================================================================================
offset size field      meaning (everything big-endian unless it says otherwise)
====== ==== ========== =============================================================================================
0      4    bitmap     one bit per worker whose values are in the packet; 1 in an answer of the PS
4      1    fan_in     contributions that the switch waits for
5      1    flags      :class:`Flag`
6      2    app        id of the application (job), from 1 on: 0 is "free slot" to public switch programs
8      2    seq        sequence number; with ``app`` the 32-bit key of a slot
10     (1)  mark       not in ATP. A2TP: Col and, in a bit of its own, bypass. ESA: priority
10     2    agtr       slot for the first 31 values; the sender chooses it
12     2    agtr2      slot for the other 31 values: ``agtr`` + 20000
14     248  values     62 signed 32-bit integers
262    8    key        tensor id, in the **host's** byte order (little-endian here)
270    4    length     elements of the tensor; in an answer the slot index to use instead, if ``COLLISION`` is set
====== ==== ========== =============================================================================================

On the wire the public programs put this behind an Ethernet header of type :data:`ETHERTYPE` and a fixed IPv4 header, 34 B
together; the same bytes are carried as payload of UDP datagrams here.

*Sequence numbers and the replay horizon*. A job's fragments are numbered for all its life. The low 16 bits of the
number are ``seq`` and the next eight, the *generation*, are the high byte of ``app``, whose low byte is the job (1 to
255). A number is understood as the one nearest to what is expected: a packet may be late by up to 2^23 fragments (2 GB of
gradient) without being taken for another. There is no checksum: damage is what the FCS or UDP's checksum sees.
"""

from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np

from inanet.wire.xagg import MalformedPacket

#: Ethernet type of frames to be aggregated, and the bytes before the INA header in such a frame
ETHERTYPE = 0x0700
LINK_BYTES = 34

VALUES = 62
#: values that a switch handles in one pass
VALUES_PER_PASS = 31
#: distance of the slots of both halves in the public switch program
SECOND_HALF = 20000
MAX_WORKERS = 32
TRAILER_BYTES = 12

FLAGS_AT = 5
APP_AT = 6
SEQ_AT = 8
MARK_AT = 10

#: bits of a fragment's number that travel: seq and generation
SEQUENCE_BITS = 24
JOB_MASK = 0xFF
MAX_JOB = 255


class Flag(IntFlag):
    """Byte 5."""

    NONE = 0
    #: from the PS: the sum, or an answer to a request
    ACK = 0x01
    #: its slot held another fragment. In an answer: ``length`` is the slot to use from now on
    COLLISION = 0x02
    #: sent before: whatever its slot holds goes to the PS
    RESEND = 0x04
    #: congestion was experienced on the way
    ECN = 0x08
    #: second half of the values is being processed
    DATA_INDEX = 0x10
    #: which PS of several, two bits
    PS_INDEX = 0x60
    #: passes every switch untouched; see :data:`PROBE` and :data:`ECHO`
    OVERFLOW = 0x80


#: from a worker: "how long does it take to the PS and back?" Sequence number and length are the worker's own
PROBE = Flag.OVERFLOW
#: the PS's answer to it, with the worker's bit in the bitmap
ECHO = Flag.ACK | Flag.OVERFLOW
#: from the PS to the switch: what does the slot of this fragment hold? The partial sum leaves, the slot is free
PULL = Flag.ACK | Flag.RESEND


def frame_type(mark: str | None = None) -> np.dtype[Any]:
    """The frame as a structured dtype, with a byte of this name at offset 10 or without it."""
    return np.dtype(
        [
            ("bitmap", ">u4"),
            ("fan_in", "u1"),
            ("flags", "u1"),
            ("app", ">u2"),
            ("seq", ">u2"),
            *([(mark, "u1")] if mark else []),
            ("agtr", ">u2"),
            ("agtr2", ">u2"),
            ("values", ">i4", VALUES),
            ("key", "<u8"),
            ("length", ">u4"),
        ]
    )


FRAME = frame_type()
HEADER_BYTES = 14
FRAME_BYTES = HEADER_BYTES + 4 * VALUES + TRAILER_BYTES
assert FRAME.itemsize == FRAME_BYTES


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and the dissector. ``mark`` is the byte that ATP does not have."""

    bitmap: int
    fan_in: int
    app: int
    seq: int
    agtr: int
    values: tuple[int, ...]
    flags: Flag = Flag.NONE
    mark: int = 0
    key: int = 0
    length: int = 0

    def encode(self, frame_type: np.dtype[Any] = FRAME) -> bytes:
        """The packet's bytes in this framing."""
        frame = np.zeros((), frame_type)
        for name in ("bitmap", "fan_in", "app", "seq", "agtr", "values", "flags", "key", "length"):
            frame[name] = getattr(self, name)
        frame["agtr2"] = (self.agtr + SECOND_HALF) & 0xFFFF
        mark = mark_of(frame_type)
        if mark:
            frame[mark] = self.mark
        return frame.tobytes()


def mark_of(frame_type: np.dtype[Any]) -> str | None:
    """Name of the byte at offset 10, if the framing has one."""
    names = frame_type.names
    assert names is not None
    return names[5] if names[5] != "agtr" else None


def decode(data: bytes, frame_type: np.dtype[Any] = FRAME) -> Packet:
    """Parse one packet of this framing. Raises :class:`~inanet.wire.xagg.MalformedPacket` and nothing else."""
    if len(data) != frame_type.itemsize:
        reason = "short" if len(data) < frame_type.itemsize else "oversized"
        raise MalformedPacket(reason, f"a packet has {frame_type.itemsize} B, got {len(data)}")
    frame = np.frombuffer(data, frame_type)[0]
    name = mark_of(frame_type)
    return Packet(
        bitmap=int(frame["bitmap"]),
        fan_in=int(frame["fan_in"]),
        app=int(frame["app"]),
        seq=int(frame["seq"]),
        agtr=int(frame["agtr"]),
        values=tuple(frame["values"].tolist()),
        flags=Flag(int(frame["flags"])),
        mark=int(frame[name]) if name else 0,
        key=int(frame["key"]),
        length=int(frame["length"]),
    )
