"""The daemons of a lab, each on its host, and the environment of the ranks beside them."""

import json
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.control.config_fields import COORDINATOR_PORT
from inanet.control.exits import Exit, Failure
from inanet.control.plans import Plan
from inanet.demo.counters import STATS_VARIABLE
from inanet.demo.fabric import python, python_environment
from inanet.demo.process import TAIL_LINES
from inanet.lab import credentials
from inanet.lab.configuration import (
    MODULES,
    Overrides,
    configurations,
    daemons,
    is_insecure,
    worker_socket,
)
from inanet.lab.layout import HOST_INTERFACE
from inanet.lab.model import Topology
from inanet.lab.session import Lab

#: Seconds a daemon may take to start. The first one compiles the kernels if their cache is cold.
START_PATIENCE = 180.0
#: Seconds a daemon may take to end after SIGTERM, its drain included.
STOP_PATIENCE = 8.0
#: Seconds between looks at ``check`` and at the daemons while waiting.
GLANCE = 0.1
#: Where ranks may meet by TCP, as torch's launchers do.
_MASTER_PORT = 29500


class FabricError(Failure):
    """A daemon of the lab did not start, or ended unasked; the message has the end of its log."""


class NoFabric(Failure):
    """The topology has no ps, so there are no daemons to run."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the job."""

    host: str
    rank: int
    local_rank: int
    local_world: int
    world: int


def ranks(topology: Topology) -> list[Rank]:
    """Every rank, in order: host after host as in the file, consecutive numbers on each."""
    workers = topology.workers()
    world = sum(host.ranks for host in workers)
    places = [(host, local) for host in workers for local in range(host.ranks)]
    return [Rank(host.name, number, local, host.ranks, world) for number, (host, local) in enumerate(places)]


