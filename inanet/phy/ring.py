"""Raw frames of one ethertype through a ring shared with the kernel (TPACKET_V3): no system call per frame, no copy.

The kernel fills blocks with frames one behind the other and hands over whole blocks, full ones at once and others after
:data:`RETIRE_MS`. A block is walked by a kernel here and given back when the next ones are read. Frames get a virtio-net
header of zeros in the slack that the kernel leaves before each, so that they are what :class:`inanet.phy.port.FramePort`
gives.

Source: Documentation/networking/packet_mmap.rst and include/uapi/linux/if_packet.h of Linux. All fields are in native
byte order.
"""

import errno
import mmap
import socket
import struct

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.bpf import Instruction, attach
from inanet.phy.interfaces import examine
from inanet.phy.mmsg import U32
from inanet.phy.packet import PACKET_IGNORE_OUTGOING, SOL_PACKET
from inanet.phy.vnet import HEADER_BYTES, FrameBatch
from inanet.wire.batch import I64, U8

ETH_P_ALL = 0x0003
_PACKET_RX_RING = 5
_PACKET_STATISTICS = 6
_PACKET_VERSION = 10
_TPACKET_V3 = 2
_STATUS_KERNEL = 0
_STATUS_USER = 1
_FRAME_VLAN_VALID = 0x10
#: bytes of a block and how many there are: 64 KiB hold 160 frames of 309 bytes, and 256 blocks what comes while the reader
#: is away for a quarter of a second
BLOCK_BYTES = 64 << 10
BLOCKS = 256
#: frames of a batch, give or take a block
FRAMES = 8192
#: milliseconds after which a block that is not full is handed over
RETIRE_MS = 1
#: 32-bit words of struct tpacket_block_desc that are used
_BLOCK_STATUS, _BLOCK_FRAMES, _BLOCK_FIRST = 2, 3, 4
#: least bytes that a frame takes in a block: its header and the slack before it
_LEAST_FRAME = 96


