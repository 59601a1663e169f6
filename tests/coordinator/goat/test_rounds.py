"""Asynchronous training from the first Hello on: one tensor, each host's own steps, in virtual time."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from inanet.member.member import Failed, Member
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.goat_async.program import EpochProgram
from inanet.proto.slots.goat_async.ps import EpochServer
from tests.coordinator.goat.test_fabric import Lab

GRADIENT = TensorSpec("g", "f32", (300,), "mean", ExponentMode.FIXED, float(1 << 20))


class Steps(Lab):
    """Its hosts begin steps by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.system = "goat-async"
        self.server = EpochServer(lambda seen: 2)  # type: ignore[assignment]
        self.next: dict[str, int] = dict.fromkeys(self.names, 0)

    def program_of(self, slots: int) -> EpochProgram:
        return EpochProgram(budget=slots * 292)

    def begin_step(self, name: str, spec: TensorSpec, value: float) -> tuple[str, int, list[np.ndarray]]:
        """Both ranks of a host contribute this value."""
        self.next[name] += 1
        arrays = [np.full(spec.shape, value, np.float32) for _ in range(2)]
        self.begin_at(name, self.next[name], spec, arrays)
        return name, self.next[name], arrays

    def done(self, *steps: tuple[str, int, Any]) -> None:
        self.run(lambda: all((name, number) in self.results for name, number, _ in steps))

    def failed(self, step: tuple[str, int, Any]) -> Failed | None:
        return self.results[step[0], step[1]]


@pytest.fixture
def lab() -> Steps:
    return Steps().start().joined()  # type: ignore[return-value]


def test_hosts_take_steps_of_their_own_and_are_told_who_took_part(lab: Steps) -> None:
    for _ in range(2):
        # nothing is known of intervals yet: all are waited for
        steps = [lab.begin_step(name, GRADIENT, 1.0 + index) for index, name in enumerate(lab.names)]
        lab.done(*steps)
        for _, _, arrays in steps:
            for array in arrays:
                np.testing.assert_allclose(array, 2.5)
    # two are enough from now on, and one of them may be three steps ahead
    for number in range(3, 6):
        steps = [lab.begin_step(name, GRADIENT, 4.0) for name in ("w1", "w3")]
        lab.done(*steps)
        assert all(lab.failed(step) is None for step in steps)
        part = lab.members["w1"].participation
        assert part is not None
        assert (part.epoch, part.workers, part.awaited, part.staleness) == (number, (1, 3), 2, 0)
        np.testing.assert_allclose(steps[0][2][0], 4.0)
    late = lab.begin_step("w0", GRADIENT, 8.0), lab.begin_step("w2", GRADIENT, 0.0)
    lab.done(*late)
    part = lab.members["w0"].participation
    assert part is not None
    assert (part.epoch, part.workers, part.staleness) == (6, (0, 2), 3)
    # all that it has missed, and the mean that it took part in
    np.testing.assert_allclose(late[0][2][0], 3 * 4.0 + 4.0)
    assert lab.stats("completed") > 0


def test_those_who_leave_are_not_waited_for(lab: Steps) -> None:
    steps = [lab.begin_step(name, GRADIENT, 1.0) for name in lab.names[:2]]
    for name in lab.names[2:]:
        lab.members[name].leave("done")
    lab.done(*steps)
    assert all(lab.failed(step) is None for step in steps)
    np.testing.assert_allclose(steps[0][2][0], 1.0)
    lab.members["w0"].leave("done")
    last = lab.begin_step("w1", GRADIENT, 3.0)
    lab.done(last)
    assert lab.failed(last) is None
    lab.members["w1"].leave("done")
    lab.run(lambda: not lab.coordinator.jobs)
    lab.step()
    assert lab.stats("held_slots") == 0


def test_a_step_that_cannot_be_fails_for_its_host_alone(lab: Steps) -> None:
    steps = [lab.begin_step(name, GRADIENT, np.nan if name == "w2" else 1.0) for name in lab.names]
    lab.run(lambda: ("w2", 1) in lab.results)
    failed = lab.failed(steps[2])
    assert failed is not None
    assert (failed.cause, failed.rank, failed.index) == ("nonfinite", 4, 0)
    again = lab.begin_step("w2", GRADIENT, 5.0)
    lab.done(*steps, again)
    assert [lab.failed(one) is None for one in (*steps, again)] == [True, True, False, True, True]
    np.testing.assert_allclose(again[2][0], 2.0)


@pytest.mark.parametrize(
    ("spec", "cause", "says"),
    [
        (TensorSpec("g", "f32", (300,), "mean", ExponentMode.CARRIED), "unsupported", "under a fixed factor"),
        (TensorSpec("g", "i32", (300,), "sum", ExponentMode.NONE), "unsupported", "the sum of 300 i32"),
    ],
)
def test_only_means_of_floats_under_a_factor_have_epochs(
    lab: Steps, spec: TensorSpec, cause: str, says: str
) -> None:
    step = lab.begin_step("w0", spec, 1.0)
    lab.done(step)
    failed = lab.failed(step)
    assert failed is not None
    assert failed.cause == cause
    assert says in failed.message


def test_there_is_one_tensor(lab: Steps) -> None:
    first = [lab.begin_step(name, GRADIENT, 1.0) for name in lab.names]
    lab.done(*first)
    other = TensorSpec("barrier", "f32", (1,), "mean", ExponentMode.FIXED, 1.0)
    step = lab.begin_step("w0", other, 1.0)
    lab.done(step)
    failed = lab.failed(step)
    assert failed is not None
    assert "one tensor" in failed.message
    member: Member = lab.members["w0"]
    assert member.joined


def test_a_step_that_ranks_of_a_host_disagree_on_fails_alone_and_the_job_goes_on(lab: Steps) -> None:
    lab.next["w0"] += 1
    done = partial(lab.results.__setitem__, ("w0", 1))
    lab.members["w0"].refuse_mismatch(1, GRADIENT, 0, "rank 0 has 300 elements, rank 1 has 3", done)
    lab.run(lambda: ("w0", 1) in lab.results)
    failed = lab.failed(("w0", 1, None))
    assert failed is not None
    assert failed.cause == "mismatch"
    steps = [lab.begin_step(name, GRADIENT, 1.0) for name in lab.names]
    lab.done(*steps)
    assert all(lab.failed(step) is None for step in steps)


def test_all_steps_under_way_fail_when_the_tensor_cannot_be(
    lab: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile: list[tuple[Callable[[], None], Callable[[float], None]]] = []
    lab.coordinator.works.elsewhere = lambda solve, done: meanwhile.append((solve, done))
    monkeypatch.setattr("inanet.planning.goat.publication.SECONDS", 0.0)
    steps = [lab.begin_step(name, GRADIENT, 1.0) for name in ("w0", "w0", "w3")]
    lab.run(lambda: bool(meanwhile))
    ((solve, done),) = meanwhile
    solve()
    done(lab.star.now)
    lab.done(*steps)
    for step in steps:
        failed = lab.failed(step)
        assert failed is not None
        assert "cannot be scheduled" in failed.message
