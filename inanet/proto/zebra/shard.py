"""A PS shard: takes cold gradients from workers and sums of hot ones from the switch, finishes iterations, answers pulls.

An iteration is finished when every worker's END and all its packets, and the switch's, are in (iteration ledger). Gradients are kept until
then and added in the order of ranks and sequence numbers, in float64: what comes out does not depend on when packets
came. Then every worker gets the new values of hot parameters (NEWS), and its END: the iteration is over.

With a journal (:mod:`~inanet.proto.zebra.journal`) another life of the shard goes on where one has ended. It has finished what
the journal says, tells the workers of the last iteration again, and has nothing of the open one: workers and the switch keep
what they have sent until an iteration is over (:mod:`~inanet.proto.zebra.stream`), and send all of the open one again. A shard
that has lost iterations says so to every worker that knows of them.

A rank's place in a job belongs to the first process that takes it: one that is started in the place of another cannot know what
that one had sent of an iteration, and gradients of two must not meet in a sum. So every process has a number of its life, which it
tells all shards and the switch before anything else (JOIN); a shard remembers the first of a rank, and refuses another.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Counted, PeerSilent
from inanet.proto.zebra import journal as records
from inanet.proto.zebra.hot import UpdateCounts
from inanet.proto.zebra.job import EMPTY, F32, HotSet, Job, forget
from inanet.proto.zebra.layout import in_sequence
from inanet.proto.zebra.ledger import BEYOND, FRESH, SEEN, Ledger
from inanet.proto.zebra.packets import (
    Column,
    EncodedPackets,
    Header,
    ParsedBatch,
    acknowledgements,
    ahead,
    among,
    answers,
    low,
)
from inanet.proto.zebra.store import Initial, KeyIndex, Optimiser, Store, Sum, zeros
from inanet.proto.zebra.stream import RoundTrips, Stream, Timing
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.zebra import KIND_SHIFT, Flag, Kind, Refusal


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """A shard has all of an iteration. ``keys`` were updated, by ``contributions`` in all."""

    job: int
    iteration: int
    shard: int
    keys: int
    contributions: int


PsEvent = IterationFinished | PeerSilent | Counted


@dataclass(slots=True)
class GradientLog:
    """Parts with the order they count in, int64[n], keys or ranks, uint64[n], and words, uint32[n, width]."""

    order: list[I64] = field(default_factory=list)
    names: list[U64] = field(default_factory=list)
    words: list[NDArray[np.uint32]] = field(default_factory=list)

    def append(self, order: I64, names: U64, words: NDArray[np.uint32]) -> None:
        """Add a part."""
        self.order.append(order)
        self.names.append(names)
        self.words.append(words)

    def sorted(self, width: int) -> tuple[U64, NDArray[np.uint32]]:
        """Names and words in their order."""
        if not self.order:
            return np.zeros(0, np.uint64), np.zeros((0, width), np.uint32)
        place = np.argsort(np.concatenate(self.order), kind="stable")
        return np.concatenate(self.names)[place], np.concatenate(self.words)[place]


def sum_of(job: Job, hot: HotSet, cold: GradientLog, sums: GradientLog) -> tuple[U64, F32, I64]:
    """Distinct keys, ascending, the sums of their gradients, added in float64, and how many of these came by themselves: the same
    whenever packets came.
    """
    keys, words = cold.sorted(job.width)
    ranks, words_of_sums = sums.sorted(job.width)
    at = ranks.astype(np.int64)
    values = words.view(np.float32).astype(np.float64)
    if job.floats:
        totals = words_of_sums.view(np.float32).astype(np.float64)
    else:
        totals = words_of_sums.view(np.int32) / hot.scale[at][:, None]
    every, place = np.unique(np.concatenate([keys, hot.keys[at]]), return_inverse=True)
    gradients = np.zeros((len(every), job.width), np.float32)
    both = np.concatenate([values, totals])
    # a sum beyond float32 is infinite, as it would be anywhere
    with np.errstate(over="ignore"):
        for column in range(job.width):
            gradients[:, column] = np.bincount(place, weights=both[:, column], minlength=len(every))
    updates = np.bincount(place[: len(keys)], minlength=len(every)).astype(np.int64)
    return every, gradients, updates


@dataclass(frozen=True, slots=True)
class Taken:
    """Indices of a batch's gradients, int64[n] each: ``owed`` an acknowledgement, ``early`` ones of an iteration that cannot have
    begun, and ENDs that have come before, ``again``.
    """

    owed: I64
    early: I64
    again: I64


class OpenIteration:
    """What has come of the open iteration, and of whom something is missing. ``known`` are hot sets that packets may name, by
    version. All packets of an iteration are of one ``version``: the first one's.
    """

    def __init__(self, job: Job, known: Mapping[int, HotSet]) -> None:
        self.version = EMPTY.version
        self.workers = Ledger(len(job.workers))
        self._job = job
        self._known = known
        self._switch = Ledger(1)
        self._cold, self._sums = GradientLog(), GradientLog()

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self.workers.begun or self._switch.begun

    @property
    def lacks_sums(self) -> bool:
        """Whether some of the switch's are missing."""
        return self._job.switch != 0 and not self._switch.complete

    @property
    def complete(self) -> bool:
        """Whether everything is in."""
        return self.workers.complete and not self.lacks_sums

    def clear(self) -> None:
        """The next iteration is open."""
        self.workers.clear()
        self._switch.clear()
        self._cold, self._sums = GradientLog(), GradientLog()

    def total(self) -> tuple[U64, F32, I64]:
        """What :func:`sum_of` makes of everything."""
        return sum_of(self._job, self._known[self.version], self._cold, self._sums)

    def take(self, parsed: ParsedBatch, kind: Kind, ranks: I64, iteration: int) -> Taken:
        """Take a batch's gradients of ``iteration``: COLD of the workers, whose packets come from ``ranks`` int64[n], or the switch's
        AGGREGATE.
        """
        which = parsed.of(kind)
        if not len(which):
            return Taken(which, which, which)
        off = ahead(parsed[Column.ITERATION][which], iteration)
        early, late = which[off > 0], which[off < 0]
        parsed.refuse(early, Drop.NOT_OPEN)
        versions = parsed[Column.VERSION][which]
        parsed.refuse(which[~np.isin(versions, list(self._known)) & (off == 0)], Drop.FUTURE_PLAN)
        live = self._agreed(parsed, which[(off == 0) & (parsed.reason[which] == 0)])
        if kind == Kind.AGGREGATE:
            names, _ = parsed.entries(live)
            packet = np.repeat(live, parsed[Column.PAIRS][live])
            parsed.refuse(packet[names >= len(self._known[self.version])], Drop.BAD_SLOT)
            live = live[parsed.reason[live] == 0]
            sources, ledger, log = np.zeros(len(ranks), np.int64), self._switch, self._sums
        else:
            sources, ledger, log = ranks, self.workers, self._cold
        columns = parsed.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = parsed.reason[live] = ledger.enter(sources[live], columns[:, Column.SEQUENCE], ends)
        parsed.reason[late] = Drop.STALE_ROUND
        fresh = live[how == FRESH]
        if len(fresh):
            columns = parsed.columns[fresh]
            names, words = parsed.entries(fresh)
            place = sources[fresh] << 32 | columns[:, Column.SEQUENCE]
            log.append(np.repeat(place, columns[:, Column.PAIRS]), names, words)
        return Taken(np.concatenate([live[how != BEYOND], late]), early, live[(how == SEEN) & ends])

    def _agreed(self, parsed: ParsedBatch, live: I64) -> I64:
        """Refuse packets of another hot set than the iteration's; gives the others."""
        if not len(live):
            return live
        if not self.begun:
            self.version = int(parsed[Column.VERSION][live[0]])
        parsed.refuse(live[parsed[Column.VERSION][live] != self.version], Drop.STALE_PLAN)
        agreed: I64 = live[parsed.reason[live] == 0]
        return agreed


