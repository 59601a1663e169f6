"""Several racks: aggregation up, multicast down, connections translated between."""

import numpy as np
import pytest

from inanet.proto.netreduce.ring import Connection, Sizes, racks
from inanet.testing.netreduce import RingFabric, host_address, switch_address
from tests.proto.netreduce.packets import LENGTH, SIZE, connections
from tests.proto.netreduce.test_rings import IMPAIRED, integers, members, spec


def test_table_3():
    """W1 and W2 under L1, W3 and W4 under L2, a spine above: the paper's table, with the rows it has for S and L1."""
    fabric = RingFabric(4, leaves=(2, 2))
    spine, l1, l2 = switch_address(0), switch_address(1), switch_address(2)
    workers = fabric.add_ring(members(4))
    plans = fabric.plans(workers)
    w = [child.connection for leaf in (l1, l2) for child in plans[leaf].children]
    up = {leaf: plans[leaf].above.to for leaf in (l1, l2)}
    down = {leaf: plans[leaf].above.back for leaf in (l1, l2)}
    assert fabric.switches[spine].translations(3) == [
        ("aggregation and multicast", up[l1], down[l1]),
        ("aggregation and multicast", up[l1], down[l2]),
        ("aggregation and multicast", up[l2], down[l1]),
        ("aggregation and multicast", up[l2], down[l2]),
    ]
    assert fabric.switches[l1].translations(3) == []
    arrays = integers(4)
    fabric.all_reduce(workers, spec(5000), arrays)
    assert fabric.switches[l1].translations(3) == [
        ("aggregation", w[0], up[l1]),
        ("aggregation", w[1], up[l1]),
        # W4 -> W1 ends at W1, W1 -> W2 at W2
        ("multicast", down[l1], w[3]),
        ("multicast", down[l1], w[0]),
    ]
    assert fabric.switches[l2].translations(3)[2:] == [
        ("multicast", down[l2], w[1]),
        ("multicast", down[l2], w[2]),
    ]
    # the spine was sent one packet by each leaf for each place, whatever is below
    sums = fabric.switches[spine].stats()
    assert sums["contributions"] == 2 * sums["completed"]
    assert sums["emitted"] == 0


@pytest.mark.parametrize("impair", [{}, IMPAIRED], ids=["calm", "impaired"])
def test_racks_give_the_same_sum(impair):
    fabric, arrays = RingFabric(5, leaves=(2, 1, 2), impair=impair), integers(5, 1500)
    expected = sum(array.astype(np.int64) for array in arrays)
    workers = fabric.add_ring(members(5))
    fabric.all_reduce(workers, spec(1500), arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)
    assert {worker.mode for worker in workers} == {"switch"}


def test_a_leaf_that_does_not_know_the_ring_lets_nothing_wrong_through():
    """Its neighbours' raw messages arrive: refused, never summed wrongly."""
    fabric = RingFabric(4, leaves=(2, 2))
    workers = fabric.add_ring(members(4, mode="switch"))
    fabric.switches[switch_address(1)].remove_ring(3)
    arrays = integers(4, 100)
    for worker, array in zip(workers, arrays, strict=True):
        worker.add_tensor(0, spec(100))
        worker.begin(0, 1, [array], 0.0)
    fabric.run(lambda: any("no sum" in str(event) for _, event in fabric.log))
    assert not fabric.done(workers[:1], 1)


def test_plans_name_hosts_that_are_nowhere():
    with pytest.raises(ValueError, match="2 of 3 ranks are on a leaf"):
        racks(1, connections(3), 1, {2: [c.source for c in connections(3)[:2]]}, Sizes(LENGTH, 2, SIZE))


def test_virtual_connections_are_unlike_for_every_switch_and_ring():
    hosts = [host_address(i) for i in range(4)]
    ends: list[Connection] = []
    for ring in (1, 2):
        plans = racks(ring, connections(4), 9, {7: hosts[:2], 8: hosts[2:]})
        ends += [plan.above.to for plan in plans.values() if plan.above] + list(plans[9].below)
    assert len(set(ends)) == len(ends) == 8
    assert len({end.queue_pair for end in ends}) == 8
