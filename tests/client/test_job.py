"""Collectives as a training process calls them, against a real server on both kinds of event loops."""

import array
import errno
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import inanet
from inanet.messages.session import MOST_AHEAD
from inanet.proto.common.plan import ExponentMode, TensorSpec
from tests.client.agent import Agent, error_from, run_all
from tests.open_files import open_files


def reduced(pair: list[inanet.Job], arrays: list[Any], *arguments: Any, **options: Any) -> list[Any]:
    """What both ranks get back."""
    return run_all(lambda rank: pair[rank].all_reduce(arrays[rank], *arguments, **options), 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64])
@pytest.mark.parametrize(("op", "expected"), [("sum", [3, 3, 7]), ("max", [2, 5, 4]), ("min", [1, -2, 3])])
def test_both_ranks_get_the_result_in_place(
    pair: list[inanet.Job], dtype: Any, op: str, expected: list[int]
) -> None:
    arrays = [np.array([1, 5, 3], dtype), np.array([2, -2, 4], dtype)]
    back = reduced(pair, arrays, op)
    for mine, returned in zip(arrays, back, strict=True):
        assert returned is mine
        assert mine.tolist() == expected


def test_the_mean_of_floats(pair: list[inanet.Job]) -> None:
    arrays = [np.array([1.0], np.float32), np.array([2.0], np.float32)]
    reduced(pair, arrays, op="mean")
    assert arrays[0] == arrays[1] == 1.5


def test_bfloat16_tensors(pair: list[inanet.Job]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = [torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), torch.ones((1, 2), dtype=torch.bfloat16)]
    reduced(pair, tensors)
    assert [tensor.tolist() for tensor in tensors] == [[[2.5, -1.0]]] * 2


def layouts() -> dict[str, NDArray[np.float32]]:
    """Arrays of the same values in memory of all kinds."""
    plain = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    wide = np.zeros((2, 3, 8), np.float32)
    wide[..., ::2] = plain
    return {
        "contiguous": plain.copy(),
        "every second": wide[..., ::2],
        "transposed": plain.transpose(2, 1, 0).copy().transpose(2, 1, 0),
        "backwards": plain[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
        "Fortran": np.asfortranarray(plain),
    }


@pytest.mark.parametrize("layout", layouts())
def test_any_strides(pair: list[inanet.Job], layout: str) -> None:
    arrays = [layouts()[layout], np.full((2, 3, 4), 100, np.float32)]
    reduced(pair, arrays)
    for mine in arrays:
        assert mine.tolist() == (np.arange(24).reshape(2, 3, 4) + 100).tolist()


def test_what_lies_between_the_elements_stays(pair: list[inanet.Job]) -> None:
    whole = np.full(10, 7, np.int32)
    reduced(pair, [whole[1::3], np.ones(3, np.int32)])
    assert whole.tolist() == [7, 8, 7, 7, 8, 7, 7, 8, 7, 7]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 1, 1, 1)])
def test_odd_shapes(pair: list[inanet.Job], agent: Agent, shape: tuple[int, ...]) -> None:
    arrays = [np.ones(shape, np.float32), np.ones(shape, np.float32)]
    reduced(pair, arrays)
    assert all((mine == 2).all() and mine.shape == shape for mine in arrays)
    # also those without elements take part
    assert agent.backend.rounds[-1][2].shape == shape


def test_buffers_that_are_no_arrays(pair: list[inanet.Job]) -> None:
    first, second = array.array("i", [1, 2]), np.array([10, 20], np.int32)
    assert reduced(pair, [first, second])[0] is first
    assert list(first) == [11, 22]


def test_the_backend_gets_views_by_rank_and_the_whole_spec(pair: list[inanet.Job], agent: Agent) -> None:
    arrays = [np.full((2, 2), rank, np.float16) for rank in (0, 1)]
    agent.backend.held = True
    handles = [
        pair[rank].all_reduce_async(arrays[rank], "mean", "w", mode="fixed", factor=2.0, nan="propagate")
        for rank in (1, 0)
    ]
    agent.until(lambda: bool(agent.backend.rounds))
    spec = TensorSpec("w", "f16", (2, 2), "mean", ExponentMode.FIXED, 2.0, True)
    assert agent.backend.rounds == [("train", 1, spec)]
    assert [view.tolist() for view in agent.backend.arrays] == [[0.0] * 4, [1.0] * 4]
    assert [view.dtype for view in agent.backend.arrays] == [np.float16] * 2
    agent.do(lambda: agent.backend.finish(1, spec, agent.backend.arrays))
    assert [handle.wait().tolist() for handle in handles] == [[[0.5, 0.5]] * 2] * 2


