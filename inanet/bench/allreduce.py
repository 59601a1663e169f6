"""``ina bench allreduce``: nccl-tests' table over real daemons; correctness and speed in the same run.

The parent starts a fabric on this machine and one process per rank, and asks the ranks for one size after the other. A
repetition starts from fresh data behind a barrier, so that no rank runs ahead, and its time is that of the slowest rank.
Counters of all nodes are read between sizes.
"""

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import inanet
from inanet.bench.bounds import FRAGMENT
from inanet.bench.measure import Limit, Ticks, idle_share, median, short_of_cpu, ticks
from inanet.bench.peers.rank import cpu_seconds, team
from inanet.bench.samples import check, fill, stored, tensor
from inanet.client.job import Job
from inanet.launch.fabric import Fabric, daemon_command
from inanet.launch.interrupts import Interrupted
from inanet.launch.process import python
from inanet.launch.topology import NodeSpec
from inanet.proto.slots.systems import TREES
from inanet.service.exits import Failure
from inanet.service.metrics import FRESH
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES

#: Seconds a node may take to answer.
_PATIENCE = 10.0
_SECTION = "[metrics]\n"


@dataclass(slots=True)
class Reading:
    """What all nodes had counted at one moment."""

    #: contributions of children that the root accepted
    into_root: int = 0
    retransmissions: int = 0
    #: packets dropped, by reason
    drops: dict[str, int] = field(default_factory=dict)
    #: seconds of processor time by role: worker, agg, switch, ps
    cpu: dict[str, float] = field(default_factory=dict)

    def since(self, before: "Reading") -> "Reading":
        """What was added; reasons and roles without any are left out."""
        return Reading(
            self.into_root - before.into_root,
            self.retransmissions - before.retransmissions,
            {
                reason: count - before.drops.get(reason, 0)
                for reason, count in sorted(self.drops.items())
                if count > before.drops.get(reason, 0)
            },
            {role: seconds - before.cpu.get(role, 0.0) for role, seconds in self.cpu.items()},
        )

    def add(self, role: str, metrics: str) -> None:
        """Add one node's metrics, in Prometheus' text format."""
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                value = int(sample.value)
                if sample.name == "inanet_packets_dropped_total":
                    reason = sample.labels["reason"]
                    self.drops[reason] = self.drops.get(reason, 0) + value
                elif sample.name == "inanet_retransmissions_total":
                    self.retransmissions += value
                elif (
                    role == "ps"
                    and sample.name == "inanet_packets_received_total"
                    and sample.labels["kind"] == "contribution"
                ):
                    self.into_root += value


class CountedFabric(Fabric):
    """A :class:`inanet.launch.fabric.Fabric` with a metrics endpoint for every node."""

    def __init__(
        self, workers: int, topology: Sequence[tuple[str, str | None]] | None = None, system: str = TREES
    ) -> None:
        super().__init__(workers, topology=topology, system=system, command=_with_metrics)

    def read(self) -> Reading:
        """Ask every node. Raises :class:`Failure` naming one that does not answer."""
        reading = Reading()
        # a page may show what was counted that long before
        time.sleep(FRESH)
        for name, process in self.processes.items():
            role = self.nodes[name].role
            reading.cpu[role] = reading.cpu.get(role, 0.0) + cpu_seconds(process.pid)
            url = f"http://127.0.0.1:{metrics_port(process.log)}/metrics"
            try:
                with urllib.request.urlopen(url, timeout=_PATIENCE) as answer:
                    reading.add(role, answer.read().decode())
            except OSError as error:
                raise Failure(f"{name} does not tell its counters at {url}: {error}") from error
        return reading


def _with_metrics(node: NodeSpec, config: Path) -> Sequence[str]:
    """The daemon's command, its configuration completed: the kernel chooses the port, the log tells it."""
    head, section, rest = config.read_text().partition(_SECTION)
    if "listen = " not in rest.partition("[")[0]:
        config.write_text(f'{head}{section or _SECTION}listen = "127.0.0.1:0"\n{rest}')
    return daemon_command(node, config)


def metrics_port(log: Path) -> int:
    """The port on which a daemon says in its log that it serves metrics; of the last start. Raises :class:`Failure`."""
    found = re.findall(r"serving metrics.*\bport=(\d+)", log.read_text(errors="replace"))
    if not found:
        raise Failure(f"the log of {log.stem} names no port of its metrics")
    return int(found[-1])


def in_network_share(into_root: int, leaves: int) -> float | None:
    """Fraction of the workers' contributions that were summed on their way to the root; ``None`` if there were none."""
    return 1 - into_root / leaves if leaves else None


def per_gigabyte(seconds: Mapping[str, float], size: int) -> dict[str, float]:
    """Processor seconds by role over ``size`` bytes."""
    return {role: spent / (size / 1e9) for role, spent in seconds.items()}


