"""Ranks that fork, end, are killed or destroy their group while collectives and callbacks are on their way."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")

import torch
import torch.distributed as dist
from torch import nn

from inanet.launch.fabric import Fabric
from inanet.launch.process import python_environment
from tests.torch.ranks import Rank, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def forked(rank: Rank) -> list[float]:
    """A child that ends as programs do, with its handlers for that, between two all-reduces and during one."""
    with rank.group("ina"):
        sums = []
        for _ in range(3):
            tensor = torch.ones(5000)
            work = dist.all_reduce(tensor, async_op=True)
            child = os.fork()
            if child == 0:
                # what multiprocessing leaves out: handlers, finalizers
                import atexit

                atexit._run_exitfuncs()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            work.wait()
            sums.append(tensor[-1].item())
        return sums


def test_a_forked_child_that_ends_leaves_the_group_alone(everywhere: Ranks) -> None:
    assert everywhere.run(forked) == [[2.0] * 3] * 2


def bereft(rank: Rank) -> list[str]:
    """Rank 1 is killed after the first of two all-reduces; a callback of rank 0 waits in the second, another for it."""
    with rank.group("ina", seconds=60.0):
        second = dist.new_group(backend="ina")
        for group in (None, second):
            dist.all_reduce(torch.ones(5000), group=group)
        work = dist.all_reduce(torch.ones(5000), async_op=True)
        if rank.rank == 1:
            work.wait()
            os.kill(os.getpid(), signal.SIGKILL)

        def callback(_: torch.futures.Future[list[torch.Tensor]]) -> float:
            future = dist.all_reduce(torch.ones(5000), async_op=True, group=second).get_future()
            return future.then(lambda done: done.value()[0]).wait()[0].item()

        said = []
        last = work.get_future().then(callback).then(lambda done: done.value())
        for wait in (last.wait, lambda: dist.all_reduce(torch.ones(5000)), dist.barrier):
            try:
                wait()
                said.append("no error")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        return said


def test_callbacks_that_wait_for_the_dead_hear_of_it(everywhere: Ranks) -> None:
    with everywhere.started(bereft) as team:
        # the group's timeout is 60 s
        [said] = team.results(among=[0], patience=30.0)
    assert not any(text == "no error" for text in said)


def destroyed_within(rank: Rank) -> str:
    with rank.group("ina"):
        work = dist.all_reduce(torch.ones(5000), async_op=True)
        # both ranks have the result before either ends the group
        dist.barrier()
        work.get_future().then(lambda _: dist.destroy_process_group()).wait()
        said = "destroyed" if not dist.is_initialized() else "alive"
        dist.init_process_group(
            "ina",
            store=dist.FileStore(str(rank.directory / "again"), rank.world),
            rank=rank.rank,
            world_size=rank.world,
        )
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return f"{said}, {tensor.item()}"


def test_a_callback_may_destroy_the_group(everywhere: Ranks) -> None:
    assert everywhere.run(destroyed_within) == ["destroyed, 2.0"] * 2


ENDING = """
import atexit, sys, torch, torch.distributed as dist, inanet.torch
from datetime import timedelta
rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("ina", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=300))
dist.all_reduce(torch.ones(5000))
if how == "atexit":
    atexit.register(dist.destroy_process_group)
if rank == 0:
    # nobody else takes part: it is on its way when the process ends, and so are its callbacks
    work = dist.all_reduce(torch.ones(5000), async_op=True)
    work.get_future().then(lambda done: print("callback"))
    dropped = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(3)]
    del dropped
    received = dist.irecv(torch.ones(1), 1)
