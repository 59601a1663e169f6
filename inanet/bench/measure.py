"""Repeating things fairly: interleaved, warmed up, with medians."""

import statistics
import time
from collections.abc import Callable, Mapping


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


def median(values: list[float]) -> float:
    """Median; 0 for an empty list."""
    return statistics.median(values) if values else 0.0
