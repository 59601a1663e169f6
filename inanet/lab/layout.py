"""From a topology to the operations that build it, as plain data: nothing here touches the system.

Every operation states how something shall be, not what to do to get there, so that applying a layout twice,
or to what an interrupted run left, comes to the same. Operations on one namespace stand together, and those
that need something stand after what they need.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from inanet.lab.model import Host, Link, Topology

#: Everything that this program makes starts with it.
PREFIX = "ina"
#: A host's interface; a switch's bridge (node names have no '-'). Ports of a switch are named after what is
#: at the other end.
HOST_INTERFACE = "eth0"
BRIDGE = "sw-bridge"
#: Addresses exist only inside the lab's namespaces, so they may be anything private.
_HOSTS = ipaddress.IPv4Network("10.201.0.0/16")
_TRUNKS = ipaddress.IPv4Network("10.202.0.0/16")
_GATEWAY = 254
#: first of the addresses of ina-switches, and how far a host's further addresses lie apart
_SWITCHES, _ALIAS = 200, 64


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace with a name, its loopback up, without IPv6 (whose chatter would disturb)."""

    namespace: str


@dataclass(frozen=True, slots=True)
class Bridge:
    """A bridge; multicast snooping and querier as an administrator would set them on a switch."""

    namespace: str
    name: str
    snooping: bool
    querier: bool


@dataclass(frozen=True, slots=True)
class Veth:
    """A cable between two namespaces."""

    namespace: str
    name: str
    peer_namespace: str
    peer_name: str


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface that is up; ``address`` is CIDR text; ``mtu`` None leaves it to the kernel."""

    namespace: str
    name: str
    mtu: int | None = None
    master: str | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Shaper:
    """What may leave by an interface: ``rate`` bits/s (None: no shaper), ``burst`` bytes, ``latency`` s."""

    namespace: str
    name: str
    rate: int | None
    burst: int
    latency: float


@dataclass(frozen=True, slots=True)
class Route:
    """Packets to a network (CIDR text) leave to any of the gateways, each flow to one of them; without
    gateways by :data:`HOST_INTERFACE`.
    """

    namespace: str
    network: str
    gateways: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Router:
    """A namespace that forwards between its interfaces, hashing flows by ports."""

    namespace: str


Operation: TypeAlias = Namespace | Bridge | Veth | Interface | Shaper | Route | Router


def namespace(lab: str, node: str) -> str:
    """Name of a node's network namespace."""
    return f"{PREFIX}.{lab}.{node}"


def addresses(topology: Topology) -> Mapping[str, str]:
    """IPv4 address of every host, by name. Bridged: one /24. Routed: a /24 for every switch."""
    return {name: cidr.partition("/")[0] for name, cidr in _cidrs(topology).items()}


def switch_addresses(topology: Topology) -> Mapping[str, str]:
    """IPv4 address that each ``ina-switch`` is known by, by name of the switch."""
    return {
        switch.name: str(_block(0)[_SWITCHES + index])
        for index, switch in enumerate(topology.switch)
        if switch.kind == "ina"
    }


def alias(address: str, number: int) -> str:
    """A further address for a host of a bridged lab: ``number`` is 1 or 2. Raises ``ValueError`` for others."""
    if number not in (1, 2):
        raise ValueError(f"hosts have two further addresses, 1 and 2, and no {number}")
    return str(ipaddress.IPv4Address(address) + number * _ALIAS)


def ports(topology: Topology, switch: str) -> list[str]:
    """Names of a switch's interfaces: the hosts on it, and the switches that trunks lead to."""
    trunks = [trunk.between for trunk in topology.trunks() if switch in trunk.between]
    return [host.name for host in topology.hosts() if host.switch == switch] + [
        ends[1] if ends[0] == switch else ends[0] for ends in trunks
    ]


def operations(topology: Topology, lab: str) -> list[Operation]:
    """Everything that makes the lab ``lab`` of a topology, in an order in which it can be done."""
    nodes = [switch.name for switch in topology.switch] + [host.name for host in topology.hosts()]
    plan: list[Operation] = [Namespace(namespace(lab, node)) for node in nodes]
    for index in range(len(topology.switch)):
        plan += _switch(topology, lab, index)
    cidrs = _cidrs(topology)
    for host in topology.hosts():
        plan += _host(topology, lab, host, cidrs[host.name])
    return plan


