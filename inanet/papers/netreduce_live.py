"""NetReduce's Table 6, measured on this machine: daemons and ranks of every system, beside Gloo and a TCP server.

Each of the three systems runs as ``ina demo`` runs it: agents, one ina-switch and a PS, without privileges, over the loopback.
All take turns. Numbers differ from run to run, and a busy machine shows in them; :func:`inanet.papers.netreduce.table6` has
the same in virtual time.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from inanet.bench import contestants  # noqa: F401  registers Gloo and the TCP server
from inanet.bench.measure import median
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer, peers
from inanet.bench.runs import Run, interleaved, started
from inanet.bench.stage import LocalStage, Place, Stage
from inanet.launch.fabric import Fabric
from inanet.launch.process import python
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Table

#: ranks, bytes of the tensor for throughput and of the one for round trips, repetitions of each
WORKERS, LARGE, SMALL, REPETITIONS = 4, 16 << 20, 1 << 10, 5
SYSTEMS = ("netreduce", "switchml", "atp")
_BESIDE = ("gloo", "ps")
#: Gbit/s of 100 on links and of values, CPU in per cent of a core, microseconds
_PAPER = {
    "netreduce": (92.5, 86.8, 100.0, 6.3),
    "switchml": (46.8, 32.7, 130.0, 812.0),
    "atp": (50.3, 39.7, 128.0, 751.0),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Bits per second of a tensor, processor seconds of all processes per GB of all ranks' tensors, seconds of a small one."""

    goodput: float
    cpu: float
    trip: float
    #: values in the bytes that a host sends; ``None`` where nothing counts them
    share: float | None = None


def _contestant(system: str, fabrics: dict[str, Fabric]) -> Peer:
    def start(stage: Stage) -> Team:
        fabric = stage.stack.enter_context(Fabric(stage.world, system=system))
        fabrics[system] = fabric

        def rank(place: Place) -> Sequence[str]:
            socket = str(fabric.worker_socket(place.rank))
            numbers = map(str, (place.rank, stage.world, 1))
            return python("inanet.bench.peers.xagg", *numbers, socket, "shared", "carried", system)

        ranks = [stage.spawn(place.host, rank(place), {"INA_SYSTEM": system}) for place in stage.places]
        agents = [one.pid for name, one in fabric.processes.items() if name.startswith("worker")]
        switches = [one.pid for name, one in fabric.processes.items() if not name.startswith("worker")]
        return Team(system, ranks, agents, switches)

    return Peer(system, ("local",), start, "tree")


def _share(fabric: Fabric, payload: float) -> float | None:
    """Values in what a host's agent has sent, from the counters that daemons leave at their end."""
    fabric.shutdown()
    counters = fabric.stats().get("worker0")
    # counted without IPv4 and UDP headers
    sent = counters.tx_bytes + 28 * counters.tx_packets if counters is not None else 0
    return payload / sent if sent else None


def measure(
    systems: Sequence[str] = SYSTEMS,
    beside: Sequence[str] = _BESIDE,
    *,
    workers: int = WORKERS,
    large: int = LARGE,
    repetitions: int = REPETITIONS,
) -> tuple[dict[str, Found], list[str]]:
    """Medians by system; and in words, what could not be measured.

    Raises :class:`inanet.service.exits.Failure` if processes do not start or a sum is wrong.
    """
    fabrics: dict[str, Fabric] = {}
    chosen = [_contestant(system, fabrics) for system in systems]
    others = [peer for peer in peers("local") if peer.name in beside]
    skipped = [f"{peer.name} was not measured: {reason}." for peer in others if (reason := peer.lacking())]
    chosen += [peer for peer in others if not peer.lacking()]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inanet-table6-")))
        teams = stack.enter_context(started(chosen, LocalStage(workers, directory, stack)))
        runs = {size: interleaved(teams, size, repetitions) for size in (large, SMALL)}
        # rounds that do not count were sent as well
        payload = (large + SMALL) * (repetitions + 1)
        shares = {system: _share(fabric, payload) for system, fabric in fabrics.items()}
    found = {}
    for peer in chosen:
        big = runs[large][peer.name]
        found[peer.name] = Found(
            large * 8 / _median(big, lambda run: run.sample.seconds),
            _median(big, lambda run: run.sample.cpu) / (large * workers / 1e9),
            _median(runs[SMALL][peer.name], lambda run: run.sample.seconds),
            shares.get(peer.name),
        )
    return found, skipped


def _median(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    return median([of(run) for run in runs])


def table6(repetitions: int = REPETITIONS) -> Outcome:
    """Throughput, goodput, processor time and round trips of NetReduce, SwitchML, ATP, Gloo and a TCP server."""
    found, skipped = measure(repetitions=repetitions)
    mine, printed = found["netreduce"], _PAPER["netreduce"]
    claims = []
    for system in SYSTEMS[1:]:
        its, paper = found[system], _PAPER[system]
        claims += [
            _claim(
                f"goodput over {system}'s",
                printed[1] / paper[1],
                mine.goodput / its.goodput,
                ">=",
                "here all of them are software, and a packet of NetReduce costs most: acknowledgements, and checksums over every byte at"
                " both ends and in the switch, are left to a card in the paper",
            ),
            _claim(
                f"processor time of a bit, of {system}'s",
                (printed[2] / printed[1]) / (paper[2] / paper[1]),
                mine.cpu / its.cpu,
                "<=",
                "the paper's transport is in the network card and its sums in an FPGA, here both are in software",
            ),
            _claim(
                f"round trip, of {system}'s",
                printed[3] / paper[3],
                mine.trip / its.trip,
                "<=",
                "small tensors are padded to a whole message, and agents and switch wait for a processor in all systems alike",
            ),
        ]
    rows = tuple(
        (
            name,
            "-" if its.share is None else its.goodput / its.share / 1e9,
            its.goodput / 1e9,
            its.cpu,
            its.trip * 1e6,
        )
        for name, its in found.items()
    )
    columns = ("system", "Gbit/s sent", "goodput", "CPU s per GB", "1 KB, us")
    return Outcome(
        tuple(claims),
        (
            Table(f"this machine, {WORKERS} hosts", columns, rows),
            Table(
                "paper, 6 hosts, cards of 100 Gbit/s",
                ("system", "Gbit/s sent", "goodput", "CPU, per cent of a core", "round trip, us"),
                tuple((name, *its) for name, its in _PAPER.items()),
            ),
        ),
        (),
        (
            f"Agents, ranks, switch and PS of all systems share this machine's processors; tensors of {LARGE >> 20} MiB; medians of"
            f" {repetitions} interleaved repetitions. Processor time is that of all processes.",
            "Round trips are all-reduces of 1 KB as a training process sees them, its way to the agent and back included.",
            *skipped,
        ),
    )


def _claim(name: str, paper: float, ours: float, relation: str, why: str) -> Claim:
    claim = Claim(name, paper, ours, relation)  # type: ignore[arg-type]
    return claim if claim.holds else Claim(name, paper, ours, relation, reason=why)  # type: ignore[arg-type]
