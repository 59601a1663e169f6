"""Decorator that writes what passes to a capture file, which tshark, tcpdump and scapy read.

Classic pcap, microseconds, link type 101 (the record starts with the IP header). Devices hand over
payloads, so IPv4 and UDP headers are made up: right addresses, lengths and IPv4 checksum, and a UDP
checksum of zero, which means "none". Devices without ports (raw IPv4, port 0) get an IPv4 header of
protocol 253 only. What is a whole IPv4 packet already (:mod:`inanet.phy.whole`) is recorded as it is.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import types

from inanet.kernels.jit import njit
from inanet.phy.device import Device
from inanet.phy.gather import READABLE
from inanet.phy.mmsg import U32
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import I64, U8, U64, PacketBatch, Transmission
from inanet.wire.xagg import IP_PROTOCOL

LINKTYPE_RAW = 101
_MAGIC = 0xA1B2C3D4
_FILE_HEADER_BYTES = 24
_RECORD_HEADER_BYTES = 16
_IP_BYTES = 20
_UDP_BYTES = 8
_UDP_PROTOCOL = 17
#: largest record: an IPv4 packet
_SNAPLEN = 65535


@njit("void(uint8[::1], int64, uint64, int64)", cache=True, nogil=True)
def _put_big_endian(out: U8, at: int, value: int, size: int) -> None:
    for j in range(size):
        out[at + j] = np.uint8(np.uint64(value) >> np.uint64(8 * (size - 1 - j)) & np.uint64(0xFF))


@njit("void(uint8[::1], int64, int64, uint64, uint64, int64)", cache=True, nogil=True)
def _put_ip_header(out: U8, at: int, total: int, source: int, destination: int, protocol: int) -> None:
    """IPv4 header of 20 bytes: no options, don't fragment, time to live 64. Addresses are endpoints."""
    for j in range(_IP_BYTES):
        out[at + j] = 0
    out[at] = 0x45
    _put_big_endian(out, at + 2, np.uint64(total), 2)
    out[at + 6] = 0x40
    out[at + 8] = 64
    out[at + 9] = protocol
    _put_big_endian(out, at + 12, np.uint64(source) >> np.uint64(16), 4)
    _put_big_endian(out, at + 16, np.uint64(destination) >> np.uint64(16), 4)
    total_sum = np.int64(0)
    for j in range(0, _IP_BYTES, 2):
        total_sum += np.int64(out[at + j]) << 8 | np.int64(out[at + j + 1])
    while total_sum >> 16:
        total_sum = (total_sum & 0xFFFF) + (total_sum >> 16)
    _put_big_endian(out, at + 10, np.uint64(~total_sum & 0xFFFF), 2)


@njit(
    types.void(
        READABLE,
        types.int64[::1],
        types.int64[::1],
        types.uint64[::1],
        types.uint64[::1],
        types.int64,
        types.uint32[::1],
        types.uint8[::1],
    ),
    cache=True,
    nogil=True,
)
def write_records(
    arena: U8,
    offsets: I64,
    lengths: I64,
    sources: U64,
    destinations: U64,
    headers: int,
    stamp: U32,
    out: U8,
) -> None:
    """Capture records of all packets, one behind the other, into ``out``.

    ``headers`` is 28 for UDP, 20 for raw IPv4 and 0 for packets that have theirs; ``stamp`` the record's
    seconds and microseconds. Record headers are little-endian, whatever the machine; everything inside
    the packet is big-endian.
    """
    at = 0
    for i in range(len(offsets)):
        length = lengths[i]
        total = headers + length
        for word in range(4):
            value = np.uint64(stamp[word]) if word < 2 else np.uint64(total)
            for j in range(4):
                out[at + word * 4 + j] = np.uint8(value >> np.uint64(8 * j) & np.uint64(0xFF))
        at += 16
        protocol = _UDP_PROTOCOL if headers > _IP_BYTES else IP_PROTOCOL
        if headers:
            _put_ip_header(out, at, total, sources[i], destinations[i], protocol)
        if protocol == _UDP_PROTOCOL:
            _put_big_endian(out, at + 20, sources[i] & np.uint64(0xFFFF), 2)
            _put_big_endian(out, at + 22, destinations[i] & np.uint64(0xFFFF), 2)
            _put_big_endian(out, at + 24, np.uint64(8 + length), 2)
            _put_big_endian(out, at + 26, np.uint64(0), 2)
        at += headers
        for j in range(length):
            out[at + j] = arena[offsets[i] + j]
        at += length


