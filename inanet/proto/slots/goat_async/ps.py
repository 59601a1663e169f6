"""Packets of asynchronous training at the PS: checked, handed to their job, and what jobs answer sealed and sent."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.common.machine import Answering
from inanet.proto.common.plan import TensorLayout
from inanet.proto.slots.atp.ps import PSJob
from inanet.proto.slots.goat.frames import LAST_OF_EPOCHS, inspect_up_to, seal
from inanet.proto.slots.goat_async.job import Running, beside, take
from inanet.proto.slots.goat_async.participation import Choose, everybody
from inanet.proto.slots.registers import JOBS
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    FRAME_BYTES,
    MAX_JOB,
    VALUES,
    VALUES_AT,
    EpochKind,
    Kind,
)

I64 = NDArray[np.int64]
_HEAD = np.dtype(FRAME.descr[:10])


class EpochServer(Answering):
    """Any number of jobs. ``choose`` says how many workers an epoch waits for: Algorithm 2, or everybody."""

    def __init__(self, choose: Choose = everybody) -> None:
        self.choose = choose
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.jobs: dict[int, Running] = {}
        self._known: NDArray[np.uint8] = np.zeros(JOBS, np.uint8)
        self._keys: NDArray[np.uint64] = np.zeros(JOBS, np.uint64)
        self._added = self._direct = self._results = self._published = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job. Raises ``ValueError`` for a number that the framing has no room for."""
        if not 1 <= job.job <= MAX_JOB:
            raise ValueError(f"job {job.job}: numbers are 1 to {MAX_JOB}")
        self.jobs[job.job] = Running(job, self.choose)
        self._known[job.job], self._keys[job.job] = 1, job.key

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self.jobs.pop(job, None)
        self._known[job] = 0

    def hold(self, job: int, layout: TensorLayout) -> None:
        """The tensor of a job. Raises ``ValueError`` for a second one."""
        self.jobs[job].hold(layout)

    def leave(self, job: int, worker: int, now: float) -> None:
        """A worker, by index, has left a job."""
        self.jobs[job].leave(worker, now)

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums, contributions, and what workers say."""
        reason = np.zeros(len(batch), np.uint8)
        inspect_up_to(
            batch.arena, batch.offsets, batch.lengths, self._known, self._keys, LAST_OF_EPOCHS, reason
        )
        sound = np.flatnonzero(reason == Drop.OK)
        heads = np.empty((len(sound), VALUES_AT), np.uint8)
        gather(batch.arena, batch.offsets[sound], heads)
        frames = heads.view(_HEAD)[:, 0]
        for number in np.unique(frames["job"]).tolist():
            running = self.jobs[number]
            mine = np.flatnonzero(frames["job"] == number)
            reason[sound[mine]] = self._foreign(running, frames[mine], batch.sources[sound[mine]])
            mine = mine[reason[sound[mine]] == Drop.OK]
            ready = frames["kind"][mine] == EpochKind.READY
            self._take(running, batch, frames[mine[~ready]], sound[mine[~ready]], reason)
            running.advance(now)
            for k in mine[ready].tolist():
                head, at = frames[k], int(batch.offsets[sound[k]]) + VALUES_AT
                marks = batch.arena[at : at + 4 * VALUES].view(">i4")
                worker = int(head["bitmap"]).bit_length() - 1
                running.ready(worker, int(head["number"]), int(head["fragment"]), marks, now)
                running.advance(now)
        self.drops += np.bincount(reason[reason != Drop.OK], minlength=DROP_CODES)

    def _foreign(
        self, running: Running, frames: NDArray[Any], sources: NDArray[np.uint64]
    ) -> NDArray[np.uint8]:
        """Why packets are not taken: by kind, sender and workers."""
        kinds, bitmap = frames["kind"], frames["bitmap"].astype(np.int64)
        single = (bitmap & (bitmap - 1)) == 0
        summed = kinds == Kind.SUM
        known = (bitmap != 0) & (bitmap & ~running.full == 0) & (single | summed)
        upward = summed | np.isin(kinds, (Kind.DATA, EpochKind.PASSED, EpochKind.READY))
        reason = np.where(known & np.isin(sources, running.allowed), Drop.OK, Drop.FOREIGN_HOST)
        reason = np.where(upward, reason, Drop.BAD_TYPE)
        if running.table is None:
            # the tensor's layout is on its way; everybody repeats itself
            reason = np.where(reason == Drop.OK, Drop.NOT_OPEN, reason)
        return reason.astype(np.uint8)

    def _take(
        self,
        running: Running,
        batch: PacketBatch,
        heads: NDArray[Any],
        index: I64,
        reason: NDArray[np.uint8],
    ) -> None:
        if not len(index) or running.table is None:
            return
        found = np.zeros(len(index), np.uint8)
        take(running.table, batch.arena, batch.offsets[index], found)
        reason[index] = found
        self._added += int(np.count_nonzero(found == Drop.OK))
        self._direct += int(np.count_nonzero((found == Drop.OK) & (heads["kind"] != Kind.SUM)))
        running.acknowledge(heads[(found == Drop.OK) | (found == Drop.DUPLICATE)])

    # ---------------------------------------------------------------- out

    def transmit(self, now: float) -> list[Transmission]:
        """Acknowledgements, numbers, results."""
        out = []
        for running in self.jobs.values():
            frames, running.out = [one for one in running.out if len(one)], []
            if not frames:
                continue
            raw = beside(frames)
            self._results += int(np.count_nonzero(raw[:, 1] == Kind.RESULT))
            self._published += int(np.count_nonzero(raw[:, 1] == EpochKind.PUBLISH))
            seal(raw, np.uint64(running.job.key))
            offsets = np.arange(len(raw), dtype=np.int64) * FRAME_BYTES
            out += [Transmission(to, raw.reshape(-1), offsets, FRAME_BYTES) for to in running.job.downlinks]
        return out

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``direct`` are contributions that no switch has summed."""
        return {
            "packets_added": self._added,
            "contributions_in": self._added,
            "direct": self._direct,
            "answers": self._results,
            "published": self._published,
            "epochs": sum(running.waiting.epoch for running in self.jobs.values()),
        }

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}
