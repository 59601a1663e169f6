"""A2TP's testbed in the simulator: jobs on one rack, some of them with a straggler.

Eleven servers around one switch with 450 slots; a job has four workers and a PS, and aggregates without pause. Small packets
keep a host at 53 Gbit/s of gradient; its link, and what the switch sends over it, is one of 100 Gbit/s. The last worker of a
straggling job is slowed down.

Rates, slots, windows and queues are divided by :data:`SCALE`; delays stay, so that a window is still what 450 slots were:
one bandwidth-delay product of a job alone. One packet of ours stands for :data:`SCALE` there: ATP's window grows by one
packet of ours in a round trip, as the 1500 B of its public code are five packets of its own; A2TP's grows by one as well.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from inanet.papers.claims import Claim, reduction
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.slots import window
from inanet.proto.slots.a2tp.windows import PAPER, A2tpPace
from inanet.sim.link import LinkSpec
from inanet.sim.rack import OVERHEAD, SYSTEMS, Rack

SCALE = 5
#: The testbed's slots.
ALL_SLOTS = 450
#: What a host can do, Gbit/s of gradient, unscaled: small packets bound it (section 3.1); and the rate of a link.
HOST, LINE = 53.0, 100.0
#: Bytes of a packet on the wire, and of the values in it.
PACKET, VALUES = 275 + OVERHEAD, 248
RATE = HOST * 1e9 * PACKET / VALUES / SCALE
#: Hosts poll in steps of a tick. Four hops of a tick each, half of it on the link, and the packets' own times are the 17 us
#: in which 450 slots are one window at 53 Gbit/s.
TICK = 3e-6
#: A link's delay where events have their exact times and packets move in fours: Fig. 11 measures round trips.
EXACT_DELAY = 3.4e-6
#: 1 MB and 1000 cells of 80 B, as the public program has it.
QUEUE, ECN = (1 << 20) // SCALE, 80_000 // SCALE
#: Gbit/s that background traffic leaves to B's last worker.
STRAGGLER = 13.0
#: ATP's public code repeats after 200 us; the defaults of the daemons, 10 ms and 5 ms, are hundreds of round trips here, and
#: a round whose last fragment needs them would stand still.
TIMING, PULL_AFTER = replace(window.TIMING, retransmit=500e-6, silent=60.0), 200e-6
#: int32 of a round, per worker: 4 MB of them, scaled. They travel in two halves, since their sums are exact.
ROUND = 62 * 3200
#: Seconds between two looks.
SAMPLE = 0.21e-3
A, B, WORKERS = 1, 2, 4


def _link(tick: float | None, share: float = 1.0) -> LinkSpec:
    """What a host sends over."""
    delay, grain = (EXACT_DELAY, 4) if tick is None else (tick / 2, 12)
    return LinkSpec(rate=RATE * share, delay=delay, overhead=OVERHEAD, grain=grain)


def _port(tick: float | None) -> LinkSpec:
    """What the switch sends to a host over."""
    return replace(_link(tick), rate=LINE * 1e9 / SCALE, queue=QUEUE, ecn=ECN)


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


def build(
    system: str,
    jobs: Sequence[int],
    stragglers: Mapping[int, float],
    *,
    slots: int = ALL_SLOTS,
    threshold: float | None = None,
    tick: float | None = TICK,
) -> Rack:
    """A rack with jobs. The last worker of those in ``stragglers`` has a share of a host's rate. ``slots`` are unscaled;
    ``threshold`` is A2TP's H, by default the paper's; a longer ``tick`` makes delays longer, ``None`` is exact.
    """
    made = SYSTEMS[system]
    own = round(slots / SCALE)
    rack = Rack(
        made,
        slots=own + len(jobs) if made.static else own,
        link=_link(tick),
        port=_port(tick),
        timing=TIMING,
        pull_after=PULL_AFTER,
        tick=tick,
    )
    window = round(ALL_SLOTS / SCALE)
    for job in jobs:
        links = {WORKERS - 1: _link(tick, stragglers[job])} if job in stragglers else {}
        # shares of a static system are equal, rounded up, and do not depend on who is there
        share = math.ceil(own / len(jobs)) if made.static else own
        for worker in rack.add_job(job, WORKERS, window, slots=share, links=links):
            if threshold is not None and isinstance(worker.pace, A2tpPace):
                worker.pace.windows.profile = replace(PAPER, threshold=threshold)
    return rack


def mean(looks: Sequence[Look], job: int) -> float:
    """Gbit/s of a job, over some looks."""
    return statistics.fmean(look.throughput[job] for look in looks)


#: Seconds after which two jobs that begin together are counted, and for how long.
SETTLED, COUNTED = 14 * SAMPLE, 10 * SAMPLE


def throughputs(rack: Rack, settled: float = SETTLED, counted: float = COUNTED) -> dict[int, float]:
    """Gbit/s of all jobs when they aggregate without pause, the beginning not counted."""
    for job in rack.jobs:
        rack.loop(job, ROUND)
    rack.run(settled)
    looks = watch(rack, counted)
    return {job: mean(looks, job) for job in rack.jobs}


#: Phases of Fig. 2, seconds: A alone and then with B; the first part of each is not counted.
ALONE, ALONE_SKIPPED, BOTH, BOTH_SKIPPED = 6 * SAMPLE, 3 * SAMPLE, 28 * SAMPLE, 14 * SAMPLE


def contention(system: str, tick: float = TICK) -> tuple[list[Look], dict[str, float]]:
    """Fig. 2 for one system: all looks, and mean Gbit/s of A alone, of A and B together, with B's share of slots."""
    rack = build(system, (A, B), {B: STRAGGLER / HOST}, tick=tick)
    rack.loop(A, ROUND)
    alone = watch(rack, ALONE)
    rack.loop(B, ROUND)
    both = watch(rack, BOTH)
    counted = both[round(BOTH_SKIPPED / SAMPLE) :]
    port = rack.network.counters().get(f"switch-ps{A}", {})
    sent = rack.network.counters()[f"j{A}w0-switch"]["packets"]
    figures = {
        "alone": mean(alone[round(ALONE_SKIPPED / SAMPLE) :], A),
        "A": mean(counted, A),
        "B": mean(counted, B),
        "occupied": statistics.fmean(look.occupied[B] for look in counted),
        "beside_sums": max(0.0, port.get("packets", 0) / sent - 1.0),
        "marked": float(port.get("marked", 0)),
        "window": float(rack.jobs[A].workers[0].stats()["window"]),
    }
    return alone + both, figures


