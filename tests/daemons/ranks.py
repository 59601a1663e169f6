"""Ranks of sparse jobs beside the hosts of a fabric: the job's file, ranks in threads, and one that is a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import inanet
from inanet.launch.fabric import Fabric
from inanet.launch.process import python_environment
from inanet.sparse.member import SparseMember
from tests.client.agent import run_all
from tests.sparse.test_group import KEYS

#: joins, says so, and waits for its end
_STRANGER = """
import inanet, sys
member = inanet.join_sparse(sys.argv[1], 1)
print("joined", flush=True)
sys.stdin.read()
"""


def job_file(fabric: Fabric, name: str, more: str = "") -> Path:
    """A job of two ranks, half of whose keys are hot, with faults at the ranks. ``more`` goes into its section."""
    (fabric.directory / "hot.txt").write_text("".join(f"{key}\n" for key in KEYS[:100].tolist()))
    path = fabric.directory / f"{name}.job.toml"
    path.write_text(
        f'[job]\nsystem = "zebra"\nname = "{name}"\nworld = 2\nwidth = 2\noptimiser = "adagrad"\nhot = "hot.txt"\n{more}\n'
        f'[control]\ncoordinator = "unix:{fabric.directory}/control.sock"\n'
        "[impair]\nseed = 3\ndrop = 0.02\nduplicate = 0.02\nreorder = 0.02\ncorrupt = 0.02\n"
    )
    return path


def joined(fabric: Fabric, stack: ExitStack, name: str, more: str = "") -> list[SparseMember]:
    """Both ranks, which leave with the stack."""
    path = job_file(fabric, name, more)
    return [stack.enter_context(one) for one in run_all(lambda rank: inanet.join_sparse(path, rank), 2)]


@contextmanager
def stranger(fabric: Fabric, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 1 as a process, which says 'joined' when it has."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _STRANGER, str(job_file(fabric, name))],
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
