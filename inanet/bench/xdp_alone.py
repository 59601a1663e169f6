"""The aggregator's program without a network: what a packet costs (XAgg, Fig. 6), and what it takes until it is loaded."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from inanet.bench import hop
from inanet.proto.tree.engine import open_round, tables_of
from inanet.proto.tree.slots import ShardColumn
from inanet.service.exits import Failure
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import ROW_BYTES
from inanet.xdp.attach import load
from inanet.xdp.build import CannotBuild, compile_program
from inanet.xdp.memory import SharedMemory

#: values per packet
SIZES = (32, 64, 128, 256, 320)


class NotMeasured(Exception):
    """A part of the benchmark cannot be had here; the message says why."""


def program_alone(fragments: int, repetitions: int, sizes: Sequence[int] = SIZES) -> dict[str, float]:
    """Nanoseconds per packet by number of values: three of four packets add, the fourth adds and leaves.

    What makes the packets differ is measured alone and taken off. Raises :class:`NotMeasured` without a compiler.
    """
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "bench.o"
        for values in sizes:
            try:
                compile_program(image, "BENCH=1", f"VALUES={values}")
            except CannotBuild as error:
                raise NotMeasured(str(error)) from None
            found[str(values)] = _test_runs(image.read_bytes(), values, fragments, repetitions)
    return found


def _test_runs(image: bytes, values: int, fragments: int, repetitions: int) -> float:
    alone = Alone(image, values, fragments)
    try:
        return min(alone.once() for _ in range(repetitions))
    finally:
        alone.close()


class Alone:
    """The program over packets of so many values, without a network: a node of its own, with four children."""

    def __init__(self, image: bytes, values: int, fragments: int) -> None:
        own, first = endpoint("10.77.0.2", 7000), endpoint("10.77.0.16", 7000)
        size = 24 + 4 * values + 4
        self._memory = memory = SharedMemory(
            fragments,
            own,
            image=image,
            names=("bench_vary", "bench_frames"),
            stride=size if values > 256 else ROW_BYTES,
        )
        self._fragments, self._round = fragments, 1
        self._row = hop.describe(memory, fragments)
        for child in range(hop.CHILDREN):
            memory.child_endpoint[0, child] = first + (child << 16)
        memory.tables["spare"][0, 1] = first >> 16
        route = memory.tables["routes"][0][:1]
        route["parent_ifindex"], route["up_limit"], route["credit_mask"] = 1, 1 << 62, (1 << 62) - 1
        self._packet = _frame(size)

    def once(self, ready: Callable[[], object] = lambda: None) -> float:
        """Nanoseconds per packet of one round; ``ready`` is called before each of the two runs that it takes."""
        memory, runs = self._memory, hop.CHILDREN * self._fragments
        self._round += 1
        open_round(tables_of(memory), self._row, self._round)
        taken = []
        for program in ("bench_vary", "bench_frames"):
            memory.tables["spare"][0, 0] = 0
            ready()
            taken.append(memory.programs[program].test_run(self._packet, runs)[2])
        if int(memory.shards[self._row, ShardColumn.UP_LOGGED]) != self._fragments:
            raise Failure("the program did not complete the fragments it was given")
        return float(taken[1] - taken[0])

    def close(self) -> None:
        self._memory.close()


def _frame(size: int) -> bytes:
    """Headers as far as the program looks at them, and ``size`` bytes."""
    ip = bytes.fromhex("4500") + (size + 28).to_bytes(2, "big") + bytes.fromhex("0000400040110000") + bytes(8)
    return bytes(12) + b"\x08\x00" + ip + bytes(4) + (size + 8).to_bytes(2, "big") + bytes(2) + bytes(size)


def deployment(fragments: int) -> dict[str, float | None]:
    """Seconds until a program is ready for a tensor: from the committed object, and compiled first."""
    start = time.perf_counter()
    load(fragments, hop.AGGREGATOR, "generic").close()
    precompiled = time.perf_counter() - start
    compiled: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "fresh.o"
        start = time.perf_counter()
        try:
            compile_program(image)
            SharedMemory(fragments, hop.AGGREGATOR, "generic", image=image.read_bytes()).close()
            compiled = time.perf_counter() - start
        except CannotBuild:
            pass
    return {"precompiled": precompiled, "compiled": compiled}
