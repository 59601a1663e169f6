"""Flows of INA packets: who sends them to whom, and the headers under which what a program makes of them leaves."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from inanet.phy.vnet import ETHERNET_BYTES, ETHERTYPE_IPV4, HEADER_BYTES, IP_BYTES, UDP
from inanet.switch.parse import CONGESTED, FLOWS, TEMPLATE_BYTES
from inanet.switch.programs import RAW_ETHERTYPE
from inanet.switch.tables import Tables
from inanet.wire.batch import I64, U8, U64

#: bits of a handle that number the flow; those above count how often the table has been cleared
FLOW_BITS = 12
assert 1 << FLOW_BITS == FLOWS
#: handles from here on: the switch itself, with a UDP port in the low bits
OWN = 1 << 62
_TTL = 64


@dataclass(frozen=True, slots=True)
class Flow:
    """``source`` and ``destination`` are endpoints, with port 0 in raw frames; ``ingress`` is the port it comes in at."""

    source: int
    destination: int
    ingress: int


@dataclass(frozen=True, slots=True)
class Way:
    """Headers of frames (see :class:`inanet.switch.rebuild.Rebuilder`), whether they are raw, and the port they leave
    at.
    """

    header: U8
    raw: bool
    port: int


def _by_member(groups: Iterable[Collection[int]]) -> dict[int, frozenset[int]]:
    """The groups, by their position, that each endpoint is in."""
    found: dict[int, set[int]] = {}
    for index, group in enumerate(groups):
        for member in group:
            found.setdefault(member, set()).add(index)
    return {member: frozenset(its) for member, its in found.items()}


class Flows:
    """The flow table of a switch with these forwarding tables and link headers of ``link`` bytes (14, or 0 on TUN).

    ``groups`` are the endpoints of every group.
    """

    def __init__(self, tables: Tables, link: int, groups: Iterable[Collection[int]] = ()) -> None:
        self._tables = tables
        self._groups = _by_member(groups)
        self._link = link
        self._ip = HEADER_BYTES + link
        self.keys: U64 = np.zeros((FLOWS, 3), np.uint64)
        self.used: I64 = np.zeros(1, np.int64)
        self.templates: U8 = np.zeros((FLOWS, TEMPLATE_BYTES), np.uint8)
        #: by flow: endpoint it comes from, handle of who its packets are from once a program has dealt with them,
        #: whether they came marked, and the port they are bound for
        self.sources: U64 = np.zeros(FLOWS, np.uint64)
        self.senders: U64 = np.zeros(FLOWS, np.uint64)
        self.congested: U8 = np.zeros(FLOWS, np.uint8)
        self.bound: I64 = np.zeros(FLOWS, np.int64)
        self._flows: dict[int, Flow] = {}
        #: by destination, marks and the groups that the sender is in: the flow that stands for all of them
        self._own: dict[tuple[int, int, frozenset[int]], int] = {}
        self._generation = 0

    @property
    def base(self) -> int:
        """What is added to a flow's number to make its handle."""
        return self._generation << FLOW_BITS

    def regroup(self, groups: Iterable[Collection[int]]) -> None:
        """Other endpoints are in groups from now on. Forgets all flows, because what is made of them may leave otherwise."""
        self._groups = _by_member(groups)
        self.clear()

    def clear(self) -> None:
        """Forget all flows; handles given out so far are no longer :meth:`current`."""
        self.keys[:] = 0
        self.used[:] = 0
        self._flows.clear()
        self._own.clear()
        self._generation += 1

    def current(self, handles: U64) -> U8:
        """For each handle, whether its flow is still in the table."""
        current: U8 = (handles >> np.uint64(FLOW_BITS) == np.uint64(self._generation)).astype(np.uint8)
        return current

    def learn(self, now: float) -> None:
        """Take note of flows that have been put into the table since the last call."""
        if self.used[0] == len(self._flows):
            return
        for number in np.flatnonzero(self.keys[:, 2]).tolist():
            if number in self._flows:
                continue
            source, destination, rest = self.keys[number].tolist()
            flow = Flow(source, destination, (rest >> 8 & 0xFFFFFFFF) - 1)
            self._flows[number] = flow
            self.sources[number] = source
            self.congested[number] = rest & CONGESTED == CONGESTED
            if self._link:
                hardware = int.from_bytes(self.templates[number, 16:22].tobytes(), "big")
                self._tables.learn_host(source >> 16, hardware, flow.ingress, now)
            first = number
            groups = self._groups.get(source)
            if self._is_own(destination) and groups is not None:
                # whichever of a group completes a sum, it comes from the switch
                first = self._own.setdefault((destination, rest & 0xFF, groups), number)
            self.senders[number] = self.base | first
            self.bound[number] = self._bound(number, flow, now)

    def _is_own(self, endpoint: int) -> bool:
        return bool(self._tables.own_address) and endpoint >> 16 == int(self._tables.own_address)

    def _bound(self, number: int, flow: Flow, now: float) -> int:
        """Port that a packet of the flow is bound for: that of its destination, or its own if it is for the switch."""
        if self._is_own(flow.destination):
            return flow.ingress
        way = self.onward(self.base | number, now)
        return flow.ingress if way is None else way.port

    def of(self, handle: int) -> Flow:
        """The flow of a handle."""
        return self._flows[handle & (FLOWS - 1)]

    def _header(self, handle: int) -> U8:
        """A copy of a flow's headers."""
        size = self._ip + IP_BYTES + 8
        return self.templates[handle & (FLOWS - 1), :size].copy()

    def onward(self, handle: int, now: float) -> Way | None:
        """Where packets of a flow go that a program lets pass: as they came. ``None``: nobody knows where that is."""
        flow, header = self.of(handle), self._header(handle)
        raw = not flow.destination & 0xFFFF
        if not self._link:
            host = self._tables.host(flow.destination >> 16)
            return None if host is None else Way(header, raw, host[1])
        hardware = int.from_bytes(header[10:16].tobytes(), "big")
        if hardware != int(self._tables.own_hardware):
            port = self._tables.port_of(hardware, now)
            if port is not None:
                return Way(header, raw, port)
        host = self._tables.host(flow.destination >> 16)
        if host is None:
            return None
        self._put_hardware(header, host[0], int.from_bytes(header[16:22].tobytes(), "big"))
        return Way(header, raw, host[1])

    def back(self, handle: int) -> Way:
        """Back to where a flow comes from, as if its destination answered."""
        flow, header = self.of(handle), self._header(handle)
        if self._link:
            header[10:22] = np.roll(header[10:22], 6)
        self._put_endpoints(header, flow.destination, flow.source)
        return Way(header, not flow.source & 0xFFFF, flow.ingress)

    def answers(self, handle: int, targets: tuple[int, ...]) -> bool:
        """Whether packets of a flow that go to ``targets`` answer it: their sender is among them."""
        return handle < OWN and self.of(handle).source in targets

    def towards(self, handle: int, destination: int, answering: bool) -> Way | None:
        """To an endpoint, from the flow's sender; or from its destination, if the packets are answers. ``None``: nobody
        knows where the endpoint is.
        """
        host = self._tables.host(destination >> 16)
        if host is None:
            return None
        raw = not destination & 0xFFFF
        own_hardware, own_address = int(self._tables.own_hardware), int(self._tables.own_address)
        if handle >= OWN:
            header, source, hardware = self._blank(raw), own_address << 16 | handle & 0xFFFF, own_hardware
        else:
            flow, header = self.of(handle), self._header(handle)
            source = flow.destination if answering else flow.source
            given = int.from_bytes(header[10:16].tobytes(), "big")
            sender = given if answering else int.from_bytes(header[16:22].tobytes(), "big")
            # what was sent to the switch's hardware goes on from it, as from any router
            hardware = own_hardware if given == own_hardware else sender
        if self._link:
            self._put_hardware(header, host[0], hardware)
        self._put_endpoints(header, source, destination)
        return Way(header, raw, host[1])

    def _blank(self, raw: bool) -> U8:
        """Headers of a packet that the switch makes itself."""
        header = np.zeros(self._ip + IP_BYTES + 8, np.uint8)
        if self._link:
            kind = RAW_ETHERTYPE if raw else ETHERTYPE_IPV4
            header[HEADER_BYTES + ETHERNET_BYTES - 2 : self._ip] = (kind >> 8, kind & 0xFF)
        header[self._ip] = 0x45
        header[self._ip + 6] = 0x40
        header[self._ip + 8] = _TTL
        header[self._ip + 9] = 1 if raw else UDP
        return header

    def _put_hardware(self, header: U8, destination: int, source: int) -> None:
        both = destination.to_bytes(6, "big") + source.to_bytes(6, "big")
        header[HEADER_BYTES : HEADER_BYTES + 12] = np.frombuffer(both, np.uint8)

    def _put_endpoints(self, header: U8, source: int, destination: int) -> None:
        """Addresses and, where there are any, ports."""
        ip = self._ip
        addresses = (source >> 16).to_bytes(4, "big") + (destination >> 16).to_bytes(4, "big")
        header[ip + 12 : ip + 20] = np.frombuffer(addresses, np.uint8)
        ports = (source & 0xFFFF).to_bytes(2, "big") + (destination & 0xFFFF).to_bytes(2, "big")
        header[ip + 20 : ip + 24] = np.frombuffer(ports, np.uint8)

    def mark(self, header: U8) -> U8:
        """The headers with congestion experienced, whatever the sender said it understands: as public programs do."""
        marked = header.copy()
        marked[self._ip + 1] |= CONGESTED
        return marked
