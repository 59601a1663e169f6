"""RoCE hosts on two racks: three switches of frames, a ring that all of them have from one entry, in virtual time."""

from collections import deque
from ipaddress import IPv4Address
from typing import Any

import numpy as np

from inanet.aio.switch import ring_at
from inanet.config.rings import RingEntry
from inanet.phy.vnet import HEADER_BYTES
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Sizes
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
from tests.switch.memory import MemoryPort, ethernet
from tests.switch.rig import BROADCAST, arp

HOSTS = [f"10.0.0.{i + 1}" for i in range(4)]
MACS = [0x02_00_00_00_00_01 + i for i in range(4)]
SPINE, *LEAVES = (f"10.0.0.{200 + i}" for i in range(3))
SIZES = Sizes(length=4, packet_bytes=256)
ELEMENTS = 2000
#: where the cable of a switch's port ends: at a host, or at another switch's port
CABLES: dict[tuple[str, str], int | tuple[str, str]] = {
    (LEAVES[0], "p0"): 0,
    (LEAVES[0], "p1"): 1,
    (LEAVES[0], "p2"): (SPINE, "p0"),
    (LEAVES[1], "p0"): 2,
    (LEAVES[1], "p1"): 3,
    (LEAVES[1], "p2"): (SPINE, "p1"),
    (SPINE, "p0"): (LEAVES[0], "p2"),
    (SPINE, "p1"): (LEAVES[1], "p2"),
}


