"""A member against a coordinator that says what a script tells it to, with a real node, in virtual time."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.control.member import Failed, Identity, Member
from inanet.control.messages import (
    Begin,
    Finished,
    Held,
    Hello,
    Hold,
    JobEnded,
    JobFailed,
    Known,
    Layout,
    LayoutDrop,
    LayoutReady,
    Leave,
    Message,
    PeerSilent,
    Ping,
    Plan,
    Pong,
    Refuse,
    Reject,
    RoundFailed,
    Stop,
    Waiting,
    Welcome,
)
from inanet.phy.memory import MemoryDevice, MemoryNetwork
from inanet.proto import events
from inanet.proto.formats import make_format
from inanet.proto.node import Node
from inanet.proto.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.slots import MAX_JOBS
from inanet.testing.clock import FakeClock
from tests.control.nodes import Nodes, two_level

JOB = 5
KEY = 77
SPEC = TensorSpec("w", "i32", (300,), "sum", ExponentMode.NONE)
OTHER = TensorSpec("", "f32", (2, 100), "sum", ExponentMode.PROLOGUE)


def layout_of(spec: TensorSpec, tensor: int = 0) -> TensorLayout:
    form = make_format(spec, 2)
    shards = [Shard(2 * tensor, tensor, 0, Part.DATA, form.fold, 0, form.fragments)]
    if form.exponent_fragments:
        count = form.exponent_fragments
        shards.append(Shard(2 * tensor + 1, tensor, 0, Part.EXPONENTS, Fold.MAX8, 0, count))
    return TensorLayout(tensor, spec, tuple(shards))


class Script:
    """A worker host with rank 1 of 2, and a parameter server whose other child is played by the test."""

    def __init__(self, capacity: int = 64, role: str = "worker") -> None:
        self.clock = FakeClock()
        network = MemoryNetwork()
        self.devices: list[MemoryDevice] = [network.open() for _ in range(3)]
        self.root = Node("ps", 64)
        self.other = Node("other", 64)
        self.done: list[tuple[int, Failed | None]] = []
        self.progress: list[str] = []
        job = {"job": "train", "ranks": (1,), "world": 2} if role == "worker" else {}
        who = Identity("w1", role, "token", self.devices[1].endpoint, 100, **job)  # type: ignore[arg-type]
        self.member = Member(
            Node("w1", capacity),
            who,
            finished=lambda round_, error: self.done.append((round_, error)),
            progress=self.progress.append,
        )
        self.member.connected()

    def hear(self, *messages: Message) -> list[Message]:
        """What the member says to these messages."""
        for message in messages:
            self.member.receive(message, self.clock.now)
        return self.said()

    def said(self) -> list[Message]:
        return self.member.outgoing()

    def plan(self, version: int = 1, job: int = JOB) -> Plan:
        up = Parent("ps", self.devices[0].endpoint, 2, 16)
        return Plan(plan=NodePlan(job, version, KEY, 2, (Placement(0, up),)))

    def join(self, *layouts: TensorLayout) -> list[Message]:
        """The whole way into the job, with tensors in it."""
        self.said()
        self.hear(Welcome(job=JOB, key=KEY, silence=10.0), self.plan())
        self._surroundings(layouts)
        return self.hear(*[Layout(job=JOB, layout=layout, last_round=0) for layout in layouts])

    def _surroundings(self, layouts: Sequence[TensorLayout]) -> None:
        ends = [device.endpoint for device in self.devices]
        children = (Child("w1", ends[1], 2, 1, 16), Child("other", ends[2], 1, 1, 16))
        self.root.apply(NodePlan(JOB, 1, KEY, 2, (Placement(0, None, children),)), self.clock.now)
        up = Parent("ps", ends[0], 1, 16)
        self.other.apply(NodePlan(JOB, 1, KEY, 2, (Placement(0, up),)), self.clock.now)
        for node in (self.root, self.other):
            for layout in layouts:
                node.add_layout(JOB, layout)

    def begin(self, round_: int, spec: TensorSpec = SPEC, value: int = 1) -> NDArray[np.int32]:
        array = np.full(spec.elements, value, np.int32 if spec.dtype == "i32" else np.float32)
        self.member.begin(round_, spec, [array], self.clock.now)
        return array

    def run(self) -> None:
        """Carry packets until all is quiet, timers included."""
        nodes = (self.root, self.member.node, self.other)
        while True:
            busy = False
            for node, device in zip(nodes, self.devices, strict=True):
                while (batch := device.receive()) is not None:
                    node.receive(batch, self.clock.now)
                    busy = True
                for transmission in node.transmit(self.clock.now):
                    device.send(transmission)
                    busy = True
                found = node.events()
                if node is self.member.node:
                    for event in found:
                        self.member.on_event(event, self.clock.now)
            due = [at for node in nodes if (at := node.timer()) is not None]
            if not busy:
                if not due or min(due) > self.clock.now + 1.0:
                    return
                self.clock.now = max(self.clock.now, min(due))
                for node in nodes:
                    if (at := node.timer()) is not None and at <= self.clock.now:
                        node.on_timer(self.clock.now)


@pytest.fixture
def script() -> Script:
    """Not welcomed yet."""
    return Script()


@pytest.fixture
def joined() -> Script:
    """In the job, with one tensor."""
    made = Script()
    assert made.join(layout_of(SPEC)) == []
    return made


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
        script.hear(Welcome(job=JOB, key=KEY, silence=10.0))
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

    def test_a_layout_does_not_start_a_round_that_waits(self, joined: Script) -> None:
        joined.hear(Hold(job=JOB, nonce=3, before=1))
        joined.begin(1, OTHER)
        joined.hear(Layout(job=JOB, layout=layout_of(OTHER, 1), last_round=0))
        assert joined.member._opened[1].tensor is None
        joined.hear(joined.plan(2))
        assert joined.member._opened[1].tensor == 1


class TestFailures:
    """Rounds and jobs that end without a result."""

    def test_not_a_number_is_refused_with_its_place(self, joined: Script) -> None:
        joined.hear(Layout(job=JOB, layout=layout_of(OTHER, 1), last_round=0))
        array = np.ones(200, np.float32)
        array[13] = np.inf
        joined.member.begin(1, OTHER, [array], joined.clock.now)
        joined.run()
        refuse = joined.said()[-1]
        assert refuse == Refuse(
            job=JOB, round=1, rank=1, tensor="f32[2, 100]", index=13, reason="nonfinite", detail="inf"
        )
        assert joined.done == []
        failed = RoundFailed(
            job=JOB, round=1, error="nonfinite", message="rank 1 has inf", tensors=(1,), rank=1, index=13
        )
        joined.hear(failed)
        [(round_, error)] = joined.done
        assert error is not None
        assert (round_, error.cause, error.rank, error.index) == (1, "nonfinite", 1, 13)

    def test_a_failed_round_is_over_and_the_next_one_works(self, joined: Script) -> None:
        joined.begin(1)
        joined.run()
        failed = RoundFailed(job=JOB, round=1, error="timeout", message="late", tensors=(0,), missing=(0,))
        joined.hear(failed)
        assert joined.done == [(1, Failed("timeout", "late", 1, None, (0,)))]
        joined.root.fail_round(JOB, 1, [0], joined.clock.now)
        joined.other.fail_round(JOB, 1, [0], joined.clock.now)
        joined.begin(2)
        joined.other.begin(JOB, 0, 2, [np.ones(300, np.int32)], joined.clock.now)
        joined.run()
        assert joined.done[1:] == [(2, None)]

    def test_a_lost_job_names_its_ranks(self, joined: Script) -> None:
        joined.begin(1)
        joined.hear(JobFailed(job=JOB, error="worker_lost", message="rank 0 was lost", round=1, ranks=(0,)))
        assert joined.member.failed == Failed("worker_lost", "rank 0 was lost", 1, None, (0,))
        assert not joined.member.serves(JOB)
        joined.member.abandon(Failed("worker_lost", "less precise"))
        assert joined.done == [(1, joined.member.failed)]

    def test_abandoning_ends_every_open_round_once(self, joined: Script) -> None:
        for round_ in (1, 2, 3):
            joined.begin(round_)
        error = Failed("coordinator_lost", "gone")
        joined.member.abandon(error)
        joined.member.abandon(Failed("other", "other"))
        assert joined.done == [(1, error), (2, error), (3, error)]
        assert joined.member.node.jobs == 0

    def test_what_is_said_of_unknown_jobs_and_rounds_changes_nothing(self, joined: Script) -> None:
        joined.begin(1)
        joined.said()
        joined.hear(
            RoundFailed(job=9, round=1000, error="timeout", message="", tensors=(7,)),
            LayoutDrop(job=9, tensor=3),
            LayoutDrop(job=JOB, tensor=3),
            JobEnded(job=9, reason=""),
            RoundFailed(job=JOB, round=50, error="timeout", message="", tensors=()),
        )
        assert joined.done == []
        joined.other.begin(JOB, 0, 1, [np.ones(300, np.int32)], joined.clock.now)
        joined.run()
        assert joined.done == [(1, None)]


class TestResuming:
    """A coordinator that starts again hears everything that still matters (R4)."""

    def test_open_rounds_and_tensors_are_told(self, joined: Script) -> None:
        joined.begin(1)
        joined.begin(2)
        joined.member.connected()
        hello, known, *begins = joined.said()
        assert isinstance(hello, Hello)
        [resume] = hello.resume
        assert (resume.job, resume.key, resume.next_round) == (JOB, KEY, 3)
        assert (resume.layouts, resume.open) == (1, 2)
        assert known == Known(job=JOB, layout=layout_of(SPEC))
        assert begins == [Begin(job=JOB, round=k, spec=SPEC) for k in (1, 2)]

    def test_refusals_are_repeated_until_the_round_has_failed(self, joined: Script) -> None:
        joined.hear(Layout(job=JOB, layout=layout_of(OTHER, 1), last_round=0))
        array = np.ones(200, np.float32)
        array[5] = np.nan
        joined.member.begin(1, OTHER, [array], joined.clock.now)
        joined.member.refuse_mismatch(2, SPEC, 1, "dtypes differ")
        joined.run()
        joined.said()
        joined.member.connected()
        hello, *told = joined.said()
        assert isinstance(hello, Hello)
        assert hello.resume[0].open == 2
        assert [m for m in told if isinstance(m, Begin)] == [
            Begin(job=JOB, round=1, spec=OTHER),
            Begin(job=JOB, round=2, spec=SPEC),
        ]
        refusals = told[-2:]
        assert [(m.round, m.reason) for m in refusals if isinstance(m, Refuse)] == [
            (1, "nonfinite"),
            (2, "mismatch"),
        ]
        for round_ in (1, 2):
            joined.hear(RoundFailed(job=JOB, round=round_, error="mismatch", message="", tensors=()))
        joined.member.connected()
        assert not [m for m in joined.said() if isinstance(m, Begin | Refuse)]

    def test_the_coordinator_understands_the_repeated_refusal(self) -> None:
        """Without it the others would be left waiting for a host that will never begin."""
        nodes = Nodes(two_level(2, 0))
        nodes.start()
        nodes.begin(1, SPEC, ["w0"])
        nodes.restart()
        nodes.join("ps")
        nodes.resume("w0", 2, [(1, SPEC)])
        nodes.resume("w1", 2, [(1, SPEC)])
        refusal = Refuse(job=7, round=1, rank=1, tensor="w", index=None, reason="mismatch", detail="differs")
        nodes.say("w1", refusal)
        for name in ("w0", "w1"):
            failed = nodes.last(name, RoundFailed)
            assert (failed.round, failed.error) == (1, "mismatch")


class TestMemory:
    """Nodes that have no room say so, and go on."""

    def test_an_aggregator_refuses_a_tensor_that_does_not_fit(self) -> None:
        script = Script(capacity=2, role="aggregator")
        script.said()
        script.hear(script.plan())
        [answer] = script.hear(Layout(job=JOB, layout=layout_of(SPEC), last_round=0))
        assert isinstance(answer, LayoutReady)
        assert answer.refused.startswith("w1: ")
        assert script.member.failed is None

    def test_so_does_a_worker(self) -> None:
        script = Script(capacity=2)
        [answer] = script.join(layout_of(SPEC))
        assert isinstance(answer, LayoutReady)
        assert answer.refused.startswith("w1: ")
        assert script.member.failed is None

    def test_all_ranks_hear_of_it_and_the_job_goes_on(self) -> None:
        nodes = Nodes(two_level(2, 0))
        nodes.start()
        nodes.begin(1, SPEC)
        nodes.say("w1", LayoutReady(job=7, tensor=0, refused="w1: 3 slots, 2 are free"))
        for name in ("w0", "w1", "ps"):
            failed = nodes.last(name, RoundFailed)
            assert (failed.round, failed.error) == (1, "memory")
            assert "'w1' has no room for it: w1: 3 slots, 2 are free" in failed.message
            assert nodes.last(name, LayoutDrop).tensor == 0
        nodes.begin(2, TensorSpec("small", "i32", (3,), "sum", ExponentMode.NONE))
        nodes.finish(2)
        assert nodes.coordinator.jobs[7].collectives.ledger.quiet

    def test_a_job_too_many_does_not_end_an_aggregator(self) -> None:
        script = Script(role="aggregator")
        script.said()
        for job in range(MAX_JOBS):
            script.hear(script.plan(job=job))
        script.hear(script.plan(job=MAX_JOBS))
        [answer] = script.hear(Layout(job=MAX_JOBS, layout=layout_of(SPEC), last_round=0))
        assert isinstance(answer, LayoutReady)
        assert f"already serves {MAX_JOBS} jobs" in answer.refused
        script.hear(JobEnded(job=MAX_JOBS, reason="over"), JobEnded(job=0, reason="over"))
        script.hear(script.plan(job=MAX_JOBS))
        [answer] = script.hear(Layout(job=MAX_JOBS, layout=layout_of(SPEC), last_round=0))
        assert answer == LayoutReady(job=MAX_JOBS, tensor=0)

    def test_nor_does_it_end_a_worker_s_agent(self) -> None:
        script = Script()
        for job in range(100, 100 + MAX_JOBS):
            script.member.node.apply(script.plan(job=job).plan, script.clock.now)
        script.hear(Welcome(job=JOB, key=KEY, silence=10.0), script.plan())
        assert script.member.failed is not None
        assert script.member.failed.cause == "memory"
