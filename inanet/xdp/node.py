"""A node that shares its slots with the kernel program.

The program folds contributions and hands on what is complete, see ``aggregator.bpf.c``. Everything else stays with the
:class:`~inanet.proto.tree.node.Node`: it opens rounds, looks into slots when the program says that a group has ended, asks
for what is lost, repeats what others lack, returns credit, restarts fragments, follows plans, ends rounds. It reads the
tables at any time, as every entry is written before what points to it, and writes them with the gate closed.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.tree.engine import Event, row_is_sound
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.node import Node
from inanet.proto.tree.reliability import Link, Timing
from inanet.proto.tree.slots import GROUP, LEFT_UP, LOGGED_DOWN, LOGGED_UP, ShardColumn, State
from inanet.proto.tree.xagg.control import Header
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import HEADER_BYTES, Kind, header_tag
from inanet.xdp.gate import Gate
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, KernelCount, KernelEvent, SharedMemory
from inanet.xdp.routes import Routes

_MASK32 = 0xFFFFFFFF
_HEADER_WORDS = HEADER_BYTES // 4


class OffloadedNode(Node):
    """As :class:`~inanet.proto.tree.node.Node`, on memory that the program is loaded for. Call :meth:`attend` whenever
    :meth:`fileno` is readable, and pump the driver then.
    """

    def __init__(
        self,
        name: str,
        memory: SharedMemory,
        timing: Timing | None = None,
        random: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(name, memory.capacity, timing, random, memory)
        self.shared = memory
        self._gate = Gate(memory)
        self._routes = Routes(memory, self._tables, self._jobs)
        self._reports: list[bytes] = []
        self._ring = RingBuffer(memory.object.map("events"), self._reports.append)
        #: since when a batch is in the slot engine, with the gate closed
        self._ingesting: float | None = None

    def fileno(self) -> int:
        """Readable when the program has reported something."""
        return self._ring.fileno()

    def attend(self, now: float) -> None:
        """Act on what the program has reported, and on what it has done meanwhile."""
        self._gate.awake()
        self._hear(now)
        self._routes.settle(now)
        self._stirred = True
        self._return_credit(now)
        self._sink(now)

    def _hear(self, now: float) -> None:
        """What the program has reported, in its order. Credit, logs and local arrays are to be looked at after this."""
        self._ring.consume()
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            code, row, a, b = np.frombuffer(report, EVENT)[0].item()
            if code == KernelEvent.WORK:
                # nobody else may come to see that there was a report
                self._gate.awake()
            elif code == KernelEvent.HOP:
                self._routes.follow()
            elif code == KernelEvent.LOG:
                self._append(row, a, up=bool(b))
            elif row in self._by_row:
                state = self._by_row[row]
                if code == Event.OPENED or state.round is not None:
                    self._on_event(code, state, a, b, now)

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

    @property
    def unheard(self) -> bool:
        """Whether some parent did not get what the program sent: user space sends to it."""
        return self._routes.unheard

    def try_again(self) -> None:
        """The program has moved to another mode: what did not arrive may do so now."""
        self._routes.try_again()

    # ---------------------------------------------------------------- with the gate closed

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """As for any node."""
        with self._gate:
            self._routes.settle(now)
            before = {tree.row for tree in self._routes.trees()}
            super().apply(plan, now, attach=attach)
            for tree in self._routes.trees():
                if tree.row not in before:
                    self._routes.begin(tree.row)
            self._routes.follow()
            self._routes.settle(now)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """As for any node."""
        with self._gate:
            super().add_layout(job_id, layout, last_round)
        self._greet(job_id, layout, last_round)

    def _greet(self, job_id: int, layout: TensorLayout, last_round: int) -> None:
        """Ask parents whose link-layer address is not known for something that they answer: it is known before data comes."""
        job, greeted = self._jobs[job_id], set()
        for shard in layout.shards:
            state = job.shards.get(shard.shard)
            if state is None or state.tree.up is None or state.tree.row in greeted:
                continue
            greeted.add(state.tree.row)
            if not self._routes.is_known(state.tree.row):
                round_ = (last_round + 1) & _MASK32
                self._say(state, state.tree.up, Kind.READY, down=False, round_=round_)

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """As for any node. What is reported of its shards until now must not be taken for that of the next ones there."""
        with self._gate:
            super().drop_layout(job_id, tensor)
            self._ring.consume()
            general = (KernelEvent.WORK, KernelEvent.HOP)
            self._reports[:] = [
                report
                for report in self._reports
                for code, row, *_ in (np.frombuffer(report, EVENT)[0].item(),)
                if code in general or row in self._by_row
            ]

    def drop_job(self, job_id: int) -> None:
        """As for any node."""
        with self._gate:
            super().drop_job(job_id)

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """As for any node."""
        with self._gate:
            super().fail_round(job_id, round_, tensors, now)

    def receive(self, batch: PacketBatch, now: float) -> None:
        """As for any node. The gate is closed while the batch is in the slot engine, and open again for what follows:
        what comes while it is closed is user space's, and would keep it closed.
        """
        if self._has_rows(batch):
            self._ingesting = now
            self._gate.__enter__()
        else:
            self._hear(now)
        try:
            super().receive(batch, now)
        finally:
            self._ingested()
        self._routes.settle(now)

    @staticmethod
    def _has_rows(batch: PacketBatch) -> bool:
        """Whether there may be something for the slots in a batch: other packets change no table before they are acted on."""
        if len(batch) == 0 or int(batch.lengths.min()) < HEADER_BYTES:
            return True
        return bool(((batch.arena[batch.offsets + 1] & 0xF) <= Kind.RESTART).any())

    def _ingested(self) -> None:
        """The slot engine is done with a batch: before anything else, the program may go on."""
        now, self._ingesting = self._ingesting, None
        if now is None:
            return
        self._routes.hold_ends()
        self._gate.__exit__(None, None, None)
        # a packet may speak of a round that the program has opened
        self._hear(now)

    def _on_event(self, code: int, state: ShardState, a: int, b: int, now: float) -> None:
        self._ingested()
        if code == Event.AMNESIA:
            with self._gate:
                super()._on_event(code, state, a, b, now)
        else:
            super()._on_event(code, state, a, b, now)

    def _on_misfits(
        self, state: ShardState, fragments: NDArray[np.int64], exponents: NDArray[np.int64], now: float
    ) -> None:
        self._ingested()
        with self._gate:
            super()._on_misfits(state, fragments, exponents, now)

    def _on_control(
        self, h: Header, batch: PacketBatch, arena: NDArray[np.int32], index: int, now: float
    ) -> None:
        self._ingested()
        super()._on_control(h, batch, arena, index, now)

    def _return_credit(self, now: float) -> None:
        self._ingested()
        super()._return_credit(now)

    def _open_for(self, state: ShardState, round_: int) -> bool:
        with self._gate:
            return super()._open_for(state, round_)

    def _send_again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        slot = state.slot0 + fragment
        if self.memory.round[slot] == state.round:
            holds = self.memory.state[slot]
            if holds == State.RESULT:
                # the program does not write to it any more
                return super()._send_again(state, child, link, fragment, now)
            if holds == State.SENT and child < 0 and self._is_whole(state, slot):
                # at most, the program puts its result there
                return self._again(state, child, link, fragment, now)
        with self._gate:
            return super()._send_again(state, child, link, fragment, now)

    def _is_whole(self, state: ShardState, slot: int) -> bool:
        """Whether neither header nor payload of a row was damaged in memory, or is being written."""
        words = self.memory.rows[slot, :_HEADER_WORDS].view(np.uint32).tolist()
        tag = header_tag(tuple(words[:-1]), state.job.plan.key)
        return tag == words[-1] and bool(row_is_sound(self.memory.rows, slot))

    def _on_lost(self, state: ShardState, child: int, link: Link, h: Header, bits: Any, now: float) -> None:
        super()._on_lost(state, child, link, h, bits, now)
        road = self._routes.roads.get(state.tree.row)
        if child < 0 and road is not None and road.arrives is None and self._is_running(state, h.round):
            first = state.slot0 + h.gradient * GROUP
            slots = slice(first, min(first + GROUP, state.slot0 + state.shard.count))
            ours = self.memory.round[slots] == h.round
            left = (self.memory.logged[slots] & LEFT_UP != 0) & ours
            asked = np.unpackbits(bits, bitorder="little")[: len(left)] != 0
            road.heard((state.row, h.round, h.gradient), int(left.sum()), int((left & asked).sum()))

    def _heal(self, state: ShardState, fragment: int, now: float) -> None:
        with self._gate:
            super()._heal(state, fragment, now)

    def _on_open(self, state: ShardState, child: int, link: Link, h: Header, bits: Any, now: float) -> None:
        with self._gate:
            super()._on_open(state, child, link, h, bits, now)

    def _on_restart(self, state: ShardState, h: Header, body: NDArray[np.uint8], now: float) -> None:
        with self._gate:
            super()._on_restart(state, h, body, now)

    def _send_rows(self, link: Link, offsets: NDArray[np.int64], now: float) -> Transmission | None:
        burst = super()._send_rows(link, offsets, now)
        for road in self._routes.roads.values():
            if burst is not None and road.link is link:
                road.ours += len(burst)
        return burst

    def _credit(self, job: Job, tree: Tree, link: Link, taken: int, now: float, *, down: bool) -> None:
        """Children may send as much as the parent takes, and a quarter of a window in any case: what is complete then
        finds room in the parent's window, instead of waiting for user space.
        """
        road = None if down else self._routes.roads.get(tree.row)
        if road is not None and road.arrives is not False:
            granted = job.plan.window or min(link.window, 64)
            room = road.link.room if road.arrives else 0
            # losses may have left less of the parent's window than it was granted
            least = max(1, min(granted, road.link.room + road.link.in_flight) // 4)
            withheld = max(0, granted - max(room, least))
            if 0 < taken - link.reported <= withheld:
                # the child may have less in flight than is withheld: then nothing would ever follow
                if link.credit_due is None:
                    link.credit_due = now + 5 * self.timing.retransmit
                if now < link.credit_due:
                    self._wake(link.credit_due)
                    return
            else:
                taken -= withheld
        super()._credit(job, tree, link, taken, now, down=down)

    def on_timer(self, now: float) -> None:
        """As for any node."""
        self._hear(now)
        super().on_timer(now)
        self._sink(now)

    def transmit(self, now: float) -> Iterator[Transmission]:
        """As for any node."""
        self._routes.settle(now)
        yield from super().transmit(now)
        self._routes.settle(now)

    def _close(self, state: ShardState, now: float, *, failed: bool) -> None:
        road = self._routes.roads.get(state.tree.row)
        if road is not None and not failed:
            road.judge(state.row, self._left(state) if road.arrives is None else 0)
        with self._gate:
            super()._close(state, now, failed=failed)

    def _left(self, state: ShardState) -> int:
        """Packets of a shard's round that the program has sent to the parent."""
        slots = slice(state.slot0, state.slot0 + state.shard.count)
        active = self.memory.shards[state.row, ShardColumn.ACTIVE] & _MASK32
        ours = self.memory.round[slots] == active
        return int(((self.memory.logged[slots] & LEFT_UP != 0) & ours).sum())

    def _again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        again = super()._again(state, child, link, fragment, now)
        road = self._routes.roads.get(state.tree.row)
        left = self.memory.logged[state.slot0 + fragment] & LEFT_UP
        if again and left and road is not None and road.link is link:
            road.lacked(state.row)
        return again

    # ---------------------------------------------------------------- figures

    def stats(self) -> dict[str, int]:
        """As for any node, what the program did counted in, and how much of it was the program's."""
        stats = super().stats()
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

    def drops_by_reason(self) -> dict[str, int]:
        """As for any node, the program's counted in."""
        drops = super().drops_by_reason()
        for code, count in enumerate(self.shared.kernel_drops()[:DROP_CODES].tolist()):
            if count and code != Drop.OK:
                label = Drop(code).label
                drops[label] = drops.get(label, 0) + count
        return drops

    def close(self) -> None:
        """Let go of the program. Closing twice is fine."""
        self._ring.close()
        self.shared.close()
