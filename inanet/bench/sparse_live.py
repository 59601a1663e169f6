"""A sparse job of real processes on this machine: a switch, PS shards and ranks, each with a socket and a link of its own."""

import json
import select
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inanet.data.key_batches import Load
from inanet.launch.process import child, end, python, python_environment
from inanet.service.exits import Failure
from inanet.sparse.member import join_sparse
from inanet.wire.batch import U64

#: seconds within which all ranks must have come to their end
PATIENCE = 280.0


@dataclass(frozen=True, slots=True)
class Live:
    """What processes measured: ``seconds`` of the slowest rank, ``pairs`` that were pushed meanwhile; the part of all pairs
    that the switch summed; packets that ranks ``repeated``; keys whose sum is ``wrong``.
    """

    seconds: float
    pairs: int
    in_network_share: float
    repeated: int
    wrong: int

    @property
    def keys_per_second(self) -> float:
        """Pairs that were summed, per second."""
        return self.pairs / self.seconds


def measure(load: Load, workers: int, rate: float, *, zebra: bool) -> Live:
    """One job of ``workers`` ranks behind links of ``rate`` bits per second, with a switch or with a PS alone.

    An extra rank, which pushes nothing, pulls all sums at the end and checks them. Raises
    :class:`~inanet.service.exits.Failure` with what a process said that failed.
    """
    batches = load.of(workers)
    nothing = np.zeros(0, np.uint64)
    with tempfile.TemporaryDirectory(prefix="ina-sparse-") as name, ExitStack() as stack:
        folder = Path(name)
        file = _file(folder, workers + 1, rate, load.hot if zebra else None)
        served = ["shard0", *(["switch"] if zebra else [])]
        for machine in served:
            _ready(_start(stack, "inanet.cli.main", "zebra", "serve", str(file), machine), machine)
        ranks = []
        for rank in range(workers):
            stored = folder / f"{rank}.npz"
            arrays: dict[str, Any] = {str(i): keys[rank] for i, keys in enumerate(batches)}
            np.savez(stored, **arrays)
            ranks.append(_start(stack, "inanet.bench.sparse_rank", str(file), str(rank), str(stored)))
        with join_sparse(file, workers, timeout=PATIENCE) as member:
            for _ in batches:
                member.job.push(nothing, nothing)
            said = [_said(process, rank) for rank, process in enumerate(ranks)]
            keys, count = np.unique(
                np.concatenate([keys for iteration in batches for keys in iteration]), return_counts=True
            )
            wrong = int((member.job.pull(keys)[:, 0] != count).sum())
    hot, cold = sum(its["hot"] for its in said), sum(its["cold"] for its in said)
    return Live(
        max(its["seconds"] for its in said),
        sum(len(keys) for iteration in batches[1:] for keys in iteration),
        hot / (hot + cold),
        int(sum(its["repeated"] for its in said)),
        wrong,
    )


def _file(folder: Path, ranks: int, rate: float, hot: U64 | None) -> Path:
    with ExitStack() as stack:
        found = [
            stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in range(ranks + 2)
        ]
        for one in found:
            one.bind(("127.0.0.1", 0))
        at = [f'"127.0.0.1:{one.getsockname()[1]}"' for one in found]
    lines = [
        "[job]",
        f'secret = "{np.random.default_rng().integers(2**63):016x}"',
        f"workers = [{', '.join(at[:ranks])}]",
        f"shards = [{at[ranks]}]",
        f'link = "{int(rate)} bit/s"',
    ]
    if hot is not None:
        np.savetxt(folder / "hot.txt", hot, fmt="%d")
        lines += [f"switch = {at[ranks + 1]}", 'hot = "hot.txt"']
    path = folder / "job.toml"
    path.write_text("\n".join([*lines, ""]))
    return path


def _start(stack: ExitStack, *command: str) -> "subprocess.Popen[str]":
    """A process that is ended with the stack."""
    process = child(
        python(*command), python_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stack.callback(end, process)
    return process


def _ready(process: "subprocess.Popen[str]", machine: str) -> None:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        raise Failure(f"{machine} did not start within {PATIENCE:g} s")
    line = process.stdout.readline()
    if not line.startswith("ready: "):
        raise Failure(f"{machine} did not start: {line}{process.stdout.read()}")


def _said(process: "subprocess.Popen[str]", rank: int) -> dict[str, float]:
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Failure(f"rank {rank} has not come to its end within {PATIENCE:g} s") from None
    if process.returncode:
        raise Failure(f"rank {rank} failed:\n{output}")
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def compared(
    load: Load, workers: int, rate: float, repetitions: int
) -> tuple[Sequence[Live], Sequence[Live]]:
    """Zebra and a PS alone, taking turns."""
    pairs = [
        tuple(measure(load, workers, rate, zebra=zebra) for zebra in (True, False))
        for _ in range(repetitions)
    ]
    return [one for one, _ in pairs], [other for _, other in pairs]
