"""Forwarding by table: hardware addresses (learned or given), routes, and who has which IP address.

Frames that are not for the switch's own hardware address are forwarded by their destination address, flooded while it is
unknown. Frames for it are routed: to the port of the longest matching route, or to where the destination was last heard
of, with a time to live one lower.
"""

from collections.abc import Iterable
from ipaddress import IPv4Network

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.phy.vnet import ETHERTYPE_IPV4, HEADER_BYTES, IP_BYTES, big16, put16
from inanet.switch.parse import ETHERTYPE_ARP, Kind, big
from inanet.wire.batch import I64, U8, U64
from inanet.wire.drops import Drop

F64 = NDArray[np.float64]
#: places for hardware and IP addresses each; a power of two, and how many steps a search takes
PLACES = 4096
STEPS = 16
#: an ARP packet for IPv4 over Ethernet
ARP_BYTES = 28
#: seconds after which a learned hardware address is forgotten
MAX_AGE = 300.0
#: what :func:`forward` says beside the number of a port
FLOOD, DROPPED, LOCAL, TAKEN = -1, -2, -3, -4

_ORDINARY = int(Kind.ORDINARY)
_NO_ROUTE, _TTL_EXPIRED, _SHORT = int(Drop.NO_ROUTE), int(Drop.TTL_EXPIRED), int(Drop.SHORT)
_GIVEN = float("inf")


@njit("int64(uint64, uint64[::1], float64[::1], float64)", cache=True, nogil=True, _nrt=False)
def find(key: int, keys: U64, seen: F64, now: float) -> int:
    """Place of a hardware or IP address, or -1 if it is unknown or too old."""
    at = np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(52))
    for step in range(STEPS):
        place = (at + step) & (PLACES - 1)
        if keys[place] == key and key != 0:
            return int(place) if seen[place] + MAX_AGE >= now else -1
    return -1


