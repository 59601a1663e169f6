"""Zebra on a switch: gradients of hot parameters are summed, everything else is forwarded.

The four stages: *resolve* looks a gradient's rank up in the exact-match table and its sender up in the job; *admit* asks
the ledger of (worker, sequence) whether the packet is new; *fold* adds each gradient to its register, one access per
register and pass; *emit* comes when the ledger is complete (iteration ledger), not with a packet: all sums that were touched go to the
switch's CPU, which sends them to their PS shards until these have them, and the registers are empty for the next iteration.

A gradient packet leaves as its own acknowledgement. One that is repeated is acknowledged again and changes nothing. NEWS of
a PS are replicated to the job's group.

Registers need not wait until a PS has the sums: the CPU beside the pipeline keeps and repeats them (section III-F, Zebra_s), until
the next iteration's, since a PS shard that is restarted has lost what it had acknowledged.

A switch that has been restarted knows nothing but its jobs and their hot sets, and nothing is lost with what it knew: workers
keep their gradients until the shards have finished the iteration, learn from the number of the switch's life in its
acknowledgements that it is another one, and send everything of the iteration again. Equal gradients make equal sums in equal
packets, of which a shard takes those that it lacks. The iteration is the workers': one that begins an iteration knows
that all shards have finished those before.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.bigendian import load32
from inanet.kernels.jit import njit
from inanet.proto.common.events import Tally
from inanet.proto.common.program import Action, Neighbours, Offer, Verdicts
from inanet.proto.zebra.hot import UpdateCounts
from inanet.proto.zebra.job import (
    EMPTY,
    MOST_PASSES,
    UNIT,
    HotSet,
    Job,
    forget,
    hot_of,
    job_of,
    most_packets,
    register_bytes,
)
from inanet.proto.zebra.layout import Layout, by_heat, in_sequence
from inanet.proto.zebra.ledger import FRESH, Ledger, note
from inanet.proto.zebra.logsum import TABLE, TABLES, add_logs, floats_of, to_log
from inanet.proto.zebra.packets import Column, EncodedPackets, Header, ParsedBatch, ahead, among, seal
from inanet.proto.zebra.plan import ZebraJob
from inanet.proto.zebra.stream import DAEMON_TIMING, Delivery, RoundTrips, Timing
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.zebra import EMPTY_BYTES, HEADER_BYTES, KIND_SHIFT, Flag, Kind

_BAD_SLOT, _PASSES = int(Drop.BAD_SLOT), int(Drop.TOO_MANY_PASSES)
_HEAD = HEADER_BYTES


class Registers(NamedTuple):
    """One job's part of a switch.

    ``position`` int64[k]: register * depth + slot of every rank, the exact-match table's action; -1: no entry.
    ``values`` int32[registers * depth, width]: integers, or words of logarithms. ``touched`` uint8[k] by rank, this
    iteration; ``updates`` int64[k], contributions since counts were last fetched. ``seen`` uint8[workers, packets],
    ``received`` and ``expected`` int64[workers] are the ledger. ``mark`` and ``several`` int64[registers] are scratch.
    """

    position: Any
    values: Any
    touched: Any
    updates: Any
    seen: Any
    received: Any
    expected: Any
    mark: Any
    several: Any


_i64 = types.int64[::1]
REGISTERS: Any = types.NamedTuple(
    (_i64, types.int32[:, ::1], types.uint8[::1], _i64, types.uint8[:, ::1], _i64, _i64, _i64, _i64),
    Registers,
)


@njit(
    types.void(
        REGISTERS,
        TABLE,
        types.uint8[::1],
        _i64,
        _i64,
        _i64,
        _i64,
        types.uint8[::1],
        types.int64,
        types.int64,
        types.boolean,
        _i64,
        types.uint8[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def gather(
    r: Registers,
    tables: Any,
    arena: Any,
    offsets: Any,
    workers: Any,
    sequences: Any,
    pairs: Any,
    ends: Any,
    depth: int,
    most_passes: int,
    floats: bool,
    passes: Any,
    reason: Any,
) -> None:
    """Add up sound gradients of the iteration that is open. ``passes[i]``: passes through the pipeline that packet *i* took;
    ``reason[i]`` 0: its gradients are in the registers. One that is refused has changed nothing.
    """
    width = r.values.shape[1]
    for i in range(offsets.size):
        first = offsets[i] + _HEAD
        stride = 4 + 4 * width
        passes[i] = 1
        reason[i] = 0
        needed = 1
        for j in range(pairs[i]):
            rank = np.int64(load32(arena, first + j * stride))
            if rank >= r.position.size or r.position[rank] < 0:
                reason[i] = _BAD_SLOT
                break
            register = r.position[rank] // depth
            # a number for every packet, so that the scratch need not be cleared
            if r.mark[register] != i:
                r.mark[register] = i
                r.several[register] = 0
            r.several[register] += 1
            needed = max(needed, r.several[register])
        for j in range(pairs[i]):
            rank = np.int64(load32(arena, first + j * stride))
            if rank < r.position.size and r.position[rank] >= 0:
                r.mark[r.position[rank] // depth] = -1
        if reason[i]:
            continue
        if needed > most_passes:
            reason[i] = _PASSES
            continue
        how = note(r.seen, r.received, r.expected, workers[i], sequences[i], ends[i] != 0)
        if how != FRESH:
            reason[i] = how
            continue
        passes[i] = needed
        for j in range(pairs[i]):
            at = first + j * stride
            rank = np.int64(load32(arena, at))
            row = r.position[rank]
            r.touched[rank] = 1
            r.updates[rank] += 1
            for c in range(width):
                bits = load32(arena, at + 4 + 4 * c)
                if floats:
                    r.values[row, c] = add_logs(tables, r.values[row, c], to_log(tables, bits))
                else:
                    r.values[row, c] += np.int32(bits)


def empty(r: Registers, floats: bool) -> tuple[I64, NDArray[np.uint32]]:
    """Ranks that were touched, int64[n], and their sums' bits, uint32[n, width]; their slots are zero again."""
    ranks: I64 = np.flatnonzero(r.touched)
    rows = r.position[ranks]
    words: NDArray[np.int32] = r.values[rows]
    r.values[rows] = 0
    r.touched[ranks] = 0
    return ranks, floats_of(words) if floats else words.view(np.uint32)


