"""Algorithm 2, and epochs in which late gradients count later."""

import numpy as np
import pytest

from inanet.planning.goat.participants import Convergence, Timeline, choose, mean_epoch, per_switch


def test_psi_falls_with_participants_and_is_infinite_where_noise_drowns_the_target() -> None:
    task = Convergence(excess=2.0, variance=3.0, target=1.0, workers=8)
    assert task.least == 4
    assert task.epochs(3) == float("inf")
    values = [task.epochs(count) for count in range(4, 9)]
    assert values == sorted(values, reverse=True)
    # 4 K^2 d^2 / (n (eps K - s^2)^2)
    assert task.epochs(4) == pytest.approx(4 * 16 * 4 / (8 * 1))
    with pytest.raises(ValueError, match="must be positive"):
        Convergence(1.0, 0.0, 1.0, 4)


def test_late_gradients_count_in_a_later_epoch() -> None:
    # the slow worker needs 3: with two participants, epochs of the fast pair take 1, 1, and then all three are in at 3
    assert mean_epoch([1.0, 1.0, 3.0], 2, 2) == 1.0
    # of 1, 2, 10: K = 1 closes at 1 (p = 1, 1, 9), at 1 again (the second is there too, ties by rank) ...
    assert mean_epoch([1.0, 2.0, 10.0], 1, 2) == 1.0
    # ... and then its gradient, which waits, closes the next epoch at once
    assert mean_epoch([1.0, 2.0, 10.0], 1, 3) == pytest.approx(2 / 3)
    assert mean_epoch([1.0, 2.0, 10.0], 3, 5) == 10.0


def test_the_fewest_or_the_most_where_nothing_else_pays() -> None:
    # equal workers: waiting for all costs nothing and saves epochs
    assert choose([1.0] * 6, lambda count: 100.0 / count).participants == 6
    # epochs do not depend on K: wait for one
    assert choose([1.0, 2.0, 4.0], lambda count: 10.0).participants == 1
    # one hopeless straggler: everybody but it
    task = Convergence(1.0, 1.0, 0.5, 5)
    chosen = choose([1.0, 1.0, 1.0, 1.0, 50.0], task.epochs, aggregation=0.1)
    assert chosen.participants == 4
    assert np.isinf(chosen.seconds[:2]).all()
    assert chosen.seconds[3] == chosen.seconds.min()


def test_algorithm_two_agrees_with_trying_all() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        intervals = rng.uniform(0.5, 3.0, 7).tolist()
        task = Convergence(1.0, float(rng.uniform(0.1, 2.0)), 1.0, 7)
        found = choose(intervals, task.epochs)
        by_hand = [task.epochs(count) * mean_epoch(intervals, count, 7) for count in range(1, 8)]
        assert found.seconds.tolist() == by_hand
        assert by_hand[found.participants - 1] == min(by_hand)


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [-1.0]])
def test_intervals_must_be_positive(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="positive interval"):
        choose(bad, lambda count: 1.0)


def test_no_number_that_converges_is_an_error() -> None:
    with pytest.raises(ValueError, match="reaches the target"):
        choose([1.0, 1.0], Convergence(1.0, 5.0, 1.0, 2).epochs)
    with pytest.raises(ValueError, match="both must be possible"):
        mean_epoch([1.0], 2, 1)


def test_switches_wait_for_the_participants_among_their_workers() -> None:
    nodes = np.array([[0, 0, 1, 2], [1, 2, 1, 1]])  # 2: the PS
    everything = np.array([[True, False, True, True]] * 2)
    assert per_switch(nodes, everything, 2).tolist() == [[1, 1, 1], [0, 3, 0]]
    # what has counted already is not waited for again
    assert per_switch(nodes, everything & np.array([[True] * 4, [False] * 4]), 2).tolist() == [
        [1, 1, 1],
        [0, 0, 0],
    ]


def test_asynchronous_epochs_keep_late_work_and_ksgd_throws_it_away() -> None:
    needed = {0: 1.0, 1: 1.0, 2: 2.5}
    late = Timeline(3)
    epochs = [late.advance(2, needed.__getitem__) for _ in range(4)]
    assert [epoch.length for epoch in epochs] == [1.0, 1.0, 1.0, 1.0]
    # the slow one's gradient takes a place in the third epoch; rank 1's, which is there too, in the fourth
    assert [epoch.inside for epoch in epochs] == [(0, 1), (0, 1), (0, 2), (0, 1)]
    assert [epoch.staleness for epoch in epochs] == [(0, 0), (0, 0), (0, 2), (0, 1)]
    assert not any(epoch.discarded for epoch in epochs)
    assert late.now == pytest.approx(sum(epoch.length for epoch in epochs))
    discarding = Timeline(3, discard=True)
    epochs = [discarding.advance(2, needed.__getitem__) for _ in range(6)]
    assert all(epoch.inside == (0, 1) and epoch.discarded == (2,) for epoch in epochs)
    assert np.isnan(discarding.history[2])
    assert all(set(epoch.staleness) == {0} for epoch in epochs)


def test_waiting_for_all_is_synchronous_training() -> None:
    timeline = Timeline(3, aggregation=0.25)
    epoch = timeline.advance(3, [1.0, 2.0, 3.0].__getitem__)
    assert (epoch.length, epoch.inside, timeline.history.tolist()) == (3.25, (0, 1, 2), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="4 participants of 3"):
        timeline.advance(4, [1.0, 2.0, 3.0].__getitem__)
