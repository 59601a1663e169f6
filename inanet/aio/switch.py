"""Builds a switch from its configuration and runs it on an event loop."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from ipaddress import IPv4Network
from typing import Any

import structlog

from inanet.aio.uplink import Uplink
from inanet.config.rings import RingEntry
from inanet.config.switch import Port, SwitchConfig
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.services import Service
from inanet.proto.common.refusal import NoRoom
from inanet.service.exits import Exit, Failure
from inanet.service.metrics import Sample
from inanet.switch.egress import EgressQueue
from inanet.switch.follower import SwitchFollower
from inanet.switch.pipeline import Hardware, Occupancy, Pipeline, RegistersExceeded
from inanet.switch.port import Faults, PortOptions, Switch, SwitchPort
from inanet.switch.programs import Job, Registration, build
from inanet.wire.endpoint import endpoint

_log: Any = structlog.get_logger("inanet.switch")

#: reads of one port in one callback of the event loop
READ_BUDGET = 8


class SwitchError(Failure):
    """A switch that cannot be built as it is configured: a restart would not mend it."""

    code = Exit.USAGE


def _registrations(config: SwitchConfig) -> Iterator[Registration]:
    """The programs and their jobs."""
    for entry in config.switch.programs:
        jobs = [
            Job(
                job.job,
                tuple(endpoint(worker.host, worker.port) for worker in job.workers),
                0 if job.ps is None else endpoint(job.ps.host, job.ps.port),
                job.slots,
                job.quota,
            )
            for job in entry.jobs
        ]
        ports = None
        if entry.udp_ports is not None:
            first, _, last = entry.udp_ports.partition("-")
            ports = (range(int(first), int(last or first) + 1),)
        yield build(
            entry.system,
            jobs,
            name=entry.title,
            memory=entry.memory,
            age=entry.age,
            ports=ports,
            # raw frames come on Ethernet alone
            raw=entry.raw if config.switch.transport == "packet" else False,
            shared=entry.shared,
            values=entry.values,
            values_per_pass=entry.values_per_pass,
            rings=entry.rings,
        )


def _pipeline(config: SwitchConfig) -> Pipeline:
    switch = config.switch
    loopback = None
    if switch.loopback is not None:
        loopback = EgressQueue("loopback", switch.loopback, switch.loopback_depth)
    return Pipeline(
        list(_registrations(config)),
        Hardware(switch.registers, switch.recirculations),
        loopback=loopback,
        occupancy=Occupancy(switch.sample, switch.samples),
    )


def _options(config: SwitchConfig, port: Port | None) -> PortOptions:
    """Queue and faults of a port; without one, of those that are not in the file."""
    general = config.impair
    faults = Faults(
        general.seed, general.drop, general.duplicate, general.reorder, general.corrupt, general.delay
    )
    if port is None:
        return PortOptions(faults=faults)

    def own(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    faults = Faults(
        general.seed,
        own(port.drop, general.drop),
        own(port.duplicate, general.duplicate),
        own(port.reorder, general.reorder),
        own(port.corrupt, general.corrupt),
        general.delay,
    )
    return PortOptions(port.rate, port.depth, port.ecn, faults)


def open_switch(config: SwitchConfig) -> Switch:
    """The switch that a file describes, its ports open. Raises :class:`SwitchError` or ``OSError`` saying what is wrong."""
    try:
        pipeline = _pipeline(config)
    except (RegistersExceeded, ValueError) as error:
        raise SwitchError(f"switch {config.node.name}: {error}") from error
    if config.switch.transport == "udp":
        return _open_udp(config, pipeline)
    return _open_frames(config, pipeline)


def _open_udp(config: SwitchConfig, pipeline: Pipeline) -> Switch:
    from inanet.switch.udp import UdpSwitch

    options = {}
    for port in config.switch.ports:
        host, _, number = port.name.partition(":")
        options[endpoint(host, int(number or "0"))] = _options(config, port)
    return UdpSwitch(
        pipeline,
        str(config.switch.address),
        options=options,
        default=_options(config, None),
        clock=time.monotonic,
    )


def _open_frames(config: SwitchConfig, pipeline: Pipeline) -> Switch:
    from inanet.switch.frame_ports import FrameDevice, FrameSource
    from inanet.switch.framed import FrameSwitch
    from inanet.switch.tables import Tables

    switch = config.switch
    link = 14 if switch.transport == "packet" else 0
    hardware = int(switch.own_hardware(config.node.name).replace(":", ""), 16) if link else 0
    tables = Tables(hardware, int(switch.address))
    numbers = {port.name: number for number, port in enumerate(switch.ports)}
    devices: dict[str, FrameDevice] = {}
    rings: dict[str, FrameSource] = {}
    try:
        for port in switch.ports:
            devices[port.name] = _open_interface(switch.transport, port)
            if link and switch.ring and any(one.raw for one in pipeline.registrations):
                ring = _open_ring(devices[port.name])
                if ring is not None:
                    rings[port.name] = ring
        routes = [(route.network, numbers[route.port], int(route.gateway or 0)) for route in switch.routes]
        routes += [(IPv4Network(one), numbers[port.name], 0) for port in switch.ports for one in port.behind]
        tables.set_routes(routes)
        for host in switch.hosts:
            tables.give_host(int(host.address), int(host.hardware.replace(":", ""), 16), numbers[host.port])
        # a host that is given a port speaks from there alone, whatever its programs
        members = {int(host.address) << 16: numbers[host.port] for host in switch.hosts}
        return FrameSwitch(
            pipeline,
            devices,
            tables,
            link=link,
            options={port.name: _options(config, port) for port in switch.ports},
            members=members,
            rings=rings,
            clock=time.monotonic,
            splice=_splice(config, tables, link, numbers),
        )
    except BaseException:
        for opened in (*devices.values(), *rings.values()):
            opened.close()
        raise


def _splice(config: SwitchConfig, tables: Any, link: int, numbers: Mapping[str, int]) -> Any:
    """NetReduce between RoCE hosts, if there are rings. Raises :class:`SwitchError` for ones that do not fit."""
    if not config.switch.rings:
        return None
    from inanet.switch.splice import Splice

    own = int(config.switch.address)
    try:
        plans = [ring_at(one, own) for one in config.switch.rings]
        placed = {int(host.address): numbers[host.port] for host in config.switch.hosts}
        return Splice(tables, link, plans, budget=config.switch.ring_memory, placed=placed)
    except (ValueError, NoRoom) as error:
        raise SwitchError(f"switch {config.node.name}: {error}") from error


def ring_at(entry: RingEntry, own: int) -> Any:
    """The part that the switch with the address ``own`` has in a ring. Raises ``ValueError`` for what cannot be."""
    from inanet.proto.netreduce.ring import Connection, Sizes, rack, racks

    connections = [
        Connection(int(each.source), int(each.destination), each.queue_pair) for each in entry.connections
    ]
    sizes = Sizes(entry.length, entry.window, entry.packet)
    if entry.spine is None:
        return rack(entry.ring, connections, sizes, entry.epoch)
    leaves = {int(one.switch): [int(host) for host in one.hosts] for one in entry.racks}
    return racks(entry.ring, connections, int(entry.spine), leaves, sizes, entry.epoch)[own]


def _open_interface(transport: str, port: Port) -> Any:
    if transport == "packet":
        from inanet.phy.port import FramePort

        return FramePort(port.name, sndbuf=8 << 20)
    from inanet.switch.frame_ports import TunFrames

    return TunFrames(port.name, routes=tuple(map(str, port.attracts)))


def _open_ring(port: Any) -> Any:
    """A ring for the raw frames of a port, which leaves them to it; ``None`` if the kernel has no rings."""
    from inanet.phy.ring import FrameRing, without
    from inanet.switch.programs import RAW_ETHERTYPE

    try:
        ring = FrameRing(port.interface, RAW_ETHERTYPE)
    except OSError as error:
        _log.warning("raw frames without a ring", port=port.interface, reason=str(error))
        return None
    port.filter(without(RAW_ETHERTYPE))
    return ring


class SwitchDriver:
    """Runs ``switch`` on the running event loop until closed.

    A port that was read is left alone for ``pause`` seconds: interrupt moderation, for switches whose hosts have windows that
    reach further than that.
    """

    def __init__(self, switch: Switch, pause: float = 0.0) -> None:
        self.switch = switch
        self._pause = pause
        self._resting: dict[int, asyncio.TimerHandle] = {}
        #: reads that brought something; a watchdog can see progress in it
        self.reads = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = float("inf")
        self._reading: set[int] = set()
        self._writing: set[int] = set()
        self.follow()

    def follow(self) -> None:
        """Watch ports that have come since."""
        for port in self.switch.ports:
            if port.fileno() not in self._reading:
                self._watch_port(port)
        self._arm()

    def leave(self, port: SwitchPort) -> None:
        """A port is about to be closed."""
        fd = port.fileno()
        self._reading.discard(fd)
        self._loop.remove_reader(fd)
        if fd in self._resting:
            self._resting.pop(fd).cancel()
        if fd in self._writing:
            self._writing.discard(fd)
            self._loop.remove_writer(fd)

    def _watch_port(self, port: SwitchPort) -> None:
        self._reading.add(port.fileno())
        self._loop.add_reader(port.fileno(), self._readable, port)

    def _readable(self, port: SwitchPort) -> None:
        before = self.reads
        for _ in range(READ_BUDGET):
            # the loop's own time stands still while a callback runs; queues drain by the true one
            if not port.read(time.monotonic()):
                if self._pause and self.reads > before:
                    self._rest(port)
                break
            self.reads += 1
        self._watch()
        self._arm()

    def _rest(self, port: SwitchPort) -> None:
        """Read the port again after a pause."""
        fd = port.fileno()
        self._loop.remove_reader(fd)
        self._resting[fd] = self._loop.call_later(self._pause, self._rested, port)

    def _rested(self, port: SwitchPort) -> None:
        del self._resting[port.fileno()]
        self._loop.add_reader(port.fileno(), self._readable, port)

    def _watch(self) -> None:
        """Have ports resumed that could not send everything."""
        for port in self.switch.ports:
            fd = port.fileno()
            if port.blocked and fd not in self._writing:
                self._writing.add(fd)
                self._loop.add_writer(fd, self._writable, port)

    def _writable(self, port: SwitchPort) -> None:
        port.resume()
        if not port.blocked:
            self._writing.discard(port.fileno())
            self._loop.remove_writer(port.fileno())

    def _arm(self) -> None:
        due = self.switch.timer()
        if due == self._due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(max(0.001, due - time.monotonic()), self._expired)

    def _expired(self) -> None:
        self._timer = None
        if self.switch.timer() <= time.monotonic():
            self.switch.on_timer(time.monotonic())
        self._watch()
        self._arm()

    @property
    def blocked(self) -> bool:
        """Whether something waits to be sent."""
        return any(port.blocked for port in self.switch.ports)

    def samples(self) -> Iterator[Sample]:
        """Metrics, read at every scrape."""
        stats: Any = self.switch.stats()
        for stage, packets in stats["stages"].items():
            yield Sample("inanet_switch_packets", packets, (stage,))
        for name, held in stats["registers"]["held"].items():
            yield Sample("inanet_switch_register_bytes", held, (name,))
        yield Sample("inanet_switch_recirculations", stats["recirculations"])
        for name, counters in stats["programs"].items():
            for counter, value in counters.items():
                if counter.startswith("occupied_"):
                    yield Sample("inanet_switch_slots", value, (name, counter.removeprefix("occupied_")))
        for reason, count in stats["drops"].items():
            yield Sample("inanet_packets_dropped", count, (reason,))

    def close(self) -> None:
        """Stop driving and close the switch."""
        for port in self.switch.ports:
            self._loop.remove_reader(port.fileno())
            if port.fileno() in self._writing:
                self._loop.remove_writer(port.fileno())
        for handle in (self._timer, *self._resting.values()):
            if handle is not None:
                handle.cancel()
        self.switch.close()


def join_fabric(config: SwitchConfig, driver: SwitchDriver) -> Uplink | None:
    """The switch's way to the coordinator that ``[control]`` names: jobs come and go with its plans.

    None if there is no coordinator. Of two programs of one system the first serves its jobs.
    """
    control, switch = config.control, driver.switch
    pipeline = switch.pipeline
    if control.coordinator is None:
        return None
    where = switch.endpoints()
    entries = {entry.system: entry for entry in reversed(config.switch.programs)}
    registrations = {one.name: one for one in pipeline.registrations}
    services = {}
    for system, entry in entries.items():
        program = registrations[entry.title].program
        services[system] = Service(
            endpoint=where[entry.title],
            relays=config.switch.transport == "udp",
            **asdict(program.offer(entry.job_slots, pipeline.hardware.most_passes)),
        )
    programs = {system: entry.title for system, entry in entries.items()}
    follower = SwitchFollower(switch, programs, driver.follow, driver.leave)
    identity = Identity(
        name=config.node.name,
        role="switch",
        token=control.secret(),
        endpoint=next(iter(where.values()), endpoint(str(config.switch.address), 0)),
        rx_window=1 << 16,
        services=services,
    )
    patience = control.join_timeout
    return Uplink(
        Member(follower, identity),
        str(control.coordinator),
        join=patience,
        # once welcomed, it serves whoever coordinates next, however long that takes
        resume=math.inf,
        wake=lambda: None,
        keys=control.tls_keys(),
    )
