"""A2TP's Fig. 7: total throughput of two jobs, against how slow the straggler is and against the number of slots."""

from collections.abc import Mapping
from dataclasses import replace

from inanet.papers.a2tp_testbed import (
    ALL_SLOTS,
    HOST,
    LONG,
    NOTES,
    SAMPLE,
    STRAGGLER,
    TICK,
    A,
    B,
    build,
    throughputs,
)
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table, joined

#: Systems in the order of the figure, with the name and tick that each is run with.
RUNS = {
    "switchml": ("switchml", TICK),
    LONG: ("switchml", 2 * TICK),
    "atp": ("atp", TICK),
    "a2tp": ("a2tp", TICK),
}
LEVELS = (1.0, 0.6, 0.2)
SHARES = (1.0, 0.75, 0.5)
#: Slots among which the least that give a job its peak is looked for, and how near to the peak that is.
CANDIDATES, NEAR = (225, 270, 315, 360, 405, 450, 495, 540), 0.97

Totals = dict[tuple[str, float], float]


def pair(run: str, straggler: float, slots: int) -> float:
    """Gbit/s of both jobs together."""
    system, tick = RUNS[run]
    rack = build(system, (A, B), {B: straggler} if straggler < 1 else {}, slots=slots, tick=tick)
    return sum(throughputs(rack).values())


def peak_slots() -> tuple[int, Mapping[int, float]]:
    """PTA of a job alone: the least slots with which ATP's throughput is near its peak; and the throughput by slots."""
    found = {}
    for slots in CANDIDATES:
        rack = build("atp", (A,), {}, slots=slots)
        found[slots] = throughputs(rack, 3 * SAMPLE, 3 * SAMPLE)[A]
    most = max(found.values())
    return min(slots for slots, value in found.items() if value >= NEAR * most), found


def _gains(totals: Totals, points: tuple[float, ...], system: str) -> dict[float, float]:
    """Per cent by which A2TP is above a system."""
    return {x: 100 * (totals["a2tp", x] / totals[system, x] - 1) for x in points}


def _best(name: str, paper: float, gains: dict[float, float]) -> Claim:
    """That the largest gain is within a quarter of the paper's, or beyond it."""
    x = max(gains, key=gains.__getitem__)
    return Claim(f"A2TP over {name} at its best point, per cent", paper, gains[x], ">=", 0.25)


def _least(name: str, gains: dict[float, float], why: str) -> Claim:
    """That A2TP is nowhere below; a hundredth is less than two runs of other lengths differ by."""
    x = min(gains, key=gains.__getitem__)
    ours = 1 + gains[x] / 100
    reason = "" if ours >= 0.99 else f"at {x:g} A2TP has {-gains[x]:.1f} per cent less. {why}"
    return Claim(f"A2TP over {name} at its worst point, ratio", 1.0, ours, ">=", 0.01, reason)


def _because(claim: Claim, text: str) -> Claim:
    """With this reason, where there is none yet and it does not hold."""
    return claim if claim.holds or claim.reason else replace(claim, reason=text)


def _outcome(
    title: str,
    axis: str,
    totals: Totals,
    points: tuple[float, ...],
    claims: list[Claim],
    notes: tuple[str, ...] = NOTES,
) -> Outcome:
    names = tuple(dict.fromkeys(name for name, _ in totals))
    rows = tuple((x, *(totals[name, x] for name in names)) for x in points)
    panel = Panel(title, axis, "Gbit/s", {name: [(x, totals[name, x]) for x in points] for name in names})
    return Outcome(tuple(claims), (Table("Gbit/s of both jobs", (axis, *names), rows),), (panel,), notes)


_SHORT = (
    "SwitchML's answers are spared the way to a PS, so its round trip is half of ATP's here, and half of the slots are "
    "enough for it; in the testbed hosts take most of a round trip."
)
_FRAMES = (
    "With enough slots it has neither a PS nor a window that shrinks, and its packets bear 6 per cent more gradient for a "
    "byte on the wire, which bounds hosts here; packets per second bound them in the testbed."
)
_LITTLE = (
    "A job that is alone has its bandwidth-delay product in slots; two of them have half, and A2TP sends the rest past the "
    "slots to PSs whose links are 1.4 times as fast as the workers."
)


def _compared(totals: Totals, points: tuple[float, ...], papers: Mapping[str, float]) -> list[Claim]:
    """What is claimed against both systems."""
    claims = []
    for name, paper in papers.items():
        gains = _gains(totals, points, name)
        why = {"atp": _LITTLE, LONG: _FRAMES}.get(name, f"{_SHORT} {_FRAMES}")
        if paper:
            best = _best(name, paper, gains)
            if (LONG, points[0]) in totals and name == "switchml":
                most = max(_gains(totals, points, LONG).values())
                best = _because(
                    best, f"{_SHORT} With a round trip as long as ATP's A2TP is {most:.0f} per cent above it."
                )
            claims.append(_because(best, why))
        claims.append(_least(name, gains, why))
    return claims


def fig7a() -> Outcome:
    """Total throughput of a job and a straggling one against the straggling level, 450 slots."""
    names = [name for name in RUNS if name != LONG]
    totals = {(name, level): pair(name, level, ALL_SLOTS) for name in names for level in LEVELS}
    claims = _compared(totals, LEVELS, {"switchml": 0.0, "atp": 0.0})
    for name in ("switchml", "atp"):
        claims.append(
            Claim(
                f"{name}: throughput at level {LEVELS[-1]} over that at {LEVELS[0]}",
                1.0,
                totals[name, LEVELS[-1]] / totals[name, LEVELS[0]],
                "<=",
            )
        )
    return _outcome("450 slots", "straggling level", totals, LEVELS, claims)


def fig7b() -> Outcome:
    """Total throughput of a job and a straggling one against slots, from 100 to 50 per cent of the measured PTA."""
    peak, alone = peak_slots()
    level = STRAGGLER / HOST
    totals = {(name, share): pair(name, level, round(2 * peak * share)) for name in RUNS for share in SHARES}
    claims = [
        Claim("PTA of a job alone, slots", 450.0, float(peak), "~", 0.15),
        *_compared(totals, SHARES, {"switchml": 68.0, LONG: 0.0, "atp": 46.0}),
        Claim(
            "A2TP: throughput at the fewest slots over that at the most",
            1.0,
            totals["a2tp", SHARES[-1]] / totals["a2tp", SHARES[0]],
            ">=",
            0.05,
        ),
    ]
    measured = ", ".join(f"{slots}: {value:.1f}" for slots, value in alone.items())
    notes = (
        *NOTES,
        f"PTA of two jobs is twice that of one, {2 * peak} slots. ATP alone by slots, Gbit/s: {measured}.",
    )
    return _outcome("straggler at 13 Gbit/s", "share of PTA", totals, SHARES, claims, notes)


def fig7() -> Outcome:
    """Both parts."""
    return joined({"a": fig7a(), "b": fig7b()})
