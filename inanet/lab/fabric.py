"""The daemons of a lab, each on its host, and the environment of the ranks beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.control.config_fields import COORDINATOR_PORT
from inanet.control.exits import Exit, Failure
from inanet.control.plans import Plan
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
from inanet.lab.nodes import Nodes
from inanet.lab.session import Lab

#: Where ranks may meet by TCP, as torch's launchers do.
_MASTER_PORT = 29500


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


class Daemons(Nodes):
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
        super().__init__(lab, directory or lab.directory, check)
        self._port = port
        self._overrides = overrides
        self._plan = plan
        self._negotiate = negotiate
        self._places = daemons(lab.topology, plan)

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

    def stop(self) -> None:
        """End the daemons, workers first, so that each can finish; kill those that take too long."""
        for role in ("worker", "agg", "ps"):
            self.end([name for name in self.processes if self._places[name].role == role])

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each daemon counted, by host; complete after :meth:`stop`, without daemons that were killed."""
        return self.stats_of(self._places)

    def _start(self, names: list[str]) -> None:
        self.start([(name, self._places[name].host, MODULES[self._places[name].role]) for name in names])


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
