"""A job of asynchronous training at the PS: adds up what nodes and single workers send, closes epochs, sends the model to participants.

Every gradient counts once. A sum has its slot's number, and a slot's next sum leaves only when this one has been taken,
so a number that is not higher is a copy. A contribution has its worker's number, and the PS knows which fragments of it are
in. Each fragment is scaled by the gradients that it is really of (actual counts). What comes later than its epoch counts in the
next.

An epoch ends when K_t workers' gradients are in, whole; whoever else's is in whole by then takes part as well. These get
the model, nobody else does. What "the model" is here: the sum of all means so far, which a worker subtracts its last one from.

Nothing waits here but for workers: they say that they have sent everything, and repeat it until they get a result. This is when
numbers are put right, what is missing is asked for again, and results are repeated.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import load16, load32
from inanet.kernels.header import lowest_bit, newer32
from inanet.kernels.jit import njit
from inanet.proto.common.plan import Scheduled, TensorLayout
from inanet.proto.slots.goat.frames import ARENA, OPTIONS
from inanet.proto.slots.goat_async.participation import Choose, Waiting
from inanet.proto.slots.ps import PSJob
from inanet.wire.drops import Drop
from inanet.wire.goat import (
    BITMAP_AT,
    FRAGMENT_AT,
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    MARKS,
    NO_SUBMODEL,
    NODE_AT,
    NUMBER_AT,
    PS_NODE,
    SUBMODEL_AT,
    VALUES,
    VALUES_AT,
    EpochKind,
    Head,
    Kind,
)

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
_WORKERS = 32
#: seconds in which numbers are not published again
HOLD = 0.005
#: epochs that :attr:`Running.updates` remembers
REMEMBERED = 8


class Table(NamedTuple):
    """An epoch's sums, one entry per fragment of the tensor, and what has counted."""

    #: int64[F, 64]
    sums: NDArray[np.int64]
    #: gradients in each sum
    counts: I64
    #: workers whose present gradient has counted
    inside: NDArray[np.uint32]
    #: uint32[N, F]: the last sum's number of every node's slot
    heard: NDArray[np.uint32]
    #: each worker's present gradient, and its fragments that have not counted
    serial: NDArray[np.uint32]
    left: I64
    #: first fragment and length of each sub-model, -1 and 0 where there is none
    first: I64
    size: I64


_i64, _u32 = types.int64[::1], types.uint32[::1]
TABLE: Any = types.NamedTuple(
    (types.int64[:, ::1], _i64, _u32, types.uint32[:, ::1], _u32, _i64, _i64, _i64), Table
)
_SUM = int(Kind.SUM)
_DUPLICATE, _OVERLAP = int(Drop.DUPLICATE), int(Drop.OVERLAP)
_BAD_FRAGMENT, _STALE = int(Drop.BAD_FRAGMENT), int(Drop.STALE_SEQUENCE)
_NODE, _SUBMODEL, _FRAGMENT, _NUMBER, _BITMAP = NODE_AT, SUBMODEL_AT, FRAGMENT_AT, NUMBER_AT, BITMAP_AT
_AT, _VALUES = VALUES_AT, VALUES


@njit(types.void(TABLE, types.int64, types.uint32, ARENA, types.int64), **OPTIONS)
def add(t: Table, place: int, bitmap: int, arena: Any, at: int) -> None:
    """Add a packet's values, of these workers, to a fragment."""
    for j in range(_VALUES):
        t.sums[place, j] += np.int64(np.int32(load32(arena, at + _AT + 4 * j)))
    t.inside[place] |= bitmap
    for worker in range(t.serial.size):
        if bitmap >> np.uint32(worker) & np.uint32(1):
            t.counts[place] += 1
            t.left[worker] -= 1


