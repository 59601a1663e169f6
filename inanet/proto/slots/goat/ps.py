"""GOAT's PS: adds up the nodes' sums and what workers send to it alone, and answers every fragment to all workers.

Which workers are in is kept for every fragment (leaf bitmaps): a switch sends all it was to hear or nothing, and what it sends
again is dropped here and answered, to the worker that asks. The result carries the sum of the checksums; a table entry whose
values no longer suit it is forgotten, and its workers send again (linear checksum).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.common.machine import Answering
from inanet.proto.slots.atp.ps import PSJob
from inanet.proto.slots.goat.frames import inspect, stamp
from inanet.proto.slots.leaves import Leaves, Sums, fold, give, make_leaves
from inanet.proto.slots.registers import JOBS
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.goat import (
    FRAME,
    FRAME_BYTES,
    MAGIC_VERSION,
    MAX_JOB,
    NO_SUBMODEL,
    PS_NODE,
    SEQUENCE_BITS,
    VALUES_AT,
    WORDS,
    Kind,
)

Index = NDArray[np.int64]
_HEAD = np.dtype(FRAME.descr[:10])
assert _HEAD.itemsize == VALUES_AT


class _Running:
    """What a PS knows of a job."""

    def __init__(self, job: PSJob) -> None:
        self.job = job
        self.table: Leaves = make_leaves(1 << (2 * job.window - 1).bit_length(), WORDS)
        self.full = 0
        for bits in job.members.values():
            self.full |= bits
        self.allowed: NDArray[np.uint64] = np.array(sorted({*job.members, *job.switches}), np.uint64)
        self.expected = job.first
        #: places to answer to all workers, and who else asks for which place
        self.complete: list[Index] = []
        self.asked: dict[int, int] = {}


class GoatServer(Answering):
    """Any number of jobs. A machine of its own with an address of its own."""

    def __init__(self) -> None:
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._jobs: dict[int, _Running] = {}
        self._known: NDArray[np.uint8] = np.zeros(JOBS, np.uint8)
        self._keys: NDArray[np.uint64] = np.zeros(JOBS, np.uint64)
        self._completed: Index = np.zeros(1, np.int64)
        self._answered = self._repeated = self._added = self._direct = self._forgotten = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job; contributions come from its ``switches``, and answers go to its ``downlinks``.

        Raises ``ValueError`` for a number that the framing has no room for.
        """
        if not 1 <= job.job <= MAX_JOB:
            raise ValueError(f"job {job.job}: numbers are 1 to {MAX_JOB}")
        self._jobs[job.job] = _Running(job)
        self._known[job.job], self._keys[job.job] = 1, job.key

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self._jobs.pop(job, None)
        self._known[job] = 0

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums and contributions."""
        reason = np.zeros(len(batch), np.uint8)
        inspect(batch.arena, batch.offsets, batch.lengths, self._known, self._keys, reason)
        sound = np.flatnonzero(reason == Drop.OK)
        self.drops += np.bincount(reason[reason != Drop.OK], minlength=DROP_CODES)
        heads = np.empty((len(sound), VALUES_AT), np.uint8)
        gather(batch.arena, batch.offsets[sound], heads)
        frames = heads.view(_HEAD)[:, 0]
        for number in np.unique(frames["job"]).tolist():
            running = self._jobs[number]
            mine = np.flatnonzero(frames["job"] == number)
            mine = mine[self._allowed(running, frames[mine], batch.sources[sound[mine]])]
            if len(mine):
                self._fold(running, batch, frames[mine], batch.offsets[sound[mine]] + VALUES_AT, now)

    def _allowed(
        self, running: _Running, frames: NDArray[Any], sources: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        places = np.minimum(np.searchsorted(running.allowed, sources), len(running.allowed) - 1)
        bitmap = frames["bitmap"].astype(np.int64)
        good = (running.allowed[places] == sources) & (bitmap != 0) & (bitmap & ~running.full == 0)
        results = frames["kind"] == Kind.RESULT
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(~good & ~results))
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(results))
        taken: NDArray[np.bool_] = good & ~results
        return taken

    def _fold(
        self, running: _Running, batch: PacketBatch, frames: NDArray[Any], ats: Index, now: float
    ) -> None:
        half = 1 << (SEQUENCE_BITS - 1)
        low = frames["number"].astype(np.int64)
        numbers = running.expected + ((low - running.expected + half) & (2 * half - 1)) - half
        nothing = np.zeros(len(frames), np.uint8)
        tags = frames["submodel"].astype(np.int64) << 32 | frames["fragment"].astype(np.int64)
        bitmap = frames["bitmap"].astype(np.uint32)
        sums = Sums(
            np.ascontiguousarray(ats), np.ascontiguousarray(numbers), bitmap, nothing, nothing, nothing, tags
        )
        running.expected = max(running.expected, int(numbers.max()))
        reason = np.zeros(len(frames), np.uint8)
        out = np.zeros(len(frames), np.int64)
        fold(
            running.table,
            sums,
            batch.arena,
            np.uint32(running.full),
            now,
            reason,
            out,
            self._completed,
        )
        self.drops += np.bincount(reason, minlength=DROP_CODES)
        added = reason == Drop.OK
        self._added += int(np.count_nonzero(added))
        self._direct += int(np.count_nonzero(added & (frames["kind"] == Kind.DATA)))
        table = running.table
        places = numbers % len(table.number)
        whole = (table.number[places] == numbers) & (table.bitmap[places] == running.full)
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
        asked = {place: bits & running.full for place, bits in running.asked.items() if place not in answered}
        running.complete, running.asked = [], {}
        places = np.concatenate([fresh, np.array(list(asked), np.int64)])
        if not len(places):
            return []
        table = running.table
        frames = np.zeros(len(places), FRAME)
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.RESULT, running.job.job
        frames["node"], frames["submodel"] = PS_NODE, table.slot[places] >> 32 & NO_SUBMODEL
        frames["fragment"] = table.slot[places] & 0xFFFFFFFF
        frames["number"] = table.number[places] & 0xFFFFFFFF
        frames["bitmap"] = [running.full] * len(fresh) + list(asked.values())
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
        running.table.bitmap[places] = 0

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
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}
