"""``ina bench compare``: every peer and every system on one machine in one run, repetitions interleaved.

Tables: ``local``, four ranks on one host; ``ingest``, what one core of an aggregator takes in, every check on.
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
from inanet.bench.peers.rank import Team
from inanet.control.exits import Failure
from inanet.demo.fabric import Fabric, python, python_environment

#: seconds a peer may take to start; compiles included
START = 120.0


@contextmanager
def _team(name: str, commands: Sequence[Sequence[str]], helpers: Sequence[int] = ()) -> Iterator[Team]:
    processes = [
        subprocess.Popen(
            command,
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for command in commands
    ]
    team = Team(name, processes, helpers)
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
        with _team(f"tcp-agg-{message}", commands, [server.pid]) as team:
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
        helpers = [process.pid for process in fabric.processes.values()]
        with _team("xagg", commands, helpers) as team:
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
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    load = []
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
            load.append(os.getloadavg()[0])
    rows = [_row("local", name, world, size, runs, samples) for (name, size), runs in samples.items()]
    return {
        "schema": 1,
        "ok": True,
        "rows": rows,
        "skipped": skipped,
        "cores": os.cpu_count(),
        "load": max(load, default=0.0),
    }


def _row(
    table: str,
    name: str,
    world: int,
    size: int,
    runs: list[tuple[float, float]],
    samples: dict[tuple[str, int], list[tuple[float, float]]],
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
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Rows for people."""
    yield f"# {result['cores']} cores, load {result['load']:.1f}; medians of interleaved repetitions"
    yield "# table  system               n        bytes        ms   Gbit/s  vs gloo  CPU s/GB"
    for row in result["rows"]:
        ratio = f"{row['ratio_to_gloo']:8.3f}" if row["ratio_to_gloo"] is not None else "       -"
        yield (
            f"  {row['table']:<7}{row['system']:<18}{row['n']:4d} {row['bytes']:12d} {row['seconds'] * 1e3:9.2f} "
            f"{row['algbw_bps'] / 1e9:8.2f} {ratio} {row['cpu_s_per_gb']:9.2f}"
        )
    for name in result["skipped"]:
        yield f"# {name}: not installed (pip install 'inanet[bench]')"
