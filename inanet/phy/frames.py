"""Building super-frames: headers made once per frame, packets gathered from where they lie.

The frame layout is that of :mod:`inanet.phy.vnet`.
"""

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.device import is_group
from inanet.phy.mmsg import address_in_memory, put_packets
from inanet.phy.vnet import (
    ETHERNET_BYTES,
    ETHERTYPE_IPV4,
    GSO_UDP_L4,
    HEADER_BYTES,
    IP_BYTES,
    NEEDS_CSUM,
    UDP,
    UDP_BYTES,
    internet_sum,
    put16,
)
from inanet.wire.batch import I64, U8, U64


@njit("void(uint8[::1], int64, uint8[::1], int64, int64, int64, int64)", cache=True, nogil=True)
def put_headers(out: U8, at: int, template: U8, link: int, packets: int, length: int, payload: int) -> None:
    """Write the headers of a frame with ``packets`` packets of ``length`` bytes, ``payload`` in all.

    ``template`` is a header with everything that the frames of a transmission share; virtio-net header,
    ``link`` bytes, IPv4 without options, UDP. The UDP checksum is left to whoever cuts the segments.
    """
    for j in range(len(template)):
        out[at + j] = template[j]
    if packets > 1:
        out[at + 1] = GSO_UDP_L4
        out[at + 4] = np.uint8(length & 0xFF)
        out[at + 5] = np.uint8(length >> 8)
    ip = at + HEADER_BYTES + link
    udp = ip + IP_BYTES
    put16(out, ip + 2, IP_BYTES + UDP_BYTES + payload)
    put16(out, ip + 10, ~internet_sum(out, ip, IP_BYTES, 0) & 0xFFFF)
    put16(out, udp + 4, UDP_BYTES + payload)
    put16(out, udp + 6, internet_sum(out, ip + 12, 8, UDP + UDP_BYTES + payload))


@njit(
    "int64(uint8[::1], int64[::1], int64, int64, int64, uint64[:, ::1], uint64[:, ::1], uint64,"
    " uint8[::1], uint64, uint8[::1], int64)",
    cache=True,
    nogil=True,
)
def gather_frames(
    arena: U8,
    offsets: I64,
    start: int,
    length: int,
    segments: int,
    words: U64,
    iovecs: U64,
    iovecs_base: int,
    headers: U8,
    headers_base: int,
    template: U8,
    link: int,
) -> int:
    """As :func:`inanet.phy.mmsg.gather`, with an iovec of headers before the packets of each frame.

    ``headers`` has ``len(template)`` bytes for each message and lies at ``headers_base``; ``iovecs`` has room
    for ``segments + 1`` rows per message.
    """
    base = np.uint64(arena.ctypes.data)
    last = len(arena) - length
    at = start
    used = 0
    size = len(template)
    for i in range(len(words)):
        packets = min(segments, len(offsets) - at)
        if packets <= 0:
            return i
        put_headers(headers, i * size, template, link, packets, length, packets * length)
        first = used
        iovecs[used, 0] = headers_base + np.uint64(i * size)
        iovecs[used, 1] = np.uint64(size)
        used = put_packets(iovecs, used + 1, base, offsets, at, packets, length, last)
        if used < 0:
            return -1
        at += packets
        words[i, 2] = iovecs_base + np.uint64(first * 16)
        words[i, 3] = np.uint64(used - first)
    return len(words)


class FrameTable:
    """Headers and gather lists for up to ``messages`` super-frames of one transmission.

    ``source`` is the own endpoint, ``hardware`` the own MAC address, or ``b""`` where frames begin with the
    IP header (TUN). ``words`` are ``mmsghdr`` rows as in :mod:`inanet.phy.mmsg`.
    """

    def __init__(self, messages: int, segments: int, source: int, hardware: bytes) -> None:
        self.link = ETHERNET_BYTES if hardware else 0
        size = HEADER_BYTES + self.link + IP_BYTES + UDP_BYTES
        self.words: U64 = np.zeros((messages, 8), np.uint64)
        self.template: U8 = np.zeros(size, np.uint8)
        self._iovecs: U64 = np.zeros((messages * (segments + 1), 2), np.uint64)
        self._headers: U8 = np.zeros(messages * size, np.uint8)
        self._iovecs_address = address_in_memory(self._iovecs)
        self._headers_address = address_in_memory(self._headers)
        template, ip = self.template, HEADER_BYTES + self.link
        template[0] = NEEDS_CSUM
        template[2] = size - HEADER_BYTES
        template[6] = self.link + IP_BYTES
        template[8] = 6
        if hardware:
            template[16:22] = np.frombuffer(hardware, np.uint8)
            template[22:24] = (ETHERTYPE_IPV4 >> 8, ETHERTYPE_IPV4 & 0xFF)
        template[ip] = 0x45
        # don't fragment: a wrong MTU should be heard of, and identifications need not differ
        template[ip + 6] = 0x40
        template[ip + 9] = UDP
        self._put_endpoint(ip + 12, ip + 20, source)

    def _put_endpoint(self, address_at: int, port_at: int, value: int) -> None:
        self.template[address_at : address_at + 4] = np.frombuffer((value >> 16).to_bytes(4, "big"), np.uint8)
        self.template[port_at : port_at + 2] = (value >> 8 & 0xFF, value & 0xFF)

    def address(self, destination: int, hardware: bytes = b"") -> None:
        """Set destination endpoint and, if frames have link headers, destination MAC address.

        Packets to multicast groups live for one hop.
        """
        ip = HEADER_BYTES + self.link
        if self.link:
            self.template[10:16] = np.frombuffer(hardware, np.uint8)
        self.template[ip + 8] = 1 if is_group(destination) else 64
        self._put_endpoint(ip + 16, ip + 22, destination)

    def gather(self, arena: U8, offsets: I64, start: int, length: int, segments: int) -> int:
        """Fill the table from ``offsets[start:]``; returns how many messages. See :func:`gather_frames`."""
        return int(
            gather_frames(
                arena,
                offsets,
                start,
                length,
                segments,
                self.words,
                self._iovecs,
                self._iovecs_address,
                self._headers,
                self._headers_address,
                self.template,
                self.link,
            )
        )
