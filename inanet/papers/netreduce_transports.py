"""NetReduce's Table 1: what transports cost, measured on this machine between two processes.

The paper has RoCE on network cards beside the I/O of ATP (parallel DMA) and SwitchML (DPDK). There are no cards here: RoCE is
the one in user space that NetReduce is built on, and the peers are what any program can have without DPDK. Numbers differ from
run to run, and a busy machine shows in them.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inanet.launch.process import child, end, python, python_environment
from inanet.papers.claims import Claim, ratio
from inanet.papers.netreduce_ends import MESSAGE, SMALL, WAYS, End, open_end
from inanet.papers.outcome import Outcome, Table

#: messages of a stream, small ones that are bounced, repetitions of which the median counts
MESSAGES, BOUNCES, REPETITIONS = 400, 400, 5
#: CPU in per cent of a core, Gbit/s, microseconds
_PAPER = {"RoCE": (25.6, 84.2, 5.7), "parallel DMA": (100.0, 58.67, 70.2), "DPDK": (200.0, 90.5, 20.5)}


@dataclass(frozen=True, slots=True)
class Found:
    """Bits per second of IP packets and of what is in them, processors busy on both ends, seconds of a round trip."""

    throughput: float
    goodput: float
    cpu: float
    rtt: float


class _Pair:
    """A near end in this process and a far one in another."""

    def __init__(self, way: str, net: int) -> None:
        self._near: End = open_end(way, net)
        self._far = child(
            python("inanet.papers.netreduce_ends", way, str(self._near.port), str(net)),
            python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._near.join(int(self._hear()["port"]))
        except BaseException:
            self.close()
            raise

    def _hear(self) -> dict[str, float]:
        assert self._far.stdout is not None
        line = self._far.stdout.readline()
        if not line:
            raise OSError("the far end has ended; what it said stands above")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _order(self, **order: int) -> None:
        assert self._far.stdin is not None
        self._far.stdin.write(json.dumps(order) + "\n")
        self._far.stdin.flush()

    def stream(self, messages: int) -> tuple[float, float, float]:
        """Bits per second of IP packets and of messages, and processors busy."""
        sent = self._near.sent
        began, used = time.perf_counter(), time.process_time()
        self._order(take=messages)
        self._near.stream(messages)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        used += self._hear()["cpu"]
        moved = max(self._near.sent - sent, messages * MESSAGE)
        return moved * 8 / seconds, messages * MESSAGE * 8 / seconds, used / seconds

    def bounce(self, count: int) -> float:
        """Median seconds of a round trip."""
        self._order(**{"return": count})
        times = self._near.bounce(count)
        self._hear()
        return statistics.median(times)

    def close(self) -> None:
        """End the other process."""
        end(self._far, 5.0, ask=False)
        self._near.close()


@contextmanager
def _pairs(ways: Sequence[str], skipped: list[str]) -> Iterator[dict[str, _Pair]]:
    pairs: dict[str, _Pair] = {}
    try:
        for number, way in enumerate(ways):
            try:
                # a net of 127/8 for every pair of ends of every process
                pairs[way] = _Pair(way, (os.getpid() * 8 + number) % 0xFFFE + 1)
            except OSError as error:
                skipped.append(f"{way} was not measured: {error}.")
        yield pairs
    finally:
        for pair in pairs.values():
            pair.close()


def measure(
    ways: Sequence[str] = WAYS,
    *,
    messages: int = MESSAGES,
    bounces: int = BOUNCES,
    repetitions: int = REPETITIONS,
) -> tuple[dict[str, Found], list[str]]:
    """Medians by way, repetitions of all ways in turn; and in words, what could not be measured."""
    skipped: list[str] = []
    streams: dict[str, list[tuple[float, float, float]]] = {}
    trips: dict[str, list[float]] = {}
    with _pairs(ways, skipped) as pairs:
        for pair in pairs.values():
            pair.stream(max(1, messages // 10))
            pair.bounce(max(1, bounces // 10))
        for _ in range(repetitions):
            for way, pair in pairs.items():
                streams.setdefault(way, []).append(pair.stream(messages))
                trips.setdefault(way, []).append(pair.bounce(bounces))
    found = {}
    for way, rows in streams.items():
        throughput, goodput, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        found[way] = Found(throughput, goodput, cpu, statistics.median(trips[way]))
    return found, skipped


def table1(messages: int = MESSAGES, bounces: int = BOUNCES, repetitions: int = REPETITIONS) -> Outcome:
    """Throughput, goodput, processor time and round trips of RoCE in user space and of its peers."""
    found, skipped = measure(messages=messages, bounces=bounces, repetitions=repetitions)
    roce = "roce-raw" if "roce-raw" in found else "roce-udp"
    own, udp, tcp = found[roce], found["udp"], found["tcp"]
    paper, dma, dpdk = _PAPER["RoCE"], _PAPER["parallel DMA"], _PAPER["DPDK"]
    spent = {way: its.cpu / its.goodput for way, its in found.items()}
    claims = (
        _claim(
            f"throughput of {roce} over packets by system call (paper: over parallel DMA)",
            paper[1] / dma[1],
            own.throughput / udp.throughput,
            ">=",
            "this RoCE computes a checksum, sequence numbers and acknowledgements for every packet on the processor",
        ),
        _claim(
            f"processor time of a bit, {roce} over packets by system call (paper: over parallel DMA)",
            ratio(paper[0] / paper[1], dma[0] / dma[1]),
            spent[roce] / spent["udp"],
            "<=",
            "the paper's RoCE is in the network card, this one is in software",
        ),
        _claim(
            f"processor time of a bit, {roce} over TCP (paper: over DPDK)",
            ratio(paper[0] / paper[1], dpdk[0] / dpdk[1]),
            spent[roce] / spent["tcp"],
            "<=",
            "TCP crosses a loopback in segments of 64 KB and without checksums; the paper's RoCE is in the card",
        ),
        _claim(
            f"round trip of 1 KB, {roce} over TCP (paper: over DPDK)",
            paper[2] / dpdk[2],
            own.rtt / tcp.rtt,
            "<=",
            "both wait in the kernel for packets here; a card does not, and DPDK's programs only poll",
        ),
        _claim(
            f"values in what is sent, {roce}",
            MESSAGE / (MESSAGE + 170 * 44),
            own.goodput / own.throughput,
            "~",
            "datagrams around the packets have headers of their own",
            0.02,
        ),
    )
    rows = tuple(
        (way, its.throughput / 1e9, its.goodput / 1e9, its.cpu * 100, its.rtt * 1e6, spent[way] * 8e9)
        for way, its in found.items()
    )
    columns = ("transport", "Gbit/s", "goodput", "CPU, per cent of a core", "round trip, us", "CPU s per GB")
    printed = tuple((name, rate, cpu, rtt) for name, (cpu, rate, rtt) in _PAPER.items())
    return Outcome(
        claims,
        (
            Table("this machine, two processes", columns, rows),
            Table(
                "paper, cards of 100 Gbit/s",
                ("transport", "Gbit/s", "CPU, per cent of a core", "round trip, us"),
                printed,
            ),
        ),
        (),
        (
            f"Messages of {MESSAGE // 1024} KB, one way over the loopback; round trips of {SMALL} B; medians of {repetitions}"
            " interleaved repetitions; the processor time of both ends, system calls included.",
            "Neither DPDK nor parallel DMA can be had without their cards: the peers are kernel TCP, and datagrams with a system"
            " call for each.",
            *skipped,
        ),
    )


def _claim(name: str, paper: float, ours: float, relation: str, why: str, tolerance: float = 0.0) -> Claim:
    claim = Claim(name, paper, ours, relation, tolerance)  # type: ignore[arg-type]
    return claim if claim.holds else Claim(name, paper, ours, relation, tolerance, why)  # type: ignore[arg-type]
