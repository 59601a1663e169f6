"""The PS of ATP, A2TP and ESA: sums what the switch could not, answers every fragment to all workers.

The answer carries the sum and is the acknowledgement; on its way through the switch it frees the fragment's slot. Whoever
asks again for a complete fragment is answered again. Marks are OR-ed over everything that came for a fragment, so that a
mark on a packet which was not the last is not lost.

Where part of a fragment may lie in a switch while the rest has come here (workers that do not agree about using slots, an
eviction), the PS *pulls*: it asks the switch for what the slot holds, with back-off.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.atp.heads import read_heads, write_heads
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.slots import SlotTable
from inanet.proto.slots.leaves import Leaves, give
from inanet.proto.slots.ps import Answering, Arrivals, Fragments, PSJob, SumServer, check_number
from inanet.proto.slots.tenants import members_of
from inanet.wire.atp import ECHO, FRAME, MAX_JOB, PULL, SEQUENCE_BITS, VALUES, Flag, mark_of
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop

Index = NDArray[np.int64]
_COL = 0x01
# as plain numbers, because members of an enumeration are slow to look up and slow for numpy to understand
_ACK, _ECN, _COLLISION, _PASSING = int(Flag.ACK), int(Flag.ECN), int(Flag.COLLISION), int(Flag.OVERFLOW)


@dataclass(slots=True)
class _Job:
    """Beside the sums: slots, probes to echo, places to pull, and when to look for some."""

    slots: SlotTable
    echoes: list[Arrivals] = field(default_factory=list)
    pulls: Index = field(default_factory=lambda: np.zeros(0, np.int64))
    its: Fragments | None = None
    pull_at: float | None = None


class AtpAnswering(Answering):
    """``frame_type`` is the system's framing; ``pull_after`` seconds of silence about an incomplete fragment make it pull."""

    def __init__(self, frame_type: np.dtype[Any], pull_after: float) -> None:
        super().__init__(VALUES, frame_type.itemsize, SEQUENCE_BITS)
        self.frame_type = frame_type
        self.pull_after = pull_after
        self._mark = mark_of(frame_type)
        fields = frame_type.fields
        assert fields is not None
        self._values_at = fields["values"][1]
        self._jobs: dict[int, _Job] = {}
        self._pulled = 0

    def job_of(self, plan: NodePlan) -> PSJob:
        job = plan.switched
        assert isinstance(job, AtpJob)
        switch = (job.switch,)
        return PSJob(job.number, members_of(job.workers), switch, job.window, job.slots, switch, key=plan.key)

    def add(self, job: PSJob) -> None:
        check_number(job.job, MAX_JOB, why=", 0 is 'free' to public switch programs")
        self._jobs[job.job] = _Job(SlotTable(job.job, job.window, job.slots))

    def remove(self, job: int) -> None:
        self._jobs.pop(job, None)

    # ---------------------------------------------------------------- in

    def read(self, batch: PacketBatch, drops: NDArray[np.int64]) -> Arrivals:
        offsets, sources = batch.offsets, batch.sources
        right = batch.lengths == self.frame_bytes
        if not right.all():
            drops[Drop.SHORT] += int(np.count_nonzero(batch.lengths < self.frame_bytes))
            drops[Drop.OVERSIZED] += int(np.count_nonzero(batch.lengths > self.frame_bytes))
            offsets, sources = offsets[right], sources[right]
        heads = read_heads(batch.arena, offsets, self._values_at)
        flags, count = heads.flags, len(offsets)
        return Arrivals(
            job=heads.job,
            low=heads.low,
            bitmap=heads.bitmap,
            source=sources,
            ats=offsets + self._values_at,
            ecn=(flags & _ECN != 0).view(np.uint8),
            col=heads.mark & np.uint8(_COL) if self._mark == "col" else np.zeros(count, np.uint8),
            collided=(flags & _COLLISION != 0).view(np.uint8),
            slot=heads.slot,
            upward=flags & _ACK == 0,
            probe=flags & _PASSING != 0,
            direct=np.zeros(count, np.bool_),
            # answers go to all workers
            asks=np.full(count, -1),
        )

    def echo(self, its: Fragments, probes: Arrivals) -> None:
        self._jobs[its.job.job].echoes.append(probes)

    def summed(self, its: Fragments, now: float) -> None:
        """Where there are switches, look for what they hold before long."""
        job = self._jobs[its.job.job]
        if job.pull_at is None and its.job.switches:
            job.its, job.pull_at = its, now + self.pull_after

    # ---------------------------------------------------------------- out

    def _heads(self, its: Fragments, places: Index, flags: NDArray[np.uint8]) -> NDArray[Any]:
        frames = np.zeros(len(places), self.frame_type)
        numbers, slots = its.table.number[places], its.table.slot[places]
        write_heads(self._rows(frames), numbers, slots, flags, 1, 0, its.job.job, self._values_at)
        return frames

    def _rows(self, frames: NDArray[Any]) -> NDArray[np.uint8]:
        return frames.view(np.uint8).reshape(len(frames), self.frame_bytes)

    def answers(
        self, its: Fragments, places: Index, bits: Index, drops: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Sums, with marks, and the slot to use from now on where fragments have collided."""
        table: Leaves = its.table
        for place in places[(table.collided[places] == 1)].tolist():
            # decided once; whoever asks again is told the same
            table.collided[place] = 2
            table.instead[place] = self._jobs[its.job.job].slots.again(int(table.number[place]))
        instead = table.instead[places]
        moved = instead >= 0
        flags = np.full(len(places), _ACK, np.uint8)
        flags[moved] |= _COLLISION
        flags[table.ecn[places] != 0] |= _ECN
        frames = self._heads(its, places, flags)
        if moved.any():
            frames["length"][moved] = instead[moved]
        if self._mark == "col":
            frames["col"] = table.col[places]
        give(table, places, frames.view(np.uint8), self._values_at, self.frame_bytes)
        return self._rows(frames)

    def own(self, its: Fragments) -> list[NDArray[np.uint8]]:
        job, said = self._jobs[its.job.job], []
        for probes in job.echoes:
            echoes = np.zeros(len(probes.job), self.frame_type)
            echoes["bitmap"], echoes["flags"] = probes.bitmap, ECHO
            echoes["app"], echoes["seq"] = probes.job | probes.low >> 16 << 8, probes.low & 0xFFFF
            said.append(self._rows(echoes))
        job.echoes.clear()
        if len(job.pulls):
            self._pulled += len(job.pulls)
            said.append(self._rows(self._heads(its, job.pulls, np.full(len(job.pulls), PULL, np.uint8))))
            job.pulls = job.pulls[:0]
        return said

    # ---------------------------------------------------------------- time and figures

    def timer(self) -> float | None:
        return min((job.pull_at for job in self._jobs.values() if job.pull_at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Pull what has been incomplete for too long; twice as long the next time."""
        for job in self._jobs.values():
            if job.its is None or job.pull_at is None or now < job.pull_at:
                continue
            table = job.its.table
            waiting = np.flatnonzero((table.bitmap != 0) & (table.bitmap != job.its.full))
            due = table.touched[waiting] + self.pull_after * (1 << np.minimum(table.pulls[waiting], 10))
            job.pulls = waiting[due <= now]
            table.touched[job.pulls] = now
            table.pulls[job.pulls] += 1
            left = table.touched[waiting] + self.pull_after * (1 << np.minimum(table.pulls[waiting], 10))
            job.pull_at = float(left.min()) if len(waiting) else None

    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """``answers`` are all, also those to who asks again."""
        return {
            **{name: stats[name] for name in ("packets_added", "contributions_in", "fragments_completed")},
            "answers": stats["answers"] + stats["answers_again"],
            "pulls": self._pulled,
        }


def atp_server(frame_type: np.dtype[Any] = FRAME, *, pull_after: float = 0.005) -> SumServer:
    """The machine, see :class:`AtpAnswering`."""
    return SumServer(AtpAnswering(frame_type, pull_after))
