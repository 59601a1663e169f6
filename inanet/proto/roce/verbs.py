"""What an application of reliable connections sees, named as the verbs name it: states, statuses, attributes, events, and memory
that peers may write to.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum, auto

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8
from inanet.wire.roce import DEFAULT_KEY, PATH_MTUS, PSN_HALF, PSN_MASK, QP_MASK


class State(Enum):
    """States of a queue pair. SQE is missing: only unreliable ones get into it (InfiniBand 10.3.1)."""

    RESET = auto()
    INIT = auto()
    RTR = auto()
    RTS = auto()
    SQD = auto()
    ERR = auto()


#: what ``modify`` may ask for; a queue pair gets into ERR by itself as well
TRANSITIONS: dict[State, frozenset[State]] = {
    State.RESET: frozenset((State.RESET, State.INIT)),
    State.INIT: frozenset((State.RESET, State.ERR, State.INIT, State.RTR)),
    State.RTR: frozenset((State.RESET, State.ERR, State.RTS)),
    State.RTS: frozenset((State.RESET, State.ERR, State.RTS, State.SQD)),
    State.SQD: frozenset((State.RESET, State.ERR, State.RTS, State.SQD)),
    State.ERR: frozenset((State.RESET, State.ERR)),
}
#: states in which requests of the peer are served
SERVING = frozenset((State.RTR, State.RTS, State.SQD))
#: states in which acknowledgements are taken
SENDING = frozenset((State.RTS, State.SQD))


class Status(Enum):
    """Status of a completion (``ibv_wc_status``)."""

    SUCCESS = auto()
    #: posted before the queue pair went into ERR, or after
    WR_FLUSH_ERR = auto()
    #: the peer found the request against the rules
    REM_INV_REQ_ERR = auto()
    #: the peer's memory region does not allow it
    REM_ACCESS_ERR = auto()
    #: the peer could not carry it out
    REM_OP_ERR = auto()
    #: no acknowledgement after all retries
    RETRY_EXC_ERR = auto()
    #: the peer had no receive posted, however often it was asked
    RNR_RETRY_EXC_ERR = auto()


class AsyncError(Enum):
    """Why a queue pair went into ERR while it served the peer (``ibv_event_type``)."""

    QP_REQ_ERR = auto()
    QP_ACCESS_ERR = auto()


@dataclass(frozen=True, slots=True)
class Completion:
    """A work request is done with: a WRITE has been acknowledged or has failed, or a posted receive was flushed."""

    wr_id: int
    status: Status


@dataclass(frozen=True, slots=True)
class Received:
    """A WRITE with immediate data has arrived in full and consumed the receive ``wr_id``.

    Its ``length`` bytes lie at ``offset`` of the memory region with remote key ``key``.
    """

    immediate: int
    offset: int
    length: int
    key: int
    wr_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer's requests broke a rule: the queue pair is in ERR."""

    reason: AsyncError


@dataclass(frozen=True, slots=True)
class Drained:
    """In SQD, all messages that had been begun are acknowledged."""


