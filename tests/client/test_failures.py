"""Whatever goes wrong between processes and their agent ends in a typed error, on every rank, at once."""

import asyncio
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inanet
from inanet.client import conversation
from inanet.errors import FabricError, error_of
from tests.client.agent import PATIENCE, Agent, error_from, run_all


def errors_of(pair: list[inanet.Job], work: Callable[[int], Any]) -> list[inanet.InaError]:
    """The errors that both ranks get."""
    return run_all(lambda rank: error_from(lambda: work(rank)), len(pair))


class TestMismatch:
    """Local ranks that do not call the same collective."""

    @pytest.mark.parametrize(
        ("field", "calls", "values"),
        [
            ("shape", [{"array": (2, 3)}, {"array": (3, 2)}], ("(2, 3)", "(3, 2)")),
            ("dtype", [{"dtype": "f4"}, {"dtype": "i4"}], ("'f32'", "'i32'")),
            ("op", [{"op": "sum"}, {"op": "mean"}], ("'sum'", "'mean'")),
            ("name", [{"name": "w"}, {"name": "b"}], ("'w'", "'b'")),
            # only tensors with names carry anything over
            (
                "mode",
                [{"name": "w", "mode": "carried"}, {"name": "w", "mode": "prologue"}],
                ("carried", "prologue"),
            ),
            ("factor", [{"mode": "fixed", "factor": 1.0}, {"mode": "fixed", "factor": 2.0}], ("1.0", "2.0")),
            ("propagate", [{"nan": "refuse"}, {"nan": "propagate"}], ("False", "True")),
            (
                "propagate",
                [{"dtype": "i4", "overflow": "refuse"}, {"dtype": "i4", "overflow": "wrap"}],
                ("False", "True"),
            ),
        ],
    )
    def test_all_ranks_hear_both_values(
        self,
        pair: list[inanet.Job],
        agent: Agent,
        field: str,
        calls: list[dict[str, Any]],
        values: tuple[str, str],
    ) -> None:
        def call(rank: int) -> None:
            options = dict(calls[rank])
            array = np.ones(options.pop("array", 4), options.pop("dtype", "f4"))
            pair[rank].all_reduce(array, **options)

        for rank, error in enumerate(errors_of(pair, call)):
            assert isinstance(error, inanet.MismatchError)
            assert (error.field, error.values, error.ranks) == (field, values, (0, 1))
            assert (error.job, error.rank, error.round) == ("train", rank, 1)
            assert f"{field} is {values[0]} on rank 0 but {values[1]} on rank 1" in str(error)
        # other hosts must hear of it: the backend is told, and not given the round
        assert [entry[:3] for entry in agent.backend.mismatches] == [("train", 1, 1)]
        assert agent.backend.rounds == []

    def test_the_job_goes_on(self, pair: list[inanet.Job], agent: Agent) -> None:
        errors_of(pair, lambda rank: pair[rank].all_reduce(np.ones(rank + 1, np.float32)))
        run_all(lambda rank: pair[rank].barrier(), 2)
        assert [number for _, number, _ in agent.backend.rounds] == [2]

    def test_tensors_without_elements_must_agree_too(self, pair: list[inanet.Job]) -> None:
        shapes = [(0, 2), (0, 3)]
        for error in errors_of(pair, lambda rank: pair[rank].all_reduce(np.ones(shapes[rank], np.float32))):
            assert isinstance(error, inanet.MismatchError)


