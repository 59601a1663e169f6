"""The PS of ATP, A2TP and ESA: sums what the switch could not, answers every fragment to all workers.

The answer carries the sum and is the acknowledgement; on its way through the switch it frees the fragment's slot. Whoever
asks again for a complete fragment is answered again. Marks are OR-ed over everything that came for a fragment, so that a
mark on a packet which was not the last is not lost.

Where part of a fragment may lie in a switch while the rest has come here (workers that do not agree about using slots, an
eviction), the PS *pulls*: it asks the switch for what the slot holds, with back-off.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.atp.slots import SlotTable
from inanet.proto.machine import Answering
from inanet.proto.switched.leaves import Leaves, Sums, fold, give, make_leaves
from inanet.wire.atp import (
    ECHO,
    FRAME,
    JOB_MASK,
    MAX_JOB,
    PULL,
    SECOND_HALF,
    SEQUENCE_BITS,
    VALUES,
    Flag,
    head_type,
    mark_of,
)
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop

Index = NDArray[np.int64]
_COL = 0x01
# as plain numbers, because members of an enumeration are slow to look up and slow for numpy to understand
_ACK, _ECN, _COLLISION, _PASSING = int(Flag.ACK), int(Flag.ECN), int(Flag.COLLISION), int(Flag.OVERFLOW)


@dataclass(frozen=True, slots=True)
class PSJob:
    """A job at its PS. ``members`` maps the workers' addresses to their bits; ``switches`` are addresses that sums may come
    from as well (spilled ones); answers go to ``downlinks``: one switch, or every worker where there is none.

    ``window`` is the workers', ``slots`` how many slots the job may use at the switch; ``first`` the first fragment's number.
    ``key`` is the job's secret, for framings that have a use for it.
    """

    job: int
    members: Mapping[int, int]
    downlinks: Sequence[int]
    window: int
    slots: int
    switches: Sequence[int] = ()
    first: int = 0
    key: int = 0


class _Running:
    """What a PS knows of a job."""

    def __init__(self, job: PSJob) -> None:
        self.job = job
        self.table: Leaves = make_leaves(1 << (2 * job.window - 1).bit_length(), VALUES)
        self.slots = SlotTable(job.job, job.window, job.slots)
        self.full = 0
        for bits in job.members.values():
            self.full |= bits
        #: addresses that sums may come from, in order
        self.allowed: NDArray[np.uint64] = np.array(sorted({*job.members, *job.switches}), np.uint64)
        self.expected = job.first
        #: places to answer, places to pull, headers of probes to echo
        self.answers: list[Index] = []
        self.pulls: Index = np.zeros(0, np.int64)
        self.echoes: list[NDArray[Any]] = []
        self.pull_at: float | None = None


class ParameterServer(Answering):
    """``frame_type`` is the system's framing; ``pull_after`` seconds of silence about an incomplete fragment make it pull."""

    def __init__(self, frame_type: np.dtype[Any] = FRAME, *, pull_after: float = 0.005) -> None:
        self.frame_type = frame_type
        self.pull_after = pull_after
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._mark = mark_of(frame_type)
        fields = frame_type.fields
        assert fields is not None
        self._values_at = fields["values"][1]
        self._head_type = head_type(frame_type)
        self._jobs: dict[int, _Running] = {}
        self._completed: Index = np.zeros(1, np.int64)
        self._answered = self._pulled = self._added = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job. Raises ``ValueError`` for a number that the framing has no room for."""
        if not 1 <= job.job <= MAX_JOB:
            raise ValueError(
                f"job {job.job}: numbers are 1 to {MAX_JOB}, 0 is 'free' to public switch programs"
            )
        self._jobs[job.job] = _Running(job)

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
        index = np.flatnonzero(right)
        offsets = batch.offsets[index]
        heads = np.empty((len(index), self._values_at), np.uint8)
        gather(batch.arena, offsets, heads)
        frames = heads.view(self._head_type)[:, 0]
        jobs = (frames["app"] & JOB_MASK).astype(np.int64)
        for number in np.unique(jobs).tolist():
            mine = np.flatnonzero(jobs == number)
            running = self._jobs.get(number)
            if running is None:
                self.drops[Drop.FOREIGN_JOB] += len(mine)
                continue
            mine = mine[self._allowed(running, frames[mine], batch.sources[index[mine]])]
            probes = frames["flags"][mine] & _PASSING != 0
            if probes.any():
                running.echoes.append(frames[mine[probes]])
            mine = mine[~probes]
            self._fold(running, batch, frames[mine], offsets[mine] + self._values_at, now)

    def _allowed(
        self, running: _Running, frames: NDArray[Any], sources: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        places = np.minimum(np.searchsorted(running.allowed, sources), len(running.allowed) - 1)
        bitmap = frames["bitmap"].astype(np.int64)
        good: NDArray[np.bool_] = running.allowed[places] == sources
        good &= (bitmap != 0) & (bitmap & ~running.full == 0)
        answers = frames["flags"] & _ACK != 0
        if good.all() and not answers.any():
            return good
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(~good))
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(good & answers))
        taken: NDArray[np.bool_] = good & ~answers
        return taken

    def _fold(
        self, running: _Running, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float
    ) -> None:
        if not len(frames):
            return
        low = frames["seq"].astype(np.int64) | (frames["app"].astype(np.int64) >> 8) << 16
        half = 1 << (SEQUENCE_BITS - 1)
        numbers = running.expected + ((low - running.expected + half) & (2 * half - 1)) - half
        # nobody is two windows ahead of what has come: this is older than the horizon, and would take a live fragment's place
        near = numbers <= running.expected + 2 * running.job.window
        if not near.all():
            self.drops[Drop.BAD_FRAGMENT] += int(np.count_nonzero(~near))
            frames, ats, numbers = frames[near], ats[near], numbers[near]
            if not len(frames):
                return
        flags = frames["flags"]
        col = frames[self._mark] & _COL if self._mark == "col" else np.zeros(len(frames), np.uint8)
        sums = Sums(
            ats=np.ascontiguousarray(ats),
            number=np.ascontiguousarray(numbers),
            bitmap=frames["bitmap"].astype(np.uint32),
            ecn=(flags & _ECN != 0).astype(np.uint8),
            col=np.ascontiguousarray(col),
            collided=(flags & _COLLISION != 0).astype(np.uint8),
            slot=frames["agtr"].astype(np.int64),
        )
        running.expected = max(running.expected, int(numbers.max()))
        reason = np.zeros(len(frames), np.uint8)
        out = np.zeros(len(frames), np.int64)
        full = np.uint32(running.full)
        count = fold(running.table, sums, batch.arena, full, now, reason, out, self._completed)
        self.drops += np.bincount(reason, minlength=DROP_CODES)
        added = int(np.count_nonzero(reason == Drop.OK))
        self._added += added
        running.answers.append(out[:count])
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
            if running.echoes:
                heads = np.concatenate(running.echoes)
                running.echoes = []
                echoes = np.zeros(len(heads), self.frame_type)
                for name in ("bitmap", "app", "seq"):
                    echoes[name] = heads[name]
                echoes["flags"] = ECHO
                out += self._send(running, echoes)
            if len(running.pulls):
                self._pulled += len(running.pulls)
                out += self._send(running, self._heads(running, running.pulls, PULL))
                running.pulls = np.zeros(0, np.int64)
        return out

    def _heads(self, running: _Running, places: Index, flags: int) -> NDArray[Any]:
        table = running.table
        frames = np.zeros(len(places), self.frame_type)
        numbers = table.number[places]
        frames["bitmap"] = 1
        frames["flags"] = flags
        frames["app"] = running.job.job | (numbers >> 16 & 0xFF) << 8
        frames["seq"] = numbers & 0xFFFF
        frames["agtr"] = table.slot[places]
        frames["agtr2"] = (table.slot[places] + SECOND_HALF) & 0xFFFF
        return frames

    def _sums(self, running: _Running, places: Index) -> NDArray[Any]:
        table = running.table
        for place in places[(table.collided[places] == 1)].tolist():
            # decided once; whoever asks again is told the same
            table.collided[place] = 2
            table.instead[place] = running.slots.again(int(table.number[place]))
        frames = self._heads(running, places, Flag.ACK)
        moved = table.instead[places] >= 0
        frames["flags"] |= np.where(moved, Flag.COLLISION, 0).astype(np.uint8)
        frames["length"] = np.where(moved, table.instead[places], 0)
        frames["flags"] |= np.where(table.ecn[places] != 0, Flag.ECN, 0).astype(np.uint8)
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
            table = running.table
            waiting = np.flatnonzero((table.bitmap != 0) & (table.bitmap != running.full))
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
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}
