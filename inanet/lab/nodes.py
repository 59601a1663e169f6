"""Daemons on the nodes of a lab: started until they say that they are ready, watched, ended in order."""

import json
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from inanet.control.exits import Failure
from inanet.demo.counters import STATS_VARIABLE
from inanet.demo.fabric import python, python_environment
from inanet.demo.patience import Start, patient
from inanet.demo.process import TAIL_LINES
from inanet.lab.session import Lab

#: Seconds a daemon may take to end after SIGTERM, its drain included.
STOP_PATIENCE = 8.0
#: Seconds between looks at ``check`` and at the daemons while waiting.
GLANCE = 0.1


class FabricError(Failure):
    """A daemon of the lab did not start, or ended unasked; the message has the end of its log."""


class Nodes:
    """Daemons by the name of their node: ``processes``, and ``log(node)`` is where each writes.

    Their files are in ``directory``; ``NODE.toml`` must be there before a node is started. ``check`` is called at least every
    :data:`GLANCE` seconds while this waits, and may raise to give up.
    """

    def __init__(self, lab: Lab, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        self.lab = lab
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self._directory = directory
        self._check = check

    def log(self, node: str) -> Path:
        """The log of a node's daemon."""
        return self._directory / f"{node}.log"

    def require_alive(self) -> None:
        """Raise :class:`FabricError` with the end of its log if a daemon has ended."""
        for node, process in self.processes.items():
            status = process.poll()
            if status is not None:
                raise FabricError(
                    f"the daemon of {node} ended unasked with status {status}; its log ends with:\n"
                    f"{self._tail(node)}"
                )

    def stats_of(self, nodes: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What each daemon counted, by node; complete once they have ended, without those that were killed."""
        files = {node: self._stats(node) for node in nodes}
        return {node: json.loads(file.read_text()) for node, file in files.items() if file.exists()}

    def start(self, daemons: Sequence[tuple[str, str, str]]) -> None:
        """Start daemons, (node, its place in the lab, module), and return when all are ready. Raises :class:`FabricError`."""
        with ExitStack() as stack:
            waiting = {
                node: stack.enter_context(_notify_socket(self._directory / f"{node}.notify"))
                for node, _, _ in daemons
            }
            for node, place, module in daemons:
                self.processes[node] = self._spawn(node, place, module)
            self._wait_ready(waiting, time.monotonic())

    def end(self, nodes: Sequence[str]) -> None:
        """End daemons, and kill those that take too long."""
        members = [self.processes.pop(node) for node in nodes if node in self.processes]
        for process in members:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patient(STOP_PATIENCE)
        for process in members:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _stats(self, node: str) -> Path:
        return self._directory / f"{node}.stats"

    def _spawn(self, node: str, place: str, module: str) -> subprocess.Popen[Any]:
        command = python(module, "--config", str(self._directory / f"{node}.toml"))
        environment = {
            **python_environment(),
            "NOTIFY_SOCKET": str(self._directory / f"{node}.notify"),
            STATS_VARIABLE: str(self._stats(node)),
        }
        with self.log(node).open("ab") as sink:
            return self.lab.spawn(
                place, command, env=environment, stdout=sink, stderr=sink, cwd=self._directory
            )

    def _wait_ready(self, waiting: dict[str, socket.socket], since: float) -> None:
        start = Start(since)
        while waiting:
            self._check()
            self.require_alive()
            if overdue := start.overdue(time.monotonic()):
                node = next(iter(waiting))
                raise FabricError(
                    f"not ready: {', '.join(waiting)}, after {overdue}\nthe log of {node} ends with:\n{self._tail(node)}"
                )
            ready, _, _ = select.select(list(waiting.values()), [], [], GLANCE)
            for node in [node for node, handle in waiting.items() if handle in ready]:
                if start.is_ready(waiting[node].recv(4096), time.monotonic()):
                    del waiting[node]

    def _tail(self, node: str) -> str:
        lines = self.log(node).read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


@contextmanager
def _notify_socket(path: Path) -> Iterator[socket.socket]:
    """Where a starting daemon says ``READY=1``, with the protocol of ``sd_notify``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as handle:
        handle.bind(str(path))
        try:
            yield handle
        finally:
            path.unlink(missing_ok=True)