#: a share of 5 % of 20 MB (section V-A)
DEFAULT_BUDGET = 1 << 20
_CONCERNED = among(Kind.HOT, Kind.NEWS, Kind.JOIN)
#: Places parameters: how many, in how many registers.
Place = Callable[[int, int], Layout]


class SwitchCpu:
    """Keeps and sends the sums of one job, from the switch's address."""

    def __init__(self, job: Job, timing: Timing) -> None:
        self._job = job
        # workers ask first, so that a question may be passed on when it comes
        round_trips = [RoundTrips(timing) for _ in job.shards]
        self._delivery = Delivery(job.shards, round_trips, job.key, timing.ask / 2)
        self._iteration = 0
        self._questions: list[Transmission] = []

    def keep(self, version: int, iteration: int, shards: I64, ranks: I64, words: NDArray[np.uint32]) -> None:
        """Take over an iteration's sums: ``shards`` and ``ranks`` int64[n], ``words`` uint32[n, width].

        Every shard also gets an END. What was kept of the iteration before has arrived: a shard finishes an iteration only
        with it, and no worker begins one before all shards have finished the last.
        """
        job = self._job
        flags = Flag.FLOAT if job.floats else Flag.NONE
        header = Header(job.number, job.key, 0, version, iteration, job.width, flags)
        self._iteration = iteration
        for shard in range(len(job.shards)):
            mine = np.flatnonzero(shards == shard)
            counts = in_sequence(len(mine), job.capacity(Kind.AGGREGATE))
            names = ranks[mine].astype(np.uint64)
            self._delivery.begin(shard, EncodedPackets(Kind.AGGREGATE, header, counts, names, words[mine]))

    def acknowledged(self, shard: int, columns: I64, now: float) -> None:
        """A shard has acknowledged packets, whose acknowledgements' headers are ``columns`` int64[n, 8]."""
        current = ahead(columns[:, Column.ITERATION], self._iteration) == 0
        current &= columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.AGGREGATE
        self._delivery.acknowledge(shard, columns[current], now)

    def asked(self, iteration: I64, now: float) -> None:
        """Workers wait for the end of iterations, int64[n]. If these sums are of one: ask shards whether they still have them."""
        if (ahead(iteration, self._iteration) == 0).any():
            self._questions += self._delivery.ask(now)

    @property
    def kept(self) -> int:
        """Packets that some shard has not acknowledged."""
        return sum(lacking for _, _, lacking in self._delivery.unacknowledged())

    def transmit(self, now: float) -> list[Transmission]:
        """Sums that leave, for the first time or again."""
        questions, self._questions = self._questions, []
        return questions + self._delivery.transmit(now)

    def timer(self) -> float | None:
        """When sums are to be sent again."""
        return self._delivery.timer()

    def stats(self) -> dict[str, int]:
        """Packets sent, and sent again."""
        delivery = self._delivery
        return {
            "cpu_sent": delivery.sent,
            "cpu_repeated": delivery.repeated,
            "shard_restarts": delivery.restarts,
        }


