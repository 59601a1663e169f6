"""GOAT's Fig. 13 to 16: bytes at the PS, in the network and on links, in the paper's two networks.

The baselines' numbers depend on how asynchrony meets shared slots; the paper does not say. The model is stated in
:mod:`inanet.planning.goat.baselines` and every choice in it is swept: when a slot is free again, where sums are added, what
ESA's priorities are, which of equal paths is taken, around which mean rates are drawn. Claims are judged under
:data:`PUBLISHED`, the systems as their papers describe them, and again under what is best for each baseline.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from inanet.papers.claims import Claim, ratio, reduction
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.goat.baselines import Policy, Priority, Release, Traffic, routes, sending_rates, share
from inanet.planning.goat.instance import from_graph
from inanet.planning.goat.krgs import schedule
from inanet.planning.goat.submodels import SubModel, alexnet, partition
from inanet.planning.goat.topologies import fat_tree, leaf_spine, make_programmable, place

SEEDS = (1, 2, 3)
#: What each worker sends, in the paper; AlexNet's own tensors as float32 are 244 MB, and are scaled.
GRADIENT = 221_000_000
#: Parts of layers, as in the scheduler's marks.
AT_MOST = 4_000_000
DEVIATION = 0.2
NETWORKS: Mapping[str, Callable[[], Any]] = {"leaf-spine": leaf_spine, "fat-tree": fat_tree}
WORKERS = {"leaf-spine": (15, 25, 35, 45), "fat-tree": (20, 40, 60, 80)}
#: GOAT as GINA has it, and with the PS counted as one link further away than it is.
SPARING = "GOAT sparing the PS"
GOATS: Mapping[str, float] = {"GOAT": 0.0, SPARING: 1.0}
#: Schemes in the paper's order.
SCHEMES: Mapping[str, Policy | None] = {
    **dict.fromkeys(GOATS),
    "ESA": "esa",
    "ATP": "atp",
    "Geryon": "none",
}


@dataclass(frozen=True, slots=True)
class Model:
    """One reading of how fragments share slots; see :mod:`inanet.planning.goat.baselines`."""

    release: Release = "ack"
    again: bool = True
    priority: Priority = "late"
    favour_programmable: bool = False
    mean: float = 1.0


PUBLISHED = Model()


def submodels() -> tuple[SubModel, ...]:
    """AlexNet's layers, scaled to the paper's size and cut."""
    layers = alexnet()
    whole = sum(size for _, size in layers)
    return partition([(name, max(4, size * GRADIENT // whole // 4 * 4)) for name, size in layers], AT_MOST)


@dataclass(frozen=True, slots=True)
class Case:
    """A network, a number of workers, a deviation of their rates."""

    network: str
    workers: int
    deviation: float = DEVIATION


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the seeds: traffic by scheme, and the bound of GOAT's cost, byte-links (0 if it was not run)."""

    traffic: Mapping[str, Traffic]
    bound: float


def _mean(values: Iterable[Traffic]) -> Traffic:
    several = list(values)
    names = ("links", "ps", "direct", "sent")
    return Traffic(**{name: statistics.fmean(getattr(its, name) for its in several) for name in names})


def simulate(
    case: Case,
    models: Iterable[Model] = (PUBLISHED,),
    schemes: Iterable[str] = tuple(SCHEMES),
    seeds: tuple[int, ...] = SEEDS,
) -> dict[Model, Means]:
    """Every scheme in a case, by model; the schedule of GOAT depends on none of them."""
    found: dict[Model, dict[str, list[Traffic]]] = {model: {name: [] for name in schemes} for model in models}
    bounds = []
    parts = submodels()
    size = float(sum(part.size for part in parts))
    for seed in seeds:
        graph = NETWORKS[case.network]()
        make_programmable(graph, seed)
        ps, workers = place(graph, case.workers, seed)
        instance = from_graph(graph, ps, workers, parts)
        goats = {}
        for name in [name for name in GOATS if name in schemes]:
            planned = schedule(instance, seed, method="columns", spare=GOATS[name])
            total, direct = planned.ps_bytes()
            goats[name] = Traffic(planned.cost, total, direct, size * case.workers)
            bounds.append(planned.relaxed.bound)
        for model, its in found.items():
            ways = routes(graph, ps, workers, seed, favour_programmable=model.favour_programmable)
            rates = sending_rates(case.workers, case.deviation, seed, model.mean)
            for scheme in its:
                policy = SCHEMES[scheme]
                its[scheme].append(
                    goats[scheme]
                    if policy is None
                    else share(
                        ways,
                        size,
                        rates,
                        policy,
                        priority=model.priority,
                        release=model.release,
                        again=model.again,
                    )
                )
    bound = statistics.fmean(bounds) if bounds else 0.0
    return {
        model: Means({name: _mean(runs) for name, runs in its.items()}, bound) for model, its in found.items()
    }


