"""Zebra framing, version 1: keys and values of sparse gradients, in packets that are acknowledged one by one.

The released program carries Zebra inside TCP, with its type in TCP's reserved nibble; this framing keeps what the paper
says about the packets (hot parameters by their rank, cold ones by their 64-bit key, a sequence number that a
retransmission repeats) and adds a header tag, a linear checksum and an iteration ledger. Everything is **big-endian**, as
switch programs want it. The packet is the payload of a UDP datagram.

====== ==== ========== ==============================================================================================
offset size field      meaning
====== ==== ========== ==============================================================================================
0      1    magic      0x51: high nibble 5, low nibble the framing version
1      1    kind       :class:`Kind`
2      2    job        job number, any value
4      2    sender     rank of a worker (HOT, COLD, PULL, JOIN and the answers to them) or number of a PS shard (AGGREGATE,
                       NEWS, REFUSAL, WAITING)
6      2    version    version of the hot set that ranks refer to; in a REFUSAL a :class:`Refusal`, in a WAITING how many
                       ranks besides the one named are waited for
8      4    iteration  HOT, COLD, AGGREGATE, NEWS, WAITING: the iteration, modulo 2^32; PULL, VALUES: the last one that must be in the
                       values; JOIN: the number of the worker's life; REFUSAL: the last one that the shard has finished
12     4    sequence   number of the packet in its stream, modulo 2^32; a retransmission has the same; in a REFUSAL the iteration
                       of what is refused, in a WAITING a rank, or the number of ranks for the switch
16     2    pairs      entries that follow; in a switch's or a shard's ACK the number of its life, another after every restart
18     1    width      32-bit values per key
19     1    flags      :class:`Flag` bits; in HOT, COLD and AGGREGATE the high nibble is the attempt, which the ACK has for its
                       low nibble; the high nibble of an ACK is the kind of what is acknowledged
20     4    tag        keyed mix of the five words before it (:func:`inanet.wire.xagg.header_tag`, over big-endian words)
24     ...  entries    see below
end-4  4    checksum   linear checksum of the entries' words, as an unsigned big-endian number
====== ==== ========== ==============================================================================================

An entry is, for HOT, AGGREGATE and NEWS, a 4-byte rank and ``width`` values; for COLD an 8-byte key and ``width`` values; for
PULL a key; for VALUES ``width`` values, in the order of the PULL with this sequence number. Values are IEEE float32, except
in HOT and AGGREGATE without :attr:`Flag.FLOAT`: there they are signed integers.

A stream ends with a packet with :attr:`Flag.END` and no entries, whose sequence number is how many came before it (iteration
ledger: the paper's "empty" packet is the end of a stream without others). The END of NEWS has one word instead of entries: the
version of the hot set that the next iteration uses.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np

from inanet.wire.integrity import checksum, header_tag
from inanet.wire.xagg import MalformedPacket

MAGIC_VERSION = 5 << 4 | 1
HEADER_BYTES = 24
CHECKSUM_BYTES = 4
#: Bytes of a packet without entries.
EMPTY_BYTES = HEADER_BYTES + CHECKSUM_BYTES
RANK_BYTES = 4
KEY_BYTES = 8
VALUE_BYTES = 4
MAX_WIDTH = 255
#: Bytes after the header of the END of NEWS, without the checksum.
NEXT_BYTES = 4


class Kind(IntEnum):
    """What a packet is."""

    #: worker to switch: gradients of hot parameters
    HOT = 1
    #: worker to PS: gradients of cold parameters
    COLD = 2
    #: switch to PS: sums of hot parameters
    AGGREGATE = 3
    #: PS to all workers: new values of hot parameters
    NEWS = 4
    #: worker to PS: keys whose values it wants
    PULL = 5
    #: PS to worker: the values
    VALUES = 6
    #: receiver to sender: the packet with this sequence number has arrived
    ACK = 7
    #: worker to PS, before anything else: a process takes its rank's place in the job
    JOIN = 8
    #: PS to worker: what it has sent can never be taken, and why
    REFUSAL = 9
    #: PS to worker that asks whether it still has its gradients: whom the iteration waits for
    WAITING = 10


class Refusal(IntEnum):
    """Why a PS shard refuses a worker for good."""

    #: the shard has lost iterations that the worker knows to be finished
    LOST = 1
    #: another process has had this rank's place in the job already
    TAKEN = 2


class Flag(IntFlag):
    """Byte 19, low nibble."""

    NONE = 0
    END = 1
    #: values in HOT and AGGREGATE are float32
    FLOAT = 2


KIND_SHIFT = 4
#: Numbers of attempts, in the high nibble of a gradient's flags and the low one of its ACK's.
ATTEMPTS = 16

HEADER = np.dtype(
    [
        ("magic", "u1"),
        ("kind", "u1"),
        ("job", ">u2"),
        ("sender", ">u2"),
        ("version", ">u2"),
        ("iteration", ">u4"),
        ("sequence", ">u4"),
        ("pairs", ">u2"),
        ("width", "u1"),
        ("flags", "u1"),
        ("tag", ">u4"),
    ]
)
assert HEADER.itemsize == HEADER_BYTES


def entry_bytes(kind: int, width: int) -> int:
    """Bytes of one entry."""
    values = VALUE_BYTES * width
    return {
        Kind.HOT: RANK_BYTES + values,
        Kind.AGGREGATE: RANK_BYTES + values,
        Kind.NEWS: RANK_BYTES + values,
        Kind.COLD: KEY_BYTES + values,
        Kind.PULL: KEY_BYTES,
        Kind.VALUES: values,
    }.get(Kind(kind), 0)


def capacity(kind: int, width: int, packet_bytes: int) -> int:
    """Entries that fit into a packet of ``packet_bytes``. Raises ``ValueError`` if not even one does."""
    count = (packet_bytes - EMPTY_BYTES) // entry_bytes(kind, width)
    if count < 1:
        raise ValueError(
            f"a packet of {packet_bytes} B has no room for one key with {width} values; it needs "
            f"{EMPTY_BYTES + entry_bytes(kind, width)} B"
        )
    return min(count, 0xFFFF)


def frame(kind: int, width: int, entries: int) -> "np.dtype[np.void]":
    """Structured dtype of a packet with this many entries, checksum included: ``header``, ``key``/``rank`` and ``value``
    of ``entry[entries]``, ``checksum``.
    """
    fields: list[tuple[str, str] | tuple[str, str, tuple[int]]] = []
    if kind in (Kind.HOT, Kind.AGGREGATE, Kind.NEWS):
        fields.append(("rank", ">u4"))
    elif kind in (Kind.COLD, Kind.PULL):
        fields.append(("key", ">u8"))
    if kind != Kind.PULL:
        fields.append(("value", ">u4", (width,)))
    return np.dtype([("header", HEADER), ("entry", np.dtype(fields), (entries,)), ("checksum", ">u4")])


@dataclass(frozen=True, slots=True)
class Packet:
    """A decoded packet; for tests, traces and the dissector.

    ``names`` are ranks or keys, ``words`` the values' bits, unsigned, ``width`` per entry. ``next_version`` is that of an
    END of NEWS, else ``None``. ``life`` is a switch's or a shard's, in an ACK.
    """

    kind: Kind
    job: int
    sender: int
    version: int
    iteration: int
    sequence: int
    width: int
    flags: int = 0
    names: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    next_version: int | None = None
    life: int = 0

    @property
    def pairs(self) -> int:
        """Entries."""
        return len(self.words) // self.width if self.kind == Kind.VALUES else len(self.names)

    def encode(self, key: int) -> bytes:
        """The packet's bytes under a job's 64-bit key."""
        header = np.zeros((), HEADER)
        header["magic"] = MAGIC_VERSION
        for field in ("kind", "job", "sender", "version", "iteration", "sequence", "pairs", "width", "flags"):
            header[field] = getattr(self, field)
        if self.kind == Kind.ACK:
            header["pairs"] = self.life
        header["tag"] = header_tag(_words(header.tobytes()), key)
        body = np.zeros(self.pairs, frame(self.kind, self.width, 1)["entry"].base)
        names = body.dtype.names or ()
        for field in ("rank", "key"):
            if field in names:
                body[field] = self.names
        if "value" in names:
            body["value"] = np.array(self.words, np.uint32).reshape(self.pairs, self.width)
        payload = body.tobytes()
        if self.next_version is not None:
            payload = self.next_version.to_bytes(NEXT_BYTES, "big")
        return header.tobytes() + payload + checksum(payload, ">").to_bytes(CHECKSUM_BYTES, "big")


def _words(header: bytes) -> tuple[int, int, int, int, int]:
    a, b, c, d, e = np.frombuffer(header, ">u4", 5).tolist()
    return a, b, c, d, e


def decode(data: bytes, key: int) -> Packet:
    """Parse one packet of a job. Raises :class:`~inanet.wire.xagg.MalformedPacket` and nothing else."""
    if len(data) < EMPTY_BYTES:
        raise MalformedPacket("short", f"{len(data)} B, an empty packet has {EMPTY_BYTES}")
    if data[0] != MAGIC_VERSION:
        raise MalformedPacket("bad_magic", f"first byte is {data[0]:#04x}, not {MAGIC_VERSION:#04x}")
    head = np.frombuffer(data, HEADER, 1)[0]
    try:
        kind = Kind(int(head["kind"]))
    except ValueError:
        raise MalformedPacket("bad_type", f"there is no kind {int(head['kind'])}") from None
    pairs, width, flags = int(head["pairs"]), int(head["width"]), int(head["flags"])
    news_end = kind == Kind.NEWS and flags & Flag.END
    wanted = EMPTY_BYTES + pairs * entry_bytes(kind, width) + (NEXT_BYTES if news_end else 0)
    if len(data) != wanted:
        reason = "short" if len(data) < wanted else "oversized"
        raise MalformedPacket(reason, f"{pairs} entries make {wanted} B, got {len(data)}")
    if header_tag(_words(data[:HEADER_BYTES]), key) != int(head["tag"]):
        raise MalformedPacket("bad_tag", "the header's tag does not belong to this job's key")
    payload = data[HEADER_BYTES:-CHECKSUM_BYTES]
    if checksum(payload, ">") != int.from_bytes(data[-CHECKSUM_BYTES:], "big"):
        raise MalformedPacket("bad_checksum", "the entries do not match their checksum")
    names: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    if pairs and kind != Kind.ACK:
        body = np.frombuffer(payload, frame(kind, width, 1)["entry"].base)
        fields = body.dtype.names or ()
        names = tuple(int(x) for field in ("rank", "key") if field in fields for x in body[field])
        words = tuple(body["value"].ravel().tolist()) if "value" in fields else ()
    return Packet(
        kind,
        int(head["job"]),
        int(head["sender"]),
        int(head["version"]),
        int(head["iteration"]),
        int(head["sequence"]),
        width=width,
        flags=flags,
        names=names,
        words=words,
        next_version=int.from_bytes(payload, "big") if news_end else None,
        life=pairs if kind == Kind.ACK else 0,
    )
