"""A2TP's testbed in the simulator: two jobs on one rack, one of them with a straggler.

Eleven servers around one switch with 450 slots; jobs A and B have four workers and a PS each, and aggregate without pause.
Small packets keep a host at 53 Gbit/s of gradient. B's last worker is slowed down. Everything is divided by
:data:`SCALE`: rates, slots, windows and queues; delays stay, so that a window is still what 450 slots were: one
bandwidth-delay product of a job alone. Windows grow by one packet in a round trip, so they recover :data:`SCALE`
times faster than in the testbed, and milliseconds show what takes hundredths of a second there.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.a2tp.worker import A2tpWorker
from inanet.proto.switched.window import Timing
from inanet.sim.link import LinkSpec
from inanet.sim.rack import OVERHEAD, SYSTEMS, Rack

SCALE = 10
SLOTS = 450 // SCALE
#: What a host can do, Gbit/s of gradient, unscaled: small packets bound it (section 3.1).
HOST = 53.0
#: Bytes of a packet on the wire, and of the values in it.
PACKET, VALUES = 275 + OVERHEAD, 248
RATE = HOST * 1e9 * PACKET / VALUES / SCALE
#: Four of them, and the packets' own times, are the 17 us in which 450 slots are one window at 53 Gbit/s.
DELAY = 3.4e-6
#: 1 MB and 1000 cells of 80 B, as the public program has it.
QUEUE, ECN = (1 << 20) // SCALE, 80_000 // SCALE
#: Gbit/s that background traffic leaves to B's last worker.
STRAGGLER = 13.0
#: ATP's public code repeats after 200 us; the defaults of the daemons, 10 ms and 5 ms, are hundreds of round trips here, and
#: a round whose last fragment needs them would stand still.
TIMING, PULL_AFTER = Timing(timeout=500e-6, silent=60.0), 200e-6
#: int32 of a round, per worker.
ROUND = 62 * 1600
#: Seconds between two looks.
SAMPLE = 0.2e-3
A, B, WORKERS = 1, 2, 4


def _link(share: float = 1.0, *, port: bool = False) -> LinkSpec:
    """A host's link; ``port``: the switch's side of it."""
    queue, ecn = (QUEUE, ECN) if port else (None, None)
    return LinkSpec(rate=RATE * share, delay=DELAY, queue=queue, ecn=ecn, overhead=OVERHEAD, grain=2)


@dataclass(frozen=True, slots=True)
class Look:
    """At ``at`` seconds: Gbit/s since the last look, scaled up, and shares of the slots, by job."""

    at: float
    throughput: dict[int, float]
    occupied: dict[int, float]


def watch(rack: Rack, seconds: float) -> list[Look]:
    """Run, and look every :data:`SAMPLE`."""
    looks = []
    for _ in range(round(seconds / SAMPLE)):
        before = {job: rack.answered(job) for job in rack.jobs}
        rack.run(SAMPLE)
        rates = {job: (rack.answered(job) - before[job]) * 8 * SCALE / SAMPLE / 1e9 for job in rack.jobs}
        looks.append(Look(rack.network.now, rates, {job: rack.occupied(job) for job in rack.jobs}))
    return looks


def build(system: str, jobs: Sequence[int], straggler: float) -> Rack:
    """A rack with jobs of which B's last worker has a ``straggler`` share of a host's rate."""
    made = SYSTEMS[system]
    rack = Rack(made, slots=SLOTS, link=_link(), port=_link(port=True), timing=TIMING, pull_after=PULL_AFTER)
    for job in jobs:
        links = {WORKERS - 1: _link(straggler)} if job == B else {}
        # shares of a static system are equal, and do not depend on who is there
        rack.add_job(job, WORKERS, SLOTS, slots=SLOTS // 2 if made.static else SLOTS, links=links)
    return rack


def _mean(looks: Sequence[Look], job: int) -> float:
    return statistics.fmean(look.throughput[job] for look in looks)


#: Phases of Fig. 2, seconds: A alone and then with B; the first part of each is not counted.
ALONE, ALONE_SKIPPED, BOTH, BOTH_SKIPPED = 1.2e-3, 0.6e-3, 4.0e-3, 2.4e-3


def contention(system: str) -> tuple[list[Look], dict[str, float]]:
    """Fig. 2 for one system: all looks, and mean Gbit/s of A alone, of A and B together, with B's share of slots."""
    rack = build(system, (A, B), STRAGGLER / HOST)
    rack.loop(A, ROUND)
    alone = watch(rack, ALONE)
    rack.loop(B, ROUND)
    both = watch(rack, BOTH)
    counted = both[round(BOTH_SKIPPED / SAMPLE) :]
    port = rack.network.counters().get(f"switch-ps{A}", {})
    sent = rack.network.counters()[f"j{A}w0-switch"]["packets"]
    figures = {
        "alone": _mean(alone[round(ALONE_SKIPPED / SAMPLE) :], A),
        "A": _mean(counted, A),
        "B": _mean(counted, B),
        "occupied": statistics.fmean(look.occupied[B] for look in counted),
        "beside_sums": max(0.0, port.get("packets", 0) / sent - 1.0),
        "marked": float(port.get("marked", 0)),
        "window": float(rack.jobs[A].workers[0].stats()["window"]),
    }
    return alone + both, figures


