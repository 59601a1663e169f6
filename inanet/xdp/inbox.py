"""A worker's results in memory that the kernel program fills and this process reads without a system call.

``worker.bpf.c`` puts results into a ring of rows; :class:`Inbox` loads it, tells it whose results to take, and hands out
what is there as batches whose packets lie in the ring. One process reads; any number of processors write.
"""

import errno
import mmap
from collections.abc import Mapping, Set
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8, U64, PacketBatch
from inanet.wire.endpoint import address_of
from inanet.wire.xagg import ROW_BYTES
from inanet.xdp.build import WORKER_OBJECT
from inanet.xdp.gate import compare_exchange, exchange, load_word, swap
from inanet.xdp.libbpf import BpfError, Map, Object, Program, RingBuffer
from inanet.xdp.memory import MAX_CPUS, Mode, processors

#: packets that a frame can hold, and so how far rows may be used beyond the ring's end
MAX_SEGMENTS = 62
#: packets of a batch, as a device that reads sockets has
LIMIT = 2048
#: rows after which an empty ring begins at its first row again: those are still in the processor's caches
REWIND = 32
INBOX_COUNTS = 8
#: rows end where a map's value may
MAX_ROWS = 1 << 18

RUN = np.dtype([("ready", "<u8"), ("source", "<u8"), ("packets", "<u8")])
INBOX = np.dtype(
    [
        ("head", "<u8"),
        ("spare_head", "<u8", 7),
        ("tail", "<u8"),
        ("asleep", "<u8"),
        ("spare_tail", "<u8", 6),
        ("counts", "<u8", (MAX_CPUS, INBOX_COUNTS)),
    ]
)
SENDER = np.dtype([("endpoint", "<u8"), ("job", "<u8")])
INBOX_GEOMETRY = np.dtype([("rows", "<u4"), ("address", "<u4"), ("port", "<u4")])
_PROGRAM = "receive_results"
_HERE = (1).to_bytes(8, "little")


class InboxCount(IntEnum):
    """Counters of the program, ``enum inbox_count`` of ``layout.h``."""

    FRAMES = 0
    BYTES = 1
    TAKEN = 2
    PASSED = 3
    FULL = 4
    FOREIGN = 5
    OTHER = 6


