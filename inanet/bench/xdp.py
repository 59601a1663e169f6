"""``ina bench xdp``: the kernel's data path against the same node in user space and against TCP-Agg.

Every figure is measured in this run: the program alone by test runs over packets that differ (XAgg, Fig. 6), a hop over
a virtual cable in throughput and processor time (Figs. 7 and 9), deployment, and the latency of the hop (Fig. 10).
"""

import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inanet.bench import hop
from inanet.bench.measure import idle_share, ticks
from inanet.bench.veth import Cable
from inanet.bench.xdp_alone import NotMeasured, deployment, program_alone
from inanet.bench.xdp_report import judge
from inanet.bench.xdp_results import results_paths
from inanet.phy.interface import Feature, set_feature
from inanet.phy.udp import UdpDevice
from inanet.proto.tree.slots import ShardColumn
from inanet.service.exits import Exit, Failure
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import address_of
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES
from inanet.xdp.attach import Attachment, Unavailable, load
from inanet.xdp.memory import Mode, SharedMemory

SCHEMA = 1
#: the paper's millions of packets per second and core at both ends of the curve, by values per packet (Fig. 6)
PAPER_MPPS = {32: 4.19, 320: 1.11}
MODES: tuple[Mode, ...] = ("native", "generic")
#: fragments per child and super-frame, and super-frames of every child between two looks at the parent's socket
_FRAME, _AHEAD = 62, 2
_DEADLINE = 20.0
_TICK = 0.01


class Children:
    """Four children and their parent, as sockets in namespace 0."""

    def __init__(self, cable: Cable, fragments: int) -> None:
        self.fragments = fragments
        self.rows = [hop.contributions(child, fragments).view(np.uint8) for child in range(hop.CHILDREN)]
        self._stack = ExitStack()

        def device(at: int, rcvbuf: int, sndbuf: int) -> UdpDevice:
            made = cable.run(0, lambda: UdpDevice(*address_of(at), rcvbuf=rcvbuf, sndbuf=sndbuf))
            self._stack.callback(made.close)
            return made

        self.senders = [device(source, 1 << 16, 1 << 22) for source in hop.SOURCES]
        self.parent = device(hop.PARENT, 1 << 25, 1 << 16)

    def round(self) -> float:
        """Every child sends everything; seconds until the parent has all sums. Raises :class:`Failure` after a loss."""
        poller = select.poll()
        poller.register(self.parent.fileno(), select.POLLIN)
        offsets = np.arange(self.fragments, dtype=np.int64) * ROW_BYTES
        start = time.perf_counter()
        burst, got = _FRAME * _AHEAD, 0
        for first in range(0, self.fragments, burst):
            for child, sender in enumerate(self.senders):
                part = offsets[first : first + burst]
                sent = 0
                while sent < len(part):
                    transmission = Transmission(hop.AGGREGATOR, self.rows[child], part, ROW_BYTES)
                    sent += sender.send(transmission, sent)
            got += self._drain()
            # no further ahead than the aggregator's socket and the cable can hold
            while first + burst - got > 16 * burst and poller.poll(_DEADLINE * 1000):
                got += self._drain()
        while got < self.fragments:
            if time.perf_counter() - start > _DEADLINE or not poller.poll(2000):
                raise Failure(f"{self.fragments - got} of {self.fragments} sums were lost")
            got += self._drain()
        return time.perf_counter() - start

    def add(self, memory: SharedMemory, row: int) -> float:
        """As :meth:`round` for a program that sends nothing: seconds until the last sum is complete in its slot."""
        offsets = np.arange(self.fragments, dtype=np.int64) * ROW_BYTES
        start = time.perf_counter()
        for first in range(0, self.fragments, _FRAME * _AHEAD):
            part = offsets[first : first + _FRAME * _AHEAD]
            for rows, sender in zip(self.rows, self.senders, strict=True):
                sent = 0
                while sent < len(part):
                    sent += sender.send(Transmission(hop.AGGREGATOR, rows, part, ROW_BYTES), sent)
        while memory.shards[row, ShardColumn.UP_LOGGED] < self.fragments:
            if time.perf_counter() - start > _DEADLINE:
                raise Failure("contributions were lost")
            time.sleep(0)
        return time.perf_counter() - start

    def _drain(self) -> int:
        got = 0
        while (batch := self.parent.receive()) is not None:
            got += len(batch)
        return got

    def close(self) -> None:
        self._stack.close()


def _busy() -> int:
    now = ticks()
    return now.total - now.idle


