"""``ina bench compare``: every peer and every system on one machine in one run, repetitions interleaved.

Tables: ``local``, ranks on one host; ``ingest``, what one core of an aggregator carries, every check on and results
sent; ``star``, hosts behind a switch (:mod:`inanet.bench.star`).
"""

import importlib.util
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.bench.measure import median
from inanet.bench.peers import openmpi
from inanet.bench.peers.rank import Sample, Team
from inanet.control.exits import Failure
from inanet.demo.fabric import Fabric, python, python_environment

#: seconds a peer may take to start; compiles included
START = 120.0


@contextmanager
def _team(
    name: str, commands: Sequence[Sequence[str]], helpers: Sequence[int] = (), servers: Sequence[int] = ()
) -> Iterator[Team]:
    processes = [
        subprocess.Popen(
            command,
            env=openmpi.environment(python_environment()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for command in commands
    ]
    team = Team(name, processes, helpers, servers)
    try:
        team.wait_ready(START)
        yield team
    finally:
        team.close()


@contextmanager
def gloo(world: int, directory: Path) -> Iterator[Team]:
    """Gloo's all-reduce; needs torch (``bench`` extra)."""
    rendezvous = directory / "gloo"
    commands = [
        python("inanet.bench.peers.gloo", str(rank), str(world), str(rendezvous)) for rank in range(world)
    ]
    with _team("gloo", commands) as team:
        yield team


@contextmanager
def mpi(world: int, directory: Path) -> Iterator[Team]:
    """Open MPI, with its own choice of algorithms and shared memory (``bench`` extra)."""
    place = directory / "openmpi"
    place.mkdir()
    with _team("openmpi", [openmpi.command(world, place)]) as team:
        yield team


@contextmanager
def tcp(world: int, directory: Path, message: int) -> Iterator[Team]:
    """An aggregator over TCP with messages of this size."""
    port_file = directory / f"tcp-{message}"
    module = "inanet.bench.peers.tcp"
    server = subprocess.Popen(
        python(module, "server", str(port_file), str(world), str(message), "127.0.0.1", "stream"),
        env=python_environment(),
    )
    try:
        stop = time.monotonic() + START
        while not port_file.exists():
            if time.monotonic() > stop or server.poll() is not None:
                raise Failure("the TCP aggregator does not start")
            time.sleep(0.02)
        port = port_file.read_text()
        commands = [
            python(module, "rank", str(rank), str(world), "127.0.0.1", port, str(message))
            for rank in range(world)
        ]
        with _team(f"tcp-agg-{message}", commands, servers=[server.pid]) as team:
            yield team
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def xagg(world: int, one_host: bool, memory: str) -> Iterator[Team]:
    """inanet: all ranks at one agent, or one agent each under one PS, over UDP on the loopback."""
    hosts = 1 if one_host else world
    topology = [("ps", None), *((f"worker{i}", "ps") for i in range(hosts))]
    with Fabric(topology=topology) as fabric:
        local = world if one_host else 1
        commands = [
            python(
                "inanet.bench.peers.xagg",
                str(rank),
                str(world),
                str(local),
                str(fabric.worker_socket(0 if one_host else rank)),
                memory,
            )
            for rank in range(world)
        ]
        servers = [fabric.processes["ps"].pid]
        helpers = [process.pid for name, process in fabric.processes.items() if name != "ps"]
        with _team("xagg", commands, helpers, servers) as team:
            yield team


@dataclass(frozen=True, slots=True)
class System:
    """One contestant: its name in the rows and how to start it."""

    name: str
    start: Callable[[int, Path], Any]
    needs: str = ""

    @property
    def missing(self) -> bool:
        """Whether a package it needs is not installed."""
        return bool(self.needs) and importlib.util.find_spec(self.needs) is None


#: Contestants of the ``local`` table; systems to come register themselves here.
LOCAL: tuple[System, ...] = (
    System("gloo", gloo, needs="torch"),
    System("openmpi", mpi, needs="mpi4py"),
    System("tcp-agg-1k", lambda world, directory: tcp(world, directory, 1 << 10)),
    System("tcp-agg-1m", lambda world, directory: tcp(world, directory, 1 << 20)),
    System("xagg-shm", lambda world, _: xagg(world, True, "shared")),
    System("xagg-shm-private", lambda world, _: xagg(world, True, "private")),
    System("xagg-udp", lambda world, _: xagg(world, False, "shared")),
)


def local(
    world: int = 4,
    sizes: Sequence[int] = (1 << 12, 1 << 20, 97 << 20),
    repetitions: int = 5,
    systems: Sequence[System] = LOCAL,
) -> dict[str, Any]:
    """Ranks on one host, all contestants alive at once, one repetition of each in turn."""
    skipped = [system.name for system in systems if system.missing]
    samples: dict[tuple[str, int], list[Sample]] = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inanet-compare-")))
        teams = {
            system.name: stack.enter_context(system.start(world, directory))
            for system in systems
            if not system.missing
        }
        for size in sizes:
            for repetition in range(repetitions + 1):
                for name, team in teams.items():
                    sample = team.run(size)
                    if repetition:
                        samples.setdefault((name, size), []).append(sample)
    rows = [_row("local", name, world, size, runs, samples) for (name, size), runs in samples.items()]
    rows += list(_ingest(rows, world, max(sizes), samples))
    return {"rows": rows, "skipped": skipped}


#: What the ``ingest`` table compares: sums of all ranks in one server process.
_SERVERS = ("tcp-agg-1k", "tcp-agg-1m", "xagg-udp")


def _ingest(
    local: list[dict[str, Any]], world: int, size: int, samples: dict[tuple[str, int], list[Sample]]
) -> Iterator[dict[str, Any]]:
    """Contributions per second of the server's processor time, results to every rank included, at the largest size.

    ``seconds`` is that processor time; the ratio to TCP with 1 KB messages is the paper's (XAgg, section VI-B).
    """
    servers = {
        name: median([sample.served for sample in samples[name, size]])
        for name in _SERVERS
        if (name, size) in samples
    }
    for row in local:
        name = row["system"]
        if row["bytes"] == size and servers.get(name):
            reference = servers.get("tcp-agg-1k")
            yield row | {
                "table": "ingest",
                "seconds": servers[name],
                "algbw_bps": size * world * 8 / servers[name],
                "ratio_to_gloo": None,
                "ratio_to_tcp_agg_1k": reference / servers[name] if reference else None,
                "cpu_s_per_gb": servers[name] / (size * world / 1e9),
            }


def _row(
    table: str,
    name: str,
    world: int,
    size: int,
    runs: list[Sample],
    samples: dict[tuple[str, int], list[Sample]],
) -> dict[str, Any]:
    seconds = median([run[0] for run in runs])
    reference = samples.get(("gloo", size))
    return {
        "table": table,
        "system": name,
        "n": world,
        "bytes": size,
        "link_bps": None,
        "seconds": seconds,
        "algbw_bps": size * 8 / seconds,
        "limit_seconds": None,
        "ratio_to_gloo": seconds / median([run[0] for run in reference]) if reference else None,
        "ratio_to_limit": None,
        "cpu_s_per_gb": median([run[1] for run in runs]) / (size * world / 1e9),
        "samples": [run.seconds for run in runs],
    }


def run(
    tables: Sequence[str],
    workers: int,
    sizes: Sequence[int],
    repetitions: int,
    topologies: Sequence[str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every table asked for, one after the other; ``say`` hears what happens. Returns what ``--json`` prints.

    ``tables`` of "local" (with "ingest") and "star"; no tables: all that can be had here. Needs root for "star", and
    raises :class:`Failure` without it if it was asked for.
    """
    result: dict[str, Any] = {"schema": 1, "ok": True, "rows": [], "skipped": [], "cores": os.cpu_count()}
    star_here = os.geteuid() == 0 and importlib.util.find_spec("pyroute2") is not None
    wanted = tuple(tables) or (("local", "star") if star_here else ("local",))
    if not tables and not star_here:
        result["skipped"].append("star: needs root and the 'net' extra")
    if "local" in wanted:
        say(f"local: {workers} ranks on this host")
        part = local(workers, sizes, repetitions)
        result["rows"] += part["rows"]
        result["skipped"] += [f"{name}: not installed (bench extra)" for name in part["skipped"]]
    if "star" in wanted:
        from inanet.bench.star import STARS, star

        for topology in topologies or STARS:
            say(f"star: {topology}")
            result["rows"] += star(topology, max(sizes), repetitions)
    result["load"] = os.getloadavg()[0]
    return result


def table(result: dict[str, Any]) -> Iterator[str]:
    """Rows for people."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; medians of interleaved repetitions"
    yield "# ingest: processor time of the process that adds up, its ms and Gbit/s those of one core; * short of CPU"
    yield "# table  system             n        bytes        ms   Gbit/s  vs gloo vs limit  CPU s/GB"
    for row in result["rows"]:
        yield (
            f"  {row['table']:<7}{row['system']:<16}{row['n']:4d} {row['bytes']:12d} {row['seconds'] * 1e3:9.2f} "
            f"{row['algbw_bps'] / 1e9:8.2f} {_ratio(row['ratio_to_gloo'])} {_ratio(row['ratio_to_limit'])} "
            f"{row['cpu_s_per_gb']:9.2f}{' *' if row.get('short_of_cpu') else ''}"
        )
    for reason in result["skipped"]:
        yield f"# skipped {reason}"


def _ratio(value: float | None) -> str:
    return f"{value:8.3f}" if value is not None else "       -"
