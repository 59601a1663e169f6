"""Repetitions of several contestants in turn, and the rows that are made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from inanet.bench.measure import Limit, idle_share, median, paired_ratio, short_of_cpu, ticks
from inanet.bench.peers.rank import Sample, Team
from inanet.bench.registry import Peer
from inanet.bench.stage import START, Stage
from inanet.launch.interrupts import Interrupted
from inanet.service.exits import Failure

#: What every row of ``ina bench compare --json`` has; others may follow.
KEYS = (
    "table",
    "system",
    "n",
    "bytes",
    "link_bps",
    "seconds",
    "algbw_bps",
    "limit_seconds",
    "ratio_to_gloo",
    "ratio_to_limit",
    "cpu_s_per_gb",
)
#: Seconds one all-reduce may take.
DEADLINE = 180.0


class Run(NamedTuple):
    """One repetition of one contestant."""

    sample: Sample
    #: share of idle processors meanwhile; ``None`` if it was over too soon to tell
    idle: float | None
    #: bytes on the wire that the first worker sent; ``None`` where nothing counts them
    sent: int | None = None


@contextmanager
def started(peers: Sequence[Peer], stage: Stage) -> Iterator[dict[str, Team]]:
    """All contestants alive at once, ready, by name. Raises :class:`inanet.service.exits.Failure` if one is not, or if
    one fails in the block, with the end of what contestants complained of."""
    teams: dict[str, Team] = {}
    try:
        for peer in peers:
            teams[peer.name] = peer.start(stage)
            teams[peer.name].wait_ready(START)
        yield teams
    except Failure as failure:
        raise Failure("\n".join(filter(None, (str(failure), stage.complaints())))) from failure
    finally:
        for team in teams.values():
            team.close()


def interleaved(
    teams: Mapping[str, Team],
    size: int,
    repetitions: int,
    late: Sequence[float] = (),
    sent: Callable[[], int | None] = lambda: None,
    limit: Limit | None = None,
) -> dict[str, list[Run]]:
    """One all-reduce of ``size`` bytes by each team in turn, ``repetitions`` times after one that does not count.

    ``late``: seconds by which each rank has its tensor later. ``sent`` reads a counter of bytes on the wire. Once every team has
    been measured, no repetition begins beyond a ``limit``; when the user wants an end, whatever has been measured is all.
    """
    runs: dict[str, list[Run]] = {name: [] for name in teams}
    limit = limit or Limit()
    for repetition in range(repetitions + 1):
        if repetition > 1 and limit.is_over:
            break
        for name, team in teams.items():
            team.check = limit.check
            before, bytes_before = ticks(), sent()
            try:
                sample = team.run(size, DEADLINE, late)
            except Interrupted as interrupted:
                limit.stop(f"{interrupted}: it ended early")
                return runs
            idle, bytes_after = idle_share(before, ticks()), sent()
            if repetition:
                moved = None if bytes_before is None or bytes_after is None else bytes_after - bytes_before
                runs[name].append(Run(sample, idle, moved))
    return runs


def row(
    table: str,
    system: str,
    world: int,
    size: int,
    runs: Sequence[Run],
    *,
    gloo: Sequence[Run] = (),
    link: int | None = None,
    limit: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """A row: medians over ``runs``, ratios of repetitions that belong together. ``limit`` in seconds, 0: none.

    ``gloo`` are Gloo's runs of the same repetitions. Processor time is that of all processes of the contestant, over
    the bytes of all ranks' tensors together.
    """
    times = [run.sample.seconds for run in runs]
    seconds = median(times)
    total = size * world / 1e9
    sent = [run.sent for run in runs if run.sent]
    idle = [run.idle for run in runs if run.idle is not None]
    return {
        "table": table,
        "system": system,
        "n": world,
        "bytes": size,
        "link_bps": link,
        "seconds": seconds,
        "algbw_bps": size * 8 / seconds,
        "limit_seconds": limit or None,
        "ratio_to_gloo": paired_ratio(times, [run.sample.seconds for run in gloo]),
        "ratio_to_limit": seconds / limit if limit else None,
        "cpu_s_per_gb": median([run.sample.cpu for run in runs]) / total,
        "server_cpu_s_per_gb": median([run.sample.served for run in runs]) / total,
        "wire_bytes_per_worker": median(sent) if sent else None,
        "payload_per_wire": size / median(sent) if sent else None,
        "samples": times,
        "idle": median(idle) if idle else None,
        "short_of_cpu": short_of_cpu([run.idle for run in runs]),
        **more,
    }
