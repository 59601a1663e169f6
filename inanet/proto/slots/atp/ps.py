"""The PS of ATP, A2TP and ESA: sums what the switch could not, answers every fragment to all workers.

The answer carries the sum and is the acknowledgement; on its way through the switch it frees the fragment's slot. Whoever
asks again for a complete fragment is answered again. Marks are OR-ed over everything that came for a fragment, so that a
mark on a packet which was not the last is not lost.

Where part of a fragment may lie in a switch while the rest has come here (workers that do not agree about using slots, an
eviction), the PS *pulls*: it asks the switch for what the slot holds, with back-off.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.atp.heads import Heads, read_heads, write_heads
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.slots import SlotTable
from inanet.proto.slots.leaves import Sums, give
from inanet.proto.slots.ps import Fragments, PSJob, TensorServer, check_number, drops_by_label
from inanet.proto.slots.tenants import members_of
from inanet.wire.atp import ECHO, FRAME, MAX_JOB, PULL, SEQUENCE_BITS, VALUES, Flag, mark_of
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.serial import unwrapped

Index = NDArray[np.int64]
_COL = 0x01
# as plain numbers, because members of an enumeration are slow to look up and slow for numpy to understand
_ACK, _ECN, _COLLISION, _PASSING = int(Flag.ACK), int(Flag.ECN), int(Flag.COLLISION), int(Flag.OVERFLOW)


class _Running:
    """What a PS knows of a job."""

    def __init__(self, job: PSJob, completed: Index) -> None:
        self.job = job
        self.fragments = Fragments(job, VALUES, completed)
        self.slots = SlotTable(job.job, job.window, job.slots)
        #: places to answer, places to pull, headers of probes to echo
        self.answers: list[Index] = []
        self.pulls: Index = np.zeros(0, np.int64)
        self.echoes: list[Heads] = []
        self.pull_at: float | None = None


class ParameterServer(TensorServer):
    """``frame_type`` is the system's framing; ``pull_after`` seconds of silence about an incomplete fragment make it pull."""

    def __init__(self, frame_type: np.dtype[Any] = FRAME, *, pull_after: float = 0.005) -> None:
        self.frame_type = frame_type
        self.pull_after = pull_after
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._mark = mark_of(frame_type)
        fields = frame_type.fields
        assert fields is not None
        self._values_at = fields["values"][1]
        self._jobs: dict[int, _Running] = {}
        self._completed: Index = np.zeros(1, np.int64)
        self._answered = self._pulled = self._added = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job. Raises ``ValueError`` for a number that the framing has no room for."""
        check_number(job.job, MAX_JOB, why=", 0 is 'free' to public switch programs")
        self._jobs[job.job] = _Running(job, self._completed)

    def serve(self, plan: NodePlan) -> None:
        """Serve the job of a plan."""
        job = plan.switched
        assert isinstance(job, AtpJob)
        switch = (job.switch,)
        self.add_job(
            PSJob(job.number, members_of(job.workers), switch, job.window, job.slots, switch, key=plan.key)
        )

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self._jobs.pop(job, None)

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums, contributions and probes."""
        size = self.frame_type.itemsize
        right = batch.lengths == size
        if not right.all():
            self.drops[Drop.SHORT] += int(np.count_nonzero(batch.lengths < size))
            self.drops[Drop.OVERSIZED] += int(np.count_nonzero(batch.lengths > size))
            batch = PacketBatch(batch.arena, batch.offsets[right], batch.lengths[right], batch.sources[right])
        if not len(batch):
            return
        heads = read_heads(batch.arena, batch.offsets, self._values_at)
        if (heads.job == heads.job[0]).all():
            self._take(batch, heads, now)
            return
        for number in np.unique(heads.job).tolist():
            mine = heads.job == number
            part = PacketBatch(batch.arena, batch.offsets[mine], batch.lengths[mine], batch.sources[mine])
            self._take(part, heads.part(mine), now)

    def _take(self, batch: PacketBatch, heads: Heads, now: float) -> None:
        """Packets of one job, whichever that is."""
        running = self._jobs.get(int(heads.job[0]))
        if running is None:
            self.drops[Drop.FOREIGN_JOB] += len(batch)
            return
        taken, offsets = self._allowed(running, heads, batch.sources), batch.offsets
        probes = heads.flags & _PASSING != 0
        if not taken.all() or probes.any():
            if (taken & probes).any():
                running.echoes.append(heads.part(taken & probes))
            taken &= ~probes
            heads, offsets = heads.part(taken), offsets[taken]
        self._fold(running, batch.arena, heads, offsets + self._values_at, now)

    def _allowed(self, running: _Running, heads: Heads, sources: NDArray[np.uint64]) -> NDArray[np.bool_]:
        good = running.fragments.allows(heads.bitmap, sources)
        answers = heads.flags & _ACK != 0
        if good.all() and not answers.any():
            return good
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(~good))
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(good & answers))
        taken: NDArray[np.bool_] = good & ~answers
        return taken

    def _fold(
        self, running: _Running, arena: NDArray[np.uint8], heads: Heads, ats: Index, now: float
    ) -> None:
        if not len(ats):
            return
        numbers = unwrapped(heads.low, running.fragments.expected, SEQUENCE_BITS)
        # nobody is two windows ahead of what has come: this is older than the horizon, and would take a live fragment's place
        near = numbers <= running.fragments.expected + 2 * running.job.window
        if not near.all():
            self.drops[Drop.BAD_FRAGMENT] += int(np.count_nonzero(~near))
            heads, ats, numbers = heads.part(near), ats[near], numbers[near]
            if not len(ats):
                return
        flags = heads.flags
        sums = Sums(
            ats=ats,
            number=numbers,
            bitmap=heads.bitmap,
            ecn=(flags & _ECN != 0).view(np.uint8),
            col=heads.mark & np.uint8(_COL) if self._mark == "col" else np.zeros(len(ats), np.uint8),
            collided=(flags & _COLLISION != 0).view(np.uint8),
            slot=heads.slot,
        )
        reason, places = running.fragments.add(sums, arena, self.drops, now)
        added = int(np.count_nonzero(reason == Drop.OK))
        self._added += added
        running.answers.append(places)
        if running.pull_at is None and added and running.job.switches:
            running.pull_at = now + self.pull_after

    # ---------------------------------------------------------------- out

    def transmit(self, now: float) -> list[Transmission]:
        """Answers, echoes and pulls."""
        out = []
        for running in self._jobs.values():
            if running.answers:
                places = np.unique(np.concatenate(running.answers))
                running.answers = []
                if len(places):
                    self._answered += len(places)
                    out += self._send(running, self._sums(running, places))
            for heads in running.echoes:
                echoes = np.zeros(len(heads.job), self.frame_type)
                echoes["bitmap"], echoes["flags"] = heads.bitmap, ECHO
                echoes["app"], echoes["seq"] = heads.job | heads.low >> 16 << 8, heads.low & 0xFFFF
                out += self._send(running, echoes)
            running.echoes.clear()
            if len(running.pulls):
                self._pulled += len(running.pulls)
                flags = np.full(len(running.pulls), PULL, np.uint8)
                out += self._send(running, self._heads(running, running.pulls, flags))
                running.pulls = np.zeros(0, np.int64)
        return out

    def _heads(self, running: _Running, places: Index, flags: NDArray[np.uint8]) -> NDArray[Any]:
        table = running.fragments.table
        frames = np.zeros(len(places), self.frame_type)
        rows = frames.view(np.uint8).reshape(len(places), self.frame_type.itemsize)
        numbers, slots = table.number[places], table.slot[places]
        write_heads(rows, numbers, slots, flags, 1, 0, running.job.job, self._values_at)
        return frames

    def _sums(self, running: _Running, places: Index) -> NDArray[Any]:
        table = running.fragments.table
        for place in places[(table.collided[places] == 1)].tolist():
            # decided once; whoever asks again is told the same
            table.collided[place] = 2
            table.instead[place] = running.slots.again(int(table.number[place]))
        instead = table.instead[places]
        moved = instead >= 0
        flags = np.full(len(places), _ACK, np.uint8)
        flags[moved] |= _COLLISION
        flags[table.ecn[places] != 0] |= _ECN
        frames = self._heads(running, places, flags)
        if moved.any():
            frames["length"][moved] = instead[moved]
        if self._mark == "col":
            frames["col"] = table.col[places]
        give(table, places, frames.view(np.uint8), self._values_at, self.frame_type.itemsize)
        return frames

    def _send(self, running: _Running, frames: NDArray[Any]) -> list[Transmission]:
        size = self.frame_type.itemsize
        offsets = np.arange(len(frames), dtype=np.int64) * size
        arena = frames.view(np.uint8)
        return [Transmission(to, arena, offsets, size) for to in running.job.downlinks]

    # ---------------------------------------------------------------- time

    def timer(self) -> float | None:
        """When the first pull is due."""
        return min(
            (running.pull_at for running in self._jobs.values() if running.pull_at is not None), default=None
        )

    def on_timer(self, now: float) -> None:
        """Pull what has been incomplete for too long; twice as long the next time."""
        for running in self._jobs.values():
            if running.pull_at is None or now < running.pull_at:
                continue
            table = running.fragments.table
            waiting = np.flatnonzero((table.bitmap != 0) & (table.bitmap != running.fragments.full))
            due = table.touched[waiting] + self.pull_after * (1 << np.minimum(table.pulls[waiting], 10))
            late = due <= now
            running.pulls = waiting[late]
            table.touched[running.pulls] = now
            table.pulls[running.pulls] += 1
            left = table.touched[waiting] + self.pull_after * (1 << np.minimum(table.pulls[waiting], 10))
            running.pull_at = float(left.min()) if len(waiting) else None

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return {
            "packets_added": self._added,
            # under the name that it has at nodes of trees
            "contributions_in": self._added,
            "fragments_completed": int(self._completed[0]),
            "answers": self._answered,
            "pulls": self._pulled,
        }

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return drops_by_label(self.drops)
