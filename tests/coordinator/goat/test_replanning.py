"""The controller of GOAT's jobs: policies are published once, and made anew when switches change."""

from typing import Any

import numpy as np
import pytest

from inanet.messages.control import Layout, Plan
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from tests.coordinator.goat.network import LINKS, GoatRack

#: switches on the ways of workers; s3 is there for when s2 is not
WAYS = ("s1", "s2", "s4")
INTEGERS = TensorSpec("i", "i32", (64 * 40,), "sum", ExponentMode.NONE)
FLOATS = TensorSpec("f", "f32", (3000,), "mean", ExponentMode.CARRIED)


def arrays_of(spec: TensorSpec, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if spec.dtype == "i32":
        return [rng.integers(-99, 99, spec.shape, np.int32) for _ in range(6)]
    return [rng.standard_normal(spec.shape).astype(np.float32) for _ in range(6)]


def reduce_and_check(
    rack: GoatRack, spec: TensorSpec, seed: int, reference: LocalTensor | None = None
) -> None:
    """A round ends with the bits of a single host; ``reference`` has what is carried from round to round."""
    mine = arrays_of(spec, seed)
    expected = [array.copy() for array in mine]
    assert (reference or LocalTensor(spec, 6)).reduce(expected) is None
    number = rack.begin(spec, mine)
    rack.run(lambda: rack.ended(number))
    assert rack.errors(number) == {""}
    for array in mine:
        np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))


def watch(rack: GoatRack) -> list[tuple[str, Any]]:
    """Plans and layouts that members are sent from now on."""
    seen: list[tuple[str, Any]] = []
    send = rack.coordinator.outgoing

    def outgoing() -> list[tuple[int, Any]]:
        out = send()
        names = {peer: name for name, peer in rack._ids.items()}
        seen.extend((names[p], m) for p, m in out if isinstance(m, Plan | Layout) and p in names)
        return out

    rack.coordinator.outgoing = outgoing  # type: ignore[method-assign]
    return seen


def held(rack: GoatRack) -> dict[str, int]:
    """Slots that sub-models have on each switch that is there."""
    return {name: its.stats()["held_slots"] for name, its in rack.programs.items() if name in rack.members}


def test_a_policy_is_published_once_to_every_switch_and_worker() -> None:
    rack = GoatRack().start()
    seen = watch(rack)
    rack.joined()
    for seed in range(4):
        reduce_and_check(rack, INTEGERS, seed)
    layouts = [(name, message.layout) for name, message in seen if isinstance(message, Layout)]
    assert sorted(name for name, _ in layouts) == ["ps", "s1", "s2", "s4", "w0", "w1", "w2"]
    assert len({layout for _, layout in layouts}) == 1
    scheduled = layouts[0][1].scheduled
    # 64-bit sums: two words for each of 2560 values
    assert sum(part.count for part in scheduled) == 80
    published = [base for part in scheduled for base in part.bases]
    assert sum(held(rack).values()) == sum(
        part.count for part in scheduled for base in part.bases if base >= 0
    )
    assert max(published) >= 0
    assert rack.sites() == WAYS


def test_a_lost_switch_fails_what_is_under_way_on_all_ranks_and_the_job_is_scheduled_anew() -> None:
    rack = GoatRack().start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    (job,) = rack.coordinator.jobs.values()
    key, epoch = job.plans.current.key, job.epoch
    number = rack.begin(INTEGERS, arrays_of(INTEGERS, 2), only=["w0", "w1"])
    rack.star.settle(0.0004)
    rack.kill_switch("s2")
    rack.run(lambda: rack.ended(number, ["w0", "w1"]))
    # the third comes to the round later, and is told the same
    rack.begin_at("w2", number, INTEGERS, arrays_of(INTEGERS, 2)[4:])
    rack.run(lambda: rack.ended(number))
    found = {rack.results[name, number] for name in rack.names}
    assert len(found) == 1
    (error,) = found
    assert error is not None
    assert error.cause == "aggregator_lost"
    assert "switch 's2' was lost" in error.message
    assert "call again" in error.message
    rack.run(lambda: rack.sites() == ("s1", "s3", "s4"))
    assert (job.plans.current.key != key, job.epoch > epoch) == (True, True)
    # the same tensor, and one that had no policy before
    floats = LocalTensor(FLOATS, 6)
    for seed in (3, 5):
        reduce_and_check(rack, INTEGERS, seed)
        reduce_and_check(rack, FLOATS, seed + 1, floats)
    assert set(held(rack)) == {"s1", "s3", "s4"}
    for name in rack.names:
        rack.members[name].leave("done")
    rack.run(lambda: not rack.coordinator.jobs)
    rack.step()
    assert sum(held(rack).values()) == 0


