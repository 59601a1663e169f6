"""Nodes die at every phase: aggregators are routed around (R5), lost workers end the job for all (R13)."""

import pytest

from inanet.control.events import JobOver, PlanChanged
from inanet.control.messages import (
    Finished,
    Held,
    Hold,
    JobEnded,
    JobFailed,
    Layout,
    LayoutReady,
    Leave,
    PeerSilent,
    Ping,
    Plan,
    Pong,
    RoundFailed,
    Welcome,
)
from inanet.control.topology import Topology
from inanet.proto.plan import Retired
from tests.control.nodes import JOB, Nodes, spec, two_level

SPEC = spec()
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("a1",)},
)


@pytest.fixture
def nodes() -> Nodes:
    started = Nodes()
    started.start()
    started.clear()
    return started


def parents(nodes: Nodes) -> dict[str, str]:
    found = {}
    for name, plan in nodes.plans.items():
        for place in plan.placements:
            if place.parent is not None and name in nodes.ids:
                found[name] = place.parent.name
    return found


def versions(nodes: Nodes) -> set[int]:
    return {plan.version for name, plan in nodes.plans.items() if name in nodes.ids}


def consistent(nodes: Nodes) -> None:
    """Every node's view fits its neighbours'."""
    for name, plan in nodes.plans.items():
        if name not in nodes.ids:
            continue
        for place in plan.placements:
            for child in place.children:
                below = next(p for p in nodes.plans[child.name].placements if p.tree == place.tree)
                assert below.parent is not None
                assert (below.parent.name, below.parent.bit) == (name, child.bit)


# ---------- aggregators


def lose_before_any_round(nodes: Nodes) -> None:
    pass


def lose_while_slots_are_made(nodes: Nodes) -> None:
    nodes.mute.add("a0")
    nodes.begin(1, SPEC)


