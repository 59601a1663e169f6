"""Asynchronous training through the nodes of a schedule."""

from collections.abc import Callable

import numpy as np
import pytest

from inanet.papers.goat_async import (
    FACTOR,
    NOISES,
    Model,
    Regression,
    Training,
    latencies,
    plan_testbed,
    through_nodes,
    train,
)
from inanet.planning.goat.participants import Timeline

WORKERS = 8
VALUES = Regression.FEATURES * Regression.CLASSES
#: a sub-model each on s1 and s3, two on s2, the PS the last; whole copies on s2 and s3; both
LAYOUTS = ((1, 2, 1), (0, 5, 5), (1, 2, 5))


def needs(seed: int) -> Callable[[int], float]:
    """Seconds of each gradient."""
    rng = np.random.default_rng(seed)
    return lambda worker: 1.0 + float(latencies(0.5, 1, rng)[0])


class Counted:
    """A task whose gradients are ones: every step's mean must be one, whatever has been summed where."""

    def __init__(self) -> None:
        self.means: list[np.ndarray] = []
        self.begun: list[int] = []

    def begin(self, worker: int) -> None:
        self.begun.append(worker)

    def gradient(self, worker: int) -> np.ndarray:
        return np.ones(VALUES)

    def apply(self, now: float, mean: np.ndarray) -> None:
        self.means.append(mean)


@pytest.mark.parametrize("participants", [1, 3, WORKERS - 1, WORKERS])
def test_epochs_through_nodes_are_those_of_the_timeline(participants: int) -> None:
    training = Training(plan_testbed(WORKERS, VALUES), Counted(), lambda seen: participants, needs(3))
    updates = training.run(25).updates
    timeline, needed = Timeline(WORKERS), needs(3)
    epochs = [timeline.advance(participants if n else WORKERS, needed) for n in range(25)]
    assert [its.length for its in updates] == pytest.approx([its.length for its in epochs])
    assert [its.inside for its in updates] == [its.inside for its in epochs]
    assert [its.staleness for its in updates] == [its.staleness for its in epochs]


@pytest.mark.parametrize("slots", LAYOUTS)
def test_each_submodel_is_scaled_by_what_it_is_of_and_no_gradient_counts_twice(
    slots: tuple[int, ...],
) -> None:
    task = Counted()
    planned = plan_testbed(WORKERS, VALUES, slots=slots)
    log = Training(planned, task, lambda seen: 3, needs(5)).run(60)
    assert len(task.means) == 60
    for update, mean in zip(log.updates, task.means, strict=True):
        for part, count in zip(planned.instance.submodels, update.counts.tolist(), strict=True):
            inside = mean[part.start // 4 : (part.start + part.size) // 4]
            assert (inside == (1.0 if count else 0.0)).all()
    # whoever took part begins anew, nobody else
    assert len(task.begun) == WORKERS + log.gradients - len(log.updates[-1].inside)
    counted = sum(int(update.counts[0]) for update in log.updates)
    assert log.gradients <= counted <= len(task.begun)
    assert log.corrections > 0
    assert log.staleness > 0


@pytest.mark.parametrize("slots", LAYOUTS)
@pytest.mark.parametrize("participants", [1, 4])
def test_messages_that_overtake_each_other_stop_nobody(slots: tuple[int, ...], participants: int) -> None:
    task, rng = Counted(), np.random.default_rng(11)
    planned = plan_testbed(WORKERS, VALUES, slots=slots)
    # up to the time of a gradient and more: numbers come after what they are of, and sums after their epoch
    training = Training(planned, task, lambda seen: participants, needs(7), lambda: float(rng.uniform(0, 2)))
    log = training.run(80)
    for update, mean in zip(log.updates, task.means, strict=True):
        for part, count in zip(planned.instance.submodels, update.counts.tolist(), strict=True):
            assert (mean[part.start // 4 : (part.start + part.size) // 4] == (1.0 if count else 0.0)).all()
    assert all(len(set(update.inside)) == len(update.inside) for update in log.updates)
    # every worker's gradients come to count
    assert set().union(*(update.inside for update in log.updates)) == set(range(WORKERS))
    assert sum(int(update.counts[0]) for update in log.updates) >= log.gradients


def test_waiting_for_all_is_synchronous_training() -> None:
    sums, task = Regression(WORKERS), Regression(WORKERS)
    log = Training(plan_testbed(WORKERS, VALUES), task, lambda seen: WORKERS, needs(1)).run(12)
    assert all(update.inside == tuple(range(WORKERS)) for update in log.updates)
    for worker in range(WORKERS):
        sums.begin(worker)
    for _ in range(12):
        sums.step(0.0, tuple(range(WORKERS)))
        for worker in range(WORKERS):
            sums.begin(worker)
    # but for the integers that travel
    assert np.abs(task.weights - sums.weights).max() < 12 * 4 / FACTOR


def test_it_converges_to_the_loss_of_synchronous_training_in_less_time() -> None:
    epochs = 70
    synchronous, asynchronous = Regression(WORKERS), Regression(WORKERS)
    before = synchronous.loss()
    sync = train("GOAT", WORKERS, Model(), 1, begin=synchronous.begin, step=synchronous.step, epochs=epochs)
    log = through_nodes(NOISES[1], asynchronous, WORKERS, 1, epochs=epochs)
    ours = [loss for _, loss in asynchronous.losses]
    assert len(ours) == epochs
    assert np.mean(ours[-10:]) < before / 10
    assert np.mean(ours[-10:]) == pytest.approx(
        np.mean([loss for _, loss in synchronous.losses[-10:]]), rel=0.1
    )
    assert log.seconds < sync.seconds / 2
    again = Regression(WORKERS)
    through_nodes(NOISES[1], again, WORKERS, 1, epochs=epochs)
    assert again.losses == asynchronous.losses
