"""How a job comes about: in any start order, with a sentence for who does not fit, in time or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.coordinator.events import JobOver, JobStarted, PeerJoined, PeerLost, PeerRefused
from inanet.messages.control import (
    PROTOCOL,
    Begin,
    JobFailed,
    LayoutReady,
    Leave,
    Ping,
    Plan,
    Pong,
    Reject,
    Stop,
    Waiting,
    Welcome,
)
from inanet.planning.topology import Topology
from inanet.wire.endpoint import endpoint
from tests.coordinator.nodes import FIRST_KEY, JOB, Nodes, spec, two_level

EVERYBODY = ["ps", "a0", "a1", "w0", "w1", "w2", "w3"]


def reason(nodes: Nodes, name: str) -> str:
    return nodes.last(name, Reject).reason


@settings(max_examples=40)
@given(st.permutations(EVERYBODY))
def test_start_order_does_not_matter(order: list[str]) -> None:
    nodes = Nodes()
    nodes.join(*order[:-1])
    assert not any(nodes.got(name, Plan) for name in order[:-1])
    nodes.join(order[-1])
    for name in EVERYBODY:
        (plan,) = nodes.got(name, Plan)
        assert (plan.plan.job, plan.plan.version, plan.plan.key, plan.plan.ranks) == (JOB, 1, FIRST_KEY, 4)
        assert plan.attach == ()
    assert [child.name for child in nodes.plans["ps"].placements[0].children] == ["a0", "a1"]
    assert [child.name for child in nodes.plans["a1"].placements[0].children] == ["w1", "w3"]
    assert JobStarted(JOB, "train", 4, resumed=False, epoch=1) in nodes.events


def test_the_same_plan_whatever_the_order() -> None:
    views = []
    for order in (EVERYBODY, EVERYBODY[::-1]):
        nodes = Nodes()
        nodes.join(*order)
        views.append(nodes.plans)
    assert views[0] == views[1]


def test_a_worker_is_welcomed_with_the_number_of_its_job() -> None:
    nodes = Nodes(join=50.0, silence=9.0)
    nodes.join("w0")
    nodes.now += 5
    nodes.join("w1", "a0")
    assert nodes.last("w1", Welcome) == Welcome(job=JOB, silence=9.0, deadline=45.0, epoch=1)
    assert nodes.last("a0", Welcome) == Welcome(silence=9.0)
    assert PeerJoined(nodes.ids["a0"], "a0", "aggregator") in nodes.events


def test_those_who_wait_are_told_for_whom() -> None:
    nodes = Nodes(waiting=3.0)
    nodes.join("w1", "a1")
    assert nodes.last("w1", Waiting).missing == ("ranks 0, 2 and 3", "aggregator a1", "parameter server ps")
    nodes.join("w0", "w3")
    nodes.clear()
    nodes.wait(2.9)
    assert nodes.got("w1", Waiting) == []
    nodes.wait(3.2)
    expected = Waiting(joined=3, expected=4, missing=("rank 2", "aggregator a0", "parameter server ps"))
    assert nodes.got("w1", Waiting) == nodes.got("w3", Waiting) == [expected] * 2
    assert nodes.got("a1", Waiting) == []


def test_waiting_has_an_end_that_names_the_missing() -> None:
    nodes = Nodes(join=20.0)
    nodes.join("ps", "a0", "w0", "w1")
    nodes.wait(21)
    failed = nodes.last("w0", JobFailed)
    assert failed == nodes.last("w1", JobFailed)
    assert failed == JobFailed(
        job=JOB,
        error="timeout",
        message="job 'train' is not complete after 20 s: joined 2 of 4 ranks, "
        "missing: ranks 2 and 3, aggregator a1",
        ranks=(2, 3),
    )
    assert JobOver(JOB, "train", "timeout", failed.message) in nodes.events
    assert nodes.coordinator.timer() is not None  # pings go on
    # and the same connections may try again
    for name in ("w0", "w1"):
        nodes.say(name, nodes.hello(name))
    nodes.join("a1", "w2", "w3")
    assert nodes.last("w0", Plan).plan.key == FIRST_KEY + 1


TOKENS = "has another token than this coordinator; use the same on all nodes"


def test_those_who_wait_for_one_that_was_turned_away_hear_so_and_why() -> None:
    nodes = Nodes(two_level(3, 1), join=20.0, waiting=3.0)
    nodes.join("w0")
    nodes.clear()
    nodes.join("w1", token="another one")
    nodes.wait(0.3)
    why = f"'w1' {TOKENS}"
    waited = (f"ranks 1 and 2 (turned away: {why})", "aggregator a0", "parameter server ps")
    assert nodes.got("w0", Waiting) == [Waiting(joined=1, expected=3, missing=waited)]
    # who comes later, too, and about a server as well
    nodes.join("a0", token="another one")
    nodes.join("ps", "w2")
    assert nodes.last("w2", Waiting).missing == (
        f"rank 1 (turned away: {why})",
        f"aggregator a0 (turned away: 'a0' {TOKENS})",
    )
    (forming,) = nodes.coordinator.overview(nodes.now).jobs
    assert forming.missing == nodes.last("w2", Waiting).missing
    nodes.wait(20)
    failed = nodes.last("w0", JobFailed).message
    assert f"missing: rank 1 (turned away: {why}), aggregator a0 (turned away: " in failed


def test_who_is_let_in_after_all_is_not_called_turned_away() -> None:
    nodes = Nodes(two_level(3, 1))
    nodes.join("w1", "a0", token="another one")
    nodes.join("w1", "a0", "w0")
    assert nodes.last("w0", Waiting).missing == ("rank 2", "parameter server ps")
    # nor does it concern another job, or anybody for ever
    nodes.join("w2", token="another one", job="other")
    nodes.wait(1)
    assert nodes.last("w0", Waiting).missing == ("rank 2", "parameter server ps")
    nodes.join("w2", token="another one")
    nodes.wait(1)
    assert "turned away" in nodes.last("w0", Waiting).missing[0]
    nodes.kill("w0")
    nodes.kill("w1")
    nodes.join("w2", token="another one")
    nodes.wait(61)
    nodes.join("w0")
    assert nodes.last("w0", Waiting).missing[0] == "ranks 1 and 2"


def test_who_was_turned_away_from_a_job_is_not_of_the_next_one_of_its_name() -> None:
    """Whether the job did not come about, was given up by its members, or ran."""
    nodes = Nodes(two_level(2, 1), join=20.0)

    def refuse() -> None:
        nodes.join("w1", token="another one")
        nodes.wait(0.3)

    def waits(name: str) -> str:
        return nodes.last(name, Waiting).missing[0]

    nodes.join("ps", "a0", "w0")
    refuse()
    assert "turned away" in waits("w0")
    nodes.wait(20)
    nodes.say("w0", nodes.hello("w0"))
    assert waits("w0") == "rank 1"
    refuse()
    nodes.kill("w0")
    nodes.join("w0")
    assert waits("w0") == "rank 1"
    nodes.join("w1")
    runs = nodes.ids["w1"]
    refuse()
    nodes.ids["w1"] = runs
    for name in ("w0", "w1"):
        nodes.say(name, Leave())
    nodes.join("w0")
    assert waits("w0") == "rank 1"
    # people still hear of it
    assert nodes.coordinator.overview(nodes.now).refused


def test_one_who_leaves_before_the_job_is_complete_is_missing_again() -> None:
    nodes = Nodes()
    nodes.join("w0", "w1")
    nodes.kill("w0")
    nodes.join("ps", "a0", "a1", "w2", "w3")
    assert nodes.last("w3", Waiting).missing == ("rank 0",)
    nodes.join("w0")
    assert nodes.got("w1", Plan)


def test_an_aggregator_that_goes_before_the_job_is_complete_is_missing_again() -> None:
    nodes = Nodes()
    nodes.join("ps", "a0", "a1", "w0", "w1", "w2")
    nodes.kill("a1")
    nodes.join("w3")
    assert nodes.last("w3", Waiting).missing == ("aggregator a1",)
    nodes.join("a1")
    assert nodes.got("w3", Plan)


def test_hosts_with_several_ranks_join_as_one() -> None:
    nodes = Nodes(two_level(2, 1))
    nodes.join("ps", "a0")
    nodes.join("w0", ranks=(0, 1, 2), world=5)
    nodes.join("w1", ranks=(4, 3), world=5)
    assert nodes.plans["a0"].ranks == 5
    assert len(nodes.plans["a0"].placements[0].children) == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"protocol": 1}, f"speaks control protocol 1, this coordinator {PROTOCOL}"),
        ({"token": "wrong"}, "has another token"),
        ({"token": "wröng"}, "has another token"),
        ({"name": "w77"}, "worker 'w77' is not in the topology; that role has w0, w1, w2 and w3"),
        ({"name": "a0"}, "worker 'a0' is not in the topology"),
        ({"role": "aggregator"}, "aggregator 'w1' is not in the topology; that role has a0, a1 and ps"),
        ({"role": "ps"}, "ps 'w1' is not in the topology"),
        ({"ranks": ()}, "brings no rank"),
        ({"ranks": (1, 1)}, "names a rank twice"),
        ({"ranks": (1, 9)}, "brings rank 9, but job 'train' has 4 ranks (0 to 3)"),
        ({"ranks": (0,)}, "rank 0 of job 'train' is on host 'w0' already"),
        (
            {"endpoint": endpoint("0.0.0.0", 9)},
            "worker 'w1' receives at 0.0.0.0, which is no address of a host",
        ),
        ({"endpoint": endpoint("239.1.2.3", 9)}, "receives at 239.1.2.3"),
        ({"endpoint": endpoint("255.255.255.255", 9)}, "receives at 255.255.255.255"),
        ({"world": 8}, "job 'train' was started for 8 ranks on host 'w1' but 4 on 'w0'"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(changes: dict[str, object], sentence: str) -> None:
    nodes = Nodes()
    nodes.join("w0")
    nodes.join("w1", **changes)
    assert sentence in reason(nodes, "w1")
    assert nodes.last("w1", Reject).retry_after is None
    assert any(isinstance(event, PeerRefused) for event in nodes.events)
    # nobody else notices
    nodes.join("ps", "a0", "a1", "w1", "w2", "w3")
    assert nodes.got("w0", Plan)


def test_the_33rd_child_is_refused() -> None:
    nodes = Nodes(two_level(33, 0))
    nodes.join("ps", *[f"w{index}" for index in range(33)])
    assert "'ps' would have 33 children, at most 32 are possible" in reason(nodes, "w32")
    assert nodes.got("w31", Reject) == []


def test_a_name_can_be_connected_once() -> None:
    nodes = Nodes(probe=3.0)
    nodes.join("a0", "w0")
    for name in ("a0", "w0"):
        first = nodes.ids[name]
        nodes.clear()
        nodes.join(name)
        rejected = nodes.last(name, Reject)
        assert f"{name!r} is connected already" in rejected.reason
        assert rejected.retry_after == 3.0
        nodes.ids[name] = first


def test_a_dead_twin_makes_way() -> None:
    nodes = Nodes(probe=3.0, silence=30.0)
    nodes.join("a0")
    first = nodes.ids["a0"]
    nodes.join("a0")
    assert nodes.got("a0", Reject)
    nodes.wait(3.1)  # the first one does not answer the probe
    assert PeerLost(first, "a0", "aggregator", "no answer for 3 s") in nodes.events
    nodes.join("a0")
    assert nodes.got("a0", Welcome)


def test_a_running_job_takes_nobody_in() -> None:
    nodes = Nodes(two_level(5, 2))
    nodes.join("ps", "a0", "a1")
    nodes.join("w0", "w1", "w2", "w3", world=4)
    nodes.join("w4", ranks=(1,), world=4)
    assert reason(nodes, "w4") == "job 'train' is running; wait until it ends or choose another name"
    first = nodes.ids["w0"]
    nodes.join("w0", world=4)
    assert "worker 'w0' is connected already" in reason(nodes, "w0")
    nodes.ids["w0"] = first
    nodes.say("w0", Pong(nonce=1))  # the first one lives
    nodes.clear()
    nodes.wait(20)
    assert nodes.got("w1", JobFailed) == []


def test_ranks_that_come_back_faster_than_others_leave_are_asked_to_wait() -> None:
    nodes = Nodes(two_level(2, 0))
    nodes.start()
    nodes.say("w0", Leave(reason="done"))
    nodes.join("w0")
    rejected = nodes.last("w0", Reject)
    assert rejected.reason == "job 'train' has still to end: rank 0 (host w0) has left the job: done"
    assert rejected.retry_after == 0.25
    nodes.say("w1", Leave(reason="done"))
    nodes.join("w0", "w1")
    assert nodes.plans["w0"].version == nodes.plans["w1"].version == 1


def test_another_job_may_run_beside() -> None:
    nodes = Nodes()
    nodes.join("ps", "a0", "a1")
    nodes.join("w0", job="one", ranks=(0,), world=1)
    nodes.join("w1", job="two", ranks=(0,), world=1)
    one, two = nodes.plans["w0"], nodes.plans["w1"]
    assert one.job != two.job
    assert one.key != two.key


@pytest.mark.parametrize(
    "message",
    [Begin(job=JOB, round=1, spec=spec()), LayoutReady(job=JOB, tensor=0), Stop(reason="x"), Plan],
)
def test_a_node_says_hello_first_and_nothing_that_coordinators_say(message: object) -> None:
    nodes = Nodes()
    nodes.start()
    what = Plan(plan=nodes.plans["w0"]) if message is Plan else message
    nodes.coordinator.connected(500, nodes.now)
    nodes.ids["x"], nodes.inbox["x"] = 500, []
    nodes.say("x", what)  # type: ignore[arg-type]
    assert "the first message must be hello" in reason(nodes, "x")
    if isinstance(what, Stop | Plan):
        nodes.say("w0", what)
        assert "is a message of coordinators, not of worker 'w0'" in reason(nodes, "w0")
        assert nodes.got("w1", JobFailed)


def test_hello_is_said_once() -> None:
    nodes = Nodes()
    nodes.join("a0")
    nodes.say("a0", nodes.hello("a0"))
    assert "has said hello already" in reason(nodes, "a0")


def test_a_connection_that_says_nothing_is_closed() -> None:
    nodes = Nodes(hello=10.0)
    nodes.coordinator.connected(500, nodes.now)
    nodes.ids["x"], nodes.inbox["x"] = 500, []
    nodes.wait(10.1)
    assert "no hello within 10 s" in reason(nodes, "x")
    nodes.coordinator.disconnected(500, nodes.now)
    assert nodes.coordinator.timer() is None


def test_pings_are_answered_in_both_directions() -> None:
    nodes = Nodes(silence=9.0)
    nodes.join("a0")
    nodes.say("a0", Ping(nonce=77))
    assert nodes.last("a0", Pong) == Pong(nonce=77)
    nodes.wait(9.5)
    assert [ping.nonce for ping in nodes.got("a0", Ping)] == [1, 2, 3]
    nodes.mute.add("a0")
    nodes.wait(30)
    (lost,) = [event for event in nodes.events if isinstance(event, PeerLost)]
    assert (lost.name, lost.reason) == ("a0", "no answer for 9 s")


def test_who_says_farewell_has_left_and_who_falls_silent_is_lost() -> None:
    nodes = Nodes(silence=9.0)
    nodes.join("a0")
    nodes.join("a1")
    nodes.say("a0", Leave(reason="asked to stop"))
    nodes.mute.add("a1")
    nodes.wait(30)
    gone = {event.name: (event.left, event.reason) for event in nodes.events if isinstance(event, PeerLost)}
    assert gone == {"a0": (True, "it left: asked to stop"), "a1": (False, "no answer for 9 s")}


def test_a_coordinator_that_was_stopped_itself_blames_nobody() -> None:
    nodes = Nodes(silence=9.0)
    nodes.start()
    nodes.mute |= set(nodes.ids)
    nodes.wait(4)  # a ping is out
    nodes.now += 100  # SIGSTOP, SIGCONT: the answers are still in the socket when the timer fires
    nodes.coordinator.on_timer(nodes.now)
    nodes.pump()
    assert not any(isinstance(event, PeerLost) for event in nodes.events)
    nodes.mute.clear()
    for name in nodes.ids:
        nodes.say(name, Pong(nonce=1))
    nodes.wait(60)
    assert not any(isinstance(event, PeerLost) for event in nodes.events)


def test_everybody_is_told_when_the_coordinator_stops() -> None:
    nodes = Nodes()
    nodes.start()
    nodes.coordinator.stop("SIGTERM")
    nodes.pump()
    assert all(nodes.last(name, Stop).reason == "SIGTERM" for name in EVERYBODY)


def test_workers_that_miss_the_topology_of_two_trees_wait_for_both_roots() -> None:
    topology = Topology(roots=("p", "q"), workers={"w0": ("p", "q"), "w1": ("p", "q")})
    nodes = Nodes(topology)
    nodes.join("w0", "w1", "p")
    assert nodes.last("w1", Waiting).missing == ("parameter server p", "parameter server q")
    nodes.join("q")
    assert [place.tree for place in nodes.plans["w0"].placements] == [0, 1]
    assert [place.tree for place in nodes.plans["q"].placements] == [1]
