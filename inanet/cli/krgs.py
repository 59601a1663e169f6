"""``ina plan --scheduler krgs``: GOAT's schedule for a topology, stage by stage."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inanet.lab.model import Topology
from inanet.planning.goat.instance import SLOT_BYTES, from_graph
from inanet.planning.goat.krgs import Schedule, schedule
from inanet.planning.goat.submodels import FRAGMENT_VALUES, VALUE_BYTES, alexnet, layers_of, partition
from inanet.planning.goat.topologies import fat_tree, from_lab, leaf_spine, make_programmable, place
from inanet.service.exits import Exit, Failure
from inanet.units import parse_bytes

if TYPE_CHECKING:
    from inanet.planning.goat.topologies import Graph

SCHEMA = 1
#: Largest part of a tensor that is scheduled as a whole, bytes; and at most this share of a register file.
AT_MOST, SHARE = 4_000_000, 8
#: The paper's networks.
GENERATED: dict[str, Callable[[], "Graph"]] = {"leaf-spine": leaf_spine, "fat-tree": fat_tree}


class CannotSchedule(Failure):
    """The topology or the options leave nothing to schedule."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Job:
    """What is scheduled: a network, a PS and workers in it, and ``names`` of the switches that sum if they are known."""

    title: str
    graph: "Graph"
    ps: str
    workers: tuple[str, ...]
    names: tuple[str, ...] | None


def job_of(name: str, seed: int, read: Callable[[str], Topology]) -> Job:
    """``fat-tree:40`` and ``leaf-spine:35`` are the paper's networks with so many workers, PS, workers and the fifth of the
    switches that sums drawn from the seed; everything else is what ``read`` knows, all of whose switches sum.

    Raises :class:`CannotSchedule` for more workers than there are servers, and topologies without PS or worker.
    """
    kind, _, count = name.partition(":")
    if kind in GENERATED and count.isdecimal():
        graph = GENERATED[kind]()
        try:
            ps, workers = place(graph, int(count), seed)
        except ValueError as error:
            raise CannotSchedule(str(error)) from None
        return Job(name, graph, ps, workers, None)
    topology = read(name)
    roots, hosts = topology.roots(), tuple(host.name for host in topology.workers())
    if not roots or not hosts:
        raise CannotSchedule(f"{topology.name!r} has no ps or no worker: GOAT schedules from workers to a PS")
    return Job(name, from_lab(topology), roots[0], hosts, tuple(switch.name for switch in topology.switch))


def layers(text: str) -> list[tuple[str, int]]:
    """Layers that ``--layers`` names: ``alexnet``, sizes like ``4 MB,100 kB``, or ``module:name`` of a model, or of what
    makes one when it is called; anything with ``parameters()``.

    Raises :class:`CannotSchedule` for what is none of these.
    """
    if text == "alexnet":
        return alexnet()
    module, _, attribute = text.partition(":")
    try:
        if not attribute:
            sizes = [one.strip() for one in text.split(",")]
            return layers_of([parse_bytes(int(one) if one.isdecimal() else one) for one in sizes])
        found = getattr(importlib.import_module(module), attribute)
        return layers_of(found if not callable(found) or hasattr(found, "parameters") else found())
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise CannotSchedule(
            f"--layers {text!r}: {error}; allowed: alexnet, sizes like '4 MB,100 kB', module:name of a model"
        ) from None


