"""Small collectives of ranks on one host: the same bits and errors as through the agent, which hears nothing of them."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import inanet
from inanet.client import exchange, meeting
from inanet.client.conversation import Outcome
from inanet.client.exchange import Exchange
from inanet.messages import segments
from inanet.messages.segments import DEPTH, MOST_BYTES, Word, exchange_bytes
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import tensor_spec
from tests.client.agent import PATIENCE, Agent, error_from, run_all

WORLD = 3


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path / "worker.sock", None, shares=True) as running:
        yield running


@pytest.fixture
def jobs(agent: Agent) -> Iterator[list[inanet.Job]]:
    members = agent.connect_all(WORLD)
    yield members
    for job in members:
        job.close()


def expected(arrays: list[np.ndarray[Any, Any]], dtype: str, op: str, mode: str) -> np.ndarray[Any, Any]:
    copies = [array.reshape(-1).copy() for array in arrays]
    spec = tensor_spec("", dtype, copies[0].shape, op, mode, 1e6 if mode == "fixed" else 0.0, False)
    assert LocalTensor(spec, len(copies)).reduce(copies) is None
    return copies[0].reshape(arrays[0].shape)


@pytest.mark.parametrize(
    ("dtype", "op", "mode"),
    [
        ("f32", "sum", "prologue"),
        ("f32", "mean", "prologue"),
        ("f32", "sum", "carried"),
        ("f32", "sum", "fixed"),
        ("f32", "max", "prologue"),
        ("f16", "sum", "prologue"),
        ("i32", "sum", "prologue"),
        ("i64", "min", "prologue"),
    ],
)
def test_bits_are_those_of_any_other_round(jobs: list[inanet.Job], dtype: str, op: str, mode: str) -> None:
    kind = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}[dtype]
    random = np.random.default_rng(5)
    arrays = [(random.standard_normal((7, 41)) * 100).astype(kind) for _ in jobs]
    want = expected(arrays, dtype, op, mode)
    factor = {"factor": 1e6} if mode == "fixed" else {}
    run_all(lambda rank: jobs[rank].all_reduce(arrays[rank], op, mode=mode, **factor), WORLD)
    for array in arrays:
        assert array.tobytes() == want.tobytes()


def test_agent_hears_nothing_of_small_tensors_and_everything_of_large_ones(
    agent: Agent, jobs: list[inanet.Job]
) -> None:
    small = [np.ones(MOST_BYTES // 4, np.float32) for _ in jobs]
    large = [np.ones(MOST_BYTES // 4 + 1, np.float32) for _ in jobs]
    for arrays in (small, large, small, large):
        run_all(lambda rank, arrays=arrays: jobs[rank].all_reduce(arrays[rank]), WORLD)
    assert [number for _, number, _ in agent.backend.rounds] == [2, 4]
    assert all((array == WORLD**2).all() for array in (*small, *large))


def test_numbers_count_calls_of_both_kinds(jobs: list[inanet.Job]) -> None:
    sizes = [1, MOST_BYTES, 1, 1]

    def calls(rank: int) -> list[int]:
        handles = [jobs[rank].all_reduce_async(np.ones(size, np.int32)) for size in sizes]
        for handle in handles:
            handle.wait()
        return [handle.round for handle in handles]

    assert run_all(calls, WORLD) == [[1, 2, 3, 4]] * WORLD


def test_more_calls_than_the_memory_holds_may_be_on_their_way(jobs: list[inanet.Job]) -> None:
    count = 5 * DEPTH

    def calls(rank: int) -> list[int]:
        arrays = [np.full(3, rank + number, np.int32) for number in range(count)]
        handles = [jobs[rank].all_reduce_async(array) for array in arrays]
        for handle in reversed(handles):
            handle.wait()
        return [int(array[2]) for array in arrays]

    ranks = sum(range(WORLD))
    assert run_all(calls, WORLD) == [[ranks + WORLD * number for number in range(count)]] * WORLD


def test_strided_arrays_get_their_result_where_they_are(jobs: list[inanet.Job]) -> None:
    arrays = [np.arange(40, dtype=np.float32).reshape(5, 8) for _ in jobs]
    run_all(lambda rank: jobs[rank].all_reduce(arrays[rank][:, ::3]), WORLD)
    want = np.arange(40, dtype=np.float32).reshape(5, 8)
    want[:, ::3] *= WORLD
    for array in arrays:
        assert (array == want).all()


def test_nan_is_refused_on_all_ranks_alike_and_the_job_goes_on(jobs: list[inanet.Job]) -> None:
    arrays = [np.ones(10, np.float32) for _ in jobs]
    arrays[1][7] = np.nan
    errors = run_all(lambda rank: error_from(lambda: jobs[rank].all_reduce(arrays[rank], name="w")), WORLD)
    for rank, error in enumerate(errors):
        assert isinstance(error, inanet.NonFiniteError)
        assert (error.tensor, error.index, error.ranks, error.round, error.rank) == ("w", 7, (1,), 1, rank)
    arrays[1][7] = 1
    run_all(lambda rank: jobs[rank].all_reduce(arrays[rank], name="w"), WORLD)
    assert (arrays[0] == WORLD).all()


def test_integers_that_overflow_are_refused(jobs: list[inanet.Job]) -> None:
    def call(rank: int) -> Exception:
        return error_from(lambda: jobs[rank].all_reduce(np.full(4, 2**31 - 1, np.int32)))

    assert {type(error) for error in run_all(call, WORLD)} == {inanet.OverflowRefused}


def test_integers_wrap_round_where_that_is_asked_for(jobs: list[inanet.Job]) -> None:
    def call(rank: int) -> list[int]:
        array = np.array([2**31 - 1, 5], np.int32)
        return jobs[rank].all_reduce(array, overflow="wrap").tolist()  # type: ignore[no-any-return]

    wrapped = (WORLD * (2**31 - 1) + 2**31) % 2**32 - 2**31
    assert run_all(call, WORLD) == [[wrapped, 5 * WORLD]] * WORLD


def test_different_tensors_are_refused_on_all_ranks_with_the_field_that_differs(
    jobs: list[inanet.Job],
) -> None:
    def call(rank: int) -> inanet.InaError:
        return error_from(lambda: jobs[rank].all_reduce(np.ones(2 if rank == 2 else 3, np.float32)))

    for error in run_all(call, WORLD):
        assert isinstance(error, inanet.MismatchError)
        assert (error.field, error.values, error.ranks) == ("shape", ("(3,)", "(2,)"), (0, 2))
    run_all(lambda rank: jobs[rank].barrier(), WORLD)


def test_a_small_and_a_large_tensor_in_one_call_end_the_job_on_all_ranks(jobs: list[inanet.Job]) -> None:
    def call(rank: int) -> inanet.InaError:
        return error_from(lambda: jobs[rank].all_reduce(np.ones(MOST_BYTES if rank == 1 else 3, np.float32)))

    for error in run_all(call, WORLD):
        assert isinstance(error, inanet.MismatchError)
        assert "rank 1 called something else" in str(error)


def test_who_is_late_is_named_and_waiting_again_is_fine(jobs: list[inanet.Job]) -> None:
    handles = [job.all_reduce_async(np.ones(3, np.float32)) for job in jobs[:2]]
    error = error_from(lambda: handles[0].wait(0.0))
    assert isinstance(error, inanet.RoundTimeout)
    assert (error.ranks, error.round) == ((2,), 1)
    assert not handles[1].done()
    jobs[2].all_reduce(np.ones(3, np.float32))
    assert (handles[0].wait() == WORLD).all()
    assert handles[1].done()


def test_rank_that_left_is_told_to_those_who_wait_for_it(jobs: list[inanet.Job]) -> None:
    jobs[2].all_reduce_async(np.ones(3, np.float32))
    jobs[2].close()
    # what it called before is there
    run_all(lambda rank: jobs[rank].all_reduce(np.ones(3, np.float32)), 2)
    errors = run_all(lambda rank: error_from(lambda: jobs[rank].all_reduce(np.ones(3, np.float32))), 2)
    assert {(type(error), error.ranks) for error in errors} == {(inanet.WorkerLostError, (2,))}


SCRIPT = """
import sys, numpy as np, inanet
job = inanet.connect("train", rank=2, world=3, local_world=3, socket=sys.argv[1])
job.barrier()
print("here", flush=True)
sys.stdin.read()
"""


def test_rank_that_is_killed_is_told_to_those_who_wait_for_it(agent: Agent) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(agent.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        jobs = run_all(lambda rank: agent.connect("train", rank, WORLD), 2)
        run_all(lambda rank: jobs[rank].barrier(), 2)
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        waiting = threading.Thread(target=lambda: errors.append(error_from(jobs[0].barrier)))
        errors: list[inanet.InaError] = []
        waiting.start()
        os.kill(process.pid, signal.SIGKILL)
        errors.append(error_from(jobs[1].barrier))
        waiting.join(30)
        assert {(type(error), error.ranks) for error in errors} == {(inanet.WorkerLostError, (2,))}
        for job in jobs:
            job.close()
    finally:
        process.kill()
        process.communicate()


def test_agent_that_dies_ends_the_wait(agent: Agent, jobs: list[inanet.Job]) -> None:
    handle = jobs[0].all_reduce_async(np.ones(3, np.float32))
    agent.stop()
    assert isinstance(error_from(handle.wait), inanet.WorkerLostError)
    assert isinstance(error_from(lambda: jobs[1].all_reduce(np.ones(3, np.float32))), inanet.WorkerLostError)


def test_forked_child_has_no_job_and_leaves_its_parents_alone(jobs: list[inanet.Job]) -> None:
    child = os.fork()
    if child == 0:
        try:
            jobs[0].all_reduce(np.ones(3, np.float32))
        except inanet.AgentUnavailable:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    run_all(lambda rank: jobs[rank].barrier(), WORLD)


def watch(outcome: Outcome, since: float) -> None:
    """Nothing ends the job."""


def pair() -> list[Exchange]:
    """Both sides of an exchange without an agent."""
    memory = bytearray(exchange_bytes(2))
    return [Exchange(memory, (0, 1), rank, watch) for rank in (0, 1)]


ONE = ("", "i32", (1,), "sum", "prologue", 0.0, False)


def put(side: Exchange, seq: int, value: int = 1) -> Outcome:
    outcome = Outcome("x", None, seq=seq)
    side.make_room(outcome, 0.0)
    assert side.post(side.call(ONE), np.full(1, value, np.int32), outcome)
    return outcome


def test_rank_that_comes_last_wakes_those_who_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair()
    outcome = put(first, 1)
    monkeypatch.setattr(exchange, "YIELDS", 0)
    monkeypatch.setattr(exchange, "SLICE_SECONDS", 3 * PATIENCE)
    sleeper = threading.Thread(target=lambda: first.finish(outcome, time.monotonic() + 3 * PATIENCE))
    sleeper.start()
    put(second, 1)
    sleeper.join(PATIENCE)
    assert outcome.result is not None
    assert outcome.result[0] == 2


def test_calls_of_threads_count_in_their_order() -> None:
    first, _ = pair()
    put(first, 3)
    first.called(2)
    assert first._lines[0, Word.CALLED] == 3


def test_what_others_write_into_an_entry_of_this_rank_is_not_believed() -> None:
    first, second = pair()
    outcome = put(first, 1)
    put(second, 1)
    large = msgpack.packb(("", "i32", (1 << 20,), "sum", "prologue", 0.0, False))
    for position in range(2):
        entry = second._entries[position, 1]
        entry[:4].view(np.uint32)[0] = len(large)
        entry[4 : 4 + len(large)] = np.frombuffer(large, np.uint8)
    first.finish(outcome, 0.0)
    assert isinstance(outcome.error, inanet.MismatchError)


def test_rubbish_from_another_rank_ends_the_job(jobs: list[inanet.Job]) -> None:
    handles = [job.all_reduce_async(np.ones(3, np.float32)) for job in jobs]
    side = jobs[2]._exchange
    assert side is not None
    side._entries[2, 1, :5] = 1, 0, 0, 0, 0xC1
    for handle in (handles[0], handles[0], handles[1]):
        error = error_from(handle.wait)
        assert isinstance(error, inanet.FabricError)
        assert "cut short" in str(error)


def test_wait_that_is_interrupted_while_it_sums_does_not_succeed_later(
    jobs: list[inanet.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [job.all_reduce_async(np.ones(3, np.float32), name="w") for job in jobs]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "sum32", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handles[0].wait()
    assert "KeyboardInterrupt" in str(error_from(handles[0].wait))
    assert "KeyboardInterrupt" in str(error_from(lambda: jobs[0].barrier()))
    # the others cannot go on without it
    assert "KeyboardInterrupt" in str(error_from(lambda: jobs[1].all_reduce(np.ones(3, np.float32))))


def test_call_that_is_interrupted_ends_the_job(
    jobs: list[inanet.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    post = meeting.post

    def interrupted(*arguments: int) -> None:
        post(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            jobs[0].all_reduce_async(np.ones(3, np.float32))
    assert isinstance(error_from(jobs[0].barrier), inanet.FabricError)
    jobs[0].close()
    assert isinstance(error_from(jobs[1].barrier), inanet.WorkerLostError)


def test_dropped_handle_leaves_its_array_alone(jobs: list[inanet.Job]) -> None:
    array = np.ones(3, np.float32)
    error = error_from(lambda: jobs[0].all_reduce(array, timeout=0.0))
    assert isinstance(error, inanet.RoundTimeout)
    for job in jobs[1:]:
        job.all_reduce_async(np.ones(3, np.float32))
    run_all(lambda rank: jobs[rank].barrier(), WORLD)
    assert (array == 1).all()


def test_what_is_said_of_exponents_does_not_matter_for_integers(jobs: list[inanet.Job]) -> None:
    modes = ["carried", "prologue", "fixed"]
    arrays = [np.ones(3, np.int32) for _ in jobs]
    run_all(lambda rank: jobs[rank].all_reduce(arrays[rank], mode=modes[rank]), WORLD)
    assert all((array == WORLD).all() for array in arrays)


def test_done_is_true_once_a_rank_has_left(jobs: list[inanet.Job]) -> None:
    handles = [job.all_reduce_async(np.ones(3, np.float32)) for job in jobs[:2]]
    assert not handles[0].done()
    jobs[2].close()
    assert handles[0].done()
    assert {type(error_from(handle.wait)) for handle in handles} == {inanet.WorkerLostError}


def test_rank_that_has_all_entries_in_use_ends_the_job_when_another_called_something_else(
    jobs: list[inanet.Job],
) -> None:
    def call(rank: int) -> inanet.InaError:
        if rank == 1:
            return error_from(lambda: jobs[1].all_reduce(np.ones(MOST_BYTES, np.float32)))
        return error_from(
            lambda: [jobs[rank].all_reduce_async(np.ones(3, np.float32)) for _ in range(DEPTH + 1)]
        )

    errors = run_all(call, WORLD)
    assert {type(error) for error in errors} == {inanet.MismatchError}
    assert [error.rank for error in errors] == [0, 1, 2]


def test_rank_that_has_left_its_results_behind_is_told_to_those_who_need_the_room(
    jobs: list[inanet.Job],
) -> None:
    for job in jobs:
        handles = [job.all_reduce_async(np.ones(3, np.float32)) for _ in range(DEPTH)]
    del handles
    jobs[2].close()
    error = error_from(lambda: jobs[0].all_reduce(np.ones(3, np.float32)))
    assert (type(error), error.ranks) == (inanet.WorkerLostError, (2,))


def test_those_whose_results_lie_about_are_named(jobs: list[inanet.Job]) -> None:
    for job in jobs:
        for _ in range(DEPTH):
            job.all_reduce_async(np.ones(3, np.float32))
    jobs[0].timeout = 0.0
    error = error_from(lambda: jobs[0].all_reduce_async(np.ones(3, np.float32)))
    assert isinstance(error, inanet.RoundTimeout)
    assert error.ranks == (1,)


def test_short_waits_are_not_logged(jobs: list[inanet.Job], caplog: pytest.LogCaptureFixture) -> None:
    handle = jobs[0].all_reduce_async(np.ones(3, np.float32))
    jobs[0]._conversation._logged = -1e9
    error_from(lambda: handle.wait(0.0))
    assert not caplog.records


def test_forked_child_takes_no_results(jobs: list[inanet.Job]) -> None:
    handles = [job.all_reduce_async(np.ones(3, np.float32)) for job in jobs]
    child = os.fork()
    if child == 0:
        try:
            handles[0].done()
            handles[0].wait()
        except inanet.AgentUnavailable:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    side = jobs[1]._exchange
    assert side is not None
    assert side._lines[0, Word.READ] == 0
    assert all((handle.wait() == WORLD).all() for handle in handles)


def test_processors_that_reorder_stores_leave_small_tensors_to_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ORDERED", False)
    jobs = agent.connect_all(2)
    run_all(lambda rank: jobs[rank].barrier(), 2)
    assert len(agent.backend.rounds) == 1
    for job in jobs:
        job.close()


def test_agent_without_memory_to_share_sums_small_tensors_itself(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(size: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    create = segments.create
    monkeypatch.setattr(segments, "create", none_left)
    jobs = agent.connect_all(2)
    monkeypatch.setattr(segments, "create", create)
    run_all(lambda rank: jobs[rank].barrier(), 2)
    assert len(agent.backend.rounds) == 1
    for job in jobs:
        job.close()


@pytest.mark.parametrize("ranks", [["x"], [[1, 2]], list(range(2000))])
def test_rank_that_fails_with_rubbish_ends_the_job_alone(agent: Agent, ranks: list[Any]) -> None:
    jobs = agent.connect_all(WORLD)
    jobs[0]._conversation.say("fail", cause="mismatch", message="x", round=1, ranks=ranks)
    for job in jobs[1:]:
        error = error_from(job.barrier)
        assert (type(error), error.ranks) == (inanet.WorkerLostError, (0,))
    for job in jobs:
        job.close()
    assert agent.backend.left.get(timeout=30)[0] == "train"


def test_counters_may_wrap_round() -> None:
    memory = bytearray(exchange_bytes(2))
    sides = [Exchange(memory, (0, 1), rank, watch) for rank in (0, 1)]
    start = 2**32 - 3
    for side in sides:
        side._posted = start
        side._lines[:, Word.ARRIVED] = start
        side._lines[:, Word.READ] = start
    for number in range(1, 8):
        outcomes = [Outcome("x", None, seq=number) for _ in sides]
        arrays = [np.full(2, number, np.int32) for _ in sides]
        what = ("", "i32", (2,), "sum", "prologue", 0.0, False)
        for side, array, outcome in zip(sides, arrays, outcomes, strict=True):
            side.make_room(outcome, 0.0)
            assert side.post(side.call(what), array, outcome)
        for side, outcome in zip(sides, outcomes, strict=True):
            side.finish(outcome, 0.0)
            assert outcome.error is None
            assert outcome.result is not None
            assert (outcome.result == 2 * number).all()


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_calls_that_come_again_write_their_result_where_the_tensor_is(
    jobs: list[inanet.Job], op: str
) -> None:
    random = np.random.default_rng(8)
    for _ in range(3):
        arrays = [(random.standard_normal(1023) * 10**k).astype(np.float32) for k in range(WORLD)]
        want = expected(arrays, "f32", op, "prologue")
        run_all(lambda rank, arrays=arrays: jobs[rank].all_reduce(arrays[rank], op, "w"), WORLD)
        assert {array.tobytes() for array in arrays} == {want.tobytes()}


def test_result_that_comes_too_late_is_not_written_into_an_array_of_somebody_else(
    jobs: list[inanet.Job],
) -> None:
    run_all(lambda rank: jobs[rank].all_reduce(np.ones(3, np.float32)), WORLD)
    array = np.ones(3, np.float32)
    error = error_from(lambda: jobs[0].all_reduce(array, timeout=0.0))
    assert isinstance(error, inanet.RoundTimeout)
    for job in jobs[1:]:
        job.all_reduce_async(np.ones(3, np.float32))
    run_all(lambda rank: jobs[rank].barrier(), WORLD)
    assert (array == 1).all()


def test_nan_in_a_call_that_comes_again_is_refused_like_the_first(jobs: list[inanet.Job]) -> None:
    for value in (1, np.inf):
        arrays = [np.ones(300, np.float32) for _ in jobs]
        arrays[2][290] = value
        errors = run_all(
            lambda rank, arrays=arrays: (
                error_from(lambda: jobs[rank].all_reduce(arrays[rank], name="w"))
                if arrays[2][290] != 1
                else jobs[rank].all_reduce(arrays[rank], name="w")
            ),
            WORLD,
        )
    assert {(type(error), error.index, error.ranks) for error in errors} == {
        (inanet.NonFiniteError, 290, (2,))
    }


@pytest.mark.parametrize(
    ("line", "count"), [("max 100000", 3), ("150000 100000", 1), ("900000 100000", 3), ("", 3)]
)
def test_processors_are_those_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "cpu.max").write_text(line)
    monkeypatch.setattr(exchange, "_CGROUP", tmp_path / "cpu.max")
    assert exchange.processors() == count


def test_agent_counts_what_it_does_not_hear_of(agent: Agent, jobs: list[inanet.Job]) -> None:
    for size in (3, 3, MOST_BYTES):
        run_all(lambda rank, size=size: jobs[rank].all_reduce(np.ones(size, np.float32)), WORLD)
    counts = {"rounds_shared_memory": 2, "rounds_agent": 1}
    assert counts.items() <= jobs[0].stats().items()
    samples = {(one.name, one.labels): one.value for one in agent.server.samples()}
    assert samples.pop(("inanet_round_duration_seconds", ())).total > 0  # type: ignore[union-attr]
    assert samples == {
        ("inanet_local_rounds", ("shared_memory",)): 2,
        ("inanet_local_rounds", ("agent",)): 1,
        # those that the agent has seen
        ("inanet_rounds", ("done",)): 1,
        ("inanet_rounds", ("failed",)): 0,
    }
    for job in jobs:
        job.close()
    assert agent.backend.left.get(timeout=PATIENCE)[0] == "train"
    assert agent.server.counts() == counts
