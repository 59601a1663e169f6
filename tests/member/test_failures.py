"""A member whose rounds fail, whose coordinator is another one, or whose memory does not suffice."""

import numpy as np

from inanet.member.member import Failed
from inanet.messages.control import (
    Begin,
    Hello,
    JobEnded,
    JobFailed,
    Known,
    Layout,
    LayoutDrop,
    LayoutReady,
    Refuse,
    RoundFailed,
    Welcome,
)
from inanet.proto.common.plan import (
    ExponentMode,
    TensorSpec,
)
from inanet.proto.tree.slots import MAX_JOBS
from tests.coordinator.nodes import Nodes, two_level
from tests.member.script import JOB, KEY, OTHER, SPEC, Script, layout_of


class TestFailures:
    """Rounds and jobs that end without a result."""

    def test_not_a_number_is_refused_with_its_place(self, joined: Script) -> None:
        joined.hear(Layout(job=JOB, layout=layout_of(OTHER, 1), last_round=0))
        array = np.ones(200, np.float32)
        array[13] = np.inf
        joined.begin_with(1, OTHER, array)
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
    """A coordinator that starts again hears everything that still matters (coordinator restart)."""

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
        joined.begin_with(1, OTHER, array)
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
        assert nodes.coordinator.jobs[7].rounds.ledger.quiet

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
        script.hear(Welcome(job=JOB, silence=10.0), script.plan())
        assert script.member.failed is not None
        assert script.member.failed.cause == "memory"
