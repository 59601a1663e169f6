"""Compiled turns and batches from Python are two drivers of the same kernels: the same packets and bits for the same arrivals."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from inanet.aio.turn import Turn
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.tree.engine import Tables
from inanet.proto.tree.node import Node
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import Flag, Kind, Packet, body_bytes

JOB, TREE, SHARD, KEY, ROUND, COUNT = 7, 0, 3, 0xFEED_F00D_0000_1234, 5, 300
WINDOW = 64
#: who is around the node: its parent and two children
NEIGHBOURS = ("parent", "c0", "c1")


def arrivals(seed: int) -> list[list[tuple[str, bytes]]]:
    """Steps of packets from neighbours, as a network with all five faults delivers them."""
    rng = np.random.default_rng(seed)
    values = [[rng.integers(-(2**25), 2**25, 256, dtype=np.int32) for _ in range(COUNT)] for _ in NEIGHBOURS]

    def packet(kind: Kind, body: bytes = b"", flags: int = 0, **fields: int) -> bytes:
        header = {"job": JOB, "host": 1, "gradient": 0, "round": ROUND, "shard": SHARD, "plan": 5}
        return Packet(
            kind,
            payload=body.ljust(body_bytes(kind), b"\0"),
            flags=Flag(flags),
            attempt=0,
            **(header | fields),
        ).encode(KEY)

    sent: list[tuple[str, bytes]] = []
    for fragment in range(COUNT):
        end = int(Flag.GROUP_END) if fragment == COUNT - 1 else 0
        for child in (0, 1):
            body = values[child][fragment].tobytes()
            sent.append((f"c{child}", packet(Kind.DATA, body, end, host=1 << child, gradient=fragment)))
        if fragment % 16 == 15:
            tree = TREE.to_bytes(4, "little")
            credit = packet(Kind.CREDIT, tree, host=8, gradient=fragment + 1, shard=0, round=0)
            sent.append(("parent", credit))
        if fragment >= 40:
            body = values[2][fragment - 40].tobytes()
            sent.append(("parent", packet(Kind.RESULT, body, host=0, gradient=fragment - 40)))
        if fragment % 60 == 59:
            # a child and the parent lack something
            lost = np.packbits(rng.random(1024) < 0.02, bitorder="little").tobytes()
            sent.append(("parent", packet(Kind.LOST, lost, host=8)))
            sent.append(("c0", packet(Kind.LOST, lost, int(Flag.DOWN), host=1)))
    steps: list[list[tuple[str, bytes]]] = []
    late: list[tuple[str, bytes]] = []
    for start in range(0, len(sent), 90):
        step: list[tuple[str, bytes]] = []
        for who, data in sent[start : start + 90]:
            draw = rng.random(4)
            if draw[0] < 0.05:
                continue
            if draw[1] < 0.05:
                at = int(rng.integers(0, len(data)))
                data = data[:at] + bytes([data[at] ^ 1 << int(rng.integers(0, 8))]) + data[at + 1 :]
            (late if draw[2] < 0.05 else step).append((who, data))
            if draw[3] < 0.05:
                step.append((who, data))
        steps.append(step)
        if len(steps) % 2 == 0:
            steps[-1] += late
            late = []
    return [*steps, late]


@dataclass
class Place:
    """A node with its own device between neighbours that are sockets."""

    device: UdpDevice
    neighbours: dict[str, socket.socket]
    node: Node

    @classmethod
    def make(cls) -> "Place":
        device = UdpDevice()
        sockets = {}
        for name in NEIGHBOURS:
            sockets[name] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            sockets[name].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            sockets[name].bind(("127.0.0.1", 0))
            sockets[name].setblocking(False)
        where = {name: endpoint(*sock.getsockname()) for name, sock in sockets.items()}
        node = Node("n", 1024)
        place = Placement(
            TREE,
            Parent("parent", where["parent"], 8, WINDOW),
            tuple(Child(f"c{i}", where[f"c{i}"], 1 << i, 1, WINDOW) for i in (0, 1)),
        )
        node.apply(NodePlan(JOB, 5, KEY, 32, (place,), WINDOW), 1.0)
        spec = TensorSpec("t", "i32", (COUNT * 128,), "sum", ExponentMode.NONE)
        shard = Shard(SHARD, 1, TREE, Part.DATA, Fold.SUM, 0, COUNT)
        node.add_layout(JOB, TensorLayout(1, spec, (shard,)), ROUND - 1)
        return cls(device, sockets, node)

    def arrive(self, packets: list[tuple[str, bytes]]) -> None:
        for who, data in packets:
            self.neighbours[who].sendto(data, self.device._socket.getsockname())

    def flush(self, now: float) -> None:
        """What the node has to send besides."""
        for transmission in self.node.transmit(now):
            assert self.device.send(transmission) == len(transmission)

    def sent(self) -> dict[str, list[bytes]]:
        """What neighbours got since the last call."""
        got: dict[str, list[bytes]] = {}
        for name, sock in self.neighbours.items():
            got[name] = []
            try:
                while True:
                    got[name].append(sock.recv(65536))
            except BlockingIOError:
                got[name].sort()
        return got

    def tables(self) -> dict[str, bytes]:
        memory = self.node.memory
        left_out = {"child_endpoint", "trees"}
        return {name: getattr(memory, name).tobytes() for name in Tables._fields if name not in left_out}

    def close(self) -> None:
        self.device.close()
        for sock in self.neighbours.values():
            sock.close()


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    pair = Place.make(), Place.make()
    yield pair
    for place in pair:
        place.close()


def by_turns(place: Place, turn: Turn, now: float) -> None:
    """Until the socket is empty."""
    for _ in range(20):
        outcome = turn.run(now)
        assert outcome.leftover is None
        place.flush(now)
        if outcome.drained:
            return
    raise AssertionError("the socket does not become empty")


def by_batches(place: Place, now: float) -> None:
    while (batch := place.device.receive()) is not None:
        place.node.receive(batch, now)
        place.flush(now)
    place.flush(now)


@pytest.mark.parametrize("seed", range(4))
def test_turns_and_batches_send_the_same_and_hold_the_same(places: tuple[Place, Place], seed: int) -> None:
    turns, batches = places
    turn = Turn(turns.node, turns.device)
    now = 1.0
    for place in places:
        place.flush(now)
    by_turns(turns, turn, now)
    everything: dict[str, list[bytes]] = {name: [] for name in NEIGHBOURS}
    for step in arrivals(seed):
        now += 0.004
        for place in places:
            due = place.node.timer()
            if due is not None and due <= now:
                place.node.on_timer(now)
                place.flush(now)
            place.arrive(step)
        by_turns(turns, turn, now)
        by_batches(batches, now)
        sent = turns.sent()
        assert sent == batches.sent()
        for name, packets in sent.items():
            everything[name] += packets
        assert turns.tables() == batches.tables()
        assert turns.node.drops_by_reason() == batches.node.drops_by_reason()
        assert turns.node.stats() == batches.node.stats()
    kinds = {packet[1] & 0xF for packets in everything.values() for packet in packets}
    assert {Kind.DATA, Kind.RESULT, Kind.CREDIT, Kind.LOST} <= kinds
    drops = turns.node.drops_by_reason()
    assert min(drops[reason] for reason in ("bad_tag", "bad_checksum", "duplicate")) > 0
    assert turns.device.counters()["rx_packets"] == batches.device.counters()["rx_packets"]
