"""A whole fabric on this machine: workers, aggregators and a PS as processes of their own, over UDP on
127.0.0.1.

No manager and no privileges: the PS coordinates over a Unix socket, data ports are chosen by the kernel,
and everything the processes create lies in one private directory, which is removed when the fabric ends,
however that comes about.
"""

import contextlib
import importlib.util
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.control.addresses import SOCKET_PATH_BYTES
from inanet.control.exits import Failure
from inanet.demo.configuration import configurations, worker_socket
from inanet.demo.counters import STATS_VARIABLE, Counters, total
from inanet.demo.patience import Start, patient
from inanet.demo.process import Process, end_all, script
from inanet.demo.topology import ROLES, NodeSpec, plugged
from inanet.demo.topology import topology as tree
from inanet.proto.systems import TREES

#: Seconds a daemon may take to end after SIGTERM, its drain included.
STOP_PATIENCE = 8.0
#: Seconds between looks at the caller's ``check`` and at the children while waiting.
GLANCE = 0.1
#: Room for the longest file name used in the directory.
LONGEST_NAME = 24

_MODULES = {
    "worker": "daemons.worker",
    "agg": "daemons.aggregator",
    "ps": "daemons.ps",
    "switch": "daemons.switch",
}
_GUARDIAN = Path(__file__).with_name("guardian.py")

#: Command line for a node, given the path of its configuration file.
Command = Callable[[NodeSpec, Path], Sequence[str]]


class FabricError(Failure):
    """The fabric could not be started, or one of its processes ended unasked; the message has the end of
    its log."""


