"""Epochs through three switches: every gradient counts once, late ones in a later epoch, and it is learnt as before."""

from collections.abc import Iterator

import numpy as np
import pytest

from inanet.planning.goat.epochs import by_algorithm_two
from inanet.planning.goat.participants import Convergence
from inanet.proto.slots.goat_async.participation import everybody
from inanet.proto.slots.goat_async.program import EpochProgram
from inanet.sim.burst import Burst
from inanet.sim.link import Link, LinkSpec
from inanet.wire.goat import EpochKind
from tests.proto.slots.goat.lab import BadLink, impair
from tests.proto.slots.goat_async.training import Training

#: twice the window, so that results are asked for in pieces
ELEMENTS = 8 * 64
WORKERS = 8


def uneven(seed: int, spread: float = 0.02):
    """Seconds of each gradient."""
    rng = np.random.default_rng(seed)
    return lambda worker: float(0.01 + spread * rng.random())


def of_one(worker: int, step: int) -> np.ndarray:
    """A gradient by which one can see whose it is, also in a sum of several."""
    return np.full(ELEMENTS, 2.0**worker, np.float32)


def watch(training: Training) -> list[np.ndarray]:
    """The mean of each epoch, as float64[F, 64], as they come."""
    means: list[np.ndarray] = []
    running = training.running
    closing = running._close

    def close(inside: np.ndarray, now: float) -> None:
        before = running.total.copy()
        closing(inside, now)
        means.append(running.total - before)

    running._close = close  # type: ignore[method-assign]
    return means


class Replaying(BadLink):
    """A link that also sends again what it has carried at any time before."""

    def __init__(self, link: Link, seed: int) -> None:
        super().__init__(link, seed)
        self._past: list[Burst] = []

    def carry(self, burst: Burst, now: float) -> Iterator[tuple[float, Burst]]:
        for at, piece in super().carry(burst, now):
            yield at, piece
            self._past.append(piece)
            if self._random.random() < 0.1:
                yield at + 1e-6, self._past[int(self._random.integers(len(self._past)))]


@pytest.mark.parametrize(("participants", "link"), [(1, BadLink), (3, BadLink), (3, Replaying)])
def test_every_gradient_counts_once_in_some_epoch_and_is_scaled_by_what_it_is_of(participants, link):
    training = Training(ELEMENTS, lambda seen: participants, uneven(3), of_one)
    impair(training.lab, link)
    means = watch(training)
    training.run(15)
    assert {node for part in training.plan for node in part.nodes} == {0, 1, 2, 3}
    updates = training.updates
    # how often each worker's gradient is in each fragment
    counted = np.zeros((WORKERS, len(training.running.total)), np.int64)
    for update, mean in zip(updates, means, strict=True):
        whole = np.rint(mean * update.counts[:, None]).astype(np.int64)
        assert (whole == whole[:, :1]).all()
        bits = whole[:, 0] >> np.arange(WORKERS)[:, None] & 1
        # nobody twice, or there would be carries: as many bits as the sum is said to be of
        assert (bits.sum(axis=0) == update.counts).all()
        counted += bits
        assert len(update.inside) >= update.awaited
    taken = np.array([sum(worker in update.inside for update in updates) for worker in range(WORKERS)])
    # all of a gradient has counted when its worker takes part, and of the one under way none or some
    assert (counted >= taken[:, None]).all()
    assert (counted <= taken[:, None] + 1).all()
    assert (taken > 0).all()
    assert max(age for update in updates for age in update.staleness) > 0
    # what workers were told is what happened, and each is moved by the means of all epochs since its last
    by_epoch = {update.epoch: update for update in updates}
    reached = [0] * WORKERS
    for worker, moved, part in training.steps:
        update = by_epoch[part.epoch]
        assert worker in part.workers
        assert (part.workers, part.awaited) == (update.inside, update.awaited)
        assert part.staleness == update.staleness[update.inside.index(worker)]
        assert part.staleness == part.epoch - 1 - reached[worker]
        expected = sum(means[reached[worker] : part.epoch]).reshape(-1)
        np.testing.assert_allclose(moved, expected, rtol=1e-5)
        reached[worker] = part.epoch
    assert training.steps


def test_switches_add_up_as_many_as_are_published_and_pass_on_what_comes_while_a_sum_is_under_way():
    ample = {"s1": 40, "s2": 40, "s3": 40}
    elements = 24 * 64
    ones = np.ones(elements)
    training = Training(elements, lambda seen: 4, uneven(7), lambda *_: ones, slots=ample, window=64)
    training.run(8)
    programs = [program for program in training.lab.programs.values() if isinstance(program, EpochProgram)]
    stats = [program.stats() for program in programs]
    # all fragments belong to the racks' switches here
    assert sum(its["folded"] for its in stats) + sum(its["bypassed"] for its in stats) > 0
    added = training.lab.server.stats()["packets_added"]
    contributions = sum(int(update.counts.sum()) for update in training.updates)
    assert added < contributions / 1.5
    # acknowledgements of nodes and of the PS overtake each other, and nothing is lost: nobody repeats himself
    assert sum(worker.stats()["retransmissions"] for worker in training.lab.workers.values()) == 0
    for program in programs:
        epochs = {epoch for epoch, _, _ in program.published(1).values()}
        assert epochs <= {training.running.waiting.epoch, training.running.waiting.epoch - 1}


