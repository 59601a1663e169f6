"""The unprivileged switch: workers and a PS as UDP sockets, the adder between them."""

import select
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from inanet.phy.udp import UdpDevice
from inanet.switch.pipeline import Pipeline
from inanet.switch.port import Faults, PortOptions, Switch
from inanet.switch.programs import Registration
from inanet.switch.udp import UdpSwitch
from inanet.wire.batch import Transmission
from tests.switch.adder import GROUP, Adder, packet

DEADLINE = 10.0
VALUES = 16
LENGTH = 4 + 4 * VALUES


def turn(switch: Switch, until: Callable[[], bool], now: Callable[[], float] = time.monotonic) -> None:
    """Run a switch until a condition holds; fails when it never does."""
    end = time.monotonic() + DEADLINE
    while not until():
        assert time.monotonic() < end, switch.stats()
        poll = select.poll()
        ports = {port.fileno(): port for port in switch.ports}
        for fd, port in ports.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if port.blocked else 0))
        for fd, event in poll.poll(20):
            if event & select.POLLOUT:
                ports[fd].resume()
            while event & select.POLLIN and ports[fd].read(now()):
                pass
        if switch.timer() <= now():
            switch.on_timer(now())


class Star:
    """Workers and a PS around a switch."""

    def __init__(self, stack: ExitStack, workers: int = 3, **options: object) -> None:
        self.hosts = [UdpDevice() for _ in range(workers + 1)]
        for host in self.hosts:
            stack.callback(host.close)
        *members, self.ps = [host.endpoint for host in self.hosts]
        self.adder = Adder(members, self.ps, slots=256, values=VALUES, **options.pop("adder", {}))  # type: ignore[call-overload]
        self.registration = Registration(
            "adder",
            self.adder,
            (range(1),),
            uplinks={**dict.fromkeys(members, self.ps), self.ps: 0},
            groups={GROUP: tuple(members)},
        )
        self.switch = UdpSwitch(Pipeline([self.registration]), **options)  # type: ignore[arg-type]
        stack.callback(self.switch.close)
        self.heard: list[list[bytes]] = [[] for _ in self.hosts]

    def send(self, host: int, packets: list[bytes]) -> None:
        arena = np.frombuffer(b"".join(packets), np.uint8).copy()
        offsets = np.arange(len(packets), dtype=np.int64) * len(packets[0])
        transmission = Transmission(self.switch.endpoint("adder"), arena, offsets, len(packets[0]))
        assert self.hosts[host].send(transmission) == len(packets)

    def listen(self) -> int:
        """Read all hosts; returns how many packets they have heard so far."""
        for host, heard in zip(self.hosts, self.heard, strict=True):
            while (batch := host.receive()) is not None:
                assert set(batch.sources.tolist()) == {self.switch.endpoint("adder")}
                heard += [batch.packet(i) for i in range(len(batch))]
        return sum(map(len, self.heard))


def test_sums_reach_every_worker_and_the_rest_the_ps(stack: ExitStack) -> None:
    star = Star(stack)
    vectors = np.random.default_rng(1).integers(-(1 << 28), 1 << 28, (3, 300, VALUES)).astype(np.int32)
    for worker in range(3):
        star.send(worker, [packet(slot, worker, 1, vectors[worker, slot]) for slot in range(300)])
    # 256 slots; what lies beyond passes to the PS
    turn(star.switch, lambda: star.listen() >= 3 * 256 + 3 * 44)
    sums = vectors.sum(0, dtype=np.int32)
    for heard in star.heard[:3]:
        assert [one[4:] for one in sorted(heard)] == [
            packet(slot, 0, 1, sums[slot])[4:]
            for slot in sorted(range(256), key=lambda s: s.to_bytes(2, "little"))
        ]
    expected = [packet(slot, w, 1, vectors[w, slot]) for w in range(3) for slot in range(256, 300)]
    assert sorted(star.heard[3]) == sorted(expected)
    stats = star.switch.stats()
    assert stats["drops"] == {}
    # results left as super-frames
    ports = stats["ports"]
    assert isinstance(ports, dict)
    for port in star.switch.ports[:3]:
        assert ports[port.name]["tx_superframes"] < 30 < ports[port.name]["tx_packets"] == 256


