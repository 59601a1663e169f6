"""Table ``star``: hosts behind a switch, in a lab made for the run."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from inanet.bench import bounds
from inanet.bench.labs import LabStage, lab_stage
from inanet.bench.measure import Limit, paired_ratio
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer
from inanet.bench.rings import ring_stage
from inanet.bench.runs import interleaved, row, started
from inanet.lab.model import Topology

#: Topologies of the table. Servers have a faster NIC, or the tensor is split over several, as far as two cores can
#: carry it: with one server and equal links the arithmetic is against it.
STARS = ("star2", "star4-fast-aggregator", "star4-four-aggregators", "star8-fast-aggregator")

BOUNDS = {
    "tree": bounds.tree,
    "server": bounds.server,
    "ring": bounds.ring,
    "synchronous": bounds.synchronous,
    "spliced": bounds.spliced,
}


def star(
    peers: Sequence[Peer], name: str | Topology, size: int, repetitions: int, limit: Limit | None = None
) -> list[dict[str, Any]]:
    """One topology: all of ``peers`` alive at once, one repetition of each in turn. Needs root.

    Those that are spliced into connections have the same hosts and links with ina-switch for a switch, in a lab beside.
    """
    with ExitStack() as stack:
        stages: list[LabStage] = []
        teams: dict[str, Team] = {}
        for beside, open_stage in ((False, lab_stage), (True, ring_stage)):
            mine = [peer for peer in peers if (peer.traffic == "spliced") == beside]
            if mine:
                stages.append(stack.enter_context(open_stage(name)))
                teams |= stack.enter_context(started(mine, stages[-1]))
        topology, world = stages[0].topology, stages[0].world
        runs = interleaved(teams, size, repetitions, sent=lambda: total_sent(stages), limit=limit)
    times = {system: [run.sample.seconds for run in mine] for system, mine in runs.items()}
    return [
        row(
            "star",
            peer.name,
            world,
            size,
            runs[peer.name],
            gloo=runs.get("gloo", ()),
            link=topology.workers()[0].link.sends,
            limit=BOUNDS[peer.traffic](topology, size),
            topology=topology.name,
            ratio_to_openmpi=paired_ratio(times[peer.name], times.get("openmpi", ())),
        )
        for peer in peers
        if runs[peer.name]
    ]


def total_sent(stages: Sequence[LabStage]) -> int | None:
    """Bytes that the first worker of each lab has sent; ``None`` if nothing counts them. Only one lab at a time sends."""
    counts = [stage.sent() for stage in stages]
    return None if None in counts else sum(filter(None, counts))
