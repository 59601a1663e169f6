"""Repeating things fairly: interleaved, warmed up, with medians; and whether processors were short meanwhile."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: Share of idle time below which processes are said to have been short of processors.
SHORT_OF_CPU = 0.05


def interleave(
    subjects: Mapping[str, Callable[[], object]], repetitions: int, warmups: int = 1
) -> dict[str, list[float]]:
    """Seconds of every call: all subjects once, then all once more, ..., so that drift hits all of them alike."""
    for _ in range(warmups):
        for subject in subjects.values():
            subject()
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(repetitions):
        for name, subject in subjects.items():
            start = time.perf_counter()
            subject()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median(values: Sequence[float]) -> float:
    """Median; 0 for an empty list."""
    return statistics.median(values) if values else 0.0


def paired_ratio(values: Sequence[float], references: Sequence[float]) -> float | None:
    """Median over repetitions of value / reference of the same repetition; ``None`` without references."""
    pairs = [value / reference for value, reference in zip(values, references, strict=False) if reference]
    return statistics.median(pairs) if pairs else None


class Line(NamedTuple):
    """``offset`` + ``slope`` x, and the largest relative distance of a point from it."""

    offset: float
    slope: float
    deviation: float


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """The line with the least squares of *relative* errors, so that small values count as much as large ones.

    Raises ``ValueError`` for fewer than two different ``xs`` or a ``y`` that is not positive.
    """
    if min(ys, default=0.0) <= 0 or len(set(xs)) < 2:
        raise ValueError("a line needs two different sizes and positive times")
    weights = [1 / (y * y) for y in ys]
    total = sum(weights)
    middle_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    middle_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - middle_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - middle_x) * (y - middle_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    offset = middle_y - slope * middle_x
    return Line(offset, slope, max(abs(offset + slope * x - y) / y for x, y in zip(xs, ys, strict=True)))


class Limit:
    """When a benchmark that keeps what it has must stop: after so many seconds, or when the user says so."""

    def __init__(
        self,
        seconds: float = math.inf,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``check`` raises when the user wants an end."""
        self.check = check
        self._clock = clock
        self._end = clock() + seconds
        self._whole = self
        self.interrupted = False
        #: why results are not complete, for people; empty while they are
        self.reason = ""

    @property
    def left(self) -> float:
        """Seconds; not positive when there are none."""
        return self._end - self._clock()

    @property
    def is_over(self) -> bool:
        """Whether to begin nothing new."""
        if not self.reason and self.left <= 0:
            self.reason = "the time limit was reached (--seconds)"
        return bool(self.reason or self._whole.reason)

    def stop(self, reason: str) -> None:
        """The user wants an end, of the whole."""
        self._whole.reason = reason
        self._whole.interrupted = True

    def part(self, parts: int) -> "Limit":
        """An equal share of what is left for the first of so many parts."""
        part = Limit(max(0.0, self.left) / parts, self.check, self._clock)
        part._whole = self._whole
        return part


class Ticks(NamedTuple):
    """Time of all processors so far, in the kernel's ticks."""

    total: int
    idle: int


def ticks(text: str | None = None) -> Ticks:
    """From ``/proc/stat`` (or its ``text``). Time stolen by a hypervisor counts as not idle."""
    head = (Path("/proc/stat").read_text() if text is None else text).split("\n", 1)[0]
    numbers = [int(word) for word in head.split()[1:9]]
    return Ticks(sum(numbers), numbers[3] + numbers[4])


def idle_share(before: Ticks, after: Ticks) -> float | None:
    """Share of idle time between two readings; ``None`` if no tick has passed, which proves nothing."""
    total = after.total - before.total
    return (after.idle - before.idle) / total if total > 0 else None


def short_of_cpu(shares: Sequence[float | None]) -> bool | None:
    """Whether the median of what is known lies below :data:`SHORT_OF_CPU`; ``None`` if nothing is known."""
    known = [share for share in shares if share is not None]
    return statistics.median(known) < SHORT_OF_CPU if known else None
