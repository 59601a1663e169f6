"""The tables of ``ina bench compare`` that need a network: hosts behind a switch, in a lab made for the run."""

import importlib.util
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.bench.measure import median
from inanet.bench.peers import openmpi
from inanet.bench.peers.rank import Sample, Team
from inanet.control.exits import Failure
from inanet.demo.fabric import python, python_environment
from inanet.lab.fabric import Daemons, Rank, rank_environment, ranks
from inanet.lab.layout import HOST_INTERFACE
from inanet.lab.model import Topology
from inanet.lab.session import Lab

#: Seconds a peer may take to start, compiles included.
START = 120.0
#: Share of idle time below which a row says that its processes were short of processors.
SHORT_OF_CPU = 0.05
#: What tbf counts for a fragment of 1024 B: the row, UDP, IPv4 and Ethernet headers.
_FRAGMENT = (1052 + 8 + 20 + 14) / 1024
#: And for TCP's 1448 B of payload: TCP with time stamps, IPv4 and Ethernet headers.
_SEGMENT = (1448 + 32 + 20 + 14) / 1448

#: Topologies of the ``star`` table: the server has a faster NIC, as far as two cores can carry it.
STARS = ("star2", "star4-fast-aggregator", "star8-fast-aggregator")


@dataclass(frozen=True, slots=True)
class Stage:
    """What a peer needs to start on a lab."""

    lab: Lab
    daemons: Daemons
    directory: Path

    @property
    def ranks(self) -> list[Rank]:
        """Every rank and its host."""
        return ranks(self.lab.topology)

    def spawn(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process of a peer on a host."""
        return self.lab.spawn(
            host,
            command,
            env={**python_environment(), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def per_rank(self, command: Callable[[Rank], Sequence[str]]) -> list[subprocess.Popen[str]]:
        """One process per rank, on its host, with a launcher's environment."""
        return [self.spawn(rank.host, command(rank), rank_environment(self.lab, rank)) for rank in self.ranks]


def _gloo(stage: Stage) -> Team:
    rendezvous = str(stage.directory / "gloo")
    return Team(
        "gloo",
        stage.per_rank(
            lambda rank: python("inanet.bench.peers.gloo", str(rank.rank), str(rank.world), rendezvous)
        ),
    )


def _openmpi(stage: Stage) -> Team:
    directory = stage.directory / "openmpi"
    directory.mkdir()
    hosts = [rank.host for rank in stage.ranks]
    command = openmpi.command_on(hosts, stage.lab.namespace("{host}"), HOST_INTERFACE, directory)
    return Team("openmpi", [stage.spawn(hosts[0], command, openmpi.environment({}))])


def _tcp(name: str, message: int, style: str) -> Callable[[Stage], Team]:
    def start(stage: Stage) -> Team:
        module = "inanet.bench.peers.tcp"
        port_file = stage.directory / name
        host = stage.lab.topology.roots()[0]
        address = stage.lab.address(host)
        world = str(len(stage.ranks))
        command = python(module, "server", str(port_file), world, str(message), address, style)
        server = stage.spawn(host, command, {})
        port = _appears(port_file, server)
        team = stage.per_rank(
            lambda rank: python(module, "rank", str(rank.rank), world, address, port, str(message))
        )
        return Team(name, team, servers=[server.pid])

    return start


def _appears(path: Path, writer: subprocess.Popen[str]) -> str:
    """What a starting server writes there."""
    deadline = time.monotonic() + START
    while not path.exists():
        if writer.poll() is not None or time.monotonic() > deadline:
            raise Failure(f"the TCP server for {path.name} does not start")
        time.sleep(0.02)
    return path.read_text()


def _xagg(stage: Stage) -> Team:
    def command(rank: Rank) -> list[str]:
        socket = str(stage.daemons.socket_path(rank.host))
        numbers = (rank.rank, rank.world, rank.local_world)
        return python("inanet.bench.peers.xagg", *map(str, numbers), socket, "shared")

    daemons = {host: process.pid for host, process in stage.daemons.processes.items()}
    workers = {rank.host for rank in stage.ranks}
    helpers = [pid for host, pid in daemons.items() if host in workers]
    servers = [pid for host, pid in daemons.items() if host not in workers]
    return Team("xagg-udp", stage.per_rank(command), helpers, servers)


#: Contestants and how each starts on a lab; systems to come register themselves here.
SYSTEMS: dict[str, Callable[[Stage], Team]] = {
    "gloo": _gloo,
    "openmpi": _openmpi,
    "ps": _tcp("ps", 1 << 20, "plain"),
    "tcp-agg": _tcp("tcp-agg", 1 << 20, "stream"),
    "xagg-udp": _xagg,
}


def tree_limit(topology: Topology, size: int) -> float:
    """Seconds in which the busiest link carries ``size`` bytes per rank up the topology's trees, as rows of fragments.

    Results take the same links the other way, and links are full duplex. Hosts without a rate do not count.
    """
    hosts = {host.name: host for host in topology.hosts()}
    share = 1 / len(topology.roots())
    received = dict.fromkeys(hosts, 0.0)
    sent = dict.fromkeys(hosts, 0.0)
    for host in hosts.values():
        if host.role in ("worker", "aggregator"):
            parts = topology.parents(host)
            sent[host.name] = len(parts) * share
            for parent in parts:
                received[parent] += share
    times = [
        size * _FRAGMENT * 8 * max(received[name], sent[name]) / host.link.rate
        for name, host in hosts.items()
        if host.link.rate is not None
    ]
    return max(times, default=0.0)


def ring_limit(topology: Topology, size: int) -> float:
    """Seconds a ring all-reduce over TCP needs at least on the slowest worker's link."""
    workers = topology.workers()
    rates = [host.link.rate for host in workers if host.link.rate is not None]
    n = len(workers)
    return 2 * (n - 1) / n * size * _SEGMENT * 8 / min(rates) if rates else 0.0


@contextmanager
def _stage(name: str) -> Iterator[Stage]:
    with Lab(name) as lab, Daemons(lab) as daemons:
        directory = lab.directory / "peers"
        directory.mkdir()
        yield Stage(lab, daemons, directory)


def available() -> tuple[str, ...]:
    """The contestants whose packages are installed."""
    lacking = set() if importlib.util.find_spec("torch") else {"gloo"}
    lacking |= set() if openmpi.installed() else {"openmpi"}
    return tuple(system for system in SYSTEMS if system not in lacking)


def star(
    name: str, size: int = 97 << 20, repetitions: int = 3, systems: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """One topology: all contestants alive at once, one repetition of each in turn, one warm-up. Needs root.

    Returns rows; ``systems`` names entries of :data:`SYSTEMS`, by default the available ones.
    """
    systems = systems or available()
    samples: dict[str, list[tuple[Sample, float]]] = {system: [] for system in systems}
    with _stage(name) as stage, ExitStack() as stack:
        teams = {}
        for system in systems:
            teams[system] = SYSTEMS[system](stage)
            stack.callback(teams[system].close)
            teams[system].wait_ready(START)
        for repetition in range(repetitions + 1):
            for system, team in teams.items():
                before = _processors()
                sample = team.run(size)
                if repetition:
                    samples[system].append((sample, _idle(before, _processors())))
        topology = stage.lab.topology
    gloo = median([sample.seconds for sample, _ in samples.get("gloo", [])])
    return [_row(topology, system, size, runs, gloo) for system, runs in samples.items()]


def _row(
    topology: Topology, system: str, size: int, runs: list[tuple[Sample, float]], gloo: float
) -> dict[str, Any]:
    seconds = median([sample.seconds for sample, _ in runs])
    ring = system in ("gloo", "openmpi")
    limit = ring_limit(topology, size) if ring else tree_limit(topology, size)
    idle = median([idle for _, idle in runs])
    n = len(topology.workers())
    return {
        "table": "star",
        "topology": topology.name,
        "system": system,
        "n": n,
        "bytes": size,
        "link_bps": topology.workers()[0].link.rate,
        "seconds": seconds,
        "algbw_bps": size * 8 / seconds,
        "limit_seconds": limit or None,
        "ratio_to_gloo": seconds / gloo if gloo else None,
        "ratio_to_limit": seconds / limit if limit else None,
        "cpu_s_per_gb": median([sample.cpu for sample, _ in runs]) / (size * n / 1e9),
        "server_cpu_s_per_gb": median([sample.served for sample, _ in runs]) / (size * n / 1e9),
        "samples": [sample.seconds for sample, _ in runs],
        "idle": idle,
        "short_of_cpu": idle < SHORT_OF_CPU,
    }


def _processors() -> tuple[int, int]:
    """Ticks of all processors so far: all, and those spent idle."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _idle(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Share of idle time between two readings; 1 if no tick has passed."""
    total = after[0] - before[0]
    return (after[1] - before[1]) / total if total else 1.0
