"""What leaves as frames: runs of packets put back into super-frames under their flow's headers, nothing copied."""

import ctypes
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.frames import FrameTable
from inanet.phy.mmsg import HEADER_WORDS, address_in_memory
from inanet.phy.udp import MAX_PAYLOAD
from inanet.phy.vnet import (
    ETHERTYPE_IPV4,
    GSO_UDP_L4,
    HEADER_BYTES,
    IP_BYTES,
    UDP,
    UDP_BYTES,
    FrameBatch,
    big16,
    internet_sum,
    put16,
)
from inanet.wire.batch import I64, U8, U64

#: super-frames or raw frames per system call, and segments of a super-frame
MESSAGES = 64
SEGMENTS = 128
RAW_MESSAGES = 1024


class FrameSender(Protocol):
    """What sends frames out of an interface: :class:`inanet.phy.port.FramePort`, or one of TUN."""

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        """Send whole frames; returns how many were taken."""
        ...

    def send_messages(self, words: U64, first: int, count: int, sizes: I64) -> int:
        """Send frames of a message table; returns how many were taken."""
        ...


@njit(
    "int64(uint8[::1], int64[::1], int64, int64, uint64, int64, uint64[:, ::1], uint64[:, ::1], uint64)",
    cache=True,
    nogil=True,
)
def gather_raw(
    arena: U8,
    offsets: I64,
    start: int,
    length: int,
    header: int,
    header_bytes: int,
    words: U64,
    iovecs: U64,
    iovecs_base: int,
) -> int:
    """A message for each packet from ``offsets[start:]``: the header at address ``header``, which all share, and the
    packet. Returns how many messages, or -1 for a packet that is not wholly inside the arena.
    """
    base = np.uint64(arena.ctypes.data)
    last = len(arena) - length
    count = min(len(words), len(offsets) - start)
    for i in range(count):
        at = offsets[start + i]
        if not 0 <= at <= last:
            return -1
        iovecs[2 * i, 0] = header
        iovecs[2 * i, 1] = np.uint64(header_bytes)
        iovecs[2 * i + 1, 0] = base + np.uint64(at)
        iovecs[2 * i + 1, 1] = np.uint64(length)
        words[i, 2] = iovecs_base + np.uint64(32 * i)
        words[i, 3] = np.uint64(2)
    return count


def mark_congestion(arena: U8, ip: int, end: int) -> None:
    """Set congestion experienced in the IPv4 header at ``ip``, of a packet that ends at ``end``, if its sender
    understands that (RFC 3168).
    """
    if end - ip < IP_BYTES or arena[ip] >> 4 != 4 or arena[ip + 1] & 3 == 0:
        return
    size = int(arena[ip] & 0xF) * 4
    if not IP_BYTES <= size <= end - ip:
        return
    arena[ip + 1] |= 3
    arena[ip + 10 : ip + 12] = 0
    put16(arena, ip + 10, ~internet_sum(arena, ip, size, 0) & 0xFFFF)


def segments_of(arena: U8, at: int, end: int, link: int) -> tuple[U8, int, int, int] | None:
    """Headers, offset of the payload, bytes of it and of a segment, of a super-frame of UDP datagrams; ``None`` for any
    other frame ``arena[at:end]`` (virtio-net header first).
    """
    ip = at + HEADER_BYTES + link
    body = ip + IP_BYTES + UDP_BYTES
    if end < body or arena[at + 1] & 0x7F != GSO_UDP_L4 or arena[ip] != 0x45 or arena[ip + 9] != UDP:
        return None
    if link and big16(arena, ip - 2) != ETHERTYPE_IPV4:
        return None
    segment = int(arena[at + 4]) | int(arena[at + 5]) << 8
    payload = big16(arena, ip + IP_BYTES + 4) - UDP_BYTES
    if segment == 0 or payload <= segment or body + payload > end:
        return None
    return arena[at:body].copy(), body, payload, segment


