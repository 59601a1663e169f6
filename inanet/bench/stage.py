"""Where contestants run: ranks at places, processes of a peer on hosts, agents of inanet's fabric.

:class:`LocalStage` is this machine over the loopback; :class:`inanet.bench.labs.LabStage` is a lab. A peer's factory
uses what both have and need not know which it is on.
"""

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from inanet.bench.peers import openmpi
from inanet.launch.fabric import Fabric
from inanet.launch.process import child, end, python_environment, tail
from inanet.service.exits import Failure

#: Seconds a peer may take to start, compiles included.
START = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs, and its number."""

    host: str
    rank: int


@dataclass(frozen=True, slots=True)
class Agents:
    """A running fabric: for every rank the socket of its agent and how many ranks share that agent; process ids of
    agents, and of the nodes that sum."""

    sockets: Sequence[Path]
    sharing: Sequence[int]
    helpers: Sequence[int]
    servers: Sequence[int]


class Stage(ABC):
    """One table's surroundings while ``stack`` is open: what is started on it ends with the stack."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        """``directory`` is private and empty."""
        self.directory = directory
        self.stack = stack

    @property
    def errors(self) -> Path:
        """Where all processes of contestants write their standard error."""
        return self.directory / "errors.log"

    def complaints(self) -> str:
        """The end of what they wrote there."""
        return tail(self.errors)

    @property
    @abstractmethod
    def places(self) -> Sequence[Place]:
        """Every rank, in order."""

    @property
    @abstractmethod
    def server(self) -> str:
        """The host where one server would run."""

    @property
    @abstractmethod
    def idle(self) -> str:
        """A host without a limit on its link that has no other part; the server's if there is none."""

    @abstractmethod
    def address(self, host: str) -> str:
        """IPv4 address of a host."""

    @abstractmethod
    def spawn(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process with pipes for standard input and output, text; ``env`` is added to what it needs."""

    @abstractmethod
    def agents(self, one_host: bool, downlink: str = "unicast") -> Agents:
        """inanet's daemons, an agent per rank, or one for all ranks; ``downlink`` as in the PS's configuration."""

    def environment(self, place: Place) -> Mapping[str, str]:
        """What a launcher would tell this rank."""
        return {}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def per_rank(self, command: Callable[[Place], Sequence[str]]) -> list[subprocess.Popen[str]]:
        """One process per rank, at its place."""
        return [self.spawn(place.host, command(place), self.environment(place)) for place in self.places]

    def appears(self, path: Path, writer: subprocess.Popen[str]) -> str:
        """What a starting process writes into a file. Raises :class:`Failure` if it ends or takes too long."""
        deadline = time.monotonic() + START
        while not path.exists():
            if writer.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"the server that writes {path.name} does not start")
            time.sleep(0.02)
        return path.read_text()


class LocalStage(Stage):
    """Ranks on this host, over the loopback."""

    def __init__(self, world: int, directory: Path, stack: ExitStack) -> None:
        super().__init__(directory, stack)
        self._places = [Place("localhost", rank) for rank in range(world)]

    @property
    def places(self) -> Sequence[Place]:
        return self._places

    @property
    def server(self) -> str:
        return "localhost"

    @property
    def idle(self) -> str:
        return "localhost"

    def address(self, host: str) -> str:
        return "127.0.0.1"

    def spawn(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A child process that is gone when the stack closes."""
        with self.errors.open("ab") as errors:
            process = child(
                command,
                {**openmpi.environment(python_environment()), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.stack.callback(end, process)
        return process

    def agents(self, one_host: bool, downlink: str = "unicast") -> Agents:
        """A fabric of its own for every caller: nobody's buffers are warm from another's rounds."""
        hosts = 1 if one_host else self.world
        topology = [("ps", None), *((f"worker{i}", "ps") for i in range(hosts))]
        fabric = self.stack.enter_context(Fabric(topology=topology, downlink=downlink))
        return Agents(
            [fabric.worker_socket(0 if one_host else rank) for rank in range(self.world)],
            [self.world if one_host else 1] * self.world,
            [process.pid for name, process in fabric.processes.items() if name != "ps"],
            [fabric.processes["ps"].pid],
        )