#: Of what ``--json`` prints.
SCHEMA = 1
#: Seconds that ranks may take to join, compiles included, and that a size may take.
JOINING, MEASURING = 120.0, 300.0
#: Bytes that Ethernet, IPv4 and UDP put before a packet.
HEADER_BYTES = round(FRAGMENT * PAYLOAD_BYTES) - ROW_BYTES


@dataclass(frozen=True, slots=True)
class Options:
    """What nccl-tests calls -b, -e, -i, -f, -n, -w, -c, and the fabric. A ``step`` in bytes replaces the factor."""

    begin: int = 4096
    end: int = 64 << 20
    factor: int = 4
    step: int = 0
    repetitions: int = 10
    warmups: int = 2
    check: bool = True
    workers: int = 4
    op: str = "sum"
    dtype: str = "float32"
    mode: str = "prologue"
    one_host: bool = False
    system: str = TREES

    def sizes(self) -> Iterator[int]:
        """Bytes per rank of every line."""
        size = self.begin
        while size <= self.end:
            yield size
            size = size + self.step if self.step else size * self.factor


def run(
    options: Options, tell: Callable[[dict[str, Any]], None] = lambda row: None, limit: Limit | None = None
) -> dict[str, Any]:
    """Measure; returns the object that ``--json`` prints, and tells every row as soon as it is there. Beyond a ``limit`` no size
    begins; when the user wants an end, the rows that are there are all. Raises :class:`inanet.service.exits.Failure` if a rank or a
    daemon fails."""
    topology = [("ps", None), ("worker0", "ps")] if options.one_host else None
    rows: list[dict[str, Any]] = []
    limit = limit or Limit()
    with CountedFabric(options.workers, topology, options.system) as fabric, ExitStack() as stack:
        commands = [_command(fabric, options, rank) for rank in range(options.workers)]
        ranks = stack.enter_context(team("inanet", fabric.directory, commands, JOINING))
        ranks.check = limit.check
        try:
            for size in options.sizes():
                if rows and limit.is_over:
                    break
                before, ticks_before = fabric.read(), ticks()
                answers = ranks.ask({"bytes": size}, MEASURING, f"all-reduces of {size} B")
                moved, idle = fabric.read().since(before), (ticks_before, ticks())
                rows.append(row(options, size, answers, moved, idle))
                tell(rows[-1])
        except Interrupted as interrupted:
            limit.stop(f"{interrupted}: it ended early")
    ok = all(row["wrong"] == 0 for row in rows)
    return {
        "schema": SCHEMA,
        "ok": ok,
        **asdict(options),
        "rows": rows,
        "incomplete": limit.reason,
    }


def _command(fabric: CountedFabric, options: Options, rank: int) -> list[str]:
    socket = str(fabric.worker_socket(0 if options.one_host else rank))
    return python("inanet.bench.allreduce", json.dumps(asdict(options)), str(rank), socket)


def row(
    options: Options,
    size: int,
    answers: Sequence[dict[str, Any]],
    moved: Reading,
    period: tuple[Ticks, Ticks],
) -> dict[str, Any]:
    """One size from what all ranks measured and all nodes counted meanwhile, warm-ups included in the latter.

    ``cpu_s_per_gb``: processor seconds by role over the bytes of all ranks' tensors; ranks' while they reduce,
    daemons' all the time.
    """
    times = [max(times) for times in zip(*(rank["seconds"] for rank in answers), strict=True)]
    seconds = median(times)
    algorithm = size / seconds if seconds else 0.0
    n = options.workers
    rounds = options.warmups + options.repetitions
    leaves = 0 if options.one_host else sum(rank["leaves"] for rank in answers)
    spent = {"rank": sum(rank["cpu"] for rank in answers), **moved.cpu}
    idle = idle_share(*period)
    return {
        "bytes": size,
        "count": size // stored(options.dtype).itemsize,
        "seconds": seconds,
        "algbw_bps": algorithm * 8,
        "busbw_bps": algorithm * 8 * 2 * (n - 1) / n,
        "wrong": sum(rank["wrong"] for rank in answers),
        "max_error": max(rank["max_error"] for rank in answers),
        "wire_bytes_per_worker": 0
        if options.one_host
        else answers[0]["rows_sent"] // rounds * answers[0]["packet_bytes"],
        "in_network_share": in_network_share(moved.into_root, leaves),
        "retransmissions": moved.retransmissions,
        "drops": moved.drops,
        "cpu_s_per_gb": per_gigabyte(spent, size * n * rounds),
        "idle": idle,
        "short_of_cpu": short_of_cpu([idle]),
    }