def test_memory_of_the_old_policy_is_free_for_the_new_one() -> None:
    rack = GoatRack(slots=20).start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    before = held(rack)
    rack.kill_switch("s2")
    rack.run(lambda: rack.sites() == ("s1", "s3", "s4"))
    reduce_and_check(rack, INTEGERS, 2)
    after = held(rack)
    assert sorted(after.values()) == sorted(count for count in before.values() if count)
    assert 0 < max(after.values()) <= 20


def test_a_switch_that_comes_back_is_taken_in_when_nothing_is_under_way() -> None:
    rack = GoatRack().start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    rack.kill_switch("s2")
    rack.run(lambda: rack.sites() == ("s1", "s3", "s4"))
    reduce_and_check(rack, INTEGERS, 2)
    number = rack.begin(INTEGERS, arrays_of(INTEGERS, 3), only=["w0"])
    rack.start_switch("s2")
    for _ in range(20):
        rack.step()
    assert rack.sites() == ("s1", "s3", "s4")
    for name in ("w1", "w2"):
        index = rack.names.index(name)
        mine = arrays_of(INTEGERS, 3)[2 * index : 2 * index + 2]
        rack.begin_at(name, number, INTEGERS, mine)
    rack.run(lambda: rack.ended(number))
    assert rack.errors(number) == {""}
    rack.run(lambda: rack.sites() == WAYS)
    reduce_and_check(rack, INTEGERS, 4)
    assert sum(held(rack).values()) > 0


def test_without_another_way_the_job_is_over_on_all_ranks() -> None:
    rack = GoatRack().start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    rack.kill_switch("s4")
    rack.run(lambda: all(rack.members[name].failed is not None for name in rack.names))
    failures = {rack.members[name].failed for name in rack.names}
    assert len(failures) == 1
    (failure,) = failures
    assert failure is not None
    assert failure.cause == "aggregator_lost"
    assert "cannot be made without it" in failure.message


def test_a_job_starts_without_a_switch_that_has_been_there_and_waits_for_one_that_has_not() -> None:
    rack = GoatRack().start(switch=False)
    for name in ("s1", "s3", "s4"):
        rack.start_switch(name)
    for _ in range(10):
        rack.step()
    assert not rack.coordinator.jobs
    rack.start_switch("s2")
    rack.joined()
    assert rack.sites() == WAYS
    rack.kill_switch("s2")
    for name in rack.names:
        rack.kill(name)
    rack.run(lambda: not rack.coordinator.jobs)
    for name in rack.names:
        rack.start_host(name)
    rack.joined()
    assert rack.sites() == ("s1", "s3", "s4")
    reduce_and_check(rack, INTEGERS, 1)


def test_both_ways_may_be_lost_one_after_the_other() -> None:
    rack = GoatRack().start().joined()
    for gone, left, seed in (("s2", ("s1", "s3", "s4"), 2), ("s3", WAYS, 4)):
        reduce_and_check(rack, INTEGERS, seed)
        rack.kill_switch(gone)
        rack.run(lambda left=left: rack.sites() == left)  # type: ignore[misc]
        reduce_and_check(rack, INTEGERS, seed + 1)
        rack.start_switch(gone)
        rack.run(lambda: not rack.coordinator.jobs or rack.sites() == WAYS)
    assert rack.coordinator.jobs


