"""A sparse job through real daemons: an ``ina-ps`` that coordinates and keeps the keys, an ``ina-switch`` that adds the hot ones."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import inanet
from inanet.client.sparse import sparse_group
from inanet.client.sparse_process import SparseMember
from inanet.control.errors import FabricError, WorkerLostError
from inanet.demo.fabric import Fabric, python, python_environment
from inanet.proto.zebra.store import Adagrad
from tests.client.agent import run_all
from tests.client.test_sparse import KEYS, gradients

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

#: a rank that joins, says so, and waits for its end
STRANGER = "import inanet, sys; m = inanet.join_sparse(sys.argv[1], 1); print('joined', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(0, system="zebra") as running:
        yield running


def job_file(fabric: Fabric, name: str) -> Path:
    (fabric.directory / "hot.txt").write_text("".join(f"{key}\n" for key in KEYS[:100].tolist()))
    path = fabric.directory / f"{name}.toml"
    path.write_text(
        f'[job]\nsystem = "zebra"\nname = "{name}"\nworld = 2\nwidth = 2\noptimiser = "adagrad"\nhot = "hot.txt"\n'
        f'[control]\ncoordinator = "unix:{fabric.directory}/control.sock"\n'
        "[impair]\nseed = 3\ndrop = 0.02\nduplicate = 0.02\nreorder = 0.02\ncorrupt = 0.02\n"
    )
    return path


def test_ranks_find_daemons_and_get_the_bits_of_a_group_and_errors_with_names(fabric: Fabric) -> None:
    path = job_file(fabric, "clicks")
    with ExitStack() as stack:
        members: list[SparseMember] = [
            stack.enter_context(one) for one in run_all(lambda rank: inanet.join_sparse(path, rank), 2)
        ]
        with sparse_group(2, 1, width=2, optimiser=Adagrad(0.1)) as group:
            group.use_hot(KEYS[:100])
            for seed in range(3):
                pushes = gradients(2, seed)
                group.push_all(pushes)
                expected = group.jobs[0].pull(KEYS)
                for rows in run_all(lambda rank: members[rank].job.push_pull(*pushes[rank], KEYS), 2):  # noqa: B023
                    np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
        command = python("inanet.cli.main", "status", "--address", f"unix:{fabric.directory}/control.sock")
        seen = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=False)
        assert "job clicks: running" in seen.stdout, seen
        assert "switch0" in seen.stdout

    path = job_file(fabric, "lost")
    stranger = subprocess.Popen(
        [sys.executable, "-P", "-c", STRANGER, str(path)],
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with stranger, inanet.join_sparse(path, 0) as member:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"joined\n"
        stranger.kill()
        with pytest.raises(WorkerLostError, match=r"rank 1 \(host .*-1\) was lost") as caught:
            member.job.push(KEYS, np.ones((len(KEYS), 2), np.float32))
        assert caught.value.ranks == (1,)

    path = job_file(fabric, "rootless")
    with ExitStack() as stack:
        members = [
            stack.enter_context(one) for one in run_all(lambda rank: inanet.join_sparse(path, rank), 2)
        ]
        fabric.processes["ps"].kill()
        for member in members:
            with pytest.raises(FabricError, match="a job on a switch cannot go on without its coordinator"):
                member.job.push(KEYS, np.ones((len(KEYS), 2), np.float32))
