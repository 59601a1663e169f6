"""What becomes of jobs, and of their keys, when somebody who knows them may not take part any more."""

import pytest

from inanet.coordinator.events import JobOver, KeyChanged, MembershipChanged
from inanet.messages.control import (
    Held,
    Hold,
    JobFailed,
    Leave,
    Plan,
    Reject,
    RoundFailed,
)
from inanet.planning.topology import Topology
from inanet.planning.trees import Performance
from inanet.trust.certificates import Certified
from tests.coordinator.guarded import Guarded
from tests.coordinator.nodes import FIRST_KEY, JOB, Nodes, consistent, parents, spec
from tests.coordinator.test_elasticity import judge


@pytest.fixture
def nodes() -> Guarded:
    nodes = Guarded()
    nodes.start()
    return nodes


def test_a_revoked_aggregator_is_gone_and_its_key_with_it(nodes: Guarded) -> None:
    nodes.begin(1, spec())
    nodes.finish(1)
    nodes.clear()
    nodes.revoke("a0")
    assert "the certificate of a0 was revoked" in nodes.last("a0", Reject).reason
    assert nodes.got("a0", Plan) == []
    assert nodes.keys == {FIRST_KEY + 1}
    assert "a0" not in parents(nodes).values()
    assert "a0" not in nodes.plans["ps"].placements[0].children[0].name
    consistent(nodes)
    (changed,) = [event for event in nodes.events if isinstance(event, KeyChanged)]
    assert (changed.epoch, changed.reason) == (2, "the certificate of a0 was revoked")
    assert not any(isinstance(event, MembershipChanged | JobOver) for event in nodes.events)
    # once, however often the list is looked at
    nodes.revoke()
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.begin(2, spec())
    nodes.finish(2)
    assert [nodes.got(name, RoundFailed) for name in nodes.workers] == [[]] * 4


def test_what_is_under_way_ends_first_and_nothing_else_begins(nodes: Guarded) -> None:
    nodes.begin(1, spec(), ["w0", "w1"])
    nodes.clear()
    nodes.mute.add("w0")
    nodes.revoke("a0")
    assert nodes.keys == {FIRST_KEY}
    hold = nodes.last("w2", Hold)
    assert hold.before == 2
    # w0 had gone on before it heard of that: the others catch up
    nodes.begin(2, spec("v"), ["w0"])
    nodes.mute.discard("w0")
    nodes.say("w0", Held(job=JOB, nonce=hold.nonce))
    assert nodes.last("w2", Hold) == Hold(job=JOB, nonce=hold.nonce, before=3)
    # longer than aggregators that come back are waited for
    nodes.wait(nodes.settings.hold * 3)
    assert len(nodes.got("w2", Hold)) == 2
    nodes.begin(1, spec(), ["w2", "w3"])
    nodes.finish(1)
    nodes.begin(2, spec("v"), ["w1", "w2", "w3"])
    nodes.finish(2, nodes.workers)
    assert nodes.keys == {FIRST_KEY}
    nodes.finish(2, ["ps"])
    assert nodes.keys == {FIRST_KEY + 1}
    assert [nodes.got(name, RoundFailed) for name in nodes.workers] == [[]] * 4


def test_who_has_gone_before_it_is_revoked_knows_the_key_too(nodes: Guarded) -> None:
    nodes.kill("a1")
    assert nodes.keys == {FIRST_KEY}
    nodes.revoke("a1")
    assert nodes.keys == {FIRST_KEY + 1}
    # what it knew is of no use any more, so neither is its coming again
    nodes.serials["a1"] = "another"
    nodes.join("a1")
    assert nodes.plans["a1"].key == FIRST_KEY + 1
    consistent(nodes)
    nodes.revoke("a1")
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.revoke("another")
    assert nodes.keys == {FIRST_KEY + 2}


def test_who_waits_to_come_back_does_so_under_the_new_key(nodes: Guarded) -> None:
    nodes.kill("a1")
    nodes.begin(1, spec(), ["w0"])
    nodes.join("a1")
    nodes.revoke("a0")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.wait(nodes.settings.hold * 11)
    assert parents(nodes) == {"w0": "ps", "w2": "ps", "w1": "a1", "w3": "a1", "a1": "ps"}
    assert nodes.keys == {FIRST_KEY + 1}


def test_what_is_known_of_the_workers_and_wanted_for_them_stays(nodes: Guarded) -> None:
    (job,) = nodes.coordinator.jobs.values()
    assert job.performed(Performance("w0", 1.0, 1.0)) == ()
    nodes.begin(1, spec(), ["w0"])
    wanted = Topology(roots=("ps",), aggregators={"a1": "ps"}, workers=dict.fromkeys(nodes.workers, ("a1",)))
    job.rearrange(wanted, {}, nodes.now)
    nodes.revoke("a0")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    assert [job.performed(Performance(name, 1.0, 1.0)) != () for name in ("w1", "w2", "w3")] == [
        False,
        False,
        True,
    ]
    nodes.wait(nodes.settings.hold * 11)
    assert parents(nodes) == {**dict.fromkeys(nodes.workers, "a1"), "a1": "ps"}


