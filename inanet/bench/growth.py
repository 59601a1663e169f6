"""``ina bench growth``: what grows with the size of a tensor, and that nothing grows with the number of rounds.

A tensor of every size goes through daemons that were started for it, workers under one aggregator under a PS, so that
all memory beyond theirs at rest is this tensor's. *Worker* is the agent and its rank together, without the tensor itself,
which both have mapped; *aggregator* all that it needs for the tensor. Then one more fabric reduces a small tensor many
times.

Memory is in bytes, as the kernel counts it.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import inanet
from inanet.bench.marks import Mark, judge, lines
from inanet.bench.measure import fit, idle_share, median, short_of_cpu, ticks
from inanet.bench.peers.rank import Team, team
from inanet.bench.samples import check, fill
from inanet.client.job import Job
from inanet.launch.fabric import Fabric
from inanet.launch.process import python
from inanet.service.exits import Exit, Failure
from inanet.units import show_bytes


def resident(pid: int) -> int:
    """What a process has in memory now, shared pages included. Raises ``OSError`` if it has ended."""
    return _field(pid, "VmRSS")


def peak(pid: int) -> int:
    """The most it had since its start, or since :func:`forget_peak`."""
    return _field(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Let the peak begin anew from what is in memory now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def available() -> int:
    """What the machine can give without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _field(pid: int, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    # a process that has ended but was not waited for has no memory
    return int(found[1]) << 10 if found else 0


#: Of what ``--json`` prints.
SCHEMA = 1
JOINING, MEASURING = 120.0, 600.0
#: Bytes of the tensor that is reduced again and again, and of one that only warms up.
SMALL, WARM = 1 << 20, 4 << 10
#: What all processes need per byte of tensor, roughly: the tensor and the agent's integers per worker, slots of two nodes.
_PER_WORKER, _PER_NODES = 2.3, 2.3
_LARGEST, _SMALLEST, _ROUNDS = 512 << 20, 4 << 20, 1000

MARKS: tuple[Mark, ...] = (
    Mark(
        "time against bytes from 4 to 512 MiB: largest distance from a line",
        "deviation",
        {"table": "line", "smallest": _SMALLEST, "largest": _LARGEST},
        most=0.10,
    ),
    Mark(
        "worker: memory beyond the tensor, over the tensor, 512 MiB",
        "worker_memory",
        {"table": "size", "bytes": _LARGEST},
        most=1.3,
    ),
    Mark(
        "aggregator: memory over the model, 512 MiB",
        "aggregator_memory",
        {"table": "size", "bytes": _LARGEST},
        most=1.15,
    ),
    Mark(
        "1000 rounds: time of the last tenth over the first",
        "time_ratio",
        {"table": "rounds", "rounds": _ROUNDS},
        most=1.1,
    ),
    Mark(
        "1000 rounds: memory that any process gained after the first tenth",
        "memory_growth",
        {"table": "rounds", "rounds": _ROUNDS},
        most=1.0,
        scale=2.0**-20,
        unit="MiB",
    ),
)


class NotEnoughMemory(Failure):
    """The largest tensor does not fit this machine."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes in bytes per rank, ``begin`` to ``end`` by ``factor``."""

    begin: int = _SMALLEST
    end: int = _LARGEST
    factor: int = 2
    repetitions: int = 3
    rounds: int = _ROUNDS
    workers: int = 2

    def sizes(self) -> list[int]:
        """Bytes per rank of every size."""
        sizes = []
        size = self.begin
        while size <= self.end:
            sizes.append(size)
            size *= self.factor
        return sizes


class Subject:
    """A fabric and its ranks; every answer is of all ranks."""

    def __init__(self, fabric: Fabric, team: Team) -> None:
        self.fabric = fabric
        self.team = team

    def reduce(self, size: int, rounds: int) -> list[float]:
        """Seconds of every round of a tensor of ``size`` bytes; of the slowest rank."""
        what = f"{rounds} all-reduces of {size} B"
        answers = self.team.ask({"bytes": size, "rounds": rounds}, MEASURING, what)
        if any(answer["wrong"] for answer in answers):
            raise Failure(f"wrong mean for {size} B")
        return [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]

    def pids(self) -> dict[str, int]:
        """Process ids by name, ranks' as well."""
        daemons = {name: process.pid for name, process in self.fabric.processes.items()}
        return daemons | {f"rank{rank}": process.pid for rank, process in enumerate(self.team.processes)}


@contextmanager
def subject(workers: int) -> Iterator[Subject]:
    """Workers under an aggregator under a PS, and their ranks; everything is warm."""
    topology = [("ps", None), ("agg0", "ps"), *((f"worker{rank}", "agg0") for rank in range(workers))]
    with Fabric(topology=topology) as fabric:
        commands = [
            python("inanet.bench.growth", str(rank), str(workers), str(fabric.worker_socket(rank)))
            for rank in range(workers)
        ]
        with team("inanet", fabric.directory, commands, JOINING) as ranks:
            made = Subject(fabric, ranks)
            made.reduce(WARM, 3)
            yield made


def run(options: Options) -> dict[str, Any]:
    """Everything; returns the object that ``--json`` prints. Raises :class:`NotEnoughMemory`, and
    :class:`inanet.service.exits.Failure` if a rank or a daemon fails."""
    sizes = options.sizes()
    needed = int(max(sizes, default=0) * (options.workers * _PER_WORKER + _PER_NODES))
    if needed > available():
        raise NotEnoughMemory(
            f"{show_bytes(max(sizes))} for {options.workers} workers need about {show_bytes(needed)} of memory and "
            f"{show_bytes(available())} are available: use a smaller -e or fewer workers"
        )
    rows = [of_size(options, size) for size in sizes]
    if len(rows) > 1:
        rows.append(line(rows))
    if options.rounds:
        rows.append(of_rounds(options))
    return {"schema": SCHEMA, "ok": True, **asdict(options), "rows": rows, "marks": judge(MARKS, rows)}


def of_size(options: Options, size: int) -> dict[str, Any]:
    """Time and peak memory of one size, by daemons that were started for it."""
    with subject(options.workers) as here:
        pids = here.pids()
        rest = {name: resident(pid) for name, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        before = ticks()
        times = here.reduce(size, options.repetitions + 1)[1:]
        idle = idle_share(before, ticks())
        gained = {name: peak(pid) - rest[name] for name, pid in pids.items()}
    return {
        "table": "size",
        "bytes": size,
        "seconds": median(times),
        "samples": times,
        **ratios(gained, size, options.workers),
        "gained_bytes": gained,
        "idle": idle,
        "short_of_cpu": short_of_cpu([idle]),
    }


def ratios(gained: dict[str, int], size: int, workers: int) -> dict[str, float]:
    """Memory over the tensor's, from what every process gained. The tensor is mapped by rank and agent, and no part of
    what a worker needs beyond it; the worst worker counts."""
    beyond = [gained[f"worker{rank}"] + gained[f"rank{rank}"] - 2 * size for rank in range(workers)]
    return {
        "worker_memory": max(beyond) / size,
        "aggregator_memory": gained["agg0"] / size,
        "ps_memory": gained["ps"] / size,
    }


def line(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The line through times against bytes; ``deviation`` is the largest relative distance of a time from it."""
    sizes = [row["bytes"] for row in rows]
    found = fit(sizes, [row["seconds"] for row in rows])
    return {
        "table": "line",
        "smallest": min(sizes),
        "largest": max(sizes),
        "offset_seconds": found.offset,
        "seconds_per_byte": found.slope,
        "deviation": found.deviation,
        "short_of_cpu": any(row["short_of_cpu"] for row in rows),
    }


def of_rounds(options: Options) -> dict[str, Any]:
    """Whether later rounds take longer, or processes larger, than after the first tenth."""
    tenth = max(1, options.rounds // 10)
    with subject(options.workers) as here:
        pids = here.pids()
        before = ticks()
        first = here.reduce(SMALL, tenth)
        early = {name: resident(pid) for name, pid in pids.items()}
        rest = here.reduce(SMALL, max(tenth, options.rounds - tenth))
        late = {name: resident(pid) for name, pid in pids.items()}
        idle = idle_share(before, ticks())
    growth = {name: late[name] - early[name] for name in pids}
    return {
        "table": "rounds",
        "bytes": SMALL,
        "rounds": options.rounds,
        "first_seconds": median(first),
        "last_seconds": median(rest[-tenth:]),
        "time_ratio": median(rest[-tenth:]) / median(first),
        "memory_growth": max(growth.values()),
        "grown_bytes": growth,
        "idle": idle,
        "short_of_cpu": short_of_cpu([idle]),
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """For people."""
    yield f"# {result['workers']} workers under one aggregator under a PS, on this machine; memory over the tensor's"
    yield "# worker: beyond the tensor itself; * processes were short of processors"
    yield "#        bytes         ms     worker aggregator         ps"
    for row in result["rows"]:
        star = " *" if row["short_of_cpu"] else ""
        if row["table"] == "size":
            yield (
                f"  {row['bytes']:12d} {row['seconds'] * 1e3:10.2f} {row['worker_memory']:10.3f} "
                f"{row['aggregator_memory']:10.3f} {row['ps_memory']:10.3f}{star}"
            )
        elif row["table"] == "line":
            yield (
                f"# line: {row['offset_seconds'] * 1e3:.3f} ms + {row['seconds_per_byte'] * 1e9:.3f} ns/B, "
                f"at most {row['deviation']:.1%} off{star}"
            )
        else:
            yield (
                f"# {row['rounds']} rounds of {row['bytes']} B: first tenth {row['first_seconds'] * 1e3:.3f} ms, last "
                f"{row['last_seconds'] * 1e3:.3f} ms; memory grew by at most {row['memory_growth']} B{star}"
            )
    yield from lines(result["marks"])


def measure(job: Job, size: int, rounds: int, tensors: dict[int, Any]) -> dict[str, Any]:
    """What one rank does: the mean of all ranks' values, again and again in the same array, which stays what it is."""
    if size not in tensors:
        tensors[size] = job.empty(size // 4)
    tensor = tensors[size]
    fill(tensor, job.rank)
    seconds, wrong = [], 0
    for number in range(rounds):
        job.barrier()
        start = time.perf_counter()
        job.all_reduce(tensor, "mean", name=f"growth{size}")
        seconds.append(time.perf_counter() - start)
        if number == 0:
            wrong, _ = check(tensor, "mean", job.world)
    return {"seconds": seconds, "wrong": wrong}


def main(rank: int, world: int, socket: str) -> None:
    """Answer a line per size until standard input ends."""
    with inanet.connect("growth", rank=rank, world=world, socket=socket) as job:
        print(json.dumps({"ready": True}), flush=True)
        tensors: dict[int, Any] = {}
        for question in sys.stdin:
            asked = json.loads(question)
            answer = measure(job, int(asked["bytes"]), int(asked["rounds"]), tensors)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
