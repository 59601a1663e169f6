"""A worker of a system whose slots are in a switch: the machine that all of them share.

It quantises, numbers, sends, takes results, repeats what is lost, and says when a round is done. A system adds a
:class:`Framing` and, if it has one, a :class:`Pace`.

All workers of a job begin the same rounds in the same order. Rounds follow each other in one sequence of fragments, so
whatever alternates or is hashed by number goes on across tensors; a round that is refused (NaN or infinity somewhere) takes
its numbers as well.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, PeerSilent, Refused, RoundDone
from inanet.proto.common.plan import Scheduled, TensorSpec
from inanet.proto.slots.exponents import ExponentClient
from inanet.proto.slots.ps import drops_by_label
from inanet.proto.slots.source import Arrays, Source, Tensor
from inanet.proto.slots.stream import Stream
from inanet.proto.slots.window import Index, Window
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's place in a job. ``job`` is its number in the framing, ``index`` the worker's, 0 to 31, of ``workers``.

    ``ranks`` contribute over all hosts (*n* of the number format). ``switch`` is where contributions are sent to, ``results``
    where answers come from if that is somewhere else (the PS); ``root`` the address of the job's
    :class:`~inanet.proto.slots.exponents.ExponentRoot` and ``key`` its secret, not needed for integers. ``first`` is the
    number of the first fragment, the same for all workers.
    """

    job: int
    index: int
    workers: int
    ranks: int
    switch: int
    results: int = 0
    root: int = 0
    key: int = 0
    first: int = 0

    @property
    def bit(self) -> int:
        """The worker's bit in bitmaps."""
        return 1 << self.index

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 32 or not 0 <= self.index < self.workers:
            raise ValueError(
                f"job {self.job}: worker {self.index} of {self.workers}; bitmaps have room for 32 workers"
            )


@dataclass(frozen=True, slots=True)
class Layout:
    """A framing: values in a packet, bytes of it, where the values begin, bits of a fragment's number that travel."""

    width: int
    frame_bytes: int
    values_at: int
    sequence_bits: int


@dataclass(slots=True)
class Answers:
    """Results in a batch, in order of arrival: the part of the number that travels, where the values lie, marks."""

    low: Index
    ats: Index
    ecn: Mask
    col: Mask
    #: slot to use from now on instead, or -1 (ATP)
    instead: Index

    @classmethod
    def unmarked(cls, low: Index, ats: Index) -> "Answers":
        """Answers of a framing without marks."""
        none = np.zeros(len(low), np.bool_)
        return cls(low, ats, none, none, np.full(len(low), -1))


class Pace(Protocol):
    """How much may be in flight, and what answers change about it."""

    @property
    def window(self) -> int:
        """Fragments that may be unanswered."""
        ...

    def uses_slots(self, numbers: Index) -> Mask:
        """Which of these fragments, sent for the first time and in this order, may use the switch's slots."""
        ...

    def answered(self, numbers: Index, ecn: Mask, col: Mask, base: int, now: float) -> None:
        """Results have come for these fragments, in order of arrival; all below ``base`` have theirs."""
        ...


class FixedPace:
    """As much as there are slots, whatever happens."""

    def __init__(self, window: int) -> None:
        self.window = window

    def uses_slots(self, numbers: Index) -> Mask:
        """All of them."""
        return np.ones(len(numbers), np.bool_)

    def answered(self, numbers: Index, ecn: Mask, col: Mask, base: int, now: float) -> None:
        """Nothing to learn."""


class Silence:
    """Since when a worker has heard nothing of what it awaits; reported after ``seconds``, and again each time they pass."""

    __slots__ = ("_seconds", "_since")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since = inf

    def begin(self, now: float) -> None:
        """Something is awaited from now on, if nothing was."""
        self._since = min(self._since, now)

    def heard(self, now: float) -> None:
        """Something has come."""
        if self._since < inf:
            self._since = now

    def end(self) -> None:
        """Nothing is awaited any more."""
        self._since = inf

    @property
    def due(self) -> float:
        """When silence is to be reported; infinity: nothing is awaited."""
        return self._since + self._seconds

    def report(self, job: int, name: str, now: float) -> list[NodeEvent]:
        """What to report of a neighbour."""
        if now < self.due:
            return []
        silent, self._since = now - self._since, now
        return [PeerSilent(job, name, silent)]


