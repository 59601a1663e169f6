"""``ina bench netreduce``: NetReduce against ring all-reduce on the same shaped links, with RoCE packets on wires.

All contestants are alive at once and take turns. ``netreduce`` and ``ring`` are the same queue pairs on the same hosts around
the same ina-switch; it sums the messages of the former and does not touch those of the latter. ``gloo`` is Gloo's ring
through that switch. So that its place in user space weakens no baseline, both rings also run in a second lab of the same
links, whose switches are the kernel's bridges: what NetReduce is held against is the fastest of all rings, repetition by
repetition. Needs root.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inanet.bench import bounds
from inanet.bench.contestants import GLOO
from inanet.bench.labs import LabStage, lab_stage
from inanet.bench.marks import Mark, judge, lines
from inanet.bench.measure import paired_ratio
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer
from inanet.bench.rings import ring_stage, ring_team
from inanet.bench.runs import Run, interleaved, row, started
from inanet.bench.stage import Stage
from inanet.bench.star import total_sent
from inanet.bench.tables import Column, aligned, star
from inanet.lab.library import topology as find_topology
from inanet.lab.model import Topology
from inanet.lab.namespaces import require_privileges
from inanet.proto.netreduce.ring import Sizes

#: Of what ``--json`` prints.
SCHEMA = 1
TOPOLOGIES = ("ring4", "ring8")
#: bytes of 48 whole messages: those of tensors in between are padded
SIZE = 48 * 4 * Sizes().values
NAME = "netreduce"
#: what the names of the second lab's contestants end in
BRIDGED = "-bridged"


def _marks(topology: str, hosts: int, most: float) -> list[Mark]:
    where = {"system": NAME, "topology": topology}
    return [
        Mark(f"{hosts} hosts: time over the fastest ring's", "ratio_to_ring", where, most=most),
        Mark(f"{hosts} hosts: fraction of line rate", "line_fraction", where, least=0.93),
    ]


#: the paper's claims; bytes alone would allow 0.67 and 0.57
MARKS = (*_marks("ring4", 4, 0.70), *_marks("ring8", 8, 0.62))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to run: topologies, bytes per host, and a file for what the first host of the ring sends and receives."""

    topologies: Sequence[str | Topology] = TOPOLOGIES
    size: int = SIZE
    repetitions: int = 3
    capture: Path | None = None
    say: Callable[[str], None] = field(default=lambda text: None)


def run(wanted: Wanted) -> dict[str, Any]:
    """Measure; returns what ``--json`` prints. Raises :class:`inanet.service.exits.Failure` if a contestant fails, and as
    :func:`inanet.bench.rings.ring_stage`.
    """
    require_privileges()
    chosen = [one if isinstance(one, Topology) else find_topology(one) for one in wanted.topologies]
    rows: list[dict[str, Any]] = []
    for topology in chosen:
        wanted.say(f"{topology.name}: {topology.summary}")
        rows += measured(topology, wanted.size, wanted.repetitions, wanted.capture)
    return {
        "schema": SCHEMA,
        "ok": True,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rows": rows,
        "marks": judge(MARKS, rows),
        "capture": None if wanted.capture is None else str(wanted.capture),
    }


def _rings(suffix: str = "") -> list[Peer]:
    """Ring all-reduce on RoCE and, where torch is installed, on TCP."""

    def ring(stage: Stage) -> Team:
        assert isinstance(stage, LabStage)
        return ring_team(stage, f"ring{suffix}", "ring")

    peers = [Peer(f"ring{suffix}", (), ring, "ring")]
    if importlib.util.find_spec("torch") is not None:
        peers.append(Peer(f"gloo{suffix}", (), GLOO.start, "ring"))
    return peers


def measured(
    topology: Topology, size: int, repetitions: int, capture: Path | None = None
) -> list[dict[str, Any]]:
    """Rows of one topology, NetReduce's first."""

    def netreduce(stage: Stage) -> Team:
        assert isinstance(stage, LabStage)
        return ring_team(stage, NAME, "switch", capture)

    with ExitStack() as stack:
        spliced = stack.enter_context(ring_stage(topology))
        teams = stack.enter_context(started([Peer(NAME, (), netreduce, "spliced"), *_rings()], spliced))
        bridged = stack.enter_context(lab_stage(topology.with_switches("bridge")))
        teams |= stack.enter_context(started(_rings(BRIDGED), bridged))
        runs = interleaved(teams, size, repetitions, sent=lambda: total_sent([spliced, bridged]))
    return rows_of(topology, size, runs)


def rows_of(topology: Topology, size: int, runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row for each contestant; NetReduce's has its ratios to every ring and to the fastest of each repetition."""
    times = {system: [one.sample.seconds for one in mine] for system, mine in runs.items()}
    rings = {system: mine for system, mine in times.items() if system != NAME}
    fastest = [min(each) for each in zip(*rings.values(), strict=True)]
    workers = topology.workers()
    over_tcp = bounds.ring(topology, size)
    limits = {NAME: bounds.spliced(topology, size), "gloo": over_tcp, "gloo" + BRIDGED: over_tcp}
    found = []
    for system, mine in runs.items():
        limit = limits.get(system, over_tcp * bounds.ROCE / bounds.SEGMENT)
        made = row(
            NAME,
            system,
            len(workers),
            size,
            mine,
            link=workers[0].link.sends,
            limit=limit,
            topology=topology.name,
        )
        made["line_fraction"] = limit / made["seconds"] if limit else None
        if system == NAME:
            made["ratio_to_ring"] = paired_ratio(times[NAME], fastest)
            made["ratios"] = {ring: paired_ratio(times[NAME], those) for ring, those in rings.items()}
        found.append(made)
    return found


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """Rows for people, then marks."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; medians of interleaved repetitions"
    yield "# of line rate: bytes on the wire that the traffic needs, over what the link carries in the time"
    ratios = {one["topology"]: one["ratios"] for one in result["rows"] if "ratios" in one}
    columns: dict[str, Column] = {
        "system": "",
        "n": "d",
        "bytes": "d",
        "ms": ("seconds", ".1f", 1e3),
        "of line rate": ("line_fraction", ".3f"),
        "netreduce/this": ("ratio", ".3f"),
        "CPU s/GB": ("cpu_s_per_gb", ".2f"),
        "": ("short_of_cpu", star),
    }
    rows = (row | {"ratio": ratios[row["topology"]].get(row["system"])} for row in result["rows"])
    yield from aligned(columns, rows)
    if result["capture"] is not None:
        yield f"# packets of rank 0: {result['capture']}"
    yield from lines(result["marks"])