def _cidrs(topology: Topology) -> dict[str, str]:
    index = {switch.name: place for place, switch in enumerate(topology.switch)}
    taken: dict[int, int] = {}
    cidrs = {}
    for host in topology.hosts():
        block = index[host.switch] if topology.fabric == "routed" else 0
        taken[block] = taken.get(block, 0) + 1
        cidrs[host.name] = f"{_block(block)[taken[block]]}/24"
    return cidrs


def _block(index: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((int(_HOSTS.network_address) + (index << 8), 24))


def _shaper(place: str, name: str, link: Link, rate: int | None) -> Shaper:
    assert link.burst is not None
    assert link.latency is not None
    return Shaper(place, name, rate, link.burst, link.latency)


def _host(topology: Topology, lab: str, host: Host, cidr: str) -> Iterator[Operation]:
    here = namespace(lab, host.name)
    yield Interface(here, HOST_INTERFACE, host.link.mtu, address=cidr)
    yield _shaper(here, HOST_INTERFACE, host.link, host.link.sends)
    # without a route the kernel refuses to send to a group unless the socket names an interface
    yield Route(here, "224.0.0.0/4")
    if topology.detour is not None:
        # more specific than the hosts' own network, in which all are neighbours
        ring = ipaddress.IPv4Network((int(_block(0)[_ALIAS]), 26))
        yield Route(here, str(ring), (switch_addresses(topology)[topology.detour],))
    if topology.fabric == "routed":
        gateway = ipaddress.IPv4Interface(cidr).network[_GATEWAY]
        yield Route(here, "0.0.0.0/0", (str(gateway),))


def _switch(topology: Topology, lab: str, index: int) -> Iterator[Operation]:
    switch = topology.switch[index]
    routed = topology.fabric == "routed"
    here = namespace(lab, switch.name)
    # the ports of an ina-switch belong to nobody else
    master = BRIDGE if switch.kind == "bridge" else None
    if master is not None:
        yield Bridge(here, BRIDGE, switch.snooping, switch.snooping and switch.querier)
        yield Interface(here, BRIDGE, address=f"{_block(index)[_GATEWAY]}/24" if routed else None)
    for host in topology.hosts():
        if host.switch == switch.name:
            yield Veth(here, host.name, namespace(lab, host.name), HOST_INTERFACE)
            yield Interface(here, host.name, host.link.mtu, master=master)
            yield _shaper(here, host.name, host.link, host.link.receives)
    # the switch that comes first lays the cable, so that both find it
    earlier = {before.name for before in topology.switch[:index]}
    for number, trunk in enumerate(topology.trunks()):
        if switch.name not in trunk.between:
            continue
        first = trunk.between[0] == switch.name
        other = trunk.between[1] if first else trunk.between[0]
        if other not in earlier:
            yield Veth(here, other, namespace(lab, other), switch.name)
        if routed:
            yield Interface(here, other, trunk.link.mtu, address=f"{_end(number, first)}/30")
        else:
            yield Interface(here, other, trunk.link.mtu, master=master)
        yield _shaper(here, other, trunk.link, trunk.link.rate)
    if routed:
        yield Router(here)
        yield from _routes(topology, lab, switch.name)


def _end(number: int, first: bool) -> ipaddress.IPv4Address:
    """Address of one end of trunk ``number``, the first or the second named."""
    return _TRUNKS[4 * number + (1 if first else 2)]


def _routes(topology: Topology, lab: str, name: str) -> Iterator[Route]:
    """From a switch to the subnets of all others: by every neighbour that is one trunk nearer."""
    neighbours: dict[str, dict[str, str]] = {switch.name: {} for switch in topology.switch}
    for number, trunk in enumerate(topology.trunks()):
        first, second = trunk.between
        neighbours[first][second] = str(_end(number, first=False))
        neighbours[second][first] = str(_end(number, first=True))
    for index, switch in enumerate(topology.switch):
        if switch.name == name or not any(host.switch == switch.name for host in topology.host):
            continue
        distance = {switch.name: 0}
        queue = [switch.name]
        for node in queue:
            for near in neighbours[node]:
                if near not in distance:
                    distance[near] = distance[node] + 1
                    queue.append(near)
        nearer = [near for near in neighbours[name] if distance[near] < distance[name]]
        yield Route(
            namespace(lab, name), str(_block(index)), tuple(neighbours[name][near] for near in nearer)
        )
