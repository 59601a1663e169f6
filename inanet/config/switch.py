"""The sections of ``ina-switch``: ports, programs with their jobs, forwarding tables, and the hardware it stands for."""

import hashlib
import os
import re
from ipaddress import IPv4Address, IPv4Network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator

from inanet.config.control import Control
from inanet.config.fields import (
    Bytes,
    CoordinatorAddress,
    Duration,
    Name,
    Probability,
    Rate,
    Span,
    between,
    span,
)
from inanet.config.file import SeveralErrors
from inanet.config.rings import Address, RingEntry, contradictions
from inanet.config.sections import Impair, Log, Metrics, Section
from inanet.proto.common.plan import MAX_WORKERS
from inanet.proto.slots.systems import SYSTEMS
from inanet.service.addresses import HostPort, is_loopback

_MAC = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}", re.ASCII)
_RANGE = re.compile(r"(\d{1,5})(?:\s*-\s*(\d{1,5}))?", re.ASCII)
_SHOW = PlainSerializer(str, return_type=str)
#: bytes of registers that switches of the papers' time have
REGISTERS = 20_000_000


def _network(text: object) -> IPv4Network:
    try:
        return IPv4Network(text) if isinstance(text, str) else IPv4Network("")
    except ValueError:
        raise ValueError(f"{text!r} is not an IPv4 network; allowed: e.g. '10.0.0.0/24'") from None


def _member(text: object) -> HostPort:
    """``address:port`` of a host's socket; no port where its frames are raw."""
    host, _, port = text.partition(":") if isinstance(text, str) else ("", "", "")
    try:
        return HostPort(str(IPv4Address(host)), int(port or "0") if int(port or "0") < 1 << 16 else int(""))
    except ValueError:
        raise ValueError(
            f"{text!r} is not an endpoint; allowed: 'address:port', e.g. '10.0.0.1:4000', or the address alone for "
            "raw frames"
        ) from None


def _hardware(text: object) -> str:
    if not isinstance(text, str) or not _MAC.fullmatch(text) or int(text[:2], 16) & 1:
        raise ValueError(f"{text!r} is not a host's hardware address; allowed: e.g. '02:00:00:00:00:01'")
    return text.lower()


def _port_range(text: object) -> str:
    match = _RANGE.fullmatch(text.strip()) if isinstance(text, str) else None
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if not 0 <= first <= last <= 0xFFFF:
        raise ValueError(f"{text!r} is not a range of UDP ports; allowed: e.g. '48864-48879' or '7410'")
    return f"{first}-{last}" if last > first else str(first)


Network = Annotated[IPv4Network, PlainValidator(_network), _SHOW]
Member = Annotated[
    HostPort,
    PlainValidator(_member),
    PlainSerializer(lambda one: f"{one.host}:{one.port}" if one.port else one.host, return_type=str),
]
Hardware = Annotated[str, AfterValidator(_hardware)]
PortRange = Annotated[str, PlainValidator(_port_range)]
Members = Annotated[tuple[Member, ...], Field(strict=False)]


class SwitchNode(Section):
    """``[node]``."""

    name: Name = Field(default_factory=lambda: os.uname().nodename, description="the switch's name")


class SwitchControl(Control):
    """``[control]``: with a coordinator, jobs come from there as well as from this file."""

    #: where ina-ps or ina-manager listens; not set: there are only the jobs of this file
    coordinator: CoordinatorAddress | None = None
    #: how long what waits at the ports may still be sent after SIGTERM
    drain_timeout: Span = span("1 s")


