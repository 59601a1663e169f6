"""What every daemon builds from its configuration: a device, a node, a driver, and their figures."""

import asyncio
import errno
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from inanet.aio.driver import Driver
from inanet.aio.kernel_limits import KernelLimits
from inanet.aio.machine_runner import MachineRunners, device_drops
from inanet.aio.rates import UNLIMITED, Pace
from inanet.aio.run_clock import RunClock
from inanet.config.control import CoordinatorControl
from inanet.config.daemons import GROUP_TRANSPORTS, AggConfig, AnyConfig, WorkerConfig
from inanet.config.daemons import Node as NodeConfig
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.services import Service
from inanet.phy.device import Device, receive_window
from inanet.phy.fault import FaultInjector
from inanet.phy.pacing import ETHERNET_BYTES, Pacer, default_burst
from inanet.phy.timerfd import TimerFd
from inanet.proto.common.events import NodeEvent, PeerSilent
from inanet.proto.common.machine import Follower
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.systems import TREES
from inanet.proto.tree.node import Node
from inanet.proto.tree.slots import ROW_BYTES
from inanet.service.addresses import (
    AddressError,
    HostPort,
    Resolved,
    interfaces,
    is_loopback,
    refuse_loopback,
    refuse_loopback_early,
    resolve,
)
from inanet.service.metrics import Sample
from inanet.wire.endpoint import show
from inanet.wire.xagg import PAYLOAD_BYTES
from inanet.wire.xagg import ROW_BYTES as FRAGMENT_BYTES


class Bare(Device, Protocol):
    """A device that puts headers of ``headroom`` bytes before each packet."""

    @property
    def headroom(self) -> int:
        """IP and transport headers, in bytes."""
        ...


if TYPE_CHECKING:
    from inanet.aio.offload import Offload

_log: Any = structlog.get_logger("inanet.station")


def _interface_of(address: str) -> str:
    """Name of the interface that has an address. Raises :class:`AddressError`."""
    if is_loopback(address):
        return "lo"
    present = interfaces()
    for name, owned in present.items():
        if owned == address:
            return name
    listed = ", ".join(f"{name} ({owned})" for name, owned in present.items())
    raise AddressError(
        f"transport packet needs an interface whose first address is {address}; there are {listed}: set node.listen to "
        "one of them"
    )


def _open_bare(node: NodeConfig, listen: Resolved) -> Bare:
    """The device that ``[node]`` asks for. Imports only what is used, as each brings compiled kernels of its own."""
    rcvbuf, sndbuf = node.receive_buffer, node.send_buffer
    if node.transport == "rawip":
        from inanet.phy.rawip import RawIpDevice

        return RawIpDevice(listen.address, rcvbuf=rcvbuf, sndbuf=sndbuf)
    if node.transport == "packet":
        from inanet.phy.packet import PacketDevice

        interface = _interface_of(listen.address)
        return PacketDevice(interface, listen.address, listen.port, rcvbuf=rcvbuf, sndbuf=sndbuf)
    if node.transport == "tun":
        from inanet.phy.tun import TunDevice

        return TunDevice(listen.address, listen.port)
    from inanet.phy.udp import UdpDevice

    try:
        return UdpDevice(listen.address, listen.port, rcvbuf=rcvbuf, sndbuf=sndbuf)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listed = ", ".join(f"{name} ({owned})" for name, owned in interfaces().items())
        raise AddressError(
            f"{error.strerror}; this machine has {listed}: set node.listen to one of them"
        ) from None


async def _refuse_own(name: str, advertised: str, listen: HostPort) -> None:
    """:func:`refuse_loopback` for whoever coordinates. Raises it also for a name that does not resolve."""
    if listen.local:
        return
    try:
        met = await asyncio.to_thread(resolve, listen)
    except AddressError as error:
        raise AddressError(f"control.listen: {error}") from None
    refuse_loopback(name, advertised, met.address)


async def open_device(config: AnyConfig, clock: Callable[[], float], *, legacy: bool = False) -> Device:
    """The device that ``[node]`` asks for, at its rate, with the impairments of ``[impair]`` around it.

    ``legacy``: one more beside the node's own, for framings without a checksum. It has a port of the kernel's choice, and
    a packet that is damaged is lost, because the link's FCS would find it.
    """
    node = config.node
    listen = await asyncio.to_thread(resolve, node.listen)
    control = config.control
    if control.coordinator is not None:
        await asyncio.to_thread(refuse_loopback_early, node.name, listen.address, control.coordinator)
    elif isinstance(control, CoordinatorControl):
        await _refuse_own(node.name, listen.address, control.listen)
    if legacy:
        listen = replace(listen, port=0)
    bare = _open_bare(node, listen)
    device: Device = bare if legacy else _open_receiving(config, bare)
    _log.info("data plane", endpoint=show(device.endpoint), origin=listen.origin, rx_window=device.rx_budget)
    if node.rate is not None or node.rate_negotiation:
        # the loop's own clock stands still for a millisecond at a time
        overhead = bare.headroom + ETHERNET_BYTES
        rate = node.rate or UNLIMITED
        burst = node.burst or default_burst(rate)
        device = Pacer(device, rate, burst, time.monotonic, TimerFd(), overhead=overhead)
    faults = config.impair
    if faults.active:
        device = FaultInjector(
            device,
            faults.seed,
            clock,
            drop=1 - (1 - faults.drop) * (1 - faults.corrupt) if legacy else faults.drop,
            duplicate=faults.duplicate,
            reorder=faults.reorder,
            corrupt=0.0 if legacy else faults.corrupt,
            delay=(0.0, faults.delay),
        )
    return device