class Racks:
    """Four workers; ``lose`` is asked of every frame on a cable between switches whether that is lost."""

    def __init__(self, lose: Any = lambda frame: False) -> None:
        self.now = 0.0
        self.lose = lose
        attributes = Attributes(path_mtu=256)
        self.workers = [
            NetReduceWorker(
                Member(1, 5, rank, 4, 4, SIZES, attributes=attributes),
                endpoint(HOSTS[rank], 50000),
                psn=0xFFFFF0,
            )
            for rank in range(4)
        ]
        connect(self.workers)
        entry = RingEntry.model_validate(
            {
                "ring": 5,
                "length": SIZES.length,
                "packet": SIZES.packet_bytes,
                "connections": [
                    {
                        "source": str(IPv4Address(one.source)),
                        "destination": str(IPv4Address(one.destination)),
                        "queue_pair": one.queue_pair,
                    }
                    for one in connections_of(self.workers)
                ],
                "spine": SPINE,
                "racks": [
                    {"switch": LEAVES[0], "hosts": HOSTS[:2]},
                    {"switch": LEAVES[1], "hosts": HOSTS[2:]},
                ],
            }
        )
        self.devices: dict[tuple[str, str], MemoryPort] = {place: MemoryPort() for place in CABLES}
        self.switches: dict[str, FrameSwitch] = {}
        for number, own in enumerate((SPINE, *LEAVES)):
            tables = Tables(0x02_00_00_00_01_00 + number, int(IPv4Address(own)))
            devices = {port: device for (switch, port), device in self.devices.items() if switch == own}
            splice = Splice(tables, 14, [ring_at(entry, int(IPv4Address(own)))])
            self.switches[own] = FrameSwitch(Pipeline([]), devices, tables, splice=splice)
        for rank, (host, hardware) in enumerate(zip(HOSTS, MACS, strict=True)):
            # as a host does that looks for another one
            self.carry(
                LEAVES[rank // 2],
                f"p{rank % 2}",
                [ethernet(BROADCAST, hardware, 0x0806, arp(1, hardware, host, HOSTS[rank - 1]))],
            )

    def program(self, switch: str) -> Any:
        splice = self.switches[switch].splice
        assert splice is not None
        return splice.program

    def carry(self, switch: str, port: str, frames: list[bytes]) -> None:
        """Frames come in at a port, and everything that comes of it is carried on."""
        waiting = deque([(switch, port, frames)])
        while waiting:
            at, into, arriving = waiting.popleft()
            self.devices[at, into].arriving.append(arriving)
            ports = {one.name: one for one in self.switches[at].ports}
            while ports[into].read(self.now):
                pass
            for (owner, out), device in self.devices.items():
                sent = device.take() if owner == at else []
                end = CABLES[owner, out]
                if isinstance(end, tuple):
                    sent = [frame for frame in sent if not self.lose(frame)]
                    if sent:
                        waiting.append((*end, sent))
                elif sent:
                    self.deliver(end, sent)

    def deliver(self, rank: int, frames: list[bytes]) -> None:
        """What a network card hands on: packets for its own hardware address."""
        for frame in frames:
            if int.from_bytes(frame[HEADER_BYTES : HEADER_BYTES + 6], "big") != MACS[rank]:
                continue
            packet = np.frombuffer(bytearray(frame[HEADER_BYTES + 14 :]), np.uint8)
            one = (packet, np.zeros(1, np.int64), np.array([len(packet)], np.int64), np.zeros(1, np.uint64))
            self.workers[rank].receive(PacketBatch(*one), self.now)

    def turn(self) -> None:
        """Everything that workers have to send, and what comes of it."""
        for rank, worker in enumerate(self.workers):
            at = worker.timer()
            if at is not None and at <= self.now:
                worker.on_timer(self.now)
            frames = []
            for one in worker.transmit(self.now):
                for packet in map(one.packet, range(len(one))):
                    to = MACS[HOSTS.index(str(IPv4Address(packet[16:20])))]
                    frames.append(ethernet(to, MACS[rank], 0x0800, packet))
            if frames:
                self.carry(LEAVES[rank // 2], f"p{rank % 2}", frames)

    def all_reduce(self) -> None:
        spec = TensorSpec("t", "i32", (ELEMENTS,), "sum", ExponentMode.NONE)
        arrays = [np.arange(ELEMENTS, dtype=np.int32) * (rank + 1) for rank in range(4)]
        expected = np.arange(ELEMENTS, dtype=np.int32) * 10
        for worker, array in zip(self.workers, arrays, strict=True):
            worker.add_tensor(0, spec)
            worker.begin(0, 1, [array], self.now)
        events: list[Any] = []
        while len(events) < 4:
            assert self.now < 60.0, [worker.stats() for worker in self.workers]
            self.turn()
            self.now += 0.02
            events += [event for worker in self.workers for event in worker.events()]
        assert {type(event).__name__ for event in events} == {"RoundDone"}
        for array in arrays:
            np.testing.assert_array_equal(array, expected)
        assert {worker.mode for worker in self.workers} == {"switch"}


def test_leaves_aggregate_up_and_the_spine_multicasts_down() -> None:
    racks = Racks()
    racks.all_reduce()
    spine, leaf = racks.program(SPINE), racks.program(LEAVES[0])
    # one packet of each rack for a place, whatever is below, and none on the ranks' own connections
    assert spine.stats()["contributions"] == 2 * spine.stats()["completed"] > 0
    assert spine.stats()["emitted"] == 0
    assert leaf.stats()["notices"] > 0
    assert [row[0] for row in leaf.translations(5)] == ["aggregation"] * 2 + ["multicast"] * 2
    # switches find each other by asking; what is lost meanwhile comes again
    drops = {name: switch.stats()["drops"] for name, switch in racks.switches.items()}
    assert drops[LEAVES[0]][Drop.NO_ROUTE.label] > 0  # type: ignore[index]
    assert set().union(*drops.values()) <= {Drop.NO_ROUTE.label, Drop.UNRESOLVED.label}  # type: ignore[arg-type]
    assert racks.switches[LEAVES[0]].tables.host(int(IPv4Address(SPINE))) == (0x02_00_00_00_01_00, 2)


def test_packets_lost_between_switches_cost_time_only() -> None:
    rng = np.random.default_rng(1)
    lost = []

    def lose(frame: bytes) -> bool:
        if frame[HEADER_BYTES + 12 : HEADER_BYTES + 14] != b"\x08\0" or rng.random() >= 0.05:
            return False
        lost.append(frame)
        return True

    # compares the sums
    Racks(lose).all_reduce()
    assert lost
