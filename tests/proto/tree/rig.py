"""One node between neighbours that exist only as packets: feed it anything, see what it sends and what it has become."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass

import numpy as np

from inanet.phy.device import aligned_offsets
from inanet.phy.wrapper import Wrapper
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Retired,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.tree.engine import Tables
from inanet.proto.tree.node import Node
from inanet.proto.tree.reliability import Link, Receiver, Sender
from inanet.proto.tree.slots import LinkColumn, LinkTime
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import Flag, Kind, Packet, body_bytes, decode

KEY = 0xFEED_F00D_0000_1234
JOB, TREE, SHARD, TENSOR = 7, 2, 3, 1
PARENT = endpoint("10.0.0.1", 7000)
NEW_PARENT = endpoint("10.0.0.3", 7000)


def child_at(index: int) -> int:
    """Endpoint of a child."""
    return endpoint("10.0.0.2", 8000 + index)


def batch_of(packets: Iterable[tuple[bytes, int]], slack: int = 0) -> PacketBatch:
    """Packets with their sources as one batch; ``slack`` bytes of the arena lie behind the last one."""
    data = list(packets)
    lengths = np.array([len(packet) for packet, _ in data], np.int64)
    offsets, size = aligned_offsets(lengths)
    arena = np.zeros(size + slack, np.uint8)
    for (packet, _), start in zip(data, offsets.tolist(), strict=True):
        arena[start : start + len(packet)] = np.frombuffer(packet, np.uint8)
    return PacketBatch(arena, offsets, lengths, np.array([source for _, source in data], np.uint64))


@dataclass
class Sent:
    """A packet the node has sent."""

    destination: int
    packet: Packet

    @property
    def kind(self) -> Kind:
        return self.packet.kind


def integers(count: int, seed: int = 0) -> list[np.ndarray]:
    """Payloads of fragments: int32[256] each, small enough that sums of 32 do not wrap."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-(2**25), 2**25, 256, dtype=np.int32) for _ in range(count)]


def restart_body(fragment: int, exponent: int) -> np.ndarray:
    """Payload of a RESTART of one fragment of a group: int32[256]."""
    body = np.zeros(1024, np.uint8)
    body[fragment % 1024] = exponent
    return body.view(np.int32)


class Rig:
    """A node with ``children`` children; with a parent unless ``root``. Fragments are summed unless ``fold`` differs."""

    def __init__(
        self,
        *,
        root: bool = False,
        children: int = 2,
        count: int = 5,
        last_round: int = 4,
        version: int = 5,
        window: int = 64,
        fold: Fold = Fold.SUM,
        retired: tuple[Retired, ...] = (),
        since: int = 1,
    ) -> None:
        self.now = 10.0
        self.root, self.count, self.window = root, count, window
        self.node = Node("rig", 4096)
        self.children = children
        self.node.apply(self.plan(version, since=since, retired=retired), self.now)
        spec = TensorSpec("t", "i32", (count * 128,), "sum", ExponentMode.NONE)
        self.shard = Shard(SHARD, TENSOR, TREE, Part.DATA, fold, 0, count)
        self.node.add_layout(JOB, TensorLayout(TENSOR, spec, (self.shard,)), last_round)
        self.version = version

    def plan(
        self,
        version: int,
        *,
        since: int = 1,
        retired: tuple[Retired, ...] = (),
        parent: int = PARENT,
        bit: int = 8,
    ) -> NodePlan:
        """The plan this node follows, or a changed one."""
        up = None if self.root else Parent("up", parent, bit, self.window)
        down = tuple(Child(f"c{i}", child_at(i), 1 << i, since, self.window) for i in range(self.children))
        return NodePlan(JOB, version, KEY, 32, (Placement(TREE, up, down, retired),), self.window)

    # ------------------------------------------------------------ in

    def packet(
        self, kind: Kind, *, key: int = KEY, values: np.ndarray | None = None, **changes: int
    ) -> bytes:
        """A packet as a neighbour in good order would send it, with ``changes`` of header fields."""
        body = bytes(body_bytes(kind))
        if values is not None:
            body = values.astype("<i4").tobytes().ljust(len(body), b"\0")
        flags = Flag(changes.pop("flags", 0))
        header = {
            "job": JOB,
            "host": 1,
            "gradient": 0,
            "round": 5,
            "shard": SHARD,
            "plan": self.version,
            "attempt": 0,
        }
        return Packet(kind, payload=body, flags=flags, **(header | changes)).encode(key)

    def restart(self, fragment: int, exponent: int, attempt: int, **changes: int) -> tuple[bytes, int]:
        """The parent starts a fragment again, ready to be fed; exponent 0 stays as it was."""
        flags = 0 if exponent else int(Flag.SAME)
        body = restart_body(fragment, exponent or 1)
        fields_ = {"host": 0, "gradient": fragment >> 10, "attempt": attempt, "flags": flags} | changes
        return self.packet(Kind.RESTART, values=body, **fields_), PARENT

    def feed(self, *packets: tuple[bytes, int]) -> None:
        """Have the node take packets with their sources, as one batch."""
        self.node.receive(batch_of(packets), self.now)

    def data(self, child: int, fragment: int, values: np.ndarray, **changes: int) -> tuple[bytes, int]:
        """A contribution of a child, ready to be fed."""
        fields_ = {"host": 1 << child, "gradient": fragment} | changes
        return self.packet(Kind.DATA, values=values, **fields_), child_at(child)

    # ------------------------------------------------------------ out

    def sent(self) -> list[Sent]:
        """Everything the node sends now."""
        return [
            Sent(transmission.destination, decode(transmission.packet(i), KEY))
            for transmission in self.node.transmit(self.now)
            for i in range(len(transmission))
        ]

    def wait(self, seconds: float = 0.0) -> list[Sent]:
        """Let time pass, timers included; returns what is sent on the way."""
        out = self.sent()
        stop = self.now + seconds
        while (due := self.node.timer()) is not None and due <= stop:
            self.now = max(self.now, due)
            self.node.on_timer(self.now)
            out += self.sent()
        self.now = stop
        return out

    # ------------------------------------------------------------ state

    @property
    def drops(self) -> dict[str, int]:
        """Drops so far, by reason, without zeros."""
        return {name: count for name, count in self.node.drops_by_reason().items() if count}

    @property
    def taken(self) -> int:
        """Packets that were of use."""
        return int(self.node.drops[Drop.OK])

    def snapshot(self) -> dict[str, object]:
        """All state but counters, in comparable form: equal before and after means that nothing has changed."""
        return snapshot(self.node)


