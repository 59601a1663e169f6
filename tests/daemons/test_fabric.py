"""The promises of a job, through real daemons: bits, errors, crashes, and that nothing is left or grows."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import inanet
from inanet.cli import figures
from inanet.cli.coordinators import Target
from inanet.errors import InaError
from inanet.launch.fabric import Fabric
from inanet.launch.process import python_environment
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from tests.client.agent import run_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOSTS = 4
#: bytes of a tensor that is on its way for long enough to be met there
LARGE = 32 << 20
PATIENCE = 60.0
MODES = {"carried": ExponentMode.CARRIED, "prologue": ExponentMode.PROLOGUE}


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    """Complete before and after every test: whoever kills a daemon starts it again."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("fabric")
        patch.setattr("tempfile.tempdir", str(directory))
        with Fabric(HOSTS, 2) as running:
            yield running
        assert list(directory.iterdir()) == []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what is pushed on it."""
    with ExitStack() as opened:
        yield opened


def join(
    fabric: Fabric, stack: ExitStack, hosts: Sequence[int] = range(HOSTS), job: str = "train"
) -> list[inanet.Job]:
    """A job in which rank k is on host ``hosts[k]``."""

    def connect(rank: int) -> inanet.Job:
        return inanet.connect(
            job,
            rank=rank,
            world=len(hosts),
            local_world=list(hosts).count(hosts[rank]),
            socket=fabric.worker_socket(hosts[rank]),
            timeout=PATIENCE,
        )

    return [stack.enter_context(joined) for joined in run_all(connect, len(hosts))]


def contributions(count: int, seed: int = 0) -> list[NDArray[np.float32]]:
    return [
        np.random.default_rng((seed, rank)).standard_normal(count).astype(np.float32) for rank in range(4)
    ]


class Expected:
    """What one host would make of the rounds of a tensor."""

    def __init__(
        self, count: int, dtype: str = "f32", op: str = "sum", mode: str = "prologue", ranks: int = HOSTS
    ) -> None:
        exact = dtype.startswith("i") or op in ("max", "min")
        chosen = ExponentMode.NONE if exact else MODES[mode]
        self.tensor = LocalTensor(TensorSpec("", dtype, (count,), op, chosen), ranks)

    def after(self, arrays: Sequence[NDArray[Any]]) -> bytes:
        copies = [array.copy() for array in arrays]
        assert self.tensor.reduce(copies) is None
        return copies[0].tobytes()


def shared(jobs: Sequence[inanet.Job], values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The same values in memory shared with the agents."""
    arrays = [job.empty(value.shape, value.dtype) for job, value in zip(jobs, values, strict=True)]
    for array, value in zip(arrays, values, strict=True):
        array[...] = value
    return arrays


def start(jobs: Sequence[inanet.Job], arrays: Sequence[Any], *options: str) -> list[inanet.Handle]:
    return [job.all_reduce_async(array, *options) for job, array in zip(jobs, arrays, strict=True)]


def until(condition: Callable[[], bool]) -> None:
    """Ask until a condition holds; what is asked takes its time by itself."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


def in_the_middle(jobs: Sequence[inanet.Job], arrays: Sequence[Any]) -> list[inanet.Handle]:
    """Begin a round and return once rank 0's host has some of the result."""
    before = jobs[0].stats()["results_in"]
    handles = start(jobs, arrays)
    until(lambda: jobs[0].stats()["results_in"] > before + 1000)
    assert not any(handle.done() for handle in handles)
    return handles


def error_of(work: Callable[[], object]) -> InaError:
    """The error that a call ends with, in good time."""
    started = time.monotonic()
    try:
        work()
    except InaError as error:
        assert time.monotonic() < started + PATIENCE
        return error
    raise AssertionError("no error")


def works(fabric: Fabric) -> None:
    """The job can be formed anew under the same name, and reduces."""
    with ExitStack() as stack:
        jobs = join(fabric, stack)
        values = contributions(1000)
        expected = Expected(1000).after(values)
        for handle in start(jobs, values):
            handle.wait()
        assert {value.tobytes() for value in values} == {expected}


