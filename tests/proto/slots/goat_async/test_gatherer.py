"""A node's sums when a number of gradients is waited for, and not a set of workers."""

import numpy as np
import pytest

from inanet.proto.slots.goat_async.gatherer import Contribution, Gathered, Gatherer, Overflow


def one(worker: int, serial: int, submodel: int = 0, value: int = 1) -> Contribution:
    """A gradient of four equal values."""
    return Contribution(worker, serial, submodel, np.full(4, value, np.int32))


def told(found: list[Gathered]) -> list[tuple[int, int, set[int], int]]:
    """Epoch, sub-model, workers and the first value of each sum."""
    return [(its.epoch, its.submodel, set(its.workers), int(its.values[0])) for its in found]


def test_a_sum_leaves_with_the_last_gradient_that_is_waited_for_whoever_it_is_of() -> None:
    node = Gatherer(1, {0: 4})
    assert node.publish(1, {0: 2}) == []
    assert node.contribute(one(3, 1, value=5)) == []
    assert told(node.contribute(one(0, 1, value=7))) == [(1, 0, {0, 3}, 12)]


def test_late_gradients_stay_in_their_slots_for_a_later_epoch() -> None:
    node = Gatherer(1, {0: 4})
    node.publish(1, {0: 1})
    assert told(node.contribute(one(0, 1, value=1))) == [(1, 0, {0}, 1)]
    assert node.contribute(one(1, 1, value=10)) == []
    assert node.contribute(one(2, 1, value=100)) == []
    assert node.waiting == {0: {1, 2}}
    # nobody is waited for here in epoch 2, one in epoch 3: both leave, and the sum says that it is of two
    assert node.publish(2, {}) == []
    assert told(node.publish(3, {0: 1})) == [(3, 0, {1, 2}, 110)]
    assert node.waiting == {}


def test_a_submodel_leaves_once_an_epoch() -> None:
    node = Gatherer(1, {0: 4, 1: 4})
    node.publish(1, {0: 1, 1: 1})
    assert told(node.contribute(one(0, 1))) == [(1, 0, {0}, 1)]
    assert node.contribute(one(1, 1)) == []
    assert told(node.contribute(one(1, 1, submodel=1))) == [(1, 1, {1}, 1)]
    # numbers that are put right within the epoch do not make it leave again, nor do those of an earlier epoch
    assert node.publish(1, {0: 1}, revision=1) == []
    assert node.publish(0, {0: 1}, revision=9) == []
    assert told(node.publish(2, {0: 1})) == [(2, 0, {1}, 1)]


def test_a_number_that_is_put_right_releases_what_waits() -> None:
    node = Gatherer(1, {0: 4})
    node.publish(1, {0: 3})
    assert node.contribute(one(4, 1, value=2)) == []
    # the first numbers come again
    assert node.publish(1, {0: 1}) == []
    assert told(node.publish(1, {0: 1}, revision=2)) == [(1, 0, {4}, 2)]
    assert node.publish(1, {0: 3}, revision=1) == []


def test_a_gradient_is_added_once() -> None:
    node = Gatherer(1, {0: 4})
    node.publish(1, {0: 2})
    node.contribute(one(0, 1))
    assert node.contribute(one(0, 1)) == []
    assert node.contribute(one(1, 1, submodel=9)) == []
    assert told(node.contribute(one(1, 1))) == [(1, 0, {0, 1}, 2)]
    # it comes again when its sum has left
    node.publish(2, {0: 1})
    assert node.contribute(one(0, 1)) == []
    assert node.dropped == 3
    assert told(node.contribute(one(0, 2))) == [(2, 0, {0}, 1)]


def test_sums_that_do_not_fit_and_wrong_lengths_are_errors() -> None:
    node = Gatherer(2, {0: 4})
    node.publish(1, {0: 3})
    node.contribute(one(0, 1, value=2**31 - 1))
    with pytest.raises(Overflow, match=r"node 2: sub-model 0 .* with worker 1"):
        node.contribute(one(1, 1, value=1))
    with pytest.raises(ValueError, match="has 4 values, worker 1 sent 3"):
        node.contribute(Contribution(1, 1, 0, np.zeros(3, np.int32)))
    # what was refused has left no trace
    assert told(node.publish(2, {0: 1})) == [(2, 0, {0}, 2**31 - 1)]