def measure(job: Job, options: Options, size: int) -> dict[str, Any]:
    """What one rank does for one size."""
    dtype = options.dtype
    buffer = job.empty(size // stored(dtype).itemsize, stored(dtype))
    beginning = job.stats()
    job.barrier()
    before = job.stats()
    # fragments, of which none is counted twice
    barrier = before["leaf_contributions"] - beginning["leaf_contributions"]
    barriers = barrier * (options.warmups + options.repetitions)
    seconds, spent, wrong, worst = [], 0.0, 0, 0.0
    for repetition in range(options.warmups + options.repetitions):
        fill(buffer, job.rank, dtype)
        job.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        job.all_reduce(tensor(buffer, dtype), options.op, name=f"bench{size}", mode=options.mode)
        elapsed = time.perf_counter() - start
        spent += time.process_time() - cpu
        if repetition >= options.warmups:
            seconds.append(elapsed)
        if options.check:
            bad, error = check(buffer, options.op, options.workers, dtype)
            wrong, worst = wrong + bad, max(worst, error)
    after = job.stats()
    # the first barrier has reached the root as well
    leaves, leaf_bytes = (after[name] - beginning[name] for name in ("leaf_contributions", "leaf_bytes"))
    return {
        "seconds": seconds,
        "cpu": spent,
        "wrong": wrong,
        "max_error": worst,
        # without the barriers'
        "rows_sent": after["rows_sent"] - before["rows_sent"] - barriers,
        "leaves": leaves,
        "packet_bytes": leaf_bytes // leaves + HEADER_BYTES if leaves else 0,
    }


class Printer:
    """nccl-tests' table, with what matters for in-network aggregation at the right, row by row as they come."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._roles: list[str] = []

    def heading(self) -> Iterator[str]:
        """Before all rows."""
        its = self._options
        step = f"{its.step}(bytes)" if its.step else f"{its.factor}(factor)"
        yield f"# nThread 1 workers {its.workers} minBytes {its.begin} maxBytes {its.end}"
        yield f"# step: {step} warmup iters: {its.warmups} iters: {its.repetitions} validation: {int(its.check)}"
        yield "# time: median over repetitions of the slowest rank. busbw multiplies algbw by 2(n-1)/n, which assumes"
        yield "# point-to-point transfers: here a worker sends and receives the tensor once, so compare algbw and wire bytes."
        yield "# CPU: processor seconds per GB of all ranks' tensors, by role as named before the first row; in-net: share of"
        yield "# contributions that were summed before the root; * processes were short of processors"
        yield "#       size        count      type   redop      time   algbw   busbw  #wrong    wire/worker  in-net     retx    drops  CPU"
        yield "#        (B)   (elements)                       (us)  (GB/s)  (GB/s)                   (B)                              (s/GB)"

    def row(self, row: dict[str, Any]) -> Iterator[str]:
        """One size."""
        if not self._roles:
            self._roles = sorted(row["cpu_s_per_gb"])
            yield f"# CPU of {'/'.join(self._roles)}"
        its, share = self._options, row["in_network_share"]
        cpu = "/".join(f"{row['cpu_s_per_gb'].get(role, 0.0):.2f}" for role in self._roles)
        yield (
            f"{row['bytes']:12d} {row['count']:12d} {its.dtype:>9} {its.op:>7} {row['seconds'] * 1e6:9.1f} "
            f"{row['algbw_bps'] / 8e9:7.3f} {row['busbw_bps'] / 8e9:7.3f} {row['wrong']:7d} "
            f"{row['wire_bytes_per_worker']:14d} {'-' if share is None else f'{share:.3f}':>7} "
            f"{row['retransmissions']:8d} {sum(row['drops'].values()):8d}  {cpu}{' *' if row['short_of_cpu'] else ''}"
        )
        if row["drops"]:
            yield "# drops: " + ", ".join(f"{reason} {count}" for reason, count in row["drops"].items())

    def ending(self, result: dict[str, Any]) -> Iterator[str]:
        """Behind all rows."""
        wrong = sum(row["wrong"] for row in result["rows"])
        yield f"# Out of bounds values : {wrong} {'OK' if result['ok'] else 'FAILED'}"
        rates = [row["busbw_bps"] / 8e9 for row in result["rows"]]
        yield f"# Avg bus bandwidth    : {sum(rates) / len(rates) if rates else 0.0:.4f}"
        if result["incomplete"]:
            yield f"# INCOMPLETE: {result['incomplete']}; sizes that are not there were not measured"


def main(given: str, rank: int, socket: str) -> None:
    """Answer a line per size until standard input ends."""
    options = Options(**json.loads(given))
    local = options.workers if options.one_host else 1
    with inanet.connect(
        "bench",
        rank=rank,
        world=options.workers,
        local_world=local,
        socket=socket,
        system=options.system,
    ) as job:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(job, options, int(json.loads(line)["bytes"]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
