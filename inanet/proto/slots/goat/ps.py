"""GOAT's PS: adds up the nodes' sums and what workers send to it alone, and answers every fragment to all workers.

Which workers are in is kept for every fragment (leaf bitmaps): a switch sends all it was to hear or nothing, and what it sends
again is dropped here and answered, to the worker that asks. The result carries the sum of the checksums; a table entry whose
values no longer suit it is forgotten, and its workers send again (linear checksum).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.goat.frames import FrameChecks, heads_of, stamp
from inanet.proto.slots.goat.job import GoatJob
from inanet.proto.slots.leaves import Sums, give
from inanet.proto.slots.ps import Fragments, PSJob, TensorServer, drops_by_label
from inanet.proto.slots.tenants import members_of
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    NO_SUBMODEL,
    PS_NODE,
    SEQUENCE_BITS,
    VALUES_AT,
    WORDS,
    Kind,
)
from inanet.wire.serial import unwrapped

Index = NDArray[np.int64]


def ps_job(plan: NodePlan) -> PSJob:
    """The job of a plan at its PS."""
    job = plan.switched
    assert isinstance(job, GoatJob)
    switch = (job.switch,)
    return PSJob(job.number, members_of(job.workers), switch, job.window, 1, switch, key=plan.key)


class _Running:
    """What a PS knows of a job."""

    def __init__(self, job: PSJob, completed: Index) -> None:
        self.job = job
        self.fragments = Fragments(job, WORDS, completed)
        #: places to answer to all workers, and who else asks for which place
        self.complete: list[Index] = []
        self.asked: dict[int, int] = {}


class GoatServer(TensorServer):
    """Any number of jobs. A machine of its own with an address of its own."""

    def __init__(self) -> None:
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._jobs: dict[int, _Running] = {}
        self._checks = FrameChecks()
        self._completed: Index = np.zeros(1, np.int64)
        self._answered = self._repeated = self._added = self._direct = self._forgotten = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job; contributions come from its ``switches``, and answers go to its ``downlinks``.

        Raises ``ValueError`` for a number that the framing has no room for.
        """
        self._checks.add(job.job, job.key)
        self._jobs[job.job] = _Running(job, self._completed)

    def serve(self, plan: NodePlan) -> None:
        """Serve the job of a plan."""
        self.add_job(ps_job(plan))

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self._jobs.pop(job, None)
        self._checks.remove(job)

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums and contributions."""
        reason = self._checks.reasons(batch, np.arange(len(batch)))
        sound = np.flatnonzero(reason == Drop.OK)
        self.drops += np.bincount(reason[reason != Drop.OK], minlength=DROP_CODES)
        frames = heads_of(batch, sound)
        for number in np.unique(frames["job"]).tolist():
            running = self._jobs[number]
            mine = np.flatnonzero(frames["job"] == number)
            mine = mine[self._allowed(running, frames[mine], batch.sources[sound[mine]])]
            if len(mine):
                self._fold(running, batch, frames[mine], batch.offsets[sound[mine]] + VALUES_AT, now)

    def _allowed(
        self, running: _Running, frames: NDArray[Any], sources: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        good = running.fragments.allows(frames["bitmap"].astype(np.uint32), sources)
        results = frames["kind"] == Kind.RESULT
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(~good & ~results))
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(results))
        taken: NDArray[np.bool_] = good & ~results
        return taken

    def _fold(
        self, running: _Running, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float
    ) -> None:
        numbers = unwrapped(frames["number"], running.fragments.expected, SEQUENCE_BITS)
        nothing = np.zeros(len(frames), np.uint8)
        tags = frames["submodel"].astype(np.int64) << 32 | frames["fragment"].astype(np.int64)
        bitmap = frames["bitmap"].astype(np.uint32)
        sums = Sums(
            np.ascontiguousarray(ats), np.ascontiguousarray(numbers), bitmap, nothing, nothing, nothing, tags
        )
        reason, _ = running.fragments.add(sums, batch.arena, self.drops, now)
        added = reason == Drop.OK
        self._added += int(np.count_nonzero(added))
        self._direct += int(np.count_nonzero(added & (frames["kind"] == Kind.DATA)))
        table = running.fragments.table
        places = numbers % len(table.number)
        whole = (table.number[places] == numbers) & (table.bitmap[places] == running.fragments.full)
        running.complete.append(np.unique(places[added & whole]))
        asks = np.where(
            frames["kind"] == Kind.DATA,
            bitmap.astype(np.int64),
            np.where(frames["asker"] > 0, 1 << (frames["asker"].astype(np.int64) - 1) % 32, 0),
        )
        again = (reason == Drop.DUPLICATE) & whole & (asks != 0)
        for place, bits in zip(places[again].tolist(), asks[again].tolist(), strict=True):
            running.asked[place] = running.asked.get(place, 0) | bits

    # ---------------------------------------------------------------- out

    def transmit(self, now: float) -> list[Transmission]:
        """Answers."""
        out = []
        for running in self._jobs.values():
            if running.complete or running.asked:
                out += self._answers(running)
        return out

    def _answers(self, running: _Running) -> list[Transmission]:
        fresh = np.concatenate([np.zeros(0, np.int64), *running.complete])
        answered = set(fresh.tolist())
        asked = {
            place: bits & running.fragments.full
            for place, bits in running.asked.items()
            if place not in answered
        }
        running.complete, running.asked = [], {}
        places = np.concatenate([fresh, np.array(list(asked), np.int64)])
        if not len(places):
            return []
        table = running.fragments.table
        frames = np.zeros(len(places), FRAME)
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.RESULT, running.job.job
        frames["node"], frames["submodel"] = PS_NODE, table.slot[places] >> 32 & NO_SUBMODEL
        frames["fragment"] = table.slot[places] & 0xFFFFFFFF
        frames["number"] = table.number[places] & 0xFFFFFFFF
        frames["bitmap"] = [running.fragments.full] * len(fresh) + list(asked.values())
        raw = frames.view(np.uint8)
        give(table, places, raw, VALUES_AT, FRAME_BYTES)
        sound = np.zeros(len(places), np.uint8)
        stamp(raw.reshape(len(places), FRAME_BYTES), np.uint64(running.job.key), sound)
        if not sound.all():
            self._forget(running, places[sound == 0])
            raw = np.ascontiguousarray(frames[sound == 1]).view(np.uint8)
        self._answered += len(fresh)
        self._repeated += len(asked)
        offsets = np.arange(len(raw) // FRAME_BYTES, dtype=np.int64) * FRAME_BYTES
        return [Transmission(to, raw, offsets, FRAME_BYTES) for to in running.job.downlinks if len(offsets)]

    def _forget(self, running: _Running, places: Index) -> None:
        """Have damaged entries filled anew."""
        self._forgotten += len(places)
        self.drops[Drop.BAD_CHECKSUM] += len(places)
        running.fragments.table.bitmap[places] = 0

    # ---------------------------------------------------------------- time and figures

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``direct`` are contributions that no switch has summed."""
        return {
            "packets_added": self._added,
            # under the name that it has at nodes of trees
            "contributions_in": self._added,
            "direct": self._direct,
            "fragments_completed": int(self._completed[0]),
            "answers": self._answered,
            "answers_again": self._repeated,
            "forgotten": self._forgotten,
        }

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return drops_by_label(self.drops)
