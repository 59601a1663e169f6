"""The share of a step that communication takes, over the first steps of a job."""

import numpy as np

from inanet.client.job import Job

#: steps not measured: DDP builds its buckets anew after the first
SKIPPED = 2
#: steps measured
MEASURED = 10


class CommunicationShare:
    """Adds up, in nanoseconds, how long anything was on its way, and how long the steps were."""

    def __init__(self) -> None:
        self._step = 0
        self._began = 0
        self._busy = 0
        self._measured = 0
        self._total = 0
        self._until = 0

    def begin(self, now: int) -> bool:
        """A step begins to communicate; true once, when enough steps have been measured."""
        if self._step > SKIPPED:
            self._total += now - self._began
            self._measured += self._busy
        self._busy = 0
        self._began = self._until = now
        self._step += 1
        return self._step == SKIPPED + MEASURED + 1

    def add(self, sent: int, result: int) -> None:
        """Something of this step was on its way; results come in the order of sending."""
        start = max(sent, self._until)
        if result > start:
            self._busy += result - start
            self._until = result

    def agreed(self, job: Job) -> float:
        """The largest share of any rank: all ranks must call this at the same collective."""
        mine = np.array([self._measured / self._total if self._total else 0.0], np.float32)
        job.all_reduce(mine, "max", "communication share")
        return float(mine[0])
