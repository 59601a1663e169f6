"""``recvmmsg`` and ``sendmmsg`` over numpy-backed message tables: many datagrams per system call, no objects
per datagram.

The kernel's ``struct mmsghdr`` (64 bytes on 64-bit Linux), ``struct iovec`` (16), ``struct sockaddr_in`` (16)
and control buffers are rows of arrays. The parts that never change are filled once; kernels below fill and
read the rest.

======== ==== ===================== ==========================================
u64 word u32  mmsghdr field         use
======== ==== ===================== ==========================================
0             msg_name              row of the address table
1        2    msg_namelen           16; the kernel writes it on receive
2             msg_iov               first iovec of the message
3             msg_iovlen            iovecs of the message
4             msg_control           row of the control table
5             msg_controllen        bytes of it; the kernel writes it on receive
6        12   msg_flags             written on receive (MSG_TRUNC)
7        14   msg_len               bytes received or sent
======== ==== ===================== ==========================================
"""

import ctypes
import errno
import os
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, U64

U32 = NDArray[np.uint32]

#: in a ``sockaddr_in``, from byte 2 on
_PORT_AND_ADDRESS = struct.Struct(">HI")
#: value of a ``UDP_SEGMENT`` control message
_SEGMENT = struct.Struct("=H")

HEADER_WORDS = 8
NAME_BYTES = 16
CONTROL_BYTES = 64
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
MSG_TRUNC = 0x20
SO_MEMINFO = 55
#: index of the drop count in what ``SO_MEMINFO`` returns, and the number of its fields
MEMINFO_DROPS = 8
MEMINFO_FIELDS = 9
#: most datagrams one super-frame is cut into or merged from, in any kernel
MAX_SEGMENTS = 128
IP_MTU_DISCOVER = 10
IP_PMTUDISC_DO = 2
IP_MTU = 14

#: answers to earlier packets (ICMP) or a path that is gone for now: the packet counts as lost, the socket
#: lives on
PATH_ERRORS = frozenset(
    (
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.ENOBUFS,
        errno.EPERM,
    )
)


def _bind_libc() -> tuple["ctypes._NamedFuncPointer", "ctypes._NamedFuncPointer"]:
    libc = ctypes.CDLL(None, use_errno=True)
    receive, transmit = libc.recvmmsg, libc.sendmmsg
    receive.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
    transmit.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]
    receive.restype = transmit.restype = ctypes.c_int
    return receive, transmit


_recvmmsg, _sendmmsg = _bind_libc()


def address_in_memory(array: NDArray[np.generic]) -> int:
    """Where an array's first element lies. The array must outlive every use of the number."""
    return int(array.__array_interface__["data"][0])