@njit("int64(uint64, uint64[::1], float64[::1], float64)", cache=True, nogil=True, _nrt=False)
def place_for(key: int, keys: U64, seen: F64, now: float) -> int:
    """Place of an address that is learned now: its own, a free one, or that of the oldest nearby; -1 if all are given."""
    at = np.int64((key * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(52))
    oldest = np.int64(-1)
    for step in range(STEPS):
        place = (at + step) & (PLACES - 1)
        if keys[place] == key:
            return int(place)
        if seen[place] != _GIVEN and (oldest < 0 or seen[place] < seen[oldest]):
            oldest = place
    return int(oldest)


@njit(
    "void(uint64, int64, float64, uint64[::1], int64[::1], float64[::1])", cache=True, nogil=True, _nrt=False
)
def learn(source: int, ingress: int, now: float, keys: U64, ports: I64, seen: F64) -> None:
    """Take note of the port that a hardware address was heard at, unless it has been given one."""
    place = place_for(source, keys, seen, now)
    if place >= 0 and seen[place] != _GIVEN:
        keys[place] = source
        ports[place] = ingress
        seen[place] = now


@njit(
    "int64(uint8[::1], int64, int64, int64, uint64, uint64[::1], uint64[::1], int64[::1], float64[::1],"
    " int64[:, ::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def route(
    arena: U8,
    ip: int,
    link: int,
    ingress: int,
    own_hardware: int,
    addresses: U64,
    hardware: U64,
    address_ports: I64,
    address_seen: F64,
    routes: I64,
) -> int:
    """Port that an IPv4 packet leaves at, with a new link header and time to live in place; or minus the reason why it
    does not.
    """
    destination = big(arena, ip + 16, 4)
    out, next_hop = np.int64(-1), destination
    for j in range(len(routes)):
        if np.int64(destination) & routes[j, 1] == routes[j, 0]:
            out = routes[j, 2]
            if routes[j, 3]:
                next_hop = np.uint64(routes[j, 3])
            break
    place = np.int64(-1)
    if link:
        # hosts move rarely, and say so (ARP) when they do
        place = find(next_hop, addresses, address_seen, -np.inf)
        if place < 0:
            return -_NO_ROUTE
        out = address_ports[place] if out < 0 else out
    if out < 0 or (out == ingress and not link):
        return -_NO_ROUTE
    if arena[ip + 8] <= 1:
        return -_TTL_EXPIRED
    arena[ip + 8] -= np.uint8(1)
    # RFC 1141: the word with the time to live is 0x100 smaller
    total = big16(arena, ip + 10) + 0x100
    put16(arena, ip + 10, (total & 0xFFFF) + (total >> 16))
    if link:
        ethernet = ip - link
        for j in range(6):
            shift = np.uint64(40 - 8 * j)
            arena[ethernet + j] = np.uint8(hardware[place] >> shift & np.uint64(0xFF))
            arena[ethernet + 6 + j] = np.uint8(np.uint64(own_hardware) >> shift & np.uint64(0xFF))
    return int(out)


@njit(
    "void(uint8[::1], int64[::1], int64[::1], int64[:, ::1], int64, int64, float64, uint64, uint64, uint64[::1],"
    " int64[::1], float64[::1], uint64[::1], uint64[::1], int64[::1], float64[::1], int64[:, ::1], int64[::1],"
    " int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def forward(
    arena: U8,
    offsets: I64,
    lengths: I64,
    places: I64,
    link: int,
    ingress: int,
    now: float,
    own_hardware: int,
    own_address: int,
    keys: U64,
    ports: I64,
    seen: F64,
    addresses: U64,
    hardware: U64,
    address_ports: I64,
    address_seen: F64,
    routes: I64,
    egress: I64,
    drops: I64,
) -> None:
    """Where each frame goes: ``egress[i]`` becomes a port, or :data:`FLOOD`, :data:`DROPPED` (counted in ``drops``),
    :data:`LOCAL` (for the switch itself) or :data:`TAKEN` (no ordinary frame).

    The tables are those of :class:`Tables`. Routed frames are edited in place, see :func:`route`.
    """
    latest = np.uint64(0)
    for i in range(len(offsets)):
        ethernet = offsets[i] + HEADER_BYTES
        ip, end = ethernet + link, offsets[i] + lengths[i]
        if end < ip or (not link and end - ip < IP_BYTES):
            egress[i] = DROPPED
            drops[_SHORT] += 1
            continue
        if link and not arena[ethernet + 6] & 1:
            source = big(arena, ethernet + 6, 6)
            # frames come in trains
            if source != latest:
                latest = source
                learn(source, ingress, now, keys, ports, seen)
        if places[i, 0] != _ORDINARY:
            egress[i] = TAKEN
            continue
        kind = big16(arena, ip - 2) if link else ETHERTYPE_IPV4 * (arena[ip] >> 4 == 4)
        if kind == ETHERTYPE_ARP and end - ip >= ARP_BYTES:
            egress[i] = LOCAL
            continue
        if link and big(arena, ethernet, 6) != own_hardware:
            place = find(big(arena, ethernet, 6), keys, seen, now)
            whither = ports[place] if place >= 0 and not arena[ethernet] & 1 else np.int64(FLOOD)
            if whither != ingress:
                egress[i] = whither
                continue
            # whoever it is for has heard it already, as on any learning switch
            whither = np.int64(-_NO_ROUTE)
        elif kind != ETHERTYPE_IPV4 or end - ip < IP_BYTES:
            whither = np.int64(-_NO_ROUTE)
        elif big(arena, ip + 16, 4) == own_address:
            egress[i] = LOCAL
            continue
        else:
            whither = route(
                arena,
                ip,
                link,
                ingress,
                own_hardware,
                addresses,
                hardware,
                address_ports,
                address_seen,
                routes,
            )
        egress[i] = whither if whither >= 0 else DROPPED
        if whither < 0:
            drops[-whither] += 1


class Tables:
    """The forwarding tables of a switch with the address ``address`` (IPv4) and the hardware address ``hardware``."""

    def __init__(self, hardware: int = 0, address: int = 0) -> None:
        self.own_hardware = np.uint64(hardware)
        self.own_address = np.uint64(address)
        self._keys: U64 = np.zeros(PLACES, np.uint64)
        self._ports: I64 = np.zeros(PLACES, np.int64)
        self._seen: F64 = np.full(PLACES, -np.inf)
        self._addresses: U64 = np.zeros(PLACES, np.uint64)
        self._hardware: U64 = np.zeros(PLACES, np.uint64)
        self._address_ports: I64 = np.zeros(PLACES, np.int64)
        self._address_seen: F64 = np.full(PLACES, -np.inf)
        self._routes: I64 = np.zeros((0, 4), np.int64)

    def give_hardware(self, hardware: int, port: int) -> None:
        """A hardware address that is at a port whatever is seen elsewhere."""
        self._learn_hardware(hardware, port, _GIVEN)

    def _learn_hardware(self, hardware: int, port: int, now: float) -> None:
        place = place_for(np.uint64(hardware), self._keys, self._seen, 0.0)
        if place >= 0 and self._seen[place] != _GIVEN:
            self._keys[place], self._ports[place], self._seen[place] = hardware, port, now

    def give_host(self, address: int, hardware: int, port: int) -> None:
        """An IP address that has this hardware address, behind this port, whatever is heard elsewhere."""
        self.learn_host(address, hardware, port, _GIVEN)
        self.give_hardware(hardware, port)

    def learn_host(self, address: int, hardware: int, port: int, now: float) -> None:
        """An IP address that was heard of."""
        place = place_for(np.uint64(address), self._addresses, self._address_seen, now)
        if place >= 0 and self._address_seen[place] != _GIVEN:
            self._addresses[place], self._hardware[place] = address, hardware
            self._address_ports[place], self._address_seen[place] = port, now

    def host(self, address: int) -> tuple[int, int] | None:
        """Hardware address and port of an IP address, if they are known. On routes only: (0, port)."""
        for network, mask, port, gateway in self._routes.tolist():
            if address & mask == network:
                if not gateway and not self.own_hardware:
                    return 0, port
                address = gateway or address
                break
        place = find(np.uint64(address), self._addresses, self._address_seen, -np.inf)
        return (int(self._hardware[place]), int(self._address_ports[place])) if place >= 0 else None

    def port_of(self, hardware: int, now: float) -> int | None:
        """Port behind which a hardware address is, if that is known."""
        place = find(np.uint64(hardware), self._keys, self._seen, now)
        return int(self._ports[place]) if place >= 0 else None

    def set_routes(self, routes: Iterable[tuple[IPv4Network, int, int]]) -> None:
        """Routes as (network, port, gateway's address or 0); the longest prefix that matches is taken."""
        ordered = sorted(routes, key=lambda route: -route[0].prefixlen)
        rows = [
            (int(network.network_address), int(network.netmask), port, gateway)
            for network, port, gateway in ordered
        ]
        self._routes = np.array(rows, np.int64).reshape(len(rows), 4)

    def forward(
        self,
        arena: U8,
        offsets: I64,
        lengths: I64,
        places: I64,
        link: int,
        ingress: int,
        now: float,
        drops: I64,
    ) -> I64:
        """Where each frame goes; see :func:`forward`."""
        egress = np.empty(len(offsets), np.int64)
        forward(
            arena,
            offsets,
            lengths,
            places,
            link,
            ingress,
            now,
            self.own_hardware,
            self.own_address,
            self._keys,
            self._ports,
            self._seen,
            self._addresses,
            self._hardware,
            self._address_ports,
            self._address_seen,
            self._routes,
            egress,
            drops,
        )
        return egress
