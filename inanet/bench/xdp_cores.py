"""The kernel's program on several cores at once, and what is lost on the way to it (XAgg, Figs. 8 and 11)."""

import os
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from inanet.bench import hop
from inanet.bench.veth import Cable
from inanet.bench.xdp import Children, TcpHop, as_process, in_kernel
from inanet.bench.xdp_alone import Alone, NotMeasured
from inanet.wire.batch import Transmission
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES
from inanet.xdp.build import CannotBuild, compile_program

_VALUES = 256
#: fragments of every child in a burst
_BURST = 62
#: offsets in ``struct tcp_info`` (linux/tcp.h, since 4.2): retransmissions in all, and segments sent
_TOTAL_RETRANS, _SEGS_OUT = 100, 136
_INFO_BYTES = 192


def on_cores(cores: Sequence[int], fragments: int, repetitions: int) -> float:
    """Gbit/s of gradient that the program alone takes in on these processors together, 256 values a packet.

    Each has a node of its own; all begin every run at the same moment. Raises :class:`NotMeasured` without a compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "bench.o"
        try:
            compile_program(image, "BENCH=1", f"VALUES={_VALUES}")
        except CannotBuild as error:
            raise NotMeasured(str(error)) from None
        nodes = [Alone(image.read_bytes(), _VALUES, fragments) for _ in cores]
    found: list[list[float]] = [[] for _ in cores]
    problems: list[BaseException] = []
    together = threading.Barrier(len(cores))

    def work(index: int, core: int) -> None:
        try:
            # of this thread alone
            os.sched_setaffinity(0, {core})
            for _ in range(repetitions):
                found[index].append(nodes[index].once(lambda: together.wait(60.0)))
        except BaseException as error:
            problems.append(error)
            together.abort()

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(cores)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for node in nodes:
            node.close()
    if problems:
        raise problems[0]
    rounds = zip(*found, strict=True)
    median: float = statistics.median(sum(_VALUES * 32 / ns for ns in round_) for round_ in rounds)
    return median


def kernel_losses(
    fragments: int, loads: Sequence[float], full: float, seconds: float
) -> list[tuple[float, float]]:
    """(Gbit/s offered, share of contributions lost) at shares ``loads`` of ``full`` Gbit/s; nothing is sent again."""
    points = []
    with Cable() as cable, in_kernel(cable, fragments, "generic") as (memory, row):
        memory.tables["routes"][0, 0]["up_limit"] = 0
        children = Children(cable, fragments)
        try:
            for load in loads:
                offered = lost = 0
                spent = 0.0
                while spent < seconds:
                    hop.reopen(memory, row)
                    spent += paced(children, full * load)
                    _settle(lambda: int(np.bitwise_count(memory.bitmap[:fragments]).sum()))
                    offered += hop.CHILDREN * fragments
                    lost += hop.CHILDREN * fragments - int(np.bitwise_count(memory.bitmap[:fragments]).sum())
                points.append((offered * PAYLOAD_BYTES * 8 / spent / 1e9, lost / offered))
        finally:
            children.close()
    return points


def paced(children: Children, gbps: float) -> float:
    """Every child sends everything once, at this rate together; seconds it took."""
    offsets = np.arange(children.fragments, dtype=np.int64) * ROW_BYTES
    interval = _BURST * hop.CHILDREN * PAYLOAD_BYTES * 8 / (gbps * 1e9)
    start = time.perf_counter()
    for turn, first in enumerate(range(0, children.fragments, _BURST)):
        part = offsets[first : first + _BURST]
        for rows, sender in zip(children.rows, children.senders, strict=True):
            sent = 0
            while sent < len(part):
                sent += sender.send(Transmission(hop.AGGREGATOR, rows, part, ROW_BYTES), sent)
        # spins: a sleep is longer than the time between two bursts
        while time.perf_counter() < start + (turn + 1) * interval:
            pass
    return time.perf_counter() - start


def _settle(count: Callable[[], int]) -> None:
    """Wait until what is under way has arrived: nothing has for a hundredth of a second."""
    before, now = -1, count()
    while now != before:
        time.sleep(0.01)
        before, now = now, count()


def tcp_retransmitted(fragments: int, seconds: float) -> tuple[float, float]:
    """(Gbit/s, share of segments that were sent again) of TCP-Agg as fast as it goes."""
    with Cable() as cable, as_process(cable, fragments, "tcp"):
        tcp = TcpHop(cable, fragments)
        try:
            tcp.round()
            before = [_segments(one) for one in tcp.connections]
            spent, rounds = 0.0, 0
            while spent < seconds:
                spent += tcp.round()
                rounds += 1
            after = [_segments(one) for one in tcp.connections]
        finally:
            tcp.close()
    again, sent = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    return rounds * hop.CHILDREN * fragments * PAYLOAD_BYTES * 8 / spent / 1e9, again / max(1, sent)


def _segments(connection: socket.socket) -> tuple[int, int]:
    """Segments sent again, and sent, by TCP_INFO."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return struct.unpack_from("=I", info, _TOTAL_RETRANS)[0], struct.unpack_from("=I", info, _SEGS_OUT)[0]