@njit(
    "int64(uint64, uint64[:, ::1], uint64, uint64, int64[::1], uint64[::1], uint64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def collect(base: int, runs: U64, rows: int, tail: Any, offsets: I64, sources: U64, reached: U64) -> int:
    """Packets from row ``tail`` on, as many as ``offsets`` has room for; returns how many, and the next row in ``reached``.

    ``base`` is the address of ``runs``, which has the words of a ``struct run`` for each of the ``rows``.
    """
    count = 0
    while True:
        at = tail & (rows - np.uint64(1))
        if load_word(base + at * np.uint64(24)) != tail + np.uint64(1):
            break
        source, packets = runs[at, 1], np.int64(runs[at, 2])
        if source != 0:
            if count + packets > len(offsets):
                break
            for k in range(packets):
                offsets[count] = (np.int64(at) + k) * ROW_BYTES
                sources[count] = source
                count += 1
        tail += np.uint64(packets)
    reached[0] = tail
    return count


@njit("uint64(uint64, uint64, uint64, uint64)", cache=True, nogil=True)
def rewind(head: int, tail: int, at: int, rows: int) -> Any:
    """If the program has taken no row after ``at``, have it begin at the ring's first row again; returns the next row.

    ``head`` and ``tail`` are addresses. While one has moved and the other has not, the program finds less room than there
    is, never more.
    """
    first = (at + rows - np.uint64(1)) & ~(rows - np.uint64(1))
    if compare_exchange(head, at, first) != at:
        return at
    exchange(tail, first)
    return first


def _put(into: Map, key: bytes, value: bytes) -> bool:
    """Set an element of a map; whether there was room."""
    try:
        into.put(key, value)
    except BpfError as error:
        if error.errno != errno.E2BIG:
            raise
        return False
    return True


class Inbox:
    """The program for a worker at ``endpoint``, and a ring of at least ``rows`` results.

    ``endpoint`` with port 0 stands for the raw IPv4 framing. Raises :class:`~inanet.xdp.libbpf.BpfError` and
    :class:`~inanet.xdp.libbpf.NoLibrary`.
    """

    def __init__(self, rows: int, endpoint: int) -> None:
        #: of the ring; a power of two
        self.rows = min(MAX_ROWS, 1 << (rows - 1).bit_length())
        _, port = address_of(endpoint)
        self.object = Object(WORKER_OBJECT.read_bytes())
        try:
            self.object.map("results").resize(value_size=(self.rows + MAX_SEGMENTS - 1) * ROW_BYTES)
            self.object.map("runs").resize(value_size=self.rows * RUN.itemsize)
            geometry = np.zeros(1, INBOX_GEOMETRY)
            geometry["rows"], geometry["address"], geometry["port"] = self.rows, endpoint >> 16, port
            self.object.map(".rodata").initial()[: geometry.nbytes] = geometry.tobytes()
            self.object.load()
            self._program = self.object.program(_PROGRAM)
            self._mapped: dict[str, mmap.mmap] = {
                name: self.object.map(name).map_memory() for name in ("results", "runs", ".bss")
            }
            self._wakeups = RingBuffer(self.object.map("wakeups"), lambda _record: None)
        except BaseException:
            self.object.close()
            raise
        self._senders, self._groups = self.object.map("senders"), self.object.map("groups")
        self._arena: U8 = np.frombuffer(self._mapped["results"], np.uint8)
        self._runs: U64 = np.frombuffer(self._mapped["runs"], np.uint64, self.rows * 3).reshape(-1, 3)
        #: as ``struct inbox`` of ``layout.h`` has it
        self.state: NDArray[Any] = np.frombuffer(self._mapped[".bss"], INBOX, 1)
        fields = INBOX.fields
        assert fields is not None
        base = self.state.ctypes.data
        self._head_address, self._tail_address, self._asleep_address = (
            base + fields[name][1] for name in ("head", "tail", "asleep")
        )
        self._runs_address = self._runs.ctypes.data
        self._offsets: I64 = np.empty(LIMIT, np.int64)
        self._sources: U64 = np.empty(LIMIT, np.uint64)
        self._reached = np.zeros(1, np.uint64)
        #: first row that has not been handed out yet
        self._next = 0
        self._passed: U64 = self.state["counts"][0, : processors(), InboxCount.PASSED]
        self._known_senders: dict[bytes, int] = {}
        self._known_groups: set[int] = set()

    def program(self, mode: Mode) -> Program:
        """The program, which is the same for both modes."""
        del mode
        return self._program

    def fileno(self) -> int:
        """Readable when something has come since :meth:`sleep`."""
        return self._wakeups.fileno()

    def follow(self, senders: Mapping[tuple[int, int], int]) -> None:
        """Take results from these senders, keys by (endpoint, job).

        Whatever is not among them any more goes to the socket from now on, and so does what is beyond 4096 of them.
        """
        wanted = {
            np.array([sender], SENDER).tobytes(): key & 0xFFFF_FFFF_FFFF_FFFF
            for sender, key in senders.items()
        }
        known = self._known_senders
        for name in known.keys() - wanted.keys():
            self._senders.drop(name)
            del known[name]
        for name, key in wanted.items():
            if known.get(name) != key and _put(self._senders, name, key.to_bytes(8, "little")):
                known[name] = key

    def hear(self, groups: Set[int]) -> None:
        """Take what those send to these groups as well, endpoints, and to no others; 256 of them at most. Nobody else on
        this host gets what is taken.
        """
        for group in self._known_groups - groups:
            self._groups.drop(group.to_bytes(8, "little"))
            self._known_groups.discard(group)
        for group in groups - self._known_groups:
            if _put(self._groups, group.to_bytes(8, "little"), _HERE):
                self._known_groups.add(group)

    def take(self) -> PacketBatch | None:
        """What has come, :data:`LIMIT` packets at most, or ``None``. The batch is valid until the next call, which gives the
        rows of the one before back to the program.
        """
        swap(self._tail_address, self._next)
        count = collect(
            self._runs_address, self._runs, self.rows, self._next, self._offsets, self._sources, self._reached
        )
        self._next = int(self._reached[0])
        if count == 0:
            if self._next & (self.rows - 1) >= REWIND:
                self._next = int(rewind(self._head_address, self._tail_address, self._next, self.rows))
            return None
        lengths = np.full(count, ROW_BYTES, np.int64)
        return PacketBatch(self._arena, self._offsets[:count].copy(), lengths, self._sources[:count].copy())

    def sleep(self) -> None:
        """Ask for :meth:`fileno` to become readable at the next result; it is not readable any more until then. Look once
        more after this: something may have come before.
        """
        self._wakeups.consume()
        swap(self._asleep_address, 1)

    def awake(self) -> bool:
        """No wake-up is wanted any more; whether there was none. If there was one, :meth:`fileno` stays readable, or is so
        in a moment, until :meth:`sleep` forgets it.
        """
        return bool(swap(self._asleep_address, 0))

    @property
    def passed(self) -> int:
        """Frames that were left to the socket; each is there at most microseconds after it has been counted."""
        return int(self._passed.sum())

    def counts(self) -> I64:
        """The program's counters, by :class:`InboxCount`."""
        total: I64 = self.state["counts"][0].sum(axis=0).astype(np.int64)
        return total

    def close(self) -> None:
        """Let go of the program and its maps. Arrays stay valid as long as somebody holds one. Closing twice is fine."""
        self._wakeups.close()
        self.object.close()
