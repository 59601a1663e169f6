"""Packets as every machine handles them: parse a batch, read its entries, encode and seal packets, acknowledge and answer.

Iterations and sequence numbers have 32 bits on the wire and go on for ever in a machine; :func:`ahead` and :func:`beyond` compare them.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import load16, load32, store32
from inanet.kernels.checksum import checksum_at
from inanet.kernels.header import tag_at
from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, U64, PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.zebra import (
    EMPTY_BYTES,
    HEADER,
    HEADER_BYTES,
    KEY_BYTES,
    KIND_SHIFT,
    MAGIC_VERSION,
    NEXT_BYTES,
    RANK_BYTES,
    Flag,
    Kind,
    frame,
)

_SHORT, _OVERSIZED, _BAD_MAGIC = int(Drop.SHORT), int(Drop.OVERSIZED), int(Drop.BAD_MAGIC)
_BAD_TYPE, _FOREIGN_JOB = int(Drop.BAD_TYPE), int(Drop.FOREIGN_JOB)
_BAD_TAG, _BAD_CHECKSUM = int(Drop.BAD_TAG), int(Drop.BAD_CHECKSUM)
_END, _NEWS = int(Flag.END), int(Kind.NEWS)
_HEAD, _EMPTY, _NEXT = HEADER_BYTES, EMPTY_BYTES, NEXT_BYTES
_MAGIC = MAGIC_VERSION
_BATCH = {"cache": True, "nogil": True, "_nrt": False}

#: the part of a number that is on the wire
SERIAL = 0xFFFFFFFF
_HALF = 1 << 31


def low(number: int) -> int:
    """The part of ``number`` that a header has."""
    return number & SERIAL


def ahead(wire: I64, of: int) -> I64:
    """How far numbers off the wire, int64[n], are ahead of a machine's own one; negative: behind. Right for up to 2^31."""
    return (wire - low(of) + _HALF & SERIAL) - _HALF


def beyond(wire: I64, of: int) -> I64:
    """How far numbers off the wire, int64[n], are beyond a machine's own one, from 0 to 2^32 - 1."""
    return wire - low(of) & SERIAL


class Column(IntEnum):
    """Columns of what :func:`inspect` finds, int64."""

    KIND = 0
    SENDER = 1
    VERSION = 2
    ITERATION = 3
    SEQUENCE = 4
    PAIRS = 5
    WIDTH = 6
    FLAGS = 7


COLUMNS = len(Column)
#: no packets
NONE: I64 = np.zeros(0, np.int64)


def among(*kinds: Kind) -> NDArray[np.bool_]:
    """Whether a kind is one of these, by its number; 0 is what a packet that is not sound has."""
    table: NDArray[np.bool_] = np.zeros(len(Kind) + 1, np.bool_)
    table[[0, *map(int, kinds)]] = True
    return table


