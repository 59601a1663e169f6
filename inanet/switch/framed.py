"""A switch whose ports carry frames: packet sockets on Ethernet interfaces, or TUN interfaces.

What is no INA packet passes as it came, super-frame by super-frame. INA packets go through the pipeline and leave as
super-frames again. A super-frame of ordinary datagrams is cut where a queue marks or drops part of it; one of TCP is one
fragment of its wire length to the queue.

A *flow* is who sends INA packets to whom, with the headers under which what a program makes of them leaves.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from inanet.phy.vnet import ETHERTYPE_IPV4, HEADER_BYTES, IP_BYTES, UDP_BYTES, FrameBatch, big16
from inanet.proto.common.plan import SwitchedJob
from inanet.proto.common.program import Action
from inanet.switch import parse
from inanet.switch.egress import LOST, MARKED
from inanet.switch.frame_ports import FrameDevice, FramedPort, FrameSource, RingPort
from inanet.switch.local import Local, batch_of
from inanet.switch.parse import Kind
from inanet.switch.pipeline import Pipeline, Run
from inanet.switch.port import PortOptions, SwitchPort
from inanet.switch.programs import Registration, dismiss, matches, serve
from inanet.switch.rebuild import Frames, Rebuilder, mark_congestion, segments_of
from inanet.switch.tables import DROPPED, FLOOD, LOCAL, TAKEN, Tables
from inanet.wire.batch import I64, U8, PacketBatch
from inanet.wire.drops import Drop

if TYPE_CHECKING:
    from inanet.switch.splice import Splice
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from inanet.phy.vnet import ETHERNET_BYTES, UDP
from inanet.switch.parse import CONGESTED, FLOWS, TEMPLATE_BYTES
from inanet.switch.programs import RAW_ETHERTYPE
from inanet.wire.batch import U64

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


class FrameSwitch:
    """Ports by name on ``devices`` around the programs of ``pipeline``; ``tables`` say who is where.

    ``link`` is the length of link headers: 14, or 0 for TUN. ``members`` maps endpoints to the number of the port that
    their hosts must come in at; those of hosts that it lacks may come in anywhere. ``rings`` bring raw frames of the ports
    with these names. ``clock`` is what delays of faults are measured by. ``splice`` sees RoCE before anything else does; faults
    of ports do not touch what it absorbs.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        devices: Mapping[str, FrameDevice],
        tables: Tables,
        *,
        link: int = 14,
        options: Mapping[str, PortOptions] | None = None,
        members: Mapping[int, int] | None = None,
        rings: Mapping[str, FrameSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
        splice: "Splice | None" = None,
    ) -> None:
        self.pipeline = pipeline
        self.tables = tables
        self.splice = splice
        self._link = link
        self._flows = Flows(tables, link)
        self._local = Local(tables, link)
        self._rebuilder = Rebuilder(link)
        chosen = options or {}
        self._ports = [
            FramedPort(self, number, name, device, chosen.get(name, PortOptions()), clock)
            for number, (name, device) in enumerate(devices.items())
        ]
        by_name = {port.name: port for port in self._ports}
        self._rings = [RingPort(self, by_name[name], ring) for name, ring in (rings or {}).items()]
        #: hosts that speak from one port alone, by address
        self._placed = {member >> 16: port for member, port in (members or {}).items()}
        self._follow()
        self._places: I64 = np.zeros((64, parse.PLACES), np.int64)
        self._shares = [[0, 0] for _ in pipeline.registrations]
        self._limited = any(port.queue.rate is not None for port in self._ports)

    @property
    def ports(self) -> list[SwitchPort]:
        """All ports, rings included."""
        return [*self._ports, *self._rings]

    @property
    def programs(self) -> int:
        """How many programs it runs."""
        return len(self.pipeline.registrations)

    def endpoints(self) -> dict[str, int]:
        """See :class:`~inanet.switch.port.Switch`; port 0 stands for raw frames."""
        own = int(self.tables.own_address) << 16
        return {
            one.name: own | (one.ports[0].start if one.ports else 0) for one in self.pipeline.registrations
        }

    # ---------------------------------------------------------------- jobs

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        serve(self._registration(program), job, key, self.endpoints()[program])
        self._follow()

    def dismiss(self, program: str, job: int, leave: Callable[[SwitchPort], None]) -> None:
        """See :class:`~inanet.switch.port.Switch`. Interfaces stay."""
        dismiss(self._registration(program), job)
        self._follow()

    def _registration(self, program: str) -> Registration:
        return next(one for one in self.pipeline.registrations if one.name == program)

    def _follow(self) -> None:
        """Take packets from the members that programs have now, and from nobody else."""
        registrations = self.pipeline.registrations
        self._flows.regroup([group for each in registrations for group in each.groups.values()])
        placed = {
            member: self._placed[member >> 16]
            for each in registrations
            for member in each.uplinks
            if member >> 16 in self._placed
        }
        self._program_ports, self._raw, self._members = matches(registrations, placed)

    # ---------------------------------------------------------------- parse and filter

    def take(self, port: FramedPort, frames: FrameBatch, now: float) -> None:
        """Pass frames that have arrived at a port through the switch."""
        if self.splice is not None:
            frames, sums = self.splice.take(frames, port.number, now)
            for out, made in sums:
                if out == FLOOD:
                    self._flood(made, -1, now)
                else:
                    self._send_frames(out, made, now)
            if not len(frames):
                return
        pipeline, count = self.pipeline, len(frames)
        if count > len(self._places):
            self._places = np.zeros((count, parse.PLACES), np.int64)
        places = self._places[:count]
        found = parse.find_packets(
            frames.arena,
            frames.offsets,
            frames.lengths,
            self._link,
            port.number,
            self._program_ports,
            self._raw,
            self._members,
            places,
            self._flows.keys,
            self._flows.used,
            self._flows.templates,
            pipeline.drops,
        )
        kinds = places[:, parse.KIND]
        pipeline.stages["parse"] += count
        pipeline.stages["filter"] += int(np.count_nonzero(kinds == Kind.REFUSED))
        again = np.flatnonzero(kinds == Kind.AGAIN)
        self._forward_frames(port, frames, places, now)
        if found:
            self._flows.learn(now)
            self._aggregate(port, frames.arena, places, count, int(found), now)
        if len(again):
            self._flows.clear()
            self.take(port, frames.select(again), now)

    def _aggregate(
        self, port: FramedPort, arena: U8, places: I64, count: int, found: int, now: float
    ) -> None:
        """The packets of each program in turn."""
        offsets, lengths = np.empty(found, np.int64), np.empty(found, np.int64)
        handles = np.empty(found, np.uint64)
        for number in self._present(places):
            laid = int(parse.lay_out(places, count, number, self._flows.base, offsets, lengths, handles))
            batch = PacketBatch(arena, offsets[:laid], lengths[:laid], handles[:laid])
            impaired = port.impair(1 + number, batch)
            if impaired is not None:
                self._process(number, impaired, now)

    def _present(self, places: I64) -> list[int]:
        """Programs that have packets among these frames."""
        if self.programs == 1:
            return [0]
        ina = places[places[:, parse.KIND] == Kind.INA, parse.PROGRAM]
        return np.flatnonzero(np.bincount(ina)).tolist()

    def _process(self, number: int, batch: PacketBatch, now: float) -> None:
        """Send packets, whose sources are handles of flows, through their program."""
        registration, flows = self.pipeline.registrations[number], self._flows
        handles = batch.sources
        which = (handles & np.uint64(parse.FLOWS - 1)).view(np.int64)
        packets = PacketBatch(batch.arena, batch.offsets, batch.lengths, flows.sources[which])
        congested = self._congested(number, which, batch.lengths, now)
        runs = self.pipeline.process(registration, packets, handles, flows.senders[which], now, congested)
        share = self._shares[number]
        share[0] += len(batch)
        share[1] += sum(len(run.offsets) for run in runs)
        self._leave(registration, runs, now)
        self._spill(registration, now)

    def _congested(self, number: int, which: I64, lengths: I64, now: float) -> U8:
        """Which packets come marked, or find the queue that they are bound for above its threshold."""
        congested = self._flows.congested[which]
        if self._limited:
            offered, left = self._shares[number]
            bound = self._flows.bound[which]
            for port in np.unique(bound).tolist():
                mine = np.flatnonzero(bound == port)
                sizes = lengths[mine] + self._link + 28
                found = self._ports[port].queue.expected(sizes, left / offered if offered else 0.0, now)
                if found is not None:
                    congested[mine] |= found
        return congested

    # ---------------------------------------------------------------- mark and forward: packets of programs

    def _leave(self, registration: Registration, runs: Sequence[Run], now: float) -> None:
        for run in runs:
            self.pipeline.stages["mark"] += len(run.offsets)
            for way in self._ways(registration, run, now):
                if way is None:
                    self.pipeline.drops[Drop.NO_ROUTE] += len(run.offsets)
                else:
                    self._send(way, run, now)

    def _ways(self, registration: Registration, run: Run, now: float) -> list[Way | None]:
        """Where a run goes."""
        flows = self._flows
        if run.action == Action.PASS:
            return [flows.onward(run.origin, now)]
        if run.action == Action.REPLY:
            return [flows.back(run.origin)]
        targets = (run.target,) if run.action == Action.UNICAST else registration.groups.get(run.target, (0,))
        answering = flows.answers(run.origin, targets)
        ways = [flows.towards(run.origin, target, answering) for target in targets]
        for target, way in zip(targets, ways, strict=True):
            question = self._local.question(target >> 16, now) if way is None and target else None
            if question is not None:
                self._flood(batch_of(question), -1, now)
        return ways

    def _send(self, way: Way, run: Run, now: float, deaf: bool = False) -> None:
        """Queue and send a run, the part marked whose place in the queue says so; ``deaf``: who sent it knows no marks."""
        port, count = self._ports[way.port], len(run.offsets)
        headers = self._link + IP_BYTES + (0 if way.raw else UDP_BYTES)
        drops = self.pipeline.drops
        calm, marked = port.queue.admit(count, run.length + headers, now)
        drops[Drop.QUEUE_FULL] += count - calm - marked
        if run.mark:
            calm, marked = 0, calm + marked
        for first, packets, header in (
            (0, calm, way.header),
            (calm, marked, self._flows.mark(way.header) if marked and not deaf else way.header),
        ):
            if not packets:
                continue
            offsets = run.offsets[first : first + packets]
            left = packets
            for frames, each in self._rebuilder.frames(
                port.device, header, way.raw, run.arena, offsets, run.length
            ):
                inside = min(len(frames) * each, left)
                left -= inside
                lost = port.outbox.send(frames)
                gone = max(0, inside - (len(frames) - lost) * each) if lost else 0
                drops[Drop.EGRESS_FULL] += gone
                self.pipeline.stages["forward"] += inside - gone

    def _spill(self, registration: Registration, now: float) -> None:
        own = OWN | (registration.ports[0].start if registration.ports else 0)
        runs = self.pipeline.spilled(registration, own)
        if runs:
            self._leave(registration, runs, now)

    # ---------------------------------------------------------------- forward: everything else

    def _forward_frames(self, port: FramedPort, frames: FrameBatch, places: I64, now: float) -> None:
        """Send ordinary frames to where the tables say."""
        egress = self.tables.forward(
            frames.arena,
            frames.offsets,
            frames.lengths,
            places,
            self._link,
            port.number,
            now,
            self.pipeline.drops,
        )
        if port.faults:
            chosen = np.flatnonzero(egress != TAKEN)
            given = PacketBatch(
                frames.arena,
                frames.offsets[chosen],
                frames.lengths[chosen],
                egress[chosen].view(np.uint64),
            )
            impaired = port.impair(0, given)
            if impaired is None:
                return
            egress = impaired.sources.view(np.int64)
            frames = FrameBatch(impaired.arena, impaired.offsets, impaired.lengths)
        self._distribute(port.number, frames, egress, now)

    def _distribute(self, ingress: int, frames: FrameBatch, egress: I64, now: float) -> None:
        if not len(egress):
            return
        if (egress == egress[0]).all():
            # all alike, as they are under load: nothing to sort
            if egress[0] >= 0:
                self._send_frames(int(egress[0]), frames, now)
                return
            if egress[0] in (DROPPED, TAKEN):
                return
        for out in np.unique(egress).tolist():
            if out in (DROPPED, TAKEN):
                continue
            chosen = frames.select(np.flatnonzero(egress == out))
            if out == FLOOD:
                self._flood(chosen, ingress, now)
            elif out == LOCAL:
                self._answer(ingress, chosen, now)
            else:
                self._send_frames(out, chosen, now)

    def _flood(self, frames: FrameBatch, ingress: int, now: float) -> None:
        for port in self._ports:
            if port.number != ingress:
                self._send_frames(port.number, frames, now)

    def _send_frames(self, number: int, frames: FrameBatch, now: float) -> None:
        port = self._ports[number]
        if port.queue.rate is None:
            self._hand_over(port, frames)
            return
        sizes = np.empty(len(frames), np.int64)
        parse.wire_bytes(frames.arena, frames.offsets, frames.lengths, self._link, sizes)
        if port.queue.calm(int(sizes.sum()), now):
            port.queue.admit_frames(sizes, now)
            self._hand_over(port, frames)
            return
        for i in range(len(frames)):
            if not self._cut(port, frames, i, now):
                one = frames.select(np.array([i]))
                self._hand_over(port, self._admit(port, one, sizes[i : i + 1], now))

    def _hand_over(self, port: FramedPort, frames: FrameBatch) -> None:
        if len(frames):
            self.pipeline.drops[Drop.EGRESS_FULL] += port.outbox.send(Frames(port.device, frames))

    def _cut(self, port: FramedPort, frames: FrameBatch, i: int, now: float) -> bool:
        """Queue and send a super-frame of datagrams, each marked or dropped by its own place. False: it is none."""
        arena, at = frames.arena, int(frames.offsets[i])
        found = segments_of(arena, at, at + int(frames.lengths[i]), self._link)
        if found is None:
            return False
        header, body, payload, segment = found
        whole, tail = divmod(payload, segment)
        deaf = header[HEADER_BYTES + self._link + 1] & 3 == 0
        way = Way(header, False, port.number)
        offsets = body + np.arange(whole, dtype=np.int64) * segment
        self._send(way, Run(Action.PASS, 0, 0, segment, False, arena, offsets), now, deaf)
        if tail:
            last = np.array([body + whole * segment], np.int64)
            self._send(way, Run(Action.PASS, 0, 0, tail, False, arena, last), now, deaf)
        return True

    def _admit(self, port: FramedPort, frames: FrameBatch, sizes: I64, now: float) -> FrameBatch:
        """Frames for which the queue has room, marked where it says so."""
        fate = port.queue.admit_frames(sizes, now)
        if fate is None or not fate.any():
            return frames
        self.pipeline.drops[Drop.QUEUE_FULL] += int(np.count_nonzero(fate == LOST))
        for i in np.flatnonzero(fate == MARKED).tolist():
            ip = int(frames.offsets[i]) + HEADER_BYTES + self._link
            end = int(frames.offsets[i] + frames.lengths[i])
            if not self._link or big16(frames.arena, ip - 2) == ETHERTYPE_IPV4:
                mark_congestion(frames.arena, ip, end)
        return frames.select(np.flatnonzero(fate != LOST))

    def _answer(self, ingress: int, frames: FrameBatch, now: float) -> None:
        """Frames for the switch itself, and address resolution, which it listens to as it passes."""
        for i in range(len(frames)):
            frame = frames.frame(i)
            answer = self._local.answer(frame, ingress, now)
            if answer is not None:
                self._send_frames(ingress, batch_of(answer), now)
                continue
            to = int.from_bytes(frame[HEADER_BYTES : HEADER_BYTES + 6], "big") if self._link else 0
            if self._link and to != int(self.tables.own_hardware):
                out = None if to >> 40 & 1 else self.tables.port_of(to, now)
                chosen = frames.select(np.array([i]))
                if out is None:
                    self._flood(chosen, ingress, now)
                elif out != ingress:
                    self._send_frames(out, chosen, now)

    # ---------------------------------------------------------------- time, figures

    def timer(self) -> float:
        held = [injector.timer() for port in self._ports for _, injector in port.faults]
        return min(self.pipeline.timer(), *(at for at in held if at is not None), float("inf"))

    def on_timer(self, now: float) -> None:
        """Age slots, sample occupancy, release delayed packets."""
        self.pipeline.on_timer(now)
        for registration in self.pipeline.registrations:
            self._spill(registration, now)
        for port in self._ports:
            for kind, (_, injector) in enumerate(port.faults):
                batch = injector.flush(now)
                if batch is None:
                    continue
                if kind == 0:
                    frames = FrameBatch(batch.arena, batch.offsets, batch.lengths)
                    self._distribute(port.number, frames, batch.sources.view(np.int64), now)
                else:
                    self._release(kind - 1, batch, now)

    def _release(self, number: int, batch: PacketBatch, now: float) -> None:
        """Packets that were held back, unless their flows have been forgotten since."""
        current = self._flows.current(batch.sources).astype(bool)
        self.pipeline.drops[Drop.NO_ROUTE] += int(np.count_nonzero(~current))
        chosen = np.flatnonzero(current)
        if len(chosen):
            self._process(
                number,
                PacketBatch(batch.arena, batch.offsets[chosen], batch.lengths[chosen], batch.sources[chosen]),
                now,
            )

    def stats(self) -> dict[str, object]:
        figures = self.pipeline.stats_with(self.ports)
        return figures if self.splice is None else self.splice.add_to(figures)

    def close(self) -> None:
        """Close all ports; figures stay readable."""
        for device in (*(port.device for port in self._ports), *(ring.device for ring in self._rings)):
            device.close()
