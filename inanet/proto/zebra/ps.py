"""A PS shard: takes cold gradients from workers and sums of hot ones from the switch, finishes iterations, answers pulls.

An iteration is finished when every worker's END and all its packets, and the switch's, are in (iteration ledger). Gradients are
kept until then and added in the order of ranks and sequence numbers, in float64: what comes out does not depend on when packets
came. Then every worker gets the new values of hot parameters (NEWS), and its END: the iteration is over.

With a journal (:mod:`~inanet.proto.zebra.state`) another life of the shard goes on where one has ended. It has finished what the
journal says, tells the workers of the last iteration again, and has nothing of the open one: workers and the switch keep what
they have sent until an iteration is over, learn from the life in acknowledgements that it is another one, and send all of
the open iteration again. A shard that has lost iterations says so to every worker that knows of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Counted, PeerSilent
from inanet.proto.zebra import state
from inanet.proto.zebra.counts import Counts
from inanet.proto.zebra.gathering import Gathering
from inanet.proto.zebra.keyindex import KeyIndex
from inanet.proto.zebra.layout import in_sequence
from inanet.proto.zebra.membership import EMPTY, F32, HotSet, Job, forget
from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf, acknowledgements, among
from inanet.proto.zebra.recovery import Last, recovered
from inanet.proto.zebra.replies import refusals, sent_back, waiting
from inanet.proto.zebra.serial import ahead, low
from inanet.proto.zebra.store import Initial, Optimiser, Store, Sum, zeros
from inanet.proto.zebra.stream import Path, Stream, Timing
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
        journal: state.Journal | None = None,
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
        self._open = Gathering(job, self._hot)
        #: version of the iteration after the open one
        self._next = EMPTY.version
        self._counts = Counts(job.counted, job.listed)
        #: the last iteration whose counts have been decided on
        self._decided = 0
        self._path = Path(self.timing)
        self._news: Stream | None = None
        self._last = Last(np.zeros(0, np.uint64), EMPTY.version, EMPTY.version)
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
            self._write(state.prepared(hot))

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
            self._write(state.announced(version))

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
        """Take a batch."""
        judged = Judged(batch, self.job.number, self.job.key)
        sources = batch.sources.tolist()
        ranks = np.array([self._rank_of.get(source, -1) for source in sources], np.int64)
        kinds = judged[Column.KIND]
        from_switch = batch.sources == np.uint64(self.job.switch)
        judged.refuse(np.where(kinds == Kind.AGGREGATE, ~from_switch, ranks < 0), Drop.FOREIGN_HOST)
        judged.refuse(~_TAKEN[kinds], Drop.BAD_TYPE)
        judged.refuse((kinds != Kind.ACK) & (judged[Column.WIDTH] != self.job.width), Drop.BAD_TYPE)
        floats = judged[Column.FLAGS] & Flag.FLOAT != 0
        judged.refuse((kinds == Kind.AGGREGATE) & (floats != self.job.floats), Drop.BAD_TYPE)
        if not self._open.begun:
            self._since = now
        acked = [
            self._gradients(judged, Kind.COLD, ranks),
            self._gradients(judged, Kind.AGGREGATE, ranks),
            self._joining(judged, ranks),
        ]
        head = self._head(0)
        for which in acked:
            self._out += acknowledgements(judged, which, head, self.life)
        self._acknowledged(judged, ranks, now)
        if self._complete:
            self._finish()
        self._answer(judged)
        np.add.at(self.drops, judged.reason, 1)

    def _head(self, version: int) -> Head:
        job = self.job
        return Head(job.number, job.key, self.number, version, self.finished, job.width)

    def _gradients(self, judged: Judged, kind: Kind, ranks: I64) -> I64:
        """Take gradients of the open iteration; gives the packets to acknowledge."""
        taken = self._open.take(judged, kind, ranks, self.finished + 1)
        if kind == Kind.COLD:
            self._refuse(judged, taken.early, Refusal.LOST)
            self._explain(judged, taken.again)
        return taken.owed

    def _acknowledged(self, judged: Judged, ranks: I64, now: float) -> None:
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        ours = (columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.NEWS) & (
            ahead(columns[:, Column.ITERATION], self.finished) == 0
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
        job = self.job
        if self._long and self._journal is not None:
            # before anything changes, so that the last iteration can be left out when all begin anew
            self._journal.rewrite(self.snapshot())
            self._long = False
        keys, gradients, updates = self._open.added()
        changed = self.store.apply(keys, gradients, updates)
        cold = int(updates.sum())
        self.finished += 1
        self.cold += cold
        self._events.append(IterationFinished(job.number, self.finished, self.number, len(keys), cold))
        version = self._open.version
        self._last = Last(keys, version, self._next if self.number == 0 else version)
        self._open.clear()
        self._told = False
        self._count()
        # whoever is told may forget the iteration, so it is written down first
        self._write(self._parameters(state.Record.STEP, keys))
        self._tell(changed)

    def _tell(self, values: F32) -> None:
        """Tell the workers of the last iteration: its keys have ``values`` now."""
        job, last = self.job, self._last
        ranks = self._ranks[last.version].find(last.keys)
        hot = np.flatnonzero(ranks >= 0)
        hot = hot[np.argsort(ranks[hot])]
        sheaf = Sheaf(
            Kind.NEWS,
            self._head(last.version),
            in_sequence(len(hot), job.capacity(Kind.NEWS)),
            ranks[hot].astype(np.uint64),
            np.ascontiguousarray(values[hot]).view(np.uint32),
            next_version=last.following,
        )
        if self._news is not None:
            self._sent += self._news.sent
            self._repeated += self._news.repeated
        self._news = Stream(sheaf, job.workers, self._path, group=job.switch or None)
        forget(self._hot, last.version)
        forget(self._ranks, last.version)

    def _answer(self, judged: Judged) -> None:
        """Answer pulls after the last iteration."""
        which = judged.of(Kind.PULL)
        if not len(which):
            return
        early = ahead(judged[Column.ITERATION][which], self.finished)
        judged.reason[which[early > 0]] = Drop.NOT_OPEN
        self._refuse(judged, which[early > 0], Refusal.LOST)
        judged.reason[which[early < 0]] = Drop.STALE_ROUND
        live = which[early == 0]
        sources = judged.batch.sources
        live = live[np.argsort(sources[live], kind="stable")]
        keys, _ = judged.entries(live)
        words = self.store.read(keys).view(np.uint32)
        self.pulled += len(keys)
        columns = judged.columns[live]
        counts = np.ascontiguousarray(columns[:, Column.PAIRS])
        sheaf = Sheaf(Kind.VALUES, self._head(self._open.version), counts, None, words, end=False)
        sheaf.number(columns[:, Column.SEQUENCE], self.job.key)
        self._out += sent_back(sheaf, sources[live])

    # ------------------------------------------------- who takes part, and who cannot

    def _joining(self, judged: Judged, ranks: I64) -> I64:
        """Let processes take their ranks' places; gives the packets to acknowledge."""
        taken = []
        for index in judged.of(Kind.JOIN).tolist():
            rank, life = int(ranks[index]), int(judged[Column.ITERATION][index])
            if rank not in self._lives and not self.finished and not self._open.workers.heard(rank):
                self._lives[rank] = life
                self._write(state.joined(rank, life))
            if self._lives.get(rank) == life:
                taken.append(index)
            else:
                judged.reason[index] = Drop.REFUSED
                self._refuse(judged, np.array([index]), Refusal.TAKEN)
        return np.array(taken, np.int64)

    def _refuse(self, judged: Judged, which: I64, why: Refusal) -> None:
        """Tell workers what packets can never be taken."""
        self._out += refusals(judged, which, self._head(int(why)))

    def _explain(self, judged: Judged, questions: I64) -> None:
        """Tell workers that ask again whom the iteration waits for."""
        missing, lacks_sums = self._open.workers.missing(), self._open.lacks_sums
        if not len(questions) or not (missing or lacks_sums or self._undecided):
            return
        head = self._head(min(max(len(missing) - 1, 0), 0xFFFF))
        head.iteration = low(self.finished + 1)
        # behind the ranks, the switch and the decision
        first = missing[0] if missing else len(self.job.workers) + (not lacks_sums)
        self._out += waiting(judged, questions, head, first)

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

    def _parameters(self, kind: state.Record, keys: U64 | None) -> bytes:
        last, found = self._last, self.store.whole(keys)
        return state.parameters(kind, self._before + self.finished, last.version, last.following, *found)

    def snapshot(self) -> bytes:
        """Records that say all that another life needs, in place of all before."""
        parts = [state.born(self._whose, self.life, self._origin)]
        parts += [state.joined(*member) for member in self._lives.items()]
        parts += [state.prepared(hot) for version, hot in self._hot.items() if version != EMPTY.version]
        parts.append(self._parameters(state.Record.WHOLE, None))
        if self.finished:
            parts.append(self._parameters(state.Record.STEP, self._last.keys))
        return b"".join([*parts, state.announced(self._next)])

    def restore(
        self, entries: Iterable[state.Entry], *, anew: bool = False, iteration: int | None = None
    ) -> int:
        """Begin a life: go on where the one ended whose journal this is, or, ``anew``, with its model only, as a job of other
        processes. Without entries it is the first. ``iteration`` is the one whose model is wanted: the last or, since shards may
        end with one more or less, the one before. Gives the iteration that the model is of.

        Raises :class:`~inanet.proto.zebra.state.BadState` for the journal of another shard, and without that iteration.
        """
        found = recovered(entries, self._whose, self.store, iteration)
        self.life = self.life if found.life is None else (found.life + 1) & 0xFFFF
        self.began = found.finished
        if not anew:
            self.finished, self._last, self._lives = found.finished, found.last, found.lives
            self._open.version, self._next = found.last.version, found.following
            for hot in found.hot:
                self._know(hot)
            self._write(state.born(self._whose, self.life))
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
        """What is to be sent."""
        out, self._out = self._out, []
        if self._news is not None:
            out += self._news.transmit(now)
        return out

    def timer(self) -> float | None:
        """Next deadline."""
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
