"""``ina-switch`` in a lab: a daemon for every switch of that kind, with the NetReduce rings that it serves.

In a topology with one such switch, that serves all hosts of a ring: it is in their way, or a route leads there. With several, those that hosts of the ring are plugged
into are leaves, and one above them that none is plugged into is the spine (NetReduce, section 3.3).
"""

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from inanet.config.daemons import MODELS, Role
from inanet.config.file import validate, write_toml
from inanet.config.rings import RingEntry
from inanet.lab.fabric import LabFabric
from inanet.lab.layout import ports, switch_addresses
from inanet.lab.model import Topology
from inanet.lab.session import Lab
from inanet.proto.netreduce.ring import Connection, Sizes
from inanet.service.exits import Exit, Failure
from inanet.units import show_duration

#: room for eight messages in flight of eight hosts, and more
_MEMORY = "64 MB"


class NoSpine(Failure):
    """A ring's hosts are on several switches, and there is none above them that could join their sums."""

    code = Exit.USAGE


def ring_entry(
    topology: Topology, ring: int, hosts: Sequence[str], connections: Sequence[Connection], sizes: Sizes
) -> RingEntry:
    """``[[switch.rings]]`` of a ring over ``hosts``, by rank, the same for every switch of a topology.

    ``connections[r]`` is rank *r*'s to its successor. Raises :class:`NoSpine`.
    """
    plugged = {host.name: host.switch for host in topology.hosts()}
    leaves: dict[str, list[str]] = {}
    for host, connection in zip(hosts, connections, strict=True):
        leaves.setdefault(plugged[host], []).append(str(IPv4Address(connection.source)))
    fields: dict[str, Any] = {
        "ring": ring,
        "length": sizes.length,
        "window": sizes.window,
        "packet": sizes.packet_bytes,
        "connections": [
            {
                "source": str(IPv4Address(one.source)),
                "destination": str(IPv4Address(one.destination)),
                "queue_pair": one.queue_pair,
            }
            for one in connections
        ],
    }
    own = switch_addresses(topology)
    if len(own) > 1:
        fields["spine"] = own[spine(topology, list(leaves))]
        fields["racks"] = [{"switch": own[leaf], "hosts": members} for leaf, members in leaves.items()]
    return RingEntry.model_validate(fields)


def spine(topology: Topology, leaves: Sequence[str]) -> str:
    """The switch above ``leaves``. Raises :class:`NoSpine`."""
    pairs = {frozenset(trunk.between) for trunk in topology.trunks()}
    kinds = {switch.name: switch.kind for switch in topology.switch}
    for name in kinds:
        if name not in leaves and all(
            frozenset((name, leaf)) in pairs and kinds[leaf] == kinds[name] == "ina" for leaf in leaves
        ):
            return name
    raise NoSpine(
        f"topology {topology.name!r}: the hosts of a ring are on {', '.join(leaves)}, and there is no other switch with "
        "a trunk to each, all of kind 'ina'; allowed: one, or all hosts on one switch"
    )


def configurations(topology: Topology, rings: Sequence[RingEntry] = (), pause: float = 0.0) -> dict[str, str]:
    """TOML by name of the switch, for every ina-switch. Raises :class:`inanet.config.file.ConfigError`."""
    texts = {}
    for name, address in switch_addresses(topology).items():
        sections = {
            "node": {"name": name},
            "log": {"format": "plain"},
            "switch": {
                "transport": "packet",
                "address": address,
                "ports": [{"name": port} for port in ports(topology, name)],
                "rings": [ring.model_dump(mode="json", exclude_none=True) for ring in rings],
                "ring_memory": _MEMORY,
                "pause": show_duration(pause),
            },
        }
        texts[name] = write_toml(validate(MODELS["switch"], sections, Path(f"{name}.toml")))
    return texts


def switches(
    lab: Lab,
    rings: Sequence[RingEntry] = (),
    pause: float = 0.0,
    directory: Path | None = None,
    **options: Any,
) -> LabFabric:
    """The ina-switches of a lab: each serves ``rings``, of which its own part follows from its address; ``pause`` is that of
    ``[switch]``, seconds. ``options`` are those of :class:`~inanet.lab.fabric.LabFabric`.
    """

    def texts(directory: Path) -> Mapping[str, str]:
        return configurations(lab.topology, rings, pause)

    roles: dict[str, Role] = dict.fromkeys(switch_addresses(lab.topology), "switch")
    return LabFabric(lab, roles, texts, directory=directory, **options)