def _background(seconds: float = 0.5) -> float:
    """Share of the processors that others keep busy."""
    before = ticks()
    time.sleep(seconds)
    idle = idle_share(before, ticks())
    return 0.0 if idle is None else 1.0 - idle


def _throughput(
    fragments: int, again: Callable[[], None], work: Callable[[], float], seconds: float
) -> dict[str, float]:
    """Rounds for so many seconds: gradient that came in per second, and processor time of everybody."""
    work()
    times: list[float] = []
    before = _busy()
    while sum(times) < seconds:
        again()
        times.append(work())
    busy = (_busy() - before) * _TICK
    size = hop.CHILDREN * fragments * PAYLOAD_BYTES
    return {
        "gbps": size * 8 / statistics.median(times) / 1e9,
        "cpu_s_per_gb": busy * 1e9 / (size * len(times)),
    }


@contextmanager
def in_kernel(cable: Cable, fragments: int, mode: Mode) -> Iterator[tuple[SharedMemory, int]]:
    """The aggregator as the program on the far end of the cable; also the row of its shard."""
    with ExitStack() as stack:
        memory = load(fragments, hop.AGGREGATOR, mode)
        stack.callback(memory.close)
        row = hop.describe(memory, fragments)
        attachment = cable.run(1, lambda: Attachment(memory, Cable.NAMES[1], mode))
        stack.callback(attachment.close)
        if mode == "native":
            # frames to the near end are taken one by one there only if it merges them again
            cable.run(0, lambda: set_feature(Cable.NAMES[0], Feature.RECEIVE_MERGING, True))
        route = memory.tables["routes"][0][:1]
        route["parent_ifindex"], route["up_limit"] = attachment.ifindex, 1 << 62
        route["parent_mac"][0, :6] = np.frombuffer(cable.macs[0], np.uint8)
        route["credit_mask"] = (1 << 62) - 1
        yield memory, row


@contextmanager
def as_process(cable: Cable, fragments: int, kind: str) -> Iterator[None]:
    """The aggregator as a process at the far end."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "inanet.bench.hop", kind, str(fragments), str(ready)]
        process = cable.run(1, lambda: subprocess.Popen(command))
        try:
            end = time.monotonic() + 120.0
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise Failure(f"the {kind} aggregator did not start")
                time.sleep(0.01)
            yield
        finally:
            process.terminate()
            process.wait()


class TcpHop:
    """Children and parent of TCP-Agg."""

    def __init__(self, cable: Cable, fragments: int) -> None:
        self.fragments = fragments

        def connect() -> socket.socket:
            connection = socket.create_connection((Cable.ADDRESSES[1], 7000), timeout=_DEADLINE)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection

        self.connections = [cable.run(0, connect) for _ in range(hop.CHILDREN + 1)]
        self._fds = np.array([one.fileno() for one in self.connections[:-1]], np.int32)
        self._payloads = np.random.default_rng(0).integers(
            0, 256, (hop.CHILDREN, fragments, PAYLOAD_BYTES), np.uint8
        )
        self._received = np.zeros(1 << 16, np.uint8)

    def round(self, fragments: int | None = None) -> float:
        count = self.fragments if fragments is None else fragments
        start = time.perf_counter()
        self.connections[0].sendall(count.to_bytes(8, "little"))
        parent = self.connections[-1].fileno()
        payloads = self._payloads if count == self.fragments else self._payloads[:, :count].copy()
        if hop.offer(self._fds, parent, np.zeros((hop.CHILDREN + 1, 2), np.int32), payloads, self._received):
            raise Failure("the TCP aggregator is gone")
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends the aggregator as well."""
        for connection in self.connections:
            connection.close()


