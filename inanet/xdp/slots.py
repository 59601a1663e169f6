"""Slots that a node shares with the kernel program.

The program folds contributions and hands on what is complete, see ``aggregator.bpf.c``. Everything else stays with the
:class:`~inanet.proto.tree.node.Node`: it opens rounds, looks into slots when the program says that a group has ended, asks
for what is lost, repeats what others lack, returns credit, restarts fragments, follows plans, ends rounds. It reads the
tables at any time, as every entry is written before what points to it, and writes them with the gate closed.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.engine import row_is_sound
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link
from inanet.proto.tree.slot_engine import Bits, Report, Slots
from inanet.proto.tree.slots import (
    GROUP,
    LEFT_UP,
    LOGGED_DOWN,
    LOGGED_UP,
    ShardColumn,
    State,
)
from inanet.proto.tree.xagg import slotwork
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import DROP_CODES
from inanet.wire.integrity import header_tag
from inanet.wire.xagg import HEADER_BYTES, Kind
from inanet.xdp.gate import Gate
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, KernelCount, KernelEvent, SharedMemory
from inanet.xdp.routes import Routes

_MASK32 = 0xFFFFFFFF
_HEADER_WORDS = HEADER_BYTES // 4


class KernelSlots:
    """:class:`~inanet.proto.tree.slot_engine.SlotEngine` on memory that the program is loaded for.

    Have the node attend whenever :meth:`fileno` is readable, and pump the driver then.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.shared = memory
        self._slots = Slots(memory)
        self.memory = memory
        self.tables, self.flow = self._slots.tables, self._slots.flow
        self.counts, self.drops = self._slots.counts, self._slots.drops
        self.reported = self._slots.reported
        self.emit, self.restart = self._slots.emit, self._slots.restart
        self._gate = Gate(memory)
        self._jobs: Mapping[int, Job] = {}
        self._shards: Mapping[int, ShardState] = {}
        self._routes = Routes(memory, self.tables, self._jobs)
        #: rows of trees that the program knows
        self._known: set[int] = set()
        self._records: list[bytes] = []
        self._ring = RingBuffer(memory.object.map("events"), self._records.append)

    def bind(self, jobs: Mapping[int, Job], shards: Mapping[int, ShardState]) -> None:
        self._jobs, self._shards = jobs, shards
        self._routes = Routes(self.shared, self.tables, jobs)

    def fileno(self) -> int:
        """Readable when the program has reported something."""
        return self._ring.fileno()

    def exclusive(self) -> AbstractContextManager[object]:
        """With the gate closed."""
        return self._gate

    def ingest(self, batch: PacketBatch, now: float) -> list[Report]:
        """The gate is closed while the batch is in the slot engine, and open again for what follows: what comes while it is
        closed is user space's, and would keep it closed.
        """
        if not self._has_rows(batch):
            before = self._drain()
            return before + self._slots.ingest(batch, now)
        with self._gate:
            reports = self._slots.ingest(batch, now)
            self._routes.hold_ends()
        # a packet may speak of a round that the program has opened
        return self._drain() + reports

    @staticmethod
    def _has_rows(batch: PacketBatch) -> bool:
        """Whether there may be something for the slots in a batch: other packets change no table before they are acted on."""
        if len(batch) == 0 or int(batch.lengths.min()) < HEADER_BYTES:
            return True
        return bool(((batch.arena[batch.offsets + 1] & 0xF) <= Kind.RESTART).any())

    def reports(self, now: float) -> list[Report]:
        """What the program has reported, in its order."""
        self._gate.awake()
        reports = self._drain()
        self._routes.settle(now)
        return reports

    def _drain(self) -> list[Report]:
        self._ring.consume()
        records, self._records[:] = list(self._records), []
        reports: list[Report] = []
        for record in records:
            code, row, a, b = np.frombuffer(record, EVENT)[0].item()
            if code == KernelEvent.WORK:
                # nobody else may come to see that there was a report
                self._gate.awake()
            elif code == KernelEvent.HOP:
                self._routes.follow()
            elif code == KernelEvent.LOG:
                self._append(row, a, up=bool(b))
            else:
                reports.append((code, row, a, b))
        return reports

    def _append(self, row: int, fragment: int, *, up: bool) -> None:
        """An entry for an emission log that the program could not lock in time, unless its round is over by now."""
        with self._gate:
            column = ShardColumn.UP_LOGGED if up else ShardColumn.DOWN_LOGGED
            shard = self.memory.shards[row]
            slot, active = shard[ShardColumn.SLOT0] + fragment, shard[ShardColumn.ACTIVE] & _MASK32
            said = self.memory.logged[slot] & (LOGGED_UP if up else LOGGED_DOWN)
            log = self.memory.up_log if up else self.memory.down_log
            if self.memory.round[slot] == active and said:
                log[shard[ShardColumn.SLOT0] + shard[column]] = fragment
                shard[column] += 1

    def mend(self, row: int, fragment: int, *, up: bool) -> int:
        """See :class:`~inanet.proto.tree.slot_engine.SlotEngine`; the gate is closed only for what the program may write."""
        shard = self.memory.shards[row]
        slot = int(shard[ShardColumn.SLOT0]) + fragment
        if int(self.memory.round[slot]) == int(shard[ShardColumn.ACTIVE]) & _MASK32:
            holds = self.memory.state[slot]
            if holds == State.RESULT:
                # the program does not write to it any more
                return int(slotwork.mend(self.tables, row, fragment))
            if holds == State.SENT and up and self._is_whole(int(shard[ShardColumn.JOB]), slot):
                # at most, the program puts its result there
                return 0
        with self._gate:
            return int(slotwork.mend(self.tables, row, fragment))

    def _is_whole(self, job_row: int, slot: int) -> bool:
        """Whether neither header nor payload of a row was damaged in memory, or is being written."""
        w0, w1, w2, w3, w4, tag = self.memory.rows[slot, :_HEADER_WORDS].view(np.uint32).tolist()
        sound = header_tag((w0, w1, w2, w3, w4), int(self.memory.keys[job_row])) == tag
        return sound and bool(row_is_sound(self.memory.rows, slot))

    def settle(self, now: float) -> None:
        """Put what the program has sent on the accounts of links, and let it send as much as is left there."""
        self._routes.settle(now)

    def withhold(self, tree: Tree, out: NDArray[np.int64]) -> None:
        """Children may send as much as the parent takes, and a quarter of a window in any case: what is complete then
        finds room in the parent's window, instead of waiting for user space.
        """
        road = self._routes.roads.get(tree.row)
        if road is None or road.arrives is False:
            return
        room = road.link.room if road.arrives else 0
        for index, link in tree.down.items():
            granted = tree.job.plan.window or min(link.window, 64)
            # losses may have left less of the parent's window than it was granted
            least = max(1, min(granted, road.link.room + road.link.in_flight) // 4)
            out[index] = max(0, granted - max(room, least))

    def follow(self, now: float) -> None:
        """Trees and links have changed."""
        rows = {tree.row for tree in self._routes.trees()}
        for row in rows - self._known:
            self._routes.begin(row)
        self._known = rows
        self._routes.follow()
        self._routes.settle(now)

    def reaches(self, tree: Tree) -> bool:
        """Whether the link-layer address of the parent is known."""
        return self._routes.is_known(tree.row)

    def forget(self) -> None:
        """What is reported of shards until now must not be taken for that of the next ones in their rows."""
        self._known &= {tree.row for tree in self._routes.trees()}
        self._ring.consume()
        general = (KernelEvent.WORK, KernelEvent.HOP)
        self._records[:] = [
            record
            for record in self._records
            for code, row, *_ in (np.frombuffer(record, EVENT)[0].item(),)
            if code in general or row in self._shards
        ]

    # ---------------------------------------------------------------- whether what the program sends arrives

    @property
    def unheard(self) -> bool:
        """Whether some parent did not get what the program sent: user space sends to it."""
        return self._routes.unheard

    def try_again(self) -> None:
        """The program has moved to another mode: what did not arrive may do so now."""
        self._routes.try_again()

    def lost(self, state: ShardState, group: int, bits: Bits) -> None:
        road = self._routes.roads.get(state.tree.row)
        if road is None or road.arrives is not None:
            return
        first = state.slot0 + group * GROUP
        slots = slice(first, min(first + GROUP, state.slot0 + state.shard.count))
        ours = self.memory.round[slots] == state.round
        left = (self.memory.logged[slots] & LEFT_UP != 0) & ours
        asked = np.unpackbits(bits, bitorder="little")[: len(left)] != 0
        road.heard((state.row, state.round or 0, group), int(left.sum()), int((left & asked).sum()))

    def repeated(self, state: ShardState, link: Link, fragment: int) -> None:
        road = self._routes.roads.get(state.tree.row)
        left = self.memory.logged[state.slot0 + fragment] & LEFT_UP
        if left and road is not None and road.link is link:
            road.lacked(state.row)

    def closing(self, state: ShardState, *, failed: bool) -> None:
        road = self._routes.roads.get(state.tree.row)
        if road is not None and not failed:
            road.judge(state.row, self._left(state) if road.arrives is None else 0)

    def _left(self, state: ShardState) -> int:
        """Packets of a shard's round that the program has sent to the parent."""
        slots = slice(state.slot0, state.slot0 + state.shard.count)
        ours = self.memory.round[slots] == state.active & _MASK32
        return int(((self.memory.logged[slots] & LEFT_UP != 0) & ours).sum())

    # ---------------------------------------------------------------- figures

    def figures(self, stats: dict[str, int]) -> dict[str, int]:
        """What the program did counted in, and how much of it was the program's."""
        kernel = self.shared.kernel_counts().tolist()
        contributions, completed, results, corrupt, first = kernel[:5]
        stats["contributions_in"] += contributions
        stats["contributions_summed"] += contributions - first
        stats["fragments_completed"] += completed
        stats["results_in"] += results
        stats["corrupt_slots"] += corrupt
        for what in (KernelCount.FORWARDED, KernelCount.BROADCAST, KernelCount.ANSWERED):
            stats["rows_sent"] += kernel[what]
        stats["results_multicast"] += kernel[KernelCount.BROADCAST]
        stats["retransmissions"] += kernel[KernelCount.ANSWERED]
        return (
            stats
            | {f"xdp_{what.name.lower()}": kernel[what] for what in KernelCount}
            | {"xdp_contributions_in": contributions}
        )

    def dropped(self) -> NDArray[np.int64]:
        """Drops by reason, the program's counted in."""
        drops = self.drops.copy()
        drops[1:] += self.shared.kernel_drops()[1:DROP_CODES].astype(np.int64)
        return drops

    def close(self) -> None:
        """Let go of the program. Closing twice is fine."""
        self._ring.close()
        self.shared.close()
