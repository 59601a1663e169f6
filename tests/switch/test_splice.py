"""RoCE hosts on a switch of frames that serves their ring: byte by byte, in virtual time."""

import struct
from collections.abc import Sequence
from ipaddress import IPv4Address

import numpy as np
import pytest

from inanet.phy.vnet import HEADER_BYTES
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Sizes, rack
from inanet.proto.netreduce.worker import NetReduceWorker
from inanet.proto.roce import Attributes
from inanet.switch.framed import FrameSwitch
from inanet.switch.pipeline import Pipeline
from inanet.switch.splice import Splice
from inanet.switch.tables import Tables
from inanet.testing.netreduce import connect, connections_of
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import decode
from tests.switch.memory import MemoryPort, ethernet, ipv4

HOSTS = [f"10.0.0.{i + 1}" for i in range(3)]
MACS = [0x02_00_00_00_00_01 + i for i in range(3)]
OWN, OWN_MAC = "10.0.0.254", 0x02_00_00_00_00_FE
SIZES = Sizes(length=4, packet_bytes=256)
ELEMENTS = 2000


class Wire:
    """Workers as hosts at the ports of a switch; ``routed``: they send to the switch's hardware address; ``placed``: they
    may speak from their own ports alone.
    """

    def __init__(
        self, *, link: int = 14, routed: bool = False, serving: bool = True, placed: bool = False
    ) -> None:
        self.link, self.routed = link, routed
        self.devices = {f"p{i}": MemoryPort() for i in range(3)}
        self.tables = Tables(OWN_MAC if link else 0, int(IPv4Address(OWN)))
        for i in range(3):
            self.tables.give_host(int(IPv4Address(HOSTS[i])), MACS[i], i)
        if not link:
            from ipaddress import IPv4Network

            self.tables.set_routes([(IPv4Network(f"{host}/32"), i, 0) for i, host in enumerate(HOSTS)])
        attributes = Attributes(path_mtu=256)
        self.workers = [
            NetReduceWorker(
                Member(1, 5, rank, 3, 3, SIZES, attributes=attributes),
                endpoint(HOSTS[rank], 50000),
                psn=0xFFFFF0,
            )
            for rank in range(3)
        ]
        connect(self.workers)
        rings = [rack(5, connections_of(self.workers), SIZES)] if serving else []
        places = {int(IPv4Address(host)): port for port, host in enumerate(HOSTS)} if placed else {}
        self.splice = Splice(self.tables, link, rings, placed=places)
        self.switch = FrameSwitch(Pipeline([]), self.devices, self.tables, link=link, splice=self.splice)

    def frame(self, rank: int, packet: bytes) -> bytes:
        if not self.link:
            return bytes(HEADER_BYTES) + packet
        to = OWN_MAC if self.routed else MACS[HOSTS.index(str(IPv4Address(packet[16:20])))]
        return ethernet(to, MACS[rank], 0x0800, packet)

    def put(self, port: int, frames: Sequence[bytes]) -> list[list[bytes]]:
        self.devices[f"p{port}"].arriving.append(list(frames))
        while self.switch.ports[port].read(0.0):
            pass
        return [device.take() for device in self.devices.values()]

    def turn(self) -> None:
        """Everything that workers have to send, and what comes of it."""
        for rank, worker in enumerate(self.workers):
            packets = [one.packet(i) for one in worker.transmit(0.0) for i in range(len(one))]
            if packets:
                for port, frames in enumerate(
                    self.put(rank, [self.frame(rank, packet) for packet in packets])
                ):
                    self.deliver(port, frames)

    def deliver(self, rank: int, frames: Sequence[bytes]) -> None:
        head = HEADER_BYTES + self.link
        for frame in frames:
            if self.link:
                assert int.from_bytes(frame[10:16], "big") == MACS[rank]
            packet = frame[head:]
            # headers and ICRC are right
            assert decode(packet).destination >> 16 == int(IPv4Address(HOSTS[rank]))
            arena = np.frombuffer(bytearray(packet), np.uint8)
            one = PacketBatch(
                arena, np.zeros(1, np.int64), np.array([len(packet)], np.int64), np.zeros(1, np.uint64)
            )
            self.workers[rank].receive(one, 0.0)

    def all_reduce(self) -> None:
        spec = TensorSpec("t", "i32", (ELEMENTS,), "sum", ExponentMode.NONE)
        arrays = [np.arange(ELEMENTS, dtype=np.int32) * (rank + 1) for rank in range(3)]
        expected = np.arange(ELEMENTS, dtype=np.int32) * 6
        for worker, array in zip(self.workers, arrays, strict=True):
            worker.add_tensor(0, spec)
            worker.begin(0, 1, [array], 0.0)
        for _ in range(400):
            self.turn()
        for worker, array in zip(self.workers, arrays, strict=True):
            assert [type(event).__name__ for event in worker.events()] == ["RoundDone"]
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(("link", "routed"), [(14, False), (14, True), (0, False)])
def test_hosts_on_a_switch_of_frames_get_sums(link, routed):
    wire = Wire(link=link, routed=routed)
    wire.all_reduce()
    assert {worker.mode for worker in wire.workers} == {"switch"}
    figures = wire.switch.stats()
    assert figures["programs"]["netreduce"]["completed"] > 0
    assert figures["drops"] == {}


