"""Small collectives of ranks on one host: the same bits and errors as through the agent, which hears nothing of them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inanet
from inanet.client import exchange
from inanet.client.conversation import Outcome
from inanet.client.exchange import Exchange
from inanet.messages.segments import DEPTH, MOST_BYTES, exchange_bytes
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import tensor_spec
from tests.client.agent import Agent, error_from, run_all

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


def test_counters_may_wrap_round() -> None:
    memory = bytearray(exchange_bytes(2))
    sides = [Exchange(memory, (0, 1), rank, lambda _: None) for rank in (0, 1)]
    start = 2**32 - 3
    for side in sides:
        side._posted = start
        side._lines[:, exchange.Word.ARRIVED] = start
        side._lines[:, exchange.Word.READ] = start
    for number in range(1, 8):
        outcomes = [Outcome("x", None, seq=number) for _ in sides]
        arrays = [np.full(2, number, np.int32) for _ in sides]
        what = ("", "i32", (2,), "sum", "prologue", 0.0, False)
        for side, array, outcome in zip(sides, arrays, outcomes, strict=True):
            side.post(what, array, outcome, 0.0)
        for side, array, outcome in zip(sides, arrays, outcomes, strict=True):
            side.finish(outcome, 0.0)
            assert outcome.error is None
            assert (array == 2 * number).all()
