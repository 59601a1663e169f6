"""The PS of asynchronous training, message by message."""

import numpy as np

from inanet.planning.goat.epochs import Publication, Server, Update, by_algorithm_two
from inanet.proto.slots.goat_async.gatherer import Gathered


def gathered(
    server: Server, node: int, submodel: int, workers: set[int], epoch: int | None = None
) -> Gathered:
    """A sum of ones."""
    number = server.epoch if epoch is None else epoch
    return Gathered(node, number, submodel, frozenset(workers), np.full(2, len(workers), np.int32))


def one_switch(workers: int, participants: int) -> Server:
    """Everybody sends the only sub-model to switch 0; the first epoch waits for all and takes 1, 2, ... seconds."""
    server = Server(np.zeros((1, workers), np.int64), 1, lambda intervals: participants)
    assert server.begin(0.0).needs.tolist() == [[workers, 0]]
    for worker in range(workers):
        assert server.sent(worker, 1.0 + worker) is None
    update = server.receive(gathered(server, 0, 0, set(range(workers))), float(workers))
    assert isinstance(update, Update)
    assert update.inside == tuple(range(workers))
    assert (update.length, update.counts.tolist()) == (float(workers), [workers])
    assert server.history.tolist() == [1.0 + worker for worker in range(workers)]
    return server


def test_numbers_of_the_estimated_participants_are_published_by_submodel_and_node() -> None:
    nodes = np.array([[0, 0, 1], [1, 2, 2]])  # 2: the PS
    server = Server(nodes, 2, lambda intervals: 2)
    assert server.begin(0.0).needs.tolist() == [[2, 1, 0], [0, 1, 2]]
    for worker, when in ((1, 1.0), (2, 2.0), (0, 3.0)):
        server.sent(worker, when)
    for node, submodel, workers in ((0, 0, {0, 1}), (1, 0, {2}), (1, 1, {0})):
        assert server.receive(gathered(server, node, submodel, workers), 3.0) is None
    update = server.receive(gathered(server, 2, 1, {1, 2}), 3.0)
    assert isinstance(update, Update)
    assert update.counts.tolist() == [3, 3]
    assert [total.tolist() for total in update.sums] == [[3, 3], [3, 3]]
    # the two that were the fastest, 1 and 2
    assert server.begin(3.0).needs.tolist() == [[1, 1, 0], [0, 0, 2]]


def test_who_has_sent_already_is_estimated_to_be_first_and_the_longest_wait_first_of_all() -> None:
    server = one_switch(3, 1)
    server.begin(3.0)
    server.sent(0, 4.0)
    # 1 and 2 have come as well before the epoch is over
    server.sent(2, 4.1)
    server.sent(1, 4.2)
    update = server.receive(gathered(server, 0, 0, {0}), 4.3)
    assert isinstance(update, Update)
    assert update.inside == (0,)
    server.begin(4.3)
    update = server.receive(gathered(server, 0, 0, {1, 2}), 4.3)
    assert isinstance(update, Update)
    # one was waited for, two were in: both count, and the mean is over two
    assert (update.inside, update.counts.tolist(), update.staleness) == ((1, 2), [2], (1, 1))


def test_an_estimate_that_was_wrong_is_put_right_with_the_last_gradient() -> None:
    nodes = np.array([[0, 1]])
    server = Server(nodes, 2, lambda intervals: 1)
    server.begin(0.0)
    server.sent(0, 1.0)
    server.sent(1, 2.0)
    server.receive(gathered(server, 0, 0, {0}), 2.0)
    assert server.receive(gathered(server, 1, 0, {1}), 2.0) is not None
    assert server.begin(2.0).needs.tolist() == [[1, 0, 0]]
    corrected = server.sent(1, 2.5)
    assert corrected is not None
    assert (corrected.epoch, corrected.needs.tolist()) == (2, [[0, 1, 0]])
    assert server.close(2.5) is None
    update = server.receive(gathered(server, 1, 0, {1}), 2.5)
    assert isinstance(update, Update)
    assert update.inside == (1,)


