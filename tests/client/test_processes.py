"""Training processes that are processes: what they import, how they die, what they leave behind."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import inanet
from tests.client.agent import PATIENCE, Agent, error_from
from tests.open_files import mapped_inodes

ROOT = Path(__file__).parents[2]
#: what a training process would be slow, or break, with
HEAVY = ("numba", "uvloop", "pydantic", "asyncio", "structlog", "torch", "inanet.aio", "inanet.proto")

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(agent: Agent) -> Iterator[Start]:
    """Starts Python processes whose environment names socket and rank; they are killed in the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(script: str, rank: int = 0, world: int = 1) -> "subprocess.Popen[str]":
        numbers = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=os.environ | numbers | {"INA_SOCKET": str(agent.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate(timeout=PATIENCE)


def line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: "subprocess.Popen[str]") -> str:
    """What a process prints until it ends in good order."""
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return output.strip()


TRAINING = """
import numpy as np, inanet
with inanet.connect("train") as job:
    weights = job.empty(1000)
    weights[:] = job.rank + 1
    for step in range(20):
        job.all_reduce(weights, "mean", "weights")
        weights += job.rank
    private = np.full(3, job.rank, np.int64)
    job.all_reduce(private)
    print(weights[0], weights[-1], private.tolist())
"""


def test_two_processes_train_together(run: Start) -> None:
    processes = [run(TRAINING, rank, 2) for rank in (0, 1)]
    # the mean grows by a half with every step after the first; rank 1 is ahead by one in the end
    assert [end(process) for process in processes] == ["11.0 11.0 [1, 1, 1]", "12.0 12.0 [1, 1, 1]"]


def test_a_training_process_imports_little(run: Start) -> None:
    script = f"""
import sys, inanet
print([name for name in sys.modules if name.startswith("inanet.") or name == "numpy"])
import numpy as np
with inanet.connect("train") as job:
    job.all_reduce(np.ones(4, np.float32))
    inanet.InaError, inanet.Handle
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert end(run(script)).splitlines() == ["[]", "[]"]


def test_public_names_are_there() -> None:
    names = [name for name in dir(inanet) if name[0].isupper() and name not in ("Any", "TYPE_CHECKING")]
    assert {"Job", "Handle", "InaError", "AgentUnavailable", "RoundTimeout"} <= set(names)
    assert all(isinstance(getattr(inanet, name), type) for name in names)
    with pytest.raises(AttributeError, match="'inanet' has no attribute 'conect'"):
        inanet.conect  # noqa: B018


WAITING = """
import sys, numpy as np, inanet
job = inanet.connect("train")
handle = job.all_reduce_async(np.ones(1000, np.float32))
job.stats()
print("waiting", flush=True)
try:
    handle.wait()
except inanet.InaError as error:
    print(type(error).__name__, error.ranks, error.round, error)
"""


def test_killing_a_rank_ends_the_round_of_the_others(run: Start, agent: Agent) -> None:
    agent.backend.held = True
    processes = [run(WAITING, rank, 3) for rank in range(3)]
    assert [line(process) for process in processes] == ["waiting"] * 3
    processes[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        where = f"job 'train', rank {rank}, round 1"
        why = f"rank 1 is gone: process {processes[1].pid} ended"
        assert end(processes[rank]) == f"WorkerLostError (1,) 1 {where}: {why}"
    assert "rank 1 is gone" in agent.backend.left.get(timeout=PATIENCE)[1]


def test_killing_a_rank_that_joins_makes_room_for_it_again(run: Start, agent: Agent) -> None:
    first = run("import inanet; print('up', flush=True); inanet.connect('train')", 1, 2)
    assert line(first) == "up"
    agent.until(lambda: "train" in agent.server._groups)
    first.send_signal(signal.SIGKILL)
    agent.until(lambda: not agent.server._groups)
    processes = [run(TRAINING, rank, 2) for rank in (0, 1)]
    assert [end(process)[:4] for process in processes] == ["11.0", "12.0"]


SHARING = """
import inanet
job = inanet.connect("train")
array = job.empty(9)
print("sharing", flush=True)
input()
"""


def test_nothing_is_left_of_processes_that_were_killed(run: Start, agent: Agent, tmp_path: Path) -> None:
    before = mapped_inodes("memfd:inanet")
    process = run(SHARING)
    assert line(process) == "sharing"
    agent.until(lambda: any(session._segments for session in agent.server._sessions))
    process.send_signal(signal.SIGKILL)
    agent.until(lambda: not agent.server._sessions)
    # a session that has ended may be in a cycle
    gc.collect()
    assert mapped_inodes("memfd:inanet") <= before
    assert not [name for name in os.listdir("/dev/shm") if "inanet" in name]
    agent.stop()
    assert list(tmp_path.iterdir()) == []


AGENT = """
import asyncio, sys
from pathlib import Path
from inanet.agent.server import LocalServer
from tests.client.agent import LoopbackBackend

async def main():
    backend = LoopbackBackend()
    backend.held = True
    await LocalServer(Path(sys.argv[1]), backend, shares=False).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_killing_the_agent_ends_the_round_and_its_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert line(process) == "ready"
        with inanet.connect("train", rank=0, world=1, local_world=1, socket=path) as job:
            handle = job.all_reduce_async(np.ones(10, np.float32))
            job.stats()
            process.kill()
            error = error_from(handle.wait)
            assert isinstance(error, inanet.AgentUnavailable)
            assert "the worker agent is gone" in str(error)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)
    assert path.is_socket()
    with Agent(path, None) as agent, agent.connect() as job:
        job.barrier()


FORKING = """
import os, numpy as np, inanet
job = inanet.connect("train")
shared = job.empty(4)
child = os.fork()
if child == 0:
    try:
        job.all_reduce(shared)
    except inanet.AgentUnavailable as error:
        shared[0] = "forked" in str(error)
    job.close()
    with inanet.connect("of the child") as own:
        own.all_reduce(own.empty(3))
        shared[1] = 1
    os._exit(0)
os.waitpid(child, 0)
job.barrier()
print(shared.tolist())
job.close()
"""


def test_a_forked_child_leaves_the_job_of_its_parent_alone(run: Start) -> None:
    assert end(run(FORKING)) == "[1.0, 1.0, 0.0, 0.0]"


ORPHAN = """
import os, sys, numpy as np, inanet
job = inanet.connect("train")
if os.fork() == 0:
    # a data loader that outlives the training process
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
job.barrier()
"""


def test_a_child_does_not_keep_a_dead_parent_s_connection_open(run: Start, agent: Agent) -> None:
    process = run(ORPHAN)
    child = int(line(process))
    assert process.wait(PATIENCE) == 0
    # the child still runs
    os.kill(child, 0)
    assert "rank 0 is gone" in agent.backend.left.get(timeout=PATIENCE)[1]
