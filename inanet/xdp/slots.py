"""Slots that a node shares with the kernel program.

The program folds contributions and hands on what is complete, see ``aggregator.bpf.c``. Everything else stays with the
:class:`~inanet.proto.tree.node.Node`: it opens rounds, looks into slots when the program says that a group has ended, asks
for what is lost, repeats what others lack, returns credit, restarts fragments, follows plans, ends rounds. It reads the
tables at any time, as every entry is written before what points to it, and writes them with the gate closed.

The program sends by itself where a parent or group is within reach, as much as its link takes; what is beyond that comes
behind it from here.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.engine import Tables, row_is_sound
from inanet.proto.tree.flow import BURST
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link
from inanet.proto.tree.slot_engine import Bits, Report, Slots
from inanet.proto.tree.slots import GROUP, LEFT_UP, LOGGED_DOWN, LOGGED_UP, ShardColumn, State, TreeColumn
from inanet.proto.tree.xagg import slotwork
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import DROP_CODES
from inanet.wire.integrity import header_tag
from inanet.wire.xagg import HEADER_BYTES, Kind
from inanet.xdp.gate import Gate
from inanet.xdp.libbpf import RingBuffer
from inanet.xdp.memory import EVENT, HOP, Held, KernelCount, KernelEvent, SharedMemory

#: packets that the program may send to a parent before it has been shown that they arrive
PROBATION = 256
#: and how many of a group are enough to judge by what the parent lacks of it
SAMPLE = 32


@dataclass(slots=True)
class Road:
    """Whether what the program sends to a parent gets there: on some drivers it vanishes without a word."""

    link: Link
    #: packets that the program had sent before to whoever was the parent then
    before: int
    #: the parent's last CREDIT at the start, packets of the link's count then, and those of it that the program has sent since
    credited: int = field(init=False)
    counted: int = field(init=False)
    fresh: int = 0
    #: times that the parent has asked for something that the program had sent, by row of the shard
    missed: dict[int, int] = field(default_factory=dict)
    arrives: bool | None = None
    #: the parent lacked most of a group: should some come after all, as from a ring that is emptied by other packets, then
    #: that proves nothing
    doubted: bool = False
    #: packets put on the account of the link because the program may send them
    reserved: int = 0

    #: (shard row, round, group) of the groups in which the parent has said what it lacks
    judged: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.credited = self.link.taken
        # what is on its way now proves nothing
        self.counted = self.link.packets - self.link.in_flight

    @property
    def ours(self) -> int:
        """Packets that user space has sent."""
        return self.link.packets - self.counted - self.fresh

    def look(self, sent: int) -> None:
        """Has the parent taken clearly more than user space has sent? Then what the program sends arrives.

        A quarter of it is more than a network repeats, and less than what losses leave.
        """
        tried = sent - self.before
        if self.arrives is None and tried and not self.doubted:
            taken = (self.link.taken - self.credited) & _MASK32
            if taken < 1 << 31 and 4 * (taken - self.ours) > tried:
                self.arrives = True

    def heard(self, group: tuple[int, int, int], left: int, asked: int) -> None:
        """Of a group of which the program has sent ``left``, the parent lacks ``asked``. Only the first time says anything:
        later, user space may have repeated what had vanished.
        """
        if group in self.judged:
            return
        self.judged.add(group)
        if self.arrives is None and left >= SAMPLE:
            if 2 * asked < left:
                self.arrives = True
            else:
                self.doubted = True

    def limit(self, sent: int, *, half: bool = False) -> int:
        """How many packets the program may have sent: few before it has shown that they arrive, and only ``half`` of
        what the link takes, which is kept for it then, as long as user space has something to send as well.
        """
        room = self.link.room
        if half:
            room = self.reserved = room // 2
            self.link.in_flight += room
        if self.arrives is None:
            return min(sent + room, max(sent, self.before + PROBATION))
        return sent + room if self.arrives else sent

    def settle(self, fresh: int, now: float) -> None:
        """Put on the link's account what the program has sent, instead of what it might have sent."""
        self.release()
        if fresh:
            self.link.sent(fresh, now)
            self.fresh += fresh

    def release(self) -> None:
        """Nothing is kept for the program any more."""
        self.link.in_flight = max(0, self.link.in_flight - self.reserved)
        self.reserved = 0

    def lacked(self, row: int) -> None:
        """The parent has asked for something in a shard that the program had sent."""
        self.missed[row] = self.missed.get(row, 0) + 1

    def judge(self, row: int, tried: int) -> None:
        """At the end of a shard's round, in which the program has sent ``tried`` packets: whatever was lost of it has been
        asked for again. Of other shards on the same way it may still be on its way, or not missed yet.
        """
        missed = self.missed.pop(row, 0)
        if self.arrives is None and tried:
            self.arrives = missed * 2 < tried


