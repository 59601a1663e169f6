"""Raw IPv4: packets ride directly on IP with protocol number 253, without ports.

One packet is one IP packet, many of them a system call. The endpoint's port is 0, so every node needs an
IPv4 address of its own; on loopback that is 127.0.0.1, 127.0.0.2 and so on.
"""

import socket

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.mmsg import (
    IP_MTU_DISCOVER,
    IP_PMTUDISC_DO,
    MSG_TRUNC,
    U32,
    ReceiveTable,
    SendTable,
    request_buffer,
)
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE, SocketDevice
from inanet.wire.batch import I64, U8, U64, PacketBatch
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import IP_PROTOCOL

#: packets per system call
MESSAGES = 128
#: room for a jumbo frame; longer packets are dropped as ``rx_truncated``
BUFFER_BYTES = 9216
#: payload of the largest IPv4 packet without options
MAX_PAYLOAD = 65515
#: what the kernel charges a receive buffer for a packet of one fragment (measured on loopback): 2.2 times its
#: size, and nothing is ever merged
TRUESIZE = 2304


@njit(
    "int64(uint32[:, ::1], uint8[::1], int64, int64, int64[::1], int64[::1], uint64[::1])",
    cache=True,
    nogil=True,
)
def strip_headers(
    headers: U32, arena: U8, count: int, stride: int, offsets: I64, lengths: I64, sources: U64
) -> int:
    """Find the payload behind each IPv4 header, whose length varies with its options; returns how many are
    whole.

    Message *i* starts at ``i * stride`` of the arena. Truncated and malformed packets are left out.
    """
    kept = 0
    for i in range(count):
        length = np.int64(headers[i, 14])
        at = i * stride
        if headers[i, 12] & MSG_TRUNC or length < 20:
            continue
        header = np.int64(arena[at] & 0x0F) * 4
        if arena[at] >> 4 != 4 or header < 20 or header > length:
            continue
        source = np.uint64(0)
        for j in range(12, 16):
            source = source << np.uint64(8) | np.uint64(arena[at + j])
        offsets[kept] = at + header
        lengths[kept] = length - header
        sources[kept] = source << np.uint64(16)
        kept += 1
    return kept


class RawIpDevice(SocketDevice):
    """A raw IPv4 socket of protocol 253 as a device, bound to ``address`` so that the kernel filters by
    destination.

    ``rcvbuf`` and ``sndbuf`` as for :class:`inanet.phy.udp.UdpDevice`. Raises ``PermissionError`` without
    ``CAP_NET_RAW`` and ``OSError`` naming the address when binding fails.
    """

    headroom = 20
    max_message = MAX_PAYLOAD

    def __init__(self, address: str = "127.0.0.1", *, rcvbuf: int = RCVBUF, sndbuf: int = SNDBUF) -> None:
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, IP_PROTOCOL)
        except PermissionError as error:
            raise PermissionError(
                error.errno,
                "raw IPv4 needs CAP_NET_RAW: run as root, grant it (setcap cap_net_raw+ep, or "
                "AmbientCapabilities= in the systemd unit), or use the udp device",
            ) from error
        try:
            request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
            request_buffer(sock, SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
            sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
            try:
                sock.bind((address, 0))
            except OSError as error:
                raise OSError(error.errno, f"cannot bind raw IPv4 {address}: {error.strerror}") from error
            super().__init__(
                sock,
                ReceiveTable(MESSAGES, BUFFER_BYTES),
                SendTable(MESSAGES, 1),
                1,
                endpoint(sock.getsockname()[0], 0),
            )
        except BaseException:
            sock.close()
            raise

    @property
    def rx_budget(self) -> int:
        """Fragments the granted receive buffer holds: ``rcvbuf // 2304``, as each packet is charged by
        itself."""
        return max(self.rcvbuf // TRUESIZE, 1)

    def _unpack(self, count: int) -> PacketBatch:
        return self._unpack_by(strip_headers, count)
