"""Schedules that are computed elsewhere: the coordinator goes on meanwhile, and one comes after the other."""

from collections.abc import Callable

import numpy as np

from inanet.messages.control import Ping, Pong
from inanet.planning.goat.computations import Works
from inanet.planning.goat.publication import Publisher
from inanet.proto.common.local import LocalTensor
from tests.coordinator.goat.test_fabric import FLOATS, INTEGERS, Lab, arrays_of


class Gate:
    """A solver that is as slow as the test wants it to be: work waits until it is let through."""

    def __init__(self, works: Works) -> None:
        works.elsewhere = self
        self.waiting: list[tuple[Callable[[], None], Callable[[float], None]]] = []

    def __call__(self, work: Callable[[], None], done: Callable[[float], None]) -> None:
        self.waiting.append((work, done))

    def open(self, now: float) -> None:
        work, done = self.waiting.pop(0)
        work()
        done(now)


def test_the_coordinator_answers_while_it_solves() -> None:
    lab = Lab().start().joined()
    gate = Gate(lab.coordinator.works)
    mine = arrays_of(FLOATS, 8, 1)
    expected = [array.copy() for array in mine]
    assert LocalTensor(FLOATS, 8).reduce(expected) is None
    number = lab.begin(FLOATS, mine)
    lab.run(lambda: bool(gate.waiting))
    # the solver is at work, and whoever asks is answered
    lab.coordinator.receive(lab._ids["w1"], Ping(nonce=77), lab.star.now)
    assert (lab._ids["w1"], Pong(nonce=77)) in lab.coordinator.outgoing()
    assert not lab.ended(number)
    assert lab.stats("held_slots") == 0
    gate.open(lab.star.now)
    lab.run(lambda: lab.ended(number))
    assert lab.errors(number) == {""}
    np.testing.assert_array_equal(mine[0].view(np.uint32), expected[0].view(np.uint32))
    assert lab.stats("held_slots") > 0


def test_one_schedule_comes_after_the_other_and_sees_the_memory_that_is_left() -> None:
    lab = Lab().start().joined()
    gate = Gate(lab.coordinator.works)
    numbers = [lab.begin(spec, arrays_of(spec, 8, seed)) for seed, spec in enumerate((FLOATS, INTEGERS))]
    lab.run(lambda: bool(gate.waiting))
    for _ in range(5):
        lab.step()
    assert len(gate.waiting) == 1
    gate.open(lab.star.now)
    assert len(gate.waiting) == 1
    gate.open(lab.star.now)
    lab.run(lambda: all(lab.ended(number) for number in numbers))
    assert all(lab.errors(number) == {""} for number in numbers)


def test_a_job_that_is_over_meanwhile_takes_no_memory(monkeypatch) -> None:
    taken = []
    commit = Publisher.commit
    monkeypatch.setattr(Publisher, "commit", lambda *given: taken.append(1) or commit(*given))
    lab = Lab().start().joined()
    gate = Gate(lab.coordinator.works)
    lab.begin(FLOATS, arrays_of(FLOATS, 8, 1))
    lab.run(lambda: bool(gate.waiting))
    lab.coordinator.disconnected(lab._ids["w0"], lab.star.now)
    lab.run(lambda: not lab.coordinator.jobs)
    gate.open(lab.star.now)
    assert not taken
    assert not gate.waiting


def test_a_solver_that_fails_fails_the_round_in_words(monkeypatch) -> None:
    def broken(self: Publisher, instance: object) -> None:
        raise RuntimeError("no pivot")

    monkeypatch.setattr(Publisher, "scheduled", broken)
    lab = Lab().start().joined()
    number = lab.begin(FLOATS, arrays_of(FLOATS, 8, 1))
    lab.run(lambda: lab.ended(number))
    (error,) = lab.errors(number)
    assert error
    failed = next(one for (name, n), one in lab.results.items() if n == number and one is not None)
    assert "no pivot" in failed.message
