"""The daemons of a fabric: started until they say that they are ready, watched, ended in order. On this machine or in a lab."""

import json
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from inanet.launch.counters import STATS_VARIABLE
from inanet.launch.patience import Start, patient
from inanet.launch.process import Process, end_all, python, python_environment
from inanet.service.exits import Failure

#: Seconds a daemon may take to end after SIGTERM, its drain included.
STOP_PATIENCE = 8.0
#: Seconds between looks at the caller's ``check`` and at the daemons while waiting.
GLANCE = 0.1
#: Module of the daemon, by the role in its configuration.
MODULES: Mapping[str, str] = {
    "worker": "daemons.worker",
    "agg": "daemons.aggregator",
    "ps": "daemons.ps",
    "switch": "daemons.switch",
}


class FabricError(Failure):
    """A daemon could not be started, or ended unasked; the message has the end of its log."""


class Spawn(Protocol):
    """Starts a node's command where the node is."""

    def __call__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        """The process is named after the node and logs to ``NAME.log`` in the directory of the :class:`Nodes`."""


class Nodes:
    """Daemons by the name of their node: ``processes``.

    Their files are in ``directory``: ``NODE.toml`` must be there before a node is started. ``check`` is called at least every
    :data:`GLANCE` seconds while this waits, and may raise to give up; ``compiling`` is told how far daemons are that compile kernels.
    ``variables`` are added to the environment of daemons.
    """

    def __init__(
        self,
        directory: Path,
        spawn: Spawn,
        check: Callable[[], None] = lambda: None,
        compiling: Callable[[str], None] = lambda text: None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.processes: dict[str, Process] = {}
        self._spawn = spawn
        self._check = check
        self._compiling = compiling
        self._variables = variables or {}
        self._starts: dict[str, int] = {}

    def config(self, node: str) -> Path:
        """The configuration file of a node."""
        return self.directory / f"{node}.toml"

    def log(self, node: str) -> Path:
        """The log of a node's daemon."""
        return self.directory / f"{node}.log"

    def daemon(self, node: str, role: str) -> Sequence[str]:
        """Command line of the daemon of a role."""
        return python(MODULES[role], "--config", str(self.config(node)))

    def start(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Start daemons, commands by node, and return when all are ready. Raises :class:`FabricError`."""
        with ExitStack() as stack:
            waiting = {
                node: stack.enter_context(_notify_socket(self.directory / f"{node}.notify"))
                for node in commands
            }
            for node, command in commands.items():
                self._starts[node] = self._starts.get(node, 0) + 1
                stats = self.directory / f"{node}.{self._starts[node]}.stats"
                environment = python_environment() | dict(self._variables)
                environment |= {
                    "NOTIFY_SOCKET": str(self.directory / f"{node}.notify"),
                    STATS_VARIABLE: str(stats),
                }
                self.processes[node] = self._spawn(node, command, environment)
            self._wait_ready(waiting, time.monotonic())

    def require_alive(self) -> None:
        """Raise :class:`FabricError` with the end of its log if a daemon has ended that nobody here asked to."""
        for process in self.processes.values():
            status = process.poll()
            if status is not None and process.expected_to_run:
                raise FabricError(
                    f"the daemon of {process.name} ended unasked with status {status}; its log ends with:\n"
                    f"{process.tail()}"
                )

    def end(self, nodes: Iterable[str]) -> list[str]:
        """End daemons at the same time, and kill those that take longer than :data:`STOP_PATIENCE`: returns their names."""
        return end_all([self.processes[n] for n in nodes if n in self.processes], patient(STOP_PATIENCE))

    def stats_files(self, nodes: Iterable[str]) -> dict[str, list[Path]]:
        """Files with what daemons counted, by node, one for each of its lives. A daemon writes it when it ends in good order:
        this is complete once they have ended, and lacks the lives that were killed.
        """
        found = {
            node: sorted(self.directory.glob(f"{node}.*.stats"), key=lambda path: int(path.suffixes[-2][1:]))
            for node in nodes
        }
        return {node: files for node, files in found.items() if files}

    def stats_of(self, nodes: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What daemons counted in their last life, by node, without those that were killed."""
        return {node: json.loads(files[-1].read_text()) for node, files in self.stats_files(nodes).items()}

    def _wait_ready(self, waiting: dict[str, socket.socket], since: float) -> None:
        start = Start(since)
        while waiting:
            self._check()
            self.require_alive()
            if overdue := start.overdue(time.monotonic()):
                node = next(iter(waiting))
                raise FabricError(
                    f"not ready: {', '.join(waiting)}, after {overdue}\n"
                    f"the log of {node} ends with:\n{self.processes[node].tail()}"
                )
            messages = select.poll()
            names = {handle.fileno(): node for node, handle in waiting.items()}
            for descriptor in names:
                messages.register(descriptor, select.POLLIN)
            for descriptor, _ in messages.poll(GLANCE * 1000):
                if start.is_ready(waiting[names[descriptor]].recv(4096), time.monotonic()):
                    del waiting[names[descriptor]]
                elif start.compiling:
                    self._compiling(start.compiling)


@contextmanager
def _notify_socket(path: Path) -> Iterator[socket.socket]:
    """Where a starting daemon says ``READY=1``, with the protocol of ``sd_notify``."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as handle:
        handle.bind(str(path))
        try:
            yield handle
        finally:
            path.unlink(missing_ok=True)