@njit(types.void(TABLE, ARENA, _i64, types.uint8[::1]), **OPTIONS)
def take(t: Table, arena: Any, offsets: Any, reason: Any) -> None:
    """Take sums and contributions in order of arrival; ``reason[k]`` says what became of packet *k*."""
    for k in range(offsets.size):
        at = offsets[k]
        submodel = np.int64(load16(arena, at + _SUBMODEL))
        fragment = np.int64(load32(arena, at + _FRAGMENT))
        if submodel >= t.first.size or fragment >= t.size[submodel]:
            reason[k] = _BAD_FRAGMENT
            continue
        place = t.first[submodel] + fragment
        bitmap, number = load32(arena, at + _BITMAP), load32(arena, at + _NUMBER)
        if np.int64(arena[at + 1]) == _SUM:
            node = np.int64(load16(arena, at + _NODE))
            if node >= t.heard.shape[0]:
                reason[k] = _BAD_FRAGMENT
                continue
            if not newer32(number, t.heard[node, place]):
                reason[k] = _DUPLICATE
                continue
            if bitmap & t.inside[place]:
                reason[k] = _OVERLAP
                continue
            t.heard[node, place] = number
        else:
            worker = lowest_bit(bitmap)
            if number == np.uint32(t.serial[worker] + np.uint32(1)):
                # it has not got this one's result yet
                reason[k] = _STALE
                continue
            if number != t.serial[worker] or bitmap & t.inside[place]:
                reason[k] = _DUPLICATE
                continue
        add(t, place, bitmap, arena, at)


@dataclass(frozen=True, slots=True)
class Update:
    """An epoch is over. ``counts`` int64[F]: the gradients that each fragment's mean is of; ``inside`` the workers that take
    part, ``staleness`` how many epochs ago each of them got the model before; ``awaited`` K_t; times in seconds.
    """

    epoch: int
    counts: I64
    inside: tuple[int, ...]
    staleness: tuple[int, ...]
    awaited: int
    began: float
    ended: float