def test_a_revoked_parameter_server_comes_back_with_another_certificate(nodes: Guarded) -> None:
    nodes.begin(1, spec(), ["w0"])
    nodes.revoke("ps")
    assert nodes.keys == {FIRST_KEY}, "nobody can end the round without it"
    nodes.serials["ps"] = "another"
    nodes.join("ps")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    assert nodes.plans["ps"].key == FIRST_KEY + 1


def test_without_one_the_job_ends_with_the_reason(nodes: Guarded) -> None:
    nodes.revoke("ps")
    nodes.wait(nodes.settings.resume + 1)
    failed = nodes.last("w0", JobFailed)
    assert failed.error == "root_lost"
    assert "it was refused: the certificate of ps was revoked" in failed.message


def test_a_revoked_worker_ends_its_job_with_the_reason(nodes: Guarded) -> None:
    nodes.begin(1, spec())
    nodes.revoke("w3")
    nodes.wait(nodes.settings.grace + 1)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.ranks) == ("worker_lost", (3,))
    assert "the certificate of w3 was revoked" in failed.message
    assert nodes.got("w3", JobFailed) == []


def test_or_is_left_out_of_an_elastic_one_with_one_new_key() -> None:
    nodes = Guarded(elastic=True)
    nodes.start()
    nodes.begin(1, spec())
    nodes.revoke("w3", "a1")
    judge(nodes, 1, complete=False)
    assert nodes.keys == {FIRST_KEY + 1}
    assert nodes.plans["w0"].ranks == 3
    nodes.revoke()
    assert nodes.keys == {FIRST_KEY + 1}


def test_who_is_turned_out_of_a_job_that_forms_has_never_known_its_key() -> None:
    nodes = Guarded()
    nodes.join("ps", "a0", "a1", "w0", "w1", "w2")
    nodes.revoke("w2")
    assert nodes.got("w2", Plan) == []
    assert not any(hasattr(message, "key") for message in nodes.inbox["w2"])
    nodes.serials["w2"] = "another"
    nodes.join("w2", "w3")
    assert nodes.keys == {FIRST_KEY}


def test_whom_an_earlier_coordinator_has_told_nobody_knows(nodes: Guarded) -> None:
    """Revoked while there was none, and never seen again."""
    nodes.restart()
    nodes.revoked.add("a1")
    for name in ("ps", "a0", "w0", "w1", "w2", "w3"):
        nodes.resume(name, 1)
    nodes.wait(nodes.settings.resume)
    assert nodes.keys == {FIRST_KEY}
    nodes.revoke()
    (key,) = nodes.keys
    assert key != FIRST_KEY
    nodes.revoke()
    assert nodes.keys == {key}


def test_connections_without_certificates_are_none_of_this() -> None:
    nodes = Nodes()
    nodes.start()
    nodes.coordinator.recheck(lambda certificate: "revoked" if certificate else "", nodes.now)
    nodes.pump()
    assert {plan.key for plan in nodes.plans.values()} == {FIRST_KEY}


def test_one_that_says_nothing_is_turned_out_too(nodes: Guarded) -> None:
    nodes.connect("silent", Certified(frozenset(["x"]), frozenset(["worker"]), serial="silent"))
    nodes.revoke("silent")
    assert isinstance(nodes.inbox["silent"][-1], Reject)


def test_a_worker_that_has_left_a_job_about_to_end_does_not_keep_it_from_ending(nodes: Guarded) -> None:
    nodes.say("w3", Leave())
    nodes.revoke("w3")
    assert nodes.keys == {FIRST_KEY}
    for name in ("w0", "w1", "w2"):
        nodes.say(name, Leave())
    assert [event.error for event in nodes.events if isinstance(event, JobOver)] == [None]


def test_a_job_about_to_end_gets_no_other_key_and_makes_no_sums_without_who_has_left(nodes: Guarded) -> None:
    """Its hosts hold for the other key already when one of them leaves."""
    nodes.mute.add("w0")
    nodes.revoke("a0")
    hold = nodes.last("w0", Hold)
    nodes.say("w3", Leave())
    nodes.mute.discard("w0")
    nodes.say("w0", Held(job=JOB, nonce=hold.nonce))
    assert nodes.keys == {FIRST_KEY}
    assert not any(isinstance(event, MembershipChanged | KeyChanged) for event in nodes.events)
    # nobody holds any more
    nodes.revoke()
    nodes.begin(1, spec(), ["w0", "w1", "w2"])
    for name in ("w0", "w1", "w2"):
        assert nodes.last(name, RoundFailed).error == "worker_lost"
        assert isinstance([one for one in nodes.inbox[name] if isinstance(one, Plan | Hold)][-1], Plan)
        nodes.say(name, Leave())
    assert [event.error for event in nodes.events if isinstance(event, JobOver)] == [None]
