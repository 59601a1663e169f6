"""From a topology to names, addresses and the operations that build it. Pure: touches nothing, needs no privilege.

Every host and every switch is a namespace ``ina.<lab>.<node>``. A host has one interface, ``eth0``; a switch has a
bridge ``br0`` whose ports carry the names of what they lead to. Both ends of a link are shaped, each in its sending
direction.

========= ==========================================================================================
bridged   10.90.0.0/24 for all hosts
routed    10.90.<switch>.0/24 for the hosts of a switch, .254 is the switch; 10.91.<trunk>.0/31 between switches
========= ==========================================================================================
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from inanet.lab.model import Host, Topology, Trunk
from inanet.lab.operations import Address, Bridge, Cable, Namespace, Operation, Route, Shape, Sysctl

PREFIX = "ina"
INTERFACE = "eth0"
BRIDGE = "br0"
_SUBNET_BITS = 24
_SWITCH_ADDRESS = 254

#: Neighbour discovery and duplicate address detection would be noise on the links; the lab speaks IPv4.
_QUIET = ("ipv6/conf/all/disable_ipv6", "ipv6/conf/default/disable_ipv6")


def namespace_prefix(lab: str) -> str:
    """What the names of all namespaces of a lab start with, and no others."""
    return f"{PREFIX}.{lab}."


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host ended up."""

    host: Host
    namespace: str
    address: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A topology laid out under a lab id: where its hosts are, and the operations that build it, in order."""

    lab: str
    topology: Topology
    places: tuple[Place, ...]
    operations: tuple[Operation, ...]

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Names of all namespaces, switches included."""
        return tuple(step.name for step in self.operations if isinstance(step, Namespace))

    @property
    def digest(self) -> str:
        """Changes whenever an operation does: whether an existing lab was built from this layout."""
        return hashlib.sha256(repr(self.operations).encode()).hexdigest()[:16]

    def place(self, name: str) -> Place:
        """The place of a host. Raises ``KeyError``."""
        for place in self.places:
            if place.host.name == name:
                return place
        raise KeyError(name)


def lay_out(topology: Topology, lab: str | None = None) -> Layout:
    """Lay a checked topology out under a lab id (default: the topology's name)."""
    lab = lab or topology.name
    prefix = namespace_prefix(lab)
    places = tuple(_places(topology, prefix))
    operations: list[Operation] = []
    for name in [switch.name for switch in topology.switch] + [place.host.name for place in places]:
        operations.append(Namespace(prefix + name))
        operations += [Sysctl(prefix + name, key, "1", optional=True) for key in _QUIET]
    operations += _switches(topology, prefix, places)
    for place in places:
        operations += _attachment(topology, prefix, place)
    for index, trunk in enumerate(topology.trunks()):
        operations += _trunk(topology, prefix, index, trunk)
    if topology.fabric == "routed":
        operations += _routes(topology, prefix, places)
    return Layout(lab, topology, places, tuple(operations))


def _subnet(topology: Topology, switch: str) -> str:
    """First three bytes of the subnet the hosts of a switch live in."""
    if topology.fabric == "bridged":
        return "10.90.0"
    return f"10.90.{[item.name for item in topology.switch].index(switch)}"


def _places(topology: Topology, prefix: str) -> Iterator[Place]:
    used: dict[str, int] = {}
    for host in topology.hosts():
        subnet = _subnet(topology, host.switch)
        used[subnet] = used.get(subnet, 0) + 1
        yield Place(host, prefix + host.name, f"{subnet}.{used[subnet]}")


def _switches(topology: Topology, prefix: str, places: tuple[Place, ...]) -> Iterator[Operation]:
    populated = {place.host.switch for place in places}
    for switch in topology.switch:
        namespace = prefix + switch.name
        routed = topology.fabric == "routed"
        if routed:
            yield Sysctl(namespace, "ipv4/ip_forward", "1")
            # by ports too, so that the flows of one pair of hosts spread over equal paths
            yield Sysctl(namespace, "ipv4/fib_multipath_hash_policy", "1", optional=True)
        if not routed or switch.name in populated:
            yield Bridge(namespace, BRIDGE, topology.multicast.snooping, topology.multicast.querier)
        if routed and switch.name in populated:
            yield Address(namespace, BRIDGE, f"{_subnet(topology, switch.name)}.{_SWITCH_ADDRESS}", _SUBNET_BITS)


def _attachment(topology: Topology, prefix: str, place: Place) -> Iterator[Operation]:
    host = place.host
    switch = prefix + host.switch
    yield Cable(place.namespace, INTERFACE, switch, host.name, host.link.mtu or 0, far_bridge=BRIDGE)
    yield Address(place.namespace, INTERFACE, place.address, _SUBNET_BITS)
    yield Route(place.namespace, "224.0.0.0/4", interface=INTERFACE)
    if topology.fabric == "routed":
        gateway = f"{_subnet(topology, host.switch)}.{_SWITCH_ADDRESS}"
        yield Route(place.namespace, "default", (gateway,))
    if host.link.rate is not None:
        for namespace, interface in ((place.namespace, INTERFACE), (switch, host.name)):
            yield Shape(namespace, interface, host.link.rate, host.link.burst or 0, host.link.latency or 0)


def _trunk(topology: Topology, prefix: str, index: int, trunk: Trunk) -> Iterator[Operation]:
    first, second = trunk.between
    bridge = BRIDGE if topology.fabric == "bridged" else None
    yield Cable(prefix + first, second, prefix + second, first, trunk.link.mtu or 0, bridge, bridge)
    for side, (here, there) in enumerate(((first, second), (second, first))):
        if topology.fabric == "routed":
            yield Address(prefix + here, there, f"10.91.{index}.{side}", 31)
        if trunk.link.rate is not None:
            yield Shape(prefix + here, there, trunk.link.rate, trunk.link.burst or 0, trunk.link.latency or 0)


def _routes(topology: Topology, prefix: str, places: tuple[Place, ...]) -> Iterator[Operation]:
    """From every switch to the subnet of every other: all neighbours on a shortest path, in the file's order."""
    gateway: dict[tuple[str, str], str] = {}
    for index, trunk in enumerate(topology.trunk):
        first, second = trunk.between
        gateway[first, second] = f"10.91.{index}.1"
        gateway[second, first] = f"10.91.{index}.0"
    for target in sorted({place.host.switch for place in places}):
        distance = _distances(target, list(gateway))
        for switch in topology.switch:
            hops = tuple(
                address
                for (here, there), address in gateway.items()
                if here == switch.name and distance[there] < distance[here]
            )
            if hops:
                yield Route(prefix + switch.name, f"{_subnet(topology, target)}.0/{_SUBNET_BITS}", hops)


def _distances(target: str, links: list[tuple[str, str]]) -> dict[str, int]:
    distance = {target: 0}
    queue = deque([target])
    while queue:
        here = queue.popleft()
        for first, second in links:
            if first == here and second not in distance:
                distance[second] = distance[here] + 1
                queue.append(second)
    return distance
