"""Super-frames as packet sockets and TUN interfaces carry them: a virtio-net header in front of each frame.

The header (10 bytes, native byte order) says what has been left undone: a checksum to be filled in, and equal
segments to be cut. A super-frame of UDP datagrams stays one frame all the way between two such endpoints.

====== ==== =========== ====================================================================================
offset size field       meaning
====== ==== =========== ====================================================================================
0      1    flags       1: the checksum at ``csum_start + csum_offset`` is that of the pseudo-header only;
                        2: the checksum was found to be right
1      1    gso_type    0 none, 1 TCPv4, 3 UDP to be fragmented, 4 TCPv6, 5 UDP segments; bit 7 ECN
2      2    hdr_len     bytes of headers that precede the segments
4      2    gso_size    payload of a segment
6      2    csum_start  where the sum begins, from the start of the frame: the UDP header
8      2    csum_offset where it goes, from there
====== ==== =========== ====================================================================================

Source: Virtual I/O Device (VIRTIO) 1.2, section 5.1.6.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, U64, PacketBatch

HEADER_BYTES = 10
NEEDS_CSUM = 1
DATA_VALID = 2
GSO_NONE = 0
GSO_UDP_L4 = 5
ETHERNET_BYTES = 14
ETHERTYPE_IPV4 = 0x0800
#: IPv4 header without options, and UDP header
IP_BYTES = 20
UDP_BYTES = 8
UDP = 17
#: room for a virtio-net header, link headers and the largest IPv4 packet, divisible by 4
FRAME_BYTES = 65536 + 64


class Refusal(IntEnum):
    """Why a received frame was no batch of packets for this node; indexes the counts of :func:`parse`."""

    #: lengths that contradict each other
    MALFORMED = 0
    #: for another address or port, not UDP over IPv4, or an IP fragment
    FOREIGN = 1
    BAD_CHECKSUM = 2


@dataclass(slots=True)
class FrameBatch:
    """Whole frames. Frame *i* lies at ``arena[offsets[i] : offsets[i] + lengths[i]]``, virtio-net header
    first.

    ``arena`` is 1-D, uint8, C-contiguous, and valid until the port is read again.
    """

    arena: U8
    offsets: I64
    lengths: I64

    def __len__(self) -> int:
        return len(self.offsets)

    def frame(self, index: int) -> bytes:
        """Copy of one frame with its virtio-net header; for tests and traces."""
        start = int(self.offsets[index])
        return self.arena[start : start + int(self.lengths[index])].tobytes()

    def select(self, chosen: I64) -> "FrameBatch":
        """The frames with these indices, in this order, without copying them."""
        return FrameBatch(self.arena, self.offsets[chosen], self.lengths[chosen])


@njit("int64(uint8[::1], int64)", cache=True, nogil=True)
def big16(arena: U8, at: int) -> int:
    """The big-endian 16-bit word at ``at``."""
    return int(arena[at]) << 8 | int(arena[at + 1])


@njit("void(uint8[::1], int64, int64)", cache=True, nogil=True)
def put16(arena: U8, at: int, value: int) -> None:
    """Write a big-endian 16-bit word."""
    arena[at] = np.uint8(value >> 8 & 0xFF)
    arena[at + 1] = np.uint8(value & 0xFF)


@njit("int64(uint8[::1], int64, int64, int64)", cache=True, nogil=True)
def internet_sum(arena: U8, at: int, length: int, total: int) -> int:
    """Ones' complement sum of big-endian 16-bit words on top of ``total``, folded to 16 bits (RFC 1071)."""
    for i in range(at, at + length - 1, 2):
        total += int(arena[i]) << 8 | int(arena[i + 1])
    if length & 1:
        total += int(arena[at + length - 1]) << 8
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@njit(
    "int64(uint8[::1], int64[::1], int64[::1], int64, uint64[::1], int64[:, ::1], uint64[::1], int64[::1])",
    cache=True,
    nogil=True,
)
def parse(
    arena: U8, starts: I64, ends: I64, link: int, own: U64, places: I64, sources: U64, refused: I64
) -> int:
    """Find UDP payloads in received frames; returns how many packets they hold.

    Frame *i* is ``arena[starts[i] : ends[i]]``: virtio-net header, ``link`` bytes of link header (14 or 0),
    IPv4, UDP. ``own`` are the endpoints that this node takes. ``places[i]`` becomes (offset of the first
    packet, bytes of all its packets, bytes per packet), with a bytes per packet of -1 for frames that are
    refused and then counted in ``refused`` by :class:`Refusal`. ``sources[i]`` becomes an endpoint. Checksums
    that nobody before has verified, and will not be filled in later, are verified here.
    """
    packets = 0
    for i in range(len(starts)):
        places[i, 2] = -1
        head, end = starts[i], ends[i]
        ip = head + HEADER_BYTES + link
        if end - ip < IP_BYTES + UDP_BYTES:
            refused[0] += 1
            continue
        header = np.int64(arena[ip] & 0xF) * 4
        if (link and big16(arena, ip - 2) != ETHERTYPE_IPV4) or arena[ip] >> 4 != 4 or arena[ip + 9] != UDP:
            refused[1] += 1
            continue
        total = big16(arena, ip + 2)
        udp = ip + header
        if header < IP_BYTES or ip + total > end or total < header + UDP_BYTES:
            refused[0] += 1
            continue
        kind = arena[head + 1] & 0x7F
        if big16(arena, ip + 6) & 0x3FFF or (kind != GSO_NONE and kind != GSO_UDP_L4):
            refused[1] += 1
            continue
        destination = np.uint64(0)
        source = np.uint64(0)
        for j in range(4):
            source = source << np.uint64(8) | np.uint64(arena[ip + 12 + j])
            destination = destination << np.uint64(8) | np.uint64(arena[ip + 16 + j])
        source = source << np.uint64(16) | np.uint64(big16(arena, udp))
        destination = destination << np.uint64(16) | np.uint64(big16(arena, udp + 2))
        mine = False
        for j in range(len(own)):
            mine |= own[j] == destination
        if not mine:
            refused[1] += 1
            continue
        length = big16(arena, udp + 4)
        if length < UDP_BYTES or length > total - header:
            refused[0] += 1
            continue
        if internet_sum(arena, ip, header, 0) != 0xFFFF:
            refused[2] += 1
            continue
        open_question = arena[head] & (NEEDS_CSUM | DATA_VALID) == 0 and big16(arena, udp + 6) != 0
        pseudo = internet_sum(arena, ip + 12, 8, UDP + length)
        if open_question and internet_sum(arena, udp, length, pseudo) != 0xFFFF:
            refused[2] += 1
            continue
        payload = length - UDP_BYTES
        segment = payload
        if kind == GSO_UDP_L4:
            size = np.int64(arena[head + 4]) | np.int64(arena[head + 5]) << 8
            if size == 0:
                refused[0] += 1
                continue
            segment = min(size, payload)
        places[i, 0] = udp + UDP_BYTES
        places[i, 1] = payload
        places[i, 2] = segment
        sources[i] = source
        packets += 1 if payload == 0 else (payload + segment - 1) // segment
    return packets