def test_a_switch_that_no_worker_is_behind_holds_nothing() -> None:
    # s3 has all the memory there is, behind s4
    rack = GoatRack(slots=8, links=(*LINKS[:2], ("s2", "s4"), ("s4", "s3"), *LINKS[5:])).start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    assert rack.sites() == WAYS


def test_ranks_that_differ_do_not_go_on() -> None:
    rack = GoatRack().start().joined()
    # less than a window: all hosts send everything
    small = TensorSpec("s", "i32", (500,), "sum", ExponentMode.NONE)
    reduce_and_check(rack, small, 1)
    # no result reaches the third host
    rack.hosts["w2"].receive = lambda *_: None  # type: ignore[method-assign]
    number = rack.begin(small, arrays_of(small, 2))
    rack.run(lambda: rack.ended(number, ["w0", "w1"]))
    assert rack.errors(number, ["w0", "w1"]) == {""}
    rack.kill_switch("s2")
    rack.run(lambda: all(rack.members[name].failed is not None for name in rack.names))
    failures = {rack.members[name].failed for name in rack.names}
    assert len(failures) == 1
    (failure,) = failures
    assert failure is not None
    assert "had the result already, so the ranks differ now" in failure.message
    assert not rack.coordinator.jobs


def test_a_switch_that_changes_nothing_leaves_the_job_alone() -> None:
    rack = GoatRack().start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    rack.kill_switch("s3")
    rack.start_switch("s3")
    (job,) = rack.coordinator.jobs.values()
    key = job.plans.current.key
    before = held(rack)
    # hosts hold and go on
    for seed in range(2, 6):
        reduce_and_check(rack, INTEGERS, seed)
    assert (job.plans.current.key, rack.sites(), held(rack)) == (key, WAYS, before)


def test_a_switch_that_restarts_at_once_gets_its_slots_anew() -> None:
    rack = GoatRack().start().joined()
    reduce_and_check(rack, INTEGERS, 1)
    (job,) = rack.coordinator.jobs.values()
    key = job.plans.current.key
    # there is no way without it
    rack.kill_switch("s4")
    rack.start_switch("s4")
    rack.run(lambda: job.plans.current.key != key or not rack.coordinator.jobs)
    assert rack.sites() == WAYS
    assert held(rack)["s4"] == 0
    reduce_and_check(rack, INTEGERS, 2)
    assert sum(held(rack).values()) > 0


def disturb(rack: GoatRack, rng: np.random.Generator, down: list[str]) -> None:
    """Somewhere in a round, one of the two switches that another can stand in for goes or comes."""
    for _ in range(int(rng.integers(0, 5))):
        rack.step()
    rack.star.settle(float(rng.uniform(0, 3e-4)))
    if down:
        rack.start_switch(down.pop())
    else:
        down.append(str(rng.choice(["s2", "s3"])))
        rack.kill_switch(down[0])


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_goes_and_comes_all_ranks_have_the_same(seed: int) -> None:
    rack, rng, down = GoatRack().start().joined(), np.random.default_rng(seed), list[str]()
    ended = 0
    for turn in range(8):
        mine = arrays_of(INTEGERS, turn)
        expected = sum(array.astype(np.int64) for array in mine)
        number = rack.begin(INTEGERS, mine)
        disturb(rack, rng, down)
        rack.run(lambda n=number: rack.ended(n) or all(m.failed for m in map(rack.members.get, rack.names)))  # type: ignore[misc,union-attr]
        failures = {rack.members[name].failed for name in rack.names}
        assert len(failures) == 1
        if failures != {None}:
            assert not rack.coordinator.jobs
            break
        (cause,) = rack.errors(number)
        assert cause in ("", "aggregator_lost")
        assert len({rack.results[name, number] for name in rack.names}) == 1
        ended += not cause
        if not cause:
            for array in mine:
                np.testing.assert_array_equal(array, expected)
    assert ended
