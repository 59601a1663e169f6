"""A worker of a sparse job: splits gradients into hot and cold, sends them, keeps hot parameters, pulls cold ones.

Training is bulk synchronous. A push takes part in an iteration with one push of every other worker; a pull after it sees
all of them, and nothing later. Operations are carried out in the order in which they were asked for.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.cache import HotCache
from inanet.proto.zebra.layout import in_sequence, orchestrate
from inanet.proto.zebra.ledger import BEYOND, FRESH, SEEN, Ledger
from inanet.proto.zebra.membership import EMPTY, F32, HotSet, Job
from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf, acknowledgements
from inanet.proto.zebra.pulling import Pull, Pulling
from inanet.proto.zebra.standing import Standing
from inanet.proto.zebra.stream import Path, Stream, Timing
from inanet.proto.zebra.switchcpu import earliest
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.endpoint import show
from inanet.wire.zebra import HEADER_BYTES, KIND_SHIFT, NEXT_BYTES, Flag, Kind


@dataclass(frozen=True, slots=True)
class IterationDone:
    """Every shard has finished the iteration; of this worker's ``pairs``, ``hot`` went to the switch."""

    job: int
    rank: int
    iteration: int
    pairs: int
    hot: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """Values of a pull: ``values`` float32[n, width], in the order of its keys."""

    job: int
    rank: int
    ticket: int
    values: F32


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has come for ``seconds``: ``waiting_for`` says from whom and what. Told once per standstill."""

    job: int
    rank: int
    iteration: int
    seconds: float
    waiting_for: tuple[str, ...]


WorkerEvent = IterationDone | Pulled | Stalled


@dataclass(slots=True)
class _Push:
    keys: U64
    values: F32


class ZebraWorker:
    """Worker ``rank`` of a job."""

    def __init__(self, job: Job, rank: int, timing: Timing | None = None) -> None:
        self.job = job
        self.rank = rank
        self.timing = timing or Timing()
        self.done = 0
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.hot_pairs = self.cold_pairs = self.misfits = 0
        self._known: dict[int, HotSet] = {EMPTY.version: EMPTY}
        self._cache, self._wanted = HotCache(job), EMPTY.version
        self._queue: deque[_Push | Pull] = deque()
        self._current: _Push | Pull | None = None
        self._begun = 0
        shards = len(job.shards)
        self._shard_at = {address: shard for shard, address in enumerate(job.shards)}
        self._paths = [Path(self.timing) for _ in range(shards + 1)]
        #: gradients to the shards, and last to the switch
        self._pushes: list[Stream | None] = [None] * (shards + 1)
        self._pulling = Pulling(job, rank, self._paths)
        self._news = Ledger(shards)
        self._switch = Standing(self.timing.ask)
        self._share = (0, 0)
        self._tickets = 0
        self._out: list[Transmission] = []
        self._events: list[WorkerEvent] = []
        self._moved = 0.0
        self._told = False
        self._sent = self._repeated = 0

    # ------------------------------------------------------------ hot sets

    def prepare(self, hot: HotSet) -> None:
        """Know a hot set, so that an iteration can use it."""
        self._known[hot.version] = hot

    def start(self, version: int) -> None:
        """Use a hot set from the first iteration on. Raises ``RuntimeError`` when one has begun, ``KeyError`` for a version
        that was not prepared.
        """
        if self._begun:
            raise RuntimeError(
                f"rank {self.rank} has begun iteration {self._begun}; announce a hot set at shard 0 instead"
            )
        self._cache.adopt(self._known[version])
        self._wanted = version

    # ---------------------------------------------------------- operations

    def push(self, keys: U64, values: F32, now: float) -> None:
        """Take part in the next iteration with gradients ``values`` float32[n, width] of distinct ``keys`` uint64[n]; both
        may be empty. :class:`IterationDone` tells of its end.

        Raises ``ValueError`` for arrays that do not fit together, keys that come twice and numbers that are not finite: then
        the worker has not taken part, and the others wait.
        """
        keys = np.ascontiguousarray(keys, np.uint64)
        values = np.ascontiguousarray(values, np.float32)
        if keys.ndim != 1 or values.size != len(keys) * self.job.width:
            raise ValueError(
                f"{self._who()}: {keys.shape} keys of {self.job.width} values each do not go with {values.shape} gradients"
            )
        values = values.reshape(len(keys), self.job.width)
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{self._who()}: a key may come once in a push; add its gradients up first")
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise ValueError(f"{self._who()}: the gradient of key {int(keys[place])} is not finite")
        self._queue.append(_Push(keys, values))
        self._turn(now)

    def pull(self, keys: U64, now: float) -> int:
        """Ask for the values of ``keys`` (uint64[n], repetitions allowed); a :class:`Pulled` with this ticket brings them."""
        keys = np.ascontiguousarray(keys, np.uint64)
        self._tickets += 1
        self._queue.append(Pull(self._tickets, keys, np.zeros((len(keys), self.job.width), np.float32)))
        self._turn(now)
        return self._tickets

    def _who(self) -> str:
        return f"job {self.job.number}, rank {self.rank}, iteration {self._begun + 1}"

    def _turn(self, now: float) -> None:
        """Carry out what can be carried out."""
        while self._current is None and self._queue:
            self._current = self._queue.popleft()
            self._moved, self._told = now, False
            if isinstance(self._current, _Push):
                self._begin(self._current)
            else:
                self._pulling.ask(self._current, self._cache, self.done)
                self._end_pull()

    # --------------------------------------------------------------- pushes

    def _begin(self, push: _Push) -> None:
        job = self.job
        if self._wanted != self._cache.hot.version:
            if self._wanted not in self._known:
                raise RuntimeError(
                    f"{self._who()}: shard 0 has announced hot set {self._wanted}, which this worker was not given; "
                    "prepare() it everywhere before announce()"
                )
            self._cache.adopt(self._known[self._wanted])
        self._begun += 1
        self._news.clear()
        self._switch.begin()
        ranks = self._cache.ranks(push.keys)
        words, fits = self._quantised(push.values, ranks)
        hot = ranks >= 0
        self.misfits += int((hot & ~fits).sum())
        hot &= fits
        self._share = (len(push.keys), int(hot.sum()))
        self.hot_pairs += int(hot.sum())
        self.cold_pairs += int((~hot).sum())
        if job.switch:
            self._send_hot(ranks[hot], words[hot])
        cold = np.flatnonzero(~hot)
        shards = job.shard_of(push.keys[cold])
        for shard, address in enumerate(job.shards):
            mine = cold[shards == shard]
            sheaf = Sheaf(
                Kind.COLD,
                self._head(),
                in_sequence(len(mine), job.capacity(Kind.COLD)),
                push.keys[mine],
                push.values[mine].view(np.uint32),
            )
            self._pushes[shard] = Stream(sheaf, [address], self._paths[shard])

    def _head(self) -> Head:
        job = self.job
        return Head(job.number, job.key, self.rank, self._cache.hot.version, self._begun, job.width)

    def _quantised(self, values: F32, ranks: I64) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
        """Words of all values for the switch, and which keys' fit; those that do not go to the PS as they are (R1)."""
        if self.job.floats or not len(self._cache.hot):
            return values.view(np.uint32), np.ones(len(values), np.bool_)
        scaled = np.rint(values.astype(np.float64) * self._cache.hot.scale[ranks][:, None])
        fits: NDArray[np.bool_] = np.asarray((np.abs(scaled) <= self.job.limit).all(axis=1))
        scaled[~fits] = 0
        return scaled.astype(np.int32).view(np.uint32), fits

    def _send_hot(self, ranks: I64, words: NDArray[np.uint32]) -> None:
        job = self.job
        heat = np.argsort(ranks)
        ranks, words = ranks[heat], words[heat]
        order, counts = orchestrate(self._cache.layout.register[ranks], job.registers, job.capacity(Kind.HOT))
        head = self._head()
        head.flags = Flag.FLOAT if job.floats else Flag.NONE
        sheaf = Sheaf(Kind.HOT, head, counts, ranks[order].astype(np.uint64), words[order])
        self._pushes[-1] = Stream(sheaf, [job.switch], self._paths[-1])

    def _finish(self) -> None:
        """Every shard has finished the iteration, so everything of it has arrived, whatever was acknowledged."""
        self._drop(self._pushes)
        self.done = self._begun
        self._events.append(IterationDone(self.job.number, self.rank, self.done, *self._share))
        self._current = None

    def _drop(self, streams: list[Stream | None]) -> None:
        for place, stream in enumerate(streams):
            if stream is not None:
                self._sent += stream.sent
                self._repeated += stream.repeated
                streams[place] = None

    def _end_pull(self) -> None:
        """Report the pull if every answer is in."""
        pull = self._current
        if isinstance(pull, Pull) and self._pulling.done:
            self._cache.learn_keys(pull.keys, pull.out)
            self._drop(self._pulling.streams)
            self._events.append(Pulled(self.job.number, self.rank, pull.ticket, pull.out))
            self._current = None

    # -------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        judged = Judged(batch, self.job.number, self.job.key)
        shards = np.array([self._shard_at.get(source, -1) for source in batch.sources.tolist()], np.int64)
        kinds = judged[Column.KIND]
        # the switch replicates NEWS, in the shard's name or in its own; the header says which shard's they are
        through_switch = (kinds == Kind.NEWS) & (batch.sources == np.uint64(self.job.switch))
        from_switch = (kinds == Kind.ACK) & (batch.sources == np.uint64(self.job.switch))
        judged.refuse((shards < 0) & ~through_switch & ~from_switch, Drop.FOREIGN_HOST)
        judged.refuse((kinds != Kind.NEWS) & (kinds != Kind.VALUES) & (kinds != Kind.ACK), Drop.BAD_TYPE)
        moved = self._acknowledged(judged, shards, now)
        pull = self._current if isinstance(self._current, Pull) else None
        moved |= self._pulling.take(judged, shards, pull, now)
        self._end_pull()
        moved |= self._told_news(judged)
        if moved:
            self._moved, self._told = now, False
        self._turn(now)
        np.add.at(self.drops, judged.reason, 1)

    def _acknowledged(self, judged: Judged, shards: I64, now: float) -> bool:
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        live = columns[:, Column.ITERATION] == self._begun
        judged.reason[which[~live]] = Drop.STALE_ROUND
        hot = columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.HOT
        moved = False
        current = live & hot & (columns[:, Column.FLAGS] & 0x0F == self._switch.attempt)
        if self._pushes[-1] is not None and self._switch.restarted(columns[current, Column.PAIRS]):
            self._send_again(self._pushes[-1])
            current[:], moved = False, True
        for place, stream in enumerate(self._pushes):
            if stream is None:
                continue
            at_switch = place == len(self._pushes) - 1
            mine = current if at_switch else live & ~hot & (shards[which] == place)
            if mine.any():
                moved |= bool(stream.acknowledge(columns[mine, Column.SEQUENCE], 0, now).any())
                if at_switch and stream.done:
                    self._switch.satisfied(now)
        return moved

    def _send_again(self, stream: Stream) -> None:
        """The switch has been restarted and has lost what it had acknowledged."""
        self._sent += stream.sent
        self._repeated += stream.repeated
        self._pushes[-1] = stream.anew(stream.sheaf.attempted(self._switch.attempt, self.job.key))

    def _told_news(self, judged: Judged) -> bool:
        which = judged.of(Kind.NEWS)
        if not len(which):
            return False
        columns = judged.columns[which]
        ahead = columns[:, Column.ITERATION] - self._begun
        judged.reason[which[ahead > 0]] = Drop.NOT_OPEN
        judged.refuse(which[columns[:, Column.SENDER] >= len(self.job.shards)], Drop.UNKNOWN_SHARD)
        late = ahead < 0 if isinstance(self._current, _Push) else ahead <= 0
        judged.refuse(which[late], Drop.STALE_ROUND)
        live = which[judged.reason[which] == 0]
        columns = judged.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = self._news.enter(columns[:, Column.SENDER], columns[:, Column.SEQUENCE], ends)
        judged.reason[live[how == SEEN]] = Drop.DUPLICATE
        judged.reason[live[how == BEYOND]] = Drop.BAD_FRAGMENT
        fresh = live[how == FRESH]
        self._learn(judged, fresh)
        answered = which[np.isin(judged.reason[which], (Drop.OK, Drop.DUPLICATE, Drop.STALE_ROUND))]
        self._thank(judged, answered)
        if len(fresh) and self._news.complete:
            self._finish()
        return bool(len(fresh))

    def _learn(self, judged: Judged, fresh: I64) -> None:
        for index in fresh.tolist():
            if judged.columns[index, Column.FLAGS] & Flag.END and judged.columns[index, Column.SENDER] == 0:
                at = int(judged.batch.offsets[index]) + HEADER_BYTES
                self._wanted = int.from_bytes(judged.batch.arena[at : at + NEXT_BYTES].tobytes(), "big")
        if len(fresh):
            ranks, words = judged.entries(fresh)
            values = words.view(np.float32).reshape(len(ranks), self.job.width)
            self._cache.learn(ranks.astype(np.int64), values)

    def _thank(self, judged: Judged, which: I64) -> None:
        """Acknowledge NEWS to their shards, through whatever address they came."""
        job = self.job
        sources = judged.batch.sources.copy()
        shards = judged[Column.SENDER][which]
        sources[which] = np.array(job.shards, np.uint64)[shards]
        answered = PacketBatch(judged.batch.arena, judged.batch.offsets, judged.batch.lengths, sources)
        head = Head(job.number, job.key, self.rank, 0, 0, job.width)
        self._out += acknowledgements(judged.as_from(answered), which, head)

    # ------------------------------------------------------------- contract

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        out, self._out = self._out, []
        for stream in (*self._pushes, *self._pulling.streams):
            if stream is not None:
                out += stream.transmit(now)
        at_switch = self._pushes[-1]
        if at_switch is not None and at_switch.done and self._switch.asks(now):
            out += at_switch.last()
        return out

    def timer(self) -> float | None:
        """Next deadline."""
        times = [earliest(self._pushes), earliest(self._pulling.streams)]
        if self._pushes[-1] is not None and self._pushes[-1].done:
            times.append(self._switch.due)
        if self._current is not None and not self._told:
            times.append(self._moved + self.timing.silent)
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Tell of a standstill; what is late is sent by :meth:`transmit`."""
        if self._current is None or self._told or now < self._moved + self.timing.silent:
            return
        self._told = True
        waiting = [
            f"{'the switch' if place == len(self.job.shards) else f'shard {place}'} "
            f"({show(stream.receivers[0])}) has not acknowledged {stream.outstanding} packets"
            for place, stream in enumerate(self._pushes)
            if stream is not None and not stream.done
        ]
        waiting += [
            f"shard {shard} ({show(stream.receivers[0])}) has not answered {stream.outstanding} pulls"
            for shard, stream in enumerate(self._pulling.streams)
            if stream is not None and not stream.done
        ]
        if isinstance(self._current, _Push):
            waiting += [f"shard {shard} has not finished the iteration" for shard in self._news.missing()]
        self._events.append(
            Stalled(self.job.number, self.rank, self._begun, now - self._moved, tuple(waiting))
        )

    def events(self) -> list[WorkerEvent]:
        """What has happened since the last call."""
        out, self._events = self._events, []
        return out

    @property
    def hot(self) -> HotSet:
        """The hot set of the last iteration that was begun."""
        return self._cache.hot

    def stats(self) -> dict[str, int]:
        """Counters; drops by reason as ``drop_<reason>``."""
        live = [stream for stream in (*self._pushes, *self._pulling.streams) if stream is not None]
        return {
            "iterations": self.done,
            "hot_pairs": self.hot_pairs,
            "cold_pairs": self.cold_pairs,
            "misfits": self.misfits,
            "cached": self._pulling.cached,
            "sent": self._sent + sum(stream.sent for stream in live),
            "repeated": self._repeated + sum(stream.repeated for stream in live),
            "restarts": self._switch.restarts,
        } | {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
