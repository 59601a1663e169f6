"""A member joins, takes part in rounds, and waits while it is held."""

import numpy as np
import pytest

from inanet.member.identity import Failed
from inanet.messages.control import (
    Begin,
    Finished,
    Held,
    Hello,
    Hold,
    JobEnded,
    Layout,
    LayoutDrop,
    LayoutReady,
    Leave,
    PeerSilent,
    Ping,
    Pong,
    Refuse,
    Reject,
    RoundFailed,
    Stop,
    Waiting,
    Welcome,
)
from inanet.proto.common import events
from tests.member.script import JOB, OTHER, SPEC, Script, layout_of


class TestJoining:
    """From Hello to the first plan."""

    def test_hello_says_who_it_is(self, script: Script) -> None:
        [hello] = script.said()
        assert isinstance(hello, Hello)
        assert (hello.name, hello.role, hello.job, hello.ranks, hello.world) == (
            "w1",
            "worker",
            "train",
            (1,),
            2,
        )
        assert (hello.endpoint, hello.rx_window, hello.resume) == (script.devices[1].endpoint, 100, ())

    def test_it_is_joined_with_the_plan_and_not_before(self, script: Script) -> None:
        script.hear(Welcome(job=JOB, silence=10.0))
        assert (script.member.welcomed, script.member.joined, script.member.silence) == (True, False, 10.0)
        script.hear(script.plan())
        assert script.member.joined
        assert script.member.serves(JOB)
        assert not script.member.serves(JOB + 1)

    def test_who_is_missing_is_passed_on(self, script: Script) -> None:
        script.hear(Waiting(joined=2, expected=4, missing=("rank 0", "aggregator a1")))
        assert script.progress == ["joined 2 of 4, missing: rank 0, aggregator a1"]

    def test_pings_are_answered(self, script: Script) -> None:
        script.said()
        assert script.hear(Ping(nonce=9)) == [Pong(nonce=9)]

    def test_rejections_and_stops_are_noted(self, script: Script) -> None:
        reject = Reject(reason="full", retry_after=1.0)
        script.hear(reject, Stop(reason="restart"))
        assert script.member.rejected == reject
        assert script.progress == ["full"]
        assert script.member.stopped == "restart"
        script.member.connected()
        assert script.member.rejected is None

    def test_leaving_is_said(self, script: Script) -> None:
        script.said()
        script.member.leave("enough")
        assert script.said() == [Leave(reason="enough")]

    def test_tensors_that_come_before_their_plan_wait_for_it(self) -> None:
        script = Script(role="aggregator")
        script.said()
        layout = Layout(job=JOB, layout=layout_of(SPEC), last_round=0)
        assert script.hear(layout) == []
        assert script.hear(script.plan()) == [LayoutReady(job=JOB, tensor=0)]

    def test_tensors_of_a_job_that_ended_first_do_not(self) -> None:
        script = Script(role="aggregator")
        script.said()
        script.hear(Layout(job=JOB, layout=layout_of(SPEC), last_round=0), JobEnded(job=JOB, reason="over"))
        assert script.hear(script.plan()) == []