def _open_offload(config: AnyConfig, device: Device, timing: Timing) -> "Offload | None":
    """As ``[node] xdp`` asks for. Imports only what is used."""
    if not isinstance(config, AggConfig) or config.node.xdp == "off":
        return None
    from inanet.aio.offload import open_offload

    return open_offload(config, device, timing)


def _open_receiving(config: AnyConfig, device: Device) -> Device:
    """With a worker's results through the kernel, as ``[node] xdp`` asks for. Imports only what is used."""
    if not isinstance(config, WorkerConfig) or config.node.xdp == "off":
        return device
    from inanet.aio.inbox import open_receiving

    return open_receiving(config, device) or device


def _make_node(config: AnyConfig, device: Device, timing: Timing) -> Node:
    """The node of a station whose slots are its own."""
    # nodes differ by their seeds: that is all that matters
    chance = random.Random(config.node.name).random
    capacity = max(1, config.node.memory // ROW_BYTES)
    if isinstance(config, WorkerConfig) and config.node.xdp != "off":
        from inanet.xdp.worker import inbox_of

        inbox = inbox_of(device)
        if inbox is not None:
            return Node(config.node.name, capacity, timing, chance, inbox.follow)
    return Node(config.node.name, capacity, timing, chance)


class Station:
    """A node on its device, inside the running loop. Members are asked in turn whose job an event belongs to."""

    def __init__(self, role: str, config: AnyConfig, device: Device, after: Callable[[], None]) -> None:
        timing = config.timing
        self.role = role
        self.config = config
        self.device = device
        waits = Timing(timing.reorder_window, timing.retransmit, timing.retransmit_max)
        #: the program in the kernel that shares the node's slots; None: all is done in this process
        self.offload = _open_offload(config, device, waits)
        self.node = self.offload.node if self.offload is not None else _make_node(config, device, waits)
        self.members: list[Member] = []
        #: machines of jobs on switches
        self.runners = MachineRunners()
        self.pace: Pace | None = None
        if config.node.rate_negotiation:
            pacer = device.wrapped if isinstance(device, FaultInjector) else device
            assert isinstance(pacer, Pacer)
            self.pace = Pace(pacer, config.node.rate, config.node.burst)
        self._after = after
        self.driver = Driver(self.node, device, self.on_event)
        if self.offload is not None:
            self.offload.watch(self.driver.kick)
        self._clock = RunClock()
        self._silent = waits.silent
        self._seen = (0, 0)
        self._limits = KernelLimits()
        self._limits.look(device.counters())

    def member(
        self,
        identity: Identity,
        progress: Callable[[str], None] = lambda _text: None,
        follower: Follower | None = None,
    ) -> Member:
        """A member for this node, or for a ``follower`` around it, which joins :attr:`members`; see
        :class:`~inanet.member.member.Member`.
        """
        member = Member(follower or self.node, identity, progress=progress)
        if self.pace is not None:
            member.paced_by(self.pace)
        self.members.append(member)
        return member

    def identity(
        self,
        job: str = "",
        ranks: tuple[int, ...] = (),
        world: int = 0,
        system: str = TREES,
        services: Mapping[str, Service] | None = None,
        device: Device | None = None,
    ) -> Identity:
        """How this node introduces itself; with another ``device`` than its own for a job on a switch."""
        device = device or self.device
        return Identity(
            name=self.config.node.name,
            role=self.role,
            token=self.config.control.secret(),
            endpoint=device.endpoint,
            rx_window=receive_window(device),
            job=job,
            ranks=ranks,
            world=world,
            groups=self.config.node.transport in GROUP_TRANSPORTS,
            send_bps=self._link_bps,
            receive_bps=self._link_bps,
            system=system,
            services=services or {},
        )

    @property
    def _link_bps(self) -> int:
        """What the root is told of this node's link: nothing unless rates are negotiated."""
        return (self.config.node.rate or 0) if self.pace is not None else 0

    def kick(self) -> None:
        """The node or machines beside it may have something to send or to say; see :meth:`~inanet.aio.driver.Driver.kick`."""
        self.driver.kick()
        for runner in self.runners:
            runner.driver.kick()

    def on_event(self, event: NodeEvent) -> None:
        """The node, or a machine beside it, tells of something: pass it on to the member whose job it is about."""
        fair = self.excuse(event)
        for member in self.members:
            if fair is not None and member.serves(event.job):
                member.on_event(fair, self.driver.now())
                break
        self._after()

    def excuse(self, event: NodeEvent) -> NodeEvent | None:
        """The event, unless it blames a neighbour for silence in which this process was stopped itself: that is said again if it
        lasts.
        """
        if not isinstance(event, PeerSilent):
            return event
        seconds = self._clock.ran(event.seconds)
        return replace(event, seconds=seconds) if seconds >= min(event.seconds, self._silent) else None

    def healthy(self) -> bool:
        """Proof of life for the watchdog: whatever has arrived since the last call has been processed."""
        counters = self.device.counters()
        self._limits.look(counters)
        batches, packets = self.driver.batches, counters["rx_packets"]
        before, self._seen = self._seen, (batches, packets)
        return packets == before[1] or batches > before[0]

    def figures(self) -> dict[str, object]:
        """All counters: the node's, the device's, and drops by reason; with negotiated rates, how often those came."""
        grants = {} if self.pace is None else {"grants": self.pace.grants}
        refused = {"tx_refused": self.driver.refused}
        return {
            **self._sum({**self._stats(), **self.device.counters(), **refused, **grants}),
            "drops": self.drops(),
        }

    def counters(self) -> dict[str, int]:
        """Counters by name, with all drops as one, for the coordinator's overview."""
        own = {**self._stats(), **self.device.counters()}
        return {**self._sum(own), "dropped": sum(self.drops().values())}

    def stats(self) -> dict[str, int]:
        """Counters of the node and of all machines beside it."""
        return self._sum(self._stats())

    def _stats(self) -> dict[str, int]:
        stats = self.node.stats()
        return {**stats, "leaf_bytes": stats["leaf_contributions"] * FRAGMENT_BYTES}

    def _sum(self, own: dict[str, int]) -> dict[str, int]:
        beside = self.runners.figures()
        return {name: own.get(name, 0) + beside[name] for name in {**own, **beside}}

    def drops(self) -> dict[str, int]:
        """Packets dropped by the node, its device and all machines beside it, by reason."""
        own, beside = self.node.drops_by_reason(), self.runners.drops()
        own.update(device_drops(self.device.counters()))
        return {reason: count + beside[reason] for reason, count in own.items()}

    def samples(self) -> Iterator[Sample]:
        """Metrics, read at every scrape."""
        stats = self.stats()
        device = self._sum(self.device.counters())
        role = self.role
        yield Sample("inanet_device_packets_received", device["rx_packets"], (role,))
        yield Sample("inanet_packets_received", stats["contributions_in"], (role, "contribution"))
        yield Sample("inanet_packets_received", stats["results_in"], (role, "result"))
        yield Sample("inanet_device_packets_sent", device["tx_packets"], (role,))
        yield Sample("inanet_packets_sent", stats["rows_sent"], (role, "fragment"))
        yield Sample("inanet_packets_sent", stats["results_multicast"], (role, "multicast_result"))
        yield Sample("inanet_retransmissions", stats["retransmissions"], ("requested",))
        yield Sample("inanet_result_repairs", stats["repairs_multicast"], ("multicast",))
        yield Sample("inanet_result_repairs", stats["repairs_unicast"], ("unicast",))
        own, beside = self.node.stats(), self.runners.figures()
        sent = own["rows_sent"] * PAYLOAD_BYTES + beside["gradient_sent"]
        received = (own["contributions_in"] + own["results_in"]) * PAYLOAD_BYTES + beside["gradient_received"]
        yield Sample("inanet_gradient_bytes", sent, ("sent",))
        yield Sample("inanet_gradient_bytes", received, ("received",))
        for what, refused in self._limits.look(self.device.counters()).items():
            yield Sample("inanet_kernel_refusals", refused, (what.removesuffix("_refused"),))
        place = "root" if role == "ps" else "network"
        yield Sample("inanet_contributions", stats["contributions_summed"], (place,))
        if role != "worker":
            yield Sample("inanet_aggregator_slots", stats["slots_free"], ("free",))
            yield Sample("inanet_aggregator_slots", stats["slots_total"] - stats["slots_free"], ("taken",))
        yield Sample("inanet_jobs", self.node.jobs + stats.get("jobs", 0))
        for reason, count in self.drops().items():
            yield Sample("inanet_packets_dropped", count, (reason,))

    def close(self) -> None:
        """Stop driving, close the device."""
        if self.offload is not None:
            self.offload.close()
        for runner in self.runners:
            self.runners.close(runner)
        self.driver.close()
        self._clock.close()