@njit("void(int64[:, ::1], uint64[::1], int64[::1], int64[::1], uint64[::1])", cache=True, nogil=True)
def lay_out(places: I64, frame_sources: U64, offsets: I64, lengths: I64, sources: U64) -> None:
    """Lay out the packets that :func:`parse` has found; the last of a super-frame may be shorter."""
    at = 0
    for i in range(len(places)):
        segment = places[i, 2]
        if segment < 0:
            continue
        done = np.int64(0)
        while True:
            offsets[at] = places[i, 0] + done
            lengths[at] = min(segment, places[i, 1] - done)
            sources[at] = frame_sources[i]
            at += 1
            done += segment
            if done >= places[i, 1]:
                break


class Unpacker:
    """Turns received frames into batches; counts what it refuses. ``link`` is the link header's length."""

    def __init__(self, messages: int, link: int) -> None:
        self._link = link
        self._places: I64 = np.zeros((messages, 3), np.int64)
        self._sources: U64 = np.zeros(messages, np.uint64)
        self._refused: I64 = np.zeros(len(Refusal), np.int64)

    def unpack(self, arena: U8, starts: I64, ends: I64, own: U64) -> PacketBatch:
        """Packets of the frames ``arena[starts[i] : ends[i]]`` for the endpoints ``own``, in order."""
        count = len(starts)
        places, frame_sources = self._places[:count], self._sources[:count]
        total = int(parse(arena, starts, ends, self._link, own, places, frame_sources, self._refused))
        offsets, lengths = np.empty(total, np.int64), np.empty(total, np.int64)
        sources = np.empty(total, np.uint64)
        lay_out(places, frame_sources, offsets, lengths, sources)
        return PacketBatch(arena, offsets, lengths, sources)

    def counters(self) -> dict[str, int]:
        """Frames refused so far, by reason: ``rx_malformed``, ``rx_foreign``, ``rx_bad_checksum``."""
        return {f"rx_{reason.name.lower()}": int(self._refused[reason]) for reason in Refusal}
