"""A port of a forwarding program: every frame of an interface, whole and untouched, in and out.

Frames keep their virtio-net header, so super-frames stay super-frames and checksums that the sender left to
the hardware stay to be done: what goes out at another port is what came in. VLAN tags, which the kernel takes
out of frames, are put back.
"""

import errno
import socket
import struct
from collections.abc import Sequence

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.bpf import Instruction, attach
from inanet.phy.device import check_arena
from inanet.phy.interfaces import examine
from inanet.phy.mmsg import (
    HEADER_WORDS,
    MSG_TRUNC,
    U32,
    ReceiveTable,
    address_in_memory,
    kernel_drops,
    request_buffer,
    system_error,
    transmit,
)
from inanet.phy.packet import SOL_PACKET, open_packet_socket
from inanet.phy.sockets import RCVBUF, SNDBUF, SO_RCVBUFFORCE, SO_SNDBUFFORCE
from inanet.phy.vnet import FRAME_BYTES, HEADER_BYTES, NEEDS_CSUM, FrameBatch
from inanet.wire.batch import I64, U8, U64

#: frames per system call
FRAMES = 64
ETH_P_ALL = 0x0003
_PACKET_AUXDATA = 8
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_MR_PROMISC = 1
_VLAN_VALID = 0x10
_VLAN_TPID_VALID = 0x40
_VLAN_TAG_BYTES = 4
_VLAN_ETHERTYPE = 0x8100
_MAC_ADDRESSES = 12
#: what stops one frame but not the next: it is too long for the interface, has a header the kernel refuses,
#: or the interface is down or its queue full
_LOST = frozenset((errno.EMSGSIZE, errno.EINVAL, errno.EIO, errno.ENETDOWN, errno.ENXIO, errno.ENOBUFS))


@njit(
    "int64(uint32[:, ::1], uint64[:, ::1], uint32[:, ::1], uint8[::1], int64, int64, int64[::1], int64[::1])",
    cache=True,
    nogil=True,
)
def restore(
    headers: U32, words: U64, control: U32, arena: U8, count: int, stride: int, offsets: I64, lengths: I64
) -> int:
    """Find ``count`` received frames and put their VLAN tags back; returns how many are whole.

    Message *i* was received at ``i * stride + 4`` of the arena; the 4 bytes before it make room for the tag.
    ``control`` holds ``struct tpacket_auxdata`` as the one control message.
    """
    kept = 0
    for i in range(count):
        if headers[i, 12] & MSG_TRUNC:
            continue
        at = np.int64(i * stride + _VLAN_TAG_BYTES)
        length = np.int64(headers[i, 14])
        if words[i, 5] >= 36 and control[i, 2] == SOL_PACKET and control[i, 3] == _PACKET_AUXDATA:
            status = control[i, 4]
            if status & _VLAN_VALID:
                tag = np.int64(control[i, 8] & 0xFFFF)
                kind = (
                    np.int64(control[i, 8] >> 16) if status & _VLAN_TPID_VALID else np.int64(_VLAN_ETHERTYPE)
                )
                for j in range(HEADER_BYTES + _MAC_ADDRESSES):
                    arena[at - _VLAN_TAG_BYTES + j] = arena[at + j]
                at -= _VLAN_TAG_BYTES
                length += _VLAN_TAG_BYTES
                place = at + HEADER_BYTES + _MAC_ADDRESSES
                arena[place] = np.uint8(kind >> 8)
                arena[place + 1] = np.uint8(kind & 0xFF)
                arena[place + 2] = np.uint8(tag >> 8)
                arena[place + 3] = np.uint8(tag & 0xFF)
                # headers are longer now; both fields are little-endian on the machines this runs on
                hdr_len = np.int64(arena[at + 2]) + (np.int64(arena[at + 3]) << 8)
                if hdr_len:
                    arena[at + 2] = np.uint8(hdr_len + _VLAN_TAG_BYTES & 0xFF)
                    arena[at + 3] = np.uint8(hdr_len + _VLAN_TAG_BYTES >> 8)
                if arena[at] & NEEDS_CSUM:
                    begin = np.int64(arena[at + 6]) + (np.int64(arena[at + 7]) << 8) + _VLAN_TAG_BYTES
                    arena[at + 6] = np.uint8(begin & 0xFF)
                    arena[at + 7] = np.uint8(begin >> 8)
        offsets[kept] = at
        lengths[kept] = length
        kept += 1
    return kept


