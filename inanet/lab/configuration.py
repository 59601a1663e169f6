"""Configuration files of the daemons of a lab: data and control plane on the hosts' lab addresses."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inanet.config.control import ClientControl, CoordinatorControl
from inanet.config.daemons import MODELS, Role
from inanet.config.fields import COORDINATOR_PORT
from inanet.config.file import validate, write_toml
from inanet.lab.credentials import section
from inanet.lab.layout import addresses
from inanet.lab.model import Host, Topology
from inanet.launch.configuration import worker_socket
from inanet.planning.plans import Plan

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
