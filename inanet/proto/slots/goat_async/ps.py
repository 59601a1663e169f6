"""Packets of asynchronous training at the PS: checked, handed to their job, and what jobs answer sealed and sent."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.machine import Host
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.slots.goat.frames import LAST_OF_EPOCHS, FrameChecks, heads_of, seal
from inanet.proto.slots.goat.job import GoatAsyncJob
from inanet.proto.slots.goat.ps import ps_job
from inanet.proto.slots.goat_async.job import Running, beside, take
from inanet.proto.slots.goat_async.participation import Choose, everybody
from inanet.proto.slots.ps import PSJob, TensorServer, drops_by_label
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME_BYTES,
    VALUES,
    VALUES_AT,
    EpochKind,
    Kind,
)

I64 = NDArray[np.int64]


class EpochServer(TensorServer):
    """Any number of jobs. ``choose`` says how many workers an epoch waits for: Algorithm 2, or everybody."""

    def __init__(self, choose: Choose = everybody) -> None:
        self.choose = choose
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.jobs: dict[int, Running] = {}
        self._checks = FrameChecks(LAST_OF_EPOCHS)
        self._added = self._direct = self._results = self._published = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job. Raises ``ValueError`` for a number that the framing has no room for."""
        self._checks.add(job.job, job.key)
        self.jobs[job.job] = Running(job, self.choose)

    def settle(self, host: Host) -> None:
        """The host says how many workers an epoch waits for."""
        self.choose = host.choose or self.choose

    def serve(self, plan: NodePlan) -> None:
        self.add_job(ps_job(plan))
        self.follow(plan, 0.0)

    def follow(self, plan: NodePlan, now: float) -> None:
        """Workers may have left."""
        job = plan.switched
        assert isinstance(job, GoatAsyncJob)
        for worker in sorted(set(job.departed) - self.jobs[job.number].departed):
            self.leave(job.number, worker, now)

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self.jobs.pop(job, None)
        self._checks.remove(job)

    def hold(self, job: int, layout: TensorLayout) -> None:
        """The tensor of a job. Raises ``ValueError`` for a second one."""
        self.jobs[job].hold(layout)

    def leave(self, job: int, worker: int, now: float) -> None:
        """A worker, by index, has left a job."""
        self.jobs[job].leave(worker, now)

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums, contributions, and what workers say."""
        reason = self._checks.reasons(batch, np.arange(len(batch)))
        sound = np.flatnonzero(reason == Drop.OK)
        frames = heads_of(batch, sound)
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
        return drops_by_label(self.drops)
