"""The slots of a node behind one interface: this process works on them alone, or the kernel program does as well.

A node decides; whoever holds the slots takes packets (*ingest*), puts a host's own contributions into the emission log
(*emit*), checks what is sent again (*mend*) and empties a slot for a later attempt (*restart*). All else of the interface
tells a data path that works beside this process what the node does, and the node what that has done.
:class:`UserSlots` is alone; :class:`inanet.xdp.slots.KernelSlots` shares them with an XDP program.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree import flow
from inanet.proto.tree.engine import Count, Tables, tables_of
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link
from inanet.proto.tree.slots import SlotMemory
from inanet.proto.tree.xagg import policy, slotwork
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import DROP_CODES, Drop

#: ``(code, shard row, a, b)``: see :class:`~inanet.proto.tree.engine.Event`
Report = tuple[int, int, int, int]
Bits = NDArray[np.uint8]


class SlotEngine(Protocol):
    """What a node needs of its slots."""

    tables: Tables
    flow: flow.Flow
    #: by :class:`~inanet.proto.tree.engine.Count` and by :class:`~inanet.wire.drops.Drop`
    counts: NDArray[np.int64]
    drops: NDArray[np.int64]

    @property
    def memory(self) -> SlotMemory:
        """The tables as objects."""
        ...

    def bind(self, jobs: Mapping[int, Job], shards: Mapping[int, ShardState]) -> None:
        """The node's jobs, and its shards by row; both change."""
        ...

    def exclusive(self) -> AbstractContextManager[object]:
        """Tables are changed inside, and by nobody else meanwhile. May be nested."""
        ...

    def ingest(self, batch: PacketBatch, now: float) -> list[Report]:
        """Take a batch; what has to be looked at, in order."""
        ...

    def emit(self, row: int, fragments: NDArray[np.int64], needs: Bits, verdicts: Bits) -> list[Report]:
        """A host's own fragments, encoded in their rows, enter the emission log; see :func:`slotwork.contribute`."""
        ...

    def mend(self, row: int, fragment: int, *, up: bool) -> int:
        """Check a row before it is sent again, towards the parent or not; see :func:`slotwork.mend`."""
        ...

    def restart(self, row: int, fragments: NDArray[np.int64], attempts: Bits, exponents: Bits) -> None:
        """Empty slots for later attempts; exponent 0 keeps that of the attempt before."""
        ...

    def reports(self, now: float) -> list[Report]:
        """What has happened to the slots since the last call, other than by :meth:`ingest` and :meth:`emit`."""
        ...

    def settle(self, now: float) -> None:
        """Before and after this process sends: account for what others have sent by its links."""
        ...

    def withhold(self, tree: Tree, out: NDArray[np.int64]) -> None:
        """How many of the packets taken are not to be credited yet, by index of the link; ``out`` holds zeros."""
        ...

    def follow(self, now: float) -> None:
        """Trees and links have changed."""
        ...

    def reaches(self, tree: Tree) -> bool:
        """Whether what is complete can leave for the parent; otherwise it has to answer something first."""
        ...

    def forget(self) -> None:
        """Shards have gone: what is still to be reported of their rows is void."""
        ...

    def lost(self, state: ShardState, group: int, bits: Bits) -> None:
        """The parent lacks fragments of a group in the running round."""
        ...

    def repeated(self, state: ShardState, link: Link, fragment: int) -> None:
        """A fragment will be sent again by a link, because the neighbour lacks it."""
        ...

    def closing(self, state: ShardState, *, failed: bool) -> None:
        """A round is about to be over."""
        ...

    def figures(self, stats: dict[str, int]) -> dict[str, int]:
        """Counters of the node, those of the slots counted in."""
        ...

    def dropped(self) -> NDArray[np.int64]:
        """Drops by reason, all data paths together."""
        ...


