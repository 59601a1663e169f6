"""AF_PACKET: super-frames taken from and given to one interface, past the kernel's IP stack.

What arrives is the same UDP as for :mod:`inanet.phy.udp`, so peers need not use the same device. Two things
still go through the kernel: it holds the UDP port (and answers nothing on it, as its own copy of each packet
is discarded by a filter), and it resolves neighbours: the first packets to a new destination, and all packets
to destinations behind a router, leave through that socket.
"""

import errno
import socket
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from inanet.phy.bpf import DROP_ALL, attach, udp_filter
from inanet.phy.device import is_group
from inanet.phy.frames import FrameTable
from inanet.phy.interfaces import Neighbours, examine
from inanet.phy.mmsg import HEADER_WORDS, ReceiveTable, address_in_memory, request_buffer, transmit
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE, OutgoingTable, SocketDevice
from inanet.phy.udp import FRAGMENTS, MAX_PAYLOAD, SEGMENTS, SUPERFRAMES, TRUESIZE, UdpDevice
from inanet.phy.vnet import ETHERNET_BYTES, FRAME_BYTES, Unpacker
from inanet.wire.batch import I64, PacketBatch, Transmission
from inanet.wire.endpoint import address_of, show

SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
ETH_P_IP = 0x0800
#: receive buffer of the socket that holds the port; its filter lets nothing into it
_LEAST_BUFFER = 4096


def open_packet_socket() -> socket.socket:
    """A packet socket with virtio-net headers that receives nothing before it is bound. Raises
    ``PermissionError``.
    """
    try:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    except PermissionError as error:
        raise PermissionError(
            error.errno,
            "packet sockets need CAP_NET_RAW: run as root, grant it (setcap cap_net_raw+ep, or "
            "AmbientCapabilities= in the systemd unit), or use the udp device",
        ) from error
    try:
        sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    except BaseException:
        sock.close()
        raise
    return sock


class AddressedTable(OutgoingTable, Protocol):
    """Frames to one destination at a time, with headers of their own."""

    def address(self, destination: int, hardware: bytes = b"") -> None:
        """See :meth:`inanet.phy.frames.FrameTable.address`."""
        ...


class _PacketTable(FrameTable):
    """A :class:`FrameTable` that ``sendmmsg`` sends through a bound packet socket."""

    def aim(self, destination: int, segment: int) -> None:
        """Nothing to do: :meth:`FrameTable.address` was told, and frames carry their segment size."""

    def send(self, fd: int, first: int, messages: int) -> int:
        """One ``sendmmsg`` of messages ``first`` to ``messages - 1``; returns how many left, or minus the
        errno.
        """
        return transmit(fd, address_in_memory(self.words) + first * HEADER_WORDS * 8, messages - first)


class PacketDevice(SocketDevice):
    """UDP at ``address``, an address of this host on ``interface``, without the kernel's IP stack.

    ``port`` 0 lets the kernel choose. Buffers as for :class:`inanet.phy.udp.UdpDevice`. On the loopback
    interface every 127.x.y.z is reachable. Raises ``PermissionError`` without ``CAP_NET_RAW`` and ``OSError``
    naming interface or address.
    """

    headroom = 28
    max_message = MAX_PAYLOAD
    #: most packets of a super-frame
    segments = SEGMENTS
    #: frames per system call, and the room for each
    frames = SUPERFRAMES
    frame_bytes = FRAME_BYTES

    def __init__(
        self,
        interface: str,
        address: str,
        port: int = 0,
        *,
        rcvbuf: int = RCVBUF,
        sndbuf: int = SNDBUF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kernel = UdpDevice(address, port, rcvbuf=_LEAST_BUFFER, sndbuf=sndbuf)
        try:
            sock = open_packet_socket()
        except BaseException:
            self._kernel.close()
            raise
        try:
            attach(self._kernel._socket, DROP_ALL)
            self._interface = examine(sock, interface)
            self._neighbours = Neighbours(self._kernel._socket, self._interface, clock)
            request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
            request_buffer(sock, SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
            self._own = [self._kernel.endpoint]
            attach(sock, udp_filter(self._own))
            sock.bind((interface, ETH_P_IP))
            self._table = self._make_table()
            receive = ReceiveTable(self.frames, self.frame_bytes)
            super().__init__(sock, receive, self._table, self.segments, self._kernel.endpoint)
        except BaseException:
            self._kernel.close()
            sock.close()
            raise
        self._counts["tx_through_kernel"] = 0
        self._starts: I64 = np.arange(self.frames, dtype=np.int64) * self.frame_bytes
        self._unpacker = Unpacker(self.frames, ETHERNET_BYTES)

    @property
    def rx_budget(self) -> int:
        return max(self.rcvbuf // TRUESIZE, 1) * FRAGMENTS

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Send as frames, or through the kernel while it must resolve the destination first."""
        if transmission.length + self.headroom > self._interface.mtu:
            raise OSError(
                errno.EMSGSIZE,
                f"packets of {transmission.length} B to {show(transmission.destination)} need an MTU of "
                f"{transmission.length + self.headroom} B; interface {self._interface.name} has "
                f"{self._interface.mtu}: raise it",
            )
        hardware = self._neighbours.find(transmission.destination)
        if hardware is None:
            taken = self._send_through_kernel(transmission, start)
            self._counts["tx_packets"] += taken
            self._counts["tx_bytes"] += taken * transmission.length
            self._counts["tx_through_kernel"] += taken
            return taken
        self._table.address(transmission.destination, hardware)
        return super().send(transmission, start)

    def _make_table(self) -> AddressedTable:
        return _PacketTable(SUPERFRAMES, SEGMENTS, self._kernel.endpoint, self._interface.hardware)

    def _send_through_kernel(self, transmission: Transmission, start: int) -> int:
        """Send so that the kernel resolves the destination."""
        return self._kernel.send(transmission, start)

    def _unpack(self, count: int) -> PacketBatch:
        table = self._in
        starts = self._starts[:count]
        batch = self._unpacker.unpack(
            table.arena, starts, starts + table.headers[:count, 14], np.array(self._own, np.uint64)
        )
        return self._received(batch, count, int(batch.lengths.sum()))

    def join(self, group: int) -> None:
        """Also receive what is sent to a group (an endpoint) on the interface; peers on this host are not
        heard.

        Raises ``ValueError`` for an address that is no group.
        """
        self._membership(group, socket.IP_ADD_MEMBERSHIP)
        self._own.append(group)
        attach(self._socket, udp_filter(self._own))

    def leave(self, group: int) -> None:
        """Undo :meth:`join`. Raises ``ValueError`` if it was not joined."""
        self._own.remove(group)
        attach(self._socket, udp_filter(self._own))
        self._membership(group, socket.IP_DROP_MEMBERSHIP)

    def _membership(self, group: int, option: int) -> None:
        if not is_group(group):
            raise ValueError(
                f"{show(group)} is not a multicast group; groups are 224.0.0.0 to 239.255.255.255"
            )
        own, _ = address_of(self._endpoint)
        request = socket.inet_aton(address_of(group)[0]) + socket.inet_aton(own)
        # membership belongs to the host; the kernel tells switches and the interface
        self._kernel._socket.setsockopt(socket.IPPROTO_IP, option, request)

    def counters(self) -> dict[str, int]:
        """As for sockets, and ``tx_through_kernel`` packets sent while a neighbour was being resolved, and
        what was refused: ``rx_malformed``, ``rx_foreign``, ``rx_bad_checksum`` frames.
        """
        return {**super().counters(), **self._unpacker.counters()}

    def close(self) -> None:
        super().close()
        self._kernel.close()