class Port(Section):
    """A port: an interface (transports packet and tun) or, over UDP, the endpoint of a worker or PS.

    ``rate``, ``depth`` and ``ecn`` are its egress queue's: without a rate it never queues. Faults that are not given are
    those of ``[impair]``.
    """

    name: str = Field(description="the interface, or the endpoint address:port")
    #: at which frames leave; not set: there is no queue
    rate: Rate | None = None
    #: bytes of the queue; what does not fit is dropped
    depth: Annotated[Bytes, between(1 << 10, 1 << 30)] = 1 << 20
    #: bytes in the queue from which on fragments are marked; not set: never
    ecn: Annotated[Bytes, between(0, 1 << 30)] | None = None
    #: faults of this port, instead of those of [impair]
    drop: Probability | None = None
    #: as ``drop``
    duplicate: Probability | None = None
    #: as ``drop``
    reorder: Probability | None = None
    #: as ``drop``
    corrupt: Probability | None = None
    #: tun: addresses of the host at the other end of the interface
    behind: Annotated[tuple[Address, ...], Field(strict=False)] = ()
    #: tun: addresses of other hosts that this host's kernel sends into the interface
    attracts: Annotated[tuple[Address, ...], Field(strict=False)] = ()


class Host(Section):
    """A host that is where it is, whatever is heard elsewhere."""

    #: its IPv4 address
    address: Address
    #: its hardware address
    hardware: Hardware
    #: the interface it is at
    port: str


class Route(Section):
    """Packets for ``network`` leave at ``port``, towards ``gateway`` if there is one."""

    #: IPv4 network of the hosts behind
    network: Network
    #: the interface that leads there
    port: str
    #: the next hop; not set: hosts of the network are at the port themselves
    gateway: Address | None = None


class SwitchJob(Section):
    """A job: its number in the framing, its workers by rank and its PS as they appear to the switch."""

    #: its number in the framing, 0 to 255
    job: Annotated[int, Field(ge=0, le=255)]
    workers: Members = Field(description="the workers' endpoints by rank, e.g. ['10.0.0.1:4000']")
    #: endpoint of its parameter server, where the system has one
    ps: Member | None = None
    #: slots of its own; not set: the shared ones, ``quota`` of them at most
    slots: Annotated[int, Field(ge=1)] | None = None
    #: shared slots that it may have at a time; not set: all
    quota: Annotated[int, Field(ge=1)] | None = None

    @field_validator("workers")
    @classmethod
    def _each_once(cls, workers: tuple[HostPort, ...]) -> tuple[HostPort, ...]:
        if not 0 < len(workers) <= MAX_WORKERS or len(set(workers)) < len(workers):
            raise ValueError(
                f"{len(workers)} workers, {len(set(workers))} of them different; allowed: 1 to {MAX_WORKERS}, each once"
            )
        return workers


class ProgramEntry(Section):
    """A program, the registers it has, and its jobs. Several may be of one system if their packets can be told apart."""

    system: str = Field(description=f"one of {', '.join(SYSTEMS)}")
    #: for logs and figures; the system unless given
    name: Name | None = None
    #: bytes of registers
    memory: Annotated[Bytes, between(1 << 10, 1 << 40)] = 4 * 10**6
    #: slots that jobs without a share of their own share; not set: all
    shared: Annotated[int, Field(ge=0)] | None = None
    #: values in a packet, where the system has several formats
    values: Annotated[int, Field(ge=1)] | None = None
    #: values that a pass through the pipeline adds, where that can be chosen; not set: what the system's own hardware does
    values_per_pass: Annotated[int, Field(ge=1)] | None = None
    #: how long a slot may be untouched before it is given up
    age: Span = span("1 s")
    #: UDP ports of its packets; the system's unless given
    udp_ports: PortRange | None = None
    #: slots that a job may have which comes from the coordinator: of its own, or of the shared ones at a time; not set:
    #: as many as it asks for
    job_slots: Annotated[int, Field(ge=1)] | None = None
    #: netreduce: rings of a job from the coordinator, one for each rank of a host, so many at most; they share its slots
    rings: Annotated[int, Field(ge=1, le=32)] | None = None
    #: whether raw frames (ethertype 0x0700) are its packets too
    raw: bool | None = None
    #: jobs that come from no coordinator
    jobs: Annotated[tuple[SwitchJob, ...], Field(strict=False)] = ()

    @field_validator("system")
    @classmethod
    def _known(cls, system: str) -> str:
        if system not in SYSTEMS:
            raise ValueError(f"{system!r} is no program; allowed: {', '.join(SYSTEMS)}")
        return system

    @field_validator("shared", "values", "values_per_pass", "rings")
    @classmethod
    def _of_the_system(cls, value: int | None, info: ValidationInfo) -> int | None:
        facts = SYSTEMS.get(info.data.get("system", ""))
        option = str(info.field_name)
        if value is None or facts is None:
            return value
        if option not in facts.options:
            has = ", ".join(facts.options) or "none of its own"
            raise ValueError(f"{info.data['system']} has no such option; allowed: {has}")
        if option == "values" and value not in facts.formats:
            allowed = " or ".join(map(str, facts.formats))
            raise ValueError(f"{value} is none that {info.data['system']} has; allowed: {allowed}")
        return value

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or self.system