class Running:
    """A job and its tensor, once that is known."""

    def __init__(self, job: PSJob, choose: Choose) -> None:
        self.job = job
        self.workers = len(job.members)
        self.full = job.full
        #: workers that have left, by index
        self.departed: set[int] = set()
        self.waiting = Waiting(self.workers, choose)
        self.allowed: NDArray[np.uint64] = np.array(sorted({*job.switches}), np.uint64)
        self.parts: tuple[Scheduled, ...] = ()
        self.table: Table | None = None
        self.factor = 1.0
        #: float64[F, 64]: the sum of all means so far
        self.total: F64 = np.zeros((0, VALUES))
        #: what each worker was given last: the epoch, big-endian float32[F + 1, 64] as integers, and its :class:`Head`
        self.models: dict[int, tuple[int, NDArray[Any], NDArray[Any]]] = {}
        self.updates: deque[Update] = deque(maxlen=REMEMBERED)
        self.began = 0.0
        self.revision = 0
        self.published = -1.0
        #: it is published whose gradients count in this epoch, and since when
        self.released = False
        self.released_at = 0.0
        #: words of each worker since then
        self.reminded: I64 = np.zeros(self.workers, np.int64)
        self.out: list[NDArray[Any]] = []

    # ---------------------------------------------------------------- the tensor

    def hold(self, layout: TensorLayout) -> None:
        """Take contributions to a tensor from now on. Raises ``ValueError`` if there is one already."""
        if self.table is not None:
            raise ValueError(
                "a job in asynchronous training has one tensor: hand the whole gradient over as one array"
            )
        if not layout.scheduled:
            raise ValueError("a tensor without elements has no epochs")
        self.parts = layout.scheduled
        last = max(part.number for part in self.parts)
        first, size = np.full(last + 1, -1, np.int64), np.zeros(last + 1, np.int64)
        for part in self.parts:
            first[part.number], size[part.number] = part.first, part.count
        fragments = int(size.sum())
        nodes = 1 + len(self.parts[0].bases)
        left = np.zeros(_WORKERS, np.int64)
        left[: self.workers] = fragments
        self.factor = layout.spec.factor
        self.total = np.zeros((fragments, VALUES))
        self.table = Table(
            sums=np.zeros((fragments, VALUES), np.int64),
            counts=np.zeros(fragments, np.int64),
            inside=np.zeros(fragments, np.uint32),
            heard=np.zeros((nodes, fragments), np.uint32),
            serial=np.ones(_WORKERS, np.uint32),
            left=left,
            first=first,
            size=size,
        )

    @property
    def fragments(self) -> int:
        """Of the tensor."""
        return len(self.total)

    # ---------------------------------------------------------------- epochs

    def _begin(self, now: float) -> None:
        self.waiting.begin(now)
        self.began, self.revision, self.released = now, -1, False
        self.publish(now)

    def publish(self, now: float) -> None:
        """Publish K_t^s of every sub-model and switch. Once K_t workers have sent everything, it is their gradients that count,
        and what slots have of them leaves.
        """
        assert self.table is not None
        first = self.waiting.first()
        waited = first or self.waiting.expected
        self.revision += 1
        self.published = now
        if first and not self.released:
            self.released, self.released_at = True, now
            self.reminded[:] = 0
        mask = sum(1 << worker for worker in first)
        switches = self.table.heard.shape[0] - 1
        needs = np.zeros((switches + 1, len(self.table.first)), np.int64)
        for part in self.parts:
            inside = self.table.inside[part.first : part.first + part.count]
            for worker in waited:
                if not (inside >> np.uint32(worker) & 1).all():
                    needs[part.nodes[worker], part.number] += 1
        chunks = range(0, needs.shape[1], VALUES)
        frames = self._frames(switches * len(chunks), EpochKind.PUBLISH)
        rows = [(node, at) for node in range(1, switches + 1) for at in chunks]
        for frame, (node, at) in zip(frames, rows, strict=True):
            frame["node"], frame["submodel"] = node, at
            its = needs[node, at : at + VALUES]
            frame["values"][: len(its)] = its
        frames["number"], frames["fragment"], frames["bitmap"] = self.waiting.epoch, self.revision, mask
        self.out.append(frames)

    def advance(self, now: float) -> bool:
        """Close the epoch if it is complete; whether it was. The first one begins with the first packet."""
        if self.table is None or not self.waiting.there.any():
            return False
        if not self.waiting.epoch:
            self._begin(now)
        whole = np.flatnonzero((self.table.left[: self.workers] == 0) & self.waiting.there)
        for worker in whole.tolist():
            self.waiting.has_sent(worker, now)
        if len(whole) < self.waiting.participants:
            self._release(now)
            return False
        self._close(whole, now)
        return True

    def _awaits(self, workers: tuple[int, ...]) -> bool:
        """Whether something of these workers' gradients has not counted."""
        assert self.table is not None
        return bool(self.table.left[list(workers)].any())

    def _release(self, now: float) -> bool:
        """Have nodes send on what they hold of the first K_t workers, once these have sent everything."""
        first = self.waiting.first()
        if self.released or not first or not self._awaits(first):
            return False
        self.publish(now)
        return True

    def _close(self, inside: I64, now: float) -> None:
        table, epoch, awaited = self.table, self.waiting.epoch, self.waiting.participants
        assert table is not None
        some = table.counts > 0
        self.total[some] += table.sums[some] / (table.counts[some, None] * self.factor)
        counts = table.counts.copy()
        table.sums[:], table.counts[:] = 0, 0
        staleness = self.waiting.give(inside, now)
        bits = sum(1 << worker for worker in inside.tolist())
        table.inside[:] &= np.uint32(0xFFFFFFFF ^ bits)
        table.serial[inside] += np.uint32(1)
        table.left[inside] = self.fragments
        model = np.zeros((self.fragments + 1, VALUES), ">f4")
        model[:-1] = self.total
        plain = model.view(">i4")
        for worker, age in zip(inside.tolist(), staleness.tolist(), strict=True):
            head = np.zeros(VALUES, np.int32)
            head[Head.PARTICIPANTS] = np.uint32(bits).view(np.int32)
            head[Head.AWAITED], head[Head.STALENESS] = awaited, age
            self.models[worker] = epoch, plain, head
            self.give(worker, np.arange(min(self.fragments + 1, self.job.window, MARKS)))
        self.updates.append(
            Update(epoch, counts, tuple(inside.tolist()), tuple(staleness.tolist()), awaited, self.began, now)
        )
        self._begin(now)

    def give(self, worker: int, places: I64) -> None:
        """Send these fragments of its model to a worker."""
        epoch, model, head = self.models[worker]
        frames = self._frames(len(places), Kind.RESULT)
        frames["submodel"], frames["fragment"] = NO_SUBMODEL, places
        frames["number"], frames["bitmap"] = epoch, 1 << worker
        frames["values"] = model[places]
        frames["values"][places == self.fragments] = head
        self.out.append(frames)

    # ---------------------------------------------------------------- workers

    def ready(self, worker: int, serial: int, start: int, marks: NDArray[Any], now: float) -> None:
        """A worker says that it has sent all of its gradient, or what it lacks of its result."""
        assert self.table is not None
        behind = (int(self.table.serial[worker]) - serial) & 0xFFFFFFFF
        if behind == 1 and worker in self.models:
            if start == 0 and now - self.waiting.given[worker] < HOLD:
                # it crosses the result
                return
            places = start + np.flatnonzero(unpack(marks))
            self.give(worker, places[places <= self.fragments][: self.job.window])
            return
        if behind:
            return
        news = bool(np.isnan(self.waiting.sent[worker]))
        self.waiting.has_sent(worker, now)
        first = self.waiting.first()
        again = not news and now - self.published >= HOLD
        if not self._release(now) and again and worker in first and self._awaits(first):
            # something is lost
            self.publish(now)
        missing = np.zeros(MARKS, np.bool_)
        begin = 0
        # once more after a pause that follows its round trips: what was released may be on its way before
        self.reminded[worker] += worker in first
        if worker in first and self.reminded[worker] > 2 and now - self.released_at >= 2 * HOLD:
            lacking = np.flatnonzero(~(self.table.inside >> np.uint32(worker) & 1).astype(np.bool_))
            if len(lacking):
                begin = int(lacking[0])
                missing[lacking[lacking < begin + min(MARKS, self.job.window)] - begin] = True
        frames = self._frames(1, EpochKind.REPEAT)
        frames["fragment"], frames["number"], frames["bitmap"] = begin, serial, 1 << worker
        frames["values"] = pack(missing)
        self.out.append(frames)

    def leave(self, worker: int, now: float) -> None:
        """A worker has left the job."""
        self.departed.add(worker)
        self.waiting.leave(worker)
        # somebody else's gradient may count now
        self.released = False
        if self.table is not None and self.waiting.there.any() and not self.advance(now):
            self.publish(now)

    def _frames(self, count: int, kind: int) -> NDArray[Any]:
        frames = np.zeros(count, FRAME)
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, kind, self.job.job
        frames["node"] = PS_NODE
        return frames

    def acknowledge(self, heads: NDArray[Any]) -> None:
        """Tell nodes and workers that what these packets have brought is here."""
        frames = self._frames(len(heads), EpochKind.ACK)
        for name in ("submodel", "fragment", "number", "bitmap"):
            frames[name] = heads[name]
        sums = heads["kind"] == _SUM
        frames["kind"][sums] = EpochKind.TAKEN
        frames["node"][sums], frames["asker"][sums] = heads["node"][sums], heads["asker"][sums]
        self.out.append(frames)


def beside(frames: list[NDArray[Any]]) -> NDArray[np.uint8]:
    """Frames as bytes, side by side: uint8[n, 284]. Joined as they are, they would lose their byte order."""
    return np.concatenate([one.view(np.uint8).reshape(len(one), FRAME_BYTES) for one in frames])


def pack(marks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """:data:`MARKS` booleans as values: bit j of value i is ``marks[32 i + j]``."""
    return np.packbits(marks, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def unpack(values: NDArray[Any]) -> NDArray[np.bool_]:
    """The inverse of :func:`pack`."""
    words = values.astype(np.int32).view(np.uint32).astype("<u4")
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)
