"""Buckets that move to memory shared with the agent while DDP, the optimizer and autograd go on using them."""

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import numpy as np
import torch
from numpy.typing import NDArray

import inanet
from inanet.client.memory import Memory
from inanet.torch.buckets import LEAST_BYTES, BucketMemory
from inanet.torch.ddp import GradientHook
from tests.open_files import open_files

ELEMENTS = LEAST_BYTES // 4 + 100


class Job:
    """What a job does for a bucket, without an agent."""

    name, rank, over = "train", 2, False

    def __init__(self) -> None:
        self.memory = Memory()

    def described(self, size: int) -> tuple[NDArray[np.uint8], int]:
        piece, fd = self.memory.create(size, findable=True)
        return piece.view(np.dtype(np.uint8), (size,)), fd


class Pending:
    """A reduction that the agent has not answered."""

    def answered(self) -> bool:
        return False


def seen_twice(bucket: torch.Tensor) -> BucketMemory:
    """Its memory after two steps."""
    memory = BucketMemory(Job(), bucket)  # type: ignore[arg-type]
    for _ in range(2):
        memory.take(bucket)
        memory.give(bucket)
    return memory


def mapped(address: int) -> str:
    """What of this process is mapped from an address on."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{address:x}-")), "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_time_it_moves_with_all_that_look_into_it(dtype: torch.dtype) -> None:
    bucket = torch.arange(2 * ELEMENTS, dtype=torch.float32).to(dtype)
    gradient = bucket[100:200].view(10, 10)
    before = bucket.clone()
    memory = BucketMemory(Job(), bucket)  # type: ignore[arg-type]
    memory.take(bucket)
    assert not memory.holds(bucket)
    assert torch.equal(memory.tensor, before)
    memory.take(bucket)
    assert memory.holds(bucket)
    assert torch.equal(bucket, before)
    # a result that the agent writes, and a gradient that autograd adds
    memory.tensor[100] = 7
    assert gradient[0, 0] == 7
    gradient += 1
    assert memory.tensor[100] == 8
    assert "memfd:inanet" in mapped(bucket.data_ptr())
    # and a process that is sent the bucket by torch.multiprocessing
    fd, size = bucket.untyped_storage()._share_fd_cpu_()
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:inanet")
    assert not os.get_inheritable(fd)
    sent = torch.UntypedStorage._new_shared_fd_cpu(os.dup(fd), size)
    memory.tensor[200] = 9
    assert torch.tensor([], dtype=dtype).set_(sent)[200] == 9


def test_no_descriptor_is_left_behind() -> None:
    before = open_files()
    for elements in (10, ELEMENTS):
        bucket, other = torch.ones(elements), torch.ones(elements)
        memories = [seen_twice(bucket), BucketMemory(Job(), other)]  # type: ignore[arg-type]
        del bucket, other, memories
        gc.collect()
    assert not open_files() - before


def test_the_range_is_unmapped_with_the_bucket_and_the_memory_stays() -> None:
    bucket = torch.ones(ELEMENTS)
    memory = seen_twice(bucket)
    address = bucket.data_ptr()
    assert mapped(address)
    del bucket
    gc.collect()
    assert not mapped(address)
    assert (memory.tensor == 1).all()
    # what comes to lie there later is not taken for the bucket
    assert not memory.holds(torch.ones(ELEMENTS))


def test_memory_of_somebody_else_at_the_same_address_is_not_taken_for_the_bucket() -> None:
    bucket = torch.ones(ELEMENTS)
    memory = seen_twice(bucket)
    del bucket
    other = torch.full((ELEMENTS,), 3.0).share_memory_()
    # as it mostly is, for the system maps the next range of this size where the last one was
    memory._moved_to = other.data_ptr()
    assert not memory.holds(other)
    memory.take(other)
    assert (memory.tensor == 3).all()


def in_a_child(act: Callable[[], object]) -> int:
    """Exit status of a forked process that acts; 1 if that raises or is false."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_process_does_not_write_into_the_gradients_of_its_parent() -> None:
    bucket, dead, sent = torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    memory, _, orphan = seen_twice(bucket), seen_twice(dead), seen_twice(sent)
    tensor = orphan.tensor
    del dead, orphan

    def writes() -> bool:
        before = bool((bucket == 1).all()) and bool((sent == 1).all())
        bucket[:100].fill_(5)
        sent.fill_(5)
        return before and bool(bucket.sum() == ELEMENTS + 400)

    assert in_a_child(writes) == 0
    assert (bucket == 1).all()
    assert (sent == 1).all()
    # parent and agent still have the same memory
    memory.tensor[7] = tensor[7] = 9
    assert bucket[7] == sent[7] == 9


