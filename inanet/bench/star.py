"""Table ``star``: hosts behind a switch, in a lab made for the run."""

from collections.abc import Sequence
from typing import Any

from inanet.bench import bounds
from inanet.bench.labs import lab_stage
from inanet.bench.measure import paired_ratio
from inanet.bench.registry import Peer
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
}


def star(peers: Sequence[Peer], name: str | Topology, size: int, repetitions: int) -> list[dict[str, Any]]:
    """One topology: all of ``peers`` alive at once, one repetition of each in turn. Needs root."""
    with lab_stage(name) as stage, started(peers, stage) as teams:
        topology = stage.topology
        runs = interleaved(teams, size, repetitions, sent=stage.sent)
    times = {system: [run.sample.seconds for run in mine] for system, mine in runs.items()}
    return [
        row(
            "star",
            peer.name,
            stage.world,
            size,
            runs[peer.name],
            gloo=runs.get("gloo", ()),
            link=topology.workers()[0].link.sends,
            limit=BOUNDS[peer.traffic](topology, size),
            topology=topology.name,
            ratio_to_openmpi=paired_ratio(times[peer.name], times.get("openmpi", ())),
        )
        for peer in peers
    ]
