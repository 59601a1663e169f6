"""Hot parameters found while a job trains, in virtual time: what is decided changes no bit, whenever it is decided."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.proto.common.events import Counted, Tally
from inanet.proto.zebra.hot import Identification
from inanet.proto.zebra.job import HotSet
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.store import Adagrad
from inanet.testing.switched import Impairment

from .rig import Rig, spread

ONLINE = Online(after=4, threshold=0.1, memory=1 << 10, step=4)
EVERY = spread(np.arange(60, dtype=np.uint64))
BAD = {"drop": 0.05, "duplicate": 0.05, "late": 0.05}


class Deciding:
    """Whoever decides for a rig: what it says arrives after ``delays`` seconds, at one machine after the other, and twice."""

    def __init__(self, rig: Rig, online: Online = ONLINE, delays: Iterator[float] | None = None) -> None:
        self.rig = rig
        self.its = Identification(online, len(rig.shards), rig.job.width, 20)
        self._delays = delays or repeat(0.0)
        self._seen = 0
        self._due: list[tuple[float, int, HotSet | None, int]] = []

    def look(self) -> None:
        """Hear what shards have counted, decide, and say so."""
        rig, its = self.rig, self.its
        for address, event in rig.star.log[self._seen :]:
            if isinstance(event, Counted):
                its.take(rig.job.shards.index(address), event.tally)
        self._seen = len(rig.star.log)
        while its.asking:
            its.take(len(rig.shards), rig.program.tally(rig.job.number, its.asking))
            changed = its.decide()
            if changed:
                rig.sets.append(its.hot)
            for machine in range(1 + len(rig.workers) + len(rig.shards)):
                for _ in range(2):
                    at = rig.star.now + next(self._delays)
                    self._due.append((at, machine, its.hot if changed else None, its.decided))
        for said in [said for said in self._due if said[0] <= rig.star.now]:
            self._due.remove(said)
            self._say(*said[1:])

    def _say(self, place: int, hot: HotSet | None, decided: int) -> None:
        rig = self.rig
        if place == 0:
            if hot is not None:
                rig.program.prepare(rig.job.number, hot)
            return
        machine = [*rig.shards, *rig.workers][place - 1]
        if hot is not None:
            machine.prepare(hot)
        if place == 1:
            if hot is not None:
                rig.shards[0].announce(hot.version)
            rig.shards[0].settle(decided)
        rig.star._transmit([[*rig.job.shards, *rig.job.workers][place - 1]])


def gradients(rank: int, iteration: int) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """What is hot moves on with every iteration; no number is one that integers of a switch hold as it is."""
    rng = np.random.default_rng((rank, iteration))
    heat = 1 / (1 + (np.arange(60) - 4 * (iteration // 4)) % 60)
    keys = EVERY[np.sort(rng.choice(60, 12, replace=False, p=heat / heat.sum()))]
    return keys, rng.standard_normal((12, 2)).astype(np.float32)


def train(rig: Rig, deciding: Deciding, iterations: int, stirred: Iterator[float] | None = None) -> list[int]:
    """Train, and have the switch restart after each of so many seconds; gives the hot set of every iteration."""
    versions, moment = [], next(stirred, None) if stirred is not None else None
    for iteration in range(rig.workers[0].done + 1, rig.workers[0].done + 1 + iterations):
        for rank, worker in enumerate(rig.workers):
            worker.push(*gradients(rank, iteration), rig.star.now)

        def over(iteration: int = iteration) -> bool:
            nonlocal moment
            deciding.look()
            if stirred is not None and moment is not None and rig.star.now >= moment:
                rig.restart()
                moment = next(stirred, None)
            return all(worker.done == iteration for worker in rig.workers)

        while not over():
            # whoever waits for word has no timer that says when it comes
            rig.star.settle(20e-6)
        assert len({worker.hot.version for worker in rig.workers}) == 1
        versions.append(rig.workers[0].hot.version)
    return versions


def rig_of(impairment: Impairment | None = None) -> Rig:
    counted = {"counted": ONLINE.after, "listed": ONLINE.most(2), "width": 2}
    return Rig(3, 2, impairment, optimiser=Adagrad(0.1), **counted)


def model(rig: Rig) -> bytes:
    return b"".join(values.tobytes() for values in rig.pull(EVERY)[:1])


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[int], bytes, Deciding]:
    rig = rig_of()
    deciding = Deciding(rig)
    return train(rig, deciding, 14), model(rig), deciding


def test_a_decision_counts_from_the_iteration_after_the_next_on(
    undisturbed: tuple[list[int], bytes, Deciding],
) -> None:
    versions, _, deciding = undisturbed
    assert versions == [0] * 5 + [1] * 4 + [2] * 4 + [3]
    assert deciding.its.changes == 3
    assert 0 < len(deciding.its.hot) <= ONLINE.most(2)
    assert deciding.rig.program.stats()["contributions"] > 50


@pytest.mark.parametrize("seed", range(4))
def test_no_bit_depends_on_losses_or_on_when_it_is_decided(
    undisturbed: tuple[list[int], bytes, Deciding], seed: int
) -> None:
    rig = rig_of(Impairment(seed=seed, **BAD))
    delays = np.random.default_rng(seed).exponential(0.002, 1000)
    assert train(rig, Deciding(rig, delays=iter(delays)), 14) == undisturbed[0]
    assert model(rig) == undisturbed[1]


@pytest.mark.parametrize("seed", range(6))
def test_no_bit_depends_on_a_switch_that_dies_while_others_become_hot(seed: int) -> None:
    clean, rig = rig_of(), rig_of(Impairment(seed=seed, **BAD))
    rng = np.random.default_rng(seed)
    deciding = Deciding(rig, delays=iter(rng.exponential(0.001, 1000)))
    before = train(rig, deciding, 4)
    # the set changes after the sixth iteration has begun, and its next counts are asked for after the eighth
    after = train(rig, deciding, 4, iter(rig.star.now + np.cumsum(rng.exponential(0.0005, 4))))
    assert [*before, *after] == train(clean, Deciding(clean), 8) == [0] * 5 + [1] * 3
    assert rig.program.life > 0
    assert model(rig) == model(clean)


def test_a_switch_that_has_counted_a_part_decides_nothing_and_the_next_time_it_does() -> None:
    rig = rig_of()
    deciding = Deciding(rig)
    train(rig, deciding, 2)
    rig.restart()
    assert train(rig, deciding, 8) == [0] * 7 + [1]
    assert deciding.its.changes == 1


def test_a_shard_that_has_counted_a_part_decides_nothing_either() -> None:
    rig = rig_of()
    deciding = Deciding(rig)
    train(rig, deciding, 5)
    rig.restart_shard(1)
    assert train(rig, deciding, 5) == [1] * 5
    assert (deciding.its.decided, deciding.its.changes) == (8, 1)
    assert train(rig, deciding, 4) == [1] * 3 + [2]


def test_another_life_of_shard_0_waits_until_it_is_told_what_is_decided() -> None:
    rig, clean = rig_of(), rig_of()
    deciding = Deciding(rig)
    train(rig, deciding, 4)
    rig.restart_shard(0)
    for rank, worker in enumerate(rig.workers):
        worker.push(*gradients(rank, 5), rig.star.now)
    rig.star.settle(0.1)
    assert [worker.done for worker in rig.workers] == [4] * 3
    rig.shards[0].settle(deciding.its.decided)
    rig.star.run(lambda: all(worker.done == 5 for worker in rig.workers), deadline=1.0)
    assert train(rig, deciding, 9) == train(clean, Deciding(clean), 14)[5:]
    assert model(rig) == model(clean)


def test_ranks_are_told_that_a_decision_is_waited_for() -> None:
    rig = rig_of()
    train(rig, Deciding(rig), 3)
    for _ in range(2):
        for rank, worker in enumerate(rig.workers):
            worker.push(*gradients(rank, worker._begun + 1), rig.star.now)
        rig.star.settle(1.0)
    assert [worker.done for worker in rig.workers] == [4] * 3
    assert "shard 0 has not finished the iteration: it waits for word of what is hot" in "".join(
        rig.workers[0].waiting_for()
    )
    assert rig.workers[0].knows_why
    assert rig.workers[0].ranks_waited_for == ()
    rig.shards[0].settle(4)
    rig.star.run(lambda: all(worker.done == 5 for worker in rig.workers), deadline=1.0)
    assert not rig.workers[0].knows_why


def test_tallies_of_other_iterations_are_not_mixed_up() -> None:
    its = Identification(Online(after=1, threshold=0.0, step=1), 2, 1, 20)
    its.take(0, Tally(3, 3, (7,), (1,)))
    its.take(9, Tally(1, 1, (7,), (1,)))
    its.take(0, Tally(1, 1, (7,), (4,)))
    its.take(0, Tally(1, 1, (7,), (4,)))
    # this shard is one ahead
    its.take(1, Tally(2, 2, (8,), (9,)))
    assert (its.asking, its.decide()) == (0, None)
    its.take(1, Tally(1, 1, (8,), (1,)))
    assert (its.asking, its.decide()) == (1, None)
    its.take(2, Tally(1, 1))
    assert its.decide()
    assert its.hot.keys.tolist() == [7, 8]
    its.take(0, Tally(1, 1, (7,), (4,)))
    assert (its.decided, its.asking, its.decide()) == (1, 0, None)
    its.take(0, Tally(2, 2, (7,), (4,)))
    assert its.asking == 2


def test_what_is_not_listed_counts_for_how_many_are_hot() -> None:
    """The stop rule ends where more keys add less than a hundredth of all updates."""
    for others, wanted in ((0, 3), (1000, 2)):
        its = Identification(Online(after=1, threshold=0.0, step=1), 1, 1, 20)
        its.take(0, Tally(1, 1, (1, 2, 3), (50, 40, 5), others))
        its.take(1, Tally(1, 1))
        assert its.decide()
        assert len(its.hot) == wanted
