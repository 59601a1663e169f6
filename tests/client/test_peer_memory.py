"""Large private tensors of ranks on one host: each reads the others' memory, with the bits and errors of the agent."""

import ctypes
import errno
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.client import meeting, peer_memory
from inanet.messages.segments import MOST_BYTES
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import tensor_spec
from tests.client.agent import PATIENCE, Agent, error_from, run_all

WORLD = 3
#: elements of the smallest tensors that are not small
LEAST = MOST_BYTES // 4 + 1


@pytest.fixture(autouse=True)
def _smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memory, "LEAST_BYTES", 1)


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


def through_agent(agent: Agent) -> list[int]:
    """Numbers of the rounds that the agent has done."""
    return [number for _, number, _ in agent.backend.rounds]


def once(jobs: list[inanet.Job], count: int, op: str = "sum", name: str = "w") -> None:
    """What has been called before is known."""
    run_all(lambda rank: jobs[rank].all_reduce(np.ones(count, np.float32), op, name), len(jobs))


def expected(arrays: list[np.ndarray], op: str) -> np.ndarray:
    copies = [array.copy() for array in arrays]
    spec = tensor_spec("", "f32", copies[0].shape, op, "prologue", 0.0, False)
    assert LocalTensor(spec, len(copies)).reduce(copies) is None
    return copies[0]


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("count", [LEAST, 3 * 64 * 256, 200_003])
def test_bits_are_those_of_any_other_round(agent: Agent, jobs: list[inanet.Job], count: int, op: str) -> None:
    once(jobs, count, op)
    random = np.random.default_rng(3)
    for _ in range(2):
        arrays = [(random.standard_normal(count) * 10.0**k).astype(np.float32) for k in range(WORLD)]
        want = expected(arrays, op)
        run_all(lambda rank, arrays=arrays: jobs[rank].all_reduce(arrays[rank], op, "w"), WORLD)
        assert [array.tobytes() == want.tobytes() for array in arrays] == [True] * WORLD
    assert through_agent(agent) == [1]


