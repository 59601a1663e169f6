"""UDP with segmentation offload: up to 64 packets leave and arrive as one super-frame, many super-frames a
system call.

``UDP_SEGMENT`` lets the kernel (or the NIC) cut a 64 KB message into equal datagrams, ``UDP_GRO`` merges them
again on the way in. Between two sockets of one machine a super-frame is never cut at all.
"""

import socket

import numpy as np

from inanet.phy.device import is_group
from inanet.phy.interface import interface_of, is_hardware, merges
from inanet.phy.mmsg import (
    IP_MTU_DISCOVER,
    IP_PMTUDISC_DO,
    SOL_UDP,
    UDP_GRO,
    ReceiveTable,
    SendTable,
    expand,
    kernel_drops,
    request_buffer,
    segment_sizes,
)
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE, SocketDevice
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import address_of, endpoint, show
from inanet.wire.xagg import ROW_BYTES

_IP_MULTICAST_ALL = 49
#: super-frames per system call
SUPERFRAMES = 32
#: segments of a super-frame; kernels before 6.9 take no more
SEGMENTS = 64
#: payload of the largest IPv4 UDP message
MAX_PAYLOAD = 65507
#: fragments in a full super-frame, and what the kernel charges a receive buffer for one: the most of what
#: was measured for datagrams from udp (66,056 B) and packet (66,368 B) devices, on loopback and veth
FRAGMENTS = MAX_PAYLOAD // ROW_BYTES
TRUESIZE = 66_368


