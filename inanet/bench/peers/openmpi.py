"""MPI_Allreduce of Open MPI: what clusters use. Needs ``mpi4py`` and ``openmpi`` (both are Python packages).

One process answers for all ranks, unlike with other peers. It is a front before ``mpirun``: it copies the lines that it
is asked into a named pipe per rank, and rank 0 prints the slowest rank's seconds and all ranks' processor time. For a
rank that waits inside MPI spins and would take the cores from the peers it is compared with, and ``mpirun`` hands its
standard input to one rank only, and not its end.

``front DIRECTORY WORLD COMMAND...`` or, started by ``mpirun``, ``rank DIRECTORY``.
"""

import importlib.util
import json
import os
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from inanet.launch.process import child, python

#: Where one algorithm gives way to the other, and the segment of the latter, bytes.
_LARGE = 1 << 20
_MODULE = "inanet.bench.peers.openmpi"
#: Seconds the ranks may take to end once they are told to.
_GRACE = 5.0
_SHELL = Path(__file__).with_name("remote_shell.py")


def installed() -> bool:
    """Whether both packages are there."""
    return importlib.util.find_spec("mpi4py") is not None and Path(_mpirun()).exists()


def command(world: int, directory: Path) -> list[str]:
    """Start ``world`` ranks on this host, with whatever Open MPI chooses there (shared memory).

    ``directory`` must exist and be this run's own.
    """
    mpirun = [_mpirun(), "--oversubscribe", "--bind-to", "none", "-n", str(world), *_rank(directory)]
    return python(_MODULE, "front", str(directory), str(world), *mpirun)


def command_on(hosts: Sequence[str], namespace: str, interface: str, directory: Path) -> list[str]:
    """Start one rank on each host of a lab, over TCP.

    ``namespace`` is the name of a host's network namespace with ``{host}`` in place of the host; ``interface`` is
    what the ranks use. Needs root. Algorithms are chosen by size as measured best on shaped links: Open MPI's own choice
    took 1.5 times as long for 97 MiB.
    """
    rules = directory / "algorithms"
    rules.write_text(_rules(len(hosts)))
    shell = [sys.executable, "-I", "-S", str(_SHELL), namespace, str(directory)]
    mpirun = [
        _mpirun(),
        *("--prtemca", "plm_ssh_agent", " ".join(shell), "--prtemca", "prte_if_include", interface),
        *("--host", ",".join(f"{host}:1" for host in hosts), "-n", str(len(hosts)), "--map-by", "node"),
        *("--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
        *("--mca", "btl_tcp_if_include", interface, "--mca", "coll_tuned_use_dynamic_rules", "1"),
        *("--mca", "coll_tuned_dynamic_rules_filename", str(rules)),
        *_rank(directory),
    ]
    # itself on the first host, so that it finds its own name among the hosts and its peers reach it
    return python(_MODULE, "front", str(directory), str(len(hosts)), *shell, hosts[0], shlex.join(mpirun))


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what Open MPI wants to hear before it runs as root."""
    return {**base, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _mpirun() -> str:
    return str(Path(sys.executable).with_name("mpirun"))


def _rank(directory: Path) -> list[str]:
    return python(_MODULE, "rank", str(directory))


def _rules(world: int) -> str:
    """Open MPI's rules file: for collective 2 (all-reduce) recursive doubling, then the segmented ring."""
    small, large = "0 3 0 0", f"{_LARGE} 4 0 {_LARGE}"
    return "\n".join(["1", "2", "1", str(world), "2", small, large, ""])


def _pipe(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}"


def _front(directory: Path, world: int, command: Sequence[str]) -> int:
    """Copy standard input to the ranks until it ends or they do. Returns their exit status."""
    with ExitStack() as stack:
        pipes = []
        for rank in range(world):
            os.mkfifo(_pipe(directory, rank))
            # opened for both, so that opening does not wait for the rank
            handle = os.open(_pipe(directory, rank), os.O_RDWR | os.O_CLOEXEC)
            pipes.append(stack.enter_context(open(handle, "wb", buffering=0)))
        mpirun = child(command, os.environ, process_group=None)
        ended = stack.enter_context(open(os.pidfd_open(mpirun.pid), "rb", buffering=0))
        while True:
            ready, _, _ = select.select([0, ended.fileno()], [], [])
            asked = os.read(0, 1 << 16) if ended.fileno() not in ready else b""
            if not asked:
                break
            for pipe in pipes:
                pipe.write(asked)
    try:
        return mpirun.wait(_GRACE)
    except subprocess.TimeoutExpired:
        mpirun.terminate()
        return mpirun.wait()


def _serve(directory: Path) -> None:
    from mpi4py import MPI

    group = MPI.COMM_WORLD
    rank, world = group.Get_rank(), group.Get_size()
    questions = _pipe(directory, rank).open()
    group.Barrier()
    if rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    arrays: dict[int, Any] = {}
    for line in questions:
        count = int(json.loads(line)["bytes"]) // 4
        array = arrays.setdefault(count, np.empty(count, np.float32))
        array[:] = rank + 1
        group.Barrier()
        start, cpu = time.perf_counter(), time.process_time()
        group.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)
        mine = time.perf_counter() - start, time.process_time() - cpu
        wrong = bool(count) and not np.allclose(array, world * (world + 1) / 2, rtol=1e-5)
        everybody = group.gather((*mine, wrong))
        if everybody is not None:
            seconds, cpus, wrongs = zip(*everybody, strict=True)
            answer = {"seconds": max(seconds), "cpu": sum(cpus)} | ({"wrong": True} if any(wrongs) else {})
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "front":
        sys.exit(_front(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    _serve(Path(sys.argv[2]))
