"""``ina bench allreduce``: nccl-tests' table over real daemons; correctness and speed in the same run.

The parent starts a fabric on this machine (or uses the agents it is told of) and one process per rank; the ranks
measure, rank 0 reports. A repetition starts from fresh data behind a barrier, so that no rank runs ahead, and its time
is that of the slowest rank.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import inanet
from inanet.bench.measure import median
from inanet.control.exits import Failure
from inanet.demo.fabric import Fabric, python, python_environment

#: bytes beside the payload that a fragment costs on an Ethernet: row overhead, UDP, IPv4, Ethernet headers
WIRE_OVERHEAD = 1052 - 1024 + 8 + 20 + 14


@dataclass(frozen=True, slots=True)
class Options:
    """What nccl-tests calls -b, -e, -f, -n, -w, -c, and the fabric."""

    begin: int = 4096
    end: int = 64 << 20
    factor: int = 4
    repetitions: int = 10
    warmups: int = 2
    check: bool = True
    workers: int = 4
    op: str = "sum"
    dtype: str = "float32"
    mode: str = "carried"
    one_host: bool = False

    def sizes(self) -> Iterator[int]:
        """Bytes per rank of every line."""
        size = self.begin
        while size <= self.end:
            yield size
            size *= self.factor


def run(options: Options, deadline: float = 300.0) -> dict[str, Any]:
    """Measure; returns the object that ``--json`` prints. Raises :class:`Failure` if a rank fails."""
    topology = [("ps", None), ("worker0", "ps")] if options.one_host else None
    with Fabric(workers=options.workers, topology=topology) as fabric:
        sockets = [fabric.worker_socket(0 if options.one_host else rank) for rank in range(options.workers)]
        return run_ranks(options, sockets, deadline)


def run_ranks(options: Options, sockets: Sequence[Path], deadline: float) -> dict[str, Any]:
    """One process per rank, rank ``i`` at the agent ``sockets[i]``."""
    local = options.workers if options.one_host else 1
    with tempfile.TemporaryDirectory(prefix="inanet-bench-") as directory:
        ranks = []
        for rank, path in enumerate(sockets):
            argument = json.dumps(
                {
                    "rank": rank,
                    "local": local,
                    "socket": str(path),
                    "out": str(Path(directory) / f"{rank}.json"),
                    **{name: getattr(options, name) for name in options.__slots__},
                }
            )
            ranks.append(
                subprocess.Popen(
                    python("inanet.bench.allreduce", argument),
                    env=python_environment(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            )
        try:
            stop = time.monotonic() + deadline
            for rank, process in enumerate(ranks):
                try:
                    _, errors = process.communicate(timeout=max(0.1, stop - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise Failure(f"rank {rank} of the benchmark is not done after {deadline:g} s") from None
                if process.returncode:
                    raise Failure(f"rank {rank} of the benchmark failed: {errors.decode()[-2000:]}")
            results = [
                json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(len(ranks))
            ]
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return summary(options, results)


def summary(options: Options, results: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One row per size from what all ranks measured."""
    rows = []
    for index, size in enumerate(options.sizes()):
        per_rank = [result[index] for result in results]
        times = [max(times) for times in zip(*(rank["seconds"] for rank in per_rank), strict=True)]
        seconds = median(times)
        algorithm = size / seconds if seconds else 0.0
        n = options.workers
        rows.append(
            {
                "bytes": size,
                "count": size // np.dtype(options.dtype).itemsize,
                "seconds": seconds,
                "algbw_bps": algorithm * 8,
                "busbw_bps": algorithm * 8 * 2 * (n - 1) / n,
                "wrong": sum(rank["wrong"] for rank in per_rank),
                "max_error": max(rank["max_error"] for rank in per_rank),
                "wire_bytes_per_worker": per_rank[0]["rows_sent"] * (1024 + WIRE_OVERHEAD),
                "retransmissions": sum(rank["retransmissions"] for rank in per_rank),
                "drops": sum(rank["drops"] for rank in per_rank),
                "cpu_short": per_rank[0]["load"] > (os.cpu_count() or 1) * 1.5,
            }
        )
    ok = all(row["wrong"] == 0 for row in rows)
    return {"schema": 1, "ok": ok, "workers": options.workers, "op": options.op, "rows": rows}