class Reported:
    """An array of reports as kernels fill it."""

    def __init__(self, size: int) -> None:
        self.rows: NDArray[np.int64] = np.zeros((size, 4), np.int64)
        self.used: NDArray[np.int64] = np.zeros(1, np.int64)

    def clear(self, need: int) -> None:
        """Make room for as many reports."""
        if len(self.rows) < need:
            self.rows = np.zeros((need, 4), np.int64)
        self.used[0] = 0

    def take(self) -> list[Report]:
        """What there is, removed."""
        reports: list[Report] = [tuple(row) for row in self.rows[: self.used[0]].tolist()]
        self.used[0] = 0
        return reports


class Slots:
    """Kernels over the tables of one memory: what is alike whoever shares it."""

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory
        self.tables = tables_of(memory)
        self.flow = flow.flow_of(memory)
        self.counts: NDArray[np.int64] = np.zeros(len(Count), np.int64)
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        #: of batches, and of the host's own contributions
        self.reported, self.own = Reported(256), Reported(256)

    def ingest(self, batch: PacketBatch, now: float) -> list[Report]:
        """A batch through the slot engine, its CREDIT packets into the link table."""
        reported = self.reported
        reported.clear(4 * len(batch) + 16)
        arena = batch.arena[: len(batch.arena) & ~3].view(np.int32)
        policy.ingest(
            self.tables,
            arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            reported.rows,
            reported.used,
            self.counts,
            self.drops,
        )
        if not reported.used[0]:
            return []
        flow.take_credits(
            self.tables,
            self.flow,
            arena,
            batch.offsets,
            batch.sources,
            reported.rows,
            reported.used,
            self.drops,
            now,
        )
        return reported.take()

    def emit(self, row: int, fragments: NDArray[np.int64], needs: Bits, verdicts: Bits) -> list[Report]:
        self.own.clear(len(fragments) + 16)
        slotwork.contribute(self.tables, row, fragments, needs, verdicts, self.own.rows, self.own.used)
        return self.own.take() if self.own.used[0] else []

    def restart(self, row: int, fragments: NDArray[np.int64], attempts: Bits, exponents: Bits) -> None:
        slotwork.restart(self.tables, row, fragments, attempts, exponents)


class UserSlots:
    """Slots that no other data path works on: ``capacity`` of them, 1052 B each."""

    def __init__(self, capacity: int) -> None:
        self._slots = Slots(SlotMemory(capacity))
        self.memory = self._slots.memory
        self.tables, self.flow = self._slots.tables, self._slots.flow
        self.counts, self.drops = self._slots.counts, self._slots.drops
        self.reported = self._slots.reported
        self.ingest, self.emit, self.restart = self._slots.ingest, self._slots.emit, self._slots.restart

    def bind(self, jobs: Mapping[int, Job], shards: Mapping[int, ShardState]) -> None:
        """Nobody else has to know them."""

    def exclusive(self) -> AbstractContextManager[object]:
        """Nobody else is there."""
        return nullcontext()

    def mend(self, row: int, fragment: int, *, up: bool) -> int:
        return int(slotwork.mend(self.tables, row, fragment))

    def reports(self, now: float) -> list[Report]:
        return []

    def settle(self, now: float) -> None:
        """All was sent by this process."""

    def withhold(self, tree: Tree, out: NDArray[np.int64]) -> None:
        """Nothing."""

    def follow(self, now: float) -> None:
        """Kernels read the tables."""

    def reaches(self, tree: Tree) -> bool:
        """The operating system finds the way."""
        return True

    def forget(self) -> None:
        """Nothing is reported later."""

    def lost(self, state: ShardState, group: int, bits: Bits) -> None:
        """It is of use to the node alone."""

    def repeated(self, state: ShardState, link: Link, fragment: int) -> None:
        """It is of use to the node alone."""

    def closing(self, state: ShardState, *, failed: bool) -> None:
        """It is of use to the node alone."""

    def figures(self, stats: dict[str, int]) -> dict[str, int]:
        """The node's own."""
        return stats

    def dropped(self) -> NDArray[np.int64]:
        """The node's own."""
        return self.drops


def labels(drops: Sequence[int] | NDArray[np.int64]) -> dict[str, int]:
    """Packets dropped, by the label of every reason."""
    return {reason.label: int(drops[reason]) for reason in Drop if reason is not Drop.OK}
