"""``ina bench plan``: what ``ina plan`` chooses for labs, how long that takes there, and Gloo's ring beside it.

A ring that is chosen is run by Gloo, so its row compares the prediction with that; a fabric runs as the chosen plan has
it, aggregators beside workers included. Needs root.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inanet.bench import bounds, contestants  # noqa: F401  registers them
from inanet.bench.labs import lab_stage
from inanet.bench.measure import idle_share, median, paired_ratio, short_of_cpu, ticks
from inanet.bench.registry import Peer, peers
from inanet.bench.runs import Run, interleaved, started
from inanet.bench.tables import Column, aligned, star
from inanet.lab.library import topology as find
from inanet.lab.model import Topology
from inanet.lab.network import fleet
from inanet.planning.costs import Costs
from inanet.planning.prices import Choice, choose

#: Stars with 2, 4 and 8 hosts; one server with a NIC four times as fast; two and four equal servers; XAgg's Fig. 1 and
#: its Fig. 12, scaled; two racks with a thin uplink.
TOPOLOGIES = (
    "star2",
    "star4",
    "star8",
    "star4-fast-aggregator",
    "star4-two-aggregators",
    "star4-four-aggregators",
    "xagg-fig1",
    "xagg-fig12",
    "two-rack",
)
#: What is claimed: predictions are this near, and no choice is slower than Gloo's ring by more.
MOST_ERROR, WORST_RATIO = 0.15, 1.05
_OURS, _GLOO = "xagg-udp", "gloo"


def contestants_for(choice: Choice) -> tuple[Peer, ...]:
    """Gloo, and the fabric unless the choice is a ring. Raises :class:`inanet.service.exits.Failure` without torch."""
    from inanet.service.exits import Exit, Failure

    wanted = (_GLOO, _OURS) if choice.helps else (_GLOO,)
    found = tuple(peer for peer in peers("star") if peer.name in wanted)
    for peer in found:
        if lacking := peer.lacking():
            failure = Failure(f"{peer.name} cannot take part: {lacking}")
            failure.code = Exit.MISSING
            raise failure
    return found


def measure(
    topology: Topology, size: int, repetitions: int, costs: Costs, cores: int | None, negotiate: bool = False
) -> dict[str, Any]:
    """One row: plan, run, compare. Repetitions of Gloo and of the plan alternate, after one that does not count."""
    choice = choose(fleet(topology, size, shared_cores=cores), size, costs)
    plan = choice.chosen.plan if choice.helps else None
    who = contestants_for(choice)
    with lab_stage(topology, plan, negotiate) as stage, started(who, stage) as teams:
        before = ticks()
        runs = interleaved(teams, size, repetitions, bounds.lateness(topology, size), stage.sent)
        idle = idle_share(before, ticks())
    return row(topology.name, len(topology.workers()), size, choice, runs, idle)


def row(
    topology: str, world: int, size: int, choice: Choice, runs: dict[str, list[Run]], idle: float | None
) -> dict[str, Any]:
    """What one topology came to. Times in seconds; ``prediction_error`` is a share of what was measured."""
    gloo = [run.sample.seconds for run in runs[_GLOO]]
    mine = [run.sample.seconds for run in runs[_OURS]] if choice.helps else gloo
    measured = median(mine)
    return {
        "topology": topology,
        "plan": choice.chosen.plan.name,
        "kind": choice.chosen.plan.kind,
        "n": world,
        "bytes": size,
        "predicted_seconds": choice.chosen.seconds,
        "predicted_links": choice.chosen.links,
        "predicted_processors": choice.chosen.processors,
        "measured_seconds": measured,
        "prediction_error": abs(choice.chosen.seconds - measured) / measured,
        "gloo_seconds": median(gloo),
        "gloo_predicted_seconds": choice.ring.seconds,
        "ratio_to_gloo": paired_ratio(mine, gloo),
        "bound": choice.chosen.bound,
        "samples": mine,
        "gloo_samples": gloo,
        "idle": idle,
        "short_of_cpu": short_of_cpu([idle]),
    }


def run(
    topologies: Sequence[str],
    size: int,
    repetitions: int,
    costs: Costs,
    say: Callable[[str], None],
    negotiate: bool = False,
) -> dict[str, Any]:
    """All ``topologies``, one after the other; ``say`` hears which. Returns what ``--json`` prints.

    ``ok``: the run is complete. ``holds``: errors and ratios are within :data:`MOST_ERROR` and :data:`WORST_RATIO`.
    """
    cores = os.cpu_count()
    rows = []
    for name in topologies:
        say(name)
        rows.append(measure(find(name), size, repetitions, costs, cores, negotiate))
    return summary(rows) | {
        "cores": cores,
        "load": os.getloadavg()[0],
        "costs_measured": costs.measured,
        "negotiated": negotiate,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows, and the worst of them."""
    error = max((row["prediction_error"] for row in rows), default=0.0)
    ratio = max((row["ratio_to_gloo"] for row in rows), default=0.0)
    return {
        "schema": 1,
        "ok": True,
        "rows": rows,
        "max_prediction_error": error,
        "worst_ratio_to_gloo": ratio,
        "holds": error <= MOST_ERROR and ratio <= WORST_RATIO,
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; medians, seconds; * short of processors"
    columns: dict[str, Column] = {
        "topology": "",
        "n": "d",
        "predicted": ("predicted_seconds", ".3f"),
        "measured": ("measured_seconds", ".3f"),
        "error": ("prediction_error", ".1%"),
        "gloo": ("gloo_seconds", ".3f"),
        "vs gloo": ("ratio_to_gloo", ".3f"),
        "plan": "",
        "": ("short_of_cpu", star),
    }
    yield from aligned(columns, result["rows"])
    holds = "holds" if result["holds"] else "does not hold"
    yield (
        f"# largest error {result['max_prediction_error']:.1%} (claimed: {MOST_ERROR:.0%}), worst ratio to Gloo "
        f"{result['worst_ratio_to_gloo']:.3f} (claimed: {WORST_RATIO:g}): {holds}"
    )