def test_fewer_fragments_than_ranks(agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inanet.client.exchange.MOST_BYTES", 4)
    jobs = agent.connect_all(WORLD)
    once(jobs, 257)
    arrays = [np.full(257, rank, np.float32) for rank in range(WORLD)]
    run_all(lambda rank: jobs[rank].all_reduce(arrays[rank], name="w"), WORLD)
    assert all((array == 3).all() for array in arrays)
    assert through_agent(agent) == [1]
    for job in jobs:
        job.close()


def test_agent_does_what_one_rank_has_in_memory_shared_with_it(agent: Agent, jobs: list[inanet.Job]) -> None:
    once(jobs, LEAST)
    for turn in range(3):
        arrays = [np.ones(LEAST, np.float32) for _ in jobs]
        arrays[turn] = jobs[turn].empty(LEAST)
        arrays[turn][:] = 5
        run_all(lambda rank, arrays=arrays: jobs[rank].all_reduce(arrays[rank], name="w"), WORLD)
        assert all((array == 7).all() for array in arrays)
    assert through_agent(agent) == [1, 2, 3, 4]


def test_agent_does_what_one_rank_does_not_wait_for(agent: Agent, jobs: list[inanet.Job]) -> None:
    once(jobs, LEAST)
    arrays = [np.ones(LEAST, np.float32) for _ in jobs]

    def call(rank: int) -> None:
        if rank == 1:
            handles = [
                jobs[1].all_reduce_async(arrays[1], name="w"),
                jobs[1].all_reduce_async(np.ones(3, np.float32)),
            ]
            for handle in handles:
                handle.wait()
        else:
            jobs[rank].all_reduce(arrays[rank], name="w")
            jobs[rank].all_reduce(np.ones(3, np.float32))

    run_all(call, WORLD)
    assert all((array == WORLD).all() for array in arrays)
    assert through_agent(agent) == [1, 2]
    once(jobs, LEAST)
    assert through_agent(agent) == [1, 2]


def test_nan_is_refused_on_all_ranks_alike_and_the_job_goes_on(jobs: list[inanet.Job]) -> None:
    once(jobs, LEAST)
    for rank, index in ((1, 7), (2, LEAST - 1), (0, 5000)):
        arrays = [np.ones(LEAST, np.float32) for _ in jobs]
        arrays[rank][index] = np.nan
        arrays[2][LEAST - 1] = np.inf
        errors = run_all(
            lambda r, arrays=arrays: error_from(lambda: jobs[r].all_reduce(arrays[r], name="w")), WORLD
        )
        for error in errors:
            assert isinstance(error, inanet.NonFiniteError)
            assert (error.tensor, error.index, error.ranks) == ("w", index, (rank,))
    once(jobs, LEAST)


def test_different_tensors_are_refused_with_what_differs(jobs: list[inanet.Job]) -> None:
    once(jobs, LEAST)
    once(jobs, LEAST + 1)

    def call(rank: int) -> inanet.InaError:
        array = np.ones(LEAST + (rank == 2), np.float32)
        return error_from(lambda: jobs[rank].all_reduce(array, name="w"))

    for error in run_all(call, WORLD):
        assert isinstance(error, inanet.MismatchError)
        assert error.field == "shape"
    once(jobs, LEAST)


def test_who_is_late_is_named_and_the_collective_goes_on(agent: Agent, jobs: list[inanet.Job]) -> None:
    once(jobs, LEAST)

    def call(rank: int) -> inanet.InaError:
        return error_from(lambda: jobs[rank].all_reduce(np.ones(LEAST, np.float32), name="w", timeout=0.0))

    errors = run_all(call, 2)
    assert {(type(error), error.round) for error in errors} == {(inanet.RoundTimeout, 2)}
    assert all(2 in error.ranks for error in errors)
    array = np.ones(LEAST, np.float32)
    jobs[2].all_reduce(array, name="w")
    assert (array == WORLD).all()
    once(jobs, LEAST)
    assert through_agent(agent) == [1, 2]


def test_ranks_that_may_not_read_each_other_leave_it_to_the_agent_and_say_so_once(
    agent: Agent, jobs: list[inanet.Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(meeting, "read_process", lambda *_: errno.EPERM)
    caplog.set_level(logging.WARNING, "inanet")
    for _ in range(3):
        once(jobs, LEAST)
    assert through_agent(agent) == [1, 2, 3]
    (record,) = caplog.records
    assert "process_vm_readv: Operation not permitted" in record.getMessage()


def test_process_of_another_namespace_is_not_read(
    agent: Agent, jobs: list[inanet.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = meeting.read_process

    def elsewhere(pid: int, remote: int, local: int, size: int) -> int:
        code = original(pid, remote, local, size)
        # as if the number were that of another process here
        ctypes.memset(local, 0, 1)
        return int(code)

    monkeypatch.setattr(meeting, "read_process", elsewhere)
    for _ in range(2):
        once(jobs, LEAST)
    assert through_agent(agent) == [1, 2]


def test_call_that_is_interrupted_ends_the_job(
    jobs: list[inanet.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    once(jobs, LEAST)
    sum_share = meeting.sum_share

    def interrupted(pids: object, addresses: object, mine: int, *rest: object) -> int:
        if mine == 1:
            raise KeyboardInterrupt
        return int(sum_share(pids, addresses, mine, *rest))

    monkeypatch.setattr(meeting, "sum_share", interrupted)

    def call(rank: int) -> BaseException:
        try:
            jobs[rank].all_reduce(np.ones(LEAST, np.float32), name="w")
        except BaseException as error:
            return error
        pytest.fail("it was interrupted")

    errors = run_all(call, WORLD)
    assert isinstance(errors[1], KeyboardInterrupt)
    assert {type(error) for error in (errors[0], errors[2])} == {inanet.FabricError}


SCRIPT = """
import sys, time, numpy as np, inanet
from inanet.client import meeting, peer_memory
peer_memory.LEAST_BYTES = 1
job = inanet.connect("train", rank=2, world=3, local_world=3, socket=sys.argv[1])
array = np.ones(int(sys.argv[2]), np.float32)
job.all_reduce(array, name="w")
job.all_reduce(array, name="w")

def stopped(*_):
    print("here", flush=True)
    time.sleep(60)

setattr(meeting if sys.argv[3] == "sum_share" else peer_memory.PeerMemory, sys.argv[3], stopped)
job.all_reduce(array, name="w")
"""


@pytest.mark.parametrize("where", ["sum_share", "_read", "_all_would"])
def test_rank_that_is_killed_in_the_middle_is_told_to_all_others(agent: Agent, where: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(agent.path), str(LEAST), where], stdout=subprocess.PIPE, text=True
    )
    try:
        jobs = run_all(
            lambda rank: inanet.connect(
                "train", rank=rank, world=3, local_world=3, socket=agent.path, timeout=PATIENCE
            ),
            2,
        )
        for _ in range(2):
            once(jobs, LEAST)

        def call(rank: int) -> inanet.InaError:
            return error_from(lambda: jobs[rank].all_reduce(np.ones(LEAST, np.float32), name="w"))

        assert process.stdout is not None

        def kill(_: int) -> inanet.InaError:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            return inanet.FabricError("")

        begun = time.monotonic()
        errors = run_all(lambda rank: kill(rank) if rank == 2 else call(rank), 3)[:2]
        assert {(type(error), error.ranks) for error in errors} == {(inanet.WorkerLostError, (2,))}
        assert time.monotonic() - begun < PATIENCE
        for job in jobs:
            job.close()
    finally:
        process.kill()
        process.communicate()


def test_a_decision_is_taken_once_and_not_for_what_is_past() -> None:
    word = np.zeros(1, np.uint32)
    address = word.ctypes.data
    assert meeting.decide(address, 1, True)
    assert meeting.decide(address, 1, False)
    assert not meeting.decide(address, 3, False)
    assert not meeting.decide(address, 3, True)
    assert not meeting.decide(address, 2, True)
    # numbers may wrap round
    word[0] = 2**32 - 1
    assert meeting.decide(address, 2**31, True)
    assert word[0] == 1