def snapshot(node: Node) -> dict[str, object]:
    """See :meth:`Rig.snapshot`. What was taken off the wire (for credit) may change, so it is left out."""
    arrays = {name: getattr(node.memory, name).tobytes() for name in Tables._fields if name != "taken"}
    machine = _plain(list(node.state.jobs.values()), set())
    return {**arrays, "machine": machine}


def _plain(value: object, seen: set[int]) -> object:
    """Nested plain data of the machine's objects; what was met before is left out."""
    if isinstance(value, dict):
        return {key: _plain(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple | set) or type(value).__name__ == "deque":
        return [_plain(item, seen) for item in value]
    if isinstance(value, Receiver):
        return {name: _plain(getattr(value, name), seen) for name in Receiver.__slots__}
    if isinstance(value, Sender | Link) or is_dataclass(value):
        if id(value) in seen:
            return type(value).__name__
        seen.add(id(value))
        if isinstance(value, Link):
            # what it is told of credit may change
            told = {LinkColumn.REPORTED: 0}
            row = [told.get(column, int(value.n[value.row, column])) for column in LinkColumn]
            times = value.x[value.row, : LinkTime.CREDIT_DUE].tolist()
            names = ("resend", "queued", "repeated", "restarted", "retransmissions")
            return [row, times, *(_plain(getattr(value, name), seen) for name in names)]
        if isinstance(value, Sender):
            names = ("cursor", "sent_due", "interval", "asking_since", "done", "attach_due")
            return [_plain(value.link, seen), *(getattr(value, name) for name in names)]
        return {f.name: _plain(getattr(value, f.name), seen) for f in fields(value)}
    return value if isinstance(value, int | float | str | bytes | bytearray | None) else type(value).__name__


class Recorder(Wrapper):
    """Keeps a copy of every packet that a device receives, with its source."""

    def __init__(self, device) -> None:
        super().__init__(device)
        self.packets: list[tuple[bytes, int]] = []

    def receive(self) -> PacketBatch | None:
        batch = self._device.receive()
        if batch is not None:
            self.packets += [(batch.packet(i), int(batch.sources[i])) for i in range(len(batch))]
        return batch

    def drain(self) -> list[tuple[bytes, int]]:
        """What has come since the last call."""
        packets, self.packets = self.packets, []
        return packets
