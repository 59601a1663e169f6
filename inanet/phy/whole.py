"""Devices whose packets are whole IPv4 packets: for transports that choose, and protect, what stands in their IP headers.

RoCEv2 is one: its checksum covers IPv4 identification, addresses and UDP ports. Such packets go out one by one, never as
super-frames, and what other hosts send as super-frames is not for these devices. They take UDP to one address and port; the
packets of a batch or transmission begin with the IPv4 header, without options, and a destination's port is not looked at.

Three ways to the wire, each like the device of the same kind for payloads: raw sockets (:mod:`inanet.phy.rawip`), AF_PACKET
(:mod:`inanet.phy.packet`) and TUN (:mod:`inanet.phy.tun`).
"""

import errno
import socket

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.bpf import DROP_ALL, Instruction, attach
from inanet.phy.device import check_transmission
from inanet.phy.frames import FrameTable
from inanet.phy.mmsg import (
    HEADER_WORDS,
    IP_MTU_DISCOVER,
    IP_PMTUDISC_DO,
    MSG_TRUNC,
    U32,
    ReceiveTable,
    SendTable,
    address_in_memory,
    request_buffer,
    system_error,
    transmit,
)
from inanet.phy.packet import AddressedTable, PacketDevice
from inanet.phy.rawip import BUFFER_BYTES, MESSAGES, TRUESIZE
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE, SocketDevice
from inanet.phy.tun import MTU, TunDevice
from inanet.phy.udp import UdpDevice
from inanet.phy.vnet import HEADER_BYTES, IP_BYTES, UDP_BYTES
from inanet.wire.batch import I64, U8, U64, PacketBatch, Transmission
from inanet.wire.endpoint import address_of, endpoint, show
from inanet.wire.roce import PORT

#: an IPv4 packet
MAX_PACKET = 65535
_IP_HDRINCL = 3
_STRIPPED = IP_BYTES + UDP_BYTES
#: receive buffer of the socket that holds the port; its filter lets nothing into it
_LEAST_BUFFER = 4096


def port_filter(own: int) -> list[Instruction]:
    """Takes unfragmented UDP for an endpoint on a raw IPv4 socket, which sees packets from the IP header on."""
    return [
        (0x30, 0, 0, 9),
        (0x15, 0, 8, socket.IPPROTO_UDP),
        (0x28, 0, 0, 6),
        (0x45, 6, 0, 0x3FFF),
        (0x20, 0, 0, 16),
        (0x15, 0, 4, own >> 16),
        (0xB1, 0, 0, 0),
        (0x48, 0, 0, 2),
        (0x15, 0, 1, own & 0xFFFF),
        (0x06, 0, 0, 0xFFFFFFFF),
        (0x06, 0, 0, 0),
    ]


@njit(
    "int64(uint32[:, ::1], uint8[::1], int64, int64, int64[::1], int64[::1], uint64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def find_packets(
    headers: U32, arena: U8, count: int, stride: int, offsets: I64, lengths: I64, sources: U64
) -> int:
    """Find the whole packets among ``count`` messages at ``i * stride``; returns how many there are."""
    kept = 0
    for i in range(count):
        length = np.int64(headers[i, 14])
        at = i * stride
        if headers[i, 12] & MSG_TRUNC or length < _STRIPPED or arena[at] != 0x45:
            continue
        source = np.uint64(0)
        for j in range(12, 16):
            source = source << np.uint64(8) | np.uint64(arena[at + j])
        port = np.uint64(arena[at + 20]) << np.uint64(8) | np.uint64(arena[at + 21])
        offsets[kept], lengths[kept] = at, length
        sources[kept] = source << np.uint64(16) | port
        kept += 1
    return kept


@njit(
    "int64(uint8[::1], int64[::1], int64, int64, uint64[:, ::1], uint64[:, ::1], uint64, uint64, uint64)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def gather_packets(
    arena: U8,
    offsets: I64,
    start: int,
    length: int,
    words: U64,
    iovecs: U64,
    iovecs_base: int,
    header: int,
    header_bytes: int,
) -> int:
    """One message per packet from ``offsets[start:]``, each of the header at address ``header`` and the packet.

    Returns the number of messages, or -1 for a packet outside the arena.
    """
    base = np.uint64(arena.ctypes.data)
    last = len(arena) - length
    count = min(len(words), len(offsets) - start)
    for i in range(count):
        at = offsets[start + i]
        if not 0 <= at <= last:
            return -1
        iovecs[2 * i, 0], iovecs[2 * i, 1] = header, header_bytes
        iovecs[2 * i + 1, 0], iovecs[2 * i + 1, 1] = base + np.uint64(at), np.uint64(length)
        words[i, 2] = iovecs_base + np.uint64(32 * i)
        words[i, 3] = 2
    return count


class WholeTable(FrameTable):
    """Up to ``messages`` packets of one transmission behind the same virtio-net and link header."""

    def __init__(self, messages: int, source: int, hardware: bytes) -> None:
        super().__init__(messages, 1, source, hardware)
        #: nothing is left to be done to these packets: no checksum, no segments
        self.template[:HEADER_BYTES] = 0

    def gather(self, arena: U8, offsets: I64, start: int, length: int, segments: int) -> int:
        return int(
            gather_packets(
                arena,
                offsets,
                start,
                length,
                self.words,
                self._iovecs,
                self._iovecs_address,
                address_in_memory(self.template),
                HEADER_BYTES + self.link,
            )
        )

    def aim(self, destination: int, segment: int) -> None:
        """Nothing to do: :meth:`FrameTable.address` was told."""

    def send(self, fd: int, first: int, messages: int) -> int:
        """One ``sendmmsg``, as for :meth:`inanet.phy.mmsg.SendTable.send`."""
        return transmit(fd, address_in_memory(self.words) + first * HEADER_WORDS * 8, messages - first)


