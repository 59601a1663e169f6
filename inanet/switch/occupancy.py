"""How many slots each job holds, sampled over time."""

from collections import deque
from collections.abc import Iterable, Mapping

PREFIX = "occupied_"


class Occupancy:
    """A ring of the last ``capacity`` samples, one every ``interval`` seconds."""

    def __init__(self, interval: float = 0.1, capacity: int = 1024) -> None:
        self._interval = interval
        self._samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=capacity)
        self._next = 0.0

    def timer(self) -> float:
        """When the next sample is due, in seconds; at once at first."""
        return self._next

    def sample(self, programs: Iterable[tuple[str, Mapping[str, int]]], now: float) -> None:
        """Take a sample from the counters (:meth:`inanet.proto.common.program.Program.stats`) of named programs."""
        held = {
            f"{program}/{name.removeprefix(PREFIX)}": value
            for program, stats in programs
            for name, value in stats.items()
            if name.startswith(PREFIX)
        }
        self._samples.append((now, held))
        self._next = now + self._interval

    def samples(self) -> list[dict[str, object]]:
        """The samples, oldest first: ``at`` seconds and ``slots`` by ``program/job``."""
        return [{"at": at, "slots": held} for at, held in self._samples]
