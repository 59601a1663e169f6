"""``ina plan --scheduler krgs``: GOAT's schedule for a topology, stage by stage."""

from typing import Any

import numpy as np

from inanet.control.exits import Exit, Failure
from inanet.control.goat.instance import SLOT_BYTES, from_graph
from inanet.control.goat.krgs import Schedule, schedule
from inanet.control.goat.submodels import FRAGMENT_VALUES, VALUE_BYTES, partition
from inanet.control.goat.topologies import from_lab, make_programmable
from inanet.lab.model import Topology

SCHEMA = 1
#: Largest part of a tensor that is scheduled as a whole, bytes; and at most this share of a register file.
AT_MOST, SHARE = 4_000_000, 8


class CannotSchedule(Failure):
    """The topology or the options leave nothing to schedule."""

    code = Exit.USAGE


def plan_krgs(
    topology: Topology, size: int, memory: int, seed: int, programmable: tuple[str, ...]
) -> Schedule:
    """The schedule of ``size`` bytes on a topology whose switches (or those named) have ``memory`` register bytes.

    Raises :class:`CannotSchedule` for topologies without PS or worker, unknown switches, and too little memory.
    """
    roots, workers = topology.roots(), [host.name for host in topology.workers()]
    if not roots or not workers:
        raise CannotSchedule(f"{topology.name!r} has no ps or no worker: GOAT schedules from workers to a PS")
    if memory < SLOT_BYTES * SHARE:
        raise CannotSchedule(f"{memory} B of registers: at least {SLOT_BYTES * SHARE} B are needed")
    graph = from_lab(topology)
    switches = programmable or tuple(switch.name for switch in topology.switch)
    try:
        make_programmable(graph, seed, memory=memory, switches=switches)
    except ValueError as error:
        raise CannotSchedule(str(error)) from None
    parts = partition([("tensor", size)], max(FRAGMENT_VALUES * VALUE_BYTES, min(AT_MOST, memory // SHARE)))
    return schedule(from_graph(graph, roots[0], workers, parts), seed)


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
            row["fraction"] = dict(zip(its.switches, made.relaxed.x[g].tolist(), strict=True))
            row["required"] = int(made.rounded.required[g])
            opened = np.nonzero(made.rounded.opened[g])[0].tolist()
            row["rounded"] = [its.switches[s] for s in opened]
        parts.append(row)
    return {
        "schema": SCHEMA,
        "ok": True,
        "scheduler": "krgs",
        "topology": name,
        "bytes": int(its.total),
        "ps": its.ps,
        "cost": made.cost,
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
    """The costs of every stage; ``explain``: what each switch holds as well."""
    text = made.explain()
    return text if explain else [*text[:_SUMMARY], "# --explain shows what each switch holds"]
