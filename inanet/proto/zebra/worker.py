"""A worker of a sparse job: splits gradients into hot and cold, sends them, keeps hot parameters, pulls cold ones.

Training is bulk synchronous. A push takes part in an iteration with one push of every other worker; a pull after it sees
all of them, and nothing later. Operations are carried out in the order in which they were asked for.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.job import EMPTY, F32, HotSet, Job, forget
from inanet.proto.zebra.layout import by_heat, in_sequence, orchestrate
from inanet.proto.zebra.ledger import FRESH, MOST, Ledger
from inanet.proto.zebra.packets import (
    SERIAL,
    Column,
    EncodedPackets,
    Header,
    ParsedBatch,
    acknowledgements,
    ahead,
    among,
    beyond,
    low,
)
from inanet.proto.zebra.store import KeyIndex
from inanet.proto.zebra.stream import Delivery, RoundTrips, Stream, Timing
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.endpoint import show
from inanet.wire.zebra import HEADER_BYTES, KIND_SHIFT, NEXT_BYTES, Flag, Kind, Refusal


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


class HotCache:
    """``hot`` is the set in use. A value is known from the first NEWS or pull on, and kept up to date by NEWS."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.hot = EMPTY
        self.layout = by_heat(0, job.registers)
        self._index = KeyIndex()
        self._values: F32 = np.zeros((0, job.width), np.float32)
        self._known: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def adopt(self, hot: HotSet) -> None:
        """Change the ranks. What is known of parameters that stay hot is kept."""
        values: F32 = np.zeros((len(hot), self._job.width), np.float32)
        known = np.zeros(len(hot), np.bool_)
        before = self._index.find(hot.keys)
        stay = before >= 0
        values[stay], known[stay] = self._values[before[stay]], self._known[before[stay]]
        self.hot, self._index, self._values, self._known = hot, KeyIndex(hot.keys), values, known
        self.layout = by_heat(len(hot), self._job.registers)

    def ranks(self, keys: U64) -> I64:
        """int64[n]: ranks of keys, -1 for cold ones; all of them without a switch."""
        return self._index.find(keys) if self._job.switch else np.full(len(keys), -1, np.int64)

    def read(self, keys: U64, out: F32) -> NDArray[np.bool_]:
        """Fill in the rows of ``out`` (float32[n, width]) that are known; says which, bool[n]."""
        ranks = self._index.find(keys)
        here = ranks >= 0
        here[here] = self._known[ranks[here]]
        out[here] = self._values[ranks[here]]
        return here

    def learn(self, ranks: I64, values: F32) -> None:
        """Values of ranks, from NEWS."""
        self._values[ranks] = values
        self._known[ranks] = True

    def learn_keys(self, keys: U64, values: F32) -> None:
        """Values of keys, from a pull; cold ones are not kept."""
        ranks = self._index.find(keys)
        hot = ranks >= 0
        self.learn(ranks[hot], values[hot])


@dataclass(frozen=True, slots=True)
class Divided:
    """A worker's gradients as packets for each shard and, last, for the switch, if there is one: hot ones go there by rank and as
    integers, cold ones to their shards by key, as floats. ``hot`` gradients go to the switch; ``misfits`` would, but are too large.
    """

    packets: list[EncodedPackets]
    hot: int
    misfits: int


def divided(job: Job, cache: HotCache, header: Header, keys: U64, values: F32) -> Divided:
    """Divide ``values`` float32[n, width] of ``keys`` uint64[n] and encode them under ``header``."""
    ranks = cache.ranks(keys)
    words, fits = _quantised(job, cache, values, ranks)
    hot = ranks >= 0
    misfits = int((hot & ~fits).sum())
    hot &= fits
    cold = np.flatnonzero(~hot)
    shards = job.shard_of(keys[cold])
    packets = []
    for shard in range(len(job.shards)):
        mine = cold[shards == shard]
        counts = in_sequence(len(mine), job.capacity(Kind.COLD))
        packets.append(EncodedPackets(Kind.COLD, header, counts, keys[mine], values[mine].view(np.uint32)))
    if job.switch:
        packets.append(_packaged(job, cache, header, ranks[hot], words[hot]))
    return Divided(packets, int(hot.sum()), misfits)


