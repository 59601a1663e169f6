"""Table ``hetero``: XAgg's Fig. 1. One worker has half the link, one has its tensor two transmission times late.

The paper counts the time until the PS has the sum, from when the first workers have their gradients: four transmission
times for a PS, four for a switch that must wait for the last and runs at the rate of the slowest, three for XAgg. In the
topology ``xagg-fig1-push`` results find links without limit, so an all-reduce takes as long as that, and the ratio of two
of them is the paper's. ``xagg-fig1`` has the same limits for results: S1's port then also carries the sums down and
those of its children, which Fig. 1 leaves out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from inanet.bench import bounds
from inanet.bench.labs import lab_stage
from inanet.bench.measure import Limit, paired_ratio
from inanet.bench.registry import Peer
from inanet.bench.runs import interleaved, row, started
from inanet.bench.star import BOUNDS
from inanet.lab.model import Topology

#: As the paper counts, and with limits for results as well.
PUSH, BOTH_WAYS = "xagg-fig1-push", "xagg-fig1"
TOPOLOGIES = (PUSH, BOTH_WAYS)


def faster_server(times: Mapping[str, Sequence[float]]) -> list[float]:
    """Of every repetition the time of the PS that was faster in it; empty if none took part."""
    servers = [times[system] for system in ("ps", "tcp-agg") if system in times]
    return [min(pair) for pair in zip(*servers, strict=False)]


def hetero(
    peers: Sequence[Peer], name: str | Topology, size: int, repetitions: int, limit: Limit | None = None
) -> list[dict[str, Any]]:
    """One topology with a late worker: all of ``peers`` alive at once, one repetition of each in turn. Needs root.

    ``link_bps`` is the rate of an unhindered worker. ``ratio_to_ps`` of a row is the median over repetitions of its time
    over the faster PS's of the same repetition (whole tensors, or streamed). Carried and fixed exponents wait for
    nobody; the row with a prologue stands beside them (exponent agreement).
    """
    with lab_stage(name) as stage, started(peers, stage) as teams:
        topology = stage.topology
        late = bounds.lateness(topology, size)
        runs = interleaved(teams, size, repetitions, late, stage.sent, limit)
    times = {system: [run.sample.seconds for run in mine] for system, mine in runs.items()}
    faster = faster_server(times)
    return [
        row(
            "hetero",
            peer.name,
            stage.world,
            size,
            runs[peer.name],
            gloo=runs.get("gloo", ()),
            link=max((host.link.sends or 0 for host in topology.workers()), default=0) or None,
            limit=BOUNDS[peer.traffic](topology, size),
            topology=topology.name,
            late_seconds=max(late),
            ratio_to_ps=paired_ratio(times[peer.name], faster),
        )
        for peer in peers
        if runs[peer.name]
    ]
