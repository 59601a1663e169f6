"""Aggregators and the PS die at every phase: aggregators are routed around (re-parenting), a lost PS ends the job."""

import pytest

from inanet.coordinator.events import PlanChanged
from inanet.messages.control import (
    Finished,
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
)
from inanet.planning.topology import Topology
from inanet.proto.common.plan import Retired
from tests.coordinator.nodes import JOB, Nodes, consistent, parents, spec, two_level, versions

SPEC = spec()
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("a1",)},
)


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
    assert job.rounds.ledger.quiet
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
        assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


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
    assert job.plans.retired.settled(job.hosts) == 0
    nodes.say("w0", Pong(nonce=1))
    assert job.plans.retired.settled(job.hosts) == 0
    nodes.begin(1, SPEC, ["w1"])
    nodes.say("w1", Pong(nonce=1))
    # w1 had begun round 1 when it answered: that round may know the old id
    assert job.plans.retired.settled(job.hosts) == 0
    nodes.begin(1, SPEC, ["w0"])
    nodes.finish(1, ["w0", "w1"])
    assert job.plans.retired.settled(job.hosts) == 0
    nodes.say("ps", Finished(job=JOB, round=1))
    assert job.plans.retired.settled(job.hosts) == 2


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


def test_a_parameter_server_that_stays_away_ends_the_job(nodes: Nodes) -> None:
    nodes.kill("ps")
    nodes.wait(nodes.settings.resume - 0.1)
    assert not nodes.got("w0", JobFailed)
    nodes.wait(0.2)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.message) == (
        "root_lost",
        "job 'train': parameter server 'ps' was lost: its connection closed, and it did not come back within 15 s",
    )


@pytest.mark.parametrize("finished", [(), ("w0",), ("w0", "w1", "w2", "w3")], ids=len)
def test_a_parameter_server_that_comes_back_gets_slots_and_everything_again(
    nodes: Nodes, finished: tuple[str, ...]
) -> None:
    """Whether nobody has the result of the round yet, somebody, or all, without the root's confirmation."""
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.begin(2, SPEC)
    nodes.finish(2, finished)
    before = nodes.plans["w0"].version
    nodes.kill("ps")
    nodes.clear()
    nodes.deaf.add("ps")
    nodes.join("ps")
    assert nodes.last("ps", Layout).last_round == (2 if len(finished) == 4 else 1)
    # who sends to it must send again; a worker under an aggregator has a parent that knows everything
    assert [plan.attach for plan in nodes.got("a0", Plan)] == [(0,)]
    assert not nodes.got("w0", Plan), "workers wait until it has slots"
    nodes.say("ps", LayoutReady(job=JOB, tensor=nodes.last("ps", Layout).layout.tensor))
    assert [(plan.plan.version, plan.attach) for plan in nodes.got("w0", Plan)] == [(before + 1, ())]
    nodes.deaf.clear()
    nodes.finish(2)
    nodes.begin(3, SPEC)
    nodes.finish(3)
    # the aggregators can still come and go as before
    nodes.kill("a0")
    nodes.join("a0")
    nodes.wait(60)
    assert nodes.plans["w0"].placements[0].parent.name == "a0"
    assert not nodes.got("w0", JobFailed)


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
