"""A job that is over: its processes hear of it when nobody writes into their arrays any more, or of that as well."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.agent import server as local
from inanet.agent import sums as local_sums
from inanet.agent.backend import FabricBackend
from inanet.proto.common.local import LocalRound, Part
from tests.client.agent import PATIENCE, Agent, error_from, run_all


class Held:
    """Threads that sum are held in the middle of it, until :attr:`may_end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.entered: list[Part] = []
        self.written: list[Part] = []
        work = LocalRound.work

        def held(round_: LocalRound, part: Part) -> None:
            self.entered.append(part)
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
            work(round_, part)
            self.written.append(part)

        monkeypatch.setattr(LocalRound, "work", held)
        # small rounds, too, by threads
        monkeypatch.setattr(local_sums, "INLINE_BYTES", 1)


@pytest.fixture
def summing(
    tmp_path: Path, stack: ExitStack, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> Iterator[Agent]:
    """An agent with the backend of a worker, for jobs of this host alone."""
    backend = FabricBackend(None, "", join=1.0, lost=lambda job, error: None)  # type: ignore[arg-type]
    # there is no node whose counters it could give
    backend.stats = dict  # type: ignore[method-assign]
    agent = Agent(tmp_path / "worker.sock", loop_factory)
    agent.backend = backend  # type: ignore[assignment]
    with agent:
        yield agent
        stack.close()
    backend.close()


def test_a_lost_rank_is_told_of_when_threads_are_done_with_the_arrays(
    summing: Agent, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    stack.callback(held.may_end.set)
    pair = [stack.enter_context(job) for job in summing.connect_all(2)]
    handles = [job.all_reduce_async(np.ones(1000, np.float32)) for job in pair]
    assert held.begun.wait(PATIENCE)
    pair[1].close()
    summing.until(lambda: len(summing.server._sessions) == 1)
    # what was said before the answer to a question is here with it
    pair[0].stats()
    assert not handles[0].done()
    # and a call in between is answered with the others
    late = pair[0].all_reduce_async(np.ones(3, np.float32))
    pair[0].stats()
    assert not late.done()
    held.may_end.set()
    error = error_from(handles[0].wait)
    assert len(held.written) == len(held.entered) > 0
    assert isinstance(error, inanet.WorkerLostError)
    assert (error.ranks, error.round, error.rank) == ((1,), 1, 0)
    assert "still writes" not in str(error)
    assert error_from(late.wait).ranks == (1,)
    assert isinstance(error_from(pair[0].barrier), inanet.WorkerLostError)


def test_an_agent_that_stops_tells_it_as_well(
    summing: Agent, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    stack.callback(held.may_end.set)
    pair = [stack.enter_context(job) for job in summing.connect_all(2)]
    handles = [job.all_reduce_async(np.ones(1000, np.float32)) for job in pair]
    assert held.begun.wait(PATIENCE)
    stopping = threading.Thread(target=summing.stop)
    stopping.start()
    summing.until(lambda: not summing.server.path.exists())
    pair[0].stats()
    assert not any(handle.done() for handle in handles)
    held.may_end.set()
    for error in run_all(lambda rank: error_from(handles[rank].wait), 2):
        assert "the worker agent of this host was stopped" in str(error)
    stopping.join(PATIENCE)
    assert not stopping.is_alive()


def test_writers_that_do_not_stop_are_waited_for_in_vain_and_told_of(
    pair: list[inanet.Job], agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_QUIET_SECONDS", 0.01)
    agent.backend.held = True
    agent.backend.quiet.clear()
    handles = [job.all_reduce_async(np.ones(9, np.float32)) for job in pair]
    agent.until(lambda: bool(agent.backend.rounds))
    pair[1].close()
    error = error_from(handles[0].wait)
    assert isinstance(error, inanet.WorkerLostError)
    assert error.ranks == (1,)
    assert "rank 1 is gone" in str(error)
    assert "after 0.01 s the worker agent still writes into the arrays: do not use them" in str(error)


def test_nobody_waits_where_nothing_was_begun(pair: list[inanet.Job], agent: Agent) -> None:
    """Rank 0 has called, rank 1 has not: there is nothing to write."""
    agent.backend.quiet.clear()
    handle = pair[0].all_reduce_async(np.ones(9, np.float32))
    pair[0].stats()
    pair[1].close()
    assert error_from(handle.wait).ranks == (1,)
    assert agent.backend.left.get(timeout=PATIENCE)[0] == "train"
