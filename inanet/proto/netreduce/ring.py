"""A ring as its switches and its hosts know it.

A switch is told whose packets it sums, and what is above and below it. Plans are data: :func:`rack` makes the
one of a single switch, :func:`racks` those of switches under a spine (section 3.3). A host knows its place
(:class:`Member`) and the ends of its connections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address
from typing import Literal

import numpy as np

from inanet.proto.roce import Attributes
from inanet.wire.batch import U8
from inanet.wire.netreduce import (
    HEADER_BYTES,
    PLAIN_TAG,
    TAG,
    Header,
    NoHeader,
    Operation,
    decode,
    message_values,
)
from inanet.wire.netreduce_sizes import MESSAGE_PACKETS, PACKET_BYTES, WINDOW
from inanet.wire.roce import timeout_seconds

#: children of a switch: bitmaps have 32 bits
MOST_CHILDREN = 32
#: MsgLen has 16 bits
_MOST_PACKETS = 0xFFFF
#: queue pair numbers from here on are virtual connections'; hosts of a job over several racks keep below
VIRTUAL = 0x800000


@dataclass(frozen=True, slots=True)
class Connection:
    """What tells a connection (section 3.2): IPv4 addresses as integers, and the queue pair of the receiver."""

    source: int
    destination: int
    queue_pair: int

    def __str__(self) -> str:
        ends = (str(IPv4Address(self.source)), str(IPv4Address(self.destination)))
        return f"{ends[0]} -> {ends[1]} (QP {self.queue_pair})"


@dataclass(frozen=True, slots=True)
class Child:
    """Who contributes: a rank, or a switch with ``ranks`` below it, whose number ``rank`` is then."""

    connection: Connection
    rank: int
    ranks: int = 0


@dataclass(frozen=True, slots=True)
class Above:
    """The switch above: the virtual connections to and from it, and this switch's number there."""

    to: Connection
    back: Connection
    number: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all hosts and switches of a ring agree on: packets in a message (MsgLen), messages in flight (N), payload bytes
    of a packet (the path MTU). Raises ``ValueError`` for what cannot be, saying why.
    """

    length: int = MESSAGE_PACKETS
    window: int = WINDOW
    packet_bytes: int = PACKET_BYTES

    def __post_init__(self) -> None:
        if self.window < 1 or self.window & (self.window - 1):
            raise ValueError(
                f"a window of {self.window} messages: MsgIDs wrap, so it has to be a power of two"
            )
        if self.length < 2 or self.packet_bytes < 64 or self.packet_bytes % 8:
            raise ValueError(
                f"messages of {self.length} packets of {self.packet_bytes} B: at least 2 of a multiple of 8 B, from 64 B on,"
                " are needed"
            )
        if self.length > _MOST_PACKETS:
            raise ValueError(
                f"messages of {self.length} packets: INA headers have room for a MsgLen of up to {_MOST_PACKETS}"
            )
        if (2 * self.window + 1) * self.length >= 1 << 23:
            raise ValueError(
                f"{self.window} messages of {self.length} packets in flight: PSNs of 24 bits cannot tell them apart"
            )

    @property
    def message_bytes(self) -> int:
        """Bytes of a message, the INA header included."""
        return self.length * self.packet_bytes

    @property
    def values(self) -> int:
        """32-bit values in a message."""
        return message_values(self.length, self.packet_bytes)


@dataclass(frozen=True, slots=True)
class RingAt:
    """A ring as one switch sees it. Raises ``ValueError`` for what cannot be, saying what.

    ``children`` are all ranks or all switches. ``hosts`` are addresses whose incoming connections end at this switch; it
    needs them only below another, and with them ``distant``: the ranks of other racks whose connections end at one of them.
    ``below`` are the virtual connections to the switches below, in the order of children.
    """

    ring: int
    ranks: int
    children: tuple[Child, ...]
    sizes: Sizes = field(default_factory=Sizes)
    epoch: int = 0
    above: Above | None = None
    hosts: tuple[int, ...] = ()
    below: tuple[Connection, ...] = ()
    distant: tuple[Child, ...] = ()

    def __post_init__(self) -> None:
        name = f"ring {self.ring}"
        if not 0 <= self.ring < 1 << 16:
            raise ValueError(f"{name}: INA headers have room for ring numbers 0 to 65535")
        if not 1 <= len(self.children) <= MOST_CHILDREN:
            raise ValueError(
                f"{name}: {len(self.children)} contributions at one switch; bitmaps have room for {MOST_CHILDREN}"
            )
        over = [child.ranks > 0 for child in self.children]
        if any(over) and not all(over):
            raise ValueError(f"{name}: a switch is over hosts or over switches, not over both")
        if len({child.connection for child in self.children}) < len(self.children):
            raise ValueError(f"{name}: two contributions come on the same connection")
        if len(self.below) != (len(self.children) if all(over) else 0):
            raise ValueError(
                f"{name}: {len(self.below)} connections to switches below for {over.count(True)} of them"
            )

    @property
    def over_switches(self) -> bool:
        """Whether the children are switches."""
        return self.children[0].ranks > 0

    @property
    def ranks_below(self) -> int:
        """Ranks whose contributions come in here."""
        return sum(child.ranks or 1 for child in self.children)


def rack(ring: int, connections: Sequence[Connection], sizes: Sizes | None = None, epoch: int = 0) -> RingAt:
    """The plan of one switch that all ranks are on. ``connections[r]`` is rank *r*'s to its successor."""
    children = tuple(Child(connection, rank) for rank, connection in enumerate(connections))
    return RingAt(ring, len(children), children, sizes or Sizes(), epoch)


