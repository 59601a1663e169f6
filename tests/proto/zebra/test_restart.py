"""A switch that is restarted has lost everything it knew, and the job loses nothing."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inanet.proto.zebra.job import fixed
from inanet.proto.zebra.stream import Liveness
from inanet.proto.zebra.switch import ZebraProgram
from inanet.testing.switched import Impairment

from .rig import Rig, random_gradients, spread
from .test_sums import BAD

KEYS = np.arange(40, dtype=np.uint64)
ONES = np.ones((40, 1), np.float32)


def trained(seed: int, workers: int, shards: int, impaired: bool, restarts: tuple[int, ...]) -> list[bytes]:
    """The model after each of four iterations, with another hot set from the third on; in each the switch is restarted
    whenever one of the intervals, in virtual microseconds, has passed.
    """
    rng, seen = np.random.default_rng(seed), []
    rig = Rig(workers, shards, Impairment(seed, **BAD) if impaired else None)
    rig.start(fixed(1, spread(np.arange(20, dtype=np.uint64))))
    for iteration in range(4):
        gradients = random_gradients(rng, workers, 60, 60)
        rng.shuffle(gradients)
        for worker, (keys, _) in zip(rig.workers, gradients, strict=True):
            # sums that no order of additions in floats would give twice
            values = np.random.default_rng(iteration).standard_normal((len(keys), 1)).astype(np.float32)
            worker.push(keys, values, rig.star.now)
        if iteration == 0:
            rig.prepare(fixed(2, spread(np.arange(10, 50, dtype=np.uint64)[::-1].copy())))
        for interval in restarts:
            rig.star.settle(1e-6 * interval)
            rig.restart()
        done = iteration + 1
        rig.star.run(lambda done=done: all(worker.done == done for worker in rig.workers), deadline=30.0)
        seen += [part.tobytes() for shard in rig.shards for part in shard.store.items()]
    assert {worker.hot.version for worker in rig.workers} == {2}
    return seen


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**20),
    workers=st.integers(1, 4),
    shards=st.integers(1, 2),
    impaired=st.booleans(),
    restarts=st.lists(st.integers(0, 200), min_size=1, max_size=3).map(tuple),
)
def test_no_moment_of_a_restart_changes_a_bit(
    seed: int, workers: int, shards: int, impaired: bool, restarts: tuple[int, ...]
) -> None:
    assert trained(seed, workers, shards, impaired, restarts) == trained(seed, workers, shards, False, ())


def test_sums_that_die_with_the_cpu_are_made_again() -> None:
    """Every gradient is acknowledged and no PS has a sum when the switch dies: workers find out by asking."""
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS))
    address = rig.job.shards[0]
    shard = rig.star.machines[address]
    rig.star.detach(address)
    for worker in rig.workers:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    assert rig.program.iterations == 1
    assert [worker.stats()["restarts"] for worker in rig.workers] == [0, 0]
    rig.restart()
    rig.star.attach(address, shard)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=5.0)
    assert [worker.stats()["restarts"] for worker in rig.workers] == [1, 1]
    assert rig.program.stats()["contributions"] == 80
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 40


def test_a_shard_takes_only_the_sums_that_it_lacks() -> None:
    """One of two shards has finished the iteration, the other has nothing of it."""
    rig = Rig(2, 2)
    rig.start(fixed(1, KEYS))
    address = rig.job.shards[1]
    shard = rig.star.machines[address]
    rig.star.detach(address)
    for worker in rig.workers:
        worker.push(KEYS, ONES, rig.star.now)
    rig.star.settle(0.005)
    assert [its.finished for its in rig.shards] == [1, 0]
    rig.restart()
    rig.star.attach(address, shard)
    rig.star.run(lambda: all(worker.done == 1 for worker in rig.workers), deadline=5.0)
    assert rig.shards[0].stats()["drop_stale_round"] > 0
    assert rig.pull(KEYS)[0].ravel().tolist() == [2.0] * 40


def test_between_iterations_the_new_life_learns_the_number_from_the_workers() -> None:
    rig = Rig(2, 1)
    rig.start(fixed(1, KEYS))
    for _ in range(3):
        rig.push([(KEYS, ONES)] * 2)
    rig.restart()
    rig.push([(KEYS, ONES)] * 2)
    assert (rig.program.iterations, rig.program.skipped) == (1, 3)
    assert sum(worker.stats()["restarts"] for worker in rig.workers) == 0
    assert rig.pull(KEYS)[1].ravel().tolist() == [8.0] * 40


def test_a_late_acknowledgement_of_a_dead_life_counts_for_nothing() -> None:
    liveness = Liveness(0.5)
    liveness.begin()
    lives = np.array([7, 7], np.int64)
    assert not liveness.restarted(lives[:0])
    assert not liveness.restarted(lives)
    # life 7 answers this attempt, and life 8: whatever is acknowledged is doubtful
    assert liveness.restarted(np.array([8], np.int64))
    assert (liveness.attempt, liveness.restarts) == (1, 1)
    # what was sent under attempt 1 only life 8 can acknowledge; both in one batch would be a third life
    assert not liveness.restarted(np.array([8, 8], np.int64))
    assert liveness.restarted(np.array([8, 9], np.int64))
    liveness.begin()
    assert liveness.attempt == 0
    assert not liveness.restarted(np.array([9], np.int64))


def test_questions_become_rarer() -> None:
    liveness = Liveness(0.5)
    liveness.begin()
    assert not liveness.asks(100.0)
    liveness.acknowledged(1.0)
    liveness.acknowledged(1.4)
    asked = [at / 2 for at in range(2, 40) if liveness.asks(at / 2)]
    assert asked == [1.5, 2.5, 4.5, 8.5, 12.5, 16.5]


def test_a_life_has_sixteen_bits() -> None:
    with pytest.raises(ValueError, match="70000 does not fit"):
        ZebraProgram(life=70000)