_SYSTEMS = ("switchml", "atp", "a2tp")
_SWITCHML = (
    "SwitchML's answers come from the switch, two delays away, ATP's from the PS, four: half of the slots are enough for "
    "it where, as here, delays lie on the links and not in the hosts."
)


def _state(its: dict[str, float]) -> str:
    """What a job of the ATP family was held back by, in numbers."""
    return (
        f"A's PS was sent {its['beside_sums']:.2f} packets for each fragment beside its sum; "
        f"{its['marked']:.0f} were marked in front of it; at the end A's window was {its['window']:.0f} of {SLOTS}."
    )


def fig2() -> Outcome:
    """Throughput of A beside a straggling B, under SwitchML, ATP and A2TP."""
    runs = {system: contention(system) for system in _SYSTEMS}
    paper = {"switchml": 50.0, "atp": 28.0, "a2tp": 2.0}
    rows, claims = [], []
    for system, (_, its) in runs.items():
        loss = 100 * (1 - its["A"] / its["alone"])
        rows.append((system, its["alone"], its["A"], its["B"], loss, its["occupied"]))
        if system == "a2tp":
            reason = "" if loss <= paper[system] else _state(its)
            claims.append(
                Claim("A2TP: A's loss beside B, per cent", paper[system], loss, "<=", reason=reason)
            )
        elif system == "atp":
            reason = "" if abs(loss - paper[system]) <= 0.25 * paper[system] else _state(its)
            claims.append(Claim("ATP: A's loss beside B, per cent", paper[system], loss, "~", 0.25, reason))
    halved = 100 * (1 - runs["switchml"][1]["alone"] / runs["atp"][1]["alone"])
    claims.append(
        Claim(
            "SwitchML: A alone below ATP's, per cent",
            paper["switchml"],
            halved,
            "~",
            0.25,
            "" if abs(halved - 50) <= 12.5 else _SWITCHML,
        )
    )
    claims.append(
        Claim(
            "A beside B: A2TP's throughput over ATP's", 1.0, runs["a2tp"][1]["A"] / runs["atp"][1]["A"], ">="
        )
    )
    claims.append(
        Claim(
            "slots that B holds: A2TP's share over ATP's", 1.0, _over(runs, "occupied", "a2tp", "atp"), "<="
        )
    )
    columns = ("system", "A alone", "A with B", "B", "A's loss, %", "slots of B")
    panels = (
        Panel("job A", "ms", "Gbit/s", {s: _curve(looks, A) for s, (looks, _) in runs.items()}),
        Panel("job B", "ms", "Gbit/s", {s: _curve(looks, B) for s, (looks, _) in runs.items()}),
    )
    return Outcome(tuple(claims), (Table("Gbit/s of gradient", columns, tuple(rows)),), panels, _NOTES)


def _over(runs: dict[str, tuple[list[Look], dict[str, float]]], what: str, one: str, other: str) -> float:
    return runs[one][1][what] / runs[other][1][what] if runs[other][1][what] else float("inf")


def _curve(looks: Sequence[Look], job: int) -> list[tuple[float, float]]:
    return [(look.at * 1e3, look.throughput[job]) for look in looks]


_NOTES = (
    f"Rates, slots, windows and queues divided by {SCALE}, throughput scaled up again; delays as in the testbed.",
    "Virtual milliseconds: A alone, then B beside it; the beginning of each phase is not counted.",
    f"A window cannot fall below one packet, which is one slot in {SLOTS} here and one in {SLOTS * SCALE} in the testbed.",
)
#: Gbit/s left to the straggler in Fig. 11; the paper names the throughput of 22 and no straggler at all.
LEFT = (53.0, 40.0, 22.0, 13.0)


def fig11() -> Outcome:
    """The estimated straggling degree against what the straggler can send."""
    rows, found = [], {}
    for left in LEFT:
        rack = build("a2tp", (B,), left / HOST)
        rack.loop(B, ROUND)
        looks = watch(rack, 1.2e-3)
        gammas = []
        for worker in rack.jobs[B].workers:
            assert isinstance(worker, A2tpWorker)
            gammas.append(worker.degrees()["gamma"])
        found[left] = statistics.fmean(gammas)
        rows.append((left, _mean(looks[3:], B), found[left], left / HOST))
    claims = (
        Claim("degree when 22 of 53 Gbit/s get through", 0.4, found[22.0], "~", 0.15),
        Claim("degree without a straggler", 0.99, found[53.0], "~", 0.15),
        Claim(
            "degree falls with what the straggler can send",
            1,
            float(all(found[more] >= found[less] for more, less in pairwise(LEFT))),
            "==",
        ),
    )
    columns = ("straggler's Gbit/s", "Gbit/s", "degree", "share")
    panel = Panel(
        "A2TP", "Gbit/s left to the straggler", "degree", {"estimated": [(x, found[x]) for x in LEFT]}
    )
    return Outcome(claims, (Table("one job", columns, tuple(rows)),), (panel,), _NOTES[:1])
