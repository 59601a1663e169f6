"""A fabric whose coordinator is a daemon of its own: nodes register, jobs are planned, any of them may be killed."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

import inanet
from inanet.errors import WorkerLostError
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.process import Process, python, python_environment
from inanet.launch.topology import NodeSpec
from tests.client.agent import run_all
from tests.daemons.test_fabric import (
    LARGE,
    Expected,
    contributions,
    error_of,
    in_the_middle,
    shared,
    start,
    until,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NODES = ("ps", "agg0", "worker0", "worker1", "worker2", "worker3")
MANAGER = """
[node]
name = "manager"
state_file = "epoch.json"
[log]
format = "plain"
[control]
listen = "unix:{directory}/control.sock"
# a machine that compiles kernels beside this test must not look dead
heartbeat = "3 s"
round_timeout = "100 s"
elastic = true
[fabric]
expect = {expect}
[planning]
plan = "tree"
evaluate = true
"""


class Managed(Fabric):
    """A fabric with a manager, which is started with the PS, because that waits for it."""

    def __init__(self) -> None:
        super().__init__(4, 1, command=self._managed)
        self.manager: Process | None = None

    def start_manager(self) -> None:
        file = self.directory / "manager.toml"
        file.write_text(MANAGER.format(directory=self.directory, expect=json.dumps(NODES)))
        self.manager = self.spawn(
            "manager", python("daemons.manager", "--config", str(file)), python_environment()
        )

    def _managed(self, node: NodeSpec, config: Path) -> Sequence[str]:
        if node.role == "ps":
            if self.manager is None:
                self.start_manager()
            address = f"unix:{self.directory}/control.sock"
            config.write_text(
                f'[node]\nname = "ps"\nlisten = "127.0.0.1:0"\n[log]\nformat = "plain"\n'
                f'[control]\ncoordinator = "{address}"\n'
            )
        return daemon_command(node, config)


@pytest.fixture(scope="module")
def fabric() -> Iterator[Managed]:
    with Managed() as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def join(fabric: Fabric, stack: ExitStack, job: str) -> list[inanet.Job]:
    def connect(rank: int) -> inanet.Job:
        return inanet.connect(
            job, rank=rank, world=4, local_world=1, socket=fabric.worker_socket(rank), timeout=60
        )

    return [stack.enter_context(joined) for joined in run_all(connect, 4)]


def test_nodes_register_and_a_job_is_planned(fabric: Managed, stack: ExitStack) -> None:
    jobs = join(fabric, stack, "first")
    expected = Expected(20_000)
    log = fabric.directory / "manager.log"
    # the first step goes to the PS; once every worker has told how it fared, the manager says what it makes of that
    for round_ in range(2):
        values = contributions(20_000, round_)
        bits = expected.after(contributions(20_000, round_))
        for handle in start(jobs, values):
            handle.wait()
        assert {value.tobytes() for value in values} == {bits}
    until(lambda: log.read_text().count("plan chosen") == 2)
    for name in NODES:
        assert f"peer={name}" in log.read_text()
    assert "the first step goes to ps directly" in log.read_text()
    assert json.loads((fabric.directory / "epoch.json").read_text()) == {"schema": 1, "epoch": 1}


def test_a_job_outlives_its_manager(fabric: Managed, stack: ExitStack) -> None:
    jobs = join(fabric, stack, "second")
    values = contributions(LARGE // 32)
    bits = Expected(LARGE // 32).after(values)
    arrays = shared(jobs, values)
    handles = in_the_middle(jobs, arrays)
    assert fabric.manager is not None
    fabric.manager.kill()
    fabric.start_manager()
    for handle in handles:
        handle.wait()
    assert all(array.tobytes() == bits for array in arrays)
    # rounds on their way need no manager, but a tensor that is new does
    values = contributions(5000)
    for handle in start(jobs, values):
        handle.wait()
    assert len({value.tobytes() for value in values}) == 1
    assert json.loads((fabric.directory / "epoch.json").read_text())["epoch"] == 3


def test_a_job_outlives_its_parameter_server(fabric: Managed, stack: ExitStack) -> None:
    jobs = join(fabric, stack, "third")
    expected = Expected(100_000)
    for round_ in range(3):
        values = contributions(100_000, round_)
        if round_ == 1:
            fabric.processes["ps"].kill()
        handles = start(jobs, values)
        if round_ == 1:
            fabric.restart("ps")
        bits = expected.after(contributions(100_000, round_))
        for handle in handles:
            handle.wait()
        assert {value.tobytes() for value in values} == {bits}
    assert "parameter server ps came back" in (fabric.directory / "manager.log").read_text()


def test_an_elastic_job_goes_on_without_a_worker_that_was_killed(fabric: Managed, stack: ExitStack) -> None:
    jobs = join(fabric, stack, "fourth")
    arrays = shared(jobs, contributions(LARGE // 16))
    handles = in_the_middle(jobs, arrays)
    fabric.processes["worker3"].kill()
    errors = [error_of(handle.wait) for handle in handles[:3]]
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert (error.ranks, error.round) == ((3,), 1)
        assert "rank 3 (host worker3) was lost in round 1" in str(error)
        assert "the job goes on with the others: call again" in str(error)
    # with n = 3 from here on, in sums and in means
    expected = Expected(50_000, ranks=3)
    means = Expected(5000, op="mean", ranks=3)
    for round_ in range(2):
        values = contributions(50_000, round_)[:3]
        bits = expected.after(values)
        for handle in start(jobs[:3], values):
            handle.wait()
        assert {value.tobytes() for value in values} == {bits}
    values = contributions(5000)[:3]
    bits = means.after(values)
    for handle in start(jobs[:3], values, "mean"):
        handle.wait()
    assert {value.tobytes() for value in values} == {bits}
    assert "job continues with fewer ranks" in (fabric.directory / "manager.log").read_text()
    fabric.restart("worker3")


def test_the_manager_gives_up_with_the_names_of_those_who_did_not_come(tmp_path: Path) -> None:
    file = tmp_path / "manager.toml"
    text = MANAGER.format(directory=tmp_path, expect='["ps", "agg0"]')
    file.write_text(text.replace("[fabric]", 'join_timeout = "300 ms"\n[fabric]'))
    done = subprocess.run(
        python("daemons.manager", "--config", str(file)),
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "joined 0 of 2, missing: ps, agg0: gave up after 0.3 s" in done.stderr
    assert not os.path.exists(tmp_path / "control.sock")