class UdpDevice(SocketDevice):
    """A UDP socket as a device.

    Binds to loopback unless told otherwise; port 0 lets the kernel choose. ``rcvbuf`` and ``sndbuf`` are
    bytes as in ``setsockopt`` (the kernel grants twice that, within ``net.core.rmem_max``/``wmem_max`` for
    unprivileged users). Sends to multicast groups as to any endpoint, in super-frames; see :meth:`join` for
    receiving. With ``peer``, an endpoint, it hears nobody else; see :meth:`beside`. Raises ``OSError`` naming the
    address when binding fails.
    """

    headroom = 28
    max_message = MAX_PAYLOAD

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        rcvbuf: int = RCVBUF,
        sndbuf: int = SNDBUF,
        peer: int | None = None,
    ) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            if peer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
            request_buffer(sock, SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
            # never fragment: a lost IP fragment would cost the whole packet, and a wrong MTU should be heard
            # of
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
            try:
                sock.bind((address, port))
            except OSError as error:
                raise OSError(error.errno, f"cannot bind UDP {address}:{port}: {error.strerror}") from error
            if peer is not None:
                sock.connect(address_of(peer))
            # groups: out of the interface that peers know, no further than the segment, to members on this
            # host too
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            merging = _merge_on_receive(sock)
            super().__init__(
                sock,
                ReceiveTable(SUPERFRAMES, 65536),
                SendTable(SUPERFRAMES, SEGMENTS),
                SEGMENTS,
                endpoint(*sock.getsockname()),
            )
        except BaseException:
            sock.close()
            raise
        self._counts["gro"] = int(merging)
        self._counts["merging_refused"] = int(not merging)
        interface = interface_of(address)
        off = is_hardware(interface) and merges(sock, interface) is False
        self._counts["interface_merging_refused"] = int(off)
        self._counts["receive_buffer_refused"] = int(self.rcvbuf < 2 * rcvbuf)
        #: sockets of joined groups, by endpoint, and which socket is read next
        self._groups: dict[int, socket.socket] = {}
        #: groups joined and left so far: :meth:`descriptors` may be others
        self.joins = 0
        self._turn = 0

    @property
    def rx_budget(self) -> int:
        """Fragments the granted receive buffer holds: ``rcvbuf // 66368 * 62``.

        A queued super-frame of 62 fragments is charged 66,368 bytes, so 212,992 asked for (granted twice)
        hold 6 of them. **That is for full super-frames.** A fragment that arrives alone is charged up to
        2,304 bytes, 2.15 times its share: where nothing merges fragments (senders that emit one at a time,
        interfaces without GRO), a buffer holds ``rcvbuf // 2304``, 47 % of the budget. Whoever turns budgets
        into windows decides how much of that to expect. At least one super-frame, as the kernel accepts a
        packet whenever the queue is below its limit.
        """
        return max(self.rcvbuf // TRUESIZE, 1) * FRAGMENTS

    def beside(self, peer: int, *, rcvbuf: int = RCVBUF, sndbuf: int = SNDBUF) -> "UdpDevice":
        """A device with the same endpoint that takes over the traffic with ``peer``, in buffers of its own.

        No other program can bind the endpoint afterwards. Raises ``OSError``.
        """
        # both sockets must agree to share the port, but only while the second one is bound
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            return UdpDevice(*address_of(self._endpoint), rcvbuf=rcvbuf, sndbuf=sndbuf, peer=peer)
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)

    def descriptors(self) -> list[int]:
        """The socket's, and those of joined groups."""
        return [self._socket.fileno(), *(sock.fileno() for sock in self._groups.values())]

    def _unpack(self, count: int) -> PacketBatch:
        batch, received = unpack(self._in, count)
        return self._received(batch, count, received)

    def receive(self) -> PacketBatch | None:
        """One ``recvmmsg`` on this socket and on those of groups that were joined, together one batch.

        Packets to a group have the endpoint of whoever sent them as their source, as any others.
        """
        if not self._groups:
            return super().receive()
        sources = [(self._socket, self._endpoint), *((sock, group) for group, sock in self._groups.items())]
        count, room = 0, self._in.messages
        # a full table leaves the others for later, so each is first in turn
        for turn in range(len(sources)):
            if count < room:
                count += self._take(*sources[(self._turn + turn) % len(sources)], count)
        self._turn = (self._turn + 1) % len(sources)
        return self._unpack(count) if count else None

    def join(self, group: int) -> int:
        """Receive what is sent to ``group``, an endpoint, through the interface that has this device's
        address.

        Linux delivers by destination, and a socket bound to a unicast address never gets multicast: so a
        group is a second socket. Returns its descriptor, **which must be watched beside** :meth:`fileno`;
        :meth:`receive` reads both. Its buffer is its own, as large as this device's. Joining twice is one
        membership. Raises ``ValueError`` for an address that is no group and ``OSError`` naming the group.
        """
        if not is_group(group):
            raise ValueError(
                f"{show(group)} is not a multicast group; groups are 224.0.0.0 to 239.255.255.255"
            )
        if group not in self._groups:
            self._groups[group] = _group_socket(group, address_of(self._endpoint)[0], self.rcvbuf // 2)
            self.joins += 1
        return self._groups[group].fileno()

    def leave(self, group: int) -> None:
        """Undo :meth:`join`; stop watching the descriptor first. Raises ``KeyError`` if it was not joined."""
        sock = self._groups.pop(group)
        self.joins += 1
        self._turn = 0
        self._overflow += kernel_drops(sock)
        sock.close()

    def counters(self) -> dict[str, int]:
        """As for all sockets; ``kernel_overflow`` is that of this socket and all groups together."""
        counters = super().counters()
        counters["kernel_overflow"] += sum(kernel_drops(sock) for sock in self._groups.values())
        return counters

    def close(self) -> None:
        for group in list(self._groups):
            self.leave(group)
        super().close()


def _group_socket(group: int, interface: str, rcvbuf: int) -> socket.socket:
    """A socket that receives a group's packets from the interface with this address; others may join too."""
    address, port = address_of(group)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
        try:
            sock.bind((address, port))
            membership = socket.inet_aton(address) + socket.inet_aton(interface)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot join {address}:{port} on the interface with {interface}: {error.strerror}",
            ) from error
        # only this interface's memberships count, not those of other sockets on this host
        sock.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
        _merge_on_receive(sock)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def unpack(table: ReceiveTable, count: int) -> tuple[PacketBatch, int]:
    """The packets of ``count`` received datagrams and super-frames, and their bytes."""
    total = int(segment_sizes(table.headers, table.words, table.control, count, table.sizes))
    offsets, lengths = np.empty(total, np.int64), np.empty(total, np.int64)
    sources = np.empty(total, np.uint64)
    received = expand(table.headers, table.names, count, table.stride, table.sizes, offsets, lengths, sources)
    return PacketBatch(table.arena, offsets, lengths, sources), int(received)


def _merge_on_receive(sock: socket.socket) -> bool:
    """Turn GRO on; kernels before 5.0 have none and deliver datagrams one by one."""
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True
