"""GOAT's PS: adds up the nodes' sums and what workers send to it alone, and answers every fragment to all workers.

Which workers are in is kept for every fragment (leaf bitmaps): a switch sends all it was to hear or nothing, and what it sends
again is dropped here and answered, to the worker that asks. The result carries the sum of the checksums; a table entry whose
values no longer suit it is forgotten, and its workers send again (linear checksum).
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan
from inanet.proto.slots.goat.frames import FrameChecks, heads_of, stamp
from inanet.proto.slots.goat.job import GoatJob
from inanet.proto.slots.leaves import give
from inanet.proto.slots.ps import Answering, Arrivals, Fragments, PSJob, SumServer
from inanet.proto.slots.tenants import members_of
from inanet.wire.batch import PacketBatch
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

Index = NDArray[np.int64]


def ps_job(plan: NodePlan) -> PSJob:
    """The job of a plan at its PS."""
    job = plan.switched
    assert isinstance(job, GoatJob)
    switch = (job.switch,)
    return PSJob(job.number, members_of(job.workers), switch, job.window, 1, switch, key=plan.key)


class GoatAnswering(Answering):
    """The checksum is summed as one more value."""

    def __init__(self) -> None:
        super().__init__(WORDS, FRAME_BYTES, SEQUENCE_BITS)
        self._checks = FrameChecks()
        self._forgotten = 0

    def job_of(self, plan: NodePlan) -> PSJob:
        return ps_job(plan)

    def add(self, job: PSJob) -> None:
        self._checks.add(job.job, job.key)

    def remove(self, job: int) -> None:
        self._checks.remove(job)

    def read(self, batch: PacketBatch, drops: NDArray[np.int64]) -> Arrivals:
        reason = self._checks.reasons(batch, np.arange(len(batch)))
        sound = np.flatnonzero(reason == Drop.OK)
        drops += np.bincount(reason[reason != Drop.OK], minlength=DROP_CODES)
        heads = heads_of(batch, sound)
        nothing, never = np.zeros(len(sound), np.uint8), np.zeros(len(sound), np.bool_)
        bitmap, direct = heads["bitmap"].astype(np.uint32), heads["kind"] == Kind.DATA
        asker = heads["asker"].astype(np.int64)
        return Arrivals(
            job=heads["job"].astype(np.int64),
            low=heads["number"].astype(np.int64),
            bitmap=bitmap,
            source=batch.sources[sound],
            ats=batch.offsets[sound] + VALUES_AT,
            ecn=nothing,
            col=nothing,
            collided=nothing,
            slot=heads["submodel"].astype(np.int64) << 32 | heads["fragment"].astype(np.int64),
            upward=heads["kind"] != Kind.RESULT,
            probe=never,
            direct=direct,
            asks=np.where(direct, bitmap, np.where(asker > 0, 1 << (asker - 1) % 32, 0)).astype(np.int64),
        )

    def answers(
        self, its: Fragments, places: Index, bits: Index, drops: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Sums that suit their checksums; damaged entries are filled anew."""
        table = its.table
        frames = np.zeros(len(places), FRAME)
        frames["magic"], frames["kind"], frames["job"] = MAGIC_VERSION, Kind.RESULT, its.job.job
        frames["node"], frames["submodel"] = PS_NODE, table.slot[places] >> 32 & NO_SUBMODEL
        frames["fragment"] = table.slot[places] & 0xFFFFFFFF
        frames["number"] = table.number[places] & 0xFFFFFFFF
        frames["bitmap"] = bits
        rows = frames.view(np.uint8).reshape(len(places), FRAME_BYTES)
        give(table, places, rows.reshape(-1), VALUES_AT, FRAME_BYTES)
        sound = np.zeros(len(places), np.uint8)
        stamp(rows, np.uint64(its.job.key), sound)
        damaged = places[sound == 0]
        if len(damaged):
            self._forgotten += len(damaged)
            drops[Drop.BAD_CHECKSUM] += len(damaged)
            table.bitmap[damaged] = 0
            rows = rows[sound == 1]
        return rows

    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """``forgotten`` are damaged entries."""
        return stats | {"forgotten": self._forgotten}


def goat_server() -> SumServer:
    """The machine."""
    return SumServer(GoatAnswering())