def plan_krgs(
    job: Job,
    model: list[tuple[str, int]],
    memory: int,
    seed: int,
    programmable: tuple[str, ...],
    spare: float = 0.0,
) -> Schedule:
    """The schedule of a model's layers on a network whose switches (or those named) have ``memory`` register bytes;
    ``spare`` is what a worker may go out of its way to spare the PS, in links.

    Raises :class:`CannotSchedule` for unknown switches, and too little memory.
    """
    if memory < SLOT_BYTES * SHARE:
        raise CannotSchedule(f"{memory} B of registers: at least {SLOT_BYTES * SHARE} B are needed")
    try:
        make_programmable(job.graph, seed, memory=memory, switches=programmable or job.names)
    except ValueError as error:
        raise CannotSchedule(str(error)) from None
    parts = partition(model, max(FRAGMENT_VALUES * VALUE_BYTES, min(AT_MOST, memory // SHARE)))
    return schedule(from_graph(job.graph, job.ps, job.workers, parts), seed, spare=spare)


def _fractions(made: Schedule, g: int) -> dict[str, Any]:
    """What the relaxation and the rounding made of one sub-model: ``fraction`` x by switch, ``workers`` the share of all
    workers that y has send there, ``knapsack`` by switch, ``required`` k(g), ``rounded`` the switches chosen.
    """
    its = made.instance
    used = np.nonzero(made.relaxed.x[g] > 0)[0].tolist()
    share = its.classes.count @ made.relaxed.y[g] / len(its.workers)
    return {
        "fraction": dict(zip(its.switches, made.relaxed.x[g].tolist(), strict=True)),
        "workers": {its.switches[s]: float(share[s]) for s in used},
        "required": int(made.rounded.required[g]),
        "knapsack": {its.switches[s]: int(made.rounded.knapsack[g, s]) for s in used},
        "rounded": [its.switches[s] for s in np.nonzero(made.rounded.opened[g])[0].tolist()],
    }


def report(name: str, made: Schedule, explain: bool) -> dict[str, Any]:
    """What ``--json`` prints; byte-links, bytes, seconds. ``explain`` adds the fractional solution and the rounding."""
    its, bases = made.instance, made.bases()
    total, direct = made.ps_bytes()
    parts = []
    for g, part in enumerate(its.submodels):
        nodes: dict[str, Any] = {}
        for s in np.unique(made.nodes[g]).tolist():
            where = its.ps if s == len(its.switches) else its.switches[s]
            senders = [its.workers[w] for w in np.nonzero(made.nodes[g] == s)[0].tolist()]
            nodes[where] = {"base": bases.get((where, g)), "workers": senders}
        row: dict[str, Any] = {"name": part.name, "start": part.start, "bytes": part.size, "nodes": nodes}
        if explain:
            row |= _fractions(made, g)
        parts.append(row)
    return {
        "schema": SCHEMA,
        "ok": True,
        "scheduler": "krgs",
        "topology": name,
        "bytes": int(its.total),
        "ps": its.ps,
        "cost": made.cost,
        "lp_value": made.relaxed.value,
        "lp_bound": made.relaxed.bound,
        "rounded_cost": made.rounded_cost,
        "repaired_cost": made.repaired_cost,
        "without_aggregation": its.without_aggregation(),
        "overshoot": made.overshoot,
        "ps_bytes": total,
        "ps_bytes_not_aggregated": direct,
        "seconds": sum(made.seconds.values()),
        "submodels": parts,
    }


#: Lines of an explanation that a summary has.
_SUMMARY = 7


def lines(made: Schedule, explain: bool) -> list[str]:
    """The costs of every stage; ``explain``: what each switch holds as well, and every sub-model's way through the stages."""
    text = made.explain()
    if not explain:
        return [*text[:_SUMMARY], "# --explain shows what each switch holds, and how it came to that"]
    its = made.instance
    text.append(
        "# sub-model: bytes; x of the relaxation by switch; k(g); switches of the rounding; nodes and workers at last"
    )
    sources = made.sources()
    for g, part in enumerate(its.submodels):
        stages = _fractions(made, g)
        x = " ".join(f"{name} {value:.3f}" for name, value in stages["fraction"].items() if value) or "none"
        rounded = " ".join(stages["rounded"]) or "the PS"
        names = (*its.switches, its.ps)
        ends = ", ".join(f"{names[s]} x{sources[g, s]}" for s in np.nonzero(sources[g])[0].tolist())
        text.append(
            f"{part.name}: {part.size}; x {x}; k {stages['required']}; rounded to {rounded}; now {ends}"
        )
    return text
