"""A worker of a sparse job: splits gradients into hot and cold, sends them, keeps hot parameters, pulls cold ones.

Training is bulk synchronous. A push takes part in an iteration with one push of every other worker; a pull after it sees
all of them, and nothing later. Operations are carried out in the order in which they were asked for.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.awaited import Awaited
from inanet.proto.zebra.cache import HotCache
from inanet.proto.zebra.gradients import divided
from inanet.proto.zebra.joining import Joining
from inanet.proto.zebra.ledger import MOST
from inanet.proto.zebra.membership import EMPTY, F32, HotSet, Job, forget
from inanet.proto.zebra.news import News
from inanet.proto.zebra.packets import Column, Head, Judged, among
from inanet.proto.zebra.pulling import Pull, Pulling
from inanet.proto.zebra.pushing import Pushing
from inanet.proto.zebra.serial import low
from inanet.proto.zebra.stream import Path, Timing
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.endpoint import show
from inanet.wire.zebra import Kind, Refusal


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


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker has stopped: ``shard`` will never take what it has sent, ``reason`` says why and what to do. Nothing that was
    asked for and is not done will be. ``joining``: it has not even begun.
    """

    job: int
    rank: int
    iteration: int
    shard: int
    reason: str
    joining: bool


WorkerEvent = IterationDone | Pulled | Stalled | Refused


#: kinds that a worker takes
_TAKEN = among(Kind.NEWS, Kind.VALUES, Kind.ACK, Kind.REFUSAL, Kind.WAITING)


@dataclass(slots=True)
class _Push:
    keys: U64
    values: F32