def _whole(batch: PacketBatch) -> PacketBatch:
    """The packets whose payloads these are. Where there are options, what comes out is no packet, as promised."""
    return PacketBatch(batch.arena, batch.offsets - _STRIPPED, batch.lengths + _STRIPPED, batch.sources)


class RawWholeDevice(SocketDevice):
    """A raw socket of ``address``, an address of this host, that takes UDP to ``port`` and sends what it is given.

    The kernel holds the port (and answers nothing on it), routes, and fragments nothing. Buffers as for
    :class:`inanet.phy.udp.UdpDevice`. Raises ``PermissionError`` without ``CAP_NET_RAW`` and ``OSError`` naming the address.
    """

    headroom = 0
    max_message = MAX_PACKET

    def __init__(
        self, address: str, port: int = PORT, *, rcvbuf: int = RCVBUF, sndbuf: int = SNDBUF, hold: bool = True
    ) -> None:
        self._holder = UdpDevice(address, port, rcvbuf=_LEAST_BUFFER) if hold else None
        own = endpoint(address, port)
        try:
            try:
                sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
            except PermissionError as error:
                raise PermissionError(
                    error.errno,
                    "raw IPv4 needs CAP_NET_RAW: run as root or grant it (setcap cap_net_raw+ep, or "
                    "AmbientCapabilities= in the systemd unit)",
                ) from error
            try:
                if self._holder is not None:
                    attach(self._holder._socket, DROP_ALL)
                attach(sock, port_filter(own))
                sock.setsockopt(socket.IPPROTO_IP, _IP_HDRINCL, 1)
                request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
                request_buffer(sock, SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
                sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
                try:
                    sock.bind((address, 0))
                except OSError as error:
                    raise OSError(error.errno, f"cannot bind raw IPv4 {address}: {error.strerror}") from error
                receive = ReceiveTable(MESSAGES, BUFFER_BYTES)
                super().__init__(sock, receive, SendTable(MESSAGES, 1), 1, own)
            except BaseException:
                sock.close()
                raise
        except BaseException:
            if self._holder is not None:
                self._holder.close()
            raise

    @property
    def rx_budget(self) -> int:
        return max(self.rcvbuf // TRUESIZE, 1)

    def _unpack(self, count: int) -> PacketBatch:
        return self._unpack_by(find_packets, count)

    def close(self) -> None:
        """Close the socket and let go of the port; counters stay readable."""
        super().close()
        if self._holder is not None:
            self._holder.close()


class PacketWholeDevice(PacketDevice):
    """Packets taken from and given to ``interface``, past the kernel's IP stack; see :class:`~inanet.phy.packet.PacketDevice`.

    What needs the kernel to resolve its destination first leaves through a raw socket, unchanged.
    """

    headroom = 0
    max_message = MAX_PACKET
    segments = 1
    frames = MESSAGES
    frame_bytes = BUFFER_BYTES

    def __init__(
        self, interface: str, address: str, port: int = PORT, *, rcvbuf: int = RCVBUF, sndbuf: int = SNDBUF
    ) -> None:
        super().__init__(interface, address, port, rcvbuf=rcvbuf, sndbuf=sndbuf)
        try:
            self._raw = RawWholeDevice(address, port, rcvbuf=_LEAST_BUFFER, sndbuf=sndbuf, hold=False)
            attach(self._raw._socket, DROP_ALL)
        except BaseException:
            super().close()
            raise

    @property
    def rx_budget(self) -> int:
        return max(self.rcvbuf // TRUESIZE, 1)

    def _make_table(self) -> AddressedTable:
        return WholeTable(MESSAGES, self._kernel.endpoint, self._interface.hardware)

    def _send_through_kernel(self, transmission: Transmission, start: int) -> int:
        return self._raw.send(transmission, start)

    def _unpack(self, count: int) -> PacketBatch:
        return _whole(super()._unpack(count))

    def close(self) -> None:
        super().close()
        self._raw.close()


class TunWholeDevice(TunDevice):
    """``address``, which no interface of this host has, at the end of a virtual cable; see :class:`~inanet.phy.tun.TunDevice`."""

    headroom = 0

    def __init__(self, address: str, port: int = PORT, *, name: str = "ina%d", mtu: int = MTU) -> None:
        super().__init__(address, port, name=name, mtu=mtu)
        self._packets = WholeTable(MESSAGES, self._endpoint, b"")

    def receive(self) -> PacketBatch | None:
        batch = super().receive()
        return None if batch is None else _whole(batch)

    def send(self, transmission: Transmission, start: int = 0) -> int:
        check_transmission(transmission)
        length, total = transmission.length, len(transmission)
        if length > self._port.mtu:
            raise OSError(
                errno.EMSGSIZE,
                f"packets of {length} B to {show(transmission.destination)} need an MTU of {length} B; interface "
                f"{self.interface} has {self._port.mtu}: raise it",
            )
        at = start
        while at < total:
            count = self._packets.gather(transmission.arena, transmission.offsets, at, length, 1)
            for iovecs, pieces in self._packets.words[:count, 2:4].tolist():
                code = self._port.write(iovecs, pieces)
                if code == errno.EIO:
                    # the interface is down: lost, as on any network
                    self._counts["path_errors"] += 1
                elif code:
                    raise system_error(code, f"sending to {address_of(transmission.destination)[0]}")
            at += count
        self._counts["tx_superframes"] += total - start
        self._counts["tx_packets"] += total - start
        self._counts["tx_bytes"] += (total - start) * length
        return total - start