def _percentiles(times: list[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(times) * 1e6,
        "p99": statistics.quantiles(times, n=100)[98] * 1e6,
    }


def _latencies(children: Children, samples: int) -> dict[str, float]:
    """From the last contribution of a fragment until its sum is there; the other three have been sent before."""
    parent = children.parent
    poller = select.poll()
    poller.register(parent.fileno(), select.POLLIN)
    times = []
    for fragment in range(samples):
        at = np.array([fragment * ROW_BYTES], np.int64)
        for child in range(hop.CHILDREN - 1):
            children.senders[child].send(Transmission(hop.AGGREGATOR, children.rows[child], at, ROW_BYTES))
        last = Transmission(hop.AGGREGATOR, children.rows[-1], at, ROW_BYTES)
        start = time.perf_counter()
        children.senders[-1].send(last)
        while parent.receive() is None:
            if not poller.poll(2000):
                raise Failure(f"the sum of fragment {fragment} was lost")
        times.append(time.perf_counter() - start)
    return _percentiles(times)


class Refused(Failure):
    """This process may not load BPF programs."""

    code = Exit.PERMISSION


@dataclass(frozen=True, slots=True)
class Hop:
    """One path: throughput by kind of work, with processor time, and latency in microseconds."""

    gbps: float
    cpu_s_per_gb: float
    latency: dict[str, float]
    #: contributions summed and no sums sent
    add_only: dict[str, float] | None = None


def kernel_hop(mode: Mode, fragments: int, seconds: float, samples: int) -> Hop:
    """The program in one mode. Raises :class:`Failure` after a loss, :class:`Unavailable` where it cannot be loaded."""
    # a cable of its own: what a mode changes in the other end's offloads does not come back
    with Cable() as cable, in_kernel(cable, fragments, mode) as (memory, row):
        children = Children(cable, fragments)
        try:
            figures = _throughput(fragments, lambda: hop.reopen(memory, row), children.round, seconds)
            hop.reopen(memory, row)
            latency = _latencies(children, min(samples, fragments))
            memory.tables["routes"][0, 0]["up_limit"] = 0
            add = _throughput(
                fragments, lambda: hop.reopen(memory, row), lambda: children.add(memory, row), seconds
            )
        finally:
            children.close()
    return Hop(figures["gbps"], figures["cpu_s_per_gb"], latency, add)


def udp_hop(fragments: int, seconds: float, samples: int) -> Hop:
    """The same node in user space. Raises :class:`Failure` after a loss."""
    with Cable() as cable, as_process(cable, fragments, "udp"):
        children = Children(cable, fragments)
        try:
            figures = _throughput(fragments, lambda: None, children.round, seconds)
            return Hop(
                figures["gbps"], figures["cpu_s_per_gb"], _latencies(children, min(samples, fragments))
            )
        finally:
            children.close()


def tcp_hop(fragments: int, seconds: float, samples: int) -> Hop:
    """TCP-Agg with messages of one fragment."""
    with Cable() as cable, as_process(cable, fragments, "tcp"):
        tcp = TcpHop(cable, fragments)
        try:
            figures = _throughput(fragments, lambda: None, tcp.round, seconds)
            return Hop(
                figures["gbps"], figures["cpu_s_per_gb"], _percentiles([tcp.round(1) for _ in range(samples)])
            )
        finally:
            tcp.close()


def available() -> None:
    """Raises :class:`Refused` for want of a privilege, :class:`Failure` for any other reason that XDP is not to be had."""
    try:
        load(2, hop.AGGREGATOR, "generic").close()
    except Unavailable as reason:
        kind = Refused if str(reason).startswith("permission") else Failure
        raise kind(f"XDP cannot be used here: {reason}") from None


def run(size: int, seconds: float, samples: int, repetitions: int) -> dict[str, Any]:
    """``size`` is MiB per child. Raises :class:`Refused` and :class:`Failure` where XDP is not to be had."""
    fragments = size * 1024
    notes: list[str] = []
    others = _background()
    if others > 0.1:
        notes.append(
            f"other processes keep {others:.0%} of the processors busy; cpu_s_per_gb counts them too"
        )
    available()
    deployed = deployment(fragments)
    try:
        alone = program_alone(fragments, repetitions)
    except NotMeasured as reason:
        alone = {}
        notes.append(f"ns_per_packet: {reason}")
    hops: dict[str, Hop] = {}
    paths: dict[str, Callable[[int, float, int], Hop]] = {
        **{mode: partial(kernel_hop, mode) for mode in MODES},
        "udp": udp_hop,
        "tcp_agg_1k": tcp_hop,
    }
    for path, measure in paths.items():
        try:
            hops[path] = measure(fragments, seconds, samples)
        except Failure as failure:
            notes.append(f"{path}: {failure}")
    try:
        arriving = results_paths(fragments, seconds)
    except (Failure, Unavailable) as failure:
        arriving = {}
        notes.append(f"results_in: {failure}")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": True,
        "mib": size,
        "ns_per_packet": alone,
        "paper_mpps": {str(values): rate for values, rate in PAPER_MPPS.items()},
        "gbps": {path: its.gbps for path, its in hops.items()},
        "cpu_s_per_gb": {path: its.cpu_s_per_gb for path, its in hops.items()},
        "add_only": {path: its.add_only for path, its in hops.items() if its.add_only is not None},
        "results_in": arriving,
        "deploy_seconds": deployed,
        "latency_us": {path: its.latency for path, its in hops.items()},
        "background_share": others,
        "notes": notes,
    }
    result["marks"] = judge(result)
    return result
