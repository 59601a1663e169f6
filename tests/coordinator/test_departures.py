"""Workers that are lost end their job for all alike (one outcome), those that leave do not; jobs do not concern each other."""

from inanet.coordinator.events import JobOver
from inanet.messages.control import (
    JobEnded,
    JobFailed,
    Layout,
    Leave,
    Plan,
    RoundFailed,
    Welcome,
)
from tests.coordinator.nodes import JOB, Nodes, parents, spec, two_level

SPEC = spec()


def test_a_lost_worker_ends_the_job_for_all_alike(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.begin(2, SPEC, ["w0", "w3"])
    nodes.begin(3, spec("v"), ["w0"])
    nodes.clear()
    nodes.kill("w3")
    failures = {round_.round: round_ for round_ in nodes.got("w0", RoundFailed)}
    assert sorted(failures) == [2, 3]
    assert failures[2].message == (
        "job 'train', round 2 (tensor 'w', f32 (1000,), sum): rank 3 (host w3) was lost in round 2: its "
        "connection closed"
    )
    assert (failures[2].error, failures[2].missing) == ("worker_lost", (3,))
    failed = nodes.last("w0", JobFailed)
    assert failed == JobFailed(
        job=JOB,
        error="worker_lost",
        message="job 'train': rank 3 (host w3) was lost in round 2: its connection closed",
        round=2,
        ranks=(3,),
    )
    for name in ("w1", "w2"):
        assert nodes.inbox[name] == nodes.inbox["w0"]
    for name in ("ps", "a0", "a1"):
        assert nodes.last(name, JobEnded).reason == failed.message
    assert JobOver(JOB, "train", "worker_lost", failed.message) in nodes.events
    assert nodes.coordinator.jobs == {}


def test_between_rounds_too(nodes: Nodes) -> None:
    nodes.kill("w0")
    failed = nodes.last("w1", JobFailed)
    assert (failed.round, failed.message) == (
        None,
        "job 'train': rank 0 (host w0) was lost: its connection closed",
    )


def test_a_result_somebody_has_is_completed_first(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.begin(2, spec("v"), ["w0", "w1"])
    nodes.finish(1, ["w1"])
    nodes.clear()
    nodes.kill("w3")
    assert [failure.round for failure in nodes.got("w0", RoundFailed)] == [2]
    assert nodes.got("w0", JobFailed) == []
    nodes.begin(3, SPEC, ["w1"])  # no new rounds meanwhile
    assert nodes.got("w0", RoundFailed)[-1].round == 3
    nodes.finish(1, ["w0"])
    assert nodes.got("w0", JobFailed) == []
    nodes.finish(1, ["w2"])
    assert nodes.last("w0", JobFailed).error == "worker_lost"


def test_but_not_for_ever() -> None:
    nodes = Nodes(grace=5.0)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w3"])
    nodes.kill("w3")
    nodes.wait(4.9)
    assert nodes.got("w0", JobFailed) == []
    nodes.wait(0.2)
    assert nodes.got("w0", JobFailed)


def test_all_workers_may_die(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w0"])
    for name in ("w0", "w1", "w2", "w3"):
        nodes.kill(name)
    assert nodes.coordinator.jobs == {}
    assert nodes.got("a0", JobEnded)


def test_survivors_may_start_again_at_once(nodes: Nodes) -> None:
    nodes.kill("w3")
    for name in ("w0", "w1", "w2"):
        nodes.say(name, nodes.hello(name))
    nodes.join("w3")
    assert nodes.last("w0", Welcome).job != JOB
    assert nodes.last("w0", Plan).plan.version == 1
    nodes.begin(1, SPEC)  # about the job that failed
    assert all(nodes.got(name, Layout) == [] for name in nodes.ids)


# ---------- leaving


def test_a_job_ends_when_all_have_left(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1)
    for name in list(nodes.workers):
        nodes.say(name, Leave())
    for name in ("ps", "a0", "a1"):
        assert nodes.last(name, JobEnded).reason == "all workers have left"
    assert all(nodes.got(name, JobFailed) == [] for name in nodes.inbox)
    assert JobOver(JOB, "train", None, "all workers have left") in nodes.events
    assert nodes.coordinator.jobs == {}


def test_nothing_goes_on_without_the_one_that_left(nodes: Nodes) -> None:
    nodes.say("w3", Leave(reason="rank 3 is gone: process 7 ended"))
    nodes.begin(1, SPEC, ["w0"])
    failure = nodes.last("w1", RoundFailed)
    assert failure.message.endswith("rank 3 (host w3) has left the job: rank 3 is gone: process 7 ended")
    assert failure.missing == (3,)
    assert nodes.got("w0", JobFailed) == []


def test_a_round_the_one_that_left_had_not_begun_fails(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w3"])
    nodes.begin(2, SPEC, ["w0"])
    nodes.say("w3", Leave())
    assert [failure.round for failure in nodes.got("w0", RoundFailed)] == [2]
    nodes.finish(1)
    assert nodes.got("w0", JobFailed) == []


def test_leaving_in_the_middle_of_a_round_is_being_lost(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.say("w3", Leave())
    assert nodes.last("w0", JobFailed).message == (
        "job 'train': rank 3 (host w3) was lost in round 1: it left before it had the result of round 1"
    )


def test_jobs_share_receive_buffers_and_give_them_back() -> None:
    nodes = Nodes(two_level(4, 1))
    nodes.join("ps", "a0")
    nodes.join("w0", "w1", job="one", world=2)
    window = nodes.plans["w0"].placements[0].parent.window  # type: ignore[union-attr]
    assert window == 400  # two workers and the PS share a0's 1200
    nodes.join("w2", job="two", ranks=(0,), world=2)
    nodes.join("w3", job="two", ranks=(1,), world=2)
    one = nodes.plans["w0"]
    assert one.version == 2
    assert one.placements[0].parent.window == 200  # type: ignore[union-attr]
    assert nodes.plans["w2"].placements[0].parent.window == 200  # type: ignore[union-attr]
    for name in ("w2", "w3"):
        nodes.say(name, Leave())
    assert nodes.plans["w0"].version == 3
    assert nodes.plans["w0"].placements[0].parent.window == 400  # type: ignore[union-attr]


def test_a_lost_aggregator_concerns_all_its_jobs_and_a_lost_worker_only_one() -> None:
    nodes = Nodes(two_level(4, 2))
    nodes.join("ps", "a0", "a1")
    nodes.join("w0", "w1", job="one", world=2)
    nodes.join("w2", job="two", ranks=(0,), world=2)
    nodes.join("w3", job="two", ranks=(1,), world=2)
    nodes.kill("a0")
    assert parents(nodes)["w0"] == parents(nodes)["w2"] == "ps"
    nodes.clear()
    nodes.kill("w0")
    assert nodes.got("w1", JobFailed)
    assert nodes.got("w2", JobFailed) == nodes.got("w3", JobFailed) == []