class Switch(Section):
    """``[switch]``."""

    #: ``packet``: frames of Ethernet interfaces; ``tun``: IP packets of interfaces that are made; ``udp``: datagrams
    transport: Literal["udp", "packet", "tun"] = "udp"
    #: udp: where the programs listen; else the address that the switch itself has, and no host
    address: Address = IPv4Address("127.0.0.1")
    #: packet: the switch's own hardware address; not set: made from its name
    hardware: Hardware | None = None
    #: the register file of all programs together
    registers: Annotated[Bytes, between(1 << 10, 1 << 40)] = REGISTERS
    #: how often a packet may come back for another pass
    recirculations: Annotated[int, Field(ge=0, le=254)] = 8
    #: rate of the port that packets come back through; not set: they come back for nothing
    loopback: Rate | None = None
    #: bytes of that port's queue
    loopback_depth: Annotated[Bytes, between(1 << 10, 1 << 30)] = 1 << 20
    #: packet: raw frames (ethertype 0x0700) through a ring shared with the kernel, if it has one
    ring: bool = True
    #: how long a port is left alone once frames were taken from it, so that more of them are taken together
    pause: Duration = span("0 s")
    #: how often the slots that each job holds are counted
    sample: Span = span("100 ms")
    #: how many of these counts are kept
    samples: Annotated[int, Field(ge=1, le=1 << 20)] = 600
    #: interfaces, or endpoints with a queue or faults of their own
    ports: Annotated[tuple[Port, ...], Field(strict=False)] = ()
    #: packet: hosts that are where they are, whatever is heard elsewhere
    hosts: Annotated[tuple[Host, ...], Field(strict=False)] = ()
    #: packet: where frames to the switch's own hardware address go on to
    routes: Annotated[tuple[Route, ...], Field(strict=False)] = ()
    #: switch sides of systems, each with its memory and its packets
    programs: Annotated[tuple[ProgramEntry, ...], Field(strict=False)] = ()
    #: packet and tun: NetReduce rings between RoCE hosts
    rings: Annotated[tuple[RingEntry, ...], Field(strict=False)] = ()
    #: bytes of packet memory for all of these
    ring_memory: Annotated[Bytes, between(1 << 10, 1 << 40)] = REGISTERS

    @field_validator("address")
    @classmethod
    def _not_a_hosts(cls, address: IPv4Address, info: ValidationInfo) -> IPv4Address:
        if info.data.get("transport", "udp") == "udp" and address.is_unspecified:
            raise ValueError(
                "0.0.0.0 is no address to be known by; allowed: the address that the hosts reach"
            )
        return address

    @field_validator("ports")
    @classmethod
    def _fit(cls, ports: tuple[Port, ...], info: ValidationInfo) -> tuple[Port, ...]:
        transport = info.data.get("transport", "udp")
        problems = []
        names = [port.name for port in ports]
        problems += [
            f"{name!r} stands there twice" for name in sorted({n for n in names if names.count(n) > 1})
        ]
        for port in ports:
            if transport == "udp":
                try:
                    _member(port.name)
                except ValueError as error:
                    problems.append(str(error))
            elif not 0 < len(port.name.encode()) < 16 or "/" in port.name:
                problems.append(f"{port.name!r} is not the name of an interface; allowed: 1 to 15 characters")
            if (port.behind or port.attracts) and transport != "tun":
                problems.append(
                    f"{port.name}: behind and attracts are for transport 'tun'; allowed: hosts and routes"
                )
        if transport != "udp" and not ports:
            problems.append(
                f"transport {transport!r} has no ports of its own; allowed: one {{ name }} per interface"
            )
        if problems:
            raise SeveralErrors(problems)
        return ports

    @field_validator("hosts", "routes")
    @classmethod
    def _at_a_port(cls, entries: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        names = [port.name for port in info.data.get("ports", ())]
        if "ports" in info.data and (unknown := [one.port for one in entries if one.port not in names]):
            raise SeveralErrors(
                [f"there is no port {port!r}; allowed: {', '.join(names)}" for port in unknown]
            )
        return entries

    @field_validator("rings")
    @classmethod
    def _between_interfaces(cls, rings: tuple[RingEntry, ...], info: ValidationInfo) -> tuple[RingEntry, ...]:
        if rings and info.data.get("transport", "udp") == "udp":
            raise ValueError(
                "rings are connections between other hosts; allowed: with transport packet or tun"
            )
        own = info.data.get("address")
        problems = contradictions(rings)
        problems += [
            f"ring {ring.ring} is on several racks, and none of its switches has this one's address {own}; allowed: "
            f"{', '.join(map(str, ring.switches))}"
            for ring in rings
            if ring.racks and own not in ring.switches
        ]
        if problems:
            raise SeveralErrors(problems)
        return rings

    @field_validator("programs")
    @classmethod
    def _within_the_registers(
        cls, programs: tuple[ProgramEntry, ...], info: ValidationInfo
    ) -> tuple[ProgramEntry, ...]:
        budget = info.data.get("registers", REGISTERS)
        wanted = sum(program.memory for program in programs)
        problems = []
        if wanted > budget:
            shares = ", ".join(f"{program.title} {program.memory} B" for program in programs)
            problems.append(
                f"the programs take {wanted} B of registers ({shares}) and the switch has {budget} B; allowed: less memory "
                "for them, or more registers"
            )
        titles = [program.title for program in programs]
        problems += [
            f"two programs are called {title}; allowed: a name for each"
            for title in sorted({t for t in titles if titles.count(t) > 1})
        ]
        for program in programs:
            numbers = [job.job for job in program.jobs]
            problems += [
                f"program {program.title} has job {number} twice; allowed: each number once"
                for number in sorted({n for n in numbers if numbers.count(n) > 1})
            ]
            if info.data.get("transport") == "udp":
                problems += [
                    f"program {program.title}, job {job.job}: {one.host} has no port; allowed: address:port over UDP"
                    for job in program.jobs
                    for one in (*job.workers, *((job.ps,) if job.ps else ()))
                    if not one.port
                ]
        if problems:
            raise SeveralErrors(problems)
        return programs

    def own_hardware(self, name: str) -> str:
        """The switch's hardware address: locally administered, the same for a name every time."""
        digest = hashlib.sha256(name.encode()).hexdigest()
        return self.hardware or ":".join(["02", *(digest[i : i + 2] for i in range(0, 10, 2))])


class SwitchConfig(Section):
    """``ina-switch``."""

    node: SwitchNode = Field(default_factory=SwitchNode)
    log: Log = Field(default_factory=Log)
    metrics: Metrics = Field(default_factory=Metrics)
    impair: Impair = Field(default_factory=Impair)
    control: SwitchControl = Field(default_factory=SwitchControl)
    switch: Switch = Field(description="the section with ports and programs")

    @field_validator("switch")
    @classmethod
    def _reachable(cls, switch: Switch) -> Switch:
        if switch.transport != "udp" and is_loopback(str(switch.address)):
            raise ValueError(
                f"address is {switch.address}, which no host can send frames to; allowed: an address of the hosts' "
                "network that no host has"
            )
        return switch