_SYSTEMS = ("switchml", "atp", "a2tp")
#: SwitchML with delays so long that its round trip is that of the others, whose answers come from a PS.
LONG = "switchml, long"


def _state(its: dict[str, float]) -> str:
    """What a job of the ATP family was held back by, in numbers."""
    return (
        f"A's PS was sent {its['beside_sums']:.2f} packets for each fragment beside its sum; {its['marked']:.0f} were "
        f"marked in front of it; at the end A's window was {its['window']:.0f} of {ALL_SLOTS // SCALE}."
    )


def _claims(runs: dict[str, tuple[list[Look], dict[str, float]]]) -> list[Claim]:
    its = {system: figures for system, (_, figures) in runs.items()}
    loss = {system: reduction(figures["A"], figures["alone"]) for system, figures in its.items()}
    halved = {system: reduction(its[system]["alone"], its["atp"]["alone"]) for system in ("switchml", LONG)}
    switchml = (
        "SwitchML's answers come from the switch, two delays away, ATP's from the PS, four: half of the slots are enough "
        f"for it where delays lie on the links. Were its round trip as long as ATP's, it would be {halved[LONG]:.0f} "
        "per cent below."
    )
    atp = (
        "Windows halve at every round trip with a mark, and fragments of which some copies collide are waited for. "
        + _state(its["atp"])
    )
    return [
        Claim(
            "A2TP: A's loss beside B, per cent",
            2.0,
            loss["a2tp"],
            "<=",
            reason="" if loss["a2tp"] <= 2.0 else _state(its["a2tp"]),
        ),
        Claim(
            "ATP: A's loss beside B, per cent",
            28.0,
            loss["atp"],
            "~",
            0.25,
            "" if abs(loss["atp"] - 28) <= 7 else atp,
        ),
        Claim(
            "SwitchML: A alone below ATP's, per cent",
            50.0,
            halved["switchml"],
            "~",
            0.25,
            "" if abs(halved["switchml"] - 50) <= 12.5 else switchml,
        ),
        Claim("A beside B: A2TP's throughput over ATP's", 1.0, its["a2tp"]["A"] / its["atp"]["A"], ">="),
        Claim(
            "slots that B holds: A2TP's share over ATP's",
            1.0,
            its["a2tp"]["occupied"] / its["atp"]["occupied"],
            "<=",
        ),
    ]