class TestRefusedRounds:
    """Rounds that the backend ends with an error."""

    @pytest.mark.parametrize(
        ("cause", "kind"),
        [
            ("nonfinite", inanet.NonFiniteError),
            ("overflow", inanet.OverflowRefused),
            ("timeout", inanet.RoundTimeout),
            ("worker_lost", inanet.WorkerLostError),
            ("memory", inanet.FabricError),
        ],
    )
    def test_errors_arrive_with_all_they_say(
        self, pair: list[inanet.Job], agent: Agent, cause: str, kind: type[inanet.InaError]
    ) -> None:
        refusal = error_of(cause, "why", job="", rank=-1, round=1, ranks=(7,), details={"index": 3})
        agent.backend.refusal = refusal
        arrays = [np.ones(4, np.float32) for _ in pair]
        for rank, error in enumerate(
            errors_of(pair, lambda rank: pair[rank].all_reduce(arrays[rank], name="w"))
        ):
            assert type(error) is kind
            assert (error.job, error.rank, error.round, error.ranks) == ("train", rank, 1, (7,))
            assert error.reason == "why"
            if isinstance(error, inanet.NonFiniteError):
                assert (error.tensor, error.index) == ("w", 3)
        agent.backend.refusal = None
        run_all(lambda rank: pair[rank].barrier(), 2)

    def test_an_unnamed_tensor_is_named_by_what_it_is(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.refusal = inanet.NonFiniteError("why", round=1)
        error = error_from(lambda: job.all_reduce(np.ones((2, 3), np.float32)))
        assert isinstance(error, inanet.NonFiniteError)
        assert error.tensor == "f32[2, 3]"

    def test_waiting_again_raises_again(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.refusal = inanet.OverflowRefused("why", round=1)
        handle = job.all_reduce_async(np.ones(1, np.int32))
        first, second = error_from(handle.wait), error_from(handle.wait)
        assert str(first) == str(second)
        assert first is not second

    @pytest.mark.parametrize("where", ["crash", "refusal"])
    def test_a_bug_in_the_agent_is_an_error_and_no_silence(
        self, pair: list[inanet.Job], agent: Agent, where: str
    ) -> None:
        setattr(agent.backend, where, ZeroDivisionError("oops"))
        for error in errors_of(pair, lambda rank: pair[rank].barrier()):
            assert type(error) is inanet.FabricError
            assert "ZeroDivisionError: oops" in error.reason

    def test_a_round_that_the_agent_cancels(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        handle = job.all_reduce_async(np.ones(1, np.float32))
        agent.until(lambda: bool(agent.backend.rounds))
        agent.do(lambda: agent.backend.futures[1].cancel())
        assert "gave the round up" in str(error_from(handle.wait))


class TestLostRanks:
    """A local rank that goes away."""

    def test_in_the_middle_of_a_round_that_it_called(self, pair: list[inanet.Job], agent: Agent) -> None:
        agent.backend.held = True
        handles = [job.all_reduce_async(np.ones(9, np.float32)) for job in pair]
        agent.until(lambda: bool(agent.backend.rounds))
        pair[1].close()
        error = error_from(handles[0].wait)
        assert isinstance(error, inanet.WorkerLostError)
        assert (error.ranks, error.round, error.rank) == ((1,), 1, 0)
        assert "rank 1 is gone" in error.reason
        job, reason = agent.backend.left.get(timeout=PATIENCE)
        assert job == "train"
        assert "rank 1 is gone" in reason
        # the backend's answer comes too late and disturbs nobody
        agent.do(lambda: agent.backend.futures[1].set_result(None))

    def test_while_others_wait_for_it(self, pair: list[inanet.Job], agent: Agent) -> None:
        handle = pair[0].all_reduce_async(np.ones(9, np.float32))
        pair[0].stats()
        pair[1].close()
        assert error_from(handle.wait).ranks == (1,)
        assert type(error_from(pair[0].barrier)) is inanet.WorkerLostError
        assert agent.backend.left.get(timeout=PATIENCE)[0] == "train"

    def test_between_rounds_the_next_call_fails(self, pair: list[inanet.Job], agent: Agent) -> None:
        run_all(lambda rank: pair[rank].barrier(), 2)
        pair[1].close()
        agent.until(lambda: len(agent.server._sessions) == 1)
        assert agent.backend.left.empty()
        error = error_from(pair[0].barrier)
        assert isinstance(error, inanet.WorkerLostError)
        assert error.ranks == (1,)
        # the other hosts wait for this one's next round: they are told that there will be none
        assert "rank 1 of this host left the job" in agent.backend.left.get(timeout=PATIENCE)[1]

    def test_all_leaving_in_good_order_leaves_once(self, pair: list[inanet.Job], agent: Agent) -> None:
        for job in pair:
            job.close()
        reason = agent.backend.left.get(timeout=PATIENCE)
        assert reason == ("train", "all ranks of the host have left")
        agent.do(lambda: None)
        assert agent.backend.left.empty()

    def test_the_job_can_be_joined_again(self, pair: list[inanet.Job], agent: Agent) -> None:
        pair[1].close()
        error_from(pair[0].barrier)
        pair[0].close()
        with ExitStack() as stack:
            again = [stack.enter_context(job) for job in agent.connect_all(2)]
            run_all(lambda rank: again[rank].barrier(), 2)
        assert len(agent.backend.joined) == 2

    def test_it_is_joined_again_only_after_it_was_left(self, agent: Agent) -> None:
        order: list[str] = []
        may_leave = threading.Event()
        backend = agent.backend

        async def leave(job: str, reason: str) -> None:
            await asyncio.get_running_loop().run_in_executor(None, may_leave.wait, PATIENCE)
            order.append("left")

        async def join(*_: Any) -> None:
            order.append("joined")

        vars(backend).update(leave=leave, join=join)
        agent.connect().close()
        agent.until(lambda: not agent.server._sessions)
        thread = threading.Thread(target=lambda: agent.connect().close())
        thread.start()
        agent.until(lambda: bool(agent.server._joining))
        assert order == ["joined"]
        may_leave.set()
        thread.join(PATIENCE)
        assert order[:3] == ["joined", "left", "joined"]

    def test_the_backend_loses_the_job(self, pair: list[inanet.Job], agent: Agent) -> None:
        agent.backend.held = True
        handles = [job.all_reduce_async(np.ones(9, np.float32)) for job in pair]
        agent.until(lambda: bool(agent.backend.rounds))
        lost = inanet.WorkerLostError("host b is gone", ranks=(2, 3))
        agent.do(lambda: agent.server.lost("train", lost))
        for error in [error_from(handle.wait) for handle in handles]:
            assert (type(error), error.ranks, error.round) == (inanet.WorkerLostError, (2, 3), 1)
        assert agent.backend.left.get(timeout=PATIENCE) == ("train", "host b is gone")


class TestJoining:
    """Ranks that are missing, or refused."""

    def test_missing_local_ranks_are_named(self, agent: Agent) -> None:
        error = error_from(lambda: agent.connect("train", 1, 3, timeout=0.3))
        assert isinstance(error, inanet.JoinTimeout)
        assert "not joined after 0.3 s: joined 1 of 3 ranks of this host, missing: ranks 0, 2" in str(error)
        assert (error.job, error.rank, error.ranks) == ("train", 1, (0, 2))
        assert agent.backend.joined == []

    def test_missing_hosts_are_named_and_logged(
        self,
        start: Callable[..., Agent],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(conversation, "_LOG_SECONDS", 0.0)
        agent = start(report=0.01)
        agent.backend.closed = True
        errors: list[inanet.InaError] = []

        def join() -> None:
            errors.append(error_from(lambda: agent.connect(world=4, local_world=1, timeout=0.5)))

        with caplog.at_level(logging.WARNING, "inanet"):
            thread = threading.Thread(target=join)
            thread.start()
            agent.until(lambda: bool(agent.backend.joined))
            agent.do(lambda: agent.backend.progress("joined 1 of 4, missing: 1, 2, 3"))
            thread.join(PATIENCE)
        assert isinstance(errors[0], inanet.JoinTimeout)
        assert "joined 1 of 4, missing: 1, 2, 3" in str(errors[0])
        # reported again and again, since nobody remembers what was said a minute ago
        assert caplog.messages.count("job 'train', rank 0: joined 1 of 4, missing: 1, 2, 3") > 1
        # giving up cancels the backend's join, and leaves
        assert agent.backend.left.get(timeout=PATIENCE)[0] == "train"

    def test_reports_are_not_logged_too_often(
        self, job: inanet.Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        talk = job._conversation
        talk._logged = now[0]
        with caplog.at_level(logging.WARNING, "inanet"):
            for now[0] in [1001.0, 1004.9, 1005.0, 1006.0, 1009.9, 1010.0]:
                talk._note(0, f"at {now[0]:g}", ())
        assert [message.rpartition(": ")[2] for message in caplog.messages] == ["at 1005", "at 1010"]

    @pytest.mark.parametrize(
        ("error", "kind", "sentence"),
        [
            (inanet.JoinRefused("no"), inanet.JoinRefused, "no"),
            (inanet.JoinTimeout("joined 1 of 2", ranks=(1,)), inanet.JoinTimeout, "joined 1 of 2"),
            (KeyError("bug"), inanet.FabricError, "KeyError: 'bug'"),
        ],
    )
    def test_the_backend_refuses(
        self, agent: Agent, error: Exception, kind: type[inanet.InaError], sentence: str
    ) -> None:
        agent.backend.closed = True
        errors: list[inanet.InaError] = []
        thread = threading.Thread(target=lambda: errors.append(error_from(agent.connect)))
        thread.start()
        agent.until(lambda: bool(agent.backend.joined))
        agent.do(lambda: agent.backend.admit(error))
        thread.join(PATIENCE)
        assert type(errors[0]) is kind
        assert sentence in str(errors[0])
        assert (errors[0].job, errors[0].rank) == ("train", 0)
        assert agent.backend.left.get(timeout=PATIENCE)[0] == "train"

    def test_ranks_that_do_not_fit(self, agent: Agent, stack: ExitStack) -> None:
        first = stack.enter_context(agent.connect("train", 0, 4, local_world=1))
        assert first.world == 4

        def refusal(rank: int, world: int, local: int) -> inanet.InaError:
            return error_from(lambda: agent.connect("train", rank, world, local_world=local))

        for refused, sentence in [
            (refusal(0, 4, 1), "rank 0 is connected already: process"),
            (
                refusal(1, 4, 1),
                "all 1 ranks of this host are connected already; if it has more, give each of them LOCAL_WORLD_SIZE",
            ),
            (refusal(1, 8, 1), "rank 1 says that the job has 8 ranks, 1 of them on this host; others on"),
            (refusal(1, 4, 2), "2 of them on this host"),
        ]:
            assert isinstance(refused, inanet.JoinRefused)
            assert sentence in str(refused)
        first.barrier()

    @pytest.mark.parametrize(
        ("system", "sentence"),
        [
            ("nope", "there is no system 'nope'; there are xagg, "),
            ("zebra", "begins with inanet.join_sparse()"),
        ],
    )
    def test_systems_that_no_such_job_can_have(self, agent: Agent, system: str, sentence: str) -> None:
        refused = error_from(lambda: agent.connect("train", 0, 1, system=system))
        assert isinstance(refused, inanet.JoinRefused)
        assert sentence in str(refused)

    def test_a_process_that_gives_up_makes_room_for_another(self, agent: Agent, stack: ExitStack) -> None:
        assert isinstance(error_from(lambda: agent.connect("train", 0, 2, timeout=0.05)), inanet.JoinTimeout)
        agent.until(lambda: not agent.server._sessions)
        pair = [stack.enter_context(job) for job in agent.connect_all(2)]
        run_all(lambda rank: pair[rank].barrier(), 2)

    def test_one_that_leaves_while_the_others_join_ends_it(self, agent: Agent) -> None:
        agent.backend.closed = True
        errors: dict[int, inanet.InaError] = {}

        def join(rank: int, timeout: float) -> None:
            errors[rank] = error_from(lambda: agent.connect("train", rank, 2, timeout=timeout))

        patient = threading.Thread(target=join, args=(0, PATIENCE))
        patient.start()
        agent.until(lambda: "train" in agent.server._groups)
        join(1, 0.1)
        patient.join(PATIENCE)
        assert isinstance(errors[1], inanet.JoinTimeout)
        assert isinstance(errors[0], inanet.WorkerLostError)
        assert errors[0].ranks == (1,)

    @pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"])
    def test_names_that_no_job_can_have(self, agent: Agent, name: str) -> None:
        assert "1 to 128 printable" in str(error_from(lambda: agent.connect(name)))


class TestLateRounds:
    """Who is waited for, in rounds that do not end."""

    def test_local_ranks_that_did_not_call(self, start: Callable[..., Agent], stack: ExitStack) -> None:
        agent = start(report=0.01)
        pair = [stack.enter_context(job) for job in agent.connect_all(2)]
        handle = pair[0].all_reduce_async(np.ones(3, np.float32))
        talk = pair[0]._conversation
        assert talk.wait_for(lambda: bool(handle._outcome.awaited), PATIENCE)
        error = error_from(lambda: handle.wait(0.0))
        assert isinstance(error, inanet.RoundTimeout)
        assert (error.round, error.ranks) == (1, (1,))
        assert "no result after 0 s; rank 1 of this host did not call it yet" in str(error)

    def test_other_hosts(self, start: Callable[..., Agent], stack: ExitStack) -> None:
        agent = start(report=0.01)
        agent.backend.held = True
        job = stack.enter_context(agent.connect(world=2, local_world=1))
        handle = job.all_reduce_async(np.ones(3, np.float32))
        assert job._conversation.wait_for(lambda: bool(handle._outcome.awaited), PATIENCE)
        assert "; the other hosts of train" in str(error_from(lambda: handle.wait(0.0)))


class TestLostAgent:
    """The agent goes away."""

    def test_stopped_in_good_order(self, pair: list[inanet.Job], agent: Agent) -> None:
        agent.backend.held = True
        handles = [job.all_reduce_async(np.ones(3, np.float32)) for job in pair]
        agent.until(lambda: agent.server.busy)
        agent.stop()
        for error in [error_from(handle.wait) for handle in handles]:
            assert "the worker agent of this host was stopped" in error.reason
            assert error.round == 1
        for job in pair:
            assert "stopped" in str(error_from(job.barrier))
            assert "stopped" in str(error_from(job.stats))
            assert job.over
            job.close()
        assert agent.backend.left.get(timeout=PATIENCE) == ("train", "the worker agent was stopped")
        assert list(agent.path.parent.iterdir()) == []

    def test_it_breaks_off(self, job: inanet.Job, agent: Agent, tmp_path: Path) -> None:
        agent.backend.held = True
        handle = job.all_reduce_async(np.ones(3, np.float32))
        agent.until(lambda: bool(agent.backend.rounds))
        agent.each(lambda session: session._socket.shutdown(socket.SHUT_RDWR))
        error = error_from(handle.wait)
        assert isinstance(error, inanet.AgentUnavailable)
        assert "the worker agent is gone" in error.reason
        assert error.searched == (str(tmp_path / "worker.sock"),)
        assert type(error_from(job.barrier)) is inanet.AgentUnavailable

    def test_it_sends_something_else(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        handle = job.all_reduce_async(np.ones(3, np.float32))
        agent.until(lambda: bool(agent.backend.rounds))
        agent.each(lambda session: session.send(b"\xff" * 8))
        assert "language" in str(error_from(handle.wait))

    def test_figures_do_not_come(self, job: inanet.Job, agent: Agent) -> None:
        agent.do(lambda: setattr(agent.server, "figures", dict))
        assert job.stats() == {}
        agent.each(lambda session: session._loop.remove_reader(session._socket))
        assert "has not answered for 0.01 s" in str(error_from(lambda: job.stats(timeout=0.01)))
        assert not job.over


@pytest.mark.parametrize("shares", [False, True], ids=["through the agent", "in shared memory"])
class TestFirstCause:
    """Who was late is what all ranks hear, and not who gave up because of it."""

    def test_a_timeout_names_the_rank_that_did_not_call(
        self, start: Callable[..., Agent], stack: ExitStack, shares: bool
    ) -> None:
        jobs = [stack.enter_context(job) for job in start(shares=shares).connect_all(3)]
        error = error_from(lambda: jobs[0].all_reduce(np.ones(3, np.float32), timeout=0.05))
        assert isinstance(error, inanet.RoundTimeout)
        # rank 2 has not called either
        assert set(error.ranks) & {1, 2}

    def test_others_hear_it_when_the_rank_that_gave_up_leaves(
        self, start: Callable[..., Agent], stack: ExitStack, shares: bool
    ) -> None:
        jobs = [stack.enter_context(job) for job in start(shares=shares).connect_all(3)]
        handles = [jobs[rank].all_reduce_async(np.ones(3, np.float32)) for rank in (0, 2)]
        given_up = error_from(lambda: handles[0].wait(0.05))
        assert given_up.ranks == (1,)
        jobs[0].close()
        heard = error_from(lambda: handles[1].wait(PATIENCE))
        assert isinstance(heard, inanet.RoundTimeout)
        assert heard.ranks == (1,)
        assert "rank 0 waited too long for round 1 and left: rank 1 of this host did not call it yet" in str(
            heard
        )

    def test_a_result_that_came_late_is_forgotten(
        self, start: Callable[..., Agent], stack: ExitStack, shares: bool
    ) -> None:
        jobs = [stack.enter_context(job) for job in start(shares=shares).connect_all(2)]
        handle = jobs[0].all_reduce_async(np.ones(3, np.float32))
        error_from(lambda: handle.wait(0.05))
        second = jobs[1].all_reduce_async(np.ones(3, np.float32))
        assert second.wait(PATIENCE).tolist() == handle.wait(PATIENCE).tolist() == [2.0] * 3
        last = jobs[1].all_reduce_async(np.ones(3, np.float32))
        jobs[0].close()
        heard = error_from(lambda: last.wait(PATIENCE))
        assert isinstance(heard, inanet.WorkerLostError)
        assert heard.ranks == (0,)


def test_memory_that_a_limit_forbids_is_an_error_with_job_rank_size_and_limit(job: inanet.Job) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(FabricError) as caught:
            job.empty(1 << 20, np.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    text = str(caught.value)
    assert f"job '{job.name}'" in text
    assert "rank 0" in text
    assert "4194304 B of memory" in text
    assert "may make files of 1 MiB (ulimit -f; LimitFSIZE= of a unit)" in text