def racks(
    ring: int,
    connections: Sequence[Connection],
    spine: int,
    leaves: Mapping[int, Sequence[int]],
    sizes: Sizes | None = None,
    epoch: int = 0,
) -> dict[int, RingAt]:
    """Plans, by address, of the switch ``spine`` and the switches ``leaves`` with the addresses of the hosts of each.

    Raises ``ValueError`` for a rank whose host is on no leaf.
    """
    plans: dict[int, RingAt] = {}
    sizes = sizes or Sizes()
    below, children = [], []
    placed = 0
    for number, (address, hosts) in enumerate(leaves.items()):
        up = Connection(address, spine, _virtual(ring, number, 0))
        down = Connection(spine, address, _virtual(ring, number, 1))
        here = tuple(
            Child(connection, rank)
            for rank, connection in enumerate(connections)
            if connection.source in hosts
        )
        distant = tuple(
            Child(connection, rank)
            for rank, connection in enumerate(connections)
            if connection.destination in hosts and connection.source not in hosts
        )
        placed += len(here)
        plans[address] = RingAt(
            ring,
            len(connections),
            here,
            sizes,
            epoch,
            Above(up, down, number),
            tuple(hosts),
            distant=distant,
        )
        children.append(Child(up, number, len(here)))
        below.append(down)
    if placed != len(connections):
        raise ValueError(
            f"ring {ring}: {placed} of {len(connections)} ranks are on a leaf; say for each host which one it is on"
        )
    top = RingAt(ring, len(connections), tuple(children), sizes, epoch, below=tuple(below))
    return {spine: top} | plans


def _virtual(ring: int, number: int, direction: int) -> int:
    return VIRTUAL | (ring & 0xFFFF) << 6 | number << 1 | direction


def restarted(plan: RingAt) -> RingAt:
    """The same ring in its next life: packets of the one before are foreign."""
    return replace(plan, epoch=plan.epoch + 1 & 0xFFFFFFFF)


#: ``switch``: results come from a switch, anything else is an error; ``ring``: ring all-reduce; ``auto``: a first message
#: tells
Mode = Literal["auto", "switch", "ring"]


