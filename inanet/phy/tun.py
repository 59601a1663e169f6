"""TUN: a node with an IP address of its own, at the end of a virtual cable into the kernel's network stack.

What the kernel routes to the node's address is read as super-frames (USO: the kernel leaves UDP segments
uncut), and what the node writes enters the stack as if it had come from a network. So peers are ordinary
sockets on this host, or on other hosts if this one forwards. Every packet's headers are the node's to choose,
IP identification included.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

import numpy as np

from inanet.phy.device import check_transmission
from inanet.phy.frames import FrameTable
from inanet.phy.mmsg import system_error
from inanet.phy.udp import MAX_PAYLOAD, SEGMENTS, SUPERFRAMES
from inanet.phy.vnet import FRAME_BYTES, FrameBatch, Unpacker
from inanet.wire.batch import I64, PacketBatch, Transmission
from inanet.wire.endpoint import endpoint, show

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
#: TUN_F_CSUM, TSO4, TSO6, and USO4, USO6 (since Linux 6.2)
_CHECKSUM, _TSO, _USO = 0x01, 0x06, 0x60
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFMTU, _SIOCSIFTXQLEN, _SIOCADDRT = 0x8913, 0x8914, 0x8922, 0x8943, 0x890B
_IFF_UP = 0x1
_RTF_UP_HOST = 0x1 | 0x4
#: frames that wait to be read; a fragment that comes alone takes as much room as a super-frame
QUEUE = 4096
#: the address is the node's alone, so any port will do
DEFAULT_PORT = 7401
MTU = 1500
#: bytes before each received frame, so that what follows its 38 bytes of headers is aligned to words
_LEAD = 2
#: IPv4 and UDP headers of each packet
_HEADROOM = 28


def _bind_libc() -> "ctypes._NamedFuncPointer":
    write = ctypes.CDLL(None, use_errno=True).writev
    write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    write.restype = ctypes.c_ssize_t
    return write


_writev = _bind_libc()


class TunPort:
    """A new TUN interface: whole IP packets, virtio-net header first, to and from the kernel's stack.

    ``name`` may contain ``%d``, for which the kernel puts the lowest free number. The interface is up, has no
    address, and vanishes when the port is closed. Raises ``PermissionError`` without ``CAP_NET_ADMIN`` and
    ``OSError`` naming the interface.
    """

    def __init__(self, name: str = "ina%d", *, mtu: int = MTU) -> None:
        self._fd = -1
        try:
            self._fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
            granted = fcntl.ioctl(self._fd, _TUNSETIFF, request)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EPERM, errno.EACCES):
                raise OSError(error.errno, f"making TUN interface {name}: {error.strerror}") from error
            raise PermissionError(
                error.errno,
                "TUN interfaces need CAP_NET_ADMIN and /dev/net/tun: run as root, grant it (setcap "
                "cap_net_admin+ep, or AmbientCapabilities= in the systemd unit), or use the udp device",
            ) from error
        try:
            #: the interface's name
            self.interface = granted[:16].rstrip(b"\0").decode()
            #: whether the kernel leaves UDP super-frames whole
            self.segmentation = self._offload()
            self._ioctl(_SIOCSIFMTU, struct.pack("i", mtu))
            self._ioctl(_SIOCSIFTXQLEN, struct.pack("i", QUEUE))
            (flags,) = struct.unpack_from("H", self._ioctl(_SIOCGIFFLAGS, b""), 16)
            self._ioctl(_SIOCSIFFLAGS, struct.pack("H", flags | _IFF_UP))
            # an open file stays with the network namespace it was opened in
            self._statistics = Path("/proc/thread-self/net/dev").open()  # noqa: SIM115
        except BaseException:
            self.close()
            raise
        self.mtu = mtu
        self._arena = np.zeros(SUPERFRAMES * FRAME_BYTES, np.uint8)
        rows = self._arena.data
        self._rows = [[rows[i * FRAME_BYTES + _LEAD : (i + 1) * FRAME_BYTES]] for i in range(SUPERFRAMES)]
        self._offsets: I64 = np.arange(SUPERFRAMES, dtype=np.int64) * FRAME_BYTES + _LEAD
        self._dropped = 0

    def _offload(self) -> bool:
        try:
            fcntl.ioctl(self._fd, _TUNSETOFFLOAD, _CHECKSUM | _TSO | _USO)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.ioctl(self._fd, _TUNSETOFFLOAD, _CHECKSUM | _TSO)
            return False
        return True

    def _ioctl(self, request: int, value: bytes) -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            return fcntl.ioctl(
                handle, request, self.interface.encode().ljust(16, b"\0") + value.ljust(24, b"\0")
            )

    def route(self, address: str) -> None:
        """Have the kernel send what is for ``address`` (dotted IPv4) to this port."""
        target = struct.pack("@HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))
        mask = struct.pack("@HH4s8x", socket.AF_INET, 0, b"\xff" * 4)
        device = ctypes.create_string_buffer(self.interface.encode())
        # struct rtentry
        entry = struct.pack(
            "@L16s16x16sHhLPhPLLH",
            0,
            target,
            mask,
            _RTF_UP_HOST,
            0,
            0,
            0,
            0,
            ctypes.addressof(device),
            0,
            0,
            0,
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            try:
                fcntl.ioctl(handle, _SIOCADDRT, entry)
            except OSError as error:
                raise OSError(
                    error.errno, f"routing {address} to {self.interface}: {error.strerror}"
                ) from error

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> FrameBatch | None:
        """What the kernel has sent, up to 32 frames, or ``None``. Raises ``OSError`` once closed."""
        lengths = []
        for row in self._rows:
            try:
                lengths.append(os.readv(self._fd, row))
            except BlockingIOError:
                break
        if not lengths:
            return None
        return FrameBatch(self._arena, self._offsets[: len(lengths)], np.array(lengths, np.int64))

    def write(self, iovecs: int, count: int) -> int:
        """Write one frame from ``count`` iovecs at address ``iovecs``; returns 0 or an errno."""
        while _writev(self._fd, iovecs, count) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                return code
        return 0

    def dropped(self) -> int:
        """Frames the kernel discarded because nobody read the port fast enough."""
        if self._fd >= 0:
            self._statistics.seek(0)
            for line in self._statistics:
                name, _, figures = line.partition(":")
                if name.strip() == self.interface:
                    self._dropped = int(figures.split()[11])
        return self._dropped

    def close(self) -> None:
        """Remove the interface; :meth:`dropped` stays readable."""
        if self._fd >= 0:
            if hasattr(self, "_statistics"):
                self.dropped()
                self._statistics.close()
            os.close(self._fd)
            self._fd = -1


class TunDevice:
    """UDP at ``address``, which no interface of this host has: the kernel routes it here.

    ``port`` 0 means :data:`DEFAULT_PORT`. ``name`` and ``mtu`` are those of the interface, see
    :class:`TunPort`. Other TUN devices of this host are reached if it forwards (``net.ipv4.ip_forward``).
    """

    headroom = _HEADROOM

    def __init__(self, address: str, port: int = 0, *, name: str = "ina%d", mtu: int = MTU) -> None:
        self._endpoint = endpoint(address, port or DEFAULT_PORT)
        self._port = TunPort(name, mtu=mtu)
        try:
            self._port.route(address)
        except BaseException:
            self._port.close()
            raise
        self._segments = SEGMENTS if self._port.segmentation else 1
        self._table = FrameTable(SUPERFRAMES, SEGMENTS, self._endpoint, b"")
        self._own = np.array([self._endpoint], np.uint64)
        self._unpacker = Unpacker(SUPERFRAMES, 0)
        names = ("rx_packets", "rx_bytes", "rx_superframes", "tx_packets", "tx_bytes", "tx_superframes")
        self._counts = {**dict.fromkeys(names, 0), "path_errors": 0}

    @property
    def endpoint(self) -> int:
        """Own address."""
        return self._endpoint

    @property
    def interface(self) -> str:
        """Name of the TUN interface."""
        return self._port.interface

    @property
    def rx_budget(self) -> int:
        """Frames the interface's queue holds, counted as if each were one fragment: merged ones need no more
        room there.
        """
        return QUEUE

    def fileno(self) -> int:
        """The interface's descriptor; -1 once closed."""
        return self._port.fileno()

    def receive(self) -> PacketBatch | None:
        """Packets for this node from up to 32 frames; a batch may be empty when only others came."""
        frames = self._port.receive()
        if frames is None:
            return None
        ends = frames.offsets + frames.lengths
        batch = self._unpacker.unpack(frames.arena, frames.offsets, ends, self._own)
        self._counts["rx_superframes"] += len(frames)
        self._counts["rx_packets"] += len(batch)
        self._counts["rx_bytes"] += int(batch.lengths.sum())
        return batch

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Hand packets to the kernel's stack, which always takes them; see
        :meth:`inanet.phy.device.Device.send`.
        """
        check_transmission(transmission)
        length, total = transmission.length, len(transmission)
        if length + _HEADROOM > self._port.mtu:
            raise OSError(
                errno.EMSGSIZE,
                f"packets of {length} B to {show(transmission.destination)} need an MTU of "
                f"{length + _HEADROOM} B; interface {self.interface} has {self._port.mtu}: raise it",
            )
        self._table.address(transmission.destination)
        segments = min(self._segments, MAX_PAYLOAD // length)
        at = start
        while at < total:
            messages = self._table.gather(transmission.arena, transmission.offsets, at, length, segments)
            for iovecs, count in self._table.words[:messages, 2:4].tolist():
                code = self._port.write(iovecs, count)
                if code == errno.EIO:
                    # the interface is down: lost, as on any network
                    self._counts["path_errors"] += 1
                elif code:
                    raise system_error(code, f"sending to {show(transmission.destination)}")
            self._counts["tx_superframes"] += messages
            at = min(total, at + messages * segments)
        self._counts["tx_packets"] += total - start
        self._counts["tx_bytes"] += (total - start) * length
        return total - start

    def retry_fileno(self) -> int | None:
        """Sending never blocks."""
        return None

    def timer(self) -> float | None:
        return None

    def flush(self, now: float) -> PacketBatch | None:
        return None

    def counters(self) -> dict[str, int]:
        """Totals: packets, bytes and super-frames (frames) each way; ``path_errors`` frames lost because the
        interface was down; ``kernel_overflow`` frames discarded because its queue was full; frames refused as
        ``rx_malformed``, ``rx_foreign``, ``rx_bad_checksum``.
        """
        return {**self._counts, **self._unpacker.counters(), "kernel_overflow": self._port.dropped()}

    def close(self) -> None:
        """Remove the interface; counters stay readable."""
        self._port.close()