def lose_in_a_round(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.begin(2, spec("v"), ["w0", "w1"])


def lose_half_finished(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w0"])


def lose_between_rounds(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1)


@pytest.mark.parametrize(
    "phase",
    [
        lose_before_any_round,
        lose_while_slots_are_made,
        lose_in_a_round,
        lose_half_finished,
        lose_between_rounds,
    ],
)
def test_a_lost_aggregator_is_routed_around_at_any_phase(nodes: Nodes, phase: object) -> None:
    phase(nodes)  # type: ignore[operator]
    nodes.clear()
    nodes.kill("a0")
    assert versions(nodes) == {2}
    assert parents(nodes) == {"w0": "ps", "w1": "a1", "w2": "ps", "w3": "a1", "a1": "ps"}
    consistent(nodes)
    root = nodes.plans["ps"].placements[0]
    assert root.retired == (Retired(1, 4 | 8),)
    assert nodes.last("w0", Plan).attach == nodes.last("w2", Plan).attach == (0,)
    for name in ("ps", "a1", "w1", "w3"):
        assert nodes.last(name, Plan).attach == ()
    # whatever was open can still be finished
    job = nodes.coordinator.jobs[JOB]
    for round_ in (1, 2):
        nodes.begin(round_, SPEC if round_ == 1 else spec("v"))
        nodes.finish(round_)
    assert job.collectives.ledger.quiet
    assert all(not nodes.got(name, RoundFailed) for name in nodes.ids)
    assert all(
        nodes.got(name, Layout) or name == "w0" for name in ("w1", "w2") if phase is lose_before_any_round
    )


def test_the_parent_learns_of_it_before_the_orphans(nodes: Nodes) -> None:
    nodes.coordinator.disconnected(nodes.ids.pop("a0"), nodes.now)
    names = {peer: name for name, peer in nodes.ids.items()}
    order = [names[peer] for peer, message in nodes.coordinator.outgoing() if isinstance(message, Plan)]
    assert order.index("ps") < order.index("w0")
    assert order.index("a1") < order.index("w0")


def test_slots_of_a_lost_aggregator_are_not_waited_for(nodes: Nodes) -> None:
    lose_while_slots_are_made(nodes)
    assert nodes.got("w0", Layout) == []
    nodes.clear()
    nodes.kill("a0")
    kinds = [message.kind for message in nodes.inbox["w0"]]
    assert kinds == ["plan", "layout"]


def test_cascades_up_and_down() -> None:
    for order in (["a0", "top"], ["top", "a0"], ["a0", "top", "a1"], ["a1", "a0", "top"]):
        nodes = Nodes(DEEP)
        nodes.start()
        nodes.begin(1, SPEC)
        for victim in order:
            nodes.kill(victim)
            consistent(nodes)
        assert versions(nodes) == {1 + len(order)}
        assert parents(nodes)["w0"] == "ps"
        assert parents(nodes)["w2"] == ("a1" if "a1" not in order else "ps")
        root = nodes.plans["ps"].placements[0]
        live = {child.name: child.bit for child in root.children}
        stands_for = {gone.bit: gone.mask for gone in root.retired}
        # what the first child of the root had sent is all there is
        assert stands_for[1] == sum(live.values())
        nodes.finish(1)
        assert nodes.coordinator.jobs[JOB].collectives.ledger.quiet


def test_too_many_orphans_end_the_job_with_the_reason() -> None:
    topology = Topology(
        roots=("ps",),
        aggregators={"a": "ps", "b": "ps"},
        workers={f"w{index:02d}": ("ab"[index % 2],) for index in range(40)},
    )
    nodes = Nodes(topology)
    nodes.start()
    nodes.kill("a")
    nodes.clear()
    nodes.kill("b")
    failed = nodes.last("w00", JobFailed)
    assert failed.error == "aggregator_lost"
    assert "aggregator 'b' was lost: its connection closed, but 'ps' would have 40 children" in failed.message
    assert {nodes.last(name, JobFailed) for name in nodes.workers} == {failed}


def test_ids_are_issued_again_only_when_they_are_settled() -> None:
    topology = Topology(
        roots=("ps",),
        aggregators={f"a{index}": "ps" for index in range(4)},
        workers={f"w{index:02d}": (f"a{index // 8}",) for index in range(31)},
    )

    def run(settle: bool) -> Nodes:
        nodes = Nodes(topology, silence=9.0)
        nodes.start()
        nodes.begin(1, SPEC)
        for index in range(4):
            nodes.kill(f"a{index}")
            nodes.wait(4)  # pings are answered
            if settle and index == 2:
                nodes.finish(1)
                nodes.begin(2, SPEC)
        return nodes

    nodes = run(settle=True)
    assert len(nodes.plans["ps"].placements[0].children) == 31
    assert nodes.got("w00", JobFailed) == []
    nodes = run(settle=False)
    assert "'ps' cannot take over 'w24'" in nodes.last("w00", JobFailed).message


def test_ids_are_not_settled_before_all_hosts_have_answered() -> None:
    nodes = Nodes(two_level(2, 2), silence=90.0)
    nodes.start()
    nodes.kill("a0")
    job = nodes.coordinator.jobs[JOB]
    assert job._settling.settled(job.hosts) == 0
    nodes.say("w0", Pong(nonce=1))
    assert job._settling.settled(job.hosts) == 0
    nodes.begin(1, SPEC, ["w1"])
    nodes.say("w1", Pong(nonce=1))
    # w1 had begun round 1 when it answered: that round may know the old id
    assert job._settling.settled(job.hosts) == 0
    nodes.begin(1, SPEC, ["w0"])
    nodes.finish(1, ["w0", "w1"])
    assert job._settling.settled(job.hosts) == 0
    nodes.say("ps", Finished(job=JOB, round=1))
    assert job._settling.settled(job.hosts) == 2


def test_a_silent_aggregator_is_asked_then_given_up(nodes: Nodes) -> None:
    nodes.say("w0", PeerSilent(job=JOB, name="a0", seconds=2.0))
    assert nodes.got("a0", Ping)
    nodes.wait(20)
    assert versions(nodes) == {1}  # it answered
    nodes.mute.add("a0")
    nodes.say("w0", PeerSilent(job=JOB, name="a0", seconds=3.0))
    nodes.wait(3.5)
    assert nodes.plans["w0"].version == 2
    assert parents(nodes)["w0"] == "ps"


def test_an_aggregator_whose_data_path_is_broken_is_given_up_though_it_answers(nodes: Nodes) -> None:
    nodes.say("w0", PeerSilent(job=JOB, name="a0", seconds=12.0))
    assert parents(nodes)["w0"] == "ps"
    assert "worker 'w0' has had no answer from it for 12 s" in nodes.last("a0", JobEnded).reason
    nodes.wait(100)
    assert parents(nodes)["w0"] == "ps"
    assert nodes.got("w0", Hold) == []


def test_silence_of_a_worker_is_looked_into_only(nodes: Nodes) -> None:
    nodes.say("a0", PeerSilent(job=JOB, name="w0", seconds=50.0))
    assert nodes.got("w0", Ping)
    nodes.say("a0", PeerSilent(job=JOB + 1, name="w0", seconds=50.0))
    nodes.say("a0", PeerSilent(job=JOB, name="nobody", seconds=50.0))
    nodes.wait(50)
    assert nodes.got("w1", JobFailed) == []


def test_a_stopped_process_is_lost_like_a_dead_one(nodes: Nodes) -> None:
    nodes.mute.add("a1")
    nodes.wait(15)
    assert parents(nodes)["w1"] == "ps"
    (change,) = [event for event in nodes.events if isinstance(event, PlanChanged)]
    assert (change.version, change.reason) == (2, "aggregator 'a1' was lost: no answer for 10 s")


def test_an_aggregator_may_leave(nodes: Nodes) -> None:
    nodes.say("a0", Leave(reason="drained"))
    assert parents(nodes)["w0"] == "ps"


def test_a_lost_parameter_server_ends_the_job(nodes: Nodes) -> None:
    nodes.kill("ps")
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.message) == (
        "root_lost",
        "job 'train': parameter server 'ps' was lost: its connection closed",
    )


# ---------- aggregators come back


def test_it_comes_back_when_nothing_is_on_its_way(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    nodes.finish(1)
    nodes.clear()
    nodes.join("a0")
    assert [message.kind for message in nodes.inbox["a0"]] == ["welcome", "plan", "layout"]
    assert nodes.last("a0", Layout).last_round == 1
    assert versions(nodes) == {3}
    assert parents(nodes)["w0"] == "a0"
    consistent(nodes)
    assert nodes.plans["ps"].placements[0].retired == ()
    assert [message.kind for message in nodes.inbox["w0"]] == ["hold", "plan"]
    nodes.begin(2, SPEC)
    nodes.finish(2)
    assert nodes.coordinator.jobs[JOB].collectives.ledger.quiet


def test_it_waits_for_open_rounds_and_for_the_root(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    nodes.join("a0")
    assert nodes.last("w0", Hold).before == 2
    assert versions(nodes) == {2}
    nodes.finish(1, nodes.workers)
    assert nodes.got("a0", Plan) == []  # the root may still have to repeat results
    nodes.say("ps", Finished(job=JOB, round=1))
    assert versions(nodes) == {3}


def test_a_host_that_was_ahead_sets_the_mark(nodes: Nodes) -> None:
    nodes.kill("a0")
    nodes.mute.add("w0")
    nodes.join("a0")
    hold = nodes.last("w0", Hold)
    assert hold.before == 1
    nodes.begin(1, SPEC, ["w0"])  # crossed the Hold on its way
    nodes.begin(2, SPEC, ["w0"])
    nodes.say("w0", Held(job=JOB, nonce=hold.nonce))
    assert {nodes.last(name, Hold).before for name in nodes.workers} == {3}
    nodes.begin(1, SPEC, ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.got("a0", Plan) == []
    nodes.begin(2, SPEC, ["w1", "w2", "w3"])
    nodes.finish(2)
    assert versions(nodes) == {3}
    assert nodes.last("a0", Layout).last_round == 2


def test_workers_go_on_when_all_slots_of_the_returned_exist(nodes: Nodes) -> None:
    for round_, name in enumerate("uvw", 1):
        nodes.begin(round_, spec(name))
        nodes.finish(round_)
    nodes.kill("a0")
    nodes.clear()
    nodes.join("a0")
    nodes.clear()
    nodes.mute.clear()
    assert parents(nodes)["w0"] == "a0"
    nodes.kill("a0")
    nodes.clear()
    nodes.wait(60)
    nodes.deaf.add("a0")
    nodes.join("a0")
    assert nodes.got("a0", Plan)
    assert nodes.got("w0", Plan) == []
    for tensor in (0, 1):
        nodes.say("a0", LayoutReady(job=JOB, tensor=tensor))
        assert nodes.got("w0", Plan) == []
    nodes.say("a0", LayoutReady(job=JOB, tensor=2))
    assert nodes.last("w0", Plan).plan.placements[0].parent.name == "a0"  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["dies", "has no room"])
def test_one_that_fails_on_its_way_back_leaves_things_as_they_were(nodes: Nodes, how: str) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.kill("a0")
    nodes.clear()
    if how == "dies":
        nodes.deaf.add("a0")
        nodes.join("a0")
        nodes.kill("a0")
    else:
        nodes.refuses = lambda name, layout: "too small"
        nodes.join("a0")
        assert "'a0' has no room for tensors in use: too small" in nodes.last("a0", JobEnded).reason
    assert parents(nodes)["w0"] == "ps"
    assert [message.kind for message in nodes.inbox["w0"]] == ["hold", "plan"]
    consistent(nodes)
    # nothing had retired: nobody had sent anything under the version in between
    assert nodes.plans["ps"].placements[0].retired == ()
    nodes.begin(2, SPEC)
    nodes.finish(2)
    assert nodes.coordinator.jobs[JOB].collectives.ledger.quiet


def test_a_parent_that_dies_during_the_return_costs_nothing_either() -> None:
    nodes = Nodes(DEEP)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.kill("a0")
    nodes.deaf.add("a0")
    nodes.join("a0")
    nodes.kill("top")
    nodes.say("a0", LayoutReady(job=JOB, tensor=0))
    assert parents(nodes) == {"w0": "a0", "w1": "a0", "w2": "a1", "w3": "a1", "a0": "ps", "a1": "ps"}
    consistent(nodes)
    assert versions(nodes) == {4}


def test_hosts_are_not_held_for_long(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    nodes.clear()
    nodes.join("a0")
    nodes.wait(2.9)
    assert [message.kind for message in nodes.inbox["w0"] if message.kind != "ping"] == ["hold"]
    nodes.wait(0.2)  # round 1 goes on, so they may begin the next one
    assert [message.kind for message in nodes.inbox["w0"] if message.kind != "ping"] == ["hold", "plan"]
    assert nodes.last("w0", Plan).plan.version == 2
    nodes.finish(1)
    nodes.wait(26)
    assert len(nodes.got("w0", Hold)) == 1
    nodes.wait(2)
    assert len(nodes.got("w0", Hold)) == 2
    assert versions(nodes) == {3}


def test_an_old_answer_to_an_old_hold_does_not_count() -> None:
    nodes = Nodes(silence=100.0)
    nodes.start()
    nodes.kill("a0")
    nodes.mute.add("w3")
    nodes.join("a0")
    nodes.wait(31)
    assert [hold.nonce for hold in nodes.got("w3", Hold)] == [1, 2]
    nodes.say("w3", Held(job=JOB, nonce=1))
    assert versions(nodes) == {2}
    nodes.say("w3", Held(job=JOB, nonce=2))
    assert versions(nodes) == {3}


def test_a_loss_during_a_hold_ends_the_hold(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    nodes.join("a0")
    nodes.clear()
    nodes.kill("a1")
    assert nodes.got("w0", Plan)
    nodes.join("a1")
    nodes.finish(1)
    nodes.wait(60)
    assert parents(nodes) == {"w0": "a0", "w1": "a1", "w2": "a0", "w3": "a1", "a0": "ps", "a1": "ps"}
    consistent(nodes)


# ---------- workers


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
    nodes.say("w3", Leave())
    nodes.begin(1, SPEC, ["w0"])
    failure = nodes.last("w1", RoundFailed)
    assert failure.message.endswith("rank 3 (host w3) has left the job")
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


# ---------- several jobs


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


def test_one_that_comes_back_and_makes_no_slots_is_done_without() -> None:
    nodes = Nodes(silence=9.0)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.kill("a0")
    nodes.deaf.add("a0")
    nodes.join("a0")
    nodes.clear()
    nodes.wait(8)
    assert nodes.got("w0", Plan) == []
    nodes.wait(1.5)
    assert nodes.last("w0", Plan).plan.placements[0].parent.name == "ps"  # type: ignore[union-attr]
    assert "it did not make slots within 9 s" in nodes.last("a0", JobEnded).reason
    assert nodes.plans["ps"].placements[0].retired == ()


def test_a_root_that_makes_no_slots_after_a_restart_ends_the_job() -> None:
    nodes = Nodes(two_level(1, 0), silence=9.0)
    nodes.start()
    nodes.begin(1, SPEC)
    nodes.restart()
    nodes.deaf.add("ps")
    nodes.join("ps")
    nodes.resume("w0", 2, [(1, SPEC)])
    nodes.wait(9.5)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, "did not make slots within 9 s" in failed.message) == ("root_lost", True)