class Framing:
    """A system's packets, and what its workers know beside what all systems' do. One object for each worker."""

    #: exponents of floats are agreed with a root
    asks_root = True

    def __init__(self, member: Membership, layout: Layout) -> None:
        self.member, self.layout = member, layout

    def add(self, tensor: Tensor, priority: int) -> None:
        """A tensor is known from now on. Raises ``ValueError`` for one that the system cannot sum."""

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Where a tensor's sub-models go; only systems of several switches have any."""

    def drop(self, tensor: int) -> None:
        """A tensor is forgotten; rounds of it that have begun go on."""

    def source(self, tensor: Tensor, round_: int, arrays: Arrays) -> Source:
        """How a round becomes fragments."""
        return Stream(tensor, round_, arrays, self.layout.width)

    @abstractmethod
    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        """Find the results among packets ``index``, whose lengths and senders are right; count the others in ``drops``."""

    @abstractmethod
    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        """Write headers: ``frames`` is uint8[n, frame_bytes], the first ``again`` of them are repeated.

        ``slots``: those that may use the switch's slots. ``streams`` are the rounds that the fragments may be of.
        """

    def learn(self, numbers: Index, instead: Index) -> None:
        """What new answers say beside values and marks (:attr:`Answers.instead`)."""

    def own(self, now: float, busy: bool) -> NDArray[np.uint8] | None:
        """What there is to send beside contributions, uint8[n, frame_bytes]. ``busy``: a round is under way."""
        return None

    def timer(self) -> float:
        """When :meth:`own` has something to send; infinity: nobody knows."""
        return inf

    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """The worker's counters, by name, with those of the system."""
        return stats


