"""SwitchML's UDP framing (p4app-switchML), bit for bit: an 8-byte header, two exponents, 64 or 256 big-endian values.

====== ==== ============ ===========================================================================================
offset size field        meaning
====== ==== ============ ===========================================================================================
0      1    kind         high nibble message type (1: data), one unused bit, low three bits size: 1 is 64 values, 3 is 256
1      1    job          low eight bits of the job's id
2      4    packet_id    the sender's own number of the packet, **little-endian**, returned as it came
6      2    pool_index   big-endian; bit 15 is the version (set), bits 13 to 0 the slot
8      2    exponents    two signed bytes, e0 and e1
10     4 n  values       n big-endian signed 32-bit integers
====== ==== ============ ===========================================================================================

The packet is the payload of a UDP datagram to one of the switch's ports :data:`SWITCH_PORTS`; workers use
:data:`WORKER_PORT` plus the number of their thread. There is neither a checksum nor a version: damage is what UDP's
checksum and the FCS see.

*Replay horizon*. Public programs leave ``packet_id`` alone. Here it counts the packets of a job for all its life,
modulo 2^32, and the switch refuses one that is older than what its slot holds: a packet may be late by up to 2^31 packets
(2 TB of gradient at 256 values) without being taken for a new one.
"""

from dataclasses import dataclass

import numpy as np

from inanet.wire.xagg import MalformedPacket

DATA = 1
#: the switch listens on these ports: mask 0xFFF0
SWITCH_PORTS = range(0xBEE0, 0xBEF0)
WORKER_PORT = 4000

HEADER_BYTES = 8
EXPONENTS_AT = 8
VALUES_AT = 10
#: values in a packet by its size code
VALUES = {1: 64, 3: 256}
SIZES = {values: code for code, values in VALUES.items()}
SET_BIT = 0x8000
SLOT_MASK = 0x3FFF
#: slots that the pool index can name, each with two sets
MAX_SLOTS = SLOT_MASK + 1
MAX_WORKERS = 32

_HEADER = [("kind", "u1"), ("job", "u1"), ("packet_id", "<u4"), ("pool_index", ">u2"), ("exponents", "i1", 2)]
HEADER = np.dtype(_HEADER)
FRAMES = {values: np.dtype([*_HEADER, ("values", ">i4", values)]) for values in SIZES}
assert HEADER.itemsize == VALUES_AT


def frame_bytes(values: int) -> int:
    """Bytes of a packet of 64 or 256 values."""
    return VALUES_AT + 4 * values


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and the dissector."""

    job: int
    packet_id: int
    slot: int
    version: int
    values: tuple[int, ...]
    exponents: tuple[int, int] = (0, 0)

    def encode(self) -> bytes:
        """The packet's bytes. Raises ``ValueError`` for a number of values that the format does not have."""
        if len(self.values) not in SIZES:
            raise ValueError(f"SwitchML packets carry {list(SIZES)} values, not {len(self.values)}")
        frame = np.zeros((), FRAMES[len(self.values)])
        frame["kind"] = DATA << 4 | SIZES[len(self.values)]
        frame["job"] = self.job & 0xFF
        frame["packet_id"] = self.packet_id
        frame["pool_index"] = self.slot | (SET_BIT if self.version else 0)
        frame["exponents"] = self.exponents
        frame["values"] = self.values
        return frame.tobytes()


def decode(data: bytes) -> Packet:
    """Parse one packet. Raises :class:`~inanet.wire.xagg.MalformedPacket` and nothing else."""
    if len(data) < VALUES_AT:
        raise MalformedPacket("short", f"{len(data)} B, the header alone has {VALUES_AT}")
    code = data[0] & 7
    if data[0] >> 4 != DATA or code not in VALUES:
        raise MalformedPacket("bad_type", f"first byte is {data[0]:#04x}")
    wanted = frame_bytes(VALUES[code])
    if len(data) != wanted:
        reason = "short" if len(data) < wanted else "oversized"
        raise MalformedPacket(reason, f"{VALUES[code]} values make {wanted} B, got {len(data)}")
    frame = np.frombuffer(data, FRAMES[VALUES[code]])[0]
    index = int(frame["pool_index"])
    return Packet(
        job=int(frame["job"]),
        packet_id=int(frame["packet_id"]),
        slot=index & SLOT_MASK,
        version=index >> 15,
        values=tuple(frame["values"].tolist()),
        exponents=(int(frame["exponents"][0]), int(frame["exponents"][1])),
    )