@dataclass(frozen=True, slots=True)
class Member:
    """A worker's place. ``rank`` is its position on the ring of ``hosts``; ``ranks`` contribute over all of them (*n* of the
    number format).

    ``first`` is the MsgID that the ring begins with; MsgIDs go on for its life. ``mode`` is the same for all hosts. A peer
    may be ``skew`` seconds late: its neighbours' packets are held by the switch meanwhile, so acknowledgements must be
    waited for that long (patient acknowledgements), by the queue pair alone or, with ``patient``, by connecting it again where
    it had got to when it gives up, which network cards cannot. Raises ``ValueError`` for queue pairs that would give up
    earlier, and for ones with packets of another size.
    """

    job: int
    ring: int
    rank: int
    hosts: int
    ranks: int
    sizes: Sizes = field(default_factory=Sizes)
    epoch: int = 0
    first: int = 0
    mode: Mode = "auto"
    skew: float = 0.5
    patient: bool = False
    attributes: Attributes = field(default_factory=Attributes)

    def __post_init__(self) -> None:
        name = f"job {self.job}, ring {self.ring}"
        if not 0 <= self.rank < self.hosts or (self.hosts < 2 and self.mode != "switch"):
            raise ValueError(
                f"{name}: rank {self.rank} of {self.hosts}; without a switch a ring has two hosts or more"
            )
        if self.attributes.path_mtu != self.sizes.packet_bytes:
            raise ValueError(
                f"{name}: queue pairs cut packets of {self.attributes.path_mtu} B and the ring agreed on"
                f" {self.sizes.packet_bytes} B"
            )
        timeout = timeout_seconds(self.attributes.timeout)
        alone = not self.patient or self.mode != "switch"
        if alone and timeout is not None and timeout * (self.attributes.retry_cnt + 1) < self.skew:
            raise ValueError(
                f"{name}: a queue pair gives up after {timeout * (self.attributes.retry_cnt + 1):.3g} s without an"
                f" acknowledgement and peers may be {self.skew:.3g} s late: raise its timeout (code"
                f" {self.attributes.timeout}) or retry_cnt, or lower skew"
            )

    @property
    def predecessor(self) -> int:
        """The rank that this worker receives from."""
        return (self.rank - 1) % self.hosts

    def header(
        self, message: int, operation: Operation, *, plain: bool = False, length: int | None = None
    ) -> Header:
        """The INA header of one of this worker's messages; ``plain`` ones are for the neighbour alone."""
        return Header(
            ring=self.ring,
            message=message & 0xFFFFFFFF,
            length=self.sizes.length if length is None else length,
            rank=self.rank,
            operation=operation,
            epoch=self.epoch,
            tag=PLAIN_TAG if plain else TAG,
        )


class RingBroken(Exception):
    """The ring cannot go on; says what happened, to whom, and what to do."""


def check(
    member: Member, data: U8, message: int, operation: Operation, *, plain: bool, length: int
) -> Header:
    """The header of a message that has arrived in place of ``message``. Raises :class:`RingBroken` if it is another's."""
    name = f"job {member.job}, ring {member.ring}, rank {member.rank}"
    try:
        header = decode(data[:HEADER_BYTES].tobytes())
    except NoHeader as error:
        raise RingBroken(
            f"{name}: rank {member.predecessor} sent no message where one was due ({error}): all workers must agree on mode,"
            " epoch and sizes"
        ) from None
    expected = (
        PLAIN_TAG if plain else TAG,
        *(member.ring, member.epoch, member.predecessor, message & 0xFFFFFFFF, operation, length),
    )
    found = (
        *(
            header.tag,
            header.ring,
            header.epoch,
            header.rank,
            header.message,
            header.operation,
            header.length,
        ),
    )
    if found != expected:
        raise RingBroken(
            f"{name}: expected {'a plain' if plain else 'an aggregated'} message {message & 0xFFFFFFFF} of rank"
            f" {member.predecessor}, got {header}: all workers must begin the same rounds in the same order, and agree on"
            " mode, epoch and sizes"
        )
    return header


def zeros(count: int) -> U8:
    """A buffer."""
    return np.zeros(count, np.uint8)
