"""A2TP's threshold H: the model that bounds it from below (Fig. 5), and what throughput it leaves (Fig. 12).

*Fig. 5.* N flows with M slots swing together: equation 14 gives the least number of collisions of a swing, and the least H at
which it is not negative keeps all slots in use. Section 4.4 approximates the decreasing factor by ``sqrt(2 / ACW*)``; here
equation 10's cubic is solved as well, to see what that costs.
"""

import math
from collections.abc import Callable
from itertools import pairwise

from inanet.papers.a2tp_testbed import ALL_SLOTS, HOST, NOTES, SAMPLE, STRAGGLER, build, throughputs
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table

FLOWS = (2, 4, 8, 16, 32)
MEMORIES = (ALL_SLOTS, 2 * ALL_SLOTS)
#: Of numbers that are read off a plot.
TOLERANCE = 0.25


def least_collisions(flows: int, slots: int, threshold: float) -> float:
    """C_min of equation 14, packets."""
    swing = 0.5 * math.sqrt(2 * slots * flows / (1 - threshold))
    return slots * threshold / (1 - threshold) + flows - swing


def exact_collisions(flows: int, slots: int, threshold: float) -> float:
    """C_min with the decreasing factor that solves equation 10 as it stands, packets."""
    window = slots / ((1 - threshold) * flows)
    target = (2 * window + 1) / (window + 1) ** 2
    low, high = 0.0, 2.0
    for _ in range(80):
        d = (low + high) / 2
        low, high = (d, high) if d * d * (1 - d / 4) < target else (low, d)
    swing = flows * (window + 1) * low / 2
    return slots * threshold / (1 - threshold) + flows - swing


def bound(flows: int, slots: int, collisions: Callable[[int, int, float], float] = least_collisions) -> float:
    """The least H, 0 to 1, at which there is always a collision to come; by bisection, the excess grows with H."""
    low, high = 0.0, 1.0 - 1e-9
    if collisions(flows, slots, low) >= 0:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if collisions(flows, slots, middle) < 0 else (low, middle)
    return high


def fig5() -> Outcome:
    """H from the model, against flows, for 450 and 900 slots."""
    found = {(slots, flows): bound(flows, slots) for slots in MEMORIES for flows in FLOWS}
    exact = {key: bound(key[1], key[0], exact_collisions) for key in found}
    few, many = MEMORIES
    rises = all(
        found[slots, more] > found[slots, less] for slots in MEMORIES for less, more in pairwise(FLOWS)
    )
    stated = {(few, 2): 0.03, (few, 32): 0.12, (many, 32): 0.09}
    claims = (
        *(
            Claim(
                f"H for {flows} flows and {slots} slots",
                paper,
                found[slots, flows],
                "~",
                TOLERANCE,
                _off(found[slots, flows], paper, found[many, flows]),
            )
            for (slots, flows), paper in stated.items()
        ),
        Claim("H rises with the number of flows", 1, float(rises), "=="),
        Claim("the paper's H, 0.15, is above all of them", 0.15, max(found.values()), "<="),
    )
    rows = tuple((slots, flows, found[slots, flows], exact[slots, flows]) for slots, flows in found)
    columns = ("slots", "flows", "H", "H, equation 10 solved")
    panel = Panel(
        "least threshold",
        "flows",
        "H",
        {f"{slots} slots": [(flows, found[slots, flows]) for flows in FLOWS] for slots in MEMORIES},
    )
    return Outcome(claims, (Table("least H", columns, rows),), (panel,), ("Arithmetic, unscaled.",))


def _off(found: float, paper: float, with_many: float) -> str:
    """Why a number differs; ``with_many`` is the model's for the larger memory."""
    if abs(found - paper) <= TOLERANCE * paper:
        return ""
    return (
        f"equation 14 is zero at H = {found:.4f}; with {MEMORIES[1]} slots it is at {with_many:.4f}, so the paper's number "
        "may be that one"
    )


#: H, for few jobs and for many; many are slow to simulate.
THRESHOLDS = {2: (0.0, 0.05, 0.15, 0.3, 0.6, 0.9), 8: (0.0, 0.15, 0.6)}
#: Seconds before counting, and counted.
PHASES = {2: (16 * SAMPLE, 10 * SAMPLE), 8: (12 * SAMPLE, 5 * SAMPLE)}


def total(jobs: int, threshold: float, straggling: bool) -> float:
    """Gbit/s of all jobs together; half of them straggle, if any does."""
    numbers = range(1, jobs + 1)
    stragglers = {job: STRAGGLER / HOST for job in numbers if job % 2 == 0} if straggling else {}
    rack = build("a2tp", numbers, stragglers, threshold=threshold)
    return sum(throughputs(rack, *PHASES[jobs]).values())


def fig12() -> Outcome:
    """Total throughput against H, of 2 and of 8 jobs, with and without stragglers."""
    found = {
        (jobs, straggling, threshold): total(jobs, threshold, straggling)
        for jobs, thresholds in THRESHOLDS.items()
        for straggling in (False, True)
        for threshold in thresholds
    }
    claims = []
    for jobs, thresholds in THRESHOLDS.items():
        for straggling in (False, True):
            its = {threshold: found[jobs, straggling, threshold] for threshold in thresholds}
            best = max(its.values())
            name = f"{jobs} jobs, {'half straggling' if straggling else 'no straggler'}"
            claims.append(
                Claim(
                    f"{name}: throughput at H = 0.15 over the best",
                    1.0,
                    its[0.15] / best,
                    ">=",
                    0.05,
                    "" if its[0.15] >= 0.95 * best else _which(its),
                )
            )
            if straggling:
                high = max(thresholds)
                claims.append(
                    Claim(
                        f"{name}: throughput at H = {high} over that at 0.15",
                        1.0,
                        its[high] / its[0.15],
                        "<=",
                        reason="" if its[high] <= its[0.15] else f"{_which(its)}. {_OWN}",
                    )
                )
    rows = tuple(
        (jobs, straggling, threshold, value) for (jobs, straggling, threshold), value in found.items()
    )
    panels = tuple(
        Panel(
            f"{jobs} jobs",
            "H",
            "Gbit/s",
            {
                "half straggling" if straggling else "no straggler": [
                    (threshold, found[jobs, straggling, threshold]) for threshold in thresholds
                ]
                for straggling in (False, True)
            },
        )
        for jobs, thresholds in THRESHOLDS.items()
    )
    columns = ("jobs", "stragglers", "H", "Gbit/s")
    return Outcome(tuple(claims), (Table("total throughput", columns, rows),), panels, NOTES)


_OWN = (
    "Every job has a PS with a link of its own here, which takes what the slots cannot sum; eight of them are more than what "
    "the slots are worth"
)


def _which(its: dict[float, float]) -> str:
    best = max(its, key=its.__getitem__)
    return f"the best of these is H = {best} with {its[best]:.1f} Gbit/s; 0.15 has {its[0.15]:.1f}"