def test_a_job_that_is_over_is_given_nothing() -> None:
    bucket = torch.ones(100)
    job = Job()
    memory = BucketMemory(job, bucket)  # type: ignore[arg-type]
    memory.take(bucket)

    def takes() -> bool:
        # what the fork does to a real one
        job.over = True
        memory.take(bucket.fill_(5))
        return True

    assert in_a_child(takes) == 0
    assert (memory.tensor == 1).all()


def test_the_bucket_outlives_the_memory() -> None:
    bucket = torch.ones(ELEMENTS)
    memory = seen_twice(bucket)
    del memory
    gc.collect()
    bucket += 1
    assert bucket.sum() == 2 * ELEMENTS


def _small(_: pytest.MonkeyPatch) -> torch.Tensor:
    return torch.ones(LEAST_BYTES // 4 - 1)


def _part(_: pytest.MonkeyPatch) -> torch.Tensor:
    return torch.ones(2 * ELEMENTS)[:ELEMENTS]


def _shared(_: pytest.MonkeyPatch) -> torch.Tensor:
    return torch.ones(ELEMENTS).share_memory_()


def _no_room(patch: pytest.MonkeyPatch) -> torch.Tensor:
    patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=4096))
    return torch.ones(ELEMENTS)


def _no_mount(patch: pytest.MonkeyPatch) -> torch.Tensor:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    patch.setattr(os, "statvfs", missing)
    return torch.ones(ELEMENTS)


def _refused(patch: pytest.MonkeyPatch) -> torch.Tensor:
    def refused(*_: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    patch.setattr("inanet.messages.segments.mirror", refused)
    return torch.ones(ELEMENTS)


@pytest.mark.parametrize("make", [_small, _part, _shared, _no_room, _no_mount, _refused])
def test_what_cannot_move_is_copied_there_and_back(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = make(monkeypatch)
    memory = BucketMemory(Job(), bucket)  # type: ignore[arg-type]
    for step in range(3):
        bucket.fill_(step)
        memory.take(bucket)
        assert not memory.holds(bucket)
        assert (memory.tensor == step).all()
        memory.tensor += 10
        memory.give(bucket)
        assert (bucket == step + 10).all()


def test_a_bucket_that_the_agent_still_writes_to_is_not_reduced_again() -> None:
    hook = object.__new__(GradientHook)
    hook._transport = SimpleNamespace(job=Job())  # type: ignore[assignment]
    moved, copied = torch.ones(ELEMENTS), torch.ones(10)
    hook._memory = {0: seen_twice(moved), 1: seen_twice(copied)}
    first = hook._memory[1]
    assert hook._memory_of(1, copied) is first
    for memory in hook._memory.values():
        memory.reduction = Pending()  # type: ignore[assignment]
    with pytest.raises(inanet.RoundTimeout, match=r"rank 2.*bucket 0 is still being reduced") as caught:
        hook._memory_of(0, moved)
    assert caught.value.rank == 2
    # the copy is left to the agent
    assert hook._memory_of(1, copied) is not first


def test_a_hook_that_has_left_keeps_no_copies() -> None:
    before = open_files()
    hook = object.__new__(GradientHook)
    hook._transport, hook._recorder, hook._leave = None, None, lambda: None
    moved, copied = torch.ones(ELEMENTS), torch.ones(ELEMENTS)
    hook._memory = {0: seen_twice(moved), 1: BucketMemory(Job(), copied)}  # type: ignore[arg-type]
    copy = hook._memory[1].tensor.data_ptr()
    assert mapped(copy)
    hook.close()
    gc.collect()
    assert not mapped(copy)
    assert moved.sum() == ELEMENTS
    del moved
    assert not open_files() - before
