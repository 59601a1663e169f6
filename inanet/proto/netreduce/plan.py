"""What a switch is told of a ring: whose packets it sums, and what is above and below it.

Plans are data. :func:`rack` makes the one of a single switch, :func:`racks` those of switches under a spine (section 3.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address

from inanet.wire.netreduce import message_values
from inanet.wire.netreduce_sizes import MESSAGE_PACKETS, PACKET_BYTES, WINDOW

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