class HotTable:
    """What a switch has of one job: the hot set that its registers are laid out for, whose gradients are in them, and its CPU.
    ``group`` is the number of the group that NEWS go to, ``timing`` the CPU's.
    """

    def __init__(self, job: Job, group: int, timing: Timing, place: Place) -> None:
        self.job = job
        self.group = group
        self._timing = timing
        self._place = place
        self.cpu = SwitchCpu(job, timing)
        self.rank_of = {address: rank for rank, address in enumerate(job.workers)}
        self.shard_of = {address: shard for shard, address in enumerate(job.shards)}
        #: the open one, and whether a packet has said so
        self.iteration = 1
        self._informed = False
        #: numbers of the processes that have taken the ranks' places, and how often one has taken another's
        self.lives: dict[int, int] = {}
        self.begun = 0
        #: hot sets that packets may ask for
        self.prepared: dict[int, HotSet] = {}
        self.counts = UpdateCounts(job.counted, job.listed)
        self._lay_out(EMPTY)

    def _updates(self) -> tuple[U64, I64]:
        """Hot keys, and contributions to them since this was last asked."""
        counts = self.registers.updates.copy()
        self.registers.updates[:] = 0
        return self.hot.keys, counts

    # ------------------------------------------------------------ registers

    def bytes_for(self, count: int) -> int:
        """Registers and ledger for so many hot parameters."""
        layout = self._place(count, self.job.registers)
        return register_bytes(len(self.job.workers), self.job.width, count, layout.registers * layout.depth)

    def claimed(self) -> int:
        """What the largest hot set needs, in place or ready."""
        return max(self.bytes_for(len(hot)) for hot in (self.hot, *self.prepared.values()))

    def _install(self, hot: HotSet) -> None:
        """Put a hot set in place, while the registers are empty."""
        self.counts.keep(self._updates)
        self._lay_out(hot)
        # a worker may be on its way from an older set, never back to it
        forget(self.prepared, hot.version)
        self.prepared.pop(hot.version, None)

    def _lay_out(self, hot: HotSet) -> None:
        job, count = self.job, len(hot)
        self.hot = hot
        self._layout = self._place(count, job.registers)
        self.ledger = Ledger(len(job.workers), most_packets(count), fixed=True)
        self._shards = job.shard_of(hot.keys)
        self.registers = Registers(
            position=np.ascontiguousarray(self._layout.position),
            values=np.zeros((self._layout.registers * self._layout.depth, job.width), np.int32),
            touched=np.zeros(count, np.uint8),
            updates=np.zeros(count, np.int64),
            seen=self.ledger.seen,
            received=self.ledger.received,
            expected=self.ledger.expected,
            mark=np.full(self._layout.registers, -1, np.int64),
            several=np.zeros(self._layout.registers, np.int64),
        )

    # ------------------------------------------------------------ gradients

    def agree(self, parsed: ParsedBatch, which: I64) -> None:
        """Refuse gradients of another hot set; a new one that is ready is put in place while the registers are empty."""
        versions = parsed[Column.VERSION][which]
        for version in np.unique(versions[versions != self.hot.version]).tolist():
            if version in self.prepared and not self.ledger.begun:
                self._install(self.prepared[version])
        other = which[versions != self.hot.version]
        ready = np.isin(parsed[Column.VERSION][other], list(self.prepared))
        parsed.refuse(other[ready], Drop.STALE_PLAN)
        parsed.refuse(other[~ready], Drop.FUTURE_PLAN)

    def fold(self, parsed: ParsedBatch, which: I64, ranks: I64, most_passes: int) -> I64:
        """Add gradients of workers, ``ranks`` int64[n], to the registers, each packet once; gives the passes that each took."""
        columns = parsed.columns[which]
        passes: I64 = np.ones(len(which), np.int64)
        reason: NDArray[np.uint8] = np.zeros(len(which), np.uint8)
        gather(
            self.registers,
            TABLES,
            parsed.batch.arena,
            np.ascontiguousarray(parsed.batch.offsets[which]),
            np.ascontiguousarray(ranks),
            np.ascontiguousarray(columns[:, Column.SEQUENCE]),
            np.ascontiguousarray(columns[:, Column.PAIRS]),
            (columns[:, Column.FLAGS] & Flag.END).astype(np.uint8),
            self._layout.depth,
            most_passes,
            self.job.floats,
            passes,
            reason,
        )
        parsed.reason[which] = reason
        return passes

    # ----------------------------------------------------------- iterations

    def catch_up(self, iterations: I64) -> int:
        """If a worker has begun an iteration that this switch does not know, it was another life that took part in the last ones;
        gives how many these are.

        All before are finished, or the worker would not have begun it; what is here of them is of no use to anybody. A new life
        believes the first packet, whatever its number.
        """
        if not len(iterations):
            return 0
        skipped = 0
        if not self._informed:
            self._informed, first = True, int(iterations[0])
            skipped += first - self.iteration
            self._begin_at(first)
        most = int(ahead(iterations, self.iteration).max())
        if most > 0:
            empty(self.registers, self.job.floats)
            self.ledger.clear()
            skipped += most
            self._begin_at(self.iteration + most)
        return skipped

    def _begin_at(self, iteration: int) -> None:
        """This is the first iteration that all of is seen here."""
        self.iteration = iteration
        self.registers.updates[:] = 0
        self.counts.begin(iteration)

    def begin_anew(self) -> None:
        """The job begins anew, with other processes."""
        empty(self.registers, self.job.floats)
        self.ledger.clear()
        self.cpu = SwitchCpu(self.job, self._timing)
        self.lives.clear()
        self._informed = False
        self.begun += 1

    def finish(self) -> int:
        """Everything of an iteration is in: hand the sums to the CPU; gives how many these are."""
        ranks, words = empty(self.registers, self.job.floats)
        self.cpu.keep(self.hot.version, self.iteration, self._shards[ranks], ranks, words)
        self.counts.finished(self.iteration, self._updates)
        self.ledger.clear()
        self.iteration += 1
        return len(ranks)

    def acknowledged(self, parsed: ParsedBatch, now: float) -> None:
        """Shards have acknowledged sums."""
        which = parsed.of(Kind.ACK)
        columns = parsed.columns[which]
        sources = parsed.batch.sources[which]
        for address in np.unique(sources).tolist():
            mine = sources == address
            self.cpu.acknowledged(self.shard_of[int(address)], columns[mine], now)