def test_a_sum_whose_number_was_taken_back_counts_in_the_next_epoch_and_is_not_waited_for_again() -> None:
    nodes = np.array([[0, 1]])
    server = Server(nodes, 2, lambda intervals: 1)
    server.begin(0.0)
    server.sent(0, 1.0)
    server.sent(1, 2.0)
    server.receive(gathered(server, 0, 0, {0}), 2.0)
    server.receive(gathered(server, 1, 0, {1}), 2.0)
    server.begin(2.0)
    # rank 1 is the first to say so, while rank 0's sum is on its way
    server.sent(1, 2.5)
    server.receive(gathered(server, 1, 0, {1}), 2.5)
    late = gathered(server, 0, 0, {0})
    assert server.begin(2.5).needs.tolist() == [[1, 0, 0]]
    assert server.sent(0, 2.5) is None
    update = server.receive(late, 2.6)
    assert isinstance(update, Update)
    assert (update.epoch, update.counts.tolist(), update.inside) == (3, [1], (0,))
    server.begin(2.6)
    assert server.receive(late, 2.7) is None


def test_other_numbers_are_published_when_a_late_sum_leaves_something_to_wait_for() -> None:
    nodes = np.array([[0, 0], [1, 1]])
    server = Server(nodes, 2, lambda intervals: 2)
    server.begin(0.0)
    for worker in (0, 1):
        server.sent(worker, 1.0)
        server.receive(gathered(server, worker, worker, {0, 1}), 1.0)
    first = server.begin(1.0)
    assert (first.revision, first.needs.tolist()) == (0, [[2, 0, 0], [0, 2, 0]])
    server.sent(0, 2.0)
    renewed = server.receive(gathered(server, 0, 0, {0}, epoch=1), 2.0)
    # this node has been heard in the first epoch already
    assert renewed is None
    server.receive(gathered(server, 0, 0, {0, 1}), 2.0)
    server.sent(1, 2.0)
    server.receive(gathered(server, 1, 1, {0, 1}), 2.0)
    server.begin(2.0)
    renewed = server.receive(gathered(server, 2, 0, {0}, epoch=2), 2.1)
    assert isinstance(renewed, Publication)
    assert (renewed.epoch, renewed.revision, renewed.needs.tolist()) == (3, 1, [[1, 0, 0], [0, 2, 0]])


def test_a_worker_takes_part_when_the_last_of_its_submodels_counts() -> None:
    nodes = np.array([[0, 0], [0, 1]])
    server = Server(nodes, 2, lambda intervals: 1)
    server.begin(0.0)
    server.sent(0, 1.0)
    server.sent(1, 2.0)
    for node, submodel, workers in ((0, 0, {0, 1}), (0, 1, {0}), (1, 1, {1})):
        server.receive(gathered(server, node, submodel, workers), 2.0)
    assert server.begin(2.0).needs.tolist() == [[1, 0, 0], [1, 0, 0]]
    # switch 0 has sub-model 0 of rank 1 first, then all of rank 0
    server.receive(gathered(server, 0, 0, {1}), 2.9)
    update = server.receive(gathered(server, 0, 1, {0}), 3.0)
    assert isinstance(update, Update)
    assert (update.inside, update.counts.tolist()) == ((), [1, 1])
    server.sent(0, 3.0)
    # of rank 0 only what has not counted yet is waited for
    assert server.begin(3.0).needs.tolist() == [[1, 0, 0], [0, 0, 0]]
    update = server.receive(gathered(server, 0, 0, {0}), 3.0)
    assert isinstance(update, Update)
    assert (update.inside, update.staleness) == ((0,), (1,))


def test_sums_of_epochs_to_come_and_repeated_ones_are_ignored() -> None:
    server = one_switch(2, 2)
    server.begin(2.0)
    assert server.receive(gathered(server, 0, 0, {0, 1}, epoch=9), 2.0) is None
    assert server.receive(gathered(server, 0, 0, {0, 1}, epoch=1), 2.0) is None
    assert server.close(2.0) is None
    assert server.receive(gathered(server, 0, 0, {0, 1}), 4.0) is not None


def test_algorithm_two_chooses_from_the_last_intervals() -> None:
    # four workers alike and one hopeless one; 100 epochs divided by K
    choose = by_algorithm_two(lambda count: 100.0 / count)
    assert choose(np.array([1.0, 1.0, 1.0, 1.0, 50.0])) == 4
    assert choose(np.full(5, 1.0)) == 5
