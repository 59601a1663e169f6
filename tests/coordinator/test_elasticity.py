"""Elastic rounds: a worker dies in an elastic job. What is whole at the root is completed with it, the rest fails once on all
survivors, and the job goes on under another key with the ranks that are left."""

import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.coordinator.events import JobOver, MembershipChanged
from inanet.member.member import Failed
from inanet.messages.control import (
    JobEnded,
    JobFailed,
    Judge,
    Judged,
    Layout,
    Leave,
    Plan,
    Reject,
    RoundFailed,
)
from inanet.planning.topology import Topology
from inanet.proto.common.plan import ExponentMode, TensorSpec
from tests.coordinator.nodes import JOB, Nodes, spec
from tests.coordinator.test_whole import DEEP, TREES, Whole, arrays_for

SPEC = spec()


@pytest.fixture
def elastic() -> Nodes:
    nodes = Nodes(elastic=True)
    nodes.start()
    return nodes


def judge(nodes: Nodes, round_: int, complete: bool) -> None:
    """The root's answer."""
    assert nodes.last("ps", Judge).round == round_
    nodes.say("ps", Judged(job=JOB, round=round_, complete=complete))


# ---------- the coordinator alone


def test_a_round_that_the_root_lacks_something_of_fails_once_on_all(elastic: Nodes) -> None:
    nodes = elastic
    old = nodes.plans["w0"]
    nodes.begin(1, SPEC)
    nodes.clear()
    nodes.kill("w3")
    assert nodes.got("w0", RoundFailed) == []
    judge(nodes, 1, complete=False)
    (failure,) = nodes.got("w0", RoundFailed)
    assert (failure.round, failure.error, failure.missing) == (1, "worker_lost", (3,))
    assert failure.message.endswith(
        "rank 3 (host w3) was lost in round 1: its connection closed; the job goes on with the others: call again"
    )
    for name in ("w1", "w2"):
        assert nodes.got(name, RoundFailed) == [failure]
    # nobody holds anything of the old epoch, and its key is gone
    for name in ("ps", "a0", "a1"):
        assert isinstance(nodes.inbox[name][-1], Plan)
        assert nodes.last(name, JobEnded).reason == "the job goes on in a new epoch"
    for name in ("w0", "w1", "w2", "ps", "a0", "a1"):
        new = nodes.plans[name]
        assert (new.job, new.ranks) == (JOB, 3)
        assert new.key != old.key
        assert new.version > old.version
    assert {child.name for p in nodes.plans["a1"].placements for child in p.children} == {"w1"}
    (changed,) = [event for event in nodes.events if isinstance(event, MembershipChanged)]
    assert (changed.ranks, changed.epoch) == (3, 2)
    assert changed.reason == "rank 3 (host w3) was lost in round 1: its connection closed"
    (job,) = nodes.coordinator.overview(nodes.now).jobs
    assert (job.world, sorted(job.ranks)) == (4, ["w0", "w1", "w2"])
    assert not any(isinstance(event, JobOver) for event in nodes.events)
    # the number of the failed round is never used again; the same tensor is laid out anew
    nodes.begin(2, SPEC)
    assert nodes.last("w0", Layout).last_round == 1
    nodes.finish(2)
    assert len(nodes.got("w0", RoundFailed)) == 1


def test_a_round_that_is_whole_at_the_root_is_completed_with_the_lost_one(elastic: Nodes) -> None:
    nodes = elastic
    key = nodes.plans["w0"].key
    nodes.begin(1, SPEC)
    nodes.begin(2, spec("v"), ["w0", "w3"])
    nodes.clear()
    nodes.kill("w3")
    assert [m.round for m in nodes.got("ps", Judge)] == [1, 2]
    nodes.say("ps", Judged(job=JOB, round=2, complete=False))
    judge_one = Judged(job=JOB, round=1, complete=True)
    nodes.say("ps", judge_one)
    assert [failure.round for failure in nodes.got("w0", RoundFailed)] == [2]
    nodes.finish(1, ["w0", "w1"])
    assert nodes.plans["w0"].key == key
    nodes.finish(1, ["w2"])
    # everybody has the result: now, and not before
    assert nodes.plans["w0"].key != key
    # hosts that had not come to the failed round are told when they do
    nodes.clear()
    nodes.begin(2, spec("v"), ["w1", "w2"])
    assert nodes.last("w1", RoundFailed).round == 2
    nodes.begin(3, SPEC)
    nodes.finish(3)
    assert [failure.round for failure in nodes.got("w2", RoundFailed)] == [2]