class Routes:
    """For the trees of ``jobs``, by row. ``tables`` are those of the node's slots."""

    def __init__(self, memory: SharedMemory, tables: Tables, jobs: Mapping[int, Job]) -> None:
        #: ways to parents
        self.roads: dict[int, Road] = {}
        self._memory = memory
        self._tables = tables
        self._jobs = jobs
        self._routes = memory.tables["routes"][0]
        self._hops = memory.object.map("hops")
        #: packets to the parent that have been put on the account of the link
        self._accounted: dict[int, int] = {}
        #: packets to the group that are on the accounts of those who hear it
        self._broadcast: dict[int, int] = {}

    def trees(self) -> Iterator[Tree]:
        """Those of all jobs."""
        for job in self._jobs.values():
            yield from job.trees.values()

    def is_known(self, row: int) -> bool:
        """Whether the program knows the parent's link-layer address."""
        return bool(self._routes[row]["parent_ifindex"])

    def begin(self, row: int) -> None:
        """A tree has come; the row may have been another tree's."""
        self._routes[row]["up_sent"] = self._routes[row]["down_sent"] = 0
        self._accounted[row] = self._broadcast[row] = 0

    def hold_ends(self) -> None:
        """What user space has completed just now goes before the ends of groups."""
        for tree in self.trees():
            self._routes[tree.row]["ends_held"] = Held.HELD_UP | Held.HELD_DOWN

    def follow(self) -> None:
        """Tell the program where parents are, how often to report progress, and what retired ids stand for."""
        for tree in self.trees():
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
        """For each id what it stands for if it has retired, to the end of the chain (re-parenting)."""
        retired = int(self._memory.trees[tree.row, TreeColumn.RETIRED])
        closed = []
        for index in range(32):
            found, todo = 0, [index] if retired >> index & 1 else []
            while todo:
                mask = int(self._memory.mask[tree.row, todo.pop()]) & ~found
                found |= mask
                todo += [other for other in range(32) if mask & retired & 1 << other]
            closed.append(found)
        return closed

    def settle(self, now: float) -> None:
        """Put what the program has sent on its link's account, and let it send as much as is left there."""
        for tree in self.trees():
            route = self._routes[tree.row]
            self._settle_group(tree, now)
            sent = int(route["up_sent"])
            link = tree.up
            if link is None:
                continue
            road = self.roads.get(tree.row)
            if road is None or road.link is not link:
                road = self.roads[tree.row] = Road(link, sent)
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
        road = self.roads.get(tree.row)
        proven = road is not None and road.arrives is True
        room = 0
        if group is not None:
            for link in group.grouped if fresh else ():
                link.sent(fresh, now)
            group.link.packets += fresh
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
            cursor, logged = state.group_cursor, int(self._memory.shards[state.row, ShardColumn.DOWN_LOGGED])
            while cursor < logged:
                stop = min(cursor + BURST, logged)
                if slotwork.logged_rows(self._tables, state.row, cursor, stop, False, offsets):
                    return True
                cursor = stop
        return False

    def _is_parent_behind(self, tree: Tree) -> bool:
        """Whether user space still has something to send to the parent: the end of a group must not overtake it, or the
        parent would ask for what it has not got yet (emission groups).
        """
        offsets = np.empty(BURST, np.int64)
        for state in tree.lineup():
            sender = state.up
            if sender is None:
                continue
            logged = int(self._memory.shards[state.row, ShardColumn.UP_LOGGED])
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
        return any(road.arrives is False for road in self.roads.values())

    def try_again(self) -> None:
        """The program has moved to another mode: what did not arrive may do so now."""
        for road in self.roads.values():
            road.release()
        self.roads.clear()


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