def test_without_memory_everything_counts_at_the_ps():
    nothing = {"s1": 0, "s2": 0, "s3": 0}
    training = Training(ELEMENTS, lambda seen: 3, uneven(9), of_one, slots=nothing)
    training.run(6)
    stats = training.lab.server.stats()
    assert stats["packets_added"] == stats["direct"] > 0


def test_nobody_waits_for_workers_that_have_left():
    training = Training(ELEMENTS, everybody, lambda worker: 0.5 if worker >= 5 else 0.01, of_one)
    network = training.lab.network

    def leave() -> None:
        for worker in (5, 6, 7):
            training.lab.server.leave(1, worker, network.now)
        network.wake("ps")

    network.at(0.1, leave)
    training.run(6)
    assert training.updates[0].ended < 0.4
    assert all(set(update.inside) == set(range(5)) for update in training.updates)


class Regression:
    """A least-squares task with noise; every worker has rows of its own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.rows = rng.standard_normal((WORKERS, 64, 96))
        truth = rng.standard_normal(96)
        self.targets = self.rows @ truth + 0.5 * rng.standard_normal((WORKERS, 64))
        self.weights = np.zeros((WORKERS, 96))

    def gradient(self, worker: int, step: int) -> np.ndarray:
        error = self.rows[worker] @ self.weights[worker] - self.targets[worker]
        return (self.rows[worker].T @ error / 64).astype(np.float32)

    def loss(self, weights: np.ndarray) -> float:
        return float(((self.rows @ weights - self.targets) ** 2).mean())


def test_it_converges_to_the_neighbourhood_of_synchronous_training_in_less_time():
    epochs, rate = 40, 0.08
    task = Regression()
    choose = by_algorithm_two(Convergence(1.0, 0.125 * WORKERS, 1.0, WORKERS).epochs)
    training = Training(96, choose, uneven(13, 0.05), lambda worker, step: gradient(worker, step))

    def gradient(worker: int, step: int) -> np.ndarray:
        # it has just been moved: the step that has ended is the last that is noted
        if training.steps and training.steps[-1][0] == worker:
            task.weights[worker] -= rate * training.steps[-1][1]
        return task.gradient(worker, step)

    training.run(epochs)
    # the same number of epochs with everybody's gradient of the same weights; each is as long as its slowest worker
    together, seconds, slow = Regression(), uneven(13, 0.05), 0.0
    before = together.loss(together.weights[0])
    for step in range(epochs):
        mean = np.mean([together.gradient(worker, step) for worker in range(WORKERS)], axis=0)
        together.weights -= rate * mean
        slow += max(seconds(worker) for worker in range(WORKERS))
    synchronous = together.loss(together.weights[0])
    asynchronous = task.loss(-rate * training.running.total.reshape(-1)[:96])
    assert synchronous < before / 10
    assert asynchronous == pytest.approx(synchronous, rel=0.25)
    assert training.updates[-1].ended < 0.8 * slow
    assert min(update.awaited for update in training.updates) < WORKERS


def test_whose_gradients_count_is_published_anew_when_somebody_comes_in_for_one_who_has_left():
    training = Training(ELEMENTS, lambda seen: 2, lambda worker: 0.01, of_one)
    running, now = training.running, 1.0
    running.advance(now)
    running.waiting.participants = 2

    def has_sent(worker: int) -> set[int]:
        running.out.clear()
        running.ready(worker, 1, 0, np.zeros(64, np.int32), now)
        return {
            int(frame["bitmap"])
            for frames in running.out
            for frame in frames
            if frame["kind"] == EpochKind.PUBLISH
        }

    assert has_sent(0) == set()
    assert has_sent(1) == {0b011}
    running.leave(0, now)
    # its first word is enough: what slots have of these two leaves now
    assert has_sent(2) == {0b110}


def test_who_waits_for_its_turn_on_a_slow_link_does_not_ask_for_its_result_all_the_time():
    """Every 10 ms without a part of it, all that lacked was sent again, which is what the others waited for."""
    elements, slots, window = 64 * 1000, dict.fromkeys(("s1", "s2", "s3"), 1000), 64
    training = Training(
        elements,
        everybody,
        lambda worker: 0.01,
        lambda worker, step: np.full(elements, 0.01),
        slots=slots,
        window=window,
        link=LinkSpec(20e6, delay=1e-3, queue=500_000, grain=16),
    )
    training.run(3)
    # what each takes to come down the PS's link
    assert training.lab.server.stats()["answers"] < 1.2 * 3 * WORKERS * (1000 + 1)