def test_without_the_ring_the_same_hosts_make_a_ring_themselves():
    wire = Wire(serving=False)
    wire.all_reduce()
    assert {worker.mode for worker in wire.workers} == {"ring"}
    assert wire.splice.program.stats()["contributions"] == 0


def test_sums_leave_under_the_link_headers_of_their_connections():
    wire = Wire()
    packets = [
        [one.packet(i) for one in worker.transmit(0.0) for i in range(len(one))] for worker in wire.workers
    ]
    assert [wire.put(rank, [wire.frame(rank, p) for p in packets[rank]]) for rank in (0, 1)] == [
        [[], [], []]
    ] * 2
    left = wire.put(2, [wire.frame(2, p) for p in packets[2]])
    for rank in range(3):
        to = (rank + 1) % 3
        assert [frame[:24] for frame in left[to]] == [wire.frame(rank, p)[:24] for p in packets[rank]]
    # addresses are still where they were learned
    assert wire.tables.port_of(MACS[0], 0.0) == 0


def test_everything_else_is_forwarded_as_it_came():
    wire = Wire()
    tcp = ethernet(MACS[1], MACS[0], 0x0800, ipv4(HOSTS[0], HOSTS[1], 6, bytes(40)))
    other_port = ethernet(
        MACS[1],
        MACS[0],
        0x0800,
        ipv4(HOSTS[0], HOSTS[1], 17, struct.pack(">HHHH", 1, 4792, 16, 0) + bytes(8)),
    )
    short = ethernet(
        MACS[1], MACS[0], 0x0800, ipv4(HOSTS[0], HOSTS[1], 17, struct.pack(">HHHH", 1, 4791, 8, 0))
    )
    fragment = bytearray(wire.frame(0, next(iter(wire.workers[0].transmit(0.0))).packet(0)))
    fragment[HEADER_BYTES + 14 + 6] |= 0x20
    frames = [tcp, other_port, short, bytes(fragment)]
    assert wire.put(0, frames) == [[], frames, []]


def first_packets(wire: Wire) -> list[list[bytes]]:
    return [
        [one.packet(i) for one in worker.transmit(0.0) for i in range(len(one))] for worker in wire.workers
    ]


def test_link_headers_are_learned_from_nothing_that_is_refused() -> None:
    """Hardware addresses are in no checksum of RoCE: a damaged frame must not lead its connection's sums elsewhere."""
    wire = Wire()
    packets = first_packets(wire)
    wire.put(0, [wire.frame(0, p) for p in packets[0]])
    damaged = bytearray(wire.frame(0, packets[0][0]))
    damaged[HEADER_BYTES : HEADER_BYTES + 6] = MACS[2].to_bytes(6, "big")
    damaged[-1] ^= 1
    wire.put(0, [bytes(damaged)])
    assert wire.switch.stats()["drops"] == {Drop.BAD_ICRC.label: 1}
    wire.put(1, [wire.frame(1, p) for p in packets[1]])
    left = wire.put(2, [wire.frame(2, p) for p in packets[2]])
    assert [len(frames) for frames in left] == [SIZES.length] * 3


def test_a_host_that_has_a_port_speaks_for_its_rank_from_there_alone() -> None:
    wire = Wire(placed=True)
    packets = first_packets(wire)
    forged = [wire.frame(0, p) for p in packets[0]]
    assert wire.put(2, forged) == [[], [], []]
    assert wire.switch.stats()["drops"] == {Drop.FOREIGN_HOST.label: SIZES.length}
    assert wire.splice.program.stats()["contributions"] == 0
    # what is of no ring is forwarded from anywhere
    other = bytearray(packets[0][0])
    other[33:36] = (0x99).to_bytes(3, "big")
    assert wire.put(2, [wire.frame(0, bytes(other))]) == [[], [wire.frame(0, bytes(other))], []]
    again = Wire(placed=True)
    again.all_reduce()
    assert {worker.mode for worker in again.workers} == {"switch"}
