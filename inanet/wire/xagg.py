"""XAgg framing, version 2: the paper's host id, gradient id and 256 values, made safe to use on a shared network.

Source: XAgg, section IV-A and Fig. 3 (host id, gradient id, gradient array). The other fields are ours; each says why.
Everything is **little-endian**, so that x86 and ARM servers and BPF programs add the payload as it lies. The packet is
the payload of a UDP datagram, or of an IPv4 packet with protocol number :data:`IP_PROTOCOL`.

====== ==== ========== =============================================================================================
offset size field      meaning
====== ==== ========== =============================================================================================
0      1    magic      0xA2: high nibble 0xA, low nibble the framing version
1      1    kind       low nibble :class:`Kind`, high nibble :class:`Flag` bits
2      2    job        job id given by the coordinator; any value, 0 included
4      4    host       one-hot id of the child this hop concerns (paper: Host ID); 0 on packets to all children
8      4    gradient   fragment index within the shard (paper: Gradient ID); for LOST and RESTART the group, for CREDIT and
                       PROBE a count. In rows of data and results the index has 24 bits, and the top byte is the exponent that
                       the block needs, the largest over all that are in the row: 0 for zeros, and where nobody asks
12     4    round      the all-reduce this packet belongs to; serial-number arithmetic
16     2    shard      part of a tensor with its own tree and its own slots
18     1    plan       version of the plan the sender follows, modulo 256
19     1    attempt    how often this fragment was restarted (new exponent, recollection); a lower one is stale
20     4    tag        keyed mix of the five words before it; proves the sender knows the job's key
24     1024 payload    256 signed 32-bit values (data and results), or a control body
1048   4    checksum   linear checksum of the payload, itself summed like a payload word
====== ==== ========== =============================================================================================

Control packets carry a shorter body; their checksum is the last word of the packet as well.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from inanet.wire.integrity import checksum, header_tag

MAGIC = 0xA
VERSION = 2
MAGIC_VERSION = MAGIC << 4 | VERSION
#: Protocol number for raw IPv4; 253 is reserved for experimentation (RFC 3692).
IP_PROTOCOL = 253

HEADER_BYTES = 24
VALUES = 256
PAYLOAD_BYTES = VALUES * 4
CHECKSUM_BYTES = 4
#: A packet that carries values, and the stride of a slot.
ROW_BYTES = HEADER_BYTES + PAYLOAD_BYTES + CHECKSUM_BYTES
ROW_WORDS = ROW_BYTES // 4
HEADER_WORDS = HEADER_BYTES // 4
CHECKSUM_WORD = ROW_WORDS - 1
TAG_WORD = 5
#: The word with the fragment's index, and how many of its bits that has; above them is the exponent that the block needs.
INDEX_WORD = 2
INDEX_BITS = 24

#: Fragments per reliability group (XAgg, section IV-D).
GROUP = 1024
#: A LOST packet: header, one bit per fragment of the group, checksum.
LOST_BODY_BYTES = GROUP // 8
LOST_BYTES = HEADER_BYTES + LOST_BODY_BYTES + CHECKSUM_BYTES
#: Every other control packet: header, two words, checksum.
CONTROL_BODY_BYTES = 8
CONTROL_BYTES = HEADER_BYTES + CONTROL_BODY_BYTES + CHECKSUM_BYTES

#: One-hot host ids are 32 bits wide, so a node has at most 32 children (retired ones included) in a round.
MAX_CHILDREN = 32


class Kind(IntEnum):
    """What a packet is (low nibble of byte 1)."""

    #: child to parent: a contribution, or the sum of a whole subtree
    DATA = 1
    #: child to parent instead of DATA: "my block is too large"; payload word 0 holds what it needs (carried, fixed exponents)
    EXPONENT = 2
    #: parent to children: the result of a fragment. With a host id: child to a root that lost its memory (root restart)
    RESULT = 3
    #: parent to children: start fragments of this group again, as the attempt in the header. The payload has a byte for
    #: each: its new exponent, or 0 for those that are not meant. With SAME the byte is 1 and the exponent stays
    RESTART = 4
    #: sender to receiver: everything of this round has left me (XAgg: end of send)
    SENT = 5
    #: receiver to sender: of this group I lack the fragments whose bit is set
    LOST = 6
    #: receiver to sender: answer to SENT, I have everything; downwards this confirms the round for a whole subtree
    DONE = 7
    #: child to parent: I have this round to send; word 0 is 1 after a change of parent
    READY = 8
    #: parent to child: rounds after the one in the header may be sent for this shard; word 0 is 1 if that one has failed
    OPEN = 9
    #: receiver to sender: packets taken so far on this link, modulo 2^32 (flow control); word 0 is the tree, no shard
    CREDIT = 10
    #: parent to its multicast group (DOWN): whoever hears this, answer; child to parent: the answer, with the same count in
    #: the gradient field; word 0 is the tree, no shard (multicast results)
    PROBE = 11


class Flag(IntFlag):
    """High nibble of byte 1."""

    NONE = 0
    #: last fragment of its index group to leave this sender in this round (emission groups)
    GROUP_END = 1
    #: control packet about results (parent to child direction) rather than about contributions
    DOWN = 2
    #: of DATA: somebody's block is large enough for the exponent that it was sent under. Without it the root starts a
    #: fragment again, unless all are zeros (exponent agreement)
    LARGE = 4
    #: of RESTART: exponents stay as they are
    SAME = 8


KIND_MASK = 0x0F
FLAG_SHIFT = 4

HEADER = np.dtype(
    [
        ("magic", "u1"),
        ("kind", "u1"),
        ("job", "<u2"),
        ("host", "<u4"),
        ("gradient", "<u4"),
        ("round", "<u4"),
        ("shard", "<u2"),
        ("plan", "u1"),
        ("attempt", "u1"),
        ("tag", "<u4"),
    ]
)
ROW = np.dtype([("header", HEADER), ("payload", "<i4", VALUES), ("checksum", "<u4")])
assert HEADER.itemsize == HEADER_BYTES
assert ROW.itemsize == ROW_BYTES


class MalformedPacket(ValueError):
    """Bytes that are not a packet of this framing; ``reason`` is a :class:`~inanet.wire.drops.Drop` name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and the dissector. The data path works on rows instead."""

    kind: Kind
    job: int
    host: int
    gradient: int
    round: int
    shard: int
    plan: int
    attempt: int
    payload: bytes
    flags: Flag = Flag.NONE

    def encode(self, key: int) -> bytes:
        """The packet's bytes, tag and checksum included. Raises ``ValueError`` if the body has the wrong size."""
        if len(self.payload) != body_bytes(self.kind):
            raise ValueError(f"{self.kind.name} carries {body_bytes(self.kind)} B, not {len(self.payload)}")
        header = np.zeros(1, HEADER)
        header["magic"] = MAGIC_VERSION
        header["kind"] = self.kind | self.flags << FLAG_SHIFT
        for field in ("job", "host", "gradient", "round", "shard", "plan", "attempt"):
            header[field] = getattr(self, field)
        words = header.view("<u4")
        header["tag"] = header_tag(tuple(int(word) for word in words[:TAG_WORD]), key)  # type: ignore[arg-type]
        return header.tobytes() + self.payload + checksum(self.payload, "<").to_bytes(4, "little")


