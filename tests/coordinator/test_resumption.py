"""A coordinator that dies and comes back (coordinator restart): members bring what they hold, stale ones disturb nobody."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.coordinator.events import JobOver, JobStarted
from inanet.messages.control import (
    Begin,
    Finished,
    Hello,
    JobEnded,
    JobFailed,
    Known,
    Layout,
    LayoutReady,
    Plan,
    Reject,
    Resume,
    RoundFailed,
    Waiting,
    Welcome,
)
from inanet.planning.topology import Topology
from inanet.proto.common.plan import Retired
from tests.coordinator.nodes import FIRST_KEY, JOB, Nodes, spec

SPEC = spec()
OTHER = spec("v")
WORKERS = ["w0", "w1", "w2", "w3"]
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("a1",)},
)


def crashed(topology: Topology | None = None, **chosen: float) -> Nodes:
    """Round 1 is done, round 2 is open on w0 and w1, round 3 on w0; then the coordinator and its PS die."""
    nodes = Nodes(topology, **chosen)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.begin(2, SPEC, ["w0", "w1"])
    nodes.begin(3, OTHER, ["w0"])
    crash(nodes)
    return nodes


def crash(nodes: Nodes) -> None:
    nodes.plans.pop("ps", None)
    nodes.layouts.pop("ps", None)
    nodes.clear()
    nodes.restart()


def come_back(nodes: Nodes, *names: str) -> None:
    for name in names:
        if name == "ps":
            nodes.join("ps")
        elif name == "w0":
            nodes.resume("w0", 4, [(2, SPEC), (3, OTHER)])
        elif name == "w1":
            nodes.resume("w1", 3, [(2, SPEC)])
        elif name.startswith("w"):
            nodes.resume(name, 2)
        else:
            nodes.resume(name, 1)


EVERYBODY = ["ps", "a0", "a1", *WORKERS]


@settings(max_examples=40)
@given(st.permutations(EVERYBODY))
def test_a_job_goes_on_in_whatever_order_its_members_return(order: list[str]) -> None:
    nodes = crashed()
    come_back(nodes, *order[:-1])
    assert not any(nodes.got(name, Plan) for name in order[:-1])
    come_back(nodes, order[-1])
    started = [event for event in nodes.events if isinstance(event, JobStarted)]
    assert [(event.job, event.name, event.ranks) for event in started if event.resumed] == [(JOB, "train", 4)]
    plans = {name: nodes.last(name, Plan) for name in EVERYBODY}
    assert {(plan.plan.job, plan.plan.version, plan.plan.key) for plan in plans.values()} == {
        (JOB, 2, FIRST_KEY)
    }
    # only the root has lost its memory: those below it attach, workers under live aggregators need not
    assert [name for name in EVERYBODY if plans[name].attach] == ["a0", "a1"]
    assert {child.since for child in plans["ps"].plan.placements[0].children} == {2}
    assert {child.since for child in plans["a0"].plan.placements[0].children} == {1}
    assert {layout.layout.tensor: layout.last_round for layout in nodes.got("ps", Layout)} == {0: 1, 1: 2}
    assert all(nodes.got(name, Layout) == [] for name in ("a0", "a1"))
    # the open rounds go on
    nodes.begin(2, SPEC, ["w2", "w3"])
    nodes.begin(3, OTHER, ["w1", "w2", "w3"])
    nodes.finish(2)
    nodes.finish(3)
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet
    nodes.begin(4, spec("new"))
    assert nodes.last("w0", Layout).layout.tensor == 2
    assert all(not nodes.got(name, RoundFailed) for name in EVERYBODY)


def test_workers_go_on_when_the_root_has_its_slots_again() -> None:
    nodes = crashed()
    nodes.deaf.add("ps")
    come_back(nodes, *EVERYBODY)
    assert nodes.got("ps", Plan)
    assert nodes.got("a0", Plan)
    assert nodes.got("w0", Plan) == []
    nodes.say("ps", LayoutReady(job=JOB, tensor=0))
    assert nodes.got("w0", Plan) == []
    nodes.say("ps", LayoutReady(job=JOB, tensor=1))
    assert nodes.got("w0", Plan)


def test_a_member_that_is_still_telling_is_waited_for() -> None:
    nodes = crashed()
    come_back(nodes, "ps", "a0", "a1", "w1", "w2", "w3")
    resume = Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w0"], next_round=4, layouts=2, open=2)
    nodes.join("w0", resume=(resume,))
    for layout in nodes.layouts["w0"].values():
        nodes.say("w0", Known(job=JOB, layout=layout))
    nodes.say("w0", Begin(job=JOB, round=2, spec=SPEC))
    assert nodes.got("w0", Plan) == []
    nodes.say("w0", Begin(job=JOB, round=3, spec=OTHER))
    assert nodes.got("w0", Plan)


def test_what_members_say_meanwhile_is_not_lost() -> None:
    nodes = crashed()
    come_back(nodes, "a0", "a1", "w0", "w1", "w2")
    # w2 begins round 2 and the others get the result through a live aggregator before everybody is back
    nodes.say("w2", Begin(job=JOB, round=2, spec=SPEC))
    nodes.say("w0", Finished(job=JOB, round=2))
    come_back(nodes, "w3", "ps")
    round_ = nodes.coordinator.jobs[JOB].rounds.ledger.get(2)
    assert round_ is not None
    assert round_.finished == {"w0"}
    assert set(round_.specs) == {"w0", "w1", "w2"}


def test_a_round_that_others_have_finished_is_known_to_be_finished() -> None:
    nodes = Nodes()
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w2", "w3"])
    crash(nodes)
    nodes.join("ps")
    for name in ("a0", "a1"):
        nodes.resume(name, 1)
    for name in ("w0", "w1"):
        nodes.resume(name, 2, [(1, SPEC)])
    for name in ("w2", "w3"):
        nodes.resume(name, 2)
    nodes.finish(1, ["w0"])
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 1
    nodes.finish(1, ["w1"])
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 0


def test_a_mismatch_nobody_was_told_of_is_found() -> None:
    nodes = crashed()
    come_back(nodes, "ps", "a0", "a1", "w0", "w2", "w3")
    nodes.resume("w1", 3, [(2, OTHER)])
    failure = nodes.last("w3", RoundFailed)
    assert (failure.round, failure.error) == (2, "mismatch")


def test_missing_ranks_end_the_job_for_those_who_came_back() -> None:
    nodes = crashed(resume=15.0)
    come_back(nodes, "ps", "a0", "a1", "w0", "w1")
    nodes.wait(14)
    assert nodes.got("w0", JobFailed) == []
    nodes.wait(1.5)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.ranks) == ("worker_lost", (2, 3))
    assert failed.message == (
        "job 'train' cannot go on after the coordinator's restart: "
        "ranks 2 and 3 did not come back within 15 s"
    )
    assert nodes.last("a0", JobEnded).reason == failed.message
    assert JobOver(JOB, "train", "worker_lost", failed.message) in nodes.events
    # too late
    come_back(nodes, "w2")
    assert failed.message in nodes.last("w2", Reject).reason


def test_an_aggregator_alone_is_told_to_forget() -> None:
    nodes = crashed(resume=15.0)
    come_back(nodes, "a0")
    nodes.wait(16)
    assert nodes.got("a0", JobEnded)
    nodes.kill("a0")
    assert nodes.coordinator.timer() is None


def test_an_aggregator_that_died_too_is_routed_around() -> None:
    nodes = crashed(resume=15.0)
    come_back(nodes, "ps", "a1", *WORKERS)
    assert nodes.got("w0", Plan) == []
    nodes.wait(16)
    assert nodes.plans["w0"].placements[0].parent.name == "ps"  # type: ignore[union-attr]
    assert nodes.last("w0", Plan).attach == (0,)
    assert nodes.last("w1", Plan).attach == ()
    assert nodes.plans["ps"].placements[0].retired == ()  # its slots are empty
    # and it may come back later
    nodes.begin(2, SPEC, ["w2", "w3"])
    nodes.begin(3, OTHER, ["w1", "w2", "w3"])
    nodes.finish(2)
    nodes.finish(3)
    nodes.join("a0")
    assert nodes.plans["w0"].placements[0].parent.name == "a0"  # type: ignore[union-attr]


def test_survivors_keep_their_ids_and_what_retired() -> None:
    nodes = Nodes(DEEP, resume=15.0)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    before = nodes.plans["top"].placements[0]
    crash(nodes)
    nodes.join("ps")
    for name in ("top", "a1"):
        nodes.resume(name, 1)
    for name in WORKERS:
        nodes.resume(name, 2, [(1, SPEC)])
    after = nodes.plans["top"].placements[0]
    assert {(c.name, c.bit, c.since) for c in after.children} == {
        (c.name, c.bit, c.since) for c in before.children
    }
    assert after.retired == before.retired == (Retired(1, 4 | 8),)
    assert nodes.plans["top"].version == 3


def test_a_plan_that_only_some_had_seen_is_completed() -> None:
    nodes = Nodes(DEEP, resume=15.0)
    nodes.start()
    nodes.begin(1, SPEC)
    old = dict(nodes.plans)
    nodes.kill("a0")
    # only w0 has the plan without a0; its new parent does not
    nodes.plans |= {name: old[name] for name in ("top", "a1", "w1", "w2", "w3")}
    crash(nodes)
    nodes.join("ps")
    for name in ("top", "a1"):
        nodes.resume(name, 1)
    for name in WORKERS:
        nodes.resume(name, 2, [(1, SPEC)])
    nodes.wait(16)
    top = nodes.plans["top"].placements[0]
    assert [child.name for child in top.children] == ["a1", "w0", "w1"]
    assert top.retired == (Retired(1, 4 | 8),)
    assert nodes.plans["top"].version == 3
    assert {child.since for child in top.children if child.name != "a1"} == {3}


def test_an_aggregator_that_had_been_given_up_does_not_slip_in_again() -> None:
    """It was cut off, its children moved; the coordinator died before it could be told (re-parenting)."""
    nodes = Nodes(DEEP, resume=15.0)
    nodes.start()
    nodes.begin(1, SPEC)
    old = dict(nodes.plans)
    nodes.kill("a0")
    nodes.plans["a0"] = old["a0"]
    crash(nodes)
    nodes.join("ps")
    for name in ("top", "a0", "a1"):
        nodes.resume(name, 1)
    for name in WORKERS:
        nodes.resume(name, 2, [(1, SPEC)])
    assert nodes.plans["w0"].placements[0].parent.name == "top"  # type: ignore[union-attr]
    assert nodes.got("a0", JobEnded)
    assert nodes.got("a0", Plan) == []
    nodes.finish(1)
    nodes.wait(60)
    assert nodes.plans["w0"].placements[0].parent.name == "a0"  # type: ignore[union-attr]


def test_a_tensor_that_somebody_lacks_is_told_again() -> None:
    nodes = crashed()
    del nodes.layouts["a1"][1], nodes.layouts["w3"][1]
    come_back(nodes, *EVERYBODY)
    assert [layout.layout.tensor for layout in nodes.got("a1", Layout)] == [1]
    assert {layout.layout.tensor for layout in nodes.got("w3", Layout)} >= {1}


def test_remote_roots_that_lived_on_keep_their_memory() -> None:
    topology = Topology(roots=("p", "q"), workers={"w0": ("p", "q"), "w1": ("p", "q")})
    nodes = Nodes(topology)
    nodes.start()
    nodes.begin(1, spec("big", 256 * 100))
    del nodes.plans["p"], nodes.layouts["p"]
    nodes.clear()
    nodes.restart()
    nodes.join("p")
    nodes.resume("q", 1)
    for name in ("w0", "w1"):
        nodes.resume(name, 2, [(1, spec("big", 256 * 100))])
    assert nodes.last("w0", Plan).attach == (0,)
    assert nodes.got("q", Layout) == []
    assert nodes.got("p", Layout)


# ---------- stale and fresh processes


def test_a_process_of_an_earlier_run_is_refused() -> None:
    nodes = crashed()
    stale = Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w0"], next_round=2)
    for name in EVERYBODY:
        nodes.join(name)  # all started anew
    assert nodes.plans["w1"].key == FIRST_KEY + 1
    nodes.kill("w0")
    assert nodes.coordinator.jobs == {}
    for name in ("w1", "w2", "w3"):
        nodes.say(name, nodes.hello(name))
    nodes.join("w0")
    nodes.clear()
    nodes.ids["x"], nodes.inbox["x"] = 900, []
    nodes.coordinator.connected(900, nodes.now)
    nodes.say("x", nodes.hello("w0", resume=(stale,)))
    assert nodes.got("x", Reject)
    nodes.wait(50)
    assert all(nodes.got(name, JobFailed) == nodes.got(name, Plan) == [] for name in WORKERS)


def test_a_stale_process_with_a_name_that_is_free_is_refused_too() -> None:
    topology = Topology(roots=("ps",), workers=dict.fromkeys((*WORKERS, "x9"), ("ps",)))
    nodes = Nodes(topology)
    nodes.join("ps")
    nodes.join(*WORKERS, world=4)
    plan = nodes.plans["w0"]
    stale = Resume(job=3, key=5, plan=plan, next_round=2)
    nodes.join("x9", ranks=(2,), world=4, resume=(stale,))
    assert "belongs to an earlier run of job 'train'" in nodes.last("x9", Reject).reason
    # the key of the run that is on, but not one of its members any more
    same = Resume(job=plan.job, key=plan.key, plan=plan, next_round=2)
    nodes.join("x9", ranks=(2,), world=4, resume=(same,))
    assert "job 'train' is running" in nodes.last("x9", Reject).reason


def test_one_that_was_lost_cannot_come_back_as_if_nothing_had_been() -> None:
    nodes = Nodes()
    nodes.start()
    plan = nodes.plans["w3"]
    nodes.kill("w3")
    nodes.join("w3", resume=(Resume(job=JOB, key=plan.key, plan=plan, next_round=1),))
    assert "job 'train' is over: rank 3 (host w3) was lost" in nodes.last("w3", Reject).reason


def test_an_aggregator_that_lost_only_its_connection_forgets_and_comes_back() -> None:
    nodes = Nodes()
    nodes.start()
    nodes.begin(1, SPEC)
    plan, layouts = nodes.plans["a0"], nodes.layouts["a0"]
    nodes.kill("a0")
    nodes.plans["a0"], nodes.layouts["a0"] = plan, layouts
    nodes.resume("a0", 1)
    kinds = [message.kind for message in nodes.inbox["a0"]]
    assert kinds[:2] == ["welcome", "job_ended"]
    nodes.finish(1)
    assert nodes.plans["w0"].placements[0].parent.name == "a0"  # type: ignore[union-attr]


def test_fresh_workers_wait_for_a_job_that_resumes_and_are_turned_away() -> None:
    topology = Topology(roots=("ps",), workers=dict.fromkeys(("w0", "w1", "w2"), ("ps",)))
    nodes = Nodes(topology)
    nodes.join("ps")
    nodes.join("w0", "w1", world=2)
    crash(nodes)
    nodes.join("ps")
    resume = Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w0"], next_round=1)
    nodes.join("w0", world=2, resume=(resume,))
    nodes.join("w2", ranks=(1,), world=2)
    assert nodes.last("w2", Waiting).missing == ("rank 0",)
    assert nodes.last("w2", Welcome).job != JOB
    resume = Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w1"], next_round=1)
    nodes.join("w1", world=2, resume=(resume,))
    assert nodes.plans["w0"].version == 2
    assert nodes.last("w2", Reject).reason == "job 'train' was resumed by the processes that ran it"


def test_a_job_started_anew_by_all_ends_the_wait_for_the_old_one() -> None:
    topology = Topology(roots=("ps",), workers=dict.fromkeys(("w0", "w1", "w2"), ("ps",)))
    nodes = Nodes(topology)
    nodes.join("ps")
    nodes.join("w0", "w1", world=2)
    crash(nodes)
    nodes.join("ps")
    nodes.join("w0", world=2, resume=(Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w0"]),))
    nodes.join("w1", ranks=(1,), world=2)
    nodes.join("w2", ranks=(0,), world=2)
    assert nodes.plans["w2"].key == FIRST_KEY + 1
    assert "was started anew" in nodes.last("w0", JobFailed).message


def test_a_number_in_use_is_not_resumed() -> None:
    nodes = crashed()
    nodes.join("ps")
    nodes.join("w2", job="other", ranks=(0,), world=2)
    taken = nodes.last("w2", Welcome).job
    assert taken is not None
    plan = nodes.plans["w0"]
    nodes.join("w0", resume=(Resume(job=taken, key=FIRST_KEY, plan=plan),))
    assert f"another job has its number, {taken}, now" in nodes.last("w0", Reject).reason
    nodes.join("a0", resume=(Resume(job=taken, key=FIRST_KEY, plan=plan),))
    assert nodes.last("a0", JobEnded).job == taken


def test_one_connection_resumes_one_job() -> None:
    nodes = crashed()
    plan = nodes.plans["w0"]
    nodes.join("w0", resume=(Resume(job=1, key=1, plan=plan), Resume(job=2, key=2, plan=plan)))
    assert "wants to resume 2 jobs" in nodes.last("w0", Reject).reason


def test_a_member_that_goes_while_others_return_is_missing() -> None:
    nodes = crashed(resume=15.0)
    come_back(nodes, "ps", "a0", "a1", "w0", "w1", "w2")
    plan, layouts = nodes.plans["w2"], nodes.layouts["w2"]
    nodes.kill("w2")
    nodes.plans["w2"], nodes.layouts["w2"] = plan, layouts
    come_back(nodes, "w3")
    assert nodes.got("w3", Plan) == []
    come_back(nodes, "w2")
    assert nodes.got("w3", Plan)


@pytest.mark.parametrize("changes", [{"world": 9, "ranks": (8,)}, {"ranks": (0,)}])
def test_those_who_return_must_fit_each_other(changes: dict[str, object]) -> None:
    nodes = crashed()
    come_back(nodes, "w0")
    resume = Resume(job=JOB, key=FIRST_KEY, plan=nodes.plans["w1"])
    nodes.join("w1", resume=(resume,), **changes)
    assert nodes.got("w1", Reject)


def test_a_hello_may_carry_many_resumes() -> None:
    nodes = crashed()
    plan = nodes.plans["a0"]
    resumes = tuple(Resume(job=job, key=job, plan=plan) for job in range(64))
    nodes.join("a0", resume=resumes)
    assert nodes.got("a0", Welcome)
    assert isinstance(nodes.hello("a0", resume=resumes), Hello)
