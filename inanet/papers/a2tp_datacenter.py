"""A2TP's Fig. 13: many jobs of four models in a leaf-spine network, with two-level aggregation, beside Ring all-reduce.

The paper has 12 racks of 48 servers under 12 core switches, 160 to 320 jobs of 2 to 8 workers placed at random, a PS each, and 1
to 3 MB of memory in every rack's switch. Here racks stay, and what stands in them is divided by :data:`FEWER`: servers,
jobs and memory, so that as many processes share a server and a slot as there. Two core switches are left. Rates, slots and
queues are divided by :data:`SCALE` as well, and iterations are :data:`SHORTER` times shorter. Delays are the paper's: 16 us for
a round trip between racks.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from inanet.papers.a2tp_training import Model
from inanet.papers.claims import Claim, reduction, shorter
from inanet.papers.outcome import Outcome, Panel, Table, joined
from inanet.proto.slots import window
from inanet.sim.cluster import RING, Cluster, Layout, Placed, scaled

FEWER, SCALE, SHORTER = 24, 5, 1000
RACKS, SERVERS, CORES, LINE = 12, 48, 2, 100e9
#: Most jobs on a server, and the workers of a job.
MOST, LEAST_WORKERS, MOST_WORKERS = 8, 2, 8
#: What a slot takes of the memory: values, and state beside them; SwitchML has two versions.
SLOT, PAIR = 248 + 24, 2 * (256 + 24)
#: Bytes of gradient (the paper's for LSTM, else the published models'), seconds of computing (assumed).
MODELS: Mapping[str, Model] = {
    "ResNet50": Model(98e6, 0.040),
    "AlexNet": Model(233e6, 0.010),
    "VGG16": Model(528e6, 0.020),
    "LSTM": Model(1748e6, 0.060),
}
SYSTEMS_RUN = (RING, "switchml", "atp", "a2tp")
#: Jobs at 2 MB, and MB at so many jobs.
JOBS, MEMORY, MEMORIES, JOBS_THERE = (160, 320), 2.0, (1.0, 2.0, 3.0), 160
#: Iterations of every job that count, and the seconds after which they do.
ROUNDS, SETTLED = 1, 3e-3
TICK = 4e-6
#: Bytes in flight at 100 Gbit/s in 16 us.
WINDOW = LINE * 16e-6 / 8
SEED = 13
#: Iterations are so much shorter that the testbed's waits would be a part of them; these are some round trips.
TIMING, PULL_AFTER = replace(window.TIMING, retransmit=100e-6, silent=60.0), 50e-6


def layout(fewer: int = FEWER) -> Layout:
    """The network, all rates scaled. Ways between racks have the rate of a server's link, as in the paper, where streams of a
    job to its PS spread over twelve of them: divided as the servers are, they would be bound by a job's own fan-in.
    """
    return scaled(
        Layout(
            racks=RACKS,
            cores=CORES,
            servers=max(1, SERVERS // fewer),
            nic=LINE,
            uplink=LINE,
            delay=TICK / 2,
            core_delay=2e-7,
            tick=TICK,
        ),
        SCALE,
    )


def place(jobs: int, fewer: int = FEWER) -> list[Placed]:
    """Jobs on random servers; the same jobs, and more of them, for larger numbers."""
    rng = np.random.default_rng(SEED)
    servers = RACKS * max(1, SERVERS // fewer)
    used = np.zeros(servers, np.int64)
    placed = []
    names = list(MODELS)
    for number in range(1, max(1, round(jobs / fewer)) + 1):
        model = MODELS[names[(number - 1) % len(names)]]
        count = int(rng.integers(LEAST_WORKERS, MOST_WORKERS, endpoint=True))
        free = np.flatnonzero(used < MOST)
        chosen = rng.choice(free, count + 1, replace=False)
        used[chosen] += 1
        placed.append(
            Placed(
                number,
                tuple(chosen[:count].tolist()),
                int(chosen[count]),
                max(1, round(model.size / SCALE / SHORTER / 248)) * 248,
                model.compute / SHORTER,
                float(rng.random()) * model.compute / SHORTER,
            )
        )
    return placed


def iteration(
    system: str,
    jobs: int,
    memory: float,
    *,
    fewer: int = FEWER,
    rounds: int = ROUNDS,
    settled: float = SETTLED,
) -> float:
    """Mean seconds of an iteration over all jobs, scaled. ``memory`` in MB of a switch, unscaled."""
    placed = place(jobs, fewer)
    slots = max(1, round(memory * 1e6 / (PAIR if system == "switchml" else SLOT) / SCALE / fewer))
    packet = 1472 + 66 if system == RING else 306
    window = max(2, round(WINDOW / packet / SCALE))
    cluster = Cluster(
        layout(fewer),
        system,
        placed,
        slots=slots,
        window=window,
        seed=SEED,
        timing=TIMING,
        pull_after=PULL_AFTER,
    )
    cluster.run(rounds, deadline=10.0, settled=settled)
    return statistics.fmean(cluster.iteration(job.number) for job in placed)


Found = dict[tuple[str, float], float]


def _claims(found: Found, points: Sequence[float]) -> list[Claim]:
    claims = []
    for system, paper in ((RING, 26.0), ("switchml", 27.0), ("atp", 13.0)):
        gains = {x: reduction(found["a2tp", x], found[system, x]) for x in points}
        best, worst = max(gains, key=gains.__getitem__), min(gains, key=gains.__getitem__)
        text = ", ".join(f"{x:g}: {gain:.1f}" for x, gain in gains.items())
        why = f"per cent by point: {text}. {_WHY[system]}"
        claims += shorter(system, paper, (gains[best], gains[worst]), 2, (why, why))
    return claims


_WHY = {
    RING: (
        "A ring has one stream into a server; workers that are alone in their racks, as most are, send to the PS's rack each, "
        "and what finds no slot there shares the link of the PS's server with other jobs"
    ),
    "switchml": (
        "SwitchML's answers are spared the way to a PS and its shared server, and it has no window that congestion makes "
        "smaller; its slots are divided among the jobs of a switch here, not among all in the network"
    ),
    "atp": "what both systems share, servers' and core links and computing, takes most of an iteration",
}
NOTES = (
    f"{RACKS} racks of {SERVERS // FEWER} servers ({SERVERS} in the paper): servers, jobs and memory divided by {FEWER}; "
    f"{CORES} core switches (12) with {LINE / 1e9:.0f} Gbit/s to each rack, ways chosen by a hash of the addresses. That is as "
    "much as a rack's servers have; the paper's core has a quarter.",
    f"Rates, slots, windows and queues divided by {SCALE}; {TICK * 1e6:.0f} us of polling; iterations {SHORTER} times "
    f"shorter; at least {ROUNDS} of every job, after {SETTLED * 1e3:.0f} ms.",
    "MB and ms of computing, before that: "
    + ", ".join(f"{name} {its.size / 1e6:.0f}, {its.compute * 1e3:.0f}" for name, its in MODELS.items())
    + ". Times of computing are assumed; the paper gives none.",
    "SwitchML's slots are divided among the jobs that use a switch, which is more than a share among all jobs.",
)


def _outcome(found: Found, points: Sequence[float], axis: str) -> Outcome:
    rows = tuple((x, *(found[system, x] * 1e3 for system in SYSTEMS_RUN)) for x in points)
    table = Table("mean iteration, scaled ms", (axis, *SYSTEMS_RUN), rows)
    series = {system: [(x, found[system, x] * 1e3) for x in points] for system in SYSTEMS_RUN}
    return Outcome(
        tuple(_claims(found, points)), (table,), (Panel("leaf-spine", axis, "scaled ms", series),), NOTES
    )


def _against_jobs() -> Found:
    return {(system, float(jobs)): iteration(system, jobs, MEMORY) for jobs in JOBS for system in SYSTEMS_RUN}


def _against_memory(known: Found) -> Found:
    """By MB; ``known`` may have the runs with the default, by jobs. A ring does not depend on memory."""
    at_default = {
        system: known.get((system, float(JOBS_THERE))) or iteration(system, JOBS_THERE, MEMORY)
        for system in SYSTEMS_RUN
    }
    return {
        (system, memory): at_default[system]
        if memory == MEMORY or system == RING
        else iteration(system, JOBS_THERE, memory)
        for memory in MEMORIES
        for system in SYSTEMS_RUN
    }


def fig13a() -> Outcome:
    """Mean iteration time against the number of jobs, 2 MB of memory."""
    return _outcome(_against_jobs(), tuple(map(float, JOBS)), "jobs")


def fig13b() -> Outcome:
    """Mean iteration time against the memory of a switch."""
    return _outcome(_against_memory({}), MEMORIES, "MB")


def fig13() -> Outcome:
    """Both parts."""
    by_jobs = _against_jobs()
    return joined(
        {
            "a": _outcome(by_jobs, tuple(map(float, JOBS)), "jobs"),
            "b": _outcome(_against_memory(by_jobs), MEMORIES, "MB"),
        }
    )