class ZebraWorker:
    """Worker ``rank`` of a job. ``life`` is a number that no other process in this rank's place has, of 32 bits; it may be left
    out where another process cannot be (see :mod:`~inanet.proto.zebra.joining`).
    """

    def __init__(self, job: Job, rank: int, timing: Timing | None = None, life: int | None = None) -> None:
        self.job = job
        self.rank = rank
        self.timing = timing or Timing()
        self.done = 0
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.hot_pairs = self.cold_pairs = self.misfits = 0
        self._known: dict[int, HotSet] = {EMPTY.version: EMPTY}
        self._cache = HotCache(job)
        self._queue: deque[_Push | Pull] = deque()
        self._current: _Push | Pull | None = None
        self._begun = 0
        shards = len(job.shards)
        #: the switch comes behind the shards
        self._place_at = {
            address: place for place, address in enumerate((*job.shards, job.switch)) if address
        }
        paths = [Path(self.timing) for _ in range(shards + 1)]
        self._joining = Joining(job, rank, life, paths)
        self._pushing = Pushing(job, paths, self.timing.ask)
        self._pulling = Pulling(job, rank, paths)
        self._news = News(job, rank, self._cache)
        self._awaited = Awaited(job)
        self._share = (0, 0)
        #: why the worker has stopped
        self.refused = ""
        self._tickets = 0
        self._events: list[WorkerEvent] = []
        self._moved = 0.0
        self._told = False

    # ------------------------------------------------------------ hot sets

    def prepare(self, hot: HotSet) -> None:
        """Know a hot set, so that an iteration can use it, which waits for that if shard 0 has announced it. It is known until one
        that was prepared later is in use.
        """
        self._known.pop(hot.version, None)
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
        self._news.wanted = version

    @property
    def begun(self) -> bool:
        """Whether this worker has begun an iteration."""
        return self._begun > 0

    # ---------------------------------------------------------- operations

    def push(self, keys: U64, values: F32, now: float) -> None:
        """Take part in the next iteration with gradients ``values`` float32[n, width] of distinct ``keys`` uint64[n]; both
        may be empty. :class:`IterationDone` tells of its end.

        Raises ``ValueError`` for arrays that do not fit together, keys that come twice, numbers that are not finite and too
        many keys: then the worker has not taken part, and the others wait. Raises ``RuntimeError`` once it was refused.
        """
        keys = np.ascontiguousarray(keys, np.uint64)
        values = np.ascontiguousarray(values, np.float32)
        if keys.ndim != 1 or values.size != len(keys) * self.job.width:
            raise ValueError(
                f"{self._who()}: {keys.shape} keys of {self.job.width} values each do not go with {values.shape} gradients"
            )
        packets = -(-len(keys) // self.job.capacity(Kind.COLD))
        if packets >= MOST:
            raise ValueError(
                f"{self._who()}: {len(keys)} keys make {packets} packets, a push has fewer than {MOST}"
            )
        values = values.reshape(len(keys), self.job.width)
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{self._who()}: a key may come once in a push; add its gradients up first")
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise ValueError(f"{self._who()}: the gradient of key {int(keys[place])} is not finite")
        # whoever calls may use the arrays again before this push begins
        waits = self._busy or self._unprepared
        self._ask(_Push(keys.copy(), values.copy()) if waits else _Push(keys, values), now)

    def pull(self, keys: U64, now: float) -> int:
        """Ask for the values of ``keys`` (uint64[n], repetitions allowed); a :class:`Pulled` with this ticket brings them.

        Raises ``RuntimeError`` once the worker was refused.
        """
        # whoever calls may use the array again before the answers come
        keys = np.array(keys, np.uint64)
        self._tickets += 1
        self._ask(Pull(self._tickets, keys, np.zeros((len(keys), self.job.width), np.float32)), now)
        return self._tickets

    def _ask(self, what: "_Push | Pull", now: float) -> None:
        """Put an operation behind the others."""
        if self.refused:
            raise RuntimeError(f"{self._who()}: {self.refused}")
        if self._current is None and not self._queue:
            self._moved, self._told = now, False
        self._queue.append(what)
        self._turn(now)

    @property
    def _busy(self) -> bool:
        """Whether what is asked for now has to wait."""
        return self._current is not None or not self._joining.done

    @property
    def _unprepared(self) -> bool:
        """Whether the next iteration is to use a hot set that this worker has not been given yet."""
        return self._news.wanted not in self._known

    def _who(self) -> str:
        return f"job {self.job.number}, rank {self.rank}, iteration {self._begun + 1}"

    def _turn(self, now: float) -> None:
        """Carry out what can be carried out."""
        while self._queue and not self._busy:
            if isinstance(self._queue[0], _Push) and self._unprepared:
                return
            self._current = self._queue.popleft()
            self._moved, self._told = now, False
            if isinstance(self._current, _Push):
                self._begin(self._current)
            else:
                self._pulling.ask(self._current, self._cache, self.done)
                self._end_pull()

    def _stop(self, shard: int, reason: str) -> None:
        """Nothing that was asked for can be done any more."""
        self.refused, joining = reason, not self._joining.done
        self._joining.end()
        self._pushing.end()
        self._pulling.end()
        self._current = None
        self._queue.clear()
        self._events.append(Refused(self.job.number, self.rank, self._begun, shard, reason, joining))

    # --------------------------------------------------------------- pushes

    def _begin(self, push: _Push) -> None:
        job = self.job
        if self._news.wanted != self._cache.hot.version:
            self._cache.adopt(self._known[self._news.wanted])
            forget(self._known, self._news.wanted)
        self._begun += 1
        self._news.begin()
        self._awaited.clear()
        head = Head(job.number, job.key, self.rank, self._cache.hot.version, self._begun, job.width)
        parts = divided(job, self._cache, head, push.keys, push.values)
        self.misfits += parts.misfits
        self.hot_pairs += parts.hot
        self.cold_pairs += len(push.keys) - parts.hot
        self._share = (len(push.keys), parts.hot)
        self._pushing.begin(parts.sheaves)

    def _finish(self) -> None:
        """Every shard has finished the iteration, so everything of it has arrived, whatever was acknowledged."""
        self._pushing.end()
        self.done = self._begun
        self._events.append(IterationDone(self.job.number, self.rank, self.done, *self._share))
        self._current = None

    def _end_pull(self) -> None:
        """Report the pull if every answer is in."""
        pull = self._current
        if isinstance(pull, Pull) and self._pulling.done:
            self._cache.learn_keys(pull.keys, pull.out)
            self._pulling.end()
            self._events.append(Pulled(self.job.number, self.rank, pull.ticket, pull.out))
            self._current = None

    # -------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        judged = Judged(batch, self.job.number, self.job.key)
        places = np.array([self._place_at.get(source, -1) for source in batch.sources.tolist()], np.int64)
        kinds = judged[Column.KIND]
        switch = len(self.job.shards)
        judged.refuse(places < 0, Drop.FOREIGN_HOST)
        # the switch replicates NEWS, in the shard's name or in its own; the header says which shard's they are
        judged.refuse((places == switch) & (kinds != Kind.NEWS) & (kinds != Kind.ACK), Drop.FOREIGN_HOST)
        judged.refuse(~_TAKEN[kinds], Drop.BAD_TYPE)
        wide = (kinds == Kind.NEWS) | (kinds == Kind.VALUES)
        judged.refuse(wide & (judged[Column.WIDTH] != self.job.width), Drop.BAD_TYPE)
        moved = self._joining.acknowledged(judged, places, now)
        moved |= self._pushing.acknowledged(judged, places, self._begun, now)
        pull = self._current if isinstance(self._current, Pull) else None
        moved |= self._pulling.take(judged, places, pull, now)
        self._end_pull()
        if self._news.take(judged, self._begun, begun=isinstance(self._current, _Push)):
            moved = True
            if self._news.complete:
                self._finish()
        self._refusals(judged, places)
        self._awaited.take(judged, places, self._begun)
        if moved:
            self._moved, self._told = now, False
        self._turn(now)
        np.add.at(self.drops, judged.reason, 1)

    def _refusals(self, judged: Judged, places: I64) -> None:
        """Take refusals of what is being done now; of anything else they are late."""
        for index in judged.of(Kind.REFUSAL).tolist():
            columns, shard = judged.columns[index].tolist(), int(places[index])
            finished, what = columns[Column.ITERATION], columns[Column.SEQUENCE]
            at = show(self.job.shards[shard])
            if self.refused:
                judged.reason[index] = Drop.STALE_ROUND
            elif (
                columns[Column.VERSION] == Refusal.TAKEN
                and not self._joining.done
                and what == self._joining.life
            ):
                self._stop(
                    shard,
                    f"another process has had the place of this rank at shard {shard} ({at}), which has finished iteration "
                    f"{finished}: what that one sent of the next is not known. Begin the job anew; shards keep the model with --anew",
                )
            elif (
                columns[Column.VERSION] == Refusal.LOST
                and self._current is not None
                and what == low(self._last)
            ):
                self._stop(
                    shard,
                    f"shard {shard} ({at}) has been restarted and knows the model of iteration {finished} only, this rank "
                    f"that of {self.done}: what is between is lost. Begin the job anew, from a checkpoint; shards that are served "
                    "with --state lose nothing",
                )
            else:
                judged.reason[index] = Drop.STALE_ROUND

    @property
    def _last(self) -> int:
        """The iteration that packets of the running operation name."""
        return self._begun if isinstance(self._current, _Push) else self.done

    # ------------------------------------------------------------- contract

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        # a hot set may have come that was waited for
        self._turn(now)
        out = self._news.transmit()
        out += self._joining.transmit(now)
        out += self._pulling.transmit(now)
        if isinstance(self._current, _Push):
            out += self._pushing.transmit(now, self._news.missing)
        return out

    def timer(self) -> float | None:
        """Next deadline."""
        times = [self._joining.timer(), self._pulling.timer()]
        if isinstance(self._current, _Push):
            times.append(self._pushing.timer(self._news.missing))
        if self._waiting and not self._told:
            times.append(self._moved + self.timing.silent)
        return min((at for at in times if at is not None), default=None)

    @property
    def _waiting(self) -> bool:
        return self._current is not None or bool(self._queue)

    def on_timer(self, now: float) -> None:
        """Tell of a standstill; what is late is sent by :meth:`transmit`."""
        if not self._waiting or self._told or now < self._moved + self.timing.silent:
            return
        self._told = True
        self._events.append(
            Stalled(self.job.number, self.rank, self._begun, now - self._moved, self.waiting_for())
        )

    def waiting_for(self) -> tuple[str, ...]:
        """From whom what is missing, as far as this worker knows."""
        waiting = [*self._joining.waiting(), *self._pushing.waiting(), *self._pulling.waiting()]
        if isinstance(self._current, _Push):
            waiting += [
                f"shard {shard} has not finished the iteration{self._awaited.by(shard)}"
                for shard in self._news.missing()
            ]
        if self._queue and not self._busy and self._unprepared:
            waiting.append(f"whoever decides what is hot has not told of hot set {self._news.wanted}")
        return tuple(waiting)

    @property
    def knows_why(self) -> bool:
        """Whether this worker knows what a push waits for: shards have said so, or it lacks a hot set."""
        if isinstance(self._current, _Push):
            return self._awaited.told
        return not self._busy and bool(self._queue) and self._unprepared

    @property
    def ranks_waited_for(self) -> tuple[int, ...]:
        """Ranks that some shard waits for, as far as it has said."""
        return self._awaited.ranks if isinstance(self._current, _Push) else ()

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
        pushing, pulling = self._pushing, self._pulling
        return {
            "iterations": self.done,
            "hot_pairs": self.hot_pairs,
            "cold_pairs": self.cold_pairs,
            "misfits": self.misfits,
            "cached": pulling.cached,
            "sent": pushing.sent + pulling.sent,
            "repeated": pushing.repeated + pulling.repeated,
            "restarts": pushing.restarts,
        } | {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