class Frames:
    """Whole frames out of one interface."""

    def __init__(self, sender: FrameSender, frames: FrameBatch) -> None:
        self._sender = sender
        self._frames = frames

    def __len__(self) -> int:
        return len(self._frames)

    def send(self, start: int) -> int:
        return self._sender.send(self._frames, start)

    def rest(self, start: int) -> tuple["Frames", int]:
        return self._copy([self._frames.frame(i) for i in range(start, len(self._frames))])

    def _copy(self, frames: list[bytes]) -> tuple["Frames", int]:
        lengths = np.array([len(frame) for frame in frames], np.int64)
        arena = np.frombuffer(bytearray(b"").join(frames), np.uint8)
        return Frames(self._sender, FrameBatch(arena, np.cumsum(lengths) - lengths, lengths)), len(arena)


class Gathered(Frames):
    """Frames of a message table, which is filled anew for the next ones."""

    def __init__(self, sender: FrameSender, words: U64, sizes: I64) -> None:
        self._sender = sender
        self._words = words
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def send(self, start: int) -> int:
        return self._sender.send_messages(self._words, start, len(self) - start, self._sizes[start:])

    def rest(self, start: int) -> tuple[Frames, int]:
        frames = []
        for iovecs, count in self._words[start : len(self), 2:4].tolist():
            pairs = (ctypes.c_uint64 * (2 * count)).from_address(iovecs)
            frames.append(b"".join(ctypes.string_at(pairs[2 * i], pairs[2 * i + 1]) for i in range(count)))
        return self._copy(frames)


class Rebuilder:
    """Message tables for runs of packets. ``link`` is the length of link headers, 14 or 0 (TUN).

    Headers are what :class:`inanet.switch.framed.Flows` gives: virtio-net header, link header, IPv4 and, unless the frames
    are raw, UDP.
    """

    def __init__(self, link: int) -> None:
        self._link = link
        self._table = FrameTable(MESSAGES, SEGMENTS, 0, bytes(6) if link else b"")
        self._vnet = self._table.template[:HEADER_BYTES].copy()
        self._raw_words: U64 = np.zeros((RAW_MESSAGES, HEADER_WORDS), np.uint64)
        self._raw_iovecs: U64 = np.zeros((2 * RAW_MESSAGES, 2), np.uint64)

    def frames(
        self, sender: FrameSender, header: U8, raw: bool, arena: U8, offsets: I64, length: int
    ) -> Iterator[tuple[Gathered, int]]:
        """The frames of a run, in portions that must be sent or copied before the next; each with its packets per
        frame.
        """
        if raw:
            return self._raw(sender, header, arena, offsets, length)
        return self._udp(sender, header, arena, offsets, length)

    def _udp(
        self, sender: FrameSender, header: U8, arena: U8, offsets: I64, length: int
    ) -> Iterator[tuple[Gathered, int]]:
        table, ip = self._table, HEADER_BYTES + self._link
        table.template[:] = header
        table.template[:HEADER_BYTES] = self._vnet
        # both are sums over what the gather kernel writes
        table.template[ip + 10 : ip + 12] = 0
        segments = min(SEGMENTS, MAX_PAYLOAD // max(length, 1))
        for start in range(0, len(offsets), MESSAGES * segments):
            messages = table.gather(arena, offsets, start, length, segments)
            sizes = np.full(messages, len(header) + segments * length, np.int64)
            rest = len(offsets) - start - (messages - 1) * segments
            sizes[-1] = len(header) + min(segments, rest) * length
            yield Gathered(sender, table.words, sizes), segments

    def _raw(
        self, sender: FrameSender, header: U8, arena: U8, offsets: I64, length: int
    ) -> Iterator[tuple[Gathered, int]]:
        block = header[: HEADER_BYTES + self._link + IP_BYTES].copy()
        block[:HEADER_BYTES] = 0
        for start in range(0, len(offsets), RAW_MESSAGES):
            messages = gather_raw(
                arena,
                offsets,
                start,
                length,
                np.uint64(address_in_memory(block)),
                len(block),
                self._raw_words,
                self._raw_iovecs,
                np.uint64(address_in_memory(self._raw_iovecs)),
            )
            yield Gathered(sender, self._raw_words, np.full(messages, len(block) + length, np.int64)), 1