class TestBits:
    """They depend on nothing but the values."""

    @pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 0, 1, 1), (3, 0, 0, 0), (2, 2, 2, 2)], ids=str)
    def test_on_the_placement_of_ranks(self, fabric: Fabric, stack: ExitStack, hosts: Sequence[int]) -> None:
        jobs = join(fabric, stack, hosts)
        for dtype, op, count in (("f32", "sum", 700_001), ("i64", "sum", 999), ("f16", "mean", 5000)):
            expected = Expected(count, dtype, op)
            for seed in range(3):
                values = contributions(count, seed)
                if dtype != "f32":
                    values = [
                        (value * 100).astype(dtype.replace("i", "int").replace("f", "float"))
                        for value in values
                    ]
                bits = expected.after(values)
                for handle in start(jobs, values, op):
                    handle.wait()
                assert {value.tobytes() for value in values} == {bits}

    def test_on_impairments(self, stack: ExitStack) -> None:
        with Fabric(HOSTS, 2, impair=0.05, seed=2) as impaired:
            jobs = join(impaired, stack)
            for dtype, mode in (("f32", "carried"), ("f32", "prologue"), ("i32", "carried")):
                expected = Expected(60_000, dtype, "sum", mode)
                for round_ in range(3):
                    values = contributions(60_000, round_)
                    if dtype == "i32":
                        values = [(value * 1e6).astype(np.int32) for value in values]
                    bits = expected.after(values)
                    handles = [
                        job.all_reduce_async(v, name="t", mode=mode)
                        for job, v in zip(jobs, values, strict=True)
                    ]
                    for handle in handles:
                        handle.wait()
                    assert {value.tobytes() for value in values} == {bits}
            stats = jobs[0].stats()
            assert stats["retransmissions"] > 0
            assert stats["drop_bad_checksum"] + stats["drop_bad_tag"] > 0