@njit(
    "int64(uint32[:, ::1], uint64[:, ::1], uint32[:, ::1], int64, int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def segment_sizes(headers: U32, words: U64, control: U32, count: int, sizes: I64) -> int:
    """Find the segment size of ``count`` received super-frames; returns how many packets they hold.

    ``sizes[i]`` becomes the ``UDP_GRO`` value of message *i*, or its whole length where the kernel merged
    nothing. An empty datagram is one packet of length 0.
    """
    total = 0
    for i in range(count):
        length = np.int64(headers[i, 14])
        size = length
        end = min(np.int64(words[i, 5]), np.int64(CONTROL_BYTES))
        at = np.int64(0)
        while at + 20 <= end:
            entry = np.int64(control[i, at // 4])
            if control[i, at // 4 + 2] == SOL_UDP and control[i, at // 4 + 3] == UDP_GRO:
                merged = np.int64(control[i, at // 4 + 4])
                if 0 < merged < length:
                    size = merged
            if entry < 16:
                break
            at += (entry + 7) // 8 * 8
        sizes[i] = size
        total += 1 if length == 0 else int((length + size - 1) // size)
    return total


@njit(
    "int64(uint32[:, ::1], uint8[:, ::1], int64, int64, int64[::1], int64[::1], int64[::1], uint64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def expand(
    headers: U32, names: U8, count: int, stride: int, sizes: I64, offsets: I64, lengths: I64, sources: U64
) -> Any:
    """Lay out the packets of ``count`` super-frames, message *i* starting at ``i * stride`` of the arena.

    The last packet of a super-frame may be shorter than the others. Sources are endpoints. Returns the bytes of all.
    """
    at = 0
    received = np.int64(0)
    for i in range(count):
        address = np.uint64(0)
        for j in range(4, 8):
            address = address << np.uint64(8) | np.uint64(names[i, j])
        source = address << np.uint64(16) | np.uint64(names[i, 2]) << np.uint64(8) | np.uint64(names[i, 3])
        length = np.int64(headers[i, 14])
        received += length
        done = np.int64(0)
        while True:
            offsets[at] = i * stride + done
            lengths[at] = min(sizes[i], length - done)
            sources[at] = source
            at += 1
            done += sizes[i]
            if done >= length:
                break
    return received


@njit(
    "int64(uint64[:, ::1], int64, uint64, int64[::1], int64, int64, int64, int64)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def put_packets(
    iovecs: U64, row: int, base: int, offsets: I64, at: int, packets: int, length: int, last: int
) -> int:
    """Describe ``packets`` packets of ``length`` bytes from ``offsets[at]`` on, in ``iovecs`` from ``row`` on.

    Those that lie one behind the other share a row. ``base`` is the arena's address, ``last`` the greatest offset at which
    a packet fits into it. Returns the row after, or -1 for a packet that does not.
    """
    expected = np.int64(-1)
    for i in range(at, at + packets):
        offset = offsets[i]
        if not 0 <= offset <= last:
            return -1
        if offset == expected:
            iovecs[row - 1, 1] += np.uint64(length)
        else:
            iovecs[row, 0] = base + np.uint64(offset)
            iovecs[row, 1] = np.uint64(length)
            row += 1
        expected = offset + length
    return row


@njit(
    "int64(uint8[::1], int64[::1], int64, int64, int64, uint64[:, ::1], uint64[:, ::1], uint64)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def gather(
    arena: U8,
    offsets: I64,
    start: int,
    length: int,
    segments: int,
    words: U64,
    iovecs: U64,
    iovecs_base: int,
) -> int:
    """Prepare messages of up to ``segments`` packets each from ``offsets[start:]``; returns how many
    messages, or -1 for a packet that is not wholly inside the arena.

    Packets are described as by :func:`put_packets`. ``iovecs_base`` is the address of ``iovecs``. Stops
    when the message table is full; ``iovecs`` has room for ``segments`` rows per message.
    """
    base = np.uint64(arena.ctypes.data)
    last = len(arena) - length
    at = start
    used = 0
    messages = len(words)
    for i in range(messages):
        if at >= len(offsets):
            return i
        packets = min(segments, len(offsets) - at)
        first = used
        used = put_packets(iovecs, first, base, offsets, at, packets, length, last)
        if used < 0:
            return -1
        at += packets
        words[i, 2] = iovecs_base + np.uint64(first * 16)
        words[i, 3] = np.uint64(used - first)
    return messages


def transmit(fd: int, table: int, messages: int) -> int:
    """One ``sendmmsg`` of the ``messages`` headers at address ``table``; returns how many left, or minus the
    errno.
    """
    while True:
        sent = int(_sendmmsg(fd, table, messages, socket.MSG_DONTWAIT))
        if sent >= 0:
            return sent
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return -code


class ReceiveTable:
    """Message table for ``recvmmsg``: ``messages`` buffers of ``stride`` bytes each in one arena.

    ``stride`` is divisible by 4, so that every message starts aligned. The first ``lead`` bytes of each
    buffer are left free.
    """

    def __init__(self, messages: int, stride: int, lead: int = 0) -> None:
        self.messages = messages
        self.stride = stride
        self.arena: U8 = np.empty(messages * stride, np.uint8)
        self.words: U64 = np.zeros((messages, HEADER_WORDS), np.uint64)
        self.headers: U32 = self.words.view(np.uint32)
        self.names: U8 = np.zeros((messages, NAME_BYTES), np.uint8)
        self.control: U32 = np.zeros((messages, CONTROL_BYTES // 4), np.uint32)
        self.sizes: I64 = np.zeros(messages, np.int64)
        self._iovecs: U64 = np.zeros((messages, 2), np.uint64)
        rows = np.arange(messages, dtype=np.uint64)
        self._iovecs[:, 0] = address_in_memory(self.arena) + rows * stride + lead
        self._iovecs[:, 1] = stride - lead
        self.words[:, 0] = address_in_memory(self.names) + rows * NAME_BYTES
        self.words[:, 2] = address_in_memory(self._iovecs) + rows * 16
        self.words[:, 3] = 1
        self.words[:, 4] = address_in_memory(self.control) + rows * CONTROL_BYTES
        self._address = address_in_memory(self.words)
        self._used = messages

    def receive(self, fd: int, first: int = 0) -> int:
        """One ``recvmmsg`` that does not block; returns the number of messages, 0 for none, or minus the
        errno.

        They lie behind the ``first`` messages of the table, which stay as they are.
        """
        # the kernel has overwritten both lengths in the headers it used last time
        self.headers[first : self._used, 2] = NAME_BYTES
        self.words[first : self._used, 5] = CONTROL_BYTES
        self._used = first
        table = self._address + first * HEADER_WORDS * 8
        got = int(_recvmmsg(fd, table, self.messages - first, socket.MSG_DONTWAIT, None))
        if got >= 0:
            self._used = first + got
            return got
        code = ctypes.get_errno()
        return 0 if code in (errno.EAGAIN, errno.EINTR) else -code

    def used(self) -> None:
        """A kernel has received into the table."""
        self._used = self.messages


class SendTable:
    """Message table for ``sendmmsg``: up to ``messages`` datagrams or super-frames to one destination."""

    def __init__(self, messages: int, segments: int) -> None:
        self.words: U64 = np.zeros((messages, HEADER_WORDS), np.uint64)
        self.iovecs: U64 = np.zeros((messages * segments, 2), np.uint64)
        self.name: U8 = np.zeros(NAME_BYTES, np.uint8)
        self._control: U32 = np.zeros(6, np.uint32)
        # all messages of a call share destination and segment size
        self.words[:, 0] = address_in_memory(self.name)
        self.words.view(np.uint32)[:, 2] = NAME_BYTES
        self.words[:, 4] = address_in_memory(self._control)
        self._control[:2].view(np.uint64)[0] = 18
        self._control[2] = SOL_UDP
        self._control[3] = UDP_SEGMENT
        self.name[:2].view(np.uint16)[0] = socket.AF_INET
        self._address = address_in_memory(self.words)
        self._iovecs_address = address_in_memory(self.iovecs)
        self._destination = -1
        self._segment = 0

    def aim(self, destination: int, segment: int) -> None:
        """Set the destination (an endpoint) and the segment size in bytes; 0 sends plain datagrams."""
        if destination != self._destination:
            self._destination = destination
            _PORT_AND_ADDRESS.pack_into(self.name.data, 2, destination & 0xFFFF, destination >> 16)
        if segment != self._segment:
            if (segment == 0) != (self._segment == 0):
                self.words[:, 5] = 24 if segment else 0
            self._segment = segment
            _SEGMENT.pack_into(self._control.data, 16, segment)

    def gather(self, arena: U8, offsets: I64, start: int, length: int, segments: int) -> int:
        """Fill the table from ``offsets[start:]``; returns the number of messages. See :func:`gather`.

        Raises ``TypeError`` for an arena that is not 1-D contiguous uint8, or offsets that are not int64.
        """
        return int(
            gather(
                arena,
                offsets,
                start,
                length,
                segments,
                self.words,
                self.iovecs,
                self._iovecs_address,
            )
        )

    def send(self, fd: int, first: int, messages: int) -> int:
        """One ``sendmmsg`` of messages ``first`` to ``messages - 1``; returns how many left, or minus the
        errno.
        """
        return transmit(fd, self._address + first * HEADER_WORDS * 8, messages - first)


def kernel_drops(sock: socket.socket) -> int:
    """Datagrams or super-frames the kernel discarded at this socket because its receive queue was full.

    Read from ``SO_MEMINFO``, as the ``SO_RXQ_OVFL`` control message misses drops after the last delivered
    packet. Counts modulo 2^32 since the socket was made.
    """
    raw = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_FIELDS * 4)
    return int(np.frombuffer(raw, np.uint32)[MEMINFO_DROPS])


def request_buffer(sock: socket.socket, forced_option: int, option: int, size: int) -> int:
    """Ask for a socket buffer of ``size`` bytes, beyond the system's limit where privileges allow; returns
    the grant.

    The kernel doubles the size for its own bookkeeping and returns the doubled value, which is what packets
    are charged against.
    """
    try:
        sock.setsockopt(socket.SOL_SOCKET, forced_option, size)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, option, size)
    return sock.getsockopt(socket.SOL_SOCKET, option)


def path_mtu(destination: tuple[str, int]) -> int | None:
    """What the kernel believes to be the MTU towards a destination, in bytes; ``None`` when it cannot
    tell.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)
            return probe.getsockopt(socket.IPPROTO_IP, IP_MTU)
        except OSError:
            return None


def system_error(code: int, what: str) -> OSError:
    """The ``OSError`` subclass of an errno, saying what failed."""
    return OSError(code, f"{what}: {os.strerror(code)}")
