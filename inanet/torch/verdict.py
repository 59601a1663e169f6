"""Whether aggregation in the network helps a job: one place for the rules, whoever brings the figures.

Three things can speak against it: no agent, a ring that is as fast, and a job that hardly communicates. The
rules only judge; :mod:`inanet.torch.rendezvous`, :func:`compare` and :mod:`inanet.torch.share` bring figures
on which all ranks agree, so that all judge alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from inanet.torch.rendezvous import Exchange, Refusal

#: INA must save this share of an all-reduce's time, and communication must take this share of a step
WORTHWHILE = 0.10
#: what :func:`compare` reduces: 4 MiB of float32, the order of a DDP bucket
PROBE_ELEMENTS = 1 << 20
_REPETITIONS = 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to use INA, and why, as one sentence for the log."""

    use_ina: bool
    reason: str


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


def on_share(share: float, steps: int) -> Verdict:
    """Share of a step's time in which gradients are on their way, on the rank where it is largest."""
    text = f"communication takes {share:.1%} of a step ({steps} measured)"
    if share >= WORTHWHILE:
        return Verdict(True, text)
    return Verdict(False, f"{text}: under {WORTHWHILE:.0%} no aggregation makes this job noticeably faster")


def compare(ina: Callable[[], None], ring: Callable[[], None], exchange: Exchange) -> Verdict:
    """Measure both on all ranks, interleaved after a warm-up, and judge the best of the slowest rank."""
    best = [float("inf"), float("inf")]
    for repetition in range(_REPETITIONS + 1):
        for index, reduce in enumerate((ina, ring)):
            start = time.perf_counter()
            reduce()
            if repetition:
                best[index] = min(best[index], time.perf_counter() - start)
    said = exchange(best)
    return on_times(max(one[0] for one in said), max(one[1] for one in said))