class Worker:
    """The window bounds what is in flight; its capacity must be the same for all workers of the job."""

    def __init__(self, framing: Framing, window: Window, pace: Pace | None = None) -> None:
        self.framing = framing
        self.member = member = framing.member
        self.layout = framing.layout
        self.window = window
        self.pace: Pace = pace or FixedPace(window.capacity)
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._client = (
            ExponentClient(
                member.job,
                member.root,
                member.bit,
                member.key,
                workers=member.workers,
                least=window.timing.retransmit,
            )
            if member.root
            else None
        )
        self._tensors: dict[int, Tensor] = {}
        self._streams: deque[Source] = deque()
        self._end = member.first
        self._events: list[NodeEvent] = []
        self._silence = Silence(window.timing.silent)
        self._sent = self._sent_again = self._bypassed = 0

    # ---------------------------------------------------------------- rounds

    def add_tensor(self, tensor: int, spec: TensorSpec, priority: int = 0) -> None:
        """Make a tensor known under a number, 0 to 65535, the same on all workers. ``priority`` is for systems in which tensors evict
        others (ESA).

        Raises ``ValueError`` for what switches cannot sum, and for floats without a root that agrees on exponents.
        """
        made = Tensor(tensor, spec, self.member.ranks)
        if made.format.uses_exponents and self._client is None and self.framing.asks_root:
            raise ValueError(
                f"job {self.member.job}, tensor {spec.name!r}: {spec.dtype} needs the address of a root for exponents"
            )
        self.framing.add(made, priority)
        self._tensors[tensor] = made

    def schedule(self, tensor: int, scheduled: Sequence[Scheduled]) -> None:
        """Where a tensor's sub-models go; only systems of several switches have any."""
        self.framing.schedule(tensor, scheduled)

    def drop_tensor(self, tensor: int) -> None:
        """Forget a tensor; rounds of it that have begun go on."""
        self._tensors.pop(tensor, None)
        self.framing.drop(tensor)

    def begin(self, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float) -> None:
        """Start this host's part in a round. ``arrays`` are 1-D, one per local rank, overwritten by the result.

        Raises ``ValueError`` for arrays that do not suit the tensor, ``KeyError`` for a tensor that is not known.
        """
        self._streams.append(self.framing.source(self._tensors[tensor], round_, arrays))
        self._silence.begin(now)
        self._turn(now)

    def give_up(self, round_: int) -> None:
        """A round has failed for everybody. Its arrays are left alone from now on. Its fragments go on where the numbers of
        later ones follow theirs.
        """
        for stream in [stream for stream in self._streams if stream.round == round_]:
            if not stream.detach():
                self._streams.remove(stream)

    def _turn(self, now: float) -> None:
        """Open, number, feed and end rounds, in order."""
        ahead: set[int] = set()
        unbroken = True
        for stream in list(self._streams):
            tensor = stream.tensor.tensor
            if not stream.opened and tensor not in ahead:
                stream.open()
            if stream.opened:
                stream.advance(self._client, now)
            if unbroken and stream.first is None:
                stream.start(self._end)
            unbroken = unbroken and stream.count is not None
            if unbroken and stream.first is not None and stream.count is not None:
                self._end = max(self._end, stream.first + stream.count)
            if stream.finished and tensor not in ahead:
                self._finish(stream)
            else:
                ahead.add(tensor)
        if not self._streams:
            self._silence.end()

    def _finish(self, stream: Source) -> None:
        self._streams.remove(stream)
        stream.finish()
        job, tensor = self.member.job, stream.tensor
        if stream.refusal is not None:
            self._events.append(Refused(job, stream.round, tensor.tensor, *stream.refusal))
        else:
            self._events.append(
                RoundDone(job, stream.round, tensor.tensor, stream.overflow, stream.participation)
            )

    # ---------------------------------------------------------------- packets

    def _sized(self, batch: PacketBatch, index: Index) -> Index:
        """Those of the packets ``index`` that have the framing's length and come from where answers come from."""
        lengths, size = batch.lengths[index], self.layout.frame_bytes
        right = lengths == size
        theirs = batch.sources[index] == np.uint64(self.member.results or self.member.switch)
        if right.all() and theirs.all():
            return index
        self.drops[Drop.SHORT] += int(np.count_nonzero(lengths < size))
        self.drops[Drop.OVERSIZED] += int(np.count_nonzero(lengths > size))
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(right & ~theirs))
        good: Index = index[right & theirs]
        return good

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch: results, and the root's answers about exponents."""
        index = np.arange(len(batch))
        if self._client is not None:
            from_root = batch.sources == np.uint64(self._client.root)
            if from_root.any():
                reason = self._client.receive(batch, index[from_root], now)
                self.drops += np.bincount(reason, minlength=DROP_CODES)
                index = index[~from_root]
        self._silence.heard(now)
        index = self._sized(batch, index)
        if len(index):
            self._results(batch, self.framing.read(batch, index, self.drops, now), now)
        self._turn(now)

    def _results(self, batch: PacketBatch, answers: Answers, now: float) -> None:
        numbers = self.window.absolute(answers.low, self.layout.sequence_bits)
        new = self.window.accept(numbers, now)
        fresh = int(np.count_nonzero(new))
        self.drops[Drop.OK] += fresh
        if fresh < len(numbers):
            unknown = int(np.count_nonzero(numbers >= self.window.next))
            self.drops[Drop.BAD_FRAGMENT] += unknown
            self.drops[Drop.DUPLICATE] += len(numbers) - fresh - unknown
        if not fresh:
            return
        taken, ats = numbers[new], answers.ats[new]
        for stream in self._streams:
            if stream.first is None:
                break
            stop = self.window.next if stream.count is None else stream.first + stream.count
            mine = (taken >= stream.first) & (taken < stop)
            if mine.all():
                stream.take(batch.arena, ats, taken - stream.first)
                break
            if mine.any():
                stream.take(batch.arena, ats[mine], taken[mine] - stream.first)
        self.framing.learn(taken, answers.instead[new])
        self.pace.answered(taken, answers.ecn[new], answers.col[new], self.window.base, now)

    def transmit(self, now: float) -> list[Transmission]:
        """What is lost, what is new, what concerns exponents, and what the system has to say beside it."""
        own = self.framing.own(now, bool(self._streams))
        out = [] if own is None else [self._transmission(own)]
        if self._client is not None:
            out += self._client.transmit(now)
        lost = self.window.lost(now) if self._streams else np.zeros(0, np.int64)
        fresh = self.window.fresh(self.pace.window, self._limit(), now)
        numbers = np.concatenate([lost, fresh]) if len(lost) else fresh
        if len(numbers):
            out.append(self._frames(numbers, len(lost)))
        return out

    def _limit(self) -> int:
        """The first number that may not leave yet."""
        limit = self.window.next
        for stream in self._streams:
            if stream.first is None:
                break
            limit = max(limit, stream.first + stream.ready)
            if stream.ready != stream.count:
                break
        return limit

    def _frames(self, numbers: Index, again: int) -> Transmission:
        count, size = len(numbers), self.layout.frame_bytes
        arena = np.zeros(count * size, np.uint8)
        for stream in self._streams:
            if stream.first is None:
                break
            stop = stream.first + (stream.ready if stream.count is None else stream.count)
            if not again and stream.first <= numbers[0] and numbers[-1] < stop:
                # one run, as it mostly is
                stream.place(numbers - stream.first, arena, self.layout.values_at, size)
                break
            mine = np.flatnonzero((numbers >= stream.first) & (numbers < stop))
            self._place(stream, numbers, mine, arena)
        slots = np.ones(count, np.bool_)
        slots[again:] = self.pace.uses_slots(numbers[again:])
        self._bypassed += int(np.count_nonzero(~slots))
        self._sent += count
        self._sent_again += again
        frames = arena.reshape(count, size)
        self.framing.write(frames, numbers, again, slots, self._streams)
        return self._transmission(frames)

    def _transmission(self, frames: NDArray[np.uint8]) -> Transmission:
        count, size = frames.shape
        return Transmission(
            self.member.switch, frames.reshape(-1), np.arange(count, dtype=np.int64) * size, size
        )

    def _place(self, stream: Source, numbers: Index, mine: Index, arena: NDArray[np.uint8]) -> None:
        """Write a stream's fragments to their places; these are runs, of repeated and of fresh ones."""
        assert stream.first is not None
        for run in np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1):
            if len(run):
                at = int(run[0]) * self.layout.frame_bytes + self.layout.values_at
                stream.place(numbers[run] - stream.first, arena, at, self.layout.frame_bytes)

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next; None while no round is under way."""
        if not self._streams:
            return None
        due = min(self._silence.due, self.framing.timer())
        if (late := self.window.timer()) is not None and late < due:
            due = late
        if self._client is not None and (repeat := self._client.timer()) is not None and repeat < due:
            due = repeat
        return due

    def on_timer(self, now: float) -> None:
        """Report silence; what is due leaves with the next :meth:`transmit`."""
        self.window.look()
        self._events += self._silence.report(self.member.job, "switch", now)

    def events(self) -> list[NodeEvent]:
        """What happened since the last call. ``Refused`` has local rank -1 where another host holds the NaN or Inf."""
        events, self._events = self._events, []
        return events

    @property
    def successor(self) -> int:
        """Where the numbers of a job with other members may begin (elastic rounds): beyond all that anybody has sent by now.

        When a worker dies, the survivors' rounds fail; switch and PS forget the job and serve it anew, and new machines begin
        at the largest successor of the old ones. What is still under way from before is older then, and stale.
        """
        return self.window.next + 2 * self.window.capacity

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        stats = {
            "rows_sent": self._sent,
            "retransmissions": self._sent_again,
            "resent_by_gap": self.window.resent_by_gap,
            "resent_by_time": self.window.resent_by_time,
            "bypassed": self._bypassed,
            "results_in": int(self.drops[Drop.OK]),
            "window": self.pace.window,
            "in_flight": self.window.in_flight,
        }
        return self.framing.stats(stats)

    def drops_by_reason(self) -> dict[str, int]:
        return drops_by_label(self.drops)
