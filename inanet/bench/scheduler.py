"""``ina bench scheduler``: how long GOAT's scheduler takes, and how far from the bound it stays.

The first instance is the paper's fat-tree: 80 switches of which 16 can aggregate, 40 workers, AlexNet's layers cut to at
most 4 MB. Then workers grow, in fat-trees with as many servers, to 1,000. On instances where the plain program is not
too slow it is solved beside the column generation, so that the loss of the latter is seen. On small instances the cost is
compared with the exact optimum (rounded probabilities: the proof bounds memory only).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.bench.measure import median
from inanet.bench.tables import Column, aligned
from inanet.planning.goat.instance import Instance, from_graph
from inanet.planning.goat.krgs import Method, Schedule, schedule
from inanet.planning.goat.relaxation import solve_exactly
from inanet.planning.goat.submodels import alexnet, layers_of, partition
from inanet.planning.goat.topologies import fat_tree, leaf_spine, make_programmable, place

#: Largest part of a layer, bytes.
AT_MOST = 4_000_000
#: Workers up to which the plain program is solved as well.
PLAIN_UP_TO = 150


@dataclass(frozen=True, slots=True)
class Size:
    """A fat-tree and the workers in it."""

    ports: int
    servers_per_edge: int
    workers: int


#: The first is the paper's.
GROWTH = (Size(8, 6, 40), Size(8, 6, 150), Size(12, 8, 400), Size(16, 8, 1000))


def sizes_for(workers: tuple[int, ...]) -> tuple[Size, ...]:
    """For each number of workers the smallest tree of :data:`GROWTH` with a server for each and one for the PS.

    Raises ``ValueError`` for more than the largest holds.
    """
    found = []
    for count in workers:
        fits = [size for size in GROWTH if size.ports**2 // 2 * size.servers_per_edge > count]
        if not fits:
            raise ValueError(f"{count} workers do not fit the largest tree")
        found.append(Size(fits[0].ports, fits[0].servers_per_edge, count))
    return tuple(found)


def instance(size: Size, seed: int) -> Instance:
    """A fifth of the switches programmable with 64 MB; PS, workers and switches drawn from the seed."""
    graph = fat_tree(size.ports, size.servers_per_edge)
    make_programmable(graph, seed)
    ps, workers = place(graph, size.workers, seed)
    return from_graph(graph, ps, workers, partition(alexnet(), AT_MOST))


def small(seed: int) -> Instance:
    """Few enough sub-models and switches that the exact program is solved at once; memory is scarce."""
    rng = np.random.default_rng(seed)
    graph = leaf_spine(2, 3, 15) if seed % 2 else fat_tree(4, 2)
    make_programmable(graph, seed, share=0.2, memory=int(rng.integers(1_000_000, 3_000_000)))
    ps, workers = place(graph, int(rng.integers(5, 10)), seed)
    sizes = [int(units) * 256 for units in rng.integers(500, 8_000, 8)]
    return from_graph(graph, ps, workers, partition(layers_of(sizes), 2_000_000))


def against_exact(instances: int) -> dict[str, Any]:
    """Cost over the exact optimum on small seeded instances: ``ratios``, their ``median`` and ``worst``."""
    ratios = []
    for seed in range(instances):
        one = small(seed)
        ratios.append(schedule(one, seed).cost / solve_exactly(one).cost)
    return {"ratios": ratios, "median": median(ratios), "worst": max(ratios)}


def _row(made: Schedule) -> dict[str, Any]:
    its = made.instance
    return {
        "workers": len(its.workers),
        "switches": len(its.switches),
        "submodels": len(its.submodels),
        "classes": len(its.classes.count),
        "method": made.relaxed.method,
        "variables": made.relaxed.variables,
        "seconds": sum(made.seconds.values()),
        "cost": made.cost,
        "lp_value": made.relaxed.value,
        "lp_bound": made.relaxed.bound,
        "lp_loss": made.relaxed.value / made.relaxed.bound - 1.0,
        "ratio": made.ratio,
        "rounded_cost": made.rounded_cost,
        "overshoot": made.overshoot,
        "without_aggregation": its.without_aggregation(),
    }


def run(sizes: tuple[Size, ...], seed: int, repetitions: int = 1, *, exact: int = 12) -> dict[str, Any]:
    """Schedule every size; seconds are medians of ``repetitions``, costs the same in all of them. ``exact`` small
    instances are compared with their optimum.

    The first row's figures stand at the top. Raises :class:`~inanet.planning.goat.krgs.DoesNotFit` if a schedule did not
    fit the register files.
    """
    rows = []
    for size in sizes:
        one = instance(size, seed)
        methods: tuple[Method, ...] = ("plain", "columns") if size.workers <= PLAIN_UP_TO else ("columns",)
        for method in methods:
            runs = [schedule(one, seed, method=method) for _ in range(repetitions)]
            runs[0].bases()
            row = _row(runs[0])
            row["seconds"] = median([sum(made.seconds.values()) for made in runs])
            rows.append(row)
    first = {key: rows[0][key] for key in ("seconds", "cost", "lp_bound", "overshoot")}
    yardstick = against_exact(exact)
    return {"schema": 1, "ok": True, "seed": seed, **first, "exact": yardstick, "rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    """Lines for people; costs in GB-links."""
    lines = [
        "# AlexNet's layers cut to at most 4 MB, fat-trees, a fifth of the switches programmable with 64 MB each",
        "# cost, bound: gigabytes times links. loss: of the relaxation against its bound. overshoot: of the rounding,",
        "# largest load over memory, before the repair.",
    ]
    columns: dict[str, Column] = {
        "workers": "d",
        "switches": "d",
        "method": "",
        "variables": "d",
        "seconds": ".3f",
        "cost": ("cost", ".2f", 1e-9),
        "bound": ("lp_bound", ".2f", 1e-9),
        "ratio": ".4f",
        "loss": ("lp_loss", ".1e"),
        "overshoot": ".3f",
    }
    lines += aligned(columns, result["rows"])
    its = result["exact"]
    lines.append(
        f"# cost over the exact optimum, {len(its['ratios'])} small instances: median {its['median']:.4f}, "
        f"worst {its['worst']:.4f}"
    )
    return lines