def sweep(case: Case) -> dict[tuple[str, Model], Traffic]:
    """ESA and ATP under every model."""
    models = [
        Model(release, again, priority, favour, mean)
        for release, again, priority, favour, mean in product(
            get_args(Release), (True, False), get_args(Priority), (False, True), (1.0, 0.5)
        )
    ]
    found = {}
    for model, its in simulate(case, models, ("ESA", "ATP")).items():
        found["ESA", model] = its.traffic["ESA"]
        if model.priority == "late":
            found["ATP", model] = its.traffic["ATP"]
    return found


def _sweep_table(title: str, swept: Mapping[tuple[str, Model], Traffic]) -> Table:
    rows = tuple(
        (
            scheme,
            model.release,
            "again" if model.again else "once",
            model.priority if scheme == "ESA" else "-",
            "programmable" if model.favour_programmable else "any",
            model.mean,
            its.links / 1e9,
            its.ps / 1e9,
            its.direct / 1e9,
            its.in_network / 1e9,
        )
        for (scheme, model), its in swept.items()
    )
    columns = (
        "scheme",
        "slot free",
        "sums added",
        "priority",
        "paths",
        "mean rate",
        "GB-links",
        "GB at PS",
        "not aggregated",
        "in network",
    )
    return Table(title, columns, rows)


def _growth(
    value: Callable[[Traffic], float], unit: str
) -> tuple[dict[Case, Means], Table, tuple[Panel, ...]]:
    """Both networks against workers, under the published model."""
    cases = [Case(network, count) for network, counts in WORKERS.items() for count in counts]
    found = {case: simulate(case)[PUBLISHED] for case in cases}
    rows = tuple(
        (
            case.network,
            case.workers,
            *(value(its.traffic[scheme]) / 1e9 for scheme in SCHEMES),
            *(its.traffic[scheme].ps / 1e9 for scheme in SCHEMES),
        )
        for case, its in found.items()
    )
    columns = ("network", "workers", *SCHEMES, *(f"{scheme} at PS" for scheme in SCHEMES))
    panels = tuple(
        Panel(
            network,
            "workers",
            unit,
            {
                scheme: [
                    (case.workers, value(its.traffic[scheme]) / 1e9)
                    for case, its in found.items()
                    if case.network == network
                ]
                for scheme in SCHEMES
            },
        )
        for network in NETWORKS
    )
    return found, Table(f"{unit}; all bytes at the PS beside it", columns, rows), panels


_BEST = "Under the model that is best for it ({}): {:.1f}"
NOTES = (
    f"{SPARING}: workers go one link out of their way to a switch rather than send to the PS what is not aggregated.",
    f"{len(SEEDS)} seeded placements each; GOAT's cost is within a few tenths of a per cent of the LP's bound.",
    "Baselines: rates normal around the line rate, cut off at it, deviation 0.2; slots held until the PS has the "
    "fragment; ESA: later fragments win; any of the shortest paths. The sweep varies each of these.",
)


def _describe(scheme: str, model: Model) -> str:
    words = [
        f"slot free {'when the PS answers' if model.release == 'ack' else 'at once'}",
        f"sums added {'again' if model.again else 'once'}",
        f"mean rate {model.mean}",
    ]
    if scheme == "ESA":
        words.append(f"{model.priority} fragments win")
    words.append("paths through programmable switches" if model.favour_programmable else "any shortest path")
    return ", ".join(words)


def _best(
    swept: Mapping[tuple[str, Model], Traffic], scheme: str, key: Callable[[Traffic], float]
) -> tuple[Model, Traffic]:
    """The model under which a baseline does best, by the smallest ``key``."""
    model = min((model for name, model in swept if name == scheme), key=lambda its: key(swept[scheme, its]))
    return model, swept[scheme, model]


def _reductions(
    goat: Traffic,
    its: Mapping[str, Traffic],
    swept: Mapping[tuple[str, Model], Traffic],
    value: Callable[[Traffic], float],
    paper: Mapping[str, float],
    what: str,
    why: Callable[[str], str],
) -> list[Claim]:
    """One claim for each baseline, in per cent below it; the reason has the baseline's best case."""
    claims = []
    for scheme, least in paper.items():
        ours = reduction(value(goat), value(its[scheme]))
        reason = why(scheme) if ours < least else ""
        if scheme != "Geryon":
            model, best = _best(swept, scheme, value)
            reason += " " * bool(reason) + _BEST.format(
                _describe(scheme, model), reduction(value(goat), value(best))
            )
        claims.append(Claim(f"{what} below {scheme}'s, per cent", least, ours, ">=", reason=reason))
    return claims


