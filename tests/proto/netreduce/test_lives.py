"""Numbers that wrap, switches and workers that start again, tenants, and other people's traffic."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.phy.device import Device
from inanet.phy.wrapper import Wrapper
from inanet.proto.common.events import RoundDone
from inanet.proto.netreduce.worker import Broken
from inanet.proto.roce import Attributes, Peer, ProtectionDomain, QueuePair, Received
from inanet.testing.netreduce import RingFabric, connections_of, host_address, switch_address
from inanet.wire.batch import Transmission
from inanet.wire.roce import PORT, Opcode
from tests.proto.netreduce.test_rings import IMPAIRED, MTU, SIZES, integers, members, spec


def total(arrays: list[np.ndarray]) -> np.ndarray:
    return sum(array.astype(np.int64) for array in arrays)


@pytest.mark.parametrize("psn", [0xFFFFFF - 2, 0xFFFFFF - 8])
@pytest.mark.parametrize("first", [2**32 - 3, 2**32 - 1])
def test_sequence_and_message_numbers_wrap(psn, first):
    fabric, arrays = RingFabric(3, impair={"drop": 0.05}), integers(3, 4000)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, first=first), psn=psn)
    fabric.all_reduce(workers, spec(4000), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


class Losing(Wrapper):
    """Loses the packet number ``which`` (from 0) of those with an opcode, once."""

    def __init__(self, device: Device, opcode: int, which: int) -> None:
        super().__init__(device)
        self.opcode, self.left = opcode, which

    def send(self, transmission: Transmission, start: int = 0) -> int:
        kept = []
        for at in transmission.offsets[start:].tolist():
            if transmission.arena[at + 28] == self.opcode:
                self.left -= 1
                if self.left == -1:
                    continue
            kept.append(at)
        if kept:
            super().send(replace(transmission, offsets=np.array(kept, np.int64)))
        return len(transmission)


@pytest.mark.parametrize("opcode", [Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST_IMMEDIATE])
@pytest.mark.parametrize(("where", "dropped"), [(host_address(0), True), (switch_address(0), False)])
def test_one_packet_lost_on_either_side_of_the_switch_comes_again(opcode, where, dropped):
    """On the way to the switch it is a contribution, on the way from there a result, which nobody else will ask for."""
    fabric, arrays = RingFabric(3), integers(3, 2500)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, mode="switch"))
    fabric.devices[where] = losing = Losing(fabric.devices[where], opcode, 4)
    fabric.all_reduce(workers, spec(2500), arrays)
    assert losing.left < 0
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    program = fabric.switches[switch_address(0)]
    assert sum(worker.stats()["retransmissions"] for worker in workers) > 0
    # without its first packet the rest of a message belongs nowhere; results are answered from their places
    first = opcode is Opcode.WRITE_FIRST
    assert (program.stats().get("drop_unresolved", 0) > 0) == (dropped and first)
    assert dropped or program.stats()["answered"] > 0


def test_two_tenants_and_two_rings_of_one_at_once():
    fabric = RingFabric(4, impair={"drop": 0.03})
    rings = [
        fabric.add_ring(members(4, ring=3)),
        fabric.add_ring(members(4, ring=4)),
        fabric.add_ring(members(2, ring=9), hosts=(1, 3)),
    ]
    inputs = [integers(len(workers), 3000, seed) for seed, workers in enumerate(rings)]
    expected = [total(arrays) for arrays in inputs]
    for workers, arrays in zip(rings, inputs, strict=True):
        for worker, array in zip(workers, arrays, strict=True):
            worker.add_tensor(0, spec(3000))
            worker.begin(0, 1, [array], 0.0)
    fabric.run(lambda: all(fabric.done(workers, 1) for workers in rings))
    for arrays, sums in zip(inputs, expected, strict=True):
        for array in arrays:
            np.testing.assert_array_equal(array, sums)


def test_a_switch_that_loses_its_tables_costs_time_only():
    fabric, arrays = RingFabric(3), integers(3, 20_000)
    expected = total(arrays)
    workers = fabric.add_ring(members(3))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(20_000))
        worker.begin(0, 1, [array], 0.0)
    program = fabric.switches[switch_address(0)]
    for _ in range(3):
        goal = program.stats()["completed"] + 15
        fabric.run(lambda goal=goal: program.stats()["completed"] >= goal)
        program.remove_ring(3)
        program.add_ring(fabric.plans(workers)[switch_address(0)])
    fabric.run(lambda: fabric.done(workers, 1))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_a_worker_that_starts_again_does_so_with_the_ring_in_its_next_epoch():
    fabric, arrays = RingFabric(3), integers(3, 5000)
    workers = fabric.add_ring(members(3))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(5000))
        worker.begin(0, 1, [array], 0.0)
    program = fabric.switches[switch_address(0)]
    fabric.run(lambda: program.stats()["completed"] > 10)
    # rank 1 dies; its neighbours' queue pairs give up, in time
    fabric.workers[host_address(1)].clear()
    fabric.run(
        lambda: (
            {worker for worker, event in fabric.log if isinstance(event, Broken)} == {workers[0], workers[2]}
        )
    )
    assert any("start the ring again in its next epoch" in str(event) for _, event in fabric.log)
    program.remove_ring(3)
    for host in range(3):
        fabric.workers[host_address(host)].clear()
    again = fabric.add_ring(members(3, epoch=1))
    arrays = integers(3, 5000, 7)
    expected = total(arrays)
    fabric.all_reduce(again, spec(5000), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_a_straggler_is_waited_for():
    fabric, arrays = RingFabric(3), integers(3, 5000)
    expected = total(arrays)
    workers = fabric.add_ring(members(3))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(5000))
        if worker is not workers[2]:
            worker.begin(0, 1, [array], 0.0)
    late = fabric.clock.now + 0.3
    fabric.run(lambda: fabric.clock.now >= late)
    workers[2].begin(0, 1, [arrays[2]], fabric.clock.now)
    fabric.run(lambda: fabric.done(workers, 1))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert workers[0].stats()["timeouts"] > 0


def test_patient_workers_wait_longer_than_their_queue_pairs():
    fabric, arrays = RingFabric(3, impair={"drop": 0.02}), integers(3, 5000)
    expected = total(arrays)
    attributes = Attributes(path_mtu=256, timeout=12)
    workers = fabric.add_ring(
        members(3, mode="switch", skew=3.0, patient=True, attributes=attributes), psn=0xFFFFF0
    )
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(5000))
        if worker is not workers[2]:
            worker.begin(0, 1, [array], 0.0)
    late = fabric.clock.now + 1.0
    fabric.run(lambda: fabric.clock.now >= late)
    workers[2].begin(0, 1, [arrays[2]], fabric.clock.now)
    fabric.run(lambda: fabric.done(workers, 1))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert min(workers[0].stats()["revived"], workers[1].stats()["revived"]) > 0


def test_patience_ends():
    fabric = RingFabric(2)
    attributes = Attributes(path_mtu=256, timeout=12)
    workers = fabric.add_ring(members(2, mode="switch", skew=1.0, patient=True, attributes=attributes))
    workers[0].add_tensor(0, spec(10))
    workers[0].begin(0, 1, [np.zeros(10, np.int32)], fabric.clock.now)
    began = fabric.clock.now
    fabric.run(lambda: any(isinstance(event, Broken) for _, event in fabric.log))
    assert 1.0 < fabric.clock.now - began < 1.5


def test_queue_pairs_must_outwait_stragglers():
    with pytest.raises(ValueError, match="raise its timeout"):
        members(3, attributes=Attributes(path_mtu=256, timeout=8))
    with pytest.raises(ValueError, match="256 B and the ring agreed on 512"):
        members(3, attributes=MTU, sizes=type(SIZES)(6, 2, 512))


def test_workers_that_disagree_are_told():
    fabric = RingFabric(3, serving=False)
    workers = fabric.add_ring([*members(3, mode="ring")[:2], members(3, mode="switch")[2]])
    for worker, array in zip(workers, integers(3, 100), strict=True):
        worker.add_tensor(0, spec(100))
        worker.begin(0, 1, [array], 0.0)
    fabric.run(lambda: any(isinstance(event, Broken) for _, event in fabric.log))
    reasons = [event.reason for _, event in fabric.log if isinstance(event, Broken)]
    assert any("agree on mode" in reason or "no switch sums it" in reason for reason in reasons), reasons


class Pair:
    """Queue pairs of an application that is none of a ring's, between the hosts of one."""

    def __init__(self, source: int, destination: int) -> None:
        self.data = np.random.default_rng(5).integers(0, 256, 50_000, np.uint8)
        self.inbox = np.zeros(50_000, np.uint8)
        domain = ProtectionDomain()
        region = domain.register(self.inbox)
        one = Peer(source << 16 | 0xD000, 0x77)
        other = Peer(destination << 16 | 0xD001, 0x78, key=region.key)
        self.out = QueuePair(one, other)
        self.into = QueuePair(other, one, domain=domain)
        for pair in (self.out, self.into):
            pair.connect()
        self.into.post_receive()
        self.out.post_write(self.data, 0, immediate=1)