Event = Completion | Received | Failed | Drained


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection: what both ends tell each other out of band before they connect.

    ``endpoint`` is IPv4 address and UDP source port (:mod:`inanet.wire.endpoint`; packets go to port 4791); ``number`` the
    queue pair number; ``psn`` that of the first packet this end will send. ``key`` and ``base`` are remote key and virtual
    address of the memory region that the other end's writes go to unless they name another one.
    """

    endpoint: int
    number: int
    psn: int = 0
    key: int = 0
    base: int = 0

    def __post_init__(self) -> None:
        for name, value, limit in (("number", self.number, QP_MASK), ("psn", self.psn, PSN_MASK)):
            if not 0 <= value <= limit:
                raise ValueError(f"{name} has 24 bits; {value} does not fit")


@dataclass(frozen=True, slots=True)
class Attributes:
    """How a queue pair behaves; names and codes are those of ``ibv_qp_attr`` where it has them."""

    #: bytes of payload per packet: 256, 512, 1024, 2048 or 4096
    path_mtu: int = 1024
    #: code of the acknowledgement timeout, 1 to 31: 4.096 us times 2^code, so 67 ms; 0 waits for ever
    timeout: int = 14
    #: whether that is only the shortest one, and follows round trips and silence (:mod:`inanet.proto.roce.queue_pair`)
    adaptive: bool = False
    #: how often the same packet is sent again before the connection is given up, 0 to 7
    retry_cnt: int = 7
    #: the same after "receiver not ready"; 7 means without end
    rnr_retry: int = 7
    #: code of the time that peers are asked to wait for a receive, 0 to 31; 12 is 0.64 ms
    min_rnr_timer: int = 12
    #: partition key
    partition: int = DEFAULT_KEY
    #: packets that may be unacknowledged
    window: int = 256
    #: an acknowledgement is asked for at the end of each message and every so many packets, twice a window at least
    ack_every: int = 32
    #: differentiated services code point of the packets, 0 to 63
    dscp: int = 0
    #: bits per second of the link, where congestion control starts from; ``None`` sends unpaced whatever the network says
    line_rate: float | None = None

    def __post_init__(self) -> None:
        if self.path_mtu not in PATH_MTUS:
            raise ValueError(f"path_mtu is one of {PATH_MTUS}, not {self.path_mtu}")
        bounds = (
            ("timeout", self.timeout, 0, 31),
            ("retry_cnt", self.retry_cnt, 0, 7),
            ("rnr_retry", self.rnr_retry, 0, 7),
            ("min_rnr_timer", self.min_rnr_timer, 0, 31),
            ("partition", self.partition, 0, 0xFFFF),
            ("window", self.window, 1, PSN_HALF - 1),
            ("ack_every", self.ack_every, 1, PSN_HALF - 1),
            ("dscp", self.dscp, 0, 63),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise ValueError(f"{name} is between {low} and {high}, not {value}")
        if self.line_rate is not None and not self.line_rate > 0:
            raise ValueError(f"line_rate is a number of bits per second above 0, not {self.line_rate}")


class Access(IntEnum):
    """What peers may do to a memory region."""

    NONE = 0
    REMOTE_WRITE = 1


#: columns of the table that kernels check requests against
KEY, BASE, LENGTH, ACCESS = range(4)
_FIRST_KEY = 0x100


@njit("void(uint8[::1], uint8[::1], int64, int64[:, ::1], int64)", cache=True, nogil=True, _nrt=False)
def place(arena: U8, target: U8, region: int, placements: I64, count: int) -> None:
    """Copy payloads to a region: rows (region, offset in it, offset in ``arena``, bytes) that name ``region``."""
    for i in range(count):
        if placements[i, 0] != region:
            continue
        to, at = np.uint64(placements[i, 1]), np.uint64(placements[i, 2])
        for j in range(np.uint64(placements[i, 3])):
            target[to + j] = arena[at + j]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A registered buffer: 1-D, uint8, contiguous, writable. Peers address its first byte as ``base``."""

    buffer: U8
    key: int
    base: int
    row: int


class ProtectionDomain:
    """Registers memory regions. Queue pairs serve requests to the regions of their domain only."""

    def __init__(self) -> None:
        #: int64[regions, 4]: remote key, base, bytes, access; a row of key -1 is no longer registered
        self.table: I64 = np.zeros((0, 4), np.int64)
        self._regions: list[MemoryRegion | None] = []

    def register(
        self, buffer: NDArray[np.generic], *, base: int = 0, access: Access = Access.REMOTE_WRITE
    ) -> MemoryRegion:
        """Register the bytes of a contiguous writable array. Raises ``ValueError`` for any other."""
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError("only contiguous writable arrays can be registered")
        region = MemoryRegion(
            buffer.reshape(-1).view(np.uint8), _FIRST_KEY + len(self._regions), base, len(self._regions)
        )
        row = np.array([[region.key, base, len(region.buffer), access]], np.int64)
        self.table = np.concatenate([self.table, row])
        self._regions.append(region)
        return region

    def deregister(self, region: MemoryRegion) -> None:
        """Requests to the region are refused from now on. Raises ``ValueError`` if it is not registered."""
        if region.row >= len(self._regions) or self._regions[region.row] is not region:
            raise ValueError(f"region with key {region.key:#x} is not registered here")
        self._regions[region.row] = None
        self.table[region.row, KEY] = -1

    def key_of(self, row: int) -> int:
        """Remote key by row of the table; 0 past its end, where requests of no bytes go."""
        return int(self.table[row, KEY]) if row < len(self.table) else 0

    def place(self, arena: U8, placements: I64, count: int) -> None:
        """Carry out the first ``count`` placements (:func:`place`)."""
        for row in np.unique(placements[:count, 0]).tolist():
            region = self._regions[row]
            if region is not None:
                place(arena, region.buffer, row, placements, count)