print("ends", flush=True)
if how == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["return", "atexit", "raise"])
def test_processes_end_with_works_on_their_way(torch_fabric: Fabric, tmp_path: Path, how: str) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store"), how],
            env=python_environment()
            | {
                "INA_SOCKET": str(torch_fabric.worker_socket(rank)),
                "INA_REQUIRE": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            text, _ = process.communicate(timeout=60)
            assert "ends" in text
            assert process.returncode == (3 if how == "raise" else 0), text
    finally:
        for process in processes:
            process.kill()
            process.wait()


def waited_twice(rank: Rank) -> list[object]:
    """Rank 1 comes when rank 0 has waited for it in vain."""
    with rank.group("ina"):
        store = dist.FileStore(str(rank.directory / "waited"), rank.world)
        dist.all_reduce(torch.ones(5000))
        if rank.rank == 1:
            store.wait(["waited"])
        tensor = torch.ones(5000)
        work = dist.all_reduce(tensor, async_op=True)
        if rank.rank == 1:
            work.wait()
            return [True, True, True, 2.0]
        said = []
        try:
            work.wait(timedelta(milliseconds=50))
        except Exception:
            said.append(not work.is_completed())
        store.set("waited", "")
        work.wait()
        return [*said, work.is_completed(), work.is_success(), tensor[0].item()]


def test_whoever_waited_in_vain_may_wait_again(everywhere: Ranks) -> None:
    assert everywhere.run(waited_twice) == [[True, True, True, 2.0]] * 2


def written(rank: Rank) -> list[object]:
    """What collectives write into where autograd has its own opinion, and the value of the future."""
    with rank.group("ina"):
        found: list[object] = []
        for dtype in (torch.float32, torch.float64):
            parameter = nn.Parameter(torch.full((4, 3), float(rank.rank), dtype=dtype))
            dist.all_reduce(parameter, dist.ReduceOp.AVG)
            with torch.inference_mode():
                tensor = torch.full((4, 3), float(rank.rank), dtype=dtype)
            dist.all_reduce(tensor[:, 1], dist.ReduceOp.AVG)
            dist.broadcast(tensor[:, 2], 1)
            column = torch.full((4, 3), float(rank.rank), dtype=dtype)
            work = dist.all_reduce(column[:, 1], dist.ReduceOp.AVG, async_op=True)
            [value] = work.get_future().wait()
            found += [parameter[0, 0].item(), tensor[0].tolist()[1:], value.tolist()]
        return found


def test_parameters_inference_tensors_and_columns_get_means(everywhere: Ranks) -> None:
    assert everywhere.run(written) == [[0.5, [0.5, 1.0], [0.5] * 4] * 2] * 2


def dropped(rank: Rank) -> float:
    """Works that nobody waits for, among those that somebody does."""
    with rank.group("ina"):
        last = 0.0
        for index in range(300):
            dist.all_reduce(torch.full((2000,), float(index)), async_op=True)
            if index % 50 == 0:
                tensor = torch.ones(2000)
                dist.all_reduce(tensor)
                last = tensor[0].item()
        return last


def test_works_that_nobody_waits_for_hold_up_nobody(everywhere: Ranks) -> None:
    assert everywhere.run(dropped) == [2.0] * 2


def mismatched(rank: Rank) -> str:
    """Sizes that differ end with an error, and not in silence."""
    with rank.group("ina", seconds=6.0):
        dist.all_reduce(torch.ones(5000))
        try:
            dist.all_reduce(torch.ones(5000 + rank.rank * 2000))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def test_sizes_that_differ_are_an_error_for_all(torch_fabric: Fabric, tmp_path: Path) -> None:
    for hosts in ((0, 1), (0, 0)):
        directory = tmp_path / f"{hosts[1]}"
        directory.mkdir()
        pair = Ranks([torch_fabric.worker_socket(host) for host in hosts], directory, {"INA_REQUIRE": "1"})
        said = pair.run(mismatched)
        assert not any(text == "no error" for text in said), said


def resized(rank: Rank) -> list[int]:
    """Torch never resizes a tensor that it has once handed to numpy."""
    with rank.group("ina"):
        sizes = []
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.ones(5000).to(dtype)
            dist.all_reduce(tensor)
            sizes.append(tensor.resize_(6000).numel())
        return sizes


def test_tensors_may_be_resized_afterwards(everywhere: Ranks) -> None:
    assert everywhere.run(resized) == [[6000] * 3] * 2
