"""Zebra on a switch: gradients of hot parameters are summed, everything else is forwarded.

The four stages: *resolve* looks a gradient's rank up in the exact-match table and its sender up in the job; *admit* asks
the ledger of (worker, sequence) whether the packet is new; *fold* adds each gradient to its register, one access per
register and pass; *emit* comes when the ledger is complete (iteration ledger), not with a packet: all sums that were touched go
to the switch's CPU, which sends them to their PS shards until these have them, and the registers are empty for the next
iteration.

A gradient packet leaves as its own acknowledgement. One that is repeated is acknowledged again and changes nothing. NEWS of
a PS are replicated to the job's group.

A switch that has been restarted knows nothing but its jobs and their hot sets, and nothing is lost with what it knew: workers
keep their gradients until the shards have finished the iteration, learn from the number of the switch's life in its
acknowledgements that it is another one, and send everything of the iteration again. Equal gradients make equal sums in equal
packets, of which a shard takes those that it lacks. The iteration is the workers': one that begins an iteration knows
that all shards have finished those before.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import Tally
from inanet.proto.common.program import Action, Verdicts
from inanet.proto.zebra.layout import by_heat
from inanet.proto.zebra.logsum import TABLE_BYTES
from inanet.proto.zebra.membership import MOST_PASSES, HotSet, Job
from inanet.proto.zebra.packets import Column, Judged, among, seal
from inanet.proto.zebra.serial import ahead
from inanet.proto.zebra.served import Place, Served
from inanet.proto.zebra.stream import Timing
from inanet.wire.batch import I64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.zebra import EMPTY_BYTES, KIND_SHIFT, Flag, Kind

#: a share of 5 % of 20 MB (section V-A)
DEFAULT_BUDGET = 1 << 20
_CONCERNED = among(Kind.HOT, Kind.NEWS, Kind.JOIN)


class ZebraProgram:
    """Sums of hot parameters in ``budget`` bytes of registers, for all jobs together. ``timing`` is the CPU's.

    ``life`` is a number that no other life of this switch had lately, up to 65535. A packet that needs more than ``most_passes``
    passes is refused with a reason (and would be for ever: packaging must not make such packets). ``place`` lays parameters out.
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
        self._served: dict[int, Served] = {}
        self._spilled: list[Transmission] = []
        self._now = 0.0

    # ---------------------------------------------------------------- jobs

    def add_job(self, job: Job, group: int) -> None:
        """Serve a job; ``group`` is the number of the group that NEWS go to. Raises ``ValueError`` for a number in use."""
        if job.number in self._served:
            raise ValueError(f"job {job.number} is served already; remove it first")
        self._served[job.number] = Served(job, group, self._timing, self._place)

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
        needed = served.bytes_for(count)
        others = sum(one.claimed() for one in self._served.values() if one is not served)
        if needed + others > self.budget:
            raise ValueError(
                f"job {number}: {count} hot parameters need {needed} B of registers, {self.budget - others} B are left; "
                "make the hot set smaller"
            )

    def tally(self, number: int, iteration: int) -> Tally:
        """How often keys of a job were updated in the iterations up to one that all shards have finished; empty if that was another
        life of the switch. Raises ``KeyError`` for a job that is not served.
        """
        return self._served[number].counts.of(iteration)

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
        for served in self._served.values():
            self._serve(served, batch, verdicts)
        np.add.at(self.drops, verdicts.reason[:count], 1)
        self._send(now)

    def _serve(self, served: Served, batch: PacketBatch, verdicts: Verdicts) -> None:
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
        served.acknowledged(judged, self._now)
        judged.refuse(
            (judged.reason == 0) & (judged[Column.KIND] != Kind.ACK) & ~_known(judged), Drop.BAD_TYPE
        )
        mine = judged.reason != Drop.FOREIGN_JOB
        verdicts.reason[: len(batch)][mine] = judged.reason[mine]

    def _gradients(self, served: Served, judged: Judged, verdicts: Verdicts) -> None:
        job, batch = served.job, judged.batch
        which = judged.of(Kind.HOT)
        if not len(which):
            return
        ranks = np.array([served.rank_of.get(source, -1) for source in batch.sources[which].tolist()])
        judged.refuse(which[ranks < 0], Drop.FOREIGN_HOST)
        sound = judged[Column.WIDTH] == job.width
        sound &= (judged[Column.FLAGS] & Flag.FLOAT != 0) == job.floats
        judged.refuse(which[~sound[which]], Drop.BAD_TYPE)
        self.skipped += served.catch_up(judged[Column.ITERATION][which[judged.reason[which] == 0]])
        # an ACK is owed to whatever has been taken
        early = ahead(judged[Column.ITERATION], served.iteration)
        live = (judged.reason[which] == 0) & (early[which] == 0)
        served.agree(judged, which[live])
        live &= judged.reason[which] == 0
        self._fold(served, judged, which[live], ranks[live], verdicts)
        late = which[(judged.reason[which] == 0) & (early[which] < 0)]
        judged.reason[late] = Drop.STALE_ROUND
        questions = late[judged[Column.FLAGS][late] & Flag.END != 0]
        served.cpu.asked(judged[Column.ITERATION][questions], self._now)
        repeated = (judged.reason[which] == Drop.DUPLICATE) | (judged.reason[which] == Drop.STALE_ROUND)
        self._answer(served, batch, which[(judged.reason[which] == 0) | repeated], verdicts)
        if served.ledger.complete:
            self.summed += served.finish()
            self.iterations += 1

    def _fold(self, served: Served, judged: Judged, which: I64, ranks: I64, verdicts: Verdicts) -> None:
        columns = judged.columns[which]
        passes = served.fold(judged, which, ranks, self._most_passes)
        verdicts.passes[which] = np.minimum(passes, 255)
        folded = judged.reason[which] == 0
        self.contributions += int(columns[folded, Column.PAIRS].sum())
        np.add.at(self.passes, np.minimum(passes[folded & (columns[:, Column.PAIRS] > 0)], 255), 1)

    def _answer(self, served: Served, batch: PacketBatch, which: I64, verdicts: Verdicts) -> None:
        """Turn packets into their acknowledgements."""
        ats, life = batch.offsets[which], (self.life + served.begun) & 0xFFFF
        batch.arena[ats + 19] = batch.arena[ats + 1] << KIND_SHIFT | batch.arena[ats + 19] >> KIND_SHIFT
        batch.arena[ats + 1] = Kind.ACK
        batch.arena[ats + 16], batch.arena[ats + 17] = life >> 8, life & 0xFF
        verdicts.length[which] = EMPTY_BYTES
        seal(batch.arena, ats, np.full(len(ats), EMPTY_BYTES, np.int64), served.job.key)
        verdicts.action[which] = Action.REPLY

    def _joining(self, served: Served, judged: Judged, verdicts: Verdicts) -> None:
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
                served.begin_anew()
                served.lives[rank] = life
            taken.append(index)
        if taken:
            self._answer(served, judged.batch, np.array(taken, np.int64), verdicts)

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
        used = sum(served.bytes_for(len(served.hot)) for served in self._served.values())
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
            out[f"occupied_{number_}"] = int(served.registers.touched.sum())
            for key, value in served.cpu.stats().items():
                out[key] = out.get(key, 0) + value
        return out


def _known(judged: Judged) -> NDArray[np.bool_]:
    """Packets of kinds that concern a switch."""
    return _CONCERNED[judged[Column.KIND]]
