"""Table ``loss``: four hosts at 1 Gbit/s that lose single packets before they are merged, as on a bad cable or a busy switch.

Every contestant sees the same share of its packets lost, TCP and UDP alike. ``resent_per_lost`` is what all hosts together sent
beyond what they send without loss, in packets of the tensor, over the packets lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from inanet.bench.labs import LabStage, lab_stage
from inanet.bench.measure import Limit, median
from inanet.bench.registry import Peer
from inanet.bench.runs import Run, interleaved, row, started
from inanet.bench.star import BOUNDS
from inanet.lab.loss import Loss
from inanet.lab.model import Topology

TOPOLOGIES = ("star4-fast-aggregator",)
#: shares of the packets that are lost; the first is what others are compared with
SHARES = (0.0, 0.001, 0.01, 0.05)
#: bytes per rank, beside what is asked for
SMALL = 16 << 20
#: bytes of a packet on the wire, headers included: a fragment's, and a full TCP segment's
_FRAGMENT, _SEGMENT = 1094, 1514
#: packets lost are counted above the bytes sent, in one number
_LOST = 64


def loss(
    peers: Sequence[Peer], name: str | Topology, size: int, repetitions: int, limit: Limit | None = None
) -> Iterator[dict[str, Any]]:
    """One topology: rows of every share and size, as they come. Needs root and libbpf."""
    with lab_stage(name) as stage, started(peers, stage) as teams:
        quiet: dict[tuple[str, int], float] = {}
        limit = limit or Limit()
        for share in SHARES:
            with Loss(stage.lab, share) as lost:
                for chosen in sorted({min(SMALL, size), size}):
                    if limit.is_over:
                        return
                    runs = interleaved(
                        teams, chosen, repetitions, sent=partial(_counted, stage, lost), limit=limit
                    )
                    yield from _rows(stage, peers, chosen, share, runs, quiet)


def _counted(stage: LabStage, lost: Loss) -> int:
    """Bytes that all hosts have sent on shaped links, and packets lost, in one number."""
    shapes = [stage.lab.uplink(host) for host in stage.lab.hosts]
    return (lost.packets << _LOST) + sum(shape.sent_bytes for shape in shapes if shape is not None)


def _rows(
    stage: LabStage,
    peers: Sequence[Peer],
    size: int,
    share: float,
    runs: Mapping[str, Sequence[Run]],
    quiet: dict[tuple[str, int], float],
) -> Iterator[dict[str, Any]]:
    topology = stage.topology
    gloo = [run.sample.seconds for run in runs.get("gloo", ())]
    for peer in peers:
        mine = runs[peer.name]
        if not mine:
            continue
        counted = [run.sent or 0 for run in mine]
        lost = [count >> _LOST for count in counted]
        sent = median([count & (1 << _LOST) - 1 for count in counted])
        usual = quiet.setdefault((peer.name, size), sent)
        times = [run.sample.seconds for run in mine]
        mean = sum(times) / len(times)
        packet = _FRAGMENT if peer.traffic == "tree" else _SEGMENT
        made = row(
            "loss",
            peer.name,
            stage.world,
            size,
            mine,
            gloo=runs.get("gloo", ()),
            link=topology.workers()[0].link.sends,
            limit=BOUNDS[peer.traffic](topology, size),
            topology=topology.name,
            loss=share,
            lost=median(lost),
            mean_seconds=mean,
            mean_ratio_to_gloo=mean / (sum(gloo) / len(gloo)) if gloo else None,
            resent_per_lost=max(0.0, sent - usual) / packet / median(lost) if median(lost) else None,
        )
        # one worker's bytes are not what was counted
        yield made | {"wire_bytes_per_worker": None, "payload_per_wire": None}