def test_exact_operations_carry_no_mode(job: inanet.Job, agent: Agent) -> None:
    job.all_reduce(np.zeros(1, np.float32), "max", mode="fixed")
    job.all_reduce(np.zeros(1, np.int32), "sum", mode="fixed")
    job.all_reduce(np.zeros(1, np.float32), "sum", mode="prologue", factor=5.0)
    assert [(spec.mode, spec.factor) for _, _, spec in agent.backend.rounds] == [
        (ExponentMode.NONE, 0.0),
        (ExponentMode.NONE, 0.0),
        (ExponentMode.PROLOGUE, 0.0),
    ]


class TestShared:
    """Arrays in memory that the job provides."""

    @pytest.fixture(autouse=True)
    def prepare(self, pair: list[inanet.Job], agent: Agent) -> None:
        self.pair, self.agent = pair, agent

    def test_they_are_reduced_where_they_are(self) -> None:
        arrays = [job.empty((3, 4)) for job in self.pair]
        assert all(type(mine) is np.ndarray and not mine.any() for mine in arrays)
        self.agent.backend.held = True
        for job, mine in zip(self.pair, arrays, strict=True):
            mine[:] = 1
            job.all_reduce_async(mine)
        self.agent.until(lambda: bool(self.agent.backend.rounds))
        # what the agent writes is there without anybody waiting for it
        self.agent.backend.arrays[0][5] = 42
        assert arrays[0][1, 1] == 42

    def test_so_are_contiguous_parts_and_other_views(self) -> None:
        whole = self.pair[0].empty(100, np.int32)
        other = np.ones((2, 5), np.int32)
        reduced(self.pair, [whole[20:30].reshape(2, 5), other])
        assert whole.nonzero()[0].tolist() == list(range(20, 30))
        start = self.agent.backend.arrays[0].ctypes.data
        assert start % 4096 == 80
        # the same memory as another type
        reduced(self.pair, [whole.view(np.float32)[50:52], np.ones(2, np.float32)])
        assert self.agent.backend.arrays[0].ctypes.data % 4096 == 200

    def test_parts_that_are_not_contiguous_are_copied(self) -> None:
        whole = self.pair[0].empty((4, 4), np.int32)
        reduced(self.pair, [whole[:, 1], np.ones(4, np.int32)])
        assert whole.tolist() == [[0, 1, 0, 0]] * 4

    def test_tensors_of_torch_in_shared_memory(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        whole = self.pair[0].empty(8)
        reduced(self.pair, [torch.from_numpy(whole)[2:4], np.ones(2, np.float32)])
        assert whole.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]

    def test_they_outlive_the_job(self) -> None:
        mine = self.pair[0].empty(10)
        for job in self.pair:
            job.close()
        mine[:] = 3
        assert mine.sum() == 30


class TestLarge:
    """Index arithmetic beyond 32 bits, in memory of which a few pages are touched."""

    def test_a_whole_tensor(self, job: inanet.Job, agent: Agent) -> None:
        count = (1 << 32) // 4 + 5
        whole = job.empty(count)
        assert whole.nbytes > 1 << 32
        whole[-1] = 5
        job.all_reduce(whole)
        assert agent.backend.arrays[0].size == count
        assert agent.backend.arrays[0][-1] == 5

    def test_a_part_far_inside(self, job: inanet.Job, agent: Agent) -> None:
        whole = job.empty((3, 1 << 30), np.int64)
        part = whole[2, (1 << 29) + 7 :][:3]
        part[:] = [1, 2, 3]
        job.all_reduce(part)
        assert agent.backend.arrays[0].tolist() == [1, 2, 3]

    def test_a_shape_beyond_memory_s_size_is_no_overflow(self, job: inanet.Job) -> None:
        nothing = np.zeros((0, 1 << 40), np.float32)
        assert job.all_reduce(nothing) is nothing