def body_bytes(kind: Kind) -> int:
    """Bytes between header and checksum for a kind of packet."""
    if kind in (Kind.DATA, Kind.EXPONENT, Kind.RESULT, Kind.RESTART):
        return PAYLOAD_BYTES
    return LOST_BODY_BYTES if kind is Kind.LOST else CONTROL_BODY_BYTES


def decode(data: bytes, key: int) -> Packet:
    """Parse and verify one packet. Raises :class:`MalformedPacket` and nothing else, whatever the bytes are."""
    if len(data) < CONTROL_BYTES:
        raise MalformedPacket("short", f"{len(data)} B, the shortest packet has {CONTROL_BYTES}")
    header = np.frombuffer(data[:HEADER_BYTES], HEADER)[0]
    if header["magic"] != MAGIC_VERSION:
        raise MalformedPacket(
            "bad_magic", f"first byte is {int(header['magic']):#04x}, not {MAGIC_VERSION:#04x}"
        )
    code = int(header["kind"]) & KIND_MASK
    if code not in Kind._value2member_map_:
        raise MalformedPacket("bad_type", f"kind {code}")
    kind = Kind(code)
    length = HEADER_BYTES + body_bytes(kind) + CHECKSUM_BYTES
    if len(data) != length:
        reason = "short" if len(data) < length else "oversized"
        raise MalformedPacket(reason, f"{kind.name} has {length} B, got {len(data)}")
    words = np.frombuffer(data[: TAG_WORD * 4], "<u4")
    if int(header["tag"]) != header_tag(tuple(int(word) for word in words), key):  # type: ignore[arg-type]
        raise MalformedPacket("bad_tag", f"tag {int(header['tag']):#010x} does not belong to this job")
    payload = data[HEADER_BYTES:-CHECKSUM_BYTES]
    if int.from_bytes(data[-CHECKSUM_BYTES:], "little") != checksum(payload, "<"):
        raise MalformedPacket("bad_checksum", f"{kind.name} fragment {int(header['gradient'])}")
    return Packet(
        kind=kind,
        job=int(header["job"]),
        host=int(header["host"]),
        gradient=int(header["gradient"]),
        round=int(header["round"]),
        shard=int(header["shard"]),
        plan=int(header["plan"]),
        attempt=int(header["attempt"]),
        payload=payload,
        flags=Flag(int(header["kind"]) >> FLAG_SHIFT),
    )
