"""Compiled turns and batches from Python are two drivers of the same kernels: the same packets and bits for the same arrivals."""

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from inanet.aio.turn import Figure, Turn
from inanet.phy.udp import UdpDevice
from inanet.proto.common.events import NodeEvent, Refused, RoundDone
from inanet.proto.common.formats import make_format
from inanet.proto.common.local import LocalTensor
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
from inanet.proto.tree.slots import LinkColumn
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


ELEMENTS = 256 * 1500 + 7
SPECS = {
    "f32 prologue": TensorSpec("t", "f32", (ELEMENTS,), "mean", ExponentMode.PROLOGUE),
    "f32 propagate": TensorSpec("t", "f32", (ELEMENTS,), "sum", ExponentMode.PROLOGUE, propagate=True),
    "f32 carried": TensorSpec("t", "f32", (ELEMENTS,), "sum", ExponentMode.CARRIED),
    "bf16 prologue": TensorSpec("t", "bf16", (ELEMENTS,), "sum", ExponentMode.PROLOGUE),
    "i32": TensorSpec("t", "i32", (ELEMENTS,), "sum", ExponentMode.NONE),
}


class Worker:
    """A node with a part in a round, whose parent answers each contribution with itself: the only one of a job of one rank."""

    def __init__(self, spec: TensorSpec, arrays: list[np.ndarray], driven: str) -> None:
        self.device = UdpDevice()
        self.parent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.parent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.parent.bind(("127.0.0.1", 0))
        self.parent.setblocking(False)
        self.node = Node("n", 4096)
        where = endpoint(*self.parent.getsockname())
        place = Placement(TREE, Parent("parent", where, 8, WINDOW), ())
        self.node.apply(NodePlan(JOB, 5, KEY, len(arrays), (place,), WINDOW), 1.0)
        form = make_format(spec, len(arrays))
        shards = [Shard(SHARD, 1, TREE, Part.DATA, form.fold, 0, form.fragments)]
        if form.exponent_fragments:
            shards.append(Shard(SHARD + 1, 1, TREE, Part.EXPONENTS, Fold.MAX8, 0, form.exponent_fragments))
        self.node.add_layout(JOB, TensorLayout(1, spec, tuple(shards)), ROUND - 1)
        self.turn = Turn(self.node, self.device) if driven == "turns" else None
        self.arrays = [array.copy() for array in arrays]
        self.sent: list[bytes] = []
        self.events: list[NodeEvent] = []

    def step(self, now: float) -> None:
        """Take what has come, send, and have everything answered."""
        if self.turn is not None:
            while not self.turn.run(now).drained:
                pass
        else:
            while (batch := self.device.receive()) is not None:
                self.node.receive(batch, now)
        logs = self.turn is None
        for transmission in self.node.transmit(now, logs=logs):
            assert self.device.send(transmission) == len(transmission)
        if self.turn is not None:
            self.turn.run(now, budget=0)
        self.events += self.node.events()
        try:
            while True:
                self._answer(self.parent.recv(65536))
        except BlockingIOError:
            pass

    def _answer(self, packet: bytes) -> None:
        self.sent.append(packet)
        kind = packet[1] & 0xF
        if kind in (Kind.DATA, Kind.EXPONENT):
            words = np.frombuffer(packet, np.uint32)
            result = Packet(
                Kind.RESULT,
                job=JOB,
                host=0,
                gradient=int(words[2]) & 0xFFFFFF,
                round=ROUND,
                shard=int(words[4]) & 0xFFFF,
                plan=5,
                attempt=0,
                flags=Flag(packet[1] >> 4 & 1),
                payload=packet[24:-4],
            )
            self.parent.sendto(result.encode(KEY), self.device._socket.getsockname())
            taken = sum(one[1] & 0xF in (Kind.DATA, Kind.EXPONENT) for one in self.sent)
            credit = Packet(
                Kind.CREDIT,
                payload=TREE.to_bytes(4, "little").ljust(body_bytes(Kind.CREDIT), b"\0"),
                flags=Flag(0),
                job=JOB,
                host=8,
                gradient=taken,
                round=0,
                shard=0,
                plan=5,
                attempt=0,
            )
            if taken % 16 == 0:
                self.parent.sendto(credit.encode(KEY), self.device._socket.getsockname())

    def close(self) -> None:
        self.device.close()
        self.parent.close()