class TestAsync:
    """Handles."""

    def test_rounds_are_numbered_by_call(self, job: inanet.Job) -> None:
        handles = [job.all_reduce_async(np.zeros(1, np.float32)) for _ in range(3)]
        assert [handle.round for handle in handles] == [1, 2, 3]
        for handle in reversed(handles):
            handle.wait()

    def test_done_tells_without_waiting(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        mine = np.ones(2, np.float32)
        handle = job.all_reduce_async(mine)
        agent.until(lambda: bool(agent.backend.rounds))
        assert not handle.done()
        agent.do(lambda: agent.backend.futures[1].set_result(None))
        # whatever else the agent answers comes after the result
        job.stats()
        assert handle.done()
        assert handle.wait() is mine
        assert handle.wait() is mine

    def test_the_array_may_be_used_again_only_after_waiting(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        mine = np.ones(2, np.float32)
        handle = job.all_reduce_async(mine)
        agent.until(lambda: bool(agent.backend.rounds))
        agent.backend.arrays[0][:] = 9
        agent.do(lambda: agent.backend.futures[1].set_result(None))
        job.stats()
        assert handle.done()
        assert mine.tolist() == [1, 1]
        handle.wait()
        assert mine.tolist() == [9, 9]

    def test_dropped_handles_do_not_disturb(self, pair: list[inanet.Job], agent: Agent) -> None:
        for job in pair:
            job.all_reduce_async(np.ones(1000, np.float32))
        gc.collect()
        arrays = [np.ones(3, np.float32) for _ in pair]
        reduced(pair, arrays)
        assert arrays[0].tolist() == [2, 2, 2]
        assert len(agent.backend.rounds) == 2

    def test_as_many_as_one_likes(self, job: inanet.Job, agent: Agent) -> None:
        handles = [job.all_reduce_async(np.full(2, number, np.int32)) for number in range(600)]
        assert [int(handle.wait()[0]) for handle in handles] == list(range(600))

    def test_more_than_may_be_on_their_way_wait_for_room(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        handles = [job.all_reduce_async(np.ones(1, np.int32)) for _ in range(MOST_AHEAD)]
        job.timeout = 0.01
        error = error_from(lambda: job.all_reduce_async(np.ones(1, np.int32)))
        assert isinstance(error, inanet.RoundTimeout)
        assert error.round == 1
        agent.until(lambda: len(agent.backend.rounds) == MOST_AHEAD)
        agent.do(lambda: agent.backend.futures[1].set_result(None))
        handles[0].wait()
        # the one that found no room does not count
        assert job.all_reduce_async(np.ones(1, np.int32)).round == MOST_AHEAD + 1

    def test_waiting_gives_up_but_the_round_goes_on(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        handle = job.all_reduce_async(np.ones(1, np.float32))
        error = error_from(lambda: handle.wait(timeout=0.01))
        assert type(error) is inanet.RoundTimeout
        assert (error.job, error.rank, error.round) == ("train", 0, 1)
        agent.until(lambda: bool(agent.backend.rounds))
        agent.do(lambda: agent.backend.futures[1].set_result(None))
        handle.wait()


class TestThreads:
    """One job, many threads."""

    def test_a_thread_that_waits_does_not_keep_others_from_their_results(
        self, pair: list[inanet.Job], agent: Agent
    ) -> None:
        """Round 2 of rank 0 is waited for first; the other thread must get round 1, or nothing ever ends."""
        first = pair[0].all_reduce_async(np.ones(1, np.int32))
        second = pair[0].all_reduce_async(np.ones(1, np.int32))
        late = threading.Thread(target=second.wait)
        late.start()
        early = threading.Thread(target=first.wait)
        early.start()
        pair[1].all_reduce(np.ones(1, np.int32))
        early.join(20)
        assert not early.is_alive()
        assert late.is_alive()
        pair[1].all_reduce(np.ones(1, np.int32))
        late.join(20)
        assert not late.is_alive()

    def test_many_threads_each_with_its_own_arrays(self, job: inanet.Job, agent: Agent) -> None:
        def work(index: int) -> list[int]:
            return [int(job.all_reduce(np.full(50, index * 100 + step, np.int64))[7]) for step in range(30)]

        assert run_all(work, 6) == [[index * 100 + step for step in range(30)] for index in range(6)]
        assert [number for _, number, _ in agent.backend.rounds] == list(range(1, 181))

    def test_closing_wakes_those_who_wait(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        handles = [job.all_reduce_async(np.ones(1, np.float32)) for _ in range(3)]
        errors: list[inanet.InaError] = []
        waiting = [
            threading.Thread(target=lambda handle=handle: errors.append(error_from(handle.wait)))
            for handle in handles
        ]
        for thread in waiting:
            thread.start()
        agent.until(lambda: len(agent.backend.rounds) == 3)
        job.close()
        for thread in waiting:
            thread.join(20)
        assert sorted(error.round for error in errors) == [1, 2, 3]
        assert all("was closed" in error.reason for error in errors)


class TestMemory:
    """Nothing grows with the number of rounds."""

    def segments(self, agent: Agent) -> int:
        return agent.do(lambda: sum(len(session._segments) for session in agent.server._sessions))

    def test_staging_is_reused(self, job: inanet.Job, agent: Agent) -> None:
        def step() -> int:
            for size in (10, 5000, 300, 1 << 18, 10, 200_000):
                job.all_reduce(np.ones(size, np.float32))
            return self.segments(agent)

        # one page, five pages, a megabyte
        assert [step() for _ in range(5)] == [3] * 5

    def test_concurrent_rounds_take_as_many_pieces_and_no_more(self, job: inanet.Job, agent: Agent) -> None:
        for _ in range(4):
            for handle in [job.all_reduce_async(np.ones(100, np.float32)) for _ in range(8)]:
                handle.wait()
        assert self.segments(agent) == 8

    def test_calls_are_told_apart_however_many_there_are(
        self, agent: Agent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The agent remembers a few calls under ids; they come back after others have taken their ids, or their memory."""
        monkeypatch.setattr("inanet.client.conversation.MOST_IDS", 3)
        with agent.connect() as job:
            arrays = [job.empty(count) for count in (1, 2, 3, 4, 5)]
            for index in (0, 1, 2, 3, 4, 4, 3, 0, 1, 0, 2):
                arrays[index][:] = index
                job.all_reduce(arrays[index])
            del arrays[0]
            again = job.empty(6)
            for _ in range(2):
                job.all_reduce(again)
        shapes = [spec.shape for _, _, spec in agent.backend.rounds]
        assert shapes == [(n,) for n in (1, 2, 3, 4, 5, 5, 4, 1, 2, 1, 3, 6, 6)]

    def test_arrays_that_are_gone_are_released(self, job: inanet.Job, agent: Agent) -> None:
        for _ in range(100):
            job.all_reduce(job.empty(100))
        job.barrier()
        job.barrier()
        # one staging piece for the barriers
        assert self.segments(agent) == 1

    def test_dropped_handles_release_their_staging(self, job: inanet.Job, agent: Agent) -> None:
        for _ in range(50):
            job.all_reduce_async(np.ones(100, np.float32))
        job.barrier()
        gc.collect()
        job.barrier()
        assert self.segments(agent) == 1

    def test_an_array_on_its_way_is_kept_until_the_answer(self, job: inanet.Job, agent: Agent) -> None:
        agent.backend.held = True
        job.all_reduce_async(job.empty(100))
        gc.collect()
        job.empty(10)
        agent.until(lambda: bool(agent.backend.rounds))
        assert self.segments(agent) == 2
        agent.do(lambda: agent.backend.futures[1].set_result(None))
        job.stats()
        agent.backend.held = False
        job.barrier()
        assert self.segments(agent) == 1

    def test_too_many_pieces_are_refused(self, job: inanet.Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inanet.client.job.MOST_SEGMENTS", 3)
        kept = [job.empty(1) for _ in range(3)]
        with pytest.raises(inanet.FabricError, match="3 arrays share memory"):
            job.empty(1)
        kept.pop()
        job.empty(1)


def test_barrier_returns_when_all_have_called_it(pair: list[inanet.Job], agent: Agent) -> None:
    passed = threading.Event()

    def first() -> None:
        pair[0].barrier()
        passed.set()

    thread = threading.Thread(target=first)
    thread.start()
    pair[1].stats()
    assert not passed.is_set()
    pair[1].barrier()
    thread.join(20)
    assert passed.is_set()


def test_stats_come_from_the_backend(job: inanet.Job) -> None:
    assert job.stats() == {"rounds": 0, "rounds_agent": 0, "rounds_shared_memory": 0}
    job.barrier()
    assert job.stats() == {"rounds": 1, "rounds_agent": 1, "rounds_shared_memory": 0}


def test_attributes_and_closing(agent: Agent) -> None:
    with agent.connect("mine", 0, 1) as job:
        assert (job.name, job.rank, job.world) == ("mine", 0, 1)
        assert repr(job) == "<inanet.Job 'mine', rank 0 of 1>"
    job.close()
    error = error_from(lambda: job.all_reduce(np.zeros(1, np.float32)))
    assert type(error) is inanet.AgentUnavailable
    assert error.reason == "the job was closed"
    assert agent.backend.left.get(timeout=20) == ("mine", "all ranks of the host have left")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"op": "avg"}, "op 'avg' is none of sum, mean, max, min"),
        ({"mode": "none"}, "mode 'none' is none of"),
        ({"nan": "ignore"}, "nan 'ignore' is none of refuse, propagate"),
        ({"factor": 0.0}, "factor must be a positive number"),
        ({"factor": float("nan")}, "factor must be a positive number"),
        ({"name": "x" * 257}, "256 printable characters"),
        ({"name": "a\nb"}, "256 printable characters"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    job: inanet.Job, agent: Agent, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        job.all_reduce(np.zeros(1, np.float32), **options)
    with pytest.raises(ValueError, match="no int32; reduce with op='sum'"):
        job.all_reduce(np.zeros(1, np.int32), "mean")
    job.barrier()
    assert [number for _, number, _ in agent.backend.rounds] == [1]


def test_described_memory_is_there_before_it_is_written_to(
    job: inanet.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, fd = job.described(100_000)
    try:
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        assert not memory.any()
    finally:
        os.close(fd)
    before = open_files()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(inanet.InaError, match=r"100000 B of memory to share with the agent.*No space left"):
        job.described(100_000)
    assert open_files() <= before
    assert job.all_reduce(np.ones(1, np.float32)).tolist() == [1]
