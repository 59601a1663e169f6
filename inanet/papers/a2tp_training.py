"""A2TP's Fig. 9 and 10: iterations of training jobs, with computing between rounds.

A model is its bytes and the time that it computes. The paper gives neither the one nor, for its GPUs and its small pictures,
the other: bytes are those of the published models in float32, times are assumptions that keep the paper's order (ResNet50
computes, VGG16 communicates). Both are divided by :data:`SHORTER` so that an iteration is tens of round trips; rates and slots
are scaled as in the testbed.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from inanet.papers.a2tp_testbed import (
    ALL_SLOTS,
    HOST,
    LINE,
    NOTES,
    PACKET,
    PULL_AFTER,
    RATE,
    SCALE,
    TICK,
    TIMING,
    VALUES,
    A,
    B,
    build,
)
from inanet.papers.claims import Claim, reduction, shorter
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.sim.cluster import Cluster, Layout, Placed, scaled

#: How much shorter iterations are than the models'.
SHORTER = 200


@dataclass(frozen=True, slots=True)
class Model:
    """``size`` bytes of gradient and ``compute`` seconds of an iteration, unscaled."""

    size: float
    compute: float

    @property
    def bytes(self) -> int:
        """Bytes of a scaled round, whole packets."""
        return max(1, round(self.size / SCALE / SHORTER / VALUES)) * VALUES

    @property
    def seconds(self) -> float:
        """Scaled computation."""
        return self.compute / SHORTER


MODELS: Mapping[str, Model] = {
    "AlexNet": Model(233e6, 0.010),
    "VGG16": Model(528e6, 0.020),
    "ResNet50": Model(98e6, 0.040),
    "Bert": Model(440e6, 0.060),
}
SYSTEMS_RUN = ("switchml", "atp", "a2tp")
NOTES_TRAINING = (
    NOTES[0],
    NOTES[1],
    f"Iterations {SHORTER} times shorter: "
    + ", ".join(
        f"{name} {its.size / 1e6:.0f} MB and {its.compute * 1e3:.0f} ms" for name, its in MODELS.items()
    )
    + ". Bytes are the models', times of computing are assumed.",
)
LEVELS = (0.25, 0.1)
#: Seconds before iterations are counted, and the number that is.
SETTLED, ITERATIONS = 2.5e-3, 4


def beside(system: str, model: Model, level: float) -> float:
    """Mean seconds of an iteration of a job beside a straggling one of the same model, scaled."""
    rack = build(system, (A, B), {B: level})
    for job in (A, B):
        rack.loop(job, model.bytes // 8, model.seconds)
    rack.run(SETTLED)
    counted = len(rack.finished(A))
    while len(rack.finished(A)) <= counted + ITERATIONS:
        rack.run(0.3e-3)
    times = rack.finished(A)[counted:]
    return (times[-1] - times[0]) / (len(times) - 1)


def fig9() -> Outcome:
    """Iterations of the job without a straggler, against the straggling level of the other."""
    found = {
        (name, level, system): beside(system, model, level)
        for name, model in MODELS.items()
        for level in LEVELS
        for system in SYSTEMS_RUN
    }
    claims = []
    for system, paper in (("switchml", 44.0), ("atp", 37.0)):
        gains = {
            (name, level): reduction(found[name, level, "a2tp"], found[name, level, system])
            for name in MODELS
            for level in LEVELS
        }
        best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
        why = _SWITCHML if system == "switchml" else "computing takes the same time under both systems"
        reasons = f"{best[0]} at {best[1]}. {why}", f"{worst[0]} at {worst[1]}. {why}"
        claims += shorter(system, paper, (gains[best], gains[worst]), 1, reasons)
    rows = tuple(
        (name, level, *(found[name, level, system] * 1e3 for system in SYSTEMS_RUN))
        for name in MODELS
        for level in LEVELS
    )
    panels = tuple(
        Panel(
            name,
            "straggling level",
            "ms",
            {
                system: [(level, found[name, level, system] * 1e3) for level in LEVELS]
                for system in SYSTEMS_RUN
            },
        )
        for name in MODELS
    )
    columns = ("model", "level", *SYSTEMS_RUN)
    table = Table("iteration of the job without a straggler, scaled ms", columns, rows)
    return Outcome(tuple(claims), (table,), panels, NOTES_TRAINING)


_SWITCHML = (
    "SwitchML's round trip is half of ATP's here, so that half of the slots are enough for it (see Fig. 2)"
)
#: Servers that hold workers, and those that hold PSs, of the testbed's eleven.
WORKERS_ON, PSS_ON, JOB_WORKERS = 8, 3, 4
JOBS = (1, 2, 4, 8)
#: Iterations of every job that count, after :data:`SETTLED` seconds.
ROUNDS = 2
FIG10_MODELS = ("VGG16",)


def several(system: str, model: Model, jobs: int, rounds: int = ROUNDS, settled: float = SETTLED) -> float:
    """Mean seconds of an iteration over jobs of one model, which begin one after the other; scaled."""
    layout = scaled(
        Layout(
            racks=1,
            cores=0,
            servers=WORKERS_ON + PSS_ON,
            nic=LINE * 1e9,
            delay=TICK / 2,
            process=HOST * 1e9 * PACKET / VALUES,
            tick=TICK,
        ),
        SCALE,
    )
    placed = []
    for job in range(jobs):
        first = job * JOB_WORKERS
        workers = tuple((first + index) % WORKERS_ON for index in range(JOB_WORKERS))
        # one after the other, so that not all compute at the same time
        start = job * (model.seconds + model.bytes * 8 / RATE) / jobs
        placed.append(Placed(job + 1, workers, WORKERS_ON + job % PSS_ON, model.bytes, model.seconds, start))
    slots = round(ALL_SLOTS / SCALE)
    cluster = Cluster(layout, system, placed, slots=slots, window=slots, timing=TIMING, pull_after=PULL_AFTER)
    cluster.run(rounds, deadline=1.0, settled=settled)
    return statistics.fmean(cluster.iteration(job.number) for job in placed)


def fig10() -> Outcome:
    """Mean iteration time against the number of jobs on eight servers."""
    found = {
        (name, jobs, system): several(system, MODELS[name], jobs)
        for name in FIG10_MODELS
        for jobs in JOBS
        for system in SYSTEMS_RUN
    }
    most = max(JOBS)
    claims = []
    for system, paper in (("switchml", 66.0), ("atp", 18.0)):
        gains = {
            name: reduction(found[name, most, "a2tp"], found[name, most, system]) for name in FIG10_MODELS
        }
        best = max(gains, key=gains.__getitem__)
        claims.append(
            Claim(
                f"{most} jobs: iteration time below {system}'s, at best, per cent",
                paper,
                gains[best],
                ">=",
                0.25,
                "" if gains[best] >= 0.75 * paper else f"{best}. {_why(found, best, most, system)}",
            )
        )
    grows = all(
        found[name, more, system] >= 0.99 * found[name, less, system]
        for name in FIG10_MODELS
        for system in SYSTEMS_RUN
        for less, more in pairwise(JOBS)
    )
    claims.append(Claim("iterations take longer with more jobs, in all systems", 1, float(grows), "=="))
    rows = tuple(
        (name, jobs, *(found[name, jobs, system] * 1e3 for system in SYSTEMS_RUN))
        for name in FIG10_MODELS
        for jobs in JOBS
    )
    panels = tuple(
        Panel(
            name,
            "jobs",
            "ms",
            {system: [(jobs, found[name, jobs, system] * 1e3) for jobs in JOBS] for system in SYSTEMS_RUN},
        )
        for name in FIG10_MODELS
    )
    table = Table("mean iteration, scaled ms", ("model", "jobs", *SYSTEMS_RUN), rows)
    notes = (
        *NOTES_TRAINING,
        f"{WORKERS_ON} servers with workers, {PSS_ON} with PSs; a server with several processes sends up to {LINE:.0f} "
        f"Gbit/s. SwitchML's shares are rounded up. {ROUNDS} iterations of every job after {SETTLED * 1e3} ms.",
    )
    return Outcome(tuple(claims), (table,), panels, notes)


def _why(found: Mapping[tuple[str, int, str], float], name: str, jobs: int, system: str) -> str:
    share = math.ceil(ALL_SLOTS / jobs)
    ours, theirs = found[name, jobs, "a2tp"] * 1e3, found[name, jobs, system] * 1e3
    text = f"{ours:.2f} and {theirs:.2f} scaled ms. "
    if system == "switchml":
        return text + (
            f"SwitchML has {share} slots a job, and a round trip without a PS; its answers are spared the way to a PS whose "
            "server three jobs share"
        )
    return text + (
        "Jobs without stragglers do not come to equal shares under A2TP: a job counts Col marks over its own aggregator "
        "window, so one that holds most slots sees few, and one with a window of a packet sees that packet collide and stays "
        "there, with everything at its PS"
    )