#: kinds that a shard takes
_TAKEN = among(Kind.COLD, Kind.AGGREGATE, Kind.PULL, Kind.ACK, Kind.JOIN)


class ParameterShard:
    """Shard ``number`` of a job. ``optimiser`` turns a sum of gradients into new values; ``initial`` gives first ones.

    Iterations are numbered from 1. A hot set is known to all machines (:meth:`prepare`) before it is announced, at shard 0
    (:meth:`announce`): the END of the next iteration's NEWS tells all workers to use it from then on. Where hot parameters are
    looked for while the job trains, an event has the tally of the last iterations, and shard 0 does not end the next one before
    it knows what follows from it (:meth:`settle`).

    ``life`` is a number that no other life of this shard had lately, up to 65535. ``journal`` keeps what another life needs to go
    on (:meth:`restore`). It is of this job, or of a ``model`` that several jobs train, one after the other: then it counts the
    iterations of all, and says which job began: the one with the number ``origin``, if this one does.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        optimiser: Optimiser | None = None,
        initial: Initial = zeros,
        timing: Timing | None = None,
        *,
        life: int = 0,
        journal: records.Journal | None = None,
        model: str = "",
        origin: int = 0,
    ) -> None:
        if not 0 <= life <= 0xFFFF:
            raise ValueError(f"the number of a shard's life has 16 bits, {life} does not fit")
        self.job = job
        self.number = number
        self.life = life
        self._journal, self._long = journal, False
        self._model, self._origin = model, origin
        #: iterations of the model that other jobs have had
        self._before = 0
        #: numbers of the processes that have taken the ranks' places
        self._lives: dict[int, int] = {}
        self.store = Store(job.width, optimiser or Sum(), initial)
        self.timing = timing or Timing()
        self.finished = 0
        #: the iteration whose model this life began with
        self.began = 0
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.cold = self.pulled = 0
        self._rank_of = {address: rank for rank, address in enumerate(job.workers)}
        self._hot = {EMPTY.version: EMPTY}
        self._ranks = {EMPTY.version: KeyIndex()}
        self._open = OpenIteration(job, self._hot)
        #: version of the iteration after the open one
        self._next = EMPTY.version
        self._counts = UpdateCounts(job.counted, job.listed)
        #: the last iteration whose counts have been decided on
        self._decided = 0
        self._round_trips = RoundTrips(self.timing)
        self._news: Stream | None = None
        self._last = records.Last(np.zeros(0, np.uint64), EMPTY.version, EMPTY.version)
        self._out: list[Transmission] = []
        self._events: list[PsEvent] = []
        self._since = 0.0
        self._told = False
        self._repeated = self._sent = 0

    # ------------------------------------------------------------- hot sets

    def prepare(self, hot: HotSet) -> None:
        """Know a hot set, so that sums can come under its ranks; until one that was prepared later is in use.

        Raises ``ValueError`` for another set under the number of the one that the state file says is in use.
        """
        known = self._hot.get(hot.version)
        if known is not None and hot.version == self._open.version and not known.same(hot):
            raise ValueError(
                f"job {self.job.number}, shard {self.number}: hot set {hot.version} is in use, and was another one"
            )
        if known is None or not known.same(hot):
            self._know(hot)
            self._write(records.prepared(hot))

    def _know(self, hot: HotSet) -> None:
        for known in (self._hot, self._ranks):
            known.pop(hot.version, None)
        self._hot[hot.version] = hot
        self._ranks[hot.version] = KeyIndex(hot.keys)

    def announce(self, version: int) -> None:
        """From the next iteration that begins after the open one, all use this hot set. For shard 0.

        Raises ``KeyError`` for a version that was not prepared.
        """
        if version not in self._hot:
            raise KeyError(f"hot set {version} of job {self.job.number} has not been prepared")
        if version != self._next:
            self._next = version
            self._write(records.announced(version))

    def settle(self, iteration: int) -> None:
        """It is decided what is hot after the counts of an iteration: another set was announced, or none is needed."""
        self._decided = max(self._decided, iteration)
        if self._complete:
            self._finish()

    @property
    def _undecided(self) -> bool:
        """Whether the end of the open iteration has to wait for a decision."""
        every = self.job.counted
        return (
            bool(every) and self.number == 0 and self._decided < self.finished and self.finished % every == 0
        )

    @property
    def _complete(self) -> bool:
        """Whether the open iteration can end."""
        return self._open.complete and not self._undecided

    def _count(self) -> None:
        """Say how often keys were updated, if it is time for that."""
        tally = self._counts.finished(self.finished, self.store.updates)
        if tally is not None:
            self._events.append(Counted(self.job.number, tally))

    # -------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        parsed = ParsedBatch(batch, self.job.number, self.job.key)
        sources = batch.sources.tolist()
        ranks = np.array([self._rank_of.get(source, -1) for source in sources], np.int64)
        kinds = parsed[Column.KIND]
        from_switch = batch.sources == np.uint64(self.job.switch)
        parsed.refuse(np.where(kinds == Kind.AGGREGATE, ~from_switch, ranks < 0), Drop.FOREIGN_HOST)
        parsed.refuse(~_TAKEN[kinds], Drop.BAD_TYPE)
        parsed.refuse((kinds != Kind.ACK) & (parsed[Column.WIDTH] != self.job.width), Drop.BAD_TYPE)
        floats = parsed[Column.FLAGS] & Flag.FLOAT != 0
        parsed.refuse((kinds == Kind.AGGREGATE) & (floats != self.job.floats), Drop.BAD_TYPE)
        if not self._open.begun:
            self._since = now
        acked = [
            self._gradients(parsed, Kind.COLD, ranks),
            self._gradients(parsed, Kind.AGGREGATE, ranks),
            self._joins(parsed, ranks),
        ]
        for which in acked:
            self._out += acknowledgements(parsed, which, self._header(0), self.life)
        self._acknowledged(parsed, ranks, now)
        if self._complete:
            self._finish()
        self._answer(parsed)
        np.add.at(self.drops, parsed.reason, 1)

    def _header(self, version: int) -> Header:
        job = self.job
        return Header(job.number, job.key, self.number, version, self.finished, job.width)

    def _gradients(self, parsed: ParsedBatch, kind: Kind, ranks: I64) -> I64:
        """Take gradients of the open iteration; gives the packets to acknowledge."""
        taken = self._open.take(parsed, kind, ranks, self.finished + 1)
        if kind == Kind.COLD:
            self._refuse(parsed, taken.early, Refusal.LOST)
            self._explain(parsed, taken.again)
        return taken.owed

    def _acknowledged(self, parsed: ParsedBatch, ranks: I64, now: float) -> None:
        which = parsed.of(Kind.ACK)
        columns = parsed.columns[which]
        ours = (columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.NEWS) & (
            ahead(columns[:, Column.ITERATION], self.finished) == 0
        )
        parsed.reason[which[~ours]] = Drop.STALE_ROUND
        if self._news is None:
            return
        for rank in np.unique(ranks[which[ours]]).tolist():
            mine = ours & (ranks[which] == rank)
            self._news.acknowledge(columns[mine, Column.SEQUENCE], rank, now)

    # ----------------------------------------------------------- iterations

    def _finish(self) -> None:
        """Add up, change parameters, tell the workers."""
        job = self.job
        if self._long and self._journal is not None:
            # before anything changes, so that the last iteration can be left out when all begin anew
            self._journal.rewrite(self.snapshot())
            self._long = False
        keys, gradients, updates = self._open.total()
        changed = self.store.apply(keys, gradients, updates)
        cold = int(updates.sum())
        self.finished += 1
        self.cold += cold
        self._events.append(IterationFinished(job.number, self.finished, self.number, len(keys), cold))
        version = self._open.version
        self._last = records.Last(keys, version, self._next if self.number == 0 else version)
        self._open.clear()
        self._told = False
        self._count()
        # whoever is told may forget the iteration, so it is written down first
        self._write(self._parameters(records.Record.STEP, keys))
        self._tell(changed)

    def _tell(self, values: F32) -> None:
        """Tell the workers of the last iteration: its keys have ``values`` now."""
        job, last = self.job, self._last
        ranks = self._ranks[last.version].find(last.keys)
        hot = np.flatnonzero(ranks >= 0)
        hot = hot[np.argsort(ranks[hot])]
        packets = EncodedPackets(
            Kind.NEWS,
            self._header(last.version),
            in_sequence(len(hot), job.capacity(Kind.NEWS)),
            ranks[hot].astype(np.uint64),
            np.ascontiguousarray(values[hot]).view(np.uint32),
            next_version=last.following,
        )
        if self._news is not None:
            self._sent += self._news.sent
            self._repeated += self._news.repeated
        self._news = Stream(packets, job.workers, self._round_trips, group=job.switch or None)
        forget(self._hot, last.version)
        forget(self._ranks, last.version)

    def _answer(self, parsed: ParsedBatch) -> None:
        """Answer pulls after the last iteration."""
        which = parsed.of(Kind.PULL)
        if not len(which):
            return
        early = ahead(parsed[Column.ITERATION][which], self.finished)
        parsed.reason[which[early > 0]] = Drop.NOT_OPEN
        self._refuse(parsed, which[early > 0], Refusal.LOST)
        parsed.reason[which[early < 0]] = Drop.STALE_ROUND
        live = which[early == 0]
        sources = parsed.batch.sources
        live = live[np.argsort(sources[live], kind="stable")]
        keys, _ = parsed.entries(live)
        self.pulled += len(keys)
        columns, header = parsed.columns[live], self._header(self._open.version)
        counts = np.ascontiguousarray(columns[:, Column.PAIRS])
        values = self.store.read(keys).view(np.uint32)
        packets = EncodedPackets(Kind.VALUES, header, counts, None, values, end=False)
        packets.number(columns[:, Column.SEQUENCE], self.job.key)
        self._out += packets.to_each(sources[live])

    # ------------------------------------------------- who takes part, and who cannot

    def _joins(self, parsed: ParsedBatch, ranks: I64) -> I64:
        """Let processes take their ranks' places; gives the packets to acknowledge."""
        taken = []
        for index in parsed.of(Kind.JOIN).tolist():
            rank, life = int(ranks[index]), int(parsed[Column.ITERATION][index])
            if rank not in self._lives and not self.finished and not self._open.workers.heard(rank):
                self._lives[rank] = life
                self._write(records.joined(rank, life))
            if self._lives.get(rank) == life:
                taken.append(index)
            else:
                parsed.reason[index] = Drop.REFUSED
                self._refuse(parsed, np.array([index]), Refusal.TAKEN)
        return np.array(taken, np.int64)

    def _refuse(self, parsed: ParsedBatch, which: I64, why: Refusal) -> None:
        """Tell workers what packets can never be taken; once each for a batch."""
        sources, first = np.unique(parsed.batch.sources[which], return_index=True)
        iterations = parsed[Column.ITERATION][which[first]]
        self._out += answers(Kind.REFUSAL, self._header(int(why)), iterations, sources)

    def _explain(self, parsed: ParsedBatch, questions: I64) -> None:
        """Tell workers that ask again whom the iteration waits for; once each for a batch."""
        missing, lacks_sums = self._open.workers.missing(), self._open.lacks_sums
        if not len(questions) or not (missing or lacks_sums or self._undecided):
            return
        header = self._header(min(max(len(missing) - 1, 0), 0xFFFF))
        header.iteration = low(self.finished + 1)
        # behind the ranks, the switch and the decision
        first = missing[0] if missing else len(self.job.workers) + (not lacks_sums)
        sources = np.unique(parsed.batch.sources[questions])
        self._out += answers(Kind.WAITING, header, np.full(len(sources), first, np.int64), sources)

    # --------------------------------------------------------------- lives

    @property
    def _whose(self) -> str:
        job = self.job
        whose, workers = f"job {job.number}", f"{len(job.workers)} workers, "
        if self._model:
            whose, workers = f"model {self._model!r}", ""
        return (
            f"{whose}, shard {self.number} of {len(job.shards)} by {job.sharding}, {workers}{job.width} values per key, "
            f"{self.store.kind}"
        )

    def _write(self, record: bytes) -> None:
        if self._journal is not None:
            self._long |= self._journal.append(record)

    def _parameters(self, kind: records.Record, keys: U64 | None) -> bytes:
        last, found = self._last, self.store.whole(keys)
        return records.parameters(kind, self._before + self.finished, last.version, last.following, *found)

    def snapshot(self) -> bytes:
        """Records that say all that another life needs, in place of all before."""
        parts = [records.born(self._whose, self.life, self._origin)]
        parts += [records.joined(*member) for member in self._lives.items()]
        parts += [records.prepared(hot) for version, hot in self._hot.items() if version != EMPTY.version]
        parts.append(self._parameters(records.Record.WHOLE, None))
        if self.finished:
            parts.append(self._parameters(records.Record.STEP, self._last.keys))
        return b"".join([*parts, records.announced(self._next)])

    def restore(
        self, entries: Iterable[records.Entry], *, anew: bool = False, iteration: int | None = None
    ) -> int:
        """Begin a life: go on where the one ended whose journal this is, or, ``anew``, with its model only, as a job of other
        processes. Without entries it is the first. ``iteration`` is the one whose model is wanted: the last or, since shards may
        end with one more or less, the one before. Gives the iteration that the model is of.

        Raises :class:`~inanet.proto.zebra.journal.BadState` for the journal of another shard, and without that iteration.
        """
        found = records.recovered(entries, self._whose, self.store, iteration)
        self.life = self.life if found.life is None else (found.life + 1) & 0xFFFF
        self.began = found.finished
        if not anew:
            self.finished, self._last, self._lives = found.finished, found.last, found.lives
            self._open.version, self._next = found.last.version, found.following
            for hot in found.hot:
                self._know(hot)
            self._write(records.born(self._whose, self.life))
            self._counts.begin(self.finished + 1)
            if self.finished:
                self._count()
                self._tell(found.values)
        elif self._journal is not None:
            self._before = self.began if self._model else 0
            self._origin = found.origin if self.began else self._origin
            self._journal.rewrite(self.snapshot())
        return self.began

    # ------------------------------------------------------------ contract

    def transmit(self, now: float) -> list[Transmission]:
        out, self._out = self._out, []
        if self._news is not None:
            out += self._news.transmit(now)
        return out

    def timer(self) -> float | None:
        times = [self._news.timer()] if self._news is not None else []
        if self._open.begun and not self._told:
            times.append(self._since + self.timing.silent)
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Tell of workers that the others wait for."""
        if self._open.begun and not self._told and now >= self._since + self.timing.silent:
            self._told = True
            names = [f"rank {rank}" for rank in self._open.workers.missing()]
            if self._open.lacks_sums:
                names.append("switch")
            self._events += [PeerSilent(self.job.number, name, now - self._since) for name in names]

    def events(self) -> list[PsEvent]:
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
