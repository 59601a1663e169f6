"""``[[switch.rings]]``: NetReduce rings between RoCE hosts whose connections pass a switch, on one rack or on several."""

from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Annotated

from pydantic import Field, PlainSerializer, PlainValidator, ValidationInfo, field_validator

from inanet.config.file import SeveralErrors
from inanet.config.sections import Section
from inanet.wire.netreduce_sizes import MESSAGE_PACKETS, PACKET_BYTES, WINDOW


def _address(text: object) -> IPv4Address:
    try:
        return IPv4Address(text) if isinstance(text, str) else IPv4Address("")
    except ValueError:
        raise ValueError(f"{text!r} is not an IPv4 address; allowed: e.g. '10.0.0.1'") from None


Address = Annotated[
    IPv4Address, PlainValidator(_address), PlainSerializer(lambda one: str(one), return_type=str)
]


class RingConnection(Section):
    """A rank's connection to its successor."""

    #: the sender's address
    source: Address
    #: the receiver's address
    destination: Address
    queue_pair: Annotated[int, Field(ge=0, lt=1 << 24)] = Field(
        description="number of the receiver's queue pair"
    )

    def __str__(self) -> str:
        return f"{self.source} to {self.destination}, queue pair {self.queue_pair}"


class RingRack(Section):
    """A switch that hosts of the ring are on, below the spine: its own address, and theirs."""

    #: the switch's own address
    switch: Address
    hosts: Annotated[tuple[Address, ...], Field(strict=False, min_length=1)] = Field(
        description="addresses of the ring's hosts on it"
    )


class RingEntry(Section):
    """A NetReduce ring whose connections pass this switch; sizes as its hosts have them.

    On several racks, the file of each switch has the same entry: which part a switch has in it follows from its own address,
    that of the ``spine`` or of one of the ``racks``.
    """

    #: its number
    ring: Annotated[int, Field(ge=0, le=0xFFFF)]
    #: counts the lives of the ring
    epoch: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    #: packets in a message
    length: Annotated[int, Field(ge=2, le=0xFFFF)] = MESSAGE_PACKETS
    #: messages in flight, a power of two
    window: Annotated[int, Field(ge=1)] = WINDOW
    #: payload bytes of a packet, the path MTU of the queue pairs
    packet: Annotated[int, Field(ge=64, le=4096)] = PACKET_BYTES
    connections: Annotated[tuple[RingConnection, ...], Field(strict=False, min_length=1)] = Field(
        description="by rank, each to the next one"
    )
    #: the switch above those of several racks; not set: all hosts are on this switch
    spine: Address | None = None
    #: the switches of hosts on several racks, each with its hosts
    racks: Annotated[tuple[RingRack, ...], Field(strict=False, validate_default=True)] = ()

    @field_validator("window")
    @classmethod
    def _wraps(cls, window: int, info: ValidationInfo) -> int:
        if window & (window - 1):
            raise ValueError(f"{window} messages in flight; allowed: a power of two, because MsgIDs wrap")
        length = info.data.get("length", 0)
        if (2 * window + 1) * length >= 1 << 23:
            raise ValueError(
                f"{window} messages of {length} packets in flight; allowed: so few that sequence numbers of 24 bits tell them"
                " apart"
            )
        return window

    @field_validator("packet")
    @classmethod
    def _whole(cls, packet: int) -> int:
        if packet % 8:
            raise ValueError(
                f"{packet} bytes; allowed: the path MTU of RoCE connections, 256, 512, 1024, 2048 or 4096, or a multiple of 8"
            )
        return packet

    @field_validator("connections")
    @classmethod
    def _each_once(cls, connections: tuple[RingConnection, ...]) -> tuple[RingConnection, ...]:
        if again := {one: None for one in connections if connections.count(one) > 1}:
            raise SeveralErrors([f"{one}, stands there twice; allowed: once" for one in again])
        return connections

    @field_validator("racks")
    @classmethod
    def _every_host_once(cls, racks: tuple[RingRack, ...], info: ValidationInfo) -> tuple[RingRack, ...]:
        spine = info.data.get("spine")
        if bool(racks) != (spine is not None):
            raise ValueError("spine and racks belong together; allowed: both, or neither")
        problems = []
        switches = [rack.switch for rack in racks]
        problems += [
            f"{one} is there as a switch twice; allowed: each once"
            for one in sorted({s for s in [*switches, spine] if s and [*switches, spine].count(s) > 1})
        ]
        placed = [host for rack in racks for host in rack.hosts]
        needed = {one.source for one in info.data.get("connections", ())}
        problems += [
            f"{one} is on two racks; allowed: one" for one in sorted(set(placed)) if placed.count(one) > 1
        ]
        if racks:
            problems += [f"{one} is on no rack; allowed: one" for one in sorted(needed - set(placed))]
        if problems:
            raise SeveralErrors(problems)
        return racks

    @property
    def switches(self) -> tuple[IPv4Address, ...]:
        """Own addresses of the switches that it names: the spine first; none on one rack."""
        return () if self.spine is None else (self.spine, *(rack.switch for rack in self.racks))


def contradictions(rings: Sequence[RingEntry]) -> list[str]:
    """What several rings of one switch cannot have in common, in sentences."""
    numbers = [ring.ring for ring in rings]
    problems = [
        f"ring {number} stands there twice; allowed: each number once"
        for number in sorted({one for one in numbers if numbers.count(one) > 1})
    ]
    owners: dict[RingConnection, int] = {}
    for ring in rings:
        for connection in ring.connections:
            owner = owners.setdefault(connection, ring.ring)
            if owner != ring.ring:
                problems.append(
                    f"rings {owner} and {ring.ring} have the same connection, {connection}; allowed: one of them"
                )
    return problems
