"""A lab for as long as a ``with`` block lasts.

>>> with Lab("star4") as lab:
...     server = lab.spawn("ps", ["iperf3", "--server", "--one-off"])
...     lab.spawn("w0", ["iperf3", "--client", lab.address("ps")]).wait()
"""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.lab import build, namespaces, remains
from inanet.lab.layout import HOST_INTERFACE, addresses, alias, namespace, operations
from inanet.lab.library import topology as find_topology
from inanet.lab.model import Host, Topology
from inanet.launch.nodes import Nodes
from inanet.launch.process import Process, child, runtime_directory, watch

_REMAINS = Path(__file__).with_name("remains.py")


class Lab:
    """A lab of its own name, taken down at the end of the block with all processes in it, and by a guardian
    process if this one is killed. Use it from one thread: children end with the thread that started them.
    """

    def __init__(
        self,
        topology: Topology | str | os.PathLike[str],
        name: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``topology``: a name that ``ina lab list`` shows, the path of a file, or a model. ``name`` of the
        lab: by default one that no other lab has. ``check`` is called while the lab is built and may raise
        to give up. Raises :class:`inanet.config.file.ConfigError`.
        """
        self.topology = topology if isinstance(topology, Topology) else find_topology(topology)
        self.name = name or f"{self.topology.name}-{secrets.token_hex(3)}"
        self.hosts: Mapping[str, Host] = {host.name: host for host in self.topology.hosts()}
        self._switches = {switch.name for switch in self.topology.switch}
        self._check = check
        self._addresses = addresses(self.topology)
        self._children: list[subprocess.Popen[Any]] = []
        self._guardian: subprocess.Popen[str] | None = None
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        """A private directory that ends with the lab. Raises ``RuntimeError`` outside the block."""
        if self._directory is None:
            raise RuntimeError(f"lab {self.name} is not up: use it in a with block")
        return self._directory

    @property
    def namespaces(self) -> list[str]:
        """Names of all its network namespaces."""
        return sorted({operation.namespace for operation in operations(self.topology, self.name)})

    def address(self, host: str) -> str:
        """IPv4 address of a host. Raises ``KeyError``."""
        return self._addresses[host]

    def alias(self, host: str, number: int) -> str:
        """Have a host bear a further address, 1 or 2, beside its own. Raises ``KeyError`` and ``ValueError``."""
        further = alias(self._addresses[host], number)
        build.add_address(self.name, host, further)
        return further

    def namespace(self, node: str) -> str:
        """Name of the network namespace of a host or switch, for ``ip netns exec``."""
        return namespace(self.name, node)

    def __enter__(self) -> Self:
        namespaces.require_privileges()
        self._directory = runtime_directory("inanet-lab-")
        try:
            # before the first namespace: from here on a kill at any point leaves nothing
            self._guardian = watch(_REMAINS, str(self._directory), *self.namespaces)
            build.build(self.topology, self.name, self._check)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def spawn(
        self, host: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a host, or on a switch: ``subprocess.Popen`` with its namespace around it, and its pid.

        ``env`` is added to this process's environment; ``options`` are Popen's. Standard input is empty
        unless given, and Ctrl-C on the terminal does not reach it. Raises ``KeyError`` for unknown names. A
        command that does not exist ends with status 127, as in a shell.
        """
        process = child(argv, {**os.environ, **(env or {})}, namespace=self.place(host), **options)
        self._children.append(process)
        return process

    def place(self, node: str) -> str:
        """Path of the network namespace of a host or switch. Raises ``KeyError`` for unknown names."""
        if node not in self._switches:
            self._addresses[node]
        return str(namespaces.path(self.namespace(node)))

    def nodes(self, places: Mapping[str, str], directory: Path, check: Callable[[], None]) -> Nodes:
        """For daemons in this lab: ``places`` has the host or switch of every node, and ``directory`` their files."""

        def spawn(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
            place = self.place(places[name])
            return Process(name, command, directory / f"{name}.log", environment, namespace=place)

        return Nodes(directory, spawn, check)

    def uplink(self, host: str) -> build.Shape | None:
        """The shaper from a host to its switch, with what it has carried; ``None``: not limited."""
        self._addresses[host]
        return build.shape(self.name, host, HOST_INTERFACE)

    def downlink(self, host: str) -> build.Shape | None:
        """The shaper from the switch to a host."""
        return build.shape(self.name, self.hosts[host].switch, host)

    def _close(self) -> None:
        if self._guardian is None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._directory = None
            return
        # Children that never reached their namespace are ended one by one, everything else by where it is,
        # grandchildren included.
        for process in self._children:
            if process.poll() is None:
                process.terminate()
        remains.dismantle(namespaces.labs().get(self.name, []))
        for process in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(remains.GRACE)
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        self._guardian.wait()
        self._guardian = None
        self._directory = None
