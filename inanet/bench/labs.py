"""A lab as the stage of a table: hosts behind a switch, in namespaces made for the run. Needs root."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inanet.bench.contestants import needs_mpi
from inanet.bench.peers import openmpi
from inanet.bench.peers.rank import Team
from inanet.bench.registry import Peer, register
from inanet.bench.stage import Agents, Place, Stage
from inanet.lab.fabric import Daemons, rank_environment, ranks
from inanet.lab.layout import HOST_INTERFACE
from inanet.lab.model import Topology
from inanet.lab.session import Lab
from inanet.launch.process import python_environment
from inanet.planning.plans import Plan
from inanet.service.exits import Failure

#: of coordinators
_FIRST_PORT = 7410


class LabStage(Stage):
    """The hosts of a lab; one fabric serves all contestants that ask for agents, as jobs of different names.

    ``plan``: its trees and servers, if they are not to be the topology's. ``negotiate``: with negotiated rates.
    """

    def __init__(
        self, lab: Lab, directory: Path, stack: ExitStack, plan: Plan | None = None, negotiate: bool = False
    ) -> None:
        super().__init__(directory, stack)
        self.lab = lab
        self._plan = plan
        self._negotiate = negotiate
        #: by how results go
        self._daemons: dict[str, Daemons] = {}
        self._ranks = ranks(lab.topology)

    @property
    def topology(self) -> Topology:
        """The lab's."""
        return self.lab.topology

    @property
    def places(self) -> Sequence[Place]:
        """Rank after rank, over the workers in the file's order."""
        return [Place(rank.host, rank.rank) for rank in self._ranks]

    @property
    def server(self) -> str:
        return self.topology.roots()[0]

    @property
    def idle(self) -> str:
        return next((host.name for host in self.topology.hosts() if host.role == "idle"), self.server)

    def address(self, host: str) -> str:
        return self.lab.address(host)

    def environment(self, place: Place) -> Mapping[str, str]:
        """As ``ina lab run`` would set it."""
        return rank_environment(self.lab, self._ranks[place.rank])

    def spawn(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A process on a host; it ends with the lab."""
        with self.errors.open("ab") as errors:
            return self.lab.spawn(
                host,
                command,
                env={**openmpi.environment(python_environment()), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def agents(self, one_host: bool, downlink: str = "unicast") -> Agents:
        """The lab's daemons, started for the first who asks for results to go that way; all stay until its end. Raises
        :class:`inanet.service.exits.Failure` for ``one_host``: the ranks of a lab are where its topology puts them."""
        if one_host:
            raise Failure("the ranks of a lab are on the hosts where its topology puts them")
        if downlink not in self._daemons:
            self._daemons[downlink] = self.stack.enter_context(self._start(downlink))
        daemons = self._daemons[downlink]
        workers = {rank.host for rank in self._ranks}
        pids = {host: process.pid for host, process in daemons.processes.items()}
        return Agents(
            [daemons.socket_path(rank.host) for rank in self._ranks],
            [rank.local_world for rank in self._ranks],
            [pid for host, pid in pids.items() if host in workers],
            [pid for host, pid in pids.items() if host not in workers],
        )

    def _start(self, downlink: str) -> Daemons:
        """A set of daemons of its own, beside those that are there already."""
        directory = self.lab.directory / downlink
        directory.mkdir()
        return Daemons(
            self.lab,
            # as the contestants, whose connections are not encrypted either; nothing but the lab reaches its wires
            {"control": {"downlink": downlink, "insecure": True}},
            plan=self._plan,
            negotiate=self._negotiate,
            directory=directory,
            port=_FIRST_PORT + len(self._daemons),
        )

    def sent(self) -> int | None:
        """Bytes on the wire that the first worker has sent so far, headers included; ``None``: its link is not shaped."""
        shape = self.lab.uplink(self._ranks[0].host)
        return None if shape is None else shape.sent_bytes


@contextmanager
def lab_stage(
    topology: str | Topology, plan: Plan | None = None, negotiate: bool = False
) -> Iterator[LabStage]:
    """Build a lab, and take it down at the end of the block with all that was started on it.

    ``plan`` replaces the trees that the topology states; ``negotiate``: with negotiated rates.
    """
    with Lab(topology) as lab, ExitStack() as stack:
        directory = lab.directory / "peers"
        directory.mkdir()
        yield LabStage(lab, directory, stack, plan, negotiate)


def _openmpi(stage: Stage) -> Team:
    assert isinstance(stage, LabStage)
    directory = stage.directory / "openmpi"
    directory.mkdir()
    hosts = [place.host for place in stage.places]
    command = openmpi.command_on(hosts, stage.lab.namespace("{host}"), HOST_INTERFACE, directory)
    return Team("openmpi", [stage.spawn(hosts[0], command, {})])


register(Peer("openmpi", ("star",), _openmpi, "ring", needs_mpi))