class PcapWriter(Wrapper):
    """Captures both directions of ``device`` into the file ``path``.

    ``clock`` gives wall time in seconds since 1970. With ``max_bytes`` the file is rotated before it would
    grow beyond that: the full one becomes ``path.1``, the one before ``path.2``, and so on up to ``keep``
    of them; older ones are deleted. Sent packets are recorded when the device has taken them. ``whole``:
    the device's packets are whole IPv4 packets. Raises
    ``OSError`` when the file cannot be written and ``ValueError`` for a limit that holds no packet.
    """

    def __init__(
        self,
        device: Device,
        path: str | os.PathLike[str],
        clock: Callable[[], float],
        *,
        max_bytes: int | None = None,
        keep: int = 1,
        whole: bool = False,
    ) -> None:
        super().__init__(device)
        smallest = _FILE_HEADER_BYTES + _RECORD_HEADER_BYTES + _SNAPLEN
        if max_bytes is not None and max_bytes < smallest:
            raise ValueError(
                f"a capture file of {max_bytes} B may not hold a packet: allow at least {smallest} B"
            )
        self._path = Path(path)
        self._clock = clock
        self._max_bytes = max_bytes
        self._keep = keep
        self._headers = 0 if whole else _IP_BYTES + (_UDP_BYTES if device.endpoint & 0xFFFF else 0)
        self._own = np.uint64(device.endpoint)
        self._open()

    def receive(self) -> PacketBatch | None:
        """Receive and record."""
        return self._recorded(self._device.receive())

    def flush(self, now: float) -> PacketBatch | None:
        """Release held packets of the wrapped device, and record them."""
        return self._recorded(self._device.flush(now))

    def _recorded(self, batch: PacketBatch | None) -> PacketBatch | None:
        if batch is not None:
            own = np.full(len(batch), self._own)
            self._write(batch.arena, batch.offsets, batch.lengths, batch.sources, own)
        return batch

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Send and record what was taken."""
        taken = self._device.send(transmission, start)
        if taken:
            self._write(
                transmission.arena,
                transmission.offsets[start : start + taken],
                np.full(taken, transmission.length, np.int64),
                np.full(taken, self._own),
                np.full(taken, transmission.destination, np.uint64),
            )
        return taken

    def close(self) -> None:
        """Close the device and complete the file."""
        self._device.close()
        self._file.close()

    def _write(self, arena: U8, offsets: I64, lengths: I64, sources: U64, destinations: U64) -> None:
        """Append records, in several files if they do not fit one."""
        sizes = lengths + (_RECORD_HEADER_BYTES + self._headers)
        now = self._clock()
        stamp = np.array([int(now), int(now % 1 * 1_000_000)], np.uint32)
        first = 0
        while first < len(offsets):
            last = len(offsets)
            if self._max_bytes is not None:
                room = self._max_bytes - self._size
                last = first + int(np.searchsorted(np.cumsum(sizes[first:]), room, "right"))
            if last == first:
                self._rotate()
                continue
            out = np.empty(int(sizes[first:last].sum()), np.uint8)
            part = slice(first, last)
            write_records(
                arena,
                offsets[part],
                lengths[part],
                sources[part],
                destinations[part],
                self._headers,
                stamp,
                out,
            )
            self._file.write(out.data)
            self._size += len(out)
            first = last

    def _open(self) -> None:
        self._file = self._path.open("wb")
        header = np.array([_MAGIC, 4 << 16 | 2, 0, 0, _SNAPLEN, LINKTYPE_RAW], "<u4")
        self._file.write(header.tobytes())
        self._size = _FILE_HEADER_BYTES

    def _rotate(self) -> None:
        self._file.close()
        for age in range(self._keep, 0, -1):
            older = self._numbered(age - 1)
            if older.exists():
                older.replace(self._numbered(age))
        self._open()

    def _numbered(self, age: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{age}") if age else self._path