@njit(
    "int64(uint8[::1], uint32[::1], int64, int64, int64[::1], int64[::1], int64)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def walk(arena: U8, words: U32, block: int, size: int, offsets: I64, lengths: I64, kept: int) -> int:
    """Find the frames of a block at byte ``block`` of ``arena``, of which ``words`` is a view; returns ``kept``, how many
    there were before, and how many it has.

    Frames with a VLAN tag and truncated ones are left out. ``offsets[i]`` is where 10 bytes
    of zeros have been put before the frame, ``lengths[i]`` counts them.
    """
    count = np.int64(words[block // 4 + _BLOCK_FRAMES])
    at = block + np.int64(words[block // 4 + _BLOCK_FIRST])
    for _ in range(min(int(count), len(offsets) - kept)):
        word = at // 4
        captured, length = np.int64(words[word + 3]), np.int64(words[word + 4])
        start = at + np.int64(words[word + 6] & 0xFFFF)
        if captured == length and not words[word + 5] & _FRAME_VLAN_VALID and start + length <= block + size:
            for j in range(start - HEADER_BYTES, start):
                arena[j] = 0
            offsets[kept] = start - HEADER_BYTES
            lengths[kept] = length + HEADER_BYTES
            kept += 1
        at += np.int64(words[word])
    return kept


def _split(ethertype: int, mine: int, others: int) -> list[Instruction]:
    """A filter that takes ``mine`` bytes of untagged frames of a type and ``others`` of everything else."""
    vlan_tag_present = 0xFFFFF000 + 48
    return [
        (0x28, 0, 0, 12),
        (0x15, 0, 3, ethertype),
        (0x30, 0, 0, vlan_tag_present),
        (0x15, 0, 1, 0),
        (0x06, 0, 0, mine),
        (0x06, 0, 0, others),
    ]


def without(ethertype: int) -> list[Instruction]:
    """The filter for the socket beside a ring: everything but untagged frames of that type."""
    return _split(ethertype, 0, 0xFFFFFFFF)


class FrameRing:
    """Untagged frames of ``ethertype`` that arrive at ``interface``. Not thread-safe.

    Raises ``PermissionError`` without ``CAP_NET_RAW``, and ``OSError`` naming the interface if it does not exist or the
    kernel has no such rings.
    """

    def __init__(
        self, interface: str, ethertype: int, *, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.interface = interface
        self._blocks, self._block_bytes = blocks, block_bytes
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            examine(sock, interface)
            shared = self._share(sock)
            attach(sock, _split(ethertype, 0xFFFFFFFF, 0))
            # bound to the type alone, it would get tagged frames as well, and without a sign of their tag
            sock.bind((interface, ETH_P_ALL))
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        # the mapping holds a descriptor of its own: nothing but arrays refers to it, or it would outlive close()
        self._arena: U8 = np.frombuffer(shared, np.uint8)
        self._words: U32 = self._arena.view(np.uint32)
        self._next = 0
        #: blocks before the next one that the owner still reads
        self._lent = 0
        most = FRAMES + block_bytes // _LEAST_FRAME
        self._offsets: I64 = np.zeros(most, np.int64)
        self._lengths: I64 = np.zeros(most, np.int64)
        self._counts = dict.fromkeys(("rx_frames", "rx_bytes", "rx_skipped", "kernel_overflow"), 0)

    def _share(self, sock: socket.socket) -> mmap.mmap:
        size = self._blocks * self._block_bytes
        request = struct.pack("@7I", self._block_bytes, self._blocks, 2048, size // 2048, RETIRE_MS, 0, 0)
        try:
            sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
            sock.setsockopt(SOL_PACKET, _PACKET_VERSION, _TPACKET_V3)
            sock.setsockopt(SOL_PACKET, _PACKET_RX_RING, request)
            return mmap.mmap(sock.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise OSError(
                error.errno,
                f"sharing a ring of {size} B with the kernel at {self.interface}: {error.strerror}",
            ) from error

    def fileno(self) -> int:
        """The socket's file descriptor, readable when a block is there; -1 once closed."""
        return self._socket.fileno()

    def receive(self) -> FrameBatch | None:
        """The frames of the blocks that are there, or ``None``; valid until the next call. Raises ``OSError`` once closed."""
        if self._socket.fileno() < 0:
            raise OSError(errno.EBADF, f"receiving at {self.interface}: the ring is closed")
        words, step = self._words, self._block_bytes // 4
        for number in range(self._next - self._lent, self._next):
            words[number % self._blocks * step + _BLOCK_STATUS] = _STATUS_KERNEL
        self._lent = kept = held = 0
        while kept < FRAMES and self._lent < self._blocks:
            block = self._next * self._block_bytes
            if not words[block // 4 + _BLOCK_STATUS] & _STATUS_USER:
                break
            kept = int(walk(self._arena, words, block, self._block_bytes, self._offsets, self._lengths, kept))
            held += int(words[block // 4 + _BLOCK_FRAMES])
            self._lent += 1
            self._next = (self._next + 1) % self._blocks
        if not self._lent:
            return None
        frames = FrameBatch(self._arena, self._offsets[:kept], self._lengths[:kept])
        self._counts["rx_frames"] += kept
        self._counts["rx_skipped"] += held - kept
        self._counts["rx_bytes"] += int(frames.lengths.sum())
        return frames

    def counters(self) -> dict[str, int]:
        """Totals: ``rx_frames``, ``rx_bytes`` (virtio-net headers included), ``rx_skipped`` frames with a VLAN tag or cut
        short, ``kernel_overflow`` frames for which no block was free.
        """
        if self._socket.fileno() >= 0:
            # reading them sets the kernel's counts back to zero
            _, drops, _ = struct.unpack("@3I", self._socket.getsockopt(SOL_PACKET, _PACKET_STATISTICS, 12))
            self._counts["kernel_overflow"] += drops
        return dict(self._counts)

    def close(self) -> None:
        """Give the ring back; counters stay readable, the last batch does not."""
        if self._socket.fileno() >= 0:
            self.counters()
            self._socket.close()
            # arrays of the last batch may still refer to it: it goes with the last of them
            self._arena = np.zeros(0, np.uint8)
            self._words = np.zeros(0, np.uint32)
