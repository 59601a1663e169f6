"""Configuration files of the daemons of a lab: data and control plane on the hosts' lab addresses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inanet.control.config import MODELS, ClientControl, CoordinatorControl, Role
from inanet.control.config_fields import COORDINATOR_PORT
from inanet.control.config_file import validate, write_toml
from inanet.lab.layout import addresses
from inanet.lab.model import Host, Topology

#: How long a daemon may finish what runs after SIGTERM; by then the commands of a lab have ended.
_DRAIN_TIMEOUT = "3 s"
#: Module of the daemon, by the role in its configuration.
MODULES: Mapping[Role, str] = {"worker": "daemons.worker", "agg": "daemons.aggregator", "ps": "daemons.ps"}

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


def worker_socket(directory: Path, host: str) -> Path:
    """Where the worker daemon of a host serves its ranks."""
    return directory / f"{host}.sock"


def token_file(directory: Path) -> Path:
    """Where the fabric's token is."""
    return directory / "token"


def configurations(topology: Topology, directory: Path, overrides: Overrides | None = None) -> dict[str, str]:
    """TOML by name of the host, for all that run a daemon. The token file must exist already.

    Raises :class:`inanet.control.config_file.ConfigError`, for overrides that are refused.
    """
    places = addresses(topology)
    coordinator = f"{places[topology.roots()[0]]}:{COORDINATOR_PORT}"
    texts = {}
    for host in topology.hosts():
        role = daemon_role(topology, host)
        if role is None:
            continue
        sections: dict[str, dict[str, Any]] = {
            "node": {"name": host.name, "listen": f"{places[host.name]}:0"},
            "log": {"format": "plain"},
            "control": {
                "token_file": str(token_file(directory)),
                "listen" if role == "ps" else "coordinator": coordinator,
                "drain_timeout": _DRAIN_TIMEOUT,
            },
        }
        if role == "worker":
            sections["local"] = {"socket": str(worker_socket(directory, host.name))}
        if role == "ps":
            sections["topology"] = topology.trees()
        for section, keys in (overrides or {}).items():
            foreign = _COORDINATORS if section == "control" and role != "ps" else frozenset()
            chosen = {key: value for key, value in keys.items() if key not in foreign}
            sections.setdefault(section, {}).update(chosen)
        texts[host.name] = write_toml(validate(MODELS[role], sections, directory / f"{host.name}.toml"))
    return texts