def at_the_ps() -> Outcome:
    """Fig. 13: what reaches the PS without having been aggregated, leaf-spine with 35 workers."""
    case = Case("leaf-spine", 35)
    found, table, panels = _growth(lambda its: its.direct, "GB at the PS, not aggregated")
    its, swept = found[case].traffic, sweep(case)
    goat = its["GOAT"]

    def why(scheme: str) -> str:
        return (
            f"{goat.direct / 1e9:.2f} GB are sent straight to the PS by workers that are nearer to it than to the "
            "switch of their sub-model: GINA minimises bytes times links, not the PS's load."
        )

    paper = {"ESA": 98.9, "ATP": 99.1, "Geryon": 99.2}
    claims = _reductions(goat, its, swept, lambda one: one.direct, paper, "not aggregated at the PS", why)
    claims += _reductions(
        its[SPARING], its, swept, lambda one: one.direct, paper, f"{SPARING}: not aggregated at the PS", why
    )
    return Outcome(
        tuple(claims), (table, _sweep_table("models, leaf-spine, 35 workers", swept)), panels, NOTES
    )


def in_network() -> Outcome:
    """Fig. 14: sent less received by the PS, fat-tree with 40 workers."""
    case = Case("fat-tree", 40)
    found, table, panels = _growth(lambda its: its.in_network, "GB aggregated in the network")
    its, swept = found[case].traffic, sweep(case)
    claims = []
    for mine, (scheme, paper) in product(GOATS, (("ESA", 3.0), ("ATP", 5.0))):
        ours = ratio(its[mine].in_network, its[scheme].in_network)
        model, best = _best(swept, scheme, lambda one: -one.in_network)
        text = _BEST.format(_describe(scheme, model), ratio(its[mine].in_network, best.in_network))
        most = its[mine].sent / its[scheme].in_network if its[scheme].in_network else float("inf")
        if ours < paper:
            text = f"aggregating every byte in the network would give {most:.1f} under this model. {text}"
        what = f"{mine}: aggregated in the network, times {scheme}'s"
        claims.append(Claim(what, paper, ours, ">=", reason=text))
    return Outcome(tuple(claims), (table, _sweep_table("models, fat-tree, 40 workers", swept)), panels, NOTES)


def overhead() -> Outcome:
    """Fig. 15: bytes times links, leaf-spine with 35 workers."""
    case = Case("leaf-spine", 35)
    found, table, panels = _growth(lambda its: its.links, "GB times links")
    its, swept = found[case].traffic, sweep(case)

    def why(scheme: str) -> str:
        most = reduction(found[case].bound, its[scheme].links)
        return f"no schedule can exceed {most:.1f} here, says the bound of the LP."

    paper = {"ESA": 31.1, "ATP": 34.3, "Geryon": 63.1}
    claims = _reductions(its["GOAT"], its, swept, lambda one: one.links, paper, "byte-links", why)
    claims += _reductions(
        its[SPARING], its, swept, lambda one: one.links, paper, f"{SPARING}: byte-links", why
    )
    return Outcome(
        tuple(claims), (table, _sweep_table("models, leaf-spine, 35 workers", swept)), panels, NOTES
    )


DEVIATIONS = (0.0, 0.1, 0.2, 0.3, 0.4)


def deviation() -> Outcome:
    """Fig. 16: bytes times links against the deviation of the rates, the paper's default numbers of workers."""
    defaults = {"leaf-spine": 35, "fat-tree": 40}
    models = (PUBLISHED, Model(favour_programmable=True))
    found = {
        (network, sd): simulate(Case(network, count, sd), models)
        for network, count in defaults.items()
        for sd in DEVIATIONS
    }
    rows = tuple(
        (
            network,
            "programmable" if model.favour_programmable else "any",
            sd,
            *(its[model].traffic[scheme].links / 1e9 for scheme in SCHEMES),
        )
        for model in models
        for (network, sd), its in found.items()
    )
    claims = []
    for network in defaults:
        for scheme in ("ESA", "ATP"):
            curve = [found[network, sd][PUBLISHED].traffic[scheme].links / 1e9 for sd in DEVIATIONS]
            goat = found[network, 0.0][PUBLISHED].traffic["GOAT"].links / 1e9
            favoured = found[network, 0.0][models[1]].traffic[scheme].links / 1e9
            claims.append(
                Claim(
                    f"{network}: {scheme} at least as good as GOAT at deviation 0, GB-links",
                    goat,
                    curve[0],
                    "<=",
                    reason="many shortest paths meet no programmable switch; along paths chosen to meet them: "
                    f"{favoured:.2f}",
                )
            )
            claims.append(
                Claim(
                    f"{network}: {scheme}'s cost grows with the deviation, GB-links",
                    curve[0],
                    curve[-1],
                    ">=",
                )
            )
    panels = tuple(
        Panel(
            network,
            "standard deviation of rates",
            "GB times links",
            {
                scheme: [(sd, found[network, sd][PUBLISHED].traffic[scheme].links / 1e9) for sd in DEVIATIONS]
                for scheme in SCHEMES
            },
        )
        for network in defaults
    )
    return Outcome(
        tuple(claims),
        (Table("GB times links", ("network", "paths", "deviation", *SCHEMES), rows),),
        panels,
        NOTES,
    )
