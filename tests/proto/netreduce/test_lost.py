"""One packet of each kind that is lost or comes twice, on one rack and on two; and what no repetition can bring back."""

import numpy as np
import pytest

from inanet.phy.fault import FaultInjector
from inanet.proto.common.events import PeerSilent, RoundDone
from inanet.proto.netreduce.tables import NOTICE_OPCODE
from inanet.proto.netreduce.worker import Broken, NetReduceWorker
from inanet.testing.netreduce import RingFabric, host_address, switch_address
from inanet.wire.roce import Opcode
from tests.proto.netreduce.test_lives import Losing, total
from tests.proto.netreduce.test_rings import integers, members, spec

SPINE, LEAF = switch_address(0), switch_address(1)


@pytest.mark.parametrize("which", [0, 2, 5])
def test_a_lost_acknowledgement_costs_time_only(which: int) -> None:
    fabric, arrays = RingFabric(3), integers(3, 2500)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, mode="switch"))
    losing = Losing(fabric.devices[host_address(1)], Opcode.ACKNOWLEDGE, which)
    fabric.devices[host_address(1)] = losing
    fabric.all_reduce(workers, spec(2500), arrays)
    assert losing.left < 0
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("leaves", [(), (2, 2)])
def test_results_and_acknowledgements_that_come_twice_change_nothing(leaves: tuple[int, ...]) -> None:
    fabric, arrays = RingFabric(4, leaves=leaves), integers(4, 2500)
    expected = total(arrays)
    workers = fabric.add_ring(members(4))
    for seed, address in enumerate(fabric.switches):
        device = fabric.devices[address]
        fabric.devices[address] = FaultInjector(device, seed, fabric.clock, duplicate=0.5)
    for address in map(host_address, range(4)):
        fabric.devices[address] = FaultInjector(fabric.devices[address], 9, fabric.clock, duplicate=0.5)
    fabric.all_reduce(workers, spec(2500), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert sum(worker.drops_by_reason()["duplicate"] for worker in workers) > 0


@pytest.mark.parametrize(
    "opcode", [NOTICE_OPCODE, Opcode.WRITE_FIRST, Opcode.WRITE_MIDDLE, Opcode.WRITE_LAST]
)
@pytest.mark.parametrize("where", [SPINE, LEAF], ids=["spine", "leaf"])
def test_one_packet_lost_between_switches_comes_again(opcode: int, where: int) -> None:
    """Up it is a leaf's sum, down a result, and a notice either way."""
    fabric, arrays = RingFabric(4, leaves=(2, 2)), integers(4, 2500)
    expected = total(arrays)
    workers = fabric.add_ring(members(4, mode="switch"))
    fabric.devices[where] = losing = Losing(fabric.devices[where], opcode, 4)
    fabric.all_reduce(workers, spec(2500), arrays)
    assert losing.left < 0
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_a_worker_that_comes_back_in_the_same_epoch_stops_the_ring_and_spoils_nothing() -> None:
    """Same queue pairs, another first PSN, while the switch still holds what it sent in the life before."""
    fabric, arrays = RingFabric(3), integers(3, 3000)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, mode="switch"))
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(3000))
        worker.begin(0, 1, [array], 0.0)
    program = fabric.switches[SPINE]
    fabric.run(lambda: program.stats()["completed"] > 10)
    old = workers[1]
    again = NetReduceWorker(
        old.member, old.outlet.endpoint, numbers=(old.inlet.number, old.outlet.number), psn=0x5000
    )
    again.connect(workers[2].inlet, workers[0].outlet)
    again.add_tensor(0, spec(3000))
    again.begin(0, 1, [integers(1, 3000, 8)[0]], fabric.clock.now)
    fabric.workers[host_address(1)] = [again]
    fabric.run(
        lambda: {w for w, event in fabric.log if isinstance(event, Broken)} >= {workers[0], workers[2]}
    )
    for worker, event in fabric.log:
        if isinstance(event, RoundDone):
            np.testing.assert_array_equal(arrays[workers.index(worker)], expected)
    assert program.stats()["drop_stale_msg"] > 0


def test_a_sum_that_was_lost_with_the_tables_ends_the_ring_with_a_reason() -> None:
    """Those who have been acknowledged never send again, so nobody can make it anew: whoever waits says so."""
    fabric, arrays = RingFabric(3), integers(3, 100)
    expected = total(arrays)
    workers = fabric.add_ring(members(3, mode="switch"))
    program = fabric.switches[SPINE]
    fabric.devices[SPINE] = losing = Losing(fabric.devices[SPINE], Opcode.WRITE_FIRST, 0)
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(100))
        worker.begin(0, 1, [array], 0.0)
    fabric.run(lambda: losing.left < 0)
    program.remove_ring(3)
    program.add_ring(fabric.plans(workers)[SPINE])
    fabric.run(lambda: any(isinstance(event, PeerSilent) for _, event in fabric.log))
    assert {worker for worker, event in fabric.log if isinstance(event, PeerSilent)} == {workers[1]}
    assert fabric.done([workers[0], workers[2]], 1)
    assert not fabric.done([workers[1]], 1)
    for array in (arrays[0], arrays[2]):
        np.testing.assert_array_equal(array, expected)
    # the one that lacks its acknowledgement goes no further
    workers[0].begin(0, 2, [arrays[0]], fabric.clock.now)
    (event,) = workers[0].events()
    assert isinstance(event, Broken)
    assert "rank 0: the connection to rank 1" in event.reason