class TestCrashes:
    """kill -9 of anything in the middle of a round: the round completes, or all ranks hear the same."""

    def test_of_an_aggregator_changes_no_bit(self, fabric: Fabric, stack: ExitStack) -> None:
        jobs = join(fabric, stack)
        values = contributions(LARGE // 4)
        expected = Expected(LARGE // 4)
        arrays = shared(jobs, values)
        handles = in_the_middle(jobs, arrays)
        fabric.processes["agg0"].kill()
        for handle in handles:
            handle.wait()
        bits = expected.after(values)
        assert all(array.tobytes() == bits for array in arrays)
        # whoever asks is told who is missing, without a list of its own beside [topology]
        coordinator = Target(f"unix:{fabric.directory}/control.sock")
        until(lambda: coordinator.ask(PATIENCE).missing == ("agg0",))
        assert not figures.healthy(coordinator.ask(PATIENCE))
        # and back again
        fabric.restart("agg0")
        until(lambda: figures.healthy(coordinator.ask(PATIENCE)))
        values = contributions(5000)
        handles = start(jobs, values)
        for handle in handles:
            handle.wait()
        assert len({value.tobytes() for value in values}) == 1

    def test_of_the_parameter_server_and_its_restart_change_no_bit(
        self, fabric: Fabric, stack: ExitStack
    ) -> None:
        jobs = join(fabric, stack)
        expected = Expected(LARGE // 4)
        values = contributions(LARGE // 4)
        arrays = shared(jobs, values)
        handles = in_the_middle(jobs, arrays)
        fabric.processes["ps"].kill()
        fabric.restart("ps")
        for handle in handles:
            handle.wait()
        bits = expected.after(values)
        assert all(array.tobytes() == bits for array in arrays)
        # and those of the next round
        values = contributions(LARGE // 4, 1)
        for array, value in zip(arrays, values, strict=True):
            array[...] = value
        for handle in start(jobs, arrays):
            handle.wait()
        bits = expected.after(values)
        assert all(array.tobytes() == bits for array in arrays)

    def test_of_a_worker_daemon_is_told_to_all(self, fabric: Fabric, stack: ExitStack) -> None:
        jobs = join(fabric, stack)
        handles = in_the_middle(jobs, shared(jobs, contributions(LARGE // 4)))
        fabric.processes["worker2"].kill()
        errors = [error_of(handle.wait) for handle in handles]
        assert isinstance(errors.pop(2), inanet.AgentUnavailable)
        for error in errors:
            assert isinstance(error, inanet.WorkerLostError)
            assert error.ranks == (2,)
            assert error.round == 1
            assert "rank 2 (host worker2) was lost" in str(error)
        for job in jobs:
            assert isinstance(error_of(job.barrier), inanet.WorkerLostError | inanet.AgentUnavailable)
        fabric.restart("worker2")
        stack.close()
        works(fabric)

    RANK = """
import signal, sys, numpy as np, inanet
# a shell that starts the tests in the background has it ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
job = inanet.connect("train", rank=int(sys.argv[1]), world=4, local_world=1, socket=sys.argv[2])
array = job.empty(int(sys.argv[3]))
print("joined", flush=True)
sys.stdin.readline()
job.all_reduce(array)
sys.stdin.readline()
"""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
    def test_of_a_training_process_is_told_to_all(
        self, fabric: Fabric, stack: ExitStack, number: signal.Signals
    ) -> None:
        pid = fabric.processes["worker3"].pid
        # what jobs before this one held is given back soon after they have ended
        until(lambda: mappings(pid) == 0)
        before = descriptors(pid)
        process = subprocess.Popen(
            [sys.executable, "-c", self.RANK, "3", str(fabric.worker_socket(3)), str(LARGE // 4)],
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)

        def connect(rank: int) -> inanet.Job:
            path = fabric.worker_socket(rank)
            return inanet.connect("train", rank=rank, world=4, local_world=1, socket=path, timeout=PATIENCE)

        jobs = [stack.enter_context(job) for job in run_all(connect, 3)]
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "joined\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        in_the_middle(jobs, shared(jobs, contributions(LARGE // 4)[:3]))
        # a process that has little of a processor may see that round through before it sees the signal, but not this one
        handles = [job.all_reduce_async(np.ones(1, np.float32)) for job in jobs]
        process.send_signal(number)
        for handle in handles:
            error = error_of(handle.wait)
            assert isinstance(error, inanet.WorkerLostError)
            assert error.ranks == (3,)
            assert re.search(r"rank 3 \(host worker3\) was lost in round [12]", str(error))
        process.wait(PATIENCE)
        assert process.returncode in (-number, 1)
        until(lambda: mappings(pid) == 0 and descriptors(pid) <= before)
        stack.close()
        works(fabric)


class TestErrors:
    """All ranks get the same one, and the job goes on."""

    def test_without_elements_ranks_must_agree_too(self, fabric: Fabric, stack: ExitStack) -> None:
        jobs = join(fabric, stack)
        arrays = [np.empty((0, 3) if job.rank < 3 else (0, 4), np.float32) for job in jobs]
        for handle in start(jobs, arrays):
            error = error_of(handle.wait)
            assert isinstance(error, inanet.MismatchError)
            assert "(0, 3)" in str(error)
            assert "(0, 4)" in str(error)
        for handle in start(jobs, [np.empty((0, 3), np.float32)] * 4):
            handle.wait()

    def test_not_a_number_in_a_job_of_one_host_and_of_several(self, fabric: Fabric, stack: ExitStack) -> None:
        for hosts in ((0, 0, 0, 0), (0, 0, 1, 1)):
            jobs = join(fabric, stack, hosts, f"nan{hosts}")
            values = contributions(2000)
            values[3][1234] = np.inf
            errors = [error_of(handle.wait) for handle in start(jobs, values, "sum", "weights")]
            for error in errors:
                assert isinstance(error, inanet.NonFiniteError)
                assert (error.ranks, error.tensor, error.index, error.round) == ((3,), "weights", 1234, 1)
            for handle in start(jobs, contributions(2000), "sum", "weights"):
                handle.wait()


class TestHostileInput:
    """Whatever arrives, daemons go on, and so do jobs."""

    def test_garbage_on_every_socket(self, fabric: Fabric, stack: ExitStack) -> None:
        jobs = join(fabric, stack)
        values = contributions(300_000)
        bits = Expected(300_000).after(values)
        rng = np.random.default_rng(7)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            for round_ in range(2):
                handles = start(jobs, values) if round_ else []
                for name in fabric.processes:
                    for data in datagrams(rng):
                        sender.sendto(data, ("127.0.0.1", data_port(fabric, name)))
                for path in [fabric.directory / "control.sock", *map(fabric.worker_socket, range(HOSTS))]:
                    for data in streams(rng):
                        babble(path, data)
                for handle in handles:
                    handle.wait()
        fabric.require_alive()
        assert {value.tobytes() for value in values} == {bits}
        stats = jobs[0].stats()
        for reason in ("short", "bad_magic", "foreign_job"):
            assert stats[f"drop_{reason}"] > 0


def data_port(fabric: Fabric, name: str) -> int:
    """Where a daemon receives packets, from its log."""
    log = (fabric.directory / f"{name}.log").read_text()
    return int(re.findall(r"endpoint=127\.0\.0\.1:(\d+)", log)[-1])


def datagrams(rng: np.random.Generator) -> Iterator[bytes]:
    """Noise, and packets that look like ours but belong to no job."""
    for length in (1, 3, 23, 24, 36, 156, 1051, 1052, 1053, 9000, 65000):
        yield rng.bytes(length)
    for kind in range(16):
        for length in (36, 156, 1052):
            header = bytes([0xA2, kind | int(rng.integers(0, 16)) << 4]) + bytes(2) + rng.bytes(length - 4)
            yield header


def streams(rng: np.random.Generator) -> Iterator[bytes]:
    """What is no message, and what is one that nobody expects."""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\xff" * 64
    yield bytes(64)
    for length in (5, 100, 5000):
        yield length.to_bytes(4, "big") + rng.bytes(length)
    yield b"\x00\x00\x00\x02\x81"


def babble(path: Path, data: bytes) -> None:
    """Say something, and go without listening, half of the time."""
    with socket.socket(socket.AF_UNIX) as process:
        process.settimeout(PATIENCE)
        process.connect(str(path))
        process.sendall(data)
        if len(data) % 2:
            process.shutdown(socket.SHUT_WR)
            try:
                while process.recv(4096):
                    pass
            except ConnectionResetError:
                return


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def mappings(pid: int) -> int:
    """Pieces of shared memory that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:inanet")


def resident(pid: int) -> int:
    """Bytes of a process's own memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


class TestNothingGrows:
    """With rounds, or with jobs."""

    def test_with_rounds(self, fabric: Fabric, stack: ExitStack) -> None:
        jobs = join(fabric, stack)
        pids = [process.pid for process in fabric.processes.values()]
        mine = jobs[0].empty(500)

        def rounds(count: int) -> list[tuple[int, int, int]]:
            for number in range(count):
                arrays = [mine, *(np.ones(500 + 300 * (number % 5), np.float32)[:500] for _ in jobs[1:])]
                for handle in start(jobs, arrays):
                    handle.wait()
            return [(descriptors(pid), mappings(pid), resident(pid)) for pid in pids]

        for before, after in zip(rounds(60), rounds(200), strict=True):
            assert after[:2] == before[:2]
            assert after[2] < before[2] + (4 << 20)

    def test_with_jobs(self) -> None:
        """Slots and descriptors of all daemons are as they were, after 20 jobs that ended well or badly."""
        with Fabric(2, 1) as fabric:
            pids = [process.pid for process in fabric.processes.values()]
            after_one: list[int] = []
            for number in range(21):
                with ExitStack() as stack:
                    jobs = join(fabric, stack, (0, 1), f"job{number % 3}")
                    for handle in start(jobs, contributions(20_000)[:2]):
                        handle.wait()
                    if number % 4 == 3:
                        # rank 1 leaves in the middle of a round
                        handle = jobs[0].all_reduce_async(np.ones(10, np.float32))
                        jobs[1].close()
                        assert isinstance(error_of(handle.wait), inanet.WorkerLostError)
                if number == 0:
                    until(lambda: not any(map(mappings, pids)))
                    after_one = [descriptors(pid) for pid in pids]
            # connections of the last job may still be closing: what was kept of twenty jobs would never go
            until(lambda: not any(map(mappings, pids)))
            until(
                lambda: all(descriptors(pid) <= before for pid, before in zip(pids, after_one, strict=True))
            )
            assert fabric.shutdown() == []
            files = sorted(fabric.directory.glob("*.stats"))
            assert len(files) == 4
            for file in files:
                stats = json.loads(file.read_text())
                assert stats["slots_free"] == stats["slots_total"]
                assert stats["fragments_completed"] > 0 or "worker" in file.name
