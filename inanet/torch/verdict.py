"""Whether aggregation in the network helps a job: one place for the rules, whoever brings the figures.

Three things can speak against it: no agent, a ring that is as fast, and a job that hardly communicates. The
rules only judge; :mod:`inanet.torch.rendezvous`, :func:`compare` and :class:`CommunicationShare` bring figures
on which all ranks agree, so that all judge alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from inanet.client.job import Job
from inanet.torch.rendezvous import Exchange, Refusal

#: INA must save this share of an all-reduce's time, and communication must take this share of a step
WORTHWHILE = 0.10
#: what :func:`compare` reduces: 4 MiB of float32, the order of a DDP bucket
PROBE_ELEMENTS = 1 << 20
_REPETITIONS = 2
#: bytes up to which an all-reduce goes the way that is faster for one element
SMALL_BYTES = 4096
_SMALL_REPETITIONS = 10
#: steps not measured: DDP builds its buckets anew after the first
SKIPPED = 2
#: steps measured
MEASURED = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to use INA, and why, as one sentence for the log.

    ``small``: why all-reduces up to :data:`SMALL_BYTES` go the other way all the same; empty if they do not.
    """

    use_ina: bool
    reason: str
    small: str = ""


def on_refusal(refusal: Refusal) -> Verdict:
    """Without all ranks there is no job."""
    return Verdict(False, refusal.reason)


def on_times(ina: float, ring: float) -> Verdict:
    """Seconds that the same all-reduce takes both ways, on the slowest rank."""
    text = (
        f"{PROBE_ELEMENTS * 4 >> 20} MiB took {ina * 1e3:.1f} ms through the fabric and {ring * 1e3:.1f} ms"
    )
    if ina <= (1 - WORTHWHILE) * ring:
        return Verdict(True, f"{text} by the group's own all-reduce")
    return Verdict(
        False, f"{text} by the group's own all-reduce: aggregation would have to be {WORTHWHILE:.0%} faster"
    )


def on_small_times(verdict: Verdict, ina: float, ring: float) -> Verdict:
    """Seconds that one element takes both ways, on the slowest rank."""
    if not verdict.use_ina or ina <= ring:
        return verdict
    return replace(
        verdict,
        small=f"one element took {ina * 1e6:.0f} us through the fabric and {ring * 1e6:.0f} us by the group's own "
        f"all-reduce, which therefore takes tensors up to {SMALL_BYTES} B",
    )


def on_share(share: float, steps: int) -> Verdict:
    """Share of a step's time in which gradients are on their way, on the rank where it is largest."""
    text = f"communication takes {share:.1%} of a step ({steps} measured)"
    if share >= WORTHWHILE:
        return Verdict(True, text)
    return Verdict(False, f"{text}: under {WORTHWHILE:.0%} no aggregation makes this job noticeably faster")


def compare(ina: Callable[[], None], ring: Callable[[], None], exchange: Exchange) -> Verdict:
    """Measure :data:`PROBE_ELEMENTS` both ways on all ranks, and judge."""
    return on_times(*_measure(ina, ring, exchange, _REPETITIONS))


def compare_small(
    verdict: Verdict, ina: Callable[[], None], ring: Callable[[], None], exchange: Exchange
) -> Verdict:
    """Measure one element both ways on all ranks, and judge."""
    return on_small_times(verdict, *_measure(ina, ring, exchange, _SMALL_REPETITIONS))


def _measure(
    ina: Callable[[], None], ring: Callable[[], None], exchange: Exchange, repetitions: int
) -> tuple[float, float]:
    """Seconds of both, interleaved after a warm-up: the best of the slowest rank."""
    best = [float("inf"), float("inf")]
    for repetition in range(repetitions + 1):
        for index, reduce in enumerate((ina, ring)):
            start = time.perf_counter()
            reduce()
            if repetition:
                best[index] = min(best[index], time.perf_counter() - start)
    said = exchange(best)
    return max(one[0] for one in said), max(one[1] for one in said)


class CommunicationShare:
    """The share of a step that communication takes, over the first steps of a job: adds up, in nanoseconds, how long
    anything was on its way, and how long the steps were."""

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