def test_rounds_begun_before_the_hold_came_fail_too(elastic: Nodes) -> None:
    nodes = elastic
    nodes.mute.add("w2")
    nodes.kill("w3")
    key = nodes.plans["w0"].key
    nodes.begin(1, SPEC, ["w2"])
    assert nodes.last("w2", RoundFailed).error == "worker_lost"
    assert nodes.plans["w0"].key == key, "w2 has not said that it holds"
    nodes.mute.discard("w2")
    nodes.wait(nodes.settings.silence)
    nodes.kill("w2")
    assert nodes.plans["w0"].key != key
    assert nodes.plans["w0"].ranks == 2


def test_the_last_one_ends_the_job_and_a_lost_one_does_not_come_back(elastic: Nodes) -> None:
    nodes = elastic
    plan = nodes.plans["w3"]
    held = dict(nodes.layouts)
    nodes.kill("w3")
    nodes.plans["w3"], nodes.layouts = plan, held
    nodes.resume("w3", 1)
    assert "it goes on without this host" in nodes.last("w3", Reject).reason
    for name in ("w0", "w1", "w2"):
        assert nodes.got(name, JobFailed) == []
        nodes.kill(name)
    assert nodes.coordinator.jobs == {}


def test_who_leaves_in_good_order_is_left_out_when_others_go_on(elastic: Nodes) -> None:
    nodes = elastic
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.say("w3", Leave())
    key = nodes.plans["w0"].key
    assert nodes.got("w0", RoundFailed) == []
    nodes.begin(2, SPEC, ["w0"])
    assert nodes.last("w0", RoundFailed).message.endswith("rank 3 (host w3) has left the job")
    assert nodes.plans["w0"].key != key
    nodes.begin(3, SPEC, ["w0"])
    nodes.begin(2, SPEC, ["w1", "w2"])
    nodes.begin(3, SPEC, ["w1", "w2"])
    nodes.finish(3)
    for name in ("w0", "w1", "w2"):
        nodes.say(name, Leave())
    assert nodes.coordinator.jobs == {}


def test_the_last_one_leaves_before_it_has_said_that_it_holds(elastic: Nodes) -> None:
    nodes = elastic
    nodes.begin(1, SPEC)
    nodes.finish(1)
    for name in ("w0", "w1"):
        nodes.say(name, Leave())
    # its Leave crosses the Hold that the death of another brings
    nodes.mute.add("w2")
    nodes.kill("w3")
    nodes.say("w2", Leave())
    assert nodes.coordinator.jobs == {}
    assert nodes.last("ps", JobEnded).reason == "all workers have left"
    assert [event.error for event in nodes.events if isinstance(event, JobOver)] == [None]


def test_a_root_that_dies_does_not_answer(elastic: Nodes) -> None:
    nodes = elastic
    nodes.begin(1, SPEC)
    nodes.kill("w3")
    nodes.kill("ps")
    assert nodes.last("w0", RoundFailed).round == 1
    nodes.join("ps")
    assert nodes.plans["w0"].ranks == 3
    nodes.begin(2, SPEC)
    nodes.finish(2)
    assert len(nodes.got("w0", RoundFailed)) == 1


def test_a_coordinator_that_starts_again_knows_how_many_are_left(elastic: Nodes) -> None:
    nodes = elastic
    nodes.kill("w3")
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.restart()
    for name in ("ps", "a0", "a1", "w0", "w1", "w2"):
        nodes.resume(name, 2 if name.startswith("w") else 1)
    assert nodes.plans["w0"].ranks == 3
    nodes.begin(2, SPEC)
    nodes.finish(2)
    assert nodes.got("w0", RoundFailed) == []


# ---------- with real nodes, in virtual time