def fig2() -> Outcome:
    """Throughput of A beside a straggling B, under SwitchML, ATP and A2TP."""
    runs = {system: contention(system) for system in _SYSTEMS}
    runs[LONG] = contention("switchml", 2 * TICK)
    rows = tuple(
        (
            system,
            its["alone"],
            its["A"],
            its["B"],
            reduction(its["A"], its["alone"]),
            its["occupied"],
        )
        for system, (_, its) in runs.items()
    )
    columns = ("system", "A alone", "A with B", "B", "A's loss, %", "slots of B")
    panels = (
        Panel("job A", "ms", "Gbit/s", {s: _curve(looks, A) for s, (looks, _) in runs.items()}),
        Panel("job B", "ms", "Gbit/s", {s: _curve(looks, B) for s, (looks, _) in runs.items()}),
        Panel("slots that B holds", "ms", "share", {s: _held(looks, B) for s, (looks, _) in runs.items()}),
    )
    return Outcome(tuple(_claims(runs)), (Table("Gbit/s of gradient", columns, rows),), panels, NOTES)


def _curve(looks: Sequence[Look], job: int) -> list[tuple[float, float]]:
    return [(look.at * 1e3, look.throughput.get(job, 0.0)) for look in looks]


def _held(looks: Sequence[Look], job: int) -> list[tuple[float, float]]:
    return [(look.at * 1e3, look.occupied.get(job, 0.0)) for look in looks]


NOTES = (
    f"Rates, slots, windows and queues divided by {SCALE}, throughput scaled up again; delays as in the testbed.",
    f"Hosts send {HOST:.0f} Gbit/s of gradient at most, the switch {LINE:.0f} Gbit/s to each; all poll every "
    f"{TICK * 1e6:.0f} us.",
    "Virtual milliseconds, the beginning not counted.",
)
_EXACT = f"Events at their exact times, links of {EXACT_DELAY * 1e6} us, packets in fours."
#: Gbit/s left to the straggler in Fig. 11; the paper names the throughput of 22 and no straggler at all.
LEFT = (53.0, 40.0, 22.0, 13.0)


def fig11() -> Outcome:
    """The estimated straggling degree against what the straggler can send."""
    rows, found = [], {}
    for left in LEFT:
        rack = build("a2tp", (B,), {B: left / HOST}, tick=None)
        rack.loop(B, ROUND)
        degrees: list[float] = []
        looks = []
        for _ in range(10):
            looks += watch(rack, SAMPLE)
            for worker in rack.jobs[B].workers:
                assert isinstance(worker.pace, A2tpPace)
                degrees.append(worker.pace.degrees()["gamma"])
        counted = degrees[4 * WORKERS :]
        found[left] = statistics.fmean(counted)
        rows.append((left, mean(looks[4:], B), found[left], left / HOST))
    claims = (
        Claim("degree when 22 of 53 Gbit/s get through", 0.4, found[22.0], "~", 0.15),
        Claim("degree without a straggler", 0.99, found[53.0], "~", 0.15, _degree(found[53.0])),
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
    return Outcome(claims, (Table("one job", columns, tuple(rows)),), (panel,), (NOTES[0], _EXACT))


def _degree(found: float) -> str:
    if abs(found - 0.99) <= 0.15 * 0.99:
        return ""
    return (
        "Answers are counted over the round trip of the bare network. A window that is a whole bandwidth-delay product "
        "queues at its own host, so its answers take a little longer than that."
    )
