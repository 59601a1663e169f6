"""The daemons of a lab, each on its host, and the environment of the ranks beside them.

Their data and control plane are on the hosts' lab addresses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inanet.config.control import ClientControl, CoordinatorControl
from inanet.config.daemons import MODELS, Role
from inanet.config.fields import COORDINATOR_PORT
from inanet.config.file import validate, write_toml
from inanet.lab import credentials
from inanet.lab.credentials import section
from inanet.lab.layout import HOST_INTERFACE, addresses
from inanet.lab.model import Host, Topology
from inanet.lab.session import Lab
from inanet.launch.configuration import worker_socket
from inanet.launch.topology import ROLES
from inanet.planning.plans import Plan
from inanet.service.exits import Exit, Failure

#: How long a daemon may finish what runs after SIGTERM; by then the commands of a lab have ended.
_DRAIN_TIMEOUT = "3 s"

#: Keys of [control] that only the coordinator has, e.g. ``downlink``.
_COORDINATORS = CoordinatorControl.model_fields.keys() - ClientControl.model_fields.keys()
#: Sections with keys that replace what the lab would write, for every daemon that has them.
Overrides = Mapping[str, Mapping[str, Any]]


def daemon_role(topology: Topology, host: Host) -> Role | None:
    """Which daemon a host runs. Roots other than the first are aggregators that happen to have no parent:
    a fabric has one coordinator.
    """
    if host.role == "ps":
        return "ps" if host.name == topology.roots()[0] else "agg"
    return {"worker": "worker", "aggregator": "agg", "idle": None}[host.role]


@dataclass(frozen=True, slots=True)
class Place:
    """What a daemon is, and on which host it runs."""

    role: Role
    host: str


def daemons(topology: Topology, plan: Plan | None = None) -> dict[str, Place]:
    """Every daemon of a fabric, by the name of its node: those of a topology's roles, or those that a plan needs.

    A plan may put an aggregator beside a worker. Servers that it does not use run nothing.
    """
    if plan is None:
        roles = {host.name: daemon_role(topology, host) for host in topology.hosts()}
        return {name: Place(role, name) for name, role in roles.items() if role is not None}
    found = {host.name: Place("worker", host.name) for host in topology.workers()}
    for index, node in enumerate(plan.servers):
        found[node] = Place("agg" if index else "ps", plan.host(node))
    return found


def is_insecure(overrides: Overrides | None) -> bool:
    """Whether settings ask for daemons that do without TLS."""
    return (overrides or {}).get("control", {}).get("insecure") is True


def configurations(
    topology: Topology,
    directory: Path,
    overrides: Overrides | None = None,
    plan: Plan | None = None,
    negotiate: bool = False,
    port: int = COORDINATOR_PORT,
) -> dict[str, str]:
    """TOML by name of the node, for every daemon. :func:`inanet.lab.credentials.prepare` must have been there.

    ``plan`` replaces the topology's trees; ``negotiate``: nodes agree on rates, each knowing that of its host's link.
    ``port`` is the coordinator's.
    Raises :class:`inanet.config.file.ConfigError`, for overrides that
    are refused.
    """
    places = addresses(topology)
    fabric = daemons(topology, plan)
    hosts = {host.name: host for host in topology.hosts()}
    (root,) = [place.host for place in fabric.values() if place.role == "ps"]
    coordinator = f"{places[root]}:{port}"
    texts = {}
    for name, place in fabric.items():
        role = place.role
        sections: dict[str, dict[str, Any]] = {
            "node": {"name": name, "listen": f"{places[place.host]}:0"},
            "log": {"format": "plain"},
            "control": {
                **section(directory, name, insecure=is_insecure(overrides)),
                "listen" if role == "ps" else "coordinator": coordinator,
                "drain_timeout": _DRAIN_TIMEOUT,
            },
        }
        rate = hosts[place.host].link.sends
        if negotiate and rate is not None:
            sections["node"] |= {"rate_negotiation": True, "rate": f"{rate} bit/s"}
        if role == "worker":
            sections["local"] = {"socket": str(worker_socket(directory, name))}
        if role == "ps":
            sections["topology"] = topology.trees() if plan is None else plan.config()["topology"]
            if plan is not None:
                sections["control"] |= plan.config()["control"]
        for table, keys in (overrides or {}).items():
            foreign = _COORDINATORS if table == "control" and role != "ps" else frozenset()
            chosen = {key: value for key, value in keys.items() if key not in foreign}
            sections.setdefault(table, {}).update(chosen)
        texts[name] = write_toml(validate(MODELS[role], sections, directory / f"{name}.toml"))
    return texts


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


class LabFabric:
    """Daemons on the hosts and switches of a lab while the ``with`` block lasts; inside the block all are ready.

    ``processes`` maps nodes to running daemons, ``log(node)`` is where each writes.
    """

    def __init__(
        self,
        lab: Lab,
        roles: Mapping[str, Role],
        configurations: Callable[[Path], Mapping[str, str]],
        *,
        places: Mapping[str, str] | None = None,
        directory: Path | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``roles`` by node; ``configurations(directory)`` are TOML by node, called when the block begins. Nodes are on the hosts and
        switches of their names or where ``places`` says. ``check`` is called at least every
        :data:`~inanet.launch.nodes.GLANCE` seconds while this waits, and may raise to give up.
        """
        self.lab = lab
        self.roles = roles
        self.directory = directory or lab.directory
        self._configurations = configurations
        self._stats: dict[str, dict[str, Any]] = {}
        self._nodes = lab.nodes(places or {name: name for name in roles}, self.directory, check)
        self.processes = self._nodes.processes
        self.log = self._nodes.log
        self.require_alive = self._nodes.require_alive

    def socket_path(self, host: str) -> Path:
        """The Unix socket on which a host's worker daemon serves ranks."""
        return worker_socket(self.directory, host)

    def __enter__(self) -> Self:
        for name, text in self._configurations(self.directory).items():
            self._nodes.config(name).write_text(text)
        # the coordinator first and alone: it is where the others report
        first = next((name for name, role in self.roles.items() if role == "ps"), None)
        try:
            for names in ([first] if first else [], [name for name in self.roles if name != first]):
                self._nodes.start({name: self._nodes.daemon(name, self.roles[name]) for name in names})
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
        for role in ROLES:
            self._nodes.end(name for name, its in self.roles.items() if its == role)
        # the directory goes with the lab
        self._stats = self._nodes.stats_of(self.roles)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each daemon counted, by node, once they have ended; without those that were killed."""
        return self._stats


def unix_configurations(
    lab: Lab,
    directory: Path,
    roles: Mapping[str, Role],
    sections: Callable[[str, Role], Mapping[str, Mapping[str, Any]]],
) -> dict[str, str]:
    """TOML by node for daemons whose control plane is a Unix socket in ``directory``, data on the hosts' lab addresses: it needs no
    TLS and no wire. ``sections(node, role)`` is added. :func:`inanet.lab.credentials.prepare` must have been there.
    """
    texts = {}
    for name, role in roles.items():
        whole: dict[str, dict[str, Any]] = {
            "node": {"name": name}
            if role == "switch"
            else {"name": name, "listen": f"{lab.address(name)}:0"},
            "log": {"format": "plain"},
            "control": {
                **credentials.section(directory, name, insecure=True),
                "listen" if role == "ps" else "coordinator": f"unix:{directory / 'control.sock'}",
                "drain_timeout": "1 s",
            },
        }
        if role == "worker":
            whole["local"] = {"socket": str(worker_socket(directory, name))}
        for title, keys in sections(name, role).items():
            whole.setdefault(title, {}).update(keys)
        texts[name] = write_toml(validate(MODELS[role], whole, directory / f"{name}.toml"))
    return texts


class Daemons(LabFabric):
    """The daemons of a lab's topology. A node bears its host's name, unless a plan has put it beside a worker."""

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
        second set has a ``directory`` for its files and a coordinator's ``port`` of its own.
        Raises :class:`NoFabric` for a topology without ps.
        """
        if plan is None and not lab.topology.roots():
            raise NoFabric(
                f"topology {lab.topology.name!r} has no host with the role 'ps', so there are no daemons to "
                "run: use --network-only"
            )
        places = daemons(lab.topology, plan)
        roles = {name: place.role for name, place in places.items()}

        def texts(directory: Path) -> Mapping[str, str]:
            credentials.prepare(directory, roles, insecure=is_insecure(overrides))
            return configurations(lab.topology, directory, overrides, plan, negotiate, port)

        hosts = {name: place.host for name, place in places.items()}
        super().__init__(lab, roles, texts, places=hosts, directory=directory, check=check)

    def environment(self, rank: Rank) -> dict[str, str]:
        """What a rank needs in its environment, beside what it inherits."""
        return {**rank_environment(self.lab, rank), "INA_SOCKET": str(self.socket_path(rank.host))}


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
