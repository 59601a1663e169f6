"""GOAT framing, version 1: fragments of 64 values, tagged with aggregation node, sub-model and fragment.

The paper (section VI) names the tag and the 64 values, no bytes; the group's earlier public program has neither rounds nor a
check of who has contributed. This framing keeps the tag and adds a header tag, a linear checksum and a replay horizon.
Everything is **big-endian**, as switch programs want it. The packet is the payload of a UDP datagram.

====== ==== ========== ==============================================================================================
offset size field      meaning
====== ==== ========== ==============================================================================================
0      1    magic      0x61: high nibble 6, low nibble the framing version
1      1    kind       :class:`Kind`
2      1    job        the job's number, 1 to 255
3      1    asker      in a SUM that is sent again: 1 + index of the worker that asks for the result; else 0
4      2    node       aggregation node that sums the fragment, 0 is the PS; in a SUM the node that it comes from
6      2    submodel   sub-model, :data:`NO_SUBMODEL` for what no switch has slots for
8      4    fragment   fragment of the sub-model; its slot is the node's base address for the sub-model plus this
12     4    number     number of the fragment in the job's life, modulo 2^32: round and attempt in one
16     4    bitmap     workers that are in the values; in a RESULT those that it is for
20     4    tag        keyed mix of the five words before it (:func:`inanet.wire.xagg.header_tag`, over big-endian words)
24     256  values     64 signed 32-bit integers
280    4    checksum   linear checksum of the values; switches add it up with them
====== ==== ========== ==============================================================================================

*Replay horizon*. A slot refuses what is older than what it holds: a packet may be late by up to 2^31 fragments of the
job (0.5 TB of gradient) without being taken for a new one.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from inanet.wire.integrity import checksum, header_tag
from inanet.wire.xagg import MalformedPacket

MAGIC_VERSION = 6 << 4 | 1
VALUES = 64
#: words that a slot adds up: the values and their checksum
WORDS = VALUES + 1
ASKER_AT = 3
NODE_AT = 4
SUBMODEL_AT = 6
FRAGMENT_AT = 8
NUMBER_AT = 12
BITMAP_AT = 16
TAG_AT = 20
VALUES_AT = 24
CHECKSUM_AT = VALUES_AT + 4 * VALUES
FRAME_BYTES = CHECKSUM_AT + 4
#: the PS as an aggregation node; switches have numbers from 1 on
PS_NODE = 0
#: switches that a job can have
MAX_NODES = 64
#: sub-model of fragments that go to the PS without a slot anywhere
NO_SUBMODEL = 0xFFFF
MAX_JOB = 255
SEQUENCE_BITS = 32

FRAME = np.dtype(
    [
        ("magic", "u1"),
        ("kind", "u1"),
        ("job", "u1"),
        ("asker", "u1"),
        ("node", ">u2"),
        ("submodel", ">u2"),
        ("fragment", ">u4"),
        ("number", ">u4"),
        ("bitmap", ">u4"),
        ("tag", ">u4"),
        ("values", ">i4", VALUES),
        ("checksum", ">u4"),
    ]
)
assert FRAME.itemsize == FRAME_BYTES
_FIELDS = ("job", "asker", "node", "submodel", "fragment", "number", "bitmap")


class Kind(IntEnum):
    """What a packet is."""

    #: from one worker, to the node in its tag
    DATA = 1
    #: from a switch, to the PS: all workers that the node was to hear
    SUM = 2
    #: from the PS, to workers
    RESULT = 3


class EpochKind(IntEnum):
    """What else a packet is in asynchronous training, where a DATA's number is the worker's gradient (1, 2, ...), a SUM's
    that of its slot's sum, and a RESULT's the epoch.

    A RESULT is for one worker; its values are float32 of the model, its fragment is counted over the whole tensor, and the
    fragment behind the last one has :class:`Head` in it.
    """

    #: to a worker: its contribution of this fragment is in a slot, or at the PS; node is whoever says so
    ACK = 4
    #: from the PS, to a node: it has this sum; asker as in the SUM
    TAKEN = 5
    #: from the PS, to a node: K_t^s of up to 64 sub-models from this one on. number is the epoch, fragment the revision,
    #: bitmap the workers whose gradients are waited for no longer: what a slot has of them leaves now
    PUBLISH = 6
    #: from a worker, to the PS: all of its gradient has been taken. What it lacks of its result are the bits of the values
    #: (bit j of value i: fragment + 32 i + j)
    READY = 7
    #: from the PS, to a worker: send these again, marked as in READY; none: there is nothing to do but to wait
    REPEAT = 8
    #: from a node, to the PS: a contribution that it passes on as it came
    PASSED = 9


class Head(IntEnum):
    """Values of the fragment behind the last one of a result."""

    #: workers that take part in the epoch: bitmap
    PARTICIPANTS = 0
    #: how many were waited for: K_t
    AWAITED = 1
    #: epochs between the one in which this worker got its last model and this one
    STALENESS = 2


#: fragments whose marks fit the values of a packet
MARKS = 32 * VALUES


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and the dissector."""

    kind: Kind
    job: int
    node: int
    submodel: int
    fragment: int
    number: int
    bitmap: int
    values: tuple[int, ...]
    asker: int = 0

    def encode(self, key: int) -> bytes:
        """The packet's bytes, tag and checksum included."""
        frame = np.zeros(1, FRAME)
        frame["magic"] = MAGIC_VERSION
        frame["kind"] = self.kind
        for name in _FIELDS:
            frame[name] = getattr(self, name)
        frame["values"] = self.values
        frame["checksum"] = _checksum_of(frame[0])
        frame["tag"] = _tag_of(frame.tobytes(), key)
        return frame.tobytes()


def _checksum_of(frame: Any) -> int:
    return checksum(frame["values"].tobytes(), ">")


def _tag_of(data: bytes, key: int) -> int:
    a, b, c, d, e = (int(word) for word in np.frombuffer(data[:TAG_AT], ">u4"))
    return header_tag((a, b, c, d, e), key)


def decode(data: bytes, key: int) -> Packet:
    """Parse and verify one packet. Raises :class:`~inanet.wire.xagg.MalformedPacket` and nothing else."""
    if len(data) != FRAME_BYTES:
        reason = "short" if len(data) < FRAME_BYTES else "oversized"
        raise MalformedPacket(reason, f"a packet has {FRAME_BYTES} B, got {len(data)}")
    frame = np.frombuffer(data, FRAME)[0]
    if frame["magic"] != MAGIC_VERSION:
        raise MalformedPacket(
            "bad_magic", f"first byte is {int(frame['magic']):#04x}, not {MAGIC_VERSION:#04x}"
        )
    if int(frame["kind"]) not in Kind._value2member_map_:
        raise MalformedPacket("bad_type", f"kind {int(frame['kind'])}")
    if int(frame["tag"]) != _tag_of(data, key):
        raise MalformedPacket("bad_tag", f"tag {int(frame['tag']):#010x} does not belong to this job")
    values = tuple(frame["values"].tolist())
    if int(frame["checksum"]) != _checksum_of(frame):
        raise MalformedPacket("bad_checksum", f"fragment {int(frame['fragment'])}")
    fields = {name: int(frame[name]) for name in _FIELDS}
    return Packet(kind=Kind(int(frame["kind"])), values=values, **fields)
