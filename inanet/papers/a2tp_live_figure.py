"""What A2TP's Fig. 2 on the real daemons (:mod:`inanet.papers.a2tp_live`) comes to: the rate, tables, claims."""

import statistics
from collections.abc import Mapping, Sequence

from inanet.papers.a2tp_live import (
    AFTER,
    ALONE,
    BOTH,
    ECN,
    NAMES,
    PACKET,
    PAUSE,
    RATES,
    SETTLED,
    SLOTS,
    Run,
    measure,
)
from inanet.papers.a2tp_testbed import HOST, LINE, STRAGGLER, A
from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table

SYSTEMS_RUN = ("switchml", "atp", "a2tp")
#: Share of all processors that must be idle while both jobs run, or it is them that is measured.
ENOUGH = 0.25
#: of a row of the table by time, seconds
BIN = 0.5


def _why(run: Run, figures: Mapping[str, float]) -> str:
    """What a loss that is not the paper's has to do with."""
    idle = f"processors were idle for {100 * run.idle:.0f} per cent of the time while both ran"
    if run.idle < ENOUGH:
        return f"{idle}: {_BUSY}"
    return f"{idle}, so it is not they that were short. B held {100 * figures['occupied']:.0f} per cent of the slots; {_COARSE}"


def _claims(runs: Mapping[str, Run], its: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    loss = {system: reduction(figures["A"], figures["alone"]) for system, figures in its.items()}
    faster = ratio(its["a2tp"]["A"], its["atp"]["A"])
    held = ratio(its["a2tp"]["occupied"], its["atp"]["occupied"])
    halved = reduction(its["switchml"]["alone"], its["atp"]["alone"])
    return [
        Claim(
            "A2TP: A's loss beside B, per cent",
            2.0,
            loss["a2tp"],
            "<=",
            reason="" if loss["a2tp"] <= 2.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
        Claim(
            "ATP: A's loss beside B, per cent",
            28.0,
            loss["atp"],
            "~",
            0.25,
            "" if abs(loss["atp"] - 28) <= 7 else _why(runs["atp"], its["atp"]),
        ),
        Claim(
            "SwitchML: A alone below ATP's, per cent",
            50.0,
            halved,
            "~",
            0.25,
            "" if abs(halved - 50) <= 12.5 else _ROOM,
        ),
        Claim(
            "A beside B: A2TP's throughput over ATP's",
            1.0,
            faster,
            ">=",
            reason="" if faster >= 1.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
        Claim(
            "slots that B holds: A2TP's share over ATP's",
            1.0,
            held,
            "<=",
            reason="" if held <= 1.0 else _why(runs["a2tp"], its["a2tp"]),
        ),
    ]


_BUSY = (
    "all daemons and ranks share this machine's processors, B's join those of A, and round trips are as long as it takes until "
    "each has run; see the simulation of this figure for the systems alone"
)
_COARSE = f"windows have {SLOTS} packets at most, so that a single one is {100 / SLOTS:.1f} per cent of them"
_ROOM = (
    "half of the slots halve a job where they are less than what is under way in a round trip; at this rate and with answers "
    "from the switch, they are not"
)


def _bins(run: Run) -> list[tuple[float, float, float, float, float]]:
    """Every :data:`BIN` seconds since A's first result: Mbit/s of A and B, mean shares of slots of A and B."""
    begin = run.times[A][0]
    rows = []
    for index in range(1, round((run.times[A][-1] - begin) / BIN) + 1):
        low, high = begin + (index - 1) * BIN, begin + index * BIN
        rates = [
            sum(low < at <= high for at in run.times[job]) * run.round_bytes * 8 / BIN / 1e6 for job in NAMES
        ]
        inside = [held for at, held in run.held if low < at <= high]
        shares = [statistics.fmean(held.get(job, 0.0) for held in inside) if inside else 0.0 for job in NAMES]
        rows.append((index * BIN, rates[0], rates[1], shares[0], shares[1]))
    return rows


def judge(runs: Mapping[str, Run], settled: float = SETTLED) -> Outcome:
    """What was measured, by system, as tables, panels and claims."""
    its = {system: run.figures(settled) for system, run in runs.items()}
    means = tuple(
        (s, f["alone"], f["A"], f["B"], f["after"], reduction(f["A"], f["alone"]), f["occupied"])
        for s, f in its.items()
    )
    columns = ("system", "A alone", "A with B", "B", "A after B", "A's loss, %", "slots of B")
    by_time = {system: _bins(run) for system, run in runs.items()}
    series = Table(
        "by time",
        ("system", "s", "A, Mbit/s", "B, Mbit/s", "slots of A", "slots of B"),
        tuple((system, *row) for system, rows in by_time.items() for row in rows),
    )
    titles = (
        ("job A", "Mbit/s"),
        ("job B", "Mbit/s"),
        ("slots that A holds", "share"),
        ("slots that B holds", "share"),
    )
    panels = tuple(
        Panel(title, "s", unit, {s: [(row[0], row[column]) for row in rows] for s, rows in by_time.items()})
        for column, (title, unit) in enumerate(titles, 1)
    )
    roles = tuple(dict.fromkeys(role for run in runs.values() for role in run.busy))
    load = Table(
        "processor seconds in a second while both ran, all processes of a role; share of all processors that was idle",
        ("system", *roles, "idle"),
        tuple(
            (system, *(run.busy.get(role, 0.0) for role in roles), run.idle) for system, run in runs.items()
        ),
    )
    tables = Table("Mbit/s of gradient", columns, means), load, series
    return Outcome(tuple(_claims(runs, its)), tables, panels, _notes(next(iter(runs.values())).rate))


def _notes(rate: int) -> tuple[str, ...]:
    tried = ", ".join(f"{one / 1e6:.0f}" for one in RATES)
    return (
        f"Measured: ina-switch, ina-ps, eight ina-worker and as many ranks in namespaces. Hosts send {rate / 1e6:.0f} Mbit/s, the "
        f"first of {tried} at which ATP leaves processors idle for {100 * ENOUGH:.0f} per cent of the time, or the last; B's last "
        f"{STRAGGLER / HOST:.2f} of that; the port to the PS has {2 * LINE / HOST:.1f} times as much, since one PS serves both jobs.",
        f"{SLOTS} slots and windows as large; frames are marked where {ECN // 1000} kB wait; the switch looks at a port every "
        f"{PAUSE * SLOTS * PACKET * 8e3 / rate:.1f} ms, so that the slots are about what is under way in a round trip. SwitchML has "
        "half of the slots for each.",
        f"A alone for {ALONE:.0f} s, with B for {BOTH:.0f}, alone for {AFTER:.0f}; {SETTLED:.0f} s after every change not counted.",
        "Slots are what the switch daemon has sampled, throughput what rank 0 has got, from the first result to the last.",
    )


def fig2(rates: Sequence[int] = RATES) -> Outcome:
    """Throughput and slots over time of A, and of a straggling B beside it, under SwitchML, ATP and A2TP in turn, at the first
    rate that leaves processors time to spare.
    """
    for rate in rates:
        atp = measure("atp", rate=rate)
        if atp.idle >= ENOUGH:
            break
    return judge({s: atp if s == "atp" else measure(s, rate=atp.rate) for s in SYSTEMS_RUN})
