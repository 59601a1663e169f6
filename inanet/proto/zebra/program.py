"""Zebra on a switch: gradients of hot parameters are summed, everything else is forwarded.

The four stages: *resolve* looks a gradient's rank up in the exact-match table and its sender up in the job; *admit* asks
the ledger of (worker, sequence) whether the packet is new; *fold* adds each gradient to its register, one access per
register and pass; *emit* comes when the ledger is complete (R12), not with a packet: all sums that were touched go to the
switch's CPU, which sends them to their PS shards until these have them, and the registers are empty for the next iteration.

A gradient packet leaves as its own acknowledgement. One that is repeated is acknowledged again and changes nothing. NEWS of
a PS are replicated to the job's group.

A switch that has been restarted knows nothing but its jobs and their hot sets, and nothing is lost with what it knew: workers
keep their gradients until the shards have finished the iteration, learn from the number of the switch's life in its
acknowledgements that it is another one, and send everything of the iteration again. Equal gradients make equal sums in equal
packets, of which a shard takes those that it lacks. The iteration is the workers': one that begins an iteration knows
that all shards have finished those before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.events import Tally
from inanet.proto.program import Action, Verdicts
from inanet.proto.zebra.counts import Counts
from inanet.proto.zebra.layout import Layout, by_heat
from inanet.proto.zebra.ledger import Ledger
from inanet.proto.zebra.logsum import TABLE_BYTES, TABLES
from inanet.proto.zebra.membership import (
    EMPTY,
    MOST_PASSES,
    HotSet,
    Job,
    forget,
    most_packets,
    register_bytes,
)
from inanet.proto.zebra.packets import Column, Judged, among, seal
from inanet.proto.zebra.registers import Registers, empty, gather
from inanet.proto.zebra.serial import ahead
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switchcpu import SwitchCpu
from inanet.wire.batch import I64, U64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.zebra import EMPTY_BYTES, KIND_SHIFT, Flag, Kind

#: a share of 5 % of 20 MB (section V-A)
DEFAULT_BUDGET = 1 << 20
_CONCERNED = among(Kind.HOT, Kind.NEWS, Kind.JOIN)
#: Places parameters: how many, in how many registers.
Place = Callable[[int, int], Layout]


@dataclass(slots=True)
class _Served:
    job: Job
    group: int
    cpu: SwitchCpu
    rank_of: dict[int, int]
    shard_of: dict[int, int]
    hot: HotSet = EMPTY
    #: the open one, and whether a packet has said so
    iteration: int = 1
    informed: bool = False
    #: numbers of the processes that have taken the ranks' places, and how often one has taken another's
    lives: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    #: hot sets that packets may ask for
    prepared: dict[int, HotSet] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger(1))
    layout: Layout = field(default_factory=lambda: by_heat(0, 1))
    registers: Registers | None = None
    shards: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: Counts = field(default_factory=lambda: Counts(0, 0))

    def updates(self) -> tuple[U64, I64]:
        """Hot keys, and contributions to them since this was last asked."""
        assert self.registers is not None
        counts = self.registers.updates.copy()
        self.registers.updates[:] = 0
        return self.hot.keys, counts


class ZebraProgram:
    """Sums of hot parameters in ``budget`` bytes of registers, for all jobs together. ``timing`` is the CPU's.

    ``life`` is a number that no other life of this switch had lately, up to 65535. A packet that needs more than ``most_passes`` passes is refused with a reason (and would be for ever: packaging must
    not make such packets). ``place`` lays parameters out.
    """

    name = "zebra"

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
        self.passes: NDArray[np.int64] = np.zeros(256, np.int64)
        self.contributions = self.iterations = self.summed = self.skipped = 0
        self.life = life
        self._timing = timing or Timing()
        self._most_passes = most_passes
        self._place = place
        self._served: dict[int, _Served] = {}
        self._spilled: list[Transmission] = []
        self._now = 0.0

    # ---------------------------------------------------------------- jobs

    def add_job(self, job: Job, group: int) -> None:
        """Serve a job; ``group`` is the number of the group that NEWS go to. Raises ``ValueError`` for a number in use."""
        if job.number in self._served:
            raise ValueError(f"job {job.number} is served already; remove it first")
        served = _Served(
            job,
            group,
            SwitchCpu(job, self._timing),
            {address: rank for rank, address in enumerate(job.workers)},
            {address: shard for shard, address in enumerate(job.shards)},
            counts=Counts(job.counted, job.listed),
        )
        self._install(served, EMPTY)
        self._served[job.number] = served

    def restarted(self) -> "ZebraProgram":
        """The next life of this switch: it serves the same jobs and knows nothing else of this one, not even hot sets."""
        # a job that was forgotten has had numbers beyond this switch's own
        life = self.life + 1 + max((served.begun for served in self._served.values()), default=0)
        other = ZebraProgram(
            budget=self.budget,
            timing=self._timing,
            most_passes=self._most_passes,
            place=self._place,
            life=life & 0xFFFF,
        )
        for served in self._served.values():
            other.add_job(served.job, served.group)
        return other

    def remove_job(self, number: int) -> None:
        """Forget a job and what is in its registers. Raises ``KeyError`` for one that is not served."""
        del self._served[number]

    def prepare(self, number: int, hot: HotSet) -> None:
        """Have a hot set ready. It is put in place when the first packet of an iteration asks for it.

        Raises ``ValueError`` when it does not fit into the registers, ``KeyError`` for a job that is not served.
        """
        self.check(number, len(hot))
        served = self._served[number]
        served.prepared.pop(hot.version, None)
        served.prepared[hot.version] = hot

    def check(self, number: int, count: int) -> None:
        """Raise as :meth:`prepare` for a hot set of so many."""
        served = self._served[number]
        needed = self._bytes(served.job, count)
        others = sum(self._claimed(one) for one in self._served.values() if one is not served)
        if needed + others > self.budget:
            raise ValueError(
                f"job {number}: {count} hot parameters need {needed} B of registers, {self.budget - others} B are left; "
                "make the hot set smaller"
            )

    def _claimed(self, served: _Served) -> int:
        """What a job's largest hot set needs, in place or ready."""
        return max(self._bytes(served.job, len(hot)) for hot in (served.hot, *served.prepared.values()))

    def _bytes(self, job: Job, count: int) -> int:
        layout = self._place(count, job.registers)
        return register_bytes(len(job.workers), job.width, count, layout.registers * layout.depth)

    def _install(self, served: _Served, hot: HotSet) -> None:
        job, count = served.job, len(hot)
        if served.registers is not None:
            served.counts.keep(served.updates)
        served.hot = hot
        served.layout = self._place(count, job.registers)
        served.ledger = Ledger(len(job.workers), most_packets(count), fixed=True)
        served.shards = job.shard_of(hot.keys)
        served.registers = Registers(
            position=np.ascontiguousarray(served.layout.position),
            values=np.zeros((served.layout.registers * served.layout.depth, job.width), np.int32),
            touched=np.zeros(count, np.uint8),
            updates=np.zeros(count, np.int64),
            seen=served.ledger.seen,
            received=served.ledger.received,
            expected=served.ledger.expected,
            mark=np.full(served.layout.registers, -1, np.int64),
            several=np.zeros(served.layout.registers, np.int64),
        )
        # a worker may be on its way from an older set, never back to it
        forget(served.prepared, hot.version)
        served.prepared.pop(hot.version, None)

    def tally(self, number: int, iteration: int) -> Tally:
        """How often keys of a job were updated in the iterations up to one that all shards have finished; empty if that was another
        life of the switch. Raises ``KeyError`` for a job that is not served.
        """
        return self._served[number].counts.of(iteration)

    # ------------------------------------------------------------- packets

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        """Judge a batch; see :class:`~inanet.proto.program.Program`."""
        count = len(batch)
        self._now = now
        verdicts.action[:count] = Action.DROP
        verdicts.length[:count] = batch.lengths
        verdicts.reason[:count] = Drop.FOREIGN_JOB
        verdicts.mark[:count] = 0
        verdicts.passes[:count] = 1
        for served in self._served.values():
            self._serve(served, batch, verdicts)
        np.add.at(self.drops, verdicts.reason[:count], 1)
        self._send(now)

    def _serve(self, served: _Served, batch: PacketBatch, verdicts: Verdicts) -> None:
        job = served.job
        judged = Judged(batch, job.number, job.key)
        self._joining(served, judged, verdicts)
        self._gradients(served, judged, verdicts)
        for sort, shard_says in ((Kind.NEWS, False), (Kind.ACK, True)):
            for index in judged.of(sort).tolist():
                if int(batch.sources[index]) not in served.shard_of:
                    judged.reason[index] = Drop.FOREIGN_HOST
                elif not shard_says:
                    verdicts.action[index] = Action.GROUP
                    verdicts.target[index] = served.group
        self._acknowledged(served, judged)
        judged.refuse(
            (judged.reason == 0) & (judged[Column.KIND] != Kind.ACK) & ~_known(judged), Drop.BAD_TYPE
        )
        mine = judged.reason != Drop.FOREIGN_JOB
        verdicts.reason[: len(batch)][mine] = judged.reason[mine]

    def _gradients(self, served: _Served, judged: Judged, verdicts: Verdicts) -> None:
        job, batch = served.job, judged.batch
        which = judged.of(Kind.HOT)
        if not len(which):
            return
        ranks = np.array([served.rank_of.get(source, -1) for source in batch.sources[which].tolist()])
        judged.refuse(which[ranks < 0], Drop.FOREIGN_HOST)
        sound = judged[Column.WIDTH] == job.width
        sound &= (judged[Column.FLAGS] & Flag.FLOAT != 0) == job.floats
        judged.refuse(which[~sound[which]], Drop.BAD_TYPE)
        self._catch_up(served, judged[Column.ITERATION][which[judged.reason[which] == 0]])
        # an ACK is owed to whatever has been taken
        early = ahead(judged[Column.ITERATION], served.iteration)
        live = (judged.reason[which] == 0) & (early[which] == 0)
        self._agree(served, judged, which[live])
        live &= judged.reason[which] == 0
        self._fold(served, judged, which[live], ranks[live], verdicts)
        late = which[(judged.reason[which] == 0) & (early[which] < 0)]
        judged.reason[late] = Drop.STALE_ROUND
        questions = late[judged[Column.FLAGS][late] & Flag.END != 0]
        served.cpu.asked(judged[Column.ITERATION][questions], self._now)
        repeated = (judged.reason[which] == Drop.DUPLICATE) | (judged.reason[which] == Drop.STALE_ROUND)
        self._answer(served, batch, which[(judged.reason[which] == 0) | repeated], verdicts)
        if served.ledger.complete:
            self._finish(served)

    def _catch_up(self, served: _Served, iterations: I64) -> None:
        """If a worker has begun an iteration that this switch does not know, it was another life that took part in the last ones.

        All before are finished, or the worker would not have begun it; what is here of them is of no use to anybody. A new life
        believes the first packet, whatever its number.
        """
        if not len(iterations):
            return
        if not served.informed:
            served.informed, most = True, int(iterations[0])
            self.skipped += most - served.iteration
            self._begin_at(served, most)
        most = int(ahead(iterations, served.iteration).max())
        if most > 0:
            assert served.registers is not None
            empty(served.registers, served.job.floats)
            served.ledger.clear()
            self.skipped += most
            self._begin_at(served, served.iteration + most)

    @staticmethod
    def _begin_at(served: _Served, iteration: int) -> None:
        """This is the first iteration that all of is seen here."""
        assert served.registers is not None
        served.iteration = iteration
        served.registers.updates[:] = 0
        served.counts.begin(iteration)

    def _agree(self, served: _Served, judged: Judged, which: I64) -> None:
        """Refuse gradients of another hot set; a new one that is ready is put in place while the registers are empty."""
        versions = judged[Column.VERSION][which]
        for version in np.unique(versions[versions != served.hot.version]).tolist():
            if version in served.prepared and not served.ledger.begun:
                self._install(served, served.prepared[version])
        other = which[versions != served.hot.version]
        ready = np.isin(judged[Column.VERSION][other], list(served.prepared))
        judged.refuse(other[ready], Drop.STALE_PLAN)
        judged.refuse(other[~ready], Drop.FUTURE_PLAN)

    def _fold(self, served: _Served, judged: Judged, which: I64, ranks: I64, verdicts: Verdicts) -> None:
        assert served.registers is not None
        columns = judged.columns[which]
        passes: I64 = np.ones(len(which), np.int64)
        reason: NDArray[np.uint8] = np.zeros(len(which), np.uint8)
        gather(
            served.registers,
            TABLES,
            judged.batch.arena,
            np.ascontiguousarray(judged.batch.offsets[which]),
            np.ascontiguousarray(ranks),
            np.ascontiguousarray(columns[:, Column.SEQUENCE]),
            np.ascontiguousarray(columns[:, Column.PAIRS]),
            (columns[:, Column.FLAGS] & Flag.END).astype(np.uint8),
            served.layout.depth,
            self._most_passes,
            served.job.floats,
            passes,
            reason,
        )
        judged.reason[which] = reason
        verdicts.passes[which] = np.minimum(passes, 255)
        folded = reason == 0
        self.contributions += int(columns[folded, Column.PAIRS].sum())
        np.add.at(self.passes, np.minimum(passes[folded & (columns[:, Column.PAIRS] > 0)], 255), 1)

    def _answer(self, served: _Served, batch: PacketBatch, which: I64, verdicts: Verdicts) -> None:
        """Turn packets into their acknowledgements."""
        ats, life = batch.offsets[which], (self.life + served.begun) & 0xFFFF
        batch.arena[ats + 19] = batch.arena[ats + 1] << KIND_SHIFT | batch.arena[ats + 19] >> KIND_SHIFT
        batch.arena[ats + 1] = Kind.ACK
        batch.arena[ats + 16], batch.arena[ats + 17] = life >> 8, life & 0xFF
        verdicts.length[which] = EMPTY_BYTES
        seal(batch.arena, ats, np.full(len(ats), EMPTY_BYTES, np.int64), served.job.key)
        verdicts.action[which] = Action.REPLY

    def _joining(self, served: _Served, judged: Judged, verdicts: Verdicts) -> None:
        """Processes take the ranks' places. One in the place of another means that the job begins anew: what is here is of the
        one before, or, if shards refuse that process, is sent again by the others, as to another life of this switch.
        """
        taken = []
        for index in judged.of(Kind.JOIN).tolist():
            rank = served.rank_of.get(int(judged.batch.sources[index]))
            if rank is None:
                judged.reason[index] = Drop.FOREIGN_HOST
                continue
            life = int(judged[Column.ITERATION][index])
            if served.lives.setdefault(rank, life) != life:
                self._begin_anew(served)
                served.lives[rank] = life
            taken.append(index)
        if taken:
            self._answer(served, judged.batch, np.array(taken, np.int64), verdicts)

    def _begin_anew(self, served: _Served) -> None:
        assert served.registers is not None
        empty(served.registers, served.job.floats)
        served.ledger.clear()
        served.cpu = SwitchCpu(served.job, self._timing)
        served.lives.clear()
        served.informed = False
        served.begun += 1

    def _finish(self, served: _Served) -> None:
        """Everything of an iteration is in: hand the sums to the CPU."""
        assert served.registers is not None
        ranks, words = empty(served.registers, served.job.floats)
        served.cpu.keep(served.hot.version, served.iteration, served.shards[ranks], ranks, words)
        served.counts.finished(served.iteration, served.updates)
        served.ledger.clear()
        served.iteration += 1
        self.iterations += 1
        self.summed += len(ranks)

    def _acknowledged(self, served: _Served, judged: Judged) -> None:
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        sources = judged.batch.sources[which]
        for address in np.unique(sources).tolist():
            mine = sources == address
            served.cpu.acknowledged(served.shard_of[int(address)], columns[mine], self._now)

    # ------------------------------------------------------------ the rest

    def _send(self, now: float) -> None:
        for served in self._served.values():
            self._spilled += served.cpu.transmit(now)

    def spilled(self) -> list[Transmission]:
        """What the CPU sends."""
        out, self._spilled = self._spilled, []
        return out

    def timer(self) -> float | None:
        """When the CPU repeats something."""
        times = [served.cpu.timer() for served in self._served.values()]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Repeat what no PS has acknowledged."""
        self._send(now)

    def register_bytes(self) -> int:
        """Registers, ledgers and, for jobs of floats, tables."""
        floats = any(served.job.floats for served in self._served.values())
        used = sum(self._bytes(served.job, len(served.hot)) for served in self._served.values())
        return used + (TABLE_BYTES if floats else 0)

    def missing(self, number: int) -> list[int]:
        """Ranks that the open iteration of a job waits for, if it has begun."""
        ledger = self._served[number].ledger
        return ledger.missing() if ledger.begun else []

    def stats(self) -> dict[str, int]:
        """Counters: packets, recirculations, contributions and sums, iterations finished here and those of another life, drops
        by reason, what the CPU sent.
        """
        number = np.arange(len(self.passes))
        out = {
            "packets": int(self.passes.sum()),
            "recirculations": int((self.passes * np.maximum(number - 1, 0)).sum()),
            "contributions": self.contributions,
            "sums": self.summed,
            "iterations": self.iterations,
            "skipped": self.skipped,
        }
        out |= {f"drop_{Drop(i).label}": int(n) for i, n in enumerate(self.drops) if i and n}
        for number_, served in self._served.items():
            assert served.registers is not None
            out[f"occupied_{number_}"] = int(served.registers.touched.sum())
            for key, value in served.cpu.stats().items():
                out[key] = out.get(key, 0) + value
        return out


def _known(judged: Judged) -> NDArray[np.bool_]:
    """Packets of kinds that concern a switch."""
    return _CONCERNED[judged[Column.KIND]]
