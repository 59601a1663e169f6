"""Aggregators that come back take their place again, and the holds that this takes (quiet moment)."""

import itertools

import pytest

from inanet.coordinator.events import ReturnDelayed
from inanet.messages.control import (
    Finished,
    Held,
    Hold,
    JobEnded,
    Layout,
    LayoutReady,
    Plan,
    Pong,
)
from inanet.planning.topology import Topology
from tests.coordinator.nodes import JOB, Nodes, consistent, parents, spec, versions

SPEC = spec()
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("a1",)},
)


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
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


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
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


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


def test_one_that_goes_again_while_hosts_hold_for_it_does_not_enter(nodes: Nodes) -> None:
    nodes.kill("a1")
    nodes.begin(1, spec(), ["w0"])
    nodes.join("a1")
    nodes.kill("a1")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    version = nodes.plans["w0"].version
    nodes.clear()
    nodes.finish(1)
    # who holds for nobody is told to go on, with the trees as they are
    assert nodes.last("w0", Plan).plan.version == version
    assert "a1" not in parents(nodes).values()
    nodes.begin(2, spec())
    nodes.finish(2)
    assert nodes.coordinator.jobs[JOB].rounds.completing is False
    consistent(nodes)


def test_a_confirmation_that_was_lost_keeps_nobody_out(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    nodes.finish(1, nodes.workers)  # the parameter server's word on it is lost with the aggregator
    nodes.begin(2, SPEC)
    nodes.join("a0")
    assert versions(nodes) == {2}
    nodes.finish(2)
    # what confirms a round confirms those before it
    assert versions(nodes) == {3}
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


@pytest.mark.parametrize("late", ["host", "round", "root"])
def test_an_attempt_that_fails_is_told_with_its_reason_and_backs_off(nodes: Nodes, late: str) -> None:
    nodes.begin(1, SPEC)
    nodes.kill("a0")
    if late == "host":
        nodes.finish(1)
        nodes.mute.add("w3")
    elif late == "root":
        nodes.finish(1, nodes.workers)
    nodes.join("a0")
    nodes.clear()
    told = []
    for _ in range(4000):
        nodes.wait(0.1)
        if late == "host":
            nodes.say("w3", Pong(nonce=1))
        told += [(nodes.now, event) for event in nodes.events if isinstance(event, ReturnDelayed)]
        nodes.events.clear()
    reason = {
        "host": "no answer from w3, asked to hold within 3 s",
        "round": "round 1 is not over for ranks 0-3 within 3 s",
        "root": "ps did not confirm round 1 within 3 s",
    }[late]
    if late == "round":
        # it fails when its own time is up
        told = told[:2]
    assert {event.reason for _, event in told} == {reason}
    assert {event.names for _, event in told} == {("a0",)}
    pauses = [round(later - sooner) for (sooner, _), (later, _) in itertools.pairwise(told)]
    assert pauses == [30, 60, 120, 240][: len(pauses)]
    assert len(pauses) >= 1
