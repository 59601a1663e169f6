"""Tensors of more groups than exponents run ahead of their data (prologue): what is lost of them is asked for in time."""

import pytest

from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode
from inanet.proto.tree.leaf import AHEAD
from inanet.proto.tree.slots import GROUP
from inanet.testing.fabric import VirtualFabric, float_arrays
from tests.proto.tree.test_impairment import impaired
from tests.proto.tree.test_rounds import DEEP, ONE_EACH, STAR, TREE, spec_of

COUNT = 256 * (AHEAD + 2 * GROUP) + 5


@pytest.mark.parametrize(("parents", "seed"), [(STAR, 1), (TREE, 2), (DEEP, 3)], ids=["star", "tree", "deep"])
def test_lost_exponents_stop_nothing(parents, seed):
    """Data waits for exponents, and the next exponents for data: nothing else would ever ask for the lost ones."""
    spec = spec_of(COUNT, mode=ExponentMode.PROLOGUE)
    fabric = VirtualFabric(parents, ONE_EACH, wrap=impaired(seed, drop=0.05))
    local = LocalTensor(spec, 4)
    for round_ in range(2):
        arrays = float_arrays(COUNT, 4, seed=round_)
        expected = [array.copy() for array in arrays.values()]
        assert local.reduce(expected) is None
        fabric.all_reduce(spec, arrays, deadline=20.0)
        assert {array.tobytes() for array in arrays.values()} == {expected[0].tobytes()}


@pytest.mark.parametrize(("lost", "seeds"), [("a0", (0, 1)), ("a1", (2,))])
def test_an_aggregator_dies_with_exponents_on_their_way(lost, seeds):
    spec = spec_of(COUNT, mode=ExponentMode.PROLOGUE)
    for seed in seeds:
        fabric = VirtualFabric(TREE, ONE_EACH, wrap=impaired(seed, drop=0.02))
        arrays = float_arrays(COUNT, 4, seed=seed)
        expected = [array.copy() for array in arrays.values()]
        assert LocalTensor(spec, 4).reduce(expected) is None
        round_ = fabric.begin(spec, arrays)
        fabric.run(lambda fabric=fabric: fabric.nodes["w0"].stats()["results_in"] > 1500)
        fabric.lose_aggregator(lost)
        fabric.run(lambda fabric=fabric, round_=round_: fabric.done(round_), deadline=20.0)
        assert {array.tobytes() for array in arrays.values()} == {expected[0].tobytes()}


def test_exponents_that_wait_for_data_cost_little():
    """A straggler keeps everybody's exponents waiting: that is no reason to call the parent silent, or to flood it."""
    spec = spec_of(COUNT, mode=ExponentMode.PROLOGUE)
    fabric = VirtualFabric(TREE, ONE_EACH)
    arrays = float_arrays(COUNT, 4)
    fabric.begin(spec, arrays, ["w0", "w1", "w2"])
    before = fabric.clock.now
    fabric.settle(30.0)
    assert fabric.silent() == []
    spent = fabric.clock.now - before
    sent = sum(device.counters()["tx_packets"] for device in fabric.devices.values())
    rows = sum(node.stats()["rows_sent"] for node in fabric.nodes.values())
    assert sent - rows < 30 * max(spent, 1.0)
    fabric.begin(spec, arrays, ["w3"])
    fabric.run(lambda: fabric.done(1))
    assert len({array.tobytes() for array in arrays.values()}) == 1
