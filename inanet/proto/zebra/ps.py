"""A PS shard: takes cold gradients from workers and sums of hot ones from the switch, finishes iterations, answers pulls.

An iteration is finished when every worker's END and all its packets, and the switch's, are in (R12). Gradients are kept until
then and added in the order of ranks and sequence numbers, in float64: what comes out does not depend on when packets
came. Then every worker gets the new values of hot parameters (NEWS), and its END: the iteration is over.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.events import PeerSilent
from inanet.proto.zebra.keyindex import KeyIndex
from inanet.proto.zebra.layout import in_sequence
from inanet.proto.zebra.ledger import BEYOND, FRESH, SEEN, Ledger
from inanet.proto.zebra.membership import EMPTY, HotSet, Job
from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf, acknowledgements, by_length
from inanet.proto.zebra.store import Initial, Optimiser, Store, Sum, zeros
from inanet.proto.zebra.stream import Path, Stream, Timing
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.zebra import KIND_SHIFT, Flag, Kind


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """A shard has all of an iteration. ``keys`` were updated, by ``contributions`` in all."""

    job: int
    iteration: int
    shard: int
    keys: int
    contributions: int


PsEvent = IterationFinished | PeerSilent


@dataclass(slots=True)
class _Pile:
    """Gradients of the open iteration: parts with the order they count in, keys or ranks, and words."""

    order: list[I64] = field(default_factory=list)
    names: list[U64] = field(default_factory=list)
    words: list[NDArray[np.uint32]] = field(default_factory=list)

    def add(self, order: I64, names: U64, words: NDArray[np.uint32]) -> None:
        self.order.append(order)
        self.names.append(names)
        self.words.append(words)

    def sorted(self, width: int) -> tuple[U64, NDArray[np.uint32]]:
        """Names and words in their order."""
        if not self.order:
            return np.zeros(0, np.uint64), np.zeros((0, width), np.uint32)
        place = np.argsort(np.concatenate(self.order), kind="stable")
        return np.concatenate(self.names)[place], np.concatenate(self.words)[place]


class ParameterShard:
    """Shard ``number`` of a job. ``optimiser`` turns a sum of gradients into new values; ``initial`` gives first ones.

    Iterations are numbered from 1. A hot set is known to all machines (:meth:`prepare`) before it is announced, at shard 0
    (:meth:`announce`): the END of the next iteration's NEWS tells all workers to use it from then on.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        optimiser: Optimiser | None = None,
        initial: Initial = zeros,
        timing: Timing | None = None,
    ) -> None:
        self.job = job
        self.number = number
        self.store = Store(job.width, optimiser or Sum(), initial)
        self.timing = timing or Timing()
        self.finished = 0
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.cold = self.pulled = 0
        self._rank_of = {address: rank for rank, address in enumerate(job.workers)}
        self._hot = {EMPTY.version: EMPTY}
        self._ranks = {EMPTY.version: KeyIndex()}
        #: version that the open iteration is to use, and the one after it
        self._version = self._next = EMPTY.version
        self._workers = Ledger(len(job.workers))
        self._switch = Ledger(1)
        self._cold, self._sums = _Pile(), _Pile()
        self._path = Path(self.timing)
        self._news: Stream | None = None
        self._out: list[Transmission] = []
        self._events: list[PsEvent] = []
        self._since = 0.0
        self._told = False
        self._repeated = self._sent = 0

    # ------------------------------------------------------------- hot sets

    def prepare(self, hot: HotSet) -> None:
        """Know a hot set, so that sums can come under its ranks."""
        self._hot[hot.version] = hot
        self._ranks[hot.version] = KeyIndex(hot.keys)

    def announce(self, version: int) -> None:
        """From the next iteration that begins after the open one, all use this hot set. For shard 0.

        Raises ``KeyError`` for a version that was not prepared.
        """
        if version not in self._hot:
            raise KeyError(f"hot set {version} of job {self.job.number} has not been prepared")
        self._next = version

    def updates(self) -> tuple[U64, I64]:
        """Keys, and contributions to them that came to this shard by themselves, since this was last asked."""
        return self.store.updates()

    # -------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        judged = Judged(batch, self.job.number, self.job.key)
        sources = batch.sources.tolist()
        ranks = np.array([self._rank_of.get(source, -1) for source in sources], np.int64)
        kinds = judged[Column.KIND]
        from_switch = batch.sources == np.uint64(self.job.switch)
        judged.refuse(np.where(kinds == Kind.AGGREGATE, ~from_switch, ranks < 0), Drop.FOREIGN_HOST)
        taken = (kinds == Kind.COLD) | (kinds == Kind.AGGREGATE) | (kinds == Kind.PULL) | (kinds == Kind.ACK)
        judged.refuse(~taken, Drop.BAD_TYPE)
        judged.refuse((kinds != Kind.ACK) & (judged[Column.WIDTH] != self.job.width), Drop.BAD_TYPE)
        if not self._workers.begun and not self._switch.begun:
            self._since = now
        acked = [
            self._gradients(judged, Kind.COLD, self._workers, ranks, self._cold),
            self._gradients(judged, Kind.AGGREGATE, self._switch, np.zeros(len(batch), np.int64), self._sums),
        ]
        head = self._head(0)
        for which in acked:
            self._out += acknowledgements(judged, which, head)
        self._acknowledged(judged, ranks, now)
        if self._workers.complete and (not self.job.switch or self._switch.complete):
            self._finish()
        self._answer(judged)
        np.add.at(self.drops, judged.reason, 1)

    def _head(self, version: int) -> Head:
        job = self.job
        return Head(job.number, job.key, self.number, version, self.finished, job.width)

    def _gradients(self, judged: Judged, kind: Kind, ledger: Ledger, sources: I64, pile: _Pile) -> I64:
        """Enter gradients of the open iteration; gives the packets to acknowledge."""
        which = judged.of(kind)
        if not len(which):
            return which
        ahead = judged[Column.ITERATION][which] - (self.finished + 1)
        judged.refuse(which[ahead > 0], Drop.NOT_OPEN)
        judged.refuse(
            which[~np.isin(judged[Column.VERSION][which], list(self._hot)) & (ahead == 0)], Drop.FUTURE_PLAN
        )
        late = which[ahead < 0]
        live = which[(ahead == 0) & (judged.reason[which] == 0)]
        columns = judged.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = ledger.enter(sources[live], columns[:, Column.SEQUENCE], ends)
        judged.reason[live[how == SEEN]] = Drop.DUPLICATE
        judged.reason[live[how == BEYOND]] = Drop.BAD_FRAGMENT
        judged.reason[late] = Drop.STALE_ROUND
        fresh = live[how == FRESH]
        if len(fresh):
            columns = judged.columns[fresh]
            self._version = int(columns[0, Column.VERSION])
            names, words = judged.entries(fresh)
            place = sources[fresh] << 32 | columns[:, Column.SEQUENCE]
            pile.add(np.repeat(place, columns[:, Column.PAIRS]), names, words)
        return np.concatenate([live[how != BEYOND], late])

    def _acknowledged(self, judged: Judged, ranks: I64, now: float) -> None:
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        ours = (columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.NEWS) & (
            columns[:, Column.ITERATION] == self.finished
        )
        judged.reason[which[~ours]] = Drop.STALE_ROUND
        if self._news is None:
            return
        for rank in np.unique(ranks[which[ours]]).tolist():
            mine = ours & (ranks[which] == rank)
            self._news.acknowledge(columns[mine, Column.SEQUENCE], rank, now)

    # ----------------------------------------------------------- iterations

    def _finish(self) -> None:
        """Add up, change parameters, tell the workers."""
        job, hot = self.job, self._hot[self._version]
        keys, words = self._cold.sorted(job.width)
        ranks, sums = self._sums.sorted(job.width)
        at = ranks.astype(np.int64)
        values = words.view(np.float32).astype(np.float64)
        if job.floats:
            totals = sums.view(np.float32).astype(np.float64)
        else:
            totals = sums.view(np.int32) / hot.scale[at][:, None] if len(at) else np.zeros((0, job.width))
        every, place = np.unique(np.concatenate([keys, hot.keys[at]]), return_inverse=True)
        gradients = np.zeros((len(every), job.width), np.float32)
        both = np.concatenate([values, totals])
        for column in range(job.width):
            gradients[:, column] = np.bincount(place, weights=both[:, column], minlength=len(every))
        updates = np.bincount(place[: len(keys)], minlength=len(every)).astype(np.int64)
        changed = self.store.apply(every, gradients, updates)
        self.finished += 1
        self.cold += len(keys)
        self._events.append(IterationFinished(job.number, self.finished, self.number, len(every), len(keys)))
        self._tell(every, changed)
        self._workers.clear()
        self._switch.clear()
        self._cold, self._sums = _Pile(), _Pile()
        self._told = False

    def _tell(self, keys: U64, values: NDArray[np.float32]) -> None:
        job = self.job
        ranks = self._ranks[self._version].find(keys)
        hot = np.flatnonzero(ranks >= 0)
        hot = hot[np.argsort(ranks[hot])]
        sheaf = Sheaf(
            Kind.NEWS,
            self._head(self._version),
            in_sequence(len(hot), job.capacity(Kind.NEWS)),
            ranks[hot].astype(np.uint64),
            np.ascontiguousarray(values[hot]).view(np.uint32),
            next_version=self._next if self.number == 0 else self._version,
        )
        if self._news is not None:
            self._sent += self._news.sent
            self._repeated += self._news.repeated
        self._news = Stream(sheaf, job.workers, self._path, group=job.switch or None)

    def _answer(self, judged: Judged) -> None:
        """Answer pulls of finished iterations."""
        which = judged.of(Kind.PULL)
        if not len(which):
            return
        ahead = judged[Column.ITERATION][which] - self.finished
        judged.reason[which[ahead > 0]] = Drop.NOT_OPEN
        judged.reason[which[ahead < 0]] = Drop.STALE_ROUND
        live = which[ahead == 0]
        sources = judged.batch.sources
        live = live[np.argsort(sources[live], kind="stable")]
        keys, _ = judged.entries(live)
        words = self.store.read(keys).view(np.uint32)
        self.pulled += len(keys)
        columns = judged.columns[live]
        counts = np.ascontiguousarray(columns[:, Column.PAIRS])
        sheaf = Sheaf(Kind.VALUES, self._head(self._version), counts, None, words, end=False)
        sheaf.number(columns[:, Column.SEQUENCE], self.job.key)
        for source in np.unique(sources[live]).tolist():
            mine = sources[live] == source
            self._out += by_length(int(source), sheaf.arena, sheaf.offsets[mine], sheaf.lengths[mine])

    # ------------------------------------------------------------ contract

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        out, self._out = self._out, []
        if self._news is not None:
            out += self._news.transmit(now)
        return out

    def timer(self) -> float | None:
        """Next deadline."""
        times = [self._news.timer()] if self._news is not None else []
        if self._waiting() and not self._told:
            times.append(self._since + self.timing.silent)
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Tell of workers that the others wait for."""
        if self._waiting() and not self._told and now >= self._since + self.timing.silent:
            self._told = True
            names = [f"rank {rank}" for rank in self._workers.missing()]
            if self.job.switch and not self._switch.complete:
                names.append("switch")
            self._events += [PeerSilent(self.job.number, name, now - self._since) for name in names]

    def _waiting(self) -> bool:
        return self._workers.begun or self._switch.begun

    def events(self) -> list[PsEvent]:
        """What has happened since the last call."""
        out, self._events = self._events, []
        return out

    def stats(self) -> dict[str, int]:
        """Counters; drops by reason as ``drop_<reason>``."""
        news = self._news
        return {
            "iterations": self.finished,
            "keys": len(self.store),
            "cold": self.cold,
            "pulled": self.pulled,
            "news_sent": self._sent + (news.sent if news else 0),
            "news_repeated": self._repeated + (news.repeated if news else 0),
        } | {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