def python(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this installation, whatever is on PATH or in the current
    directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """Environment for :func:`python`: children import the very packages this process imports, installed or
    not."""
    found = importlib.util.find_spec("inanet")
    assert found is not None
    assert found.origin is not None
    home = str(Path(found.origin).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([home, *([inherited] if inherited else [])])}


def daemon_command(node: NodeSpec, config: Path) -> Sequence[str]:
    """Command line of the daemon for a node."""
    return python(_MODULES[node.role], "--config", str(config))


def runtime_directory() -> Path:
    """A new private directory whose path is short enough for Unix sockets inside it."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len("/inanet-demo-12345678/") + LONGEST_NAME > SOCKET_PATH_BYTES:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix="inanet-demo-", dir=base))


class _Ready:
    """Where a starting process says ``READY=1``, with the protocol of ``sd_notify``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def message(self) -> bytes:
        """Take one message, which must have arrived."""
        return self.socket.recv(4096)

    def close(self) -> None:
        """Nobody listens any more."""
        self.socket.close()
        self.path.unlink(missing_ok=True)


class Fabric:
    """A fabric while the ``with`` block lasts.

    ``processes`` maps node names (``worker0``.., ``agg0``.., ``ps``) to running processes;
    ``processes["agg0"].kill()`` is a crash, ``restart("agg0")`` starts it anew. Use it from one thread: the
    children end with the thread that started them.
    """

    def __init__(
        self,
        workers: int = 4,
        aggregators: int = 2,
        *,
        topology: Iterable[tuple[str, str | None]] | None = None,
        impair: float = 0.0,
        seed: int = 0,
        downlink: str = "unicast",
        system: str = TREES,
        memory: str = "",
        command: Command = daemon_command,
        check: Callable[[], None] = lambda: None,
        compiling: Callable[[], None] = lambda: None,
    ) -> None:
        """``topology`` replaces ``workers`` and ``aggregators`` by any tree of (name, parent). A ``system`` other than XAgg
        has a switch that runs it, ``switch0``, instead of aggregators, GOAT three of them, with ``memory`` (a size) if it is given. On every hop
        packets are lost, duplicated, reordered and corrupted with probability ``impair`` each, repeatably
        for a ``seed``. ``downlink`` is that of the PS's [control]. ``check`` is called at least every :data:`GLANCE` seconds while this class waits and
        may raise to give up, ``compiling`` once if a daemon compiles kernels. Raises ``ValueError`` for a topology that is no tree.
        """
        if topology is not None:
            nodes = [NodeSpec(*pair) for pair in topology]
        else:
            nodes = plugged(system, workers, aggregators)
        self.topology = tree(nodes)
        self.nodes = {node.name: node for node in nodes}
        self.processes: dict[str, Process] = {}
        self._impair = impair
        self._seed = seed
        self._downlink = downlink
        self.system = system
        self._memory = memory
        self._command = command
        self._check = check
        self._compiling: Callable[[], None] | None = compiling
        self._starts: dict[str, int] = {}
        self._directory: Path | None = None
        self._guardian: subprocess.Popen[str] | None = None
        self._children: list[Process] = []

    @property
    def directory(self) -> Path:
        """The private directory. Raises ``RuntimeError`` outside the ``with`` block."""
        if self._directory is None:
            raise RuntimeError("the fabric is not running: use it in a with block")
        return self._directory

    @property
    def workers(self) -> int:
        """Number of worker daemons."""
        return sum(node.role == "worker" for node in self.nodes.values())

    def worker_socket(self, index: int) -> Path:
        """The Unix socket on which worker daemon ``index`` serves training processes."""
        return worker_socket(self.directory, f"worker{index}")

    def __enter__(self) -> Self:
        self._directory = runtime_directory()
        try:
            self._guardian = subprocess.Popen(
                script(_GUARDIAN, str(self._directory)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0,
            )
            self._start_all()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, pipe: bool = False
    ) -> Process:
        """Start any process as a child of this fabric: its log lies in the directory, and it ends with the
        fabric."""
        process = Process(name, command, self.directory / f"{name}.log", environment, pipe=pipe)
        self._children.append(process)
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        # without a guardian the fabric still ends its children itself; only a kill -9 of this process needs
        # one
        with contextlib.suppress(BrokenPipeError):
            self._guardian.stdin.write(f"{process.pid}\n")
            self._guardian.stdin.flush()
        return process

    def restart(self, name: str) -> None:
        """Start node ``name`` again with its configuration, after it was killed or has ended, and wait
        until ready.

        Raises ``FabricError`` if it still runs or does not become ready.
        """
        process = self.processes[name]
        if process.poll() is None:
            raise FabricError(f"{name} still runs as process {process.pid}; kill or terminate it first")
        self._start([self.nodes[name]])

    def require_alive(self) -> None:
        """Raise ``FabricError`` with the end of its log if a daemon ended that nobody here asked to."""
        for process in self.processes.values():
            status = process.poll()
            if status is not None and process.expected_to_run:
                raise FabricError(
                    f"{process.name} ended unasked with status {status}; its log ends with:\n{process.tail()}"
                )

    def shutdown(self) -> list[str]:
        """End the daemons in order, workers first, so that each can drain. The directory stays until the
        block ends.

        Returns the names of daemons that did not end within :data:`STOP_PATIENCE` seconds and were killed.
        """
        stubborn = []
        for role in ROLES:
            members = [process for name, process in self.processes.items() if self.nodes[name].role == role]
            stubborn += end_all(members, patient(STOP_PATIENCE))
        return stubborn

    def stats(self) -> dict[str, Counters]:
        """Counters by node, summed over its restarts, of the nodes that have written some.

        A daemon writes them when it ends in good order: this is complete after :meth:`shutdown`, and lacks
        what a killed daemon had counted.
        """
        files = {name: sorted(self.directory.glob(f"{name}.*.stats")) for name in self.nodes}
        return {
            name: total(Counters.from_json(path.read_text()) for path in paths)
            for name, paths in files.items()
            if paths
        }

    def figures(self) -> dict[str, dict[str, Any]]:
        """The same as daemons have written them, of the last life of each, with what their programs and machines have counted."""
        files = {name: sorted(self.directory.glob(f"{name}.*.stats")) for name in self.nodes}
        return {name: json.loads(paths[-1].read_text()) for name, paths in files.items() if paths}

    def _start_all(self) -> None:
        for name, text in configurations(
            self.directory,
            self.nodes.values(),
            self._impair,
            self._seed,
            self._downlink,
            self.system,
            self._memory,
        ).items():
            self._config(name).write_text(text)
        # The PS first and alone: it is where the others report, and if the kernels' cache is cold it fills
        # it for them.
        for first in (True, False):
            self._start([node for node in self.nodes.values() if (node.parent is None) is first])

    def _config(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def _start(self, nodes: Sequence[NodeSpec]) -> None:
        waiting: dict[str, _Ready] = {}
        try:
            for node in nodes:
                waiting[node.name] = _Ready(self.directory / f"{node.name}.notify")
            for node in nodes:
                self._starts[node.name] = self._starts.get(node.name, 0) + 1
                environment = python_environment()
                environment["NOTIFY_SOCKET"] = str(waiting[node.name].path)
                environment[STATS_VARIABLE] = str(
                    self.directory / f"{node.name}.{self._starts[node.name]}.stats"
                )
                command = self._command(node, self._config(node.name))
                self.processes[node.name] = self.spawn(node.name, command, environment)
            self._wait_ready(dict(waiting), time.monotonic())
        finally:
            for ready in waiting.values():
                ready.close()

    def _wait_ready(self, waiting: dict[str, _Ready], since: float) -> None:
        start = Start(since)
        while waiting:
            self._check()
            self.require_alive()
            if overdue := start.overdue(time.monotonic()):
                name = next(iter(waiting))
                raise FabricError(
                    f"not ready: {', '.join(waiting)}, after {overdue}\n"
                    f"the log of {name} ends with:\n{self.processes[name].tail()}"
                )
            messages = select.poll()
            names = {ready.socket.fileno(): name for name, ready in waiting.items()}
            for descriptor in names:
                messages.register(descriptor, select.POLLIN)
            for descriptor, _ in messages.poll(GLANCE * 1000):
                if start.is_ready(waiting[names[descriptor]].message(), time.monotonic()):
                    del waiting[names[descriptor]]
            if start.compiling and self._compiling is not None:
                self._compiling()
                self._compiling = None

    def _close(self) -> None:
        # all at once: whoever wanted an orderly end has called shutdown
        end_all(self._children, patient(STOP_PATIENCE))
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