class Daemons:
    """The daemons of a lab while the ``with`` block lasts; inside the block all are ready.

    ``processes`` maps nodes to running daemons, ``log(node)`` is where each writes. A node bears its host's name,
    unless a plan has put it beside a worker.
    """

    def __init__(
        self,
        lab: Lab,
        overrides: Overrides | None = None,
        check: Callable[[], None] = lambda: None,
        plan: Plan | None = None,
        negotiate: bool = False,
        directory: Path | None = None,
        port: int = COORDINATOR_PORT,
    ) -> None:
        """``overrides`` replace keys of all daemons' configurations (``{"node": {"memory": "2 GiB"}}``). ``plan``
        replaces the trees and servers of the topology; ``negotiate``: with negotiated rates. A lab's
        second set has a ``directory`` for its files and a coordinator's ``port`` of its own. ``check`` is called at least every :data:`GLANCE` seconds while this waits, and may raise to give up.
        Raises :class:`NoFabric` for a topology without ps.
        """
        if plan is None and not lab.topology.roots():
            raise NoFabric(
                f"topology {lab.topology.name!r} has no host with the role 'ps', so there are no daemons to "
                "run: use --network-only"
            )
        self.lab = lab
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self._directory = directory or lab.directory
        self._port = port
        self._overrides = overrides
        self._check = check
        self._plan = plan
        self._negotiate = negotiate
        self._places = daemons(lab.topology, plan)

    def log(self, host: str) -> Path:
        """The log of a host's daemon."""
        return self._directory / f"{host}.log"

    def socket_path(self, host: str) -> Path:
        """The Unix socket on which a host's worker daemon serves ranks."""
        return worker_socket(self._directory, host)

    def environment(self, rank: Rank) -> dict[str, str]:
        """What a rank needs in its environment, beside what it inherits."""
        return {**rank_environment(self.lab, rank), "INA_SOCKET": str(self.socket_path(rank.host))}

    def __enter__(self) -> Self:
        roles = {name: place.role for name, place in self._places.items()}
        credentials.prepare(self._directory, roles, insecure=is_insecure(self._overrides))
        texts = configurations(
            self.lab.topology, self._directory, self._overrides, self._plan, self._negotiate, self._port
        )
        for host, text in texts.items():
            (self._directory / f"{host}.toml").write_text(text)
        (coordinator,) = [name for name, place in self._places.items() if place.role == "ps"]
        try:
            # The PS first and alone: it is where the others report, and if the kernels' cache is cold it
            # fills it for them.
            self._start([coordinator])
            self._start([host for host in texts if host != coordinator])
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def require_alive(self) -> None:
        """Raise :class:`FabricError` with the end of its log if a daemon has ended."""
        for host, process in self.processes.items():
            status = process.poll()
            if status is not None:
                raise FabricError(
                    f"the daemon of {host} ended unasked with status {status}; its log ends with:\n"
                    f"{self._tail(host)}"
                )

    def stop(self) -> None:
        """End the daemons, workers first, so that each can finish; kill those that take too long."""
        order = ("worker", "agg", "ps")
        for role in order:
            members = [process for name, process in self.processes.items() if self._places[name].role == role]
            for process in members:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_PATIENCE
            for process in members:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.processes.clear()

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each daemon counted, by host; complete after :meth:`stop`, without daemons that were killed."""
        files = {name: self._stats(name) for name in self._places}
        return {host: json.loads(file.read_text()) for host, file in files.items() if file.exists()}

    def _stats(self, host: str) -> Path:
        return self._directory / f"{host}.stats"

    def _start(self, hosts: list[str]) -> None:
        with ExitStack() as stack:
            waiting = {
                host: stack.enter_context(_notify_socket(self._directory / f"{host}.notify"))
                for host in hosts
            }
            for host in hosts:
                self.processes[host] = self._spawn(host)
            self._wait_ready(waiting, time.monotonic() + START_PATIENCE)

    def _spawn(self, host: str) -> subprocess.Popen[Any]:
        place = self._places[host]
        command = python(MODULES[place.role], "--config", str(self._directory / f"{host}.toml"))
        environment = {
            **python_environment(),
            "NOTIFY_SOCKET": str(self._directory / f"{host}.notify"),
            STATS_VARIABLE: str(self._stats(host)),
        }
        with self.log(host).open("ab") as sink:
            return self.lab.spawn(
                place.host, command, env=environment, stdout=sink, stderr=sink, cwd=self._directory
            )

    def _wait_ready(self, waiting: dict[str, socket.socket], deadline: float) -> None:
        while waiting:
            self._check()
            self.require_alive()
            if time.monotonic() > deadline:
                host = next(iter(waiting))
                raise FabricError(
                    f"not ready after {START_PATIENCE:.0f} s: {', '.join(waiting)}; the log of {host} ends "
                    f"with:\n{self._tail(host)}"
                )
            ready, _, _ = select.select(list(waiting.values()), [], [], GLANCE)
            for host in [host for host, handle in waiting.items() if handle in ready]:
                if b"READY=1" in waiting[host].recv(4096).splitlines():
                    del waiting[host]

    def _tail(self, host: str) -> str:
        lines = self.log(host).read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def rank_environment(lab: Lab, rank: Rank) -> dict[str, str]:
    """The environment that torch's launchers give a rank, and what the lab knows of its host."""
    host = lab.hosts[rank.host]
    return {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_world),
        "MASTER_ADDR": lab.address(lab.topology.workers()[0].name),
        "MASTER_PORT": str(_MASTER_PORT),
        "GLOO_SOCKET_IFNAME": HOST_INTERFACE,
        "INA_LAB_HOST": host.name,
        "INA_LATENESS": f"{host.lateness:g}",
    }


@contextmanager
def _notify_socket(path: Path) -> Iterator[socket.socket]:
    """Where a starting daemon says ``READY=1``, with the protocol of ``sd_notify``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as handle:
        handle.bind(str(path))
        try:
            yield handle
        finally:
            path.unlink(missing_ok=True)