def take_part(spec: TensorSpec, arrays: list[np.ndarray], steps: int = 600) -> tuple[Worker, Worker]:
    """One round by turns and one by batches, with the same arrivals."""
    pair = Worker(spec, arrays, "turns"), Worker(spec, arrays, "batches")
    now = 1.0
    for worker in pair:
        worker.node.begin(JOB, 1, ROUND, worker.arrays, now)
    for _ in range(steps):
        now += 0.0005
        for worker in pair:
            worker.step(now)
        if all(worker.events for worker in pair):
            break
    for worker in pair:
        worker.close()
    return pair


def values(spec: TensorSpec, ranks: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    if spec.dtype == "i32":
        return [rng.integers(-(2**28), 2**28, ELEMENTS, dtype=np.int32) for _ in range(ranks)]
    floats = [
        (rng.standard_normal(ELEMENTS) * 2.0 ** rng.integers(-40, 40, ELEMENTS)).astype(np.float32)
        for _ in range(ranks)
    ]
    return [(a.view(np.uint32) >> 16).astype(np.uint16) if spec.dtype == "bf16" else a for a in floats]


@pytest.mark.parametrize("name", SPECS)
def test_a_hosts_own_part_is_the_same_by_turns_and_by_batches(name: str) -> None:
    spec = SPECS[name]
    turns, batches = take_part(spec, values(spec, 2))
    assert [type(event) for event in turns.events] == [RoundDone]
    assert turns.events == batches.events
    assert sorted(turns.sent) == sorted(batches.sent)
    expected = values(spec, 2)
    assert LocalTensor(spec, 2).reduce(expected) is None
    for one, other, right in zip(turns.arrays, batches.arrays, expected, strict=True):
        assert one.tobytes() == other.tobytes() == right.tobytes()
    assert turns.node.stats() == batches.node.stats()


@pytest.mark.parametrize("at", [0, ELEMENTS - 1])
def test_a_turn_refuses_what_is_not_to_be_summed(at: int) -> None:
    spec = SPECS["f32 prologue"]
    arrays = values(spec, 2)
    arrays[1][at] = np.nan
    turns, batches = take_part(spec, arrays)
    assert turns.events == batches.events
    assert isinstance(turns.events[0], Refused)
    assert (turns.events[0].local_rank, turns.events[0].index) == (1, at)


def test_a_round_that_is_given_up_leaves_arrays_alone() -> None:
    """Rows hold addresses: after its end nothing may be written there."""
    worker = Worker(SPECS["f32 prologue"], values(SPECS["f32 prologue"], 1), "turns")
    worker.node.begin(JOB, 1, ROUND, worker.arrays, 1.0)
    for k in range(20):
        worker.step(1.0 + k * 0.0005)
    worker.node.fail_round(JOB, ROUND, (1,), 1.1)
    assert not worker.node.memory.leaves.any()
    before = worker.arrays[0].copy()
    for k in range(20):
        worker.step(1.2 + k * 0.0005)
    assert before.tobytes() == worker.arrays[0].tobytes()
    worker.close()


def test_a_turn_that_waits_ends_when_the_loop_is_needed(places: tuple[Place, Place]) -> None:
    place, _ = places
    wake = os.eventfd(1)
    try:
        turn = Turn(place.node, place.device, wake)
        place.arrive(arrivals(0)[0])
        now = time.monotonic()
        outcomes = [turn.run(now, until=now + 3600)]
        assert outcomes[0].packets > 0
        # a round has been opened, which Python has to see first
        while outcomes[-1].packets:
            outcomes.append(turn.run(now, until=now + 3600))
        assert outcomes[-1].drained
    finally:
        os.close(wake)


def test_a_turn_that_waits_ends_by_its_time(places: tuple[Place, Place]) -> None:
    place, _ = places
    turn = Turn(place.node, place.device)
    now = time.monotonic()
    assert turn.run(now, until=now + 0.001).drained
    assert time.monotonic() >= now + 0.001


def test_a_burst_for_a_neighbour_that_has_gone_is_dropped(places: tuple[Place, Place]) -> None:
    place, _ = places
    turn = Turn(place.node, place.device)
    turn.run(1.0)
    link = place.node.state.jobs[JOB].trees[TREE].down[0]
    figures = turn._wires.figures
    figures[Figure.LINK], figures[Figure.TO] = link.row, link.endpoint
    figures[Figure.FOUND], figures[Figure.TAKEN] = 2, 1
    turn._wires.burst[:2] = 0, 1052
    link.n[link.row, LinkColumn.LIVE] = 0
    place.sent()
    outcome = turn.run(1.001)
    assert not outcome.blocked
    assert not any(place.sent().values())