def measure(argument: dict[str, Any]) -> list[dict[str, Any]]:
    """What one rank does."""
    names = Options.__slots__
    options = Options(**{name: argument[name] for name in names})
    rank, results = argument["rank"], []
    with inanet.connect(
        "bench", rank=rank, world=options.workers, local_world=argument["local"], socket=argument["socket"]
    ) as job:
        for size in options.sizes():
            count = size // np.dtype(options.dtype).itemsize
            everybody = [source(options.dtype, count, other) for other in range(options.workers)]
            expected = exact(options.op, everybody)
            buffer = job.empty(count, options.dtype)
            before = job.stats()
            seconds, wrong, worst = [], 0, 0.0
            for repetition in range(options.warmups + options.repetitions):
                buffer[:] = everybody[rank]
                job.barrier()
                start = time.perf_counter()
                job.all_reduce(buffer, options.op, name=f"bench{size}", mode=options.mode)
                if repetition >= options.warmups:
                    seconds.append(time.perf_counter() - start)
                if options.check:
                    error = np.abs(buffer.astype(np.float64) - expected)
                    worst = max(worst, float(error.max(initial=0.0)))
                    wrong += int((error > tolerance(options, everybody)).sum())
            after = job.stats()
            moved = {name: after[name] - before[name] for name in after}
            rounds = options.warmups + options.repetitions
            results.append(
                {
                    "seconds": seconds,
                    "wrong": wrong,
                    "max_error": worst,
                    "rows_sent": moved["rows_sent"] // rounds,
                    "retransmissions": moved["retransmissions"],
                    "drops": sum(n for name, n in moved.items() if name.startswith("drop_")),
                    "load": os.getloadavg()[0],
                }
            )
    return results


def source(dtype: str, count: int, rank: int) -> Any:
    """A rank's values: normally distributed, or small integers."""
    generator = np.random.default_rng(rank)
    if np.dtype(dtype).kind == "i":
        return generator.integers(-1000, 1000, count).astype(dtype)
    return generator.standard_normal(count, np.float32).astype(dtype)


def exact(op: str, values: Sequence[Any]) -> Any:
    """The result in float64 (int64 values of these sizes are exact in it)."""
    wide = np.stack([value.astype(np.float64) for value in values])
    return {"sum": wide.sum(0), "mean": wide.mean(0), "max": wide.max(0), "min": wide.min(0)}[op]


def tolerance(options: Options, values: Sequence[Any]) -> float:
    """Largest error that the number format allows for these values; 0 where it is exact."""
    if np.dtype(options.dtype).kind == "i" or options.op in ("max", "min"):
        return 0.0
    peak = max(float(np.abs(value.astype(np.float64)).max(initial=0.0)) for value in values)
    n = options.workers
    digits = {"float32": 24, "float16": 11}[options.dtype]
    # carried exponents lie up to six bits above the block's own (inanet.kernels.exponents)
    return float(n * 2.0 ** ((n - 1).bit_length() - 32) * peak * 2 * 64 + n * peak * 2.0**-digits)


def table(result: dict[str, Any]) -> Iterator[str]:
    """nccl-tests' table, with what matters for in-network aggregation at the right."""
    yield f"# nThread 1 workers {result['workers']} op {result['op']}: median over repetitions of the slowest rank"
    yield "# busbw multiplies algbw by 2(n-1)/n, which assumes point-to-point transfers: with in-network"
    yield "# aggregation a worker sends and receives the tensor once, so compare algbw and the bytes on the wire."
    yield "#       size        count      time   algbw   busbw  #wrong    wire/worker     retx    drops"
    yield "#        (B)   (elements)      (us)  (GB/s)  (GB/s)                   (B)"
    for row in result["rows"]:
        yield (
            f"{row['bytes']:12d} {row['count']:12d} {row['seconds'] * 1e6:9.1f} {row['algbw_bps'] / 8e9:7.3f} "
            f"{row['busbw_bps'] / 8e9:7.3f} {row['wrong']:7d} {row['wire_bytes_per_worker']:14d} "
            f"{row['retransmissions']:8d} {row['drops']:8d}{'  # short of CPU' if row['cpu_short'] else ''}"
        )
    wrong = sum(row["wrong"] for row in result["rows"])
    yield f"# Out of bounds values : {wrong} {'OK' if result['ok'] else 'FAILED'}"


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    Path(given["out"]).write_text(json.dumps(measure(given)))
