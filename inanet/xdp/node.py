"""A node that shares its slots with the kernel program.

The program folds contributions and hands on what is complete, see ``aggregator.bpf.c``. Everything else stays with the
:class:`~inanet.proto.node.Node`: it opens rounds, looks into slots when the program says that a group has ended, asks
for what is lost, repeats what others lack, returns credit, restarts fragments, follows plans, ends rounds. It reads the
tables at any time, as every entry is written before what points to it, and writes them with the gate closed.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.engine import Event, row_is_sound
from inanet.proto.membership import Job, ShardState, Tree
from inanet.proto.node import Node
from inanet.proto.plan import NodePlan, TensorLayout
from inanet.proto.reliability import Link, Timing
from inanet.proto.sending import BURST
from inanet.proto.slots import GROUP, LEFT_UP, LOGGED_DOWN, LOGGED_UP, ShardColumn, State, TreeColumn
from inanet.proto.xagg import slotwork
from inanet.proto.xagg.control import Header
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import HEADER_BYTES, Kind, header_tag
from inanet.xdp.gate import Gate
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, HOP, Held, KernelCount, KernelEvent, SharedMemory
from inanet.xdp.road import Road

_MASK32 = 0xFFFFFFFF
_HEADER_WORDS = HEADER_BYTES // 4


class OffloadedNode(Node):
    """As :class:`~inanet.proto.node.Node`, on memory that the program is loaded for. Call :meth:`attend` whenever
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
        self._routes = memory.tables["routes"][0]
        self._reports: list[bytes] = []
        self._ring = RingBuffer(memory.object.map("events"), self._reports.append)
        self._hops = memory.object.map("hops")
        #: packets to the parent that have been put on the account of the link, by row of the tree
        self._accounted: dict[int, int] = {}
        self._roads: dict[int, Road] = {}
        #: packets to the group that are on the accounts of those who hear it, by row of the tree
        self._broadcast: dict[int, int] = {}
        #: since when a batch is in the slot engine, with the gate closed
        self._ingesting: float | None = None

    def fileno(self) -> int:
        """Readable when the program has reported something."""
        return self._ring.fileno()

    def attend(self, now: float) -> None:
        """Act on what the program has reported, and on what it has done meanwhile."""
        self._gate.awake()
        self._hear(now)
        self._settle(now)
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
                self._follow_routes()
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

    # ---------------------------------------------------------------- what the program may send

    def _trees(self) -> Iterator[Tree]:
        for job in self._jobs.values():
            yield from job.trees.values()

    def _follow_routes(self) -> None:
        """Tell the program where parents are, how often to report progress, and what retired ids stand for."""
        for tree in self._trees():
            route = self._routes[tree.row]
            route["stands_for"] = self._stands_for(tree)
            windows = [tree.job.plan.window or min(link.window, 64) for link in tree.links() if link.bit]
            step = max(1, min(windows, default=64) // 4)
            route["credit_mask"] = (1 << (step.bit_length() - 1)) - 1
            found = None
            if tree.up is not None:
                found = self._hops.get(tree.up.endpoint.to_bytes(8, "little"), HOP.itemsize)
            if found is None:
                route["parent_ifindex"] = 0
            else:
                hop = np.frombuffer(found, HOP)[0]
                route["parent_mac"] = hop["mac"]
                route["parent_ifindex"] = hop["ifindex"]

    def _stands_for(self, tree: Tree) -> list[int]:
        """For each id what it stands for if it has retired, to the end of the chain (R5)."""
        retired = int(self.memory.trees[tree.row, TreeColumn.RETIRED])
        closed = []
        for index in range(32):
            found, todo = 0, [index] if retired >> index & 1 else []
            while todo:
                mask = int(self.memory.mask[tree.row, todo.pop()]) & ~found
                found |= mask
                todo += [other for other in range(32) if mask & retired & 1 << other]
            closed.append(found)
        return closed

    def _settle(self, now: float) -> None:
        """Put what the program has sent on its link's account, and let it send as much as is left there."""
        for tree in self._trees():
            route = self._routes[tree.row]
            self._settle_group(tree, now)
            sent = int(route["up_sent"])
            link = tree.up
            if link is None:
                continue
            road = self._roads.get(tree.row)
            if road is None or road.link is not link:
                road = self._roads[tree.row] = Road(link, sent)
            road.settle(sent - self._accounted.get(tree.row, sent), now)
            self._accounted[tree.row] = sent
            road.look(sent)
            behind = self._is_parent_behind(tree)
            down = self._is_group_behind(tree)
            route["ends_held"] = (Held.HELD_UP if behind else 0) | (Held.HELD_DOWN if down else 0)
            route["up_limit"] = road.limit(sent, half=behind)

    def _settle_group(self, tree: Tree, now: float) -> None:
        """As much as every child's link takes may go to the group without user space, if all children hear it."""
        route, group = self._routes[tree.row], tree.multicast
        sent = int(route["down_sent"])
        fresh = sent - self._broadcast.get(tree.row, sent)
        self._broadcast[tree.row] = sent
        road = self._roads.get(tree.row)
        proven = road is not None and road.arrives is True
        room = 0
        if group is not None:
            for link in group.grouped if fresh else ():
                link.sent(fresh, now)
            group.sent += fresh
            if proven and group.grouped and len(group.grouped) == len(tree.down):
                room = max(0, min(link.room - len(link.resend) for link in group.grouped))
                if self._is_group_behind(tree):
                    room //= 2
                route["group"] = group.link.endpoint
        route["down_limit"] = sent + room

    def _is_group_behind(self, tree: Tree) -> bool:
        """As :meth:`_is_parent_behind`, for results to the group."""
        offsets = np.empty(BURST, np.int64)
        for state in tree.lineup() if tree.multicast is not None else ():
            cursor, logged = state.group_cursor, int(self.memory.shards[state.row, ShardColumn.DOWN_LOGGED])
            while cursor < logged:
                stop = min(cursor + BURST, logged)
                if slotwork.logged_rows(self._tables, state.row, cursor, stop, False, offsets):
                    return True
                cursor = stop
        return False

    def _is_parent_behind(self, tree: Tree) -> bool:
        """Whether user space still has something to send to the parent: the end of a group must not overtake it, or the
        parent would ask for what it has not got yet (R6).
        """
        offsets = np.empty(BURST, np.int64)
        for state in tree.lineup():
            sender = state.up
            if sender is None:
                continue
            logged = int(self.memory.shards[state.row, ShardColumn.UP_LOGGED])
            while sender.cursor < logged:
                stop = min(sender.cursor + BURST, logged)
                if slotwork.logged_rows(self._tables, state.row, sender.cursor, stop, True, offsets):
                    return True
                sender.cursor = stop
                sender.sent_due = None
        return False

    @property
    def unheard(self) -> bool:
        """Whether some parent did not get what the program sent: user space sends to it."""
        return any(road.arrives is False for road in self._roads.values())

    def try_again(self) -> None:
        """The program has moved to another mode: what did not arrive may do so now."""
        for road in self._roads.values():
            road.release()
        self._roads.clear()

    # ---------------------------------------------------------------- with the gate closed

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """As for any node."""
        with self._gate:
            self._settle(now)
            before = {tree.row for tree in self._trees()}
            super().apply(plan, now, attach=attach)
            for tree in self._trees():
                if tree.row not in before:
                    # the row may have been another tree's
                    self._routes[tree.row]["up_sent"] = self._routes[tree.row]["down_sent"] = 0
                    self._accounted[tree.row] = self._broadcast[tree.row] = 0
            self._follow_routes()
            self._settle(now)

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
            if not self._routes[state.tree.row]["parent_ifindex"]:
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
        self._settle(now)

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
        for tree in self._trees():
            # what has been completed just now goes first
            self._routes[tree.row]["ends_held"] = Held.HELD_UP | Held.HELD_DOWN
        self._gate.__exit__(None, None, None)
        # a packet may speak of a round that the program has opened
        self._hear(now)

    def _on_event(self, code: int, state: ShardState, a: int, b: int, now: float) -> None:
        self._ingested()
        if code in (Event.RESTART, Event.AMNESIA):
            with self._gate:
                super()._on_event(code, state, a, b, now)
        else:
            super()._on_event(code, state, a, b, now)

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
        road = self._roads.get(state.tree.row)
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

    def _on_restart(self, state: ShardState, h: Header, now: float) -> None:
        with self._gate:
            super()._on_restart(state, h, now)

    def _send_rows(self, link: Link, offsets: NDArray[np.int64], now: float) -> Transmission | None:
        burst = super()._send_rows(link, offsets, now)
        for road in self._roads.values():
            if burst is not None and road.link is link:
                road.ours += len(burst)
        return burst

    def _credit(self, job: Job, tree: Tree, link: Link, taken: int, now: float, *, down: bool) -> None:
        """Children may send as much as the parent takes, and a quarter of a window in any case: what is complete then
        finds room in the parent's window, instead of waiting for user space.
        """
        road = None if down else self._roads.get(tree.row)
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
        self._settle(now)
        yield from super().transmit(now)
        self._settle(now)

    def _close(self, state: ShardState, now: float, *, failed: bool) -> None:
        road = self._roads.get(state.tree.row)
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
        road = self._roads.get(state.tree.row)
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