def _quantised(
    job: Job, cache: HotCache, values: F32, ranks: I64
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Words of all values for the switch, and which keys' fit; those that do not go to the PS as they are (number format)."""
    if job.floats or not len(cache.hot):
        return values.view(np.uint32), np.ones(len(values), np.bool_)
    scaled = np.rint(values.astype(np.float64) * cache.hot.scale[ranks][:, None])
    fits: NDArray[np.bool_] = np.asarray((np.abs(scaled) <= job.limit).all(axis=1))
    scaled[~fits] = 0
    return scaled.astype(np.int32).view(np.uint32), fits


def _packaged(
    job: Job, cache: HotCache, common: Header, ranks: I64, words: NDArray[np.uint32]
) -> EncodedPackets:
    heat = np.argsort(ranks)
    ranks, words = ranks[heat], words[heat]
    order, counts = orchestrate(cache.layout.register[ranks], job.registers, job.capacity(Kind.HOT))
    flags = Flag.FLOAT if job.floats else Flag.NONE
    header = Header(
        common.job, common.key, common.sender, common.version, common.iteration, common.width, flags
    )
    return EncodedPackets(Kind.HOT, header, counts, ranks[order].astype(np.uint64), words[order])


class News:
    """What shards tell worker ``rank`` when they have finished an iteration: new values of hot parameters, which go to ``cache``, and
    the hot set of the next.
    """

    def __init__(self, job: Job, rank: int, cache: HotCache) -> None:
        #: the hot set that shard 0 has announced last
        self.wanted = EMPTY.version
        self.ledger = Ledger(len(job.shards))
        self._job = job
        self._rank = rank
        self._cache = cache
        self._acknowledgements: list[Transmission] = []

    def take(self, parsed: ParsedBatch, iteration: int, *, begun: bool) -> bool:
        """Take NEWS of ``iteration`` out of a batch, if it has ``begun`` and is not over. Whether there were any that are new."""
        which = parsed.of(Kind.NEWS)
        if not len(which):
            return False
        columns = parsed.columns[which]
        early = ahead(columns[:, Column.ITERATION], iteration)
        parsed.reason[which[early > 0]] = Drop.NOT_OPEN
        parsed.refuse(which[columns[:, Column.SENDER] >= len(self._job.shards)], Drop.UNKNOWN_SHARD)
        parsed.refuse(which[early < 0 if begun else early <= 0], Drop.STALE_ROUND)
        live = which[parsed.reason[which] == 0]
        columns = parsed.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = self.ledger.enter(columns[:, Column.SENDER], columns[:, Column.SEQUENCE], ends)
        parsed.reason[live] = how
        fresh = live[how == FRESH]
        self._learn(parsed, fresh)
        # to their shards, through whatever address they came
        taken = which[np.isin(parsed.reason[which], (Drop.OK, Drop.DUPLICATE, Drop.STALE_ROUND))]
        job, shards = self._job, parsed[Column.SENDER][taken]
        header = Header(job.number, job.key, self._rank, 0, 0, job.width)
        to = np.array(job.shards, np.uint64)[shards]
        self._acknowledgements += acknowledgements(parsed, taken, header, to=to)
        return bool(len(fresh))

    def _learn(self, parsed: ParsedBatch, fresh: I64) -> None:
        for index in fresh.tolist():
            if parsed.columns[index, Column.FLAGS] & Flag.END and parsed.columns[index, Column.SENDER] == 0:
                at = int(parsed.batch.offsets[index]) + HEADER_BYTES
                self.wanted = int.from_bytes(parsed.batch.arena[at : at + NEXT_BYTES].tobytes(), "big")
        if len(fresh):
            ranks, words = parsed.entries(fresh)
            values = words.view(np.float32).reshape(len(ranks), self._job.width)
            self._cache.learn(ranks.astype(np.int64), values)

    def transmit(self) -> list[Transmission]:
        """Acknowledgements."""
        out, self._acknowledgements = self._acknowledgements, []
        return out


@dataclass(slots=True)
class Pull:
    """``keys`` uint64[n] that a ticket asks for; ``out`` float32[n, width] fills up."""

    ticket: int
    keys: U64
    out: F32
    #: per shard: places in ``keys`` in the order of transmission
    places: dict[int, I64] = field(default_factory=dict)


class Pulls:
    """What a worker does not know itself is asked of the shards: one pull at a time; an answer is a packet's acknowledgement."""

    def __init__(self, job: Job, rank: int, delivery: Delivery) -> None:
        self._job = job
        self._rank = rank
        self._delivery = delivery
        #: sequence numbers that shards have seen, so that a late answer is not taken for one to another pull
        self._asked = [0] * len(job.shards)
        self.cached = 0

    def ask(self, pull: Pull, cache: HotCache, iteration: int) -> None:
        """Begin: values are to be those after ``iteration``."""
        job = self._job
        here = cache.read(pull.keys, pull.out)
        self.cached += int(here.sum())
        away = np.flatnonzero(~here)
        shards = job.shard_of(pull.keys[away])
        for shard in range(len(job.shards)):
            mine = away[shards == shard]
            if not len(mine):
                continue
            base = self._asked[shard]
            counts = in_sequence(len(mine), job.capacity(Kind.PULL))
            header = Header(job.number, job.key, self._rank, cache.hot.version, iteration, job.width)
            packets = EncodedPackets(Kind.PULL, header, counts, pull.keys[mine], base=base, end=False)
            pull.places[shard] = mine
            self._delivery.begin(shard, packets, base)
            self._asked[shard] += len(counts)

    def take(self, parsed: ParsedBatch, shards: I64, pull: Pull | None, now: float) -> bool:
        """Take answers out of a batch, whose packets come from ``shards`` int64[n]; whether there was anything new."""
        which = parsed.of(Kind.VALUES)
        moved = False
        for shard in np.unique(shards[which]).tolist():
            mine = which[shards[which] == shard]
            stream = self._delivery.streams[shard]
            if stream is None or pull is None:
                parsed.reason[mine] = Drop.UNMATCHED
            else:
                moved |= self._fill(parsed, mine, stream, pull, shard, now)
        return moved

    def _fill(
        self, parsed: ParsedBatch, mine: I64, stream: Stream, pull: Pull, shard: int, now: float
    ) -> bool:
        most = self._job.capacity(Kind.PULL)
        place = beyond(parsed[Column.SEQUENCE][mine], stream.base)
        wanted = np.minimum(len(pull.places[shard]) - place * most, most)
        parsed.reason[mine[parsed[Column.PAIRS][mine] != wanted]] = Drop.UNMATCHED
        sound = parsed.reason[mine] == 0
        mine, place = mine[sound], place[sound]
        fresh = stream.acknowledge(place + stream.base, 0, now)
        parsed.reason[mine[~fresh]] = Drop.DUPLICATE
        mine, place = mine[fresh], place[fresh]
        if not len(mine):
            return False
        _, words = parsed.entries(mine)
        counts = parsed[Column.PAIRS][mine]
        step = np.arange(len(words)) - np.repeat(np.cumsum(counts) - counts, counts)
        pull.out[pull.places[shard][np.repeat(place * most, counts) + step]] = words.view(np.float32)
        return True


#: kinds that a worker takes
_TAKEN = among(Kind.NEWS, Kind.VALUES, Kind.ACK, Kind.REFUSAL, Kind.WAITING)


@dataclass(slots=True)
class _Push:
    keys: U64
    values: F32


class ZebraWorker:
    """Worker ``rank`` of a job. ``life`` is a number that no other process in this rank's place has, of 32 bits; it may be left
    out where another process cannot be, as the process ends with the job (:mod:`~inanet.proto.zebra.shard` says what it is for).
    Raises ``ValueError`` for one that does not fit.
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
        #: the switch comes behind the shards
        receivers = (*job.shards, job.switch)
        self._place_at = {address: place for place, address in enumerate(receivers) if address}
        round_trips = [RoundTrips(self.timing) for _ in receivers]
        self._join, self._push, self._pull = (
            Delivery(receivers, round_trips, job.key, self.timing.ask) for _ in range(3)
        )
        self._life = -1 if life is None else life
        if life is not None:
            if not 0 <= life <= SERIAL:
                raise ValueError(f"the number of a worker's life has 32 bits, {life} does not fit")
            header = Header(job.number, job.key, rank, 0, life, job.width)
            for place in self._place_at.values():
                self._join.begin(place, EncodedPackets(Kind.JOIN, header, np.zeros(0, np.int64)))
        self._pulls = Pulls(job, rank, self._pull)
        self._news = News(job, rank, self._cache)
        #: whom each shard waits for, as it says: the first rank, or behind the ranks the switch, or a decision; how many ranks more
        self._awaited: dict[int, tuple[int, int]] = {}
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

    def checked(self, keys: U64, values: F32) -> tuple[U64, F32]:
        """Distinct ``keys`` uint64[n] and their gradients float32[n, width], contiguous.

        Raises ``ValueError`` for arrays that do not fit together, keys that come twice, numbers that are not finite and too
        many keys.
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
        unique, count = np.unique(keys, return_counts=True)
        if len(unique) != len(keys):
            twice = int(unique[np.argmax(count > 1)])
            raise ValueError(
                f"{self._who()}: key {twice} comes more than once; a key may come once in a push: add its gradients up first"
            )
        if not np.isfinite(values).all():
            place = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
            raise ValueError(f"{self._who()}: the gradient of key {int(keys[place])} is not finite")
        return keys, values

    def push(self, keys: U64, values: F32, now: float) -> None:
        """Take part in the next iteration with gradients of keys, as :meth:`checked` takes them; both may be empty.
        :class:`IterationDone` tells of its end.

        Raises ``ValueError`` as :meth:`checked`: then the worker has not taken part, and the others wait. Raises ``RuntimeError``
        once it was refused.
        """
        keys, values = self.checked(keys, values)
        # whoever calls may use the arrays again before this push begins
        waits = self._busy or self._unprepared
        self._ask(_Push(keys.copy(), values.copy()) if waits else _Push(keys, values), now)

    def pull(self, keys: U64, now: float) -> int:
        """Ask for the values of ``keys`` (uint64[n], repetitions allowed); a :class:`Pulled` with this ticket brings them.

        Raises ``ValueError`` for keys of another dimension, ``RuntimeError`` once the worker was refused.
        """
        # whoever calls may use the array again before the answers come
        keys = np.array(keys, np.uint64)
        if keys.ndim != 1:
            raise ValueError(f"{self._who()}: keys have shape {keys.shape}; a pull is of one dimension")
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
        return self._current is not None or not self._join.done

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
                self._pulls.ask(self._current, self._cache, self.done)
                self._end_pull()

    def _stop(self, shard: int, reason: str) -> None:
        """Nothing that was asked for can be done any more."""
        self.refused, joining = reason, not self._join.done
        for delivery in (self._join, self._push, self._pull):
            delivery.end()
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
        self._news.ledger.clear()
        self._awaited.clear()
        header = Header(job.number, job.key, self.rank, self._cache.hot.version, self._begun, job.width)
        parts = divided(job, self._cache, header, push.keys, push.values)
        self.misfits += parts.misfits
        self.hot_pairs += parts.hot
        self.cold_pairs += len(push.keys) - parts.hot
        self._share = (len(push.keys), parts.hot)
        for place, packets in enumerate(parts.packets):
            self._push.begin(place, packets)

    def _finish(self) -> None:
        """Every shard has finished the iteration, so everything of it has arrived, whatever was acknowledged."""
        self._push.end()
        self.done = self._begun
        self._events.append(IterationDone(self.job.number, self.rank, self.done, *self._share))
        self._current = None

    def _end_pull(self) -> None:
        """Report the pull if every answer is in."""
        pull = self._current
        if isinstance(pull, Pull) and self._pull.done:
            self._cache.learn_keys(pull.keys, pull.out)
            self._pull.end()
            self._events.append(Pulled(self.job.number, self.rank, pull.ticket, pull.out))
            self._current = None

    # -------------------------------------------------------------- packets

    def receive(self, batch: PacketBatch, now: float) -> None:
        parsed = ParsedBatch(batch, self.job.number, self.job.key)
        places = np.array([self._place_at.get(source, -1) for source in batch.sources.tolist()], np.int64)
        kinds = parsed[Column.KIND]
        switch = len(self.job.shards)
        parsed.refuse(places < 0, Drop.FOREIGN_HOST)
        # the switch replicates NEWS, in the shard's name or in its own; the header says which shard's they are
        parsed.refuse((places == switch) & (kinds != Kind.NEWS) & (kinds != Kind.ACK), Drop.FOREIGN_HOST)
        parsed.refuse(~_TAKEN[kinds], Drop.BAD_TYPE)
        wide = (kinds == Kind.NEWS) | (kinds == Kind.VALUES)
        parsed.refuse(wide & (parsed[Column.WIDTH] != self.job.width), Drop.BAD_TYPE)
        moved = self._acknowledged(parsed, places, now)
        pull = self._current if isinstance(self._current, Pull) else None
        moved |= self._pulls.take(parsed, places, pull, now)
        self._end_pull()
        if self._news.take(parsed, self._begun, begun=isinstance(self._current, _Push)):
            moved = True
            if self._news.ledger.complete:
                self._finish()
        self._refusals(parsed, places)
        self._waitings(parsed, places)
        if moved:
            self._moved, self._told = now, False
        self._turn(now)
        np.add.at(self.drops, parsed.reason, 1)

    def _acknowledged(self, parsed: ParsedBatch, places: I64, now: float) -> bool:
        """Take acknowledgements out of a batch, whose packets come from ``places`` int64[n]; whether there was anything new."""
        which = parsed.of(Kind.ACK)
        if not len(which):
            return False
        columns, places = parsed.columns[which], places[which]
        kinds = columns[:, Column.FLAGS] >> KIND_SHIFT
        live = ahead(columns[:, Column.ITERATION], self._begun) == 0
        parsed.reason[which[~live]] = Drop.STALE_ROUND
        pushed = np.where(places == len(self.job.shards), Kind.HOT, Kind.COLD)
        joined = (kinds == Kind.JOIN) & (columns[:, Column.ITERATION] == self._life)
        moved = False
        for place in np.unique(places).tolist():
            mine = places == place
            if not self._join.done:
                moved |= self._join.acknowledge(place, columns[mine & joined], now)
            moved |= self._push.acknowledge(place, columns[mine & live & (kinds == pushed)], now)
        return moved

    def _waitings(self, parsed: ParsedBatch, places: I64) -> None:
        """Take what shards say of whom they wait for."""
        for index in parsed.of(Kind.WAITING).tolist():
            columns = parsed.columns[index]
            if ahead(columns[Column.ITERATION : Column.ITERATION + 1], self._begun)[0]:
                parsed.reason[index] = Drop.STALE_ROUND
            else:
                awaited = int(columns[Column.SEQUENCE]), int(columns[Column.VERSION])
                self._awaited[int(places[index])] = awaited

    def _refusals(self, parsed: ParsedBatch, places: I64) -> None:
        """Take refusals of what is being done now; of anything else they are late."""
        for index in parsed.of(Kind.REFUSAL).tolist():
            columns, shard = parsed.columns[index].tolist(), int(places[index])
            finished, what = columns[Column.ITERATION], columns[Column.SEQUENCE]
            at = show(self.job.shards[shard])
            if self.refused:
                parsed.reason[index] = Drop.STALE_ROUND
            elif columns[Column.VERSION] == Refusal.TAKEN and not self._join.done and what == self._life:
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
                parsed.reason[index] = Drop.STALE_ROUND

    @property
    def _last(self) -> int:
        """The iteration that packets of the running operation name."""
        return self._begun if isinstance(self._current, _Push) else self.done

    # ------------------------------------------------------------- contract

    def transmit(self, now: float) -> list[Transmission]:
        # a hot set may have come that was waited for
        self._turn(now)
        out = self._news.transmit()
        out += self._join.transmit(now)
        out += self._pull.transmit(now)
        if isinstance(self._current, _Push):
            out += self._push.transmit(now, self._asked)
        return out

    @property
    def _asked(self) -> list[int]:
        """Places that are asked whether they still have the gradients: shards that have not finished the iteration, and the switch."""
        return [*self._news.ledger.missing(), len(self.job.shards)]

    def timer(self) -> float | None:
        times = [self._join.timer(), self._pull.timer()]
        if isinstance(self._current, _Push):
            times.append(self._push.timer(self._asked))
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
        whose = [
            (self._join, "has not let this rank join"),
            (self._push, "has not acknowledged {} packets"),
            (self._pull, "has not answered {} pulls"),
        ]
        waiting = [
            f"{self.job.called(place)} ({show(address)}) {what.format(count)}"
            for delivery, what in whose
            for place, address, count in delivery.unacknowledged()
        ]
        if isinstance(self._current, _Push):
            waiting += [
                f"shard {shard} has not finished the iteration{self._awaited_by(shard)}"
                for shard in self._news.ledger.missing()
            ]
        if self._queue and not self._busy and self._unprepared:
            waiting.append(f"whoever decides what is hot has not told of hot set {self._news.wanted}")
        return tuple(waiting)

    @property
    def knows_why(self) -> bool:
        """Whether this worker knows what a push waits for: shards have said so, or it lacks a hot set."""
        if isinstance(self._current, _Push):
            return bool(self._awaited)
        return not self._busy and bool(self._queue) and self._unprepared

    @property
    def ranks_waited_for(self) -> tuple[int, ...]:
        """Ranks that some shard waits for, as far as it has said."""
        if not isinstance(self._current, _Push):
            return ()
        ranks = {first for first, _ in self._awaited.values() if first < len(self.job.workers)}
        return tuple(sorted(ranks))

    def _awaited_by(self, shard: int) -> str:
        """For whom a shard waits, in words; nothing if it has not said."""
        if shard not in self._awaited:
            return ""
        first, more = self._awaited[shard]
        others = {len(self.job.workers): "the switch", len(self.job.workers) + 1: "word of what is hot"}
        who = others.get(first, f"rank {first}")
        return f": it waits for {who}" + (f" and {more} more" if more else "")

    def events(self) -> list[WorkerEvent]:
        out, self._events = self._events, []
        return out

    @property
    def hot(self) -> HotSet:
        """The hot set of the last iteration that was begun."""
        return self._cache.hot

    def stats(self) -> dict[str, int]:
        """Counters; drops by reason as ``drop_<reason>``."""
        return {
            "iterations": self.done,
            "hot_pairs": self.hot_pairs,
            "cold_pairs": self.cold_pairs,
            "misfits": self.misfits,
            "cached": self._pulls.cached,
            "sent": self._push.sent + self._pull.sent,
            "repeated": self._push.repeated + self._pull.repeated,
            "restarts": self._push.restarts,
        } | {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
