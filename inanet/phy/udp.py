"""UDP with segmentation offload: up to 64 packets leave and arrive as one super-frame, many super-frames a
system call.

``UDP_SEGMENT`` lets the kernel (or the NIC) cut a 64 KB message into equal datagrams, ``UDP_GRO`` merges them
again on the way in. Between two sockets of one machine a super-frame is never cut at all.
"""

import socket

import numpy as np

from inanet.phy.mmsg import (
    IP_MTU_DISCOVER,
    IP_PMTUDISC_DO,
    SOL_UDP,
    UDP_GRO,
    ReceiveTable,
    SendTable,
    expand,
    request_buffer,
    segment_sizes,
)
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE, SocketDevice
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import ROW_BYTES

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
    unprivileged users). ``reuse`` lets several sockets bind one multicast group and port. Raises ``OSError``
    naming the address when binding fails.
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
        reuse: bool = False,
    ) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            if reuse:
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

    def _unpack(self, count: int) -> PacketBatch:
        table = self._in
        total = int(segment_sizes(table.headers, table.words, table.control, count, table.sizes))
        offsets, lengths = np.empty(total, np.int64), np.empty(total, np.int64)
        sources = np.empty(total, np.uint64)
        expand(table.headers, table.names, count, table.stride, table.sizes, offsets, lengths, sources)
        return self._received(PacketBatch(table.arena, offsets, lengths, sources), count)

    def join_group(self, group: str, interface: str) -> None:
        """Receive what is sent to a multicast group, and send to groups, through the interface with this
        address.

        The device must be bound to the group itself or to 0.0.0.0: Linux delivers by destination, so a socket
        bound to a unicast address never gets multicast. Raises ``ValueError`` in that case and ``OSError``
        for an interface that does not exist.
        """
        bound = self._socket.getsockname()[0]
        if bound not in (group, "0.0.0.0"):
            raise ValueError(
                f"device bound to {bound} cannot receive group {group}: bind to {group} or 0.0.0.0"
            )
        own = socket.inet_aton(interface)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + own)
        self.send_groups_through(interface)

    def send_groups_through(self, interface: str) -> None:
        """Send multicast through the interface with this address, one hop far, to members on this host as
        well.
        """
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)


def _merge_on_receive(sock: socket.socket) -> bool:
    """Turn GRO on; kernels before 5.0 have none and deliver datagrams one by one."""
    try:
        sock.setsockopt(SOL_UDP, UDP_GRO, 1)
    except OSError:
        return False
    return True
