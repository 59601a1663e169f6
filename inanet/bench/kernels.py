"""``ina bench kernels``: nanoseconds per 256-element fragment of every kernel on the data path, memcpy beside them.

``aggregate`` is the whole slot engine over batches of packets as a socket delivers them: header, tag and checksum
verified, bitmap, fold, completion, checksum of the sum, result header. ``fold`` is the addition alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.bench.measure import interleave, median
from inanet.kernels.checksum import seal_rows
from inanet.kernels.fold import fold_add
from inanet.kernels.jit import njit
from inanet.kernels.layout import ROW_WORDS
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.tree.engine import open_round
from inanet.proto.tree.node import Node
from inanet.proto.tree.xagg.slotwork import contribute
from inanet.wire.batch import PacketBatch
from inanet.wire.xagg import PAYLOAD_BYTES, ROW_BYTES, VALUES


@njit("void(int32[:, ::1], int32[::1], int64)", cache=True, nogil=True, _nrt=False)
def fold_rows(rows: Any, arena: Any, count: int) -> None:
    """Add the packet at row ``i`` of ``arena`` to slot ``i``."""
    for i in range(count):
        fold_add(rows, i, arena, i * ROW_WORDS)


#: packets of one super-frame, and super-frames of one batch
SEGMENTS = 62
FRAMES = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One line: ``gbps`` is payload per second on one core."""

    kernel: str
    ns_per_fragment: float
    gbps: float


class Bench:
    """``fragments`` are streamed through each kernel; 97 MiB by default, far more than a cache holds."""

    def __init__(self, fragments: int = 97 * 1024 * 1024 // PAYLOAD_BYTES, children: int = 4) -> None:
        self.fragments = fragments
        self.children = children
        spec = TensorSpec("bench", "f32", (fragments * VALUES,), "sum", ExponentMode.CARRIED)
        self.format = make_format(spec, children)
        generator = np.random.default_rng(0)
        self.values: NDArray[np.float32] = generator.standard_normal(fragments * VALUES, np.float32)
        self.out = np.zeros_like(self.values)
        self.exponents = self.format.initial_exponents()
        self.format.exponents([self.values], 0, fragments, self.exponents)
        self.spec = spec
        self.root = self._node("root", Placement(0, None, self._children()))
        self.batches = self._packets()

    def _children(self) -> tuple[Child, ...]:
        return tuple(Child(f"w{i}", 1000 + i, 1 << i, 1, 1 << 30) for i in range(self.children))

    def _node(self, name: str, placement: Placement) -> Node:
        node = Node(name, self.fragments)
        node.apply(NodePlan(0, 1, 77, self.children, (placement,)), 0.0)
        shard = Shard(0, 0, 0, Part.DATA, Fold.SUM, 0, self.fragments)
        node.add_layout(0, TensorLayout(0, self.spec, (shard,)))
        return node

    def _packets(self) -> list[PacketBatch]:
        """One round's packets in the order in which super-frames of all children would alternate."""
        sent: list[NDArray[np.int32]] = []
        worker = self._node("w", Placement(0, Parent("root", 999, 1, 1 << 30)))
        row = int(worker.memory.shard_row[0, 0])
        self.format.encode([self.values], 0, self.fragments, self.exponents, worker.memory.rows, 0)
        events, used = np.zeros((16, 4), np.int64), np.zeros(1, np.int64)
        for child in range(self.children):
            worker.memory.trees[worker.memory.shards[row, 3], 3] = 1 << child
            open_round(worker.slots.tables, row, child + 1)
            worker.memory.shards[row, 6] = 1
            worker.memory.state[:] = 0
            zeros = np.zeros(self.fragments, np.uint8)
            contribute(worker.slots.tables, row, np.arange(self.fragments), zeros, zeros, events, used)
            sent.append(worker.memory.rows[: self.fragments].copy())
        batches = []
        step = SEGMENTS * max(1, FRAMES // self.children)
        for start in range(0, self.fragments, step):
            parts = [rows[start : start + step] for rows in sent]
            arena = np.concatenate([part.reshape(-1) for part in parts]).view(np.uint8)
            count = sum(len(part) for part in parts)
            sources = np.repeat(np.arange(1000, 1000 + self.children), len(parts[0])).astype(np.uint64)
            batches.append(
                PacketBatch(
                    arena,
                    np.arange(count, dtype=np.int64) * ROW_BYTES,
                    np.full(count, ROW_BYTES, np.int64),
                    sources,
                )
            )
        return batches

    def aggregate(self) -> None:
        """All packets of a round into the slots of a root."""
        memory = self.root.memory
        memory.state[:] = 0
        memory.shards[0:, 6] = 0
        memory.shards[0:, 7] = 1
        before = self.root.stats()["fragments_completed"]
        for batch in self.batches:
            self.root.receive(batch, 0.0)
        done = self.root.stats()["fragments_completed"] - before
        if done != self.fragments:
            raise RuntimeError(
                f"{done} of {self.fragments} fragments were completed: {self.root.drops_by_reason()}"
            )

    def rows(self, repetitions: int = 5) -> list[Row]:
        """Medians of interleaved repetitions."""
        rows = self.root.memory.rows
        everything = np.arange(self.fragments)
        scratch: NDArray[Any] = np.zeros_like(rows)
        words = rows.view(np.int32).reshape(-1)
        subjects = {
            "memcpy": lambda: np.copyto(self.out, self.values),
            "exponents": lambda: self.format.exponents([self.values], 0, self.fragments, self.exponents),
            "quantise": lambda: self.format.encode(
                [self.values], 0, self.fragments, self.exponents, scratch, 0
            ),
            "fold": lambda: fold_rows(scratch, words, self.fragments),
            "checksum": lambda: seal_rows(scratch, everything, 6, VALUES),
            "aggregate": self.aggregate,
            "dequantise": lambda: self.format.decode(
                rows, everything, everything, self.exponents, [self.out]
            ),
        }
        seconds = interleave(subjects, repetitions)
        folded = {"aggregate": self.fragments * self.children}
        result = []
        for name, times in seconds.items():
            per_fragment = median(times) / folded.get(name, self.fragments)
            result.append(Row(name, per_fragment * 1e9, PAYLOAD_BYTES * 8 / per_fragment / 1e9))
        return result
