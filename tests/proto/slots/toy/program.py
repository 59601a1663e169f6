"""The switch: fragment *s* has place ``s mod 2 slots``, until a later fragment takes it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import Scheduled
from inanet.proto.common.program import Action, Neighbours, Offer, Verdicts
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop
from tests.proto.slots.toy.job import FRAME, WIDTH, ToyJob


class ToyProgram:
    name = "toy"
    passes = 1

    def __init__(self, *, budget: int, age: float) -> None:
        self._budget = budget
        self._jobs: dict[int, ToyJob] = {}
        #: by job and place: fragment, workers that are in, sum
        self._sums: dict[tuple[int, int], tuple[int, set[int], NDArray[np.int64]]] = {}
        self._packets = 0

    def offer(self, limit: int | None, most_passes: int) -> Offer:
        return Offer(limit or self._budget // (2 * 4 * WIDTH), values=WIDTH)

    def add_job(self, tenant: Any) -> None:
        raise ValueError(f"job {tenant.job}: a toy's jobs come from a coordinator")

    def serve(self, job: ToyJob, key: int, here: int) -> Neighbours:
        self._jobs[job.number] = job
        return Neighbours(dict.fromkeys(job.workers, 0), job.workers)

    def follow(self, job: ToyJob) -> None: ...

    def hold(self, job: int, scheduled: Sequence[Scheduled]) -> None: ...

    def remove_job(self, job: int) -> None:
        del self._jobs[job]
        self._sums = {place: held for place, held in self._sums.items() if place[0] != job}

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        verdicts.length[: len(batch)], verdicts.reason[: len(batch)] = batch.lengths, Drop.OK
        for i in range(len(batch)):
            frame = np.frombuffer(batch.arena, FRAME, 1, int(batch.offsets[i]))[0]
            verdicts.action[i], verdicts.target[i] = self._take(frame, int(batch.sources[i]))
            self._packets += 1

    def _take(self, frame: Any, source: int) -> tuple[Action, int]:
        """Add a contribution. The last one leaves with the sum, to all; one that comes again, back to its sender."""
        number, worker, fragment = int(frame["job"]), int(frame["worker"]), int(frame["number"])
        job = self._jobs.get(number)
        if job is None or worker >= len(job.workers) or job.workers[worker] != source:
            return Action.DROP, 0
        place = number, fragment % (2 * job.slots)
        if place not in self._sums or self._sums[place][0] < fragment:
            self._sums[place] = fragment, set(), np.zeros(WIDTH, np.int64)
        held, inside, total = self._sums[place]
        if held != fragment:
            return Action.DROP, 0
        again = worker in inside
        if not again:
            inside.add(worker)
            total += frame["values"]
        if len(inside) < len(job.workers):
            return Action.DROP, 0
        frame["values"] = total
        return (Action.REPLY, 0) if again else (Action.GROUP, number)

    def spilled(self) -> list[Transmission]:
        return []

    def timer(self) -> float | None:
        return None

    def on_timer(self, now: float) -> None: ...

    def register_bytes(self) -> int:
        return self._budget

    def stats(self) -> dict[str, int]:
        return {"packets": self._packets}