@njit(
    "void(uint8[::1], int64[::1], int64[::1], int64, uint64, int64[:, ::1], int64[::1], uint8[::1])", **_BATCH
)
def inspect(
    arena: Any, offsets: Any, lengths: Any, job: int, key: int, entry: Any, fields: Any, reason: Any
) -> None:
    """Check a batch: ``reason`` of every packet (0: sound), its header's columns in ``fields[i * COLUMNS:]``.

    ``entry[kind]``, of all kinds that there are, holds the bytes of an entry without values and the values (0 or 1 times width).
    """
    for i in range(offsets.size):
        at, length = offsets[i], lengths[i]
        if length < _EMPTY:
            reason[i] = _SHORT
            continue
        if arena[at] != _MAGIC:
            reason[i] = _BAD_MAGIC
            continue
        kind = np.int64(arena[at + 1])
        if kind < 1 or kind >= entry.shape[0]:
            reason[i] = _BAD_TYPE
            continue
        if np.int64(load16(arena, at + 2)) != job:
            reason[i] = _FOREIGN_JOB
            continue
        if tag_at(arena, at, key) != load32(arena, at + 20):
            reason[i] = _BAD_TAG
            continue
        pairs, width = np.int64(load16(arena, at + 16)), np.int64(arena[at + 18])
        flags = np.int64(arena[at + 19])
        body = pairs * (entry[kind, 0] + 4 * width * entry[kind, 1])
        if kind == _NEWS and flags & _END:
            body += _NEXT
        if length != _EMPTY + body:
            reason[i] = _SHORT if length < _EMPTY + body else _OVERSIZED
            continue
        if checksum_at(arena, at + _HEAD, body // 4) != load32(arena, at + _HEAD + body):
            reason[i] = _BAD_CHECKSUM
            continue
        reason[i] = 0
        first = i * 8
        fields[first] = kind
        fields[first + 1] = load16(arena, at + 4)
        fields[first + 2] = load16(arena, at + 6)
        fields[first + 3] = load32(arena, at + 8)
        fields[first + 4] = load32(arena, at + 12)
        fields[first + 5] = pairs
        fields[first + 6] = width
        fields[first + 7] = flags


@njit("void(uint8[::1], int64[::1], int64[::1], uint64)", **_BATCH)
def seal(arena: Any, offsets: Any, lengths: Any, key: int) -> None:
    """Write tag and checksum of packets that are otherwise complete."""
    for i in range(offsets.size):
        at = offsets[i]
        body = lengths[i] - _EMPTY
        store32(arena, at + 20, tag_at(arena, at, key))
        store32(arena, at + _HEAD + body, checksum_at(arena, at + _HEAD, body // 4))


@njit(
    "void(uint8[::1], int64[::1], int64[::1], int64, int64, uint64[::1], uint32[:, ::1])",
    **_BATCH,
)
def _take(arena: Any, ats: Any, pairs: Any, name_bytes: int, width: int, names: Any, words: Any) -> None:
    out = 0
    for i in range(ats.size):
        at = ats[i]
        for _ in range(pairs[i]):
            name = np.uint64(0)
            if name_bytes:
                name = np.uint64(load32(arena, at))
                if name_bytes == 8:
                    name = name << np.uint64(32) | np.uint64(load32(arena, at + 4))
                names[out] = name
                at += name_bytes
            for j in range(width):
                words[out, j] = load32(arena, at)
                at += 4
            out += 1


#: by kind: bytes of an entry's name, and whether values follow
ENTRY: I64 = np.zeros((len(Kind) + 1, 2), np.int64)
ENTRY[[Kind.HOT, Kind.AGGREGATE, Kind.NEWS]] = RANK_BYTES, 1
ENTRY[Kind.COLD] = KEY_BYTES, 1
ENTRY[Kind.PULL] = KEY_BYTES, 0
ENTRY[Kind.VALUES] = 0, 1


class ParsedBatch:
    """A batch and what its headers say: ``columns`` int64[n, 8], ``reason`` uint8[n] (0: sound).

    Sound here means header, length, tag and checksum; whether a packet belongs to anything is its receiver's to say.
    """

    def __init__(self, batch: PacketBatch, job: int, key: int) -> None:
        self.batch = batch
        count = len(batch)
        self.reason: U8 = np.zeros(count, np.uint8)
        self.columns: I64 = np.zeros((count, COLUMNS), np.int64)
        fields = self.columns.reshape(-1)
        inspect(batch.arena, batch.offsets, batch.lengths, job, key, ENTRY, fields, self.reason)
        #: kinds that the batch has; most batches have one or two
        self._kinds = frozenset(self.columns[:, Column.KIND].tolist())

    def __getitem__(self, column: Column) -> I64:
        """One column of all packets, int64[n]."""
        return self.columns[:, column]

    def refuse(self, which: NDArray[np.bool_] | I64, reason: Drop) -> None:
        """Give sound packets among ``which`` (a mask, or indices) a reason."""
        mask = which
        if which.dtype != np.bool_:
            mask = np.zeros(len(self.reason), np.bool_)
            mask[which] = True
        self.reason[mask & (self.reason == 0)] = reason

    def of(self, kind: Kind) -> I64:
        """Indices of the sound packets of a kind."""
        if kind not in self._kinds:
            return NONE
        return np.flatnonzero((self.reason == 0) & (self.columns[:, Column.KIND] == kind))

    def entries(self, which: I64) -> tuple[U64, NDArray[np.uint32]]:
        """Names (ranks or keys) uint64[entries] and words uint32[entries, width] of packets of one kind, in order."""
        if not len(which):
            return np.zeros(0, np.uint64), np.zeros((0, 0), np.uint32)
        kind, width = int(self.columns[which[0], Column.KIND]), int(self.columns[which[0], Column.WIDTH])
        width *= int(ENTRY[kind, 1])
        pairs = np.ascontiguousarray(self.columns[which, Column.PAIRS])
        total = int(pairs.sum())
        names = np.zeros(total, np.uint64)
        words = np.zeros((total, width), np.uint32)
        ats = self.batch.offsets[which] + HEADER_BYTES
        _take(self.batch.arena, ats, pairs, int(ENTRY[kind, 0]), width, names, words)
        return names, words


class Header:
    """What the headers of a stream's packets have in common; ``key`` is the job's. Of ``iteration`` they have the low half."""

    __slots__ = ("flags", "iteration", "job", "key", "sender", "version", "width")

    def __init__(
        self, job: int, key: int, sender: int, version: int, iteration: int, width: int, flags: int = 0
    ) -> None:
        self.job, self.key, self.sender, self.version = job, key, sender, version
        self.iteration, self.width, self.flags = low(iteration), width, flags


class EncodedPackets:
    """Packets of one stream: ``arena`` uint8, ``offsets`` and ``lengths`` int64[n].

    Packet *i* carries ``counts[i]`` entries; the last one, if ``end``, is the stream's END.
    """

    def __init__(
        self,
        kind: Kind,
        common: Header,
        counts: I64,
        names: U64 | None = None,
        words: NDArray[np.uint32] | None = None,
        *,
        base: int = 0,
        end: bool = True,
        next_version: int | None = None,
    ) -> None:
        """``names`` and ``words`` hold all entries in the order of the packets. ``base`` is the first sequence number."""
        total = len(counts) + end
        layout = frame(kind, common.width, int(counts.max(initial=1)))
        frames: NDArray[np.void] = np.zeros(total, layout)
        header = frames["header"]
        _fill(header, kind, common)
        header["version"], header["iteration"] = common.version, common.iteration
        header["width"], header["flags"] = common.width, common.flags
        header["sequence"] = base + np.arange(total) & SERIAL
        header["pairs"][: len(counts)] = counts
        packet = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(packet)) - np.repeat(np.cumsum(counts) - counts, counts)
        for field in ("rank", "key"):
            if names is not None and field in (layout["entry"].base.names or ()):
                frames["entry"][field][packet, place] = names
        if words is not None:
            frames["entry"]["value"][packet, place] = words
        self.arena: U8 = frames.view(np.uint8).reshape(-1)
        self.offsets: I64 = np.arange(total, dtype=np.int64) * layout.itemsize
        size = int(ENTRY[kind, 0] + 4 * common.width * ENTRY[kind, 1])
        self.lengths: I64 = np.full(total, EMPTY_BYTES, np.int64)
        self.lengths[: len(counts)] += counts * size
        if end:
            header["flags"][-1] |= Flag.END
            if next_version is not None:
                at = int(self.offsets[-1]) + HEADER_BYTES
                big = next_version.to_bytes(NEXT_BYTES, "big")
                self.arena[at : at + NEXT_BYTES] = np.frombuffer(big, np.uint8)
                self.lengths[-1] += NEXT_BYTES
        seal(self.arena, self.offsets, self.lengths, common.key)

    def __len__(self) -> int:
        return len(self.offsets)

    def number(self, sequences: I64, key: int) -> None:
        """Give the packets these sequence numbers instead of consecutive ones: they answer others."""
        big = sequences.astype(">u4").view(np.uint8).reshape(-1, 4)
        self.arena[self.offsets[:, None] + np.arange(12, 16)] = big
        seal(self.arena, self.offsets, self.lengths, key)

    def attempted(self, attempt: int, key: int) -> "EncodedPackets":
        """The same packets, in memory of their own, under another number of the attempt."""
        other = object.__new__(EncodedPackets)
        other.arena, other.offsets, other.lengths = self.arena.copy(), self.offsets, self.lengths
        flags = other.arena[self.offsets + 19]
        other.arena[self.offsets + 19] = flags & 0x0F | attempt << KIND_SHIFT
        seal(other.arena, other.offsets, other.lengths, key)
        return other

    def to(self, destination: int, which: I64) -> list[Transmission]:
        """Some packets, int64[n], to one destination; those of equal length together, the longest first."""
        offsets, lengths = self.offsets[which], self.lengths[which]
        return [
            Transmission(destination, self.arena, offsets[lengths == length], length)
            for length in np.unique(lengths)[::-1].tolist()
        ]

    def to_each(self, destinations: U64) -> list[Transmission]:
        """One packet to each of ``destinations`` uint64[n]."""
        return [
            transmission
            for destination in np.unique(destinations).tolist()
            for transmission in self.to(int(destination), np.flatnonzero(destinations == destination))
        ]


def _fill(header: NDArray[np.void], kind: Kind, common: Header) -> None:
    header["magic"], header["kind"] = MAGIC_VERSION, kind
    header["job"], header["sender"] = common.job, common.sender


def acknowledgements(
    parsed: ParsedBatch, which: I64, common: Header, life: int = 0, to: U64 | None = None
) -> list[Transmission]:
    """ACKs for packets of a batch, to where each came from or to ``to`` uint64[len(which)]. ``common.sender`` says who
    acknowledges, ``life`` in which life.
    """
    if not len(which):
        return []
    sources = parsed.batch.sources[which] if to is None else to
    order = np.argsort(sources, kind="stable")
    columns, sources = parsed.columns[which[order]], sources[order]
    frames = np.zeros(len(order), np.dtype([("header", HEADER), ("checksum", ">u4")]))
    header = frames["header"]
    _fill(header, Kind.ACK, common)
    header["version"] = columns[:, Column.VERSION]
    header["iteration"] = columns[:, Column.ITERATION]
    header["sequence"] = columns[:, Column.SEQUENCE]
    header["flags"] = columns[:, Column.KIND] << KIND_SHIFT | columns[:, Column.FLAGS] >> KIND_SHIFT
    header["pairs"] = life
    arena = frames.view(np.uint8).reshape(-1)
    offsets = np.arange(len(order), dtype=np.int64) * EMPTY_BYTES
    seal(arena, offsets, np.full(len(order), EMPTY_BYTES, np.int64), common.key)
    cuts = np.flatnonzero(np.diff(sources)) + 1
    return [
        Transmission(int(sources[part[0]]), arena, offsets[part], EMPTY_BYTES)
        for part in np.split(np.arange(len(order)), cuts)
    ]


def answers(kind: Kind, common: Header, sequences: I64, destinations: U64) -> list[Transmission]:
    """Packets without entries that answer others: one to each of ``destinations`` uint64[n], with ``sequences`` int64[n]."""
    if not len(destinations):
        return []
    packets = EncodedPackets(kind, common, np.zeros(len(destinations), np.int64), end=False)
    packets.number(sequences, common.key)
    return packets.to_each(destinations)