class Stranger:
    """What a fabric needs of a worker."""

    def __init__(self, pair: QueuePair) -> None:
        self.pair = pair
        self.receive, self.transmit = pair.receive, pair.transmit
        self.timer, self.on_timer, self.events = pair.timer, pair.on_timer, pair.events


def test_other_roce_flows_between_the_same_hosts_are_byte_exact():
    fabric, arrays = RingFabric(3, impair=IMPAIRED), integers(3)
    expected = total(arrays)
    workers = fabric.add_ring(members(3))
    foreign = Pair(host_address(0), host_address(1))
    fabric.workers[host_address(0)].append(Stranger(foreign.out))
    fabric.workers[host_address(1)].append(Stranger(foreign.into))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(5000))
        worker.begin(0, 1, [array], 0.0)
    fabric.run(
        lambda: fabric.done(workers, 1) and any(isinstance(event, Received) for _, event in fabric.log)
    )
    np.testing.assert_array_equal(foreign.inbox, foreign.data)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_connections_are_named_by_the_receivers_queue_pair():
    fabric = RingFabric(3)
    workers = fabric.add_ring(members(3))
    first = connections_of(workers)[0]
    assert (first.source, first.destination) == (host_address(0), host_address(1))
    assert first.queue_pair == workers[1].inlet.number
    assert str(first) == "10.0.0.1 -> 10.0.0.2 (QP 16)"
    assert PORT == 4791


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_leave_as_soon_as_they_are_done_leave_nobody_without_a_result(seed):
    fabric, arrays = RingFabric(3, impair={"drop": 0.1}, seed=100 * seed), integers(3, 1500)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, mode="switch"))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(1500))
        worker.begin(0, 1, [array], fabric.clock.now)

    def done() -> bool:
        for worker, event in fabric.log:
            if isinstance(event, RoundDone):
                fabric.workers[worker.outlet.endpoint >> 16].clear()
        return fabric.done(workers, 1)

    fabric.run(done)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