class TestRounds:
    """Begin, data, Finished."""

    def test_a_round_goes_through(self, joined: Script) -> None:
        mine = joined.begin(1)
        assert joined.said() == [Begin(job=JOB, round=1, spec=SPEC)]
        theirs = np.full(300, 10, np.int32)
        joined.other.begin(JOB, 0, 1, [theirs], joined.clock.now)
        joined.run()
        assert joined.done == [(1, None)]
        assert joined.said() == [Finished(job=JOB, round=1)]
        assert (mine == 11).all()
        assert (theirs == 11).all()

    def test_a_round_on_a_new_tensor_waits_for_its_layout(self, joined: Script) -> None:
        joined.begin(1, OTHER)
        assert joined.said() == [Begin(job=JOB, round=1, spec=OTHER)]
        joined.run()
        assert joined.done == []
        layout = layout_of(OTHER, 1)
        for node in (joined.root, joined.other):
            node.add_layout(JOB, layout)
        assert joined.hear(Layout(job=JOB, layout=layout, last_round=0)) == []
        joined.other.begin(JOB, 1, 1, [np.ones(200, np.float32)], joined.clock.now)
        joined.run()
        assert joined.done == [(1, None)]

    def test_rounds_count_up_by_one(self, joined: Script) -> None:
        joined.begin(1)
        assert joined.member.next_round == 2
        for wrong in (1, 3):
            with pytest.raises(ValueError, match=f"round {wrong} does not follow round 1"):
                joined.begin(wrong)
        assert joined.member.next_round == 2

    def test_a_dropped_tensor_is_waited_for_again(self, joined: Script) -> None:
        joined.begin(1)
        joined.hear(LayoutDrop(job=JOB, tensor=0))
        fresh = layout_of(SPEC, 4)
        for node in (joined.root, joined.other):
            node.drop_layout(JOB, 0)
            node.add_layout(JOB, fresh)
        joined.other.begin(JOB, 4, 1, [np.ones(300, np.int32)], joined.clock.now)
        joined.hear(Layout(job=JOB, layout=fresh, last_round=0))
        joined.run()
        assert joined.done == [(1, None)]

    def test_an_overflow_is_this_rank_s_error_and_a_finished_round(self, joined: Script) -> None:
        joined.begin(1, value=2**31 - 1)
        joined.other.begin(JOB, 0, 1, [np.ones(300, np.int32)], joined.clock.now)
        joined.run()
        [(round_, error)] = joined.done
        assert error is not None
        assert (round_, error.cause) == (1, "overflow")
        assert "element 0" in error.message
        assert joined.said()[-1] == Finished(job=JOB, round=1)

    def test_a_silent_neighbour_is_reported(self, joined: Script) -> None:
        joined.said()
        joined.member.on_event(events.PeerSilent(JOB, "ps", 3.0), 0.0)
        assert joined.said() == [PeerSilent(job=JOB, name="ps", seconds=3.0)]


class TestHold:
    """Rounds that wait while an aggregator returns."""

    def test_rounds_wait_for_the_plan_and_start_in_order(self, joined: Script) -> None:
        joined.begin(1)
        joined.said()
        assert joined.hear(Hold(job=JOB, nonce=3, before=2)) == [Held(job=JOB, nonce=3)]
        joined.begin(2)
        joined.begin(3)
        assert joined.said() == []
        assert joined.hear(joined.plan(2)) == [Begin(job=JOB, round=k, spec=SPEC) for k in (2, 3)]
        joined.begin(4)
        assert joined.said() == [Begin(job=JOB, round=4, spec=SPEC)]

    def test_rounds_before_the_mark_go_on(self, joined: Script) -> None:
        joined.hear(Hold(job=JOB, nonce=3, before=2))
        joined.begin(1)
        assert joined.said() == [Begin(job=JOB, round=1, spec=SPEC)]

    def test_refusals_wait_too(self, joined: Script) -> None:
        """One that overtook the round before it would be ignored, and nobody would hear of the mismatch."""
        joined.hear(Hold(job=JOB, nonce=3, before=1))
        joined.begin(1)
        joined.member.refuse_mismatch(2, SPEC, 1, "dtypes differ")
        joined.begin(3)
        assert joined.said() == []
        first, second, third = joined.hear(joined.plan(2))
        assert [first, third] == [Begin(job=JOB, round=k, spec=SPEC) for k in (1, 3)]
        assert isinstance(second, Refuse)
        assert (second.round, second.reason) == (2, "mismatch")

    def test_a_round_that_fails_while_it_waits_is_over_and_still_announced(self, joined: Script) -> None:
        """Others had begun it before they were asked to hold. The coordinator waits for all to come past it."""
        joined.hear(Hold(job=JOB, nonce=3, before=1))
        joined.begin(1)
        lost = RoundFailed(job=JOB, round=1, error="worker_lost", message="rank 0 was lost", tensors=(0,))
        assert joined.hear(lost) == []
        assert joined.done == [(1, Failed("worker_lost", "rank 0 was lost", 1))]
        joined.begin(2)
        assert joined.hear(joined.plan(2)) == [Begin(job=JOB, round=k, spec=SPEC) for k in (1, 2)]
        assert joined.hear(lost) == []
        assert [round_ for round_, _ in joined.done] == [1]
        assert joined.member.busy

    def test_a_layout_does_not_start_a_round_that_waits(self, joined: Script) -> None:
        joined.hear(Hold(job=JOB, nonce=3, before=1))
        joined.begin(1, OTHER)
        joined.hear(Layout(job=JOB, layout=layout_of(OTHER, 1), last_round=0))
        assert joined.member._rounds._opened[1].tensor is None
        joined.hear(joined.plan(2))
        assert joined.member._rounds._opened[1].tensor == 1