class ZebraProgram:
    """Sums of hot parameters in ``budget`` bytes of registers, for all jobs together. ``timing`` is the CPU's.

    ``life`` is a number that no other life of this switch had lately, up to 65535. A packet that needs more than ``most_passes``
    passes is refused with a reason (and would be for ever: packaging must not make such packets). ``place`` lays parameters out.
    """

    name = "zebra"
    #: of a packet that is packaged well; no packet has more pairs than the switch lets it make passes
    passes = 1

    def __init__(
        self,
        *,
        budget: int = DEFAULT_BUDGET,
        timing: Timing | None = None,
        most_passes: int = MOST_PASSES,
        place: Place = by_heat,
        life: int = 0,
    ) -> None:
        if not 0 <= life <= 0xFFFF:
            raise ValueError(f"the number of a switch's life has 16 bits, {life} does not fit")
        self.budget = budget
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        #: packets by the passes that they took
        self._by_passes: NDArray[np.int64] = np.zeros(256, np.int64)
        self.contributions = self.iterations = self.summed = self.skipped = 0
        self.life = life
        self._timing = timing or Timing()
        self._most_passes = most_passes
        self._place = place
        self._tables: dict[int, HotTable] = {}
        self._spilled: list[Transmission] = []
        self._now = 0.0

    # ---------------------------------------------------------------- jobs

    def offer(self, limit: int | None, most_passes: int) -> Offer:
        """Pieces of :data:`UNIT` bytes in all; a packet has no more pairs than the passes that it may make."""
        return Offer(min(self.budget // UNIT, 1 << 20), values=most_passes)

    def serve(self, facts: ZebraJob, key: int, here: int) -> Neighbours:
        """Serve the job of a plan with its hot keys; its neighbours are ranks and shards. Raises ``ValueError`` for one that cannot
        be, or that there is no room for.
        """
        job = job_of(facts, key)
        self.add_job(job, job.number)
        try:
            self.follow(facts)
        except ValueError:
            self.remove_job(job.number)
            raise
        return Neighbours(dict.fromkeys((*facts.workers, *facts.servers), 0), facts.workers)

    def follow(self, facts: ZebraJob) -> None:
        """Have the hot keys of a job's plan ready. Raises ``ValueError`` for ones that there is no room for."""
        if facts.hot_version != EMPTY.version:
            self.prepare(facts.number, hot_of(facts))

    def add_job(self, job: Job, group: int) -> None:
        """Serve a job; ``group`` is the number of the group that NEWS go to. Raises ``ValueError`` for a number in use."""
        if job.number in self._tables:
            raise ValueError(f"job {job.number} is served already; remove it first")
        self._tables[job.number] = HotTable(job, group, self._timing, self._place)

    def restarted(self) -> "ZebraProgram":
        """The next life of this switch: it serves the same jobs and knows nothing else of this one, not even hot sets."""
        # a job that was forgotten has had numbers beyond this switch's own
        life = self.life + 1 + max((table.begun for table in self._tables.values()), default=0)
        other = ZebraProgram(
            budget=self.budget,
            timing=self._timing,
            most_passes=self._most_passes,
            place=self._place,
            life=life & 0xFFFF,
        )
        for table in self._tables.values():
            other.add_job(table.job, table.group)
        return other

    def remove_job(self, number: int) -> None:
        """Forget a job and what is in its registers. Raises ``KeyError`` for one that is not table."""
        del self._tables[number]

    def prepare(self, number: int, hot: HotSet) -> None:
        """Have a hot set ready. It is put in place when the first packet of an iteration asks for it.

        Raises ``ValueError`` when it does not fit into the registers, ``KeyError`` for a job that is not table.
        """
        self.check(number, len(hot))
        table = self._tables[number]
        table.prepared.pop(hot.version, None)
        table.prepared[hot.version] = hot

    def check(self, number: int, count: int) -> None:
        """Raise as :meth:`prepare` for a hot set of so many."""
        table = self._tables[number]
        needed = table.bytes_for(count)
        others = sum(one.claimed() for one in self._tables.values() if one is not table)
        if needed + others > self.budget:
            raise ValueError(
                f"job {number}: {count} hot parameters need {needed} B of registers, {self.budget - others} B are left; "
                "make the hot set smaller"
            )

    def tally(self, number: int, iteration: int) -> Tally:
        """How often keys of a job were updated in the iterations up to one that all shards have finished; empty if that was another
        life of the switch. Raises ``KeyError`` for a job that is not table.
        """
        return self._tables[number].counts.of(iteration)

    # ------------------------------------------------------------- packets

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge a batch; see :class:`~inanet.proto.common.program.Program`."""
        count = len(batch)
        self._now = now
        verdicts.action[:count] = Action.DROP
        verdicts.length[:count] = batch.lengths
        verdicts.reason[:count] = Drop.FOREIGN_JOB
        verdicts.mark[:count] = 0
        verdicts.passes[:count] = 1
        for table in self._tables.values():
            self._serve(table, batch, verdicts)
        np.add.at(self.drops, verdicts.reason[:count], 1)
        self._send(now)

    def _serve(self, table: HotTable, batch: PacketBatch, verdicts: Verdicts) -> None:
        job = table.job
        parsed = ParsedBatch(batch, job.number, job.key)
        self._joins(table, parsed, verdicts)
        self._gradients(table, parsed, verdicts)
        for sort, shard_says in ((Kind.NEWS, False), (Kind.ACK, True)):
            for index in parsed.of(sort).tolist():
                if int(batch.sources[index]) not in table.shard_of:
                    parsed.reason[index] = Drop.FOREIGN_HOST
                elif not shard_says:
                    verdicts.action[index] = Action.GROUP
                    verdicts.target[index] = table.group
        table.acknowledged(parsed, self._now)
        parsed.refuse(
            (parsed.reason == 0) & (parsed[Column.KIND] != Kind.ACK) & ~_CONCERNED[parsed[Column.KIND]],
            Drop.BAD_TYPE,
        )
        mine = parsed.reason != Drop.FOREIGN_JOB
        verdicts.reason[: len(batch)][mine] = parsed.reason[mine]

    def _gradients(self, table: HotTable, parsed: ParsedBatch, verdicts: Verdicts) -> None:
        job, batch = table.job, parsed.batch
        which = parsed.of(Kind.HOT)
        if not len(which):
            return
        ranks = np.array([table.rank_of.get(source, -1) for source in batch.sources[which].tolist()])
        parsed.refuse(which[ranks < 0], Drop.FOREIGN_HOST)
        sound = parsed[Column.WIDTH] == job.width
        sound &= (parsed[Column.FLAGS] & Flag.FLOAT != 0) == job.floats
        parsed.refuse(which[~sound[which]], Drop.BAD_TYPE)
        self.skipped += table.catch_up(parsed[Column.ITERATION][which[parsed.reason[which] == 0]])
        # an ACK is owed to whatever has been taken
        early = ahead(parsed[Column.ITERATION], table.iteration)
        live = (parsed.reason[which] == 0) & (early[which] == 0)
        table.agree(parsed, which[live])
        live &= parsed.reason[which] == 0
        self._fold(table, parsed, which[live], ranks[live], verdicts)
        late = which[(parsed.reason[which] == 0) & (early[which] < 0)]
        parsed.reason[late] = Drop.STALE_ROUND
        questions = late[parsed[Column.FLAGS][late] & Flag.END != 0]
        table.cpu.asked(parsed[Column.ITERATION][questions], self._now)
        repeated = (parsed.reason[which] == Drop.DUPLICATE) | (parsed.reason[which] == Drop.STALE_ROUND)
        self._answer(table, batch, which[(parsed.reason[which] == 0) | repeated], verdicts)
        if table.ledger.complete:
            self.summed += table.finish()
            self.iterations += 1

    def _fold(self, table: HotTable, parsed: ParsedBatch, which: I64, ranks: I64, verdicts: Verdicts) -> None:
        columns = parsed.columns[which]
        passes = table.fold(parsed, which, ranks, self._most_passes)
        verdicts.passes[which] = np.minimum(passes, 255)
        folded = parsed.reason[which] == 0
        self.contributions += int(columns[folded, Column.PAIRS].sum())
        np.add.at(self._by_passes, np.minimum(passes[folded & (columns[:, Column.PAIRS] > 0)], 255), 1)

    def _answer(self, table: HotTable, batch: PacketBatch, which: I64, verdicts: Verdicts) -> None:
        """Turn packets into their acknowledgements."""
        ats, life = batch.offsets[which], (self.life + table.begun) & 0xFFFF
        batch.arena[ats + 19] = batch.arena[ats + 1] << KIND_SHIFT | batch.arena[ats + 19] >> KIND_SHIFT
        batch.arena[ats + 1] = Kind.ACK
        batch.arena[ats + 16], batch.arena[ats + 17] = life >> 8, life & 0xFF
        verdicts.length[which] = EMPTY_BYTES
        seal(batch.arena, ats, np.full(len(ats), EMPTY_BYTES, np.int64), table.job.key)
        verdicts.action[which] = Action.REPLY

    def _joins(self, table: HotTable, parsed: ParsedBatch, verdicts: Verdicts) -> None:
        """Processes take the ranks' places. One in the place of another means that the job begins anew: what is here is of the
        one before, or, if shards refuse that process, is sent again by the others, as to another life of this switch.
        """
        taken = []
        for index in parsed.of(Kind.JOIN).tolist():
            rank = table.rank_of.get(int(parsed.batch.sources[index]))
            if rank is None:
                parsed.reason[index] = Drop.FOREIGN_HOST
                continue
            life = int(parsed[Column.ITERATION][index])
            if table.lives.setdefault(rank, life) != life:
                table.begin_anew()
                table.lives[rank] = life
            taken.append(index)
        if taken:
            self._answer(table, parsed.batch, np.array(taken, np.int64), verdicts)

    # ------------------------------------------------------------ the rest

    def _send(self, now: float) -> None:
        for table in self._tables.values():
            self._spilled += table.cpu.transmit(now)

    def spilled(self) -> list[Transmission]:
        """What the CPU sends."""
        out, self._spilled = self._spilled, []
        return out

    def timer(self) -> float | None:
        """When the CPU repeats something."""
        times = [table.cpu.timer() for table in self._tables.values()]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Repeat what no PS has acknowledged."""
        self._send(now)

    def register_bytes(self) -> int:
        """All of the budget, whoever uses it."""
        return self.budget

    def missing(self, number: int) -> list[int]:
        """Ranks that the open iteration of a job waits for, if it has begun."""
        ledger = self._tables[number].ledger
        return ledger.missing() if ledger.begun else []

    def stats(self) -> dict[str, int]:
        """Counters: packets, recirculations, contributions and sums, iterations finished here and those of another life, drops
        by reason, what the CPU sent.
        """
        number = np.arange(len(self._by_passes))
        out = {
            "packets": int(self._by_passes.sum()),
            "recirculations": int((self._by_passes * np.maximum(number - 1, 0)).sum()),
            "contributions": self.contributions,
            "sums": self.summed,
            "iterations": self.iterations,
            "skipped": self.skipped,
        }
        out |= {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
        for number_, table in self._tables.items():
            out[f"occupied_{number_}"] = int(table.registers.touched.sum())
            for key, value in table.cpu.stats().items():
                out[key] = out.get(key, 0) + value
        return out


def daemon_program(*, budget: int = DEFAULT_BUDGET, age: float = 1.0) -> ZebraProgram:
    """The program of a switch that is a daemon. ``age`` is of no use: what is in a register stays until its iteration is complete, or
    its job over. A switch that is lost ends its jobs, so that it has one life for each.
    """
    return ZebraProgram(budget=budget, timing=DAEMON_TIMING)
