"""Asynchronous training in virtual time, through the switch's program, the PS and the workers that daemons run."""

from collections import deque
from collections.abc import Callable

import numpy as np

from inanet.proto.common.events import Participation, RoundDone
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.goat_async.job import Running, Update
from inanet.proto.slots.goat_async.participation import Choose
from inanet.proto.slots.goat_async.ps import EpochServer
from inanet.sim.collaborative import JOB, Collaborative
from inanet.sim.link import LinkSpec
from tests.proto.slots.goat.lab import LINK, TESTBED, WORKERS, scheduled

FACTOR = float(1 << 20)
#: little memory at the PS's switch, enough for some at the others: KRGS uses all of them, and the PS
SLOTS = {"s1": 1, "s2": 2, "s3": 3}


def spec(elements: int) -> TensorSpec:
    return TensorSpec("gradient", "f32", (elements,), "mean", ExponentMode.FIXED, FACTOR)


class Training:
    """``gradient(worker, step)`` float32[V] is asked for when a worker begins a step, ``seconds(worker)`` how long it takes.

    ``steps`` are (worker, what it was moved by, what it took part in), in order.
    """

    def __init__(
        self,
        elements: int,
        choose: Choose,
        seconds: Callable[[int], float],
        gradient: Callable[[int, int], np.ndarray],
        *,
        slots: dict[str, int] | None = None,
        window: int = 4,
        link: LinkSpec = LINK,
    ) -> None:
        slots = SLOTS if slots is None else slots
        what = spec(elements)
        self.lab = Collaborative(TESTBED, "goat-async", slots=slots, window=window, link=link)
        self.plan = scheduled(what, slots)
        self.lab.add_tensor(0, what, self.plan)
        assert isinstance(self.lab.server, EpochServer)
        self.running: Running = self.lab.server.jobs[JOB]
        self.running.waiting.choose = choose
        self.running.updates = deque()
        self._seconds, self._gradient = seconds, gradient
        self._arrays: dict[int, np.ndarray] = {}
        self._seen = 0
        self.begun = [0] * len(WORKERS)
        self.steps: list[tuple[int, np.ndarray, Participation]] = []

    @property
    def updates(self) -> list[Update]:
        return list(self.running.updates)

    def _begin(self, worker: int) -> None:
        self.begun[worker] += 1
        self._arrays[worker] = self._gradient(worker, self.begun[worker]).astype(np.float32)
        self.lab.step(WORKERS[worker], 0, self._arrays[worker], self._seconds(worker))

    def run(self, epochs: int, *, deadline: float = 60.0) -> None:
        """Until so many epochs are over; everybody begins a step whenever one is done."""
        for worker in range(len(WORKERS)):
            self._begin(worker)

        def over() -> bool:
            log = self.lab.network.log
            for name, event in log[self._seen :]:
                assert isinstance(event, RoundDone)
                assert event.overflow < 0
                index = WORKERS.index(name)
                assert event.part is not None
                self.steps.append((index, self._arrays[index].copy(), event.part))
                self._begin(index)
            self._seen = len(log)
            return len(self.running.updates) >= epochs

        self.lab.network.run(over, deadline=deadline)