def test_strangers_are_refused(stack: ExitStack) -> None:
    star = Star(stack)
    stranger = UdpDevice()
    stack.callback(stranger.close)
    arena = np.frombuffer(packet(1, 0, 1, np.ones(VALUES, np.int32)), np.uint8).copy()
    stranger.send(Transmission(star.switch.endpoint("adder"), arena, np.zeros(1, np.int64), LENGTH))
    turn(star.switch, lambda: star.switch.stats()["drops"] == {"foreign_host": 1})
    assert not star.adder.bitmap.any()


def test_a_dead_workers_slots_age_out_to_the_ps(stack: ExitStack) -> None:
    clock = [0.0]
    star = Star(stack, adder={"age": 5.0}, clock=lambda: clock[0])
    ones = np.ones(VALUES, np.int32)
    star.send(0, [packet(3, 0, 1, ones)])
    star.send(1, [packet(3, 1, 1, ones)])
    turn(star.switch, lambda: star.adder.bitmap[3] == 3, lambda: clock[0])
    assert star.switch.timer() <= 5.0
    clock[0] = 6.0
    turn(star.switch, lambda: star.listen() == 1, lambda: clock[0])
    assert star.heard[3] == [packet(3, 255, 1, ones * 2)]
    assert not star.adder.bitmap.any()


def test_the_queue_to_a_host_marks_and_drops(stack: ExitStack) -> None:
    clock = [0.0]
    wire = LENGTH + 42
    narrow = PortOptions(rate=8e6, depth=20 * wire, ecn=10 * wire)
    star = Star(stack, default=narrow, clock=lambda: clock[0])
    ones = np.ones(VALUES, np.int32)
    # slots that the switch does not have: all of them go to the PS
    star.send(0, [packet(500 + i, 0, 1, ones) for i in range(8)])
    turn(star.switch, lambda: star.listen() == 8, lambda: clock[0])
    assert star.adder.congested == [0] * 8
    star.send(0, [packet(500 + i, 0, 1, ones) for i in range(8, 30)])
    turn(star.switch, lambda: star.listen() == 20, lambda: clock[0])
    # everything left so far: the third fragment would stand at the threshold
    assert star.adder.congested[8:] == [0] * 2 + [1] * 20
    assert star.switch.stats()["drops"] == {"queue_full": 10}
    assert [one[:2] for one in star.heard[3]] == [(500 + i).to_bytes(2, "little") for i in range(20)]


def test_impairments_are_drawn_per_port_and_repeat(stack: ExitStack) -> None:
    def lost(seed: int) -> list[bytes]:
        star = Star(stack, default=PortOptions(faults=Faults(seed, drop=0.2, corrupt=0.1)), clock=lambda: 0.0)
        ones = np.ones(VALUES, np.int32)
        for worker in range(3):
            star.send(worker, [packet(500 + i, worker, 1, ones) for i in range(200)])
        turn(star.switch, lambda: not star.switch.pipeline.stages["parse"] < 200, lambda: 0.0)
        turn(
            star.switch,
            lambda: star.switch.stats()["drops"].get("injected", 0) + star.listen() == 600,  # type: ignore[attr-defined]
            lambda: 0.0,
        )
        return sorted(star.heard[3])

    first = lost(1)
    assert 350 < len(first) < 490
    assert lost(1) == first != lost(2)
    by_worker = [{one[:2] for one in first if one[2] == worker} for worker in range(3)]
    assert by_worker[0] != by_worker[1] != by_worker[2]


def test_a_host_that_does_not_read_keeps_back_nobody_else(stack: ExitStack) -> None:
    star = Star(stack, workers=2)
    ones = np.ones(VALUES, np.int32)
    deaf, lively = star.switch.ports[0], star.switch.ports[1]
    assert deaf.name.endswith(str(star.hosts[0].endpoint & 0xFFFF))
    # the first worker's port takes nothing more, as if its buffers were full
    deaf.device.send = lambda transmission, start=0: 0  # type: ignore[attr-defined]
    for worker in range(2):
        star.send(worker, [packet(slot, worker, 1, ones) for slot in range(256)])
    turn(star.switch, lambda: star.listen() == 256 and deaf.blocked)
    assert not lively.blocked
    assert len(star.heard[1]) == 256
    del deaf.device.send  # type: ignore[attr-defined]
    deaf.resume()
    turn(star.switch, lambda: star.listen() == 512)
    assert sorted(star.heard[0]) == sorted(star.heard[1])


def test_the_port_belongs_to_the_switch(stack: ExitStack) -> None:
    star = Star(stack)
    with pytest.raises(OSError, match="Address already in use"):
        UdpDevice("127.0.0.1", star.switch.endpoint("adder") & 0xFFFF, peer=star.ps + 1)
