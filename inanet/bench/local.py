"""Tables ``local``, ranks on one host, and ``ingest``, what one core of a server that sums carries."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inanet.bench import contestants  # noqa: F401  registers them
from inanet.bench.measure import Limit, median
from inanet.bench.registry import Peer
from inanet.bench.runs import Run, interleaved, row, started
from inanet.bench.stage import LocalStage

#: Below this many bytes an all-reduce is so short that ten times as many repetitions cost nothing.
SMALL = 1 << 20
_MORE = 10
#: TCP with messages of 1 KB, which the paper compares with (XAgg, section VI-B).
REFERENCE = "tcp-agg-1k"


def local(
    peers: Sequence[Peer], world: int, sizes: Sequence[int], repetitions: int, limit: Limit | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of both tables as they come: all of ``peers`` alive at once, one repetition of each in turn, size after size, each with
    its share of a ``limit``; ``ingest`` at the largest size.
    """
    ingesting = {peer.name for peer in peers if peer.ingests}
    limit = limit or Limit()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inanet-compare-")))
        teams = stack.enter_context(started(peers, LocalStage(world, directory, stack)))
        for index, size in enumerate(sizes):
            times = repetitions * (_MORE if size < SMALL else 1)
            runs = interleaved(teams, size, times, limit=limit.part(len(sizes) - index))
            found = {name: mine for name, mine in runs.items() if mine}
            for name, mine in found.items():
                yield row("local", name, world, size, mine, gloo=found.get("gloo", ()))
            if size == max(sizes):
                yield from ingest(world, size, {n: r for n, r in found.items() if n in ingesting})
            if limit.is_over:
                break


def ingest(world: int, size: int, runs: Mapping[str, Sequence[Run]]) -> Iterator[dict[str, Any]]:
    """Contributions per second of the server's processor time, every check on and results sent to every rank.

    ``seconds`` is that processor time, so ``algbw_bps`` is what one core carries, in bits of payload; ``samples`` and
    ratios to other servers are of the same. A server that used no measurable time has no row.
    """
    served = {name: [run.sample.served for run in mine] for name, mine in runs.items()}
    for name, mine in runs.items():
        seconds = median(served[name])
        if not seconds:
            continue
        yield row("ingest", name, world, size, mine) | {
            "seconds": seconds,
            "algbw_bps": size * world * 8 / seconds,
            "cpu_s_per_gb": seconds / (size * world / 1e9),
            "samples": served[name],
            "ratio_to_tcp_agg_1k": _faster(served, name, REFERENCE),
            "ratio_to_tcp_agg_1m": _faster(served, name, "tcp-agg-1m"),
        }


def _faster(served: Mapping[str, Sequence[float]], name: str, reference: str) -> float | None:
    """How many times as much a core carries as with the reference: the median of paired repetitions."""
    pairs = zip(served.get(reference, ()), served[name], strict=False)
    ratios = [other / mine for other, mine in pairs if mine]
    return median(ratios) if ratios else None
