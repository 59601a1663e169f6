"""A whole fabric on this machine: workers, aggregators and a PS as processes of their own, over UDP on
127.0.0.1.

No manager and no privileges: the PS coordinates over a Unix socket, data ports are chosen by the kernel,
and everything the processes create lies in one private directory, which is removed when the fabric ends,
however that comes about.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.launch.configuration import configurations, worker_socket
from inanet.launch.counters import Counters, total
from inanet.launch.nodes import MODULES, STOP_PATIENCE, FabricError, Nodes
from inanet.launch.patience import patient
from inanet.launch.process import Process, end_all, python, runtime_directory, watch
from inanet.launch.topology import ROLES, NodeSpec, plugged
from inanet.launch.topology import topology as tree
from inanet.proto.slots.systems import TREES
from inanet.service import kernels as kernel_sets

_GUARDIAN = Path(__file__).with_name("guardian.py")

#: Seconds between two words on how far compiling is.
PACE = 1.0

#: Command line for a node, given the path of its configuration file.
Command = Callable[[NodeSpec, Path], Sequence[str]]


def daemon_command(node: NodeSpec, config: Path) -> Sequence[str]:
    """Command line of the daemon for a node."""
    return python(MODULES[node.role], "--config", str(config))


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
        compiling: Callable[[str], None] = lambda text: None,
        kernels: Sequence[str] = (),
        beside: "Callable[[Fabric], None]" = lambda fabric: None,
    ) -> None:
        """``topology`` replaces ``workers`` and ``aggregators`` by any tree of (name, parent). A ``system`` other than XAgg
        has a switch that runs it, ``switch0``, instead of aggregators, GOAT three of them, with ``memory`` (a size) if it is given. On every hop
        packets are lost, duplicated, reordered and corrupted with probability ``impair`` each, repeatably
        for a ``seed``. ``downlink`` is that of the PS's [control]. ``check`` is called at least every :data:`~inanet.launch.nodes.GLANCE` seconds while this class waits and
        may raise to give up. ``kernels`` are sets (:mod:`inanet.service.kernels`) to be compiled before anything is started: daemons then
        compile nothing ahead. ``compiling`` is told how far that is, or how far daemons are that do it themselves. ``beside`` is called when
        processes can be spawned, while there are no daemons yet. Raises ``ValueError`` for a topology that is no tree.
        """
        if topology is not None:
            nodes = [NodeSpec(*pair) for pair in topology]
        else:
            nodes = plugged(system, workers, aggregators)
        self.topology = tree(nodes)
        self.nodes = {node.name: node for node in nodes}
        self._impair = impair
        self._seed = seed
        self._downlink = downlink
        self.system = system
        self._memory = memory
        self._command = command
        self._check = check
        self._compiling = compiling
        self._kernels = kernels
        self._beside = beside
        self._told = float("-inf")
        self._daemons: Nodes | None = None
        self.processes: dict[str, Process] = {}
        self._guardian: subprocess.Popen[str] | None = None
        self._children: list[Process] = []

    @property
    def directory(self) -> Path:
        """The private directory. Raises ``RuntimeError`` outside the ``with`` block."""
        return self._running.directory

    @property
    def _running(self) -> Nodes:
        if self._daemons is None:
            raise RuntimeError("the fabric is not running: use it in a with block")
        return self._daemons

    @property
    def workers(self) -> int:
        """Number of worker daemons."""
        return sum(node.role == "worker" for node in self.nodes.values())

    def worker_socket(self, index: int) -> Path:
        """The Unix socket on which worker daemon ``index`` serves training processes."""
        return worker_socket(self.directory, f"worker{index}")

    def __enter__(self) -> Self:
        ahead = {}
        if self._kernels:
            kernel_sets.prepare(self._kernels, self._compiled)
            ahead = {kernel_sets.AHEAD_VARIABLE: "done"}
        directory = runtime_directory()
        self._daemons = Nodes(directory, self.spawn, self._check, self._compiling, ahead)
        self.processes = self._daemons.processes
        try:
            self._guardian = watch(_GUARDIAN, str(directory))
            self._beside(self)
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
        self._running.require_alive()

    def shutdown(self) -> list[str]:
        """End the daemons in order, workers first, so that each can drain. The directory stays until the
        block ends.

        Returns the names of daemons that did not end within :data:`STOP_PATIENCE` seconds and were killed.
        """
        return [
            stubborn
            for role in ROLES
            for stubborn in self._running.end(
                name for name in self.processes if self.nodes[name].role == role
            )
        ]

    def stats(self) -> dict[str, Counters]:
        """Counters by node, summed over its restarts, of the nodes that have written some; see
        :meth:`~inanet.launch.nodes.Nodes.stats_files`."""
        return {
            name: total(Counters.from_json(path.read_text()) for path in paths)
            for name, paths in self._running.stats_files(self.nodes).items()
        }

    def figures(self) -> dict[str, dict[str, Any]]:
        """The same as daemons have written them, of the last life of each, with what their programs and machines have counted."""
        return self._running.stats_of(self.nodes)

    def _compiled(self, done: int, total: int) -> None:
        self._check()
        now = time.monotonic()
        if now >= self._told + PACE or done == total:
            self._told = now
            self._compiling(f"compiling kernels: {done} / {total}")

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
            self._running.config(name).write_text(text)
        # the PS first and alone: it is where the others report
        for first in (True, False):
            self._start([node for node in self.nodes.values() if (node.parent is None) is first])

    def _start(self, nodes: Sequence[NodeSpec]) -> None:
        self._running.start({n.name: self._command(n, self._running.config(n.name)) for n in nodes})

    def _close(self) -> None:
        # all at once: whoever wanted an orderly end has called shutdown
        end_all(self._children, patient(STOP_PATIENCE))
        if self._guardian is not None:
            assert self._guardian.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()
        if self._daemons is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._daemons = None