class FramePort:
    """All frames that arrive at ``interface``, whoever they are for, and a way to send frames out of it.

    Give the interface no address: the host would answer what it is asked. Buffers as for
    :class:`inanet.phy.udp.UdpDevice`. Raises ``PermissionError`` without ``CAP_NET_RAW`` and ``OSError``
    naming the interface. Not thread-safe; one receive and one send may be under way at the same time.
    """

    def __init__(self, interface: str, *, rcvbuf: int = RCVBUF, sndbuf: int = SNDBUF) -> None:
        self.interface = interface
        sock = open_packet_socket()
        try:
            examine(sock, interface)
            request_buffer(sock, SO_RCVBUFFORCE, socket.SO_RCVBUF, rcvbuf)
            request_buffer(sock, SO_SNDBUFFORCE, socket.SO_SNDBUF, sndbuf)
            sock.setsockopt(SOL_PACKET, _PACKET_AUXDATA, 1)
            sock.bind((interface, ETH_P_ALL))
            index = socket.if_nametoindex(interface)
            membership = struct.pack("@iHH8s", index, _PACKET_MR_PROMISC, 0, b"")
            sock.setsockopt(SOL_PACKET, _PACKET_ADD_MEMBERSHIP, membership)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        self._in = ReceiveTable(FRAMES, FRAME_BYTES, _VLAN_TAG_BYTES)
        self._words: U64 = np.zeros((FRAMES, HEADER_WORDS), np.uint64)
        self._iovecs: U64 = np.zeros((FRAMES, 2), np.uint64)
        self._words[:, 2] = address_in_memory(self._iovecs) + np.arange(FRAMES, dtype=np.uint64) * 16
        self._words[:, 3] = 1
        self._drops_before = kernel_drops(sock)
        self._overflow = 0
        names = ("rx_frames", "rx_bytes", "rx_truncated", "tx_frames", "tx_bytes", "tx_refused", "eagain")
        self._counts = dict.fromkeys(names, 0)

    def fileno(self) -> int:
        """The socket's file descriptor; -1 once closed."""
        return self._socket.fileno()

    def filter(self, program: Sequence[Instruction]) -> None:
        """Receive only what a filter lets through (:mod:`inanet.phy.bpf`)."""
        attach(self._socket, program)

    def receive(self) -> FrameBatch | None:
        """What has arrived, up to :data:`FRAMES` frames, or ``None``. Raises ``OSError`` once closed."""
        table = self._in
        count = table.receive(self._socket.fileno())
        if count == -errno.ENETDOWN or count == 0:
            # an interface that goes down says so once; it may come back
            return None
        if count < 0:
            raise system_error(-count, f"receiving at {self.interface}")
        offsets, lengths = np.empty(count, np.int64), np.empty(count, np.int64)
        kept = int(
            restore(
                table.headers, table.words, table.control, table.arena, count, table.stride, offsets, lengths
            )
        )
        self._counts["rx_frames"] += kept
        self._counts["rx_truncated"] += count - kept
        self._counts["rx_bytes"] += int(lengths[:kept].sum())
        return FrameBatch(table.arena, offsets[:kept], lengths[:kept])

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        """Send frames ``start`` and following as they are; returns how many were taken.

        Fewer than offered means that the send buffer is full: wait until the port is writable. Frames that
        the interface refuses (too long, queue full) count as taken and as ``tx_refused``. Raises
        ``ValueError`` for frames that leave the arena.
        """
        check_arena(f"frames for {self.interface}", frames.arena, frames.offsets, frames.lengths)
        base = np.uint64(address_in_memory(frames.arena))
        at, total = start, len(frames)
        while at < total:
            count = min(FRAMES, total - at)
            self._iovecs[:count, 0] = base + frames.offsets[at : at + count].view(np.uint64)
            self._iovecs[:count, 1] = frames.lengths[at : at + count]
            sizes = frames.lengths[at : at + count]
            sent = self.send_messages(self._words, 0, count, sizes)
            at += sent
            if sent < count:
                break
        return at - start

    def send_messages(self, words: U64, first: int, count: int, sizes: I64) -> int:
        """Send frames ``first`` to ``first + count - 1`` of a message table (:mod:`inanet.phy.mmsg`), each gathered from
        its iovecs and ``sizes`` bytes long; returns how many were taken, as for :meth:`send`.
        """
        table = address_in_memory(words)
        at = 0
        while at < count:
            sent = transmit(self._socket.fileno(), table + (first + at) * HEADER_WORDS * 8, count - at)
            if sent >= 0:
                self._counts["tx_frames"] += sent
                self._counts["tx_bytes"] += int(sizes[at : at + sent].sum())
                at += sent
            elif -sent == errno.EAGAIN:
                self._counts["eagain"] += 1
                break
            elif -sent in _LOST:
                self._counts["tx_refused"] += 1
                at += 1
            else:
                raise system_error(-sent, f"sending at {self.interface}")
        return at

    def counters(self) -> dict[str, int]:
        """Totals: frames and bytes (virtio-net headers included) each way; ``rx_truncated``; ``tx_refused``
        frames that the interface did not take; ``eagain`` sends that had to wait; ``kernel_overflow`` frames
        discarded for lack of receive buffer.
        """
        if self._socket.fileno() >= 0:
            drops = kernel_drops(self._socket)
            self._overflow += (drops - self._drops_before) & 0xFFFFFFFF
            self._drops_before = drops
        return {**self._counts, "kernel_overflow": self._overflow}

    def close(self) -> None:
        """Close the socket; counters stay readable."""
        if self._socket.fileno() >= 0:
            self.counters()
            self._socket.close()
