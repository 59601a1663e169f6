"""Control packets of the XAgg framing, written into and read from arenas without per-field Python."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.header import tag_of
from inanet.kernels.jit import njit
from inanet.proto.tree.engine import Tables, stamp
from inanet.proto.tree.slots import HEAD, ROW
from inanet.wire.batch import Transmission
from inanet.wire.xagg import CONTROL_BYTES, LOST_BYTES, MAGIC_VERSION, PAYLOAD_BYTES, ROW_BYTES, Flag, Kind

_ENTRIES = 1024
_LOST_WORDS = LOST_BYTES // 4


class Header(NamedTuple):
    """The fields of a received control packet that the node acts on."""

    kind: int
    down: bool
    job: int
    host: int
    gradient: int
    round: int
    shard: int
    plan: int
    attempt: int
    word0: int
    #: of RESTART: exponents stay
    same: bool


def read_header(arena: NDArray[np.int32], offset: int) -> Header:
    """Fields of the packet at byte ``offset``; its length, tag and checksum were verified by the kernel."""
    w = arena[offset >> 2 : (offset >> 2) + HEAD + 1].view(np.uint32).tolist()
    kind = w[0] >> 8 & 0xFF
    return Header(
        kind=kind & 0xF,
        down=bool(kind >> 4 & int(Flag.DOWN)),
        job=w[0] >> 16,
        host=w[1],
        gradient=w[2],
        round=w[3],
        shard=w[4] & 0xFFFF,
        plan=w[4] >> 16 & 0xFF,
        attempt=w[4] >> 24,
        word0=w[6],
        same=bool(kind >> 4 & int(Flag.SAME)),
    )


@njit(
    "void(int32[:, ::1], int64, uint32, uint32, uint32, uint32, uint32, uint64, int64, uint32)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def seal_control(
    rows: Any, entry: int, w0: int, w1: int, w2: int, w3: int, w4: int, key: int, body: int, word0: int
) -> None:
    """Header, first word of a body of two, and checksum over ``body`` words; a longer body is there already."""
    row = rows[entry]
    row[0] = np.int32(w0)
    row[1] = np.int32(w1)
    row[2] = np.int32(w2)
    row[3] = np.int32(w3)
    row[4] = np.int32(w4)
    row[5] = np.int32(tag_of(w0, w1, w2, w3, w4, key))
    if body == 2:
        row[HEAD] = np.int32(word0)
        row[HEAD + 1] = 0
    row[HEAD + body] = np.int32(row_checksum(row, HEAD, body))


class Outbox:
    """Control packets waiting to leave, in staging entries that live as long as somebody has not sent them."""

    def __init__(self) -> None:
        self._offsets = np.arange(_ENTRIES, dtype=np.int64) * LOST_BYTES
        self._queue: list[Transmission] = []
        self._renew()

    def _renew(self) -> None:
        """Start with new entries; transmissions that have not left keep the old ones alive."""
        self._small = np.zeros((_ENTRIES, _LOST_WORDS), np.int32)
        self._bytes = self._small.view(np.uint8).reshape(-1)
        self._next = 0

    def take(self) -> list[Transmission]:
        """Everything queued, removed."""
        queue, self._queue = self._queue, []
        return queue

    def push(self, transmission: Transmission) -> None:
        """Queue something that lies elsewhere."""
        self._queue.append(transmission)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def send(
        self,
        destination: int,
        kind: Kind,
        *,
        job: int,
        key: int,
        version: int,
        host: int,
        gradient: int = 0,
        round_: int = 0,
        shard: int = 0,
        attempt: int = 0,
        down: bool = False,
        word0: int = 0,
        bits: NDArray[np.uint8] | None = None,
    ) -> None:
        """Queue one packet; ``bits`` (128 bytes) is the body of a LOST."""
        if self._next == _ENTRIES:
            self._renew()
        entry = self._next
        self._next = entry + 1
        body = 2
        if bits is not None:
            body = len(bits) // 4
            self._small[entry, HEAD : HEAD + body] = bits.view(np.int32)
        flags = int(Flag.DOWN) if down else 0
        seal_control(
            self._small,
            entry,
            MAGIC_VERSION | (int(kind) | flags << 4) << 8 | job << 16,
            host,
            gradient,
            round_,
            shard | (version & 0xFF) << 16 | attempt << 24,
            key,
            body,
            word0,
        )
        length = LOST_BYTES if bits is not None else CONTROL_BYTES
        offset = self._offsets[entry : entry + 1]
        self._queue.append(Transmission(destination, self._bytes, offset, length))

    def send_restart(
        self,
        destination: int,
        *,
        job: int,
        key: int,
        version: int,
        group: int,
        round_: int,
        shard: int,
        attempt: int,
        same: bool,
        body: NDArray[np.uint8],
    ) -> None:
        """Queue a RESTART of fragments of a group; ``body`` is uint8[1024], see :class:`~inanet.wire.xagg.Kind`."""
        row = np.zeros((1, ROW), np.int32)
        row.view(np.uint8)[0, HEAD * 4 : HEAD * 4 + PAYLOAD_BYTES] = body
        kind = int(Kind.RESTART) | (int(Flag.SAME) if same else 0) << 4
        words = (MAGIC_VERSION | kind << 8 | job << 16, 0, group, round_)
        last = shard | (version & 0xFF) << 16 | attempt << 24
        seal_control(row, 0, *words, last, key, PAYLOAD_BYTES // 4, 0)
        self._queue.append(Transmission(destination, row.view(np.uint8)[0], self._offsets[:1], ROW_BYTES))

    def send_row(
        self,
        destination: int,
        kind: Kind,
        *,
        tables: Tables,
        row: int,
        fragment: int,
        host: int,
    ) -> None:
        """Queue a copy of a slot's row under another header (RESULT to a root that restarted)."""
        slot = int(tables.shards[row, 0]) + fragment
        saved = tables.rows[slot, :HEAD].copy()
        stamp(tables, row, fragment, int(kind), host)
        copy = tables.rows[slot].copy()
        tables.rows[slot, :HEAD] = saved
        self._queue.append(Transmission(destination, copy.view(np.uint8), self._offsets[:1], ROW_BYTES))