class Elastic(Whole):
    """A fabric whose jobs go on."""

    def __init__(self, topology: Topology, impair: float = 0.0) -> None:
        super().__init__(topology, impair, elastic=True)

    @property
    def left(self) -> list[str]:
        """Worker hosts that live."""
        return [name for name in self.topology.workers if name in self.members]

    def over(self, round_: int) -> bool:
        return all((name, round_) in self.results for name in self.left)

    def reduce(
        self, round_: int, wanted: TensorSpec, victim: str = "", steps: int = 0
    ) -> list[Failed | None]:
        """A round in which ``victim`` is killed after so many steps; outcomes of the survivors. Checks their bits."""
        arrays = arrays_for(self.topology, round_, wanted)
        arrays = {name: array for name, array in arrays.items() if name in self.left}
        sums = np.sum(np.stack([array.astype(np.float64) for array in arrays.values()]), axis=0)
        if wanted.op == "mean":
            sums /= len(arrays)
        self.begin(round_, wanted, arrays)
        if victim:
            for _ in range(steps):
                self.step()
            self.kill(victim)
        self.run(lambda: self.over(round_))
        found = [self.results[name, round_] for name in self.left]
        if found[0] is None:
            self._check([arrays[name] for name in self.left], sums, wanted)
        assert len({None if one is None else (one.cause, one.message) for one in found}) == 1
        return found

    @staticmethod
    def _check(results: list[NDArray[np.generic]], sums: NDArray[np.float64], wanted: TensorSpec) -> None:
        assert len({result.tobytes() for result in results}) == 1
        atol = 0 if wanted.dtype == "i32" else 1e-5
        np.testing.assert_allclose(results[0].astype(np.float64), sums, rtol=0, atol=atol)


MEANS = TensorSpec("m", "f32", (256 * 9,), "mean", ExponentMode.PROLOGUE)


SMALL = TensorSpec("i", "i32", (256 * 12,), "sum", ExponentMode.NONE)
CARRIED = TensorSpec("f", "f32", (256 * 20,), "sum", ExponentMode.CARRIED)


@pytest.mark.parametrize(
    ("topology", "impair", "phases"),
    [
        (DEEP, 0.0, (0, 4, 9, 40)),
        (TREES, 0.0, (2, 6, 40)),
        (DEEP, 0.03, (1, 8)),
        (TREES, 0.03, (2, 6)),
    ],
)
def test_a_worker_dies_at_every_phase_of_a_round(
    topology: Topology, impair: float, phases: tuple[int, ...]
) -> None:
    """Sending, half aggregated, results going down, between rounds: all ranks have the same bits, or the same error."""
    outcomes = set()
    for steps in phases:
        whole = Elastic(topology, impair)
        assert whole.reduce(1, CARRIED) == [None] * len(topology.workers)
        found = [whole.reduce(2, SMALL, "w1", steps)[0]]
        outcomes.add(found[0] is None)
        # the second may have begun before its hosts heard of the loss
        found += [
            whole.reduce(3 + index, wanted)[0]
            for index, wanted in enumerate((SMALL, CARRIED, MEANS, CARRIED))
        ]
        failed = [one for one in found if one is not None]
        assert [(one.cause, one.missing) for one in failed] in ([], [("worker_lost", (1,))])
        assert [one.round for one in failed] in ([], [2], [3])
        (job,) = whole.coordinator.jobs.values()
        assert (job.plans.current.ranks, len(job.rounds.ledger)) == (len(topology.workers) - 1, 0)
    assert impair or outcomes == {True, False}, "rounds were completed and rounds failed"


@pytest.mark.parametrize("seed", range(4))
def test_workers_and_aggregators_die_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    topology = DEEP if seed % 2 else TREES
    whole = Elastic(topology, chance.choice([0.0, 0.03]))
    rounds = itertools.count(1)
    while len(whole.left) > 1:
        victims = [*whole.left, *(name for name in topology.aggregators if name in whole.members)]
        victim = chance.choice(victims)
        found = whole.reduce(
            next(rounds), chance.choice([SMALL, CARRIED, MEANS]), victim, chance.randrange(20)
        )
        found += whole.reduce(next(rounds), chance.choice([SMALL, CARRIED]))
        causes = {one.round: one.cause for one in found if one is not None}
        assert list(causes.values()) in ([], ["worker_lost"] if victim in topology.workers else [])
    assert whole.reduce(next(rounds), MEANS) == [None]
