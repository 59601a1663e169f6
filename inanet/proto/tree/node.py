"""A node: worker agent, aggregator and parameter server are the same machine at different places of a tree.

A root has no parent and turns complete fragments into results. An aggregator has both neighbours. A worker has no
children; it contributes the arrays of its local ranks and takes the results. Slot memory, rounds and reliability are
the same for all of them, so that a root or a worker can one day be an aggregator too.

The machine is sans-IO: feed it batches and plans, take transmissions and events, call it when its timer is due.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.collective import TensorState
from inanet.proto.tree.control import Control
from inanet.proto.tree.engine import Count, Event
from inanet.proto.tree.groups import Groups
from inanet.proto.tree.links import Links
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link, Receiver
from inanet.proto.tree.rounds import Rounds
from inanet.proto.tree.slot_engine import Report, SlotEngine, UserSlots, labels
from inanet.proto.tree.slots import (
    MAX_TREES,
    UP_LINK,
    JobColumn,
    OutOfSlots,
    ShardColumn,
)
from inanet.proto.tree.state import NodeState
from inanet.proto.tree.xagg import slotwork
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.xagg import Kind

#: ``(endpoint of a parent, job) -> key`` of its packets
Senders = Mapping[tuple[int, int], int]


class Node:
    """See the module's documentation. ``slots`` is slot memory in fragments (1052 B each on the wire and in memory), or
    who holds it.

    ``timing`` holds all waiting times, ``random`` gives numbers in [0, 1) (:class:`~inanet.proto.tree.state.NodeState`);
    ``now`` is always seconds on any clock that does not jump backwards. ``followed`` is told from whom results come,
    whenever that has changed.
    """

    def __init__(
        self,
        name: str,
        slots: int | SlotEngine,
        timing: Timing | None = None,
        random: Callable[[], float] | None = None,
        followed: Callable[[Senders], None] = lambda _senders: None,
    ) -> None:
        self.name = name
        self.timing = timing or Timing()
        self.slots: SlotEngine = UserSlots(slots) if isinstance(slots, int) else slots
        self.memory = self.slots.memory
        self.state = NodeState(name, self.slots, self.timing, random)
        self.links = Links(self.state)
        self.multicast = Groups(self.state, self.links)
        self.rounds = Rounds(self.state)
        self.control = Control(self.state, self.rounds, self.links, self.multicast)
        self._followed = followed

    # ---------------------------------------------------------------- plans and layouts

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Follow a plan version, atomically between batches. Older versions are ignored.

        ``attach`` names trees in which the parent may know nothing of the rounds that are running: after a failed
        aggregator (re-parenting) or a restarted root (root restart) everything it lacks is sent to it again. Raises
        :class:`~inanet.proto.tree.slots.OutOfSlots` for too many jobs or trees; then nothing has changed.
        """
        jobs, memory = self.state.jobs, self.memory
        job = jobs.get(plan.job)
        if job is not None and plan.version < job.plan.version:
            return
        trees = job.trees if job is not None else {}
        if not memory.room_for_trees(sum(placement.tree not in trees for placement in plan.placements)):
            raise OutOfSlots(
                f"job {plan.job}: this node already takes part in {MAX_TREES} trees; wait for a job to end"
            )
        with self.slots.exclusive():
            self.slots.settle(now)
            if job is None:
                job = Job(plan.job, memory.add_job(plan.job, plan.version, plan.key), plan)
                jobs[plan.job] = job
            job.plan = plan
            self.state.plans += 1
            self.state.dirty = True
            memory.jobs[job.row, JobColumn.VERSION] = plan.version & 0xFF
            memory.keys[job.row] = plan.key
            for placement in plan.placements:
                tree = job.trees.get(placement.tree)
                if tree is None:
                    row = memory.add_tree(job.row, placement.tree)
                    tree = Tree(
                        job, placement.tree, row, memory, timing=self.timing, random=self.state.random
                    )
                    job.trees[placement.tree] = tree
                again = placement.tree in attach
                moved = tree.place(placement, fresh=again)
                if tree.multicast is not None:
                    self.state.wake(now)
                for state in job.shards.values():
                    if state.tree is tree and state.round is not None and not state.committed:
                        self._rewire(state, moved or again, now)
            self.slots.follow(now)
        self._followed(self._senders())

    def _rewire(self, state: ShardState, attach: bool, now: float) -> None:
        """Bring a running round in line with changed links."""
        tree = state.tree
        tree.changed()
        for index, link in tree.down.items():
            known = state.down.get(index)
            if known is None or known.link is not link:
                state.down[index] = state.sender(index, state.down_logged)
                state.from_children[index] = Receiver(state.shard.count, self.timing)
                self.links.see_end(state, state.down[index], now)
        for index in [index for index in state.down if index not in tree.down]:
            state.down.pop(index).close()
            del state.from_children[index]
        if tree.up is not None and attach:
            slotwork.restamp(self.slots.tables, state.row)
            state.up = state.sender(UP_LINK, state.up_logged, attach_due=now)
            self.links.see_end(state, state.up, now)
            state.confirmed = False
            receiver = tree.receiver(state.shard.count)
            state.from_parent = receiver
            for group in range(receiver.groups):
                receiver.group_ended(group, now)
            self.state.wake(now)
        self.rounds.confirm(state, now)

    def _senders(self) -> dict[tuple[int, int], int]:
        return {
            (tree.up.endpoint, tree.job.job): tree.job.plan.key
            for tree in self.state.trees()
            if tree.up is not None
        }

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Make slots for a tensor, open for rounds after ``last_round``.

        Raises :class:`~inanet.proto.tree.slots.OutOfSlots`; then nothing was taken.
        """
        job = self.state.jobs[job_id]
        if layout.tensor in job.tensors:
            return
        made: list[ShardState] = []
        with self.slots.exclusive():
            try:
                for shard in layout.shards:
                    tree = job.trees.get(shard.tree)
                    if tree is None or shard.count == 0:
                        continue
                    row = self.memory.add_shard(
                        job_id, shard.shard, tree.row, shard.fold, shard.count, last_round
                    )
                    slot0 = int(self.memory.shards[row, ShardColumn.SLOT0])
                    made.append(ShardState(shard, job, tree, row, slot0, over=last_round & 0xFFFFFFFF))
            except OutOfSlots:
                for state in made:
                    self.memory.drop_shard(state.row)
                raise
            job.add(layout.tensor, made)
            self.state.by_row.update((state.row, state) for state in made)
            job.tensors[layout.tensor] = TensorState(layout, make_format(layout.spec, job.plan.ranks))
        self._greet(made, last_round)

    def _greet(self, states: Sequence[ShardState], last_round: int) -> None:
        """Ask parents that the slots cannot reach yet for something that they answer: they can before data comes."""
        greeted = set()
        for state in states:
            tree = state.tree
            if tree.up is None or tree.row in greeted or self.slots.reaches(tree):
                continue
            greeted.add(tree.row)
            self.state.send(state, tree.up, Kind.READY, down=False, round_=(last_round + 1) & 0xFFFFFFFF)

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """Give a tensor's slots back."""
        job = self.state.jobs[job_id]
        with self.slots.exclusive():
            for state in job.remove(tensor):
                state.tree.forget(state.row)
                del self.state.by_row[state.row]
                self.state.running.pop(state.row, None)
                self.memory.drop_shard(state.row)
            self.slots.forget()
        known = job.tensors.pop(tensor, None)
        job.collectives = {n: one for n, one in job.collectives.items() if one.state is not known}

    def drop_job(self, job_id: int) -> None:
        """Forget a job; its late packets are ``foreign_job``."""
        job = self.state.jobs.get(job_id)
        if job is None:
            return
        with self.slots.exclusive():
            for tensor in list(job.tensors):
                self.drop_layout(job_id, tensor)
            for tree in job.trees.values():
                self.memory.drop_tree(tree.row)
            del self.state.jobs[job_id]
            self.state.plans += 1
            self.memory.drop_job(job_id)
            self.slots.forget()
        self._followed(self._senders())

    # ---------------------------------------------------------------- rounds

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        self.rounds.begin(job_id, tensor, round_, arrays, now)

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        self.rounds.fail(job_id, round_, tensors, now)

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        return self.rounds.holds_all(job_id, round_, tensors)

    # ---------------------------------------------------------------- packets and time

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take one batch through the slots, then act on what they report."""
        self.state.now = now
        self.state.dirty = True
        self.act(self.slots.ingest(batch, now), batch, now)
        self.settle(now)

    def act(self, reports: Sequence[Report], batch: PacketBatch | None, now: float) -> None:
        """Do what reports ask for; ``batch`` is the one that they speak of."""
        misfits: dict[int, list[tuple[int, int]]] = {}
        for code, row, a, b in reports:
            if code == Event.CONTROL:
                assert batch is not None
                self.control.packet(batch, a, now)
            elif code == Event.RESTART:
                misfits.setdefault(row, []).append((a, b))
            else:
                self.control.report(code, row, a, b, now)
        for row, entries in misfits.items():
            # together: a packet tells everybody below of all of them
            fragments, exponents = np.array(sorted(entries), np.int64).T
            self.control.misfits(self.state.by_row[row], fragments, exponents, now)

    def settle(self, now: float) -> None:
        """What follows from what was taken: credit for neighbours, results for local arrays."""
        self.links.return_credit(now)
        self.rounds.sink(now)
        self.slots.settle(now)

    def attend(self, now: float) -> None:
        """Act on what the slots report by themselves, and on what was done to them meanwhile."""
        self.state.dirty = True
        self.act(self.slots.reports(now), None, now)
        self.settle(now)

    def produce(self, now: float) -> bool:
        """Encode what this host can send next; whether there is anything new to be sent."""
        made = [self.links.produce(tree, now) for tree in self.state.trees() if tree.up is not None]
        return any(made)

    def transmit(self, now: float, *, logs: bool = True) -> Iterator[Transmission]:
        """What may leave now, control packets first; stop iterating when the device is full. Without ``logs``, somebody else
        sends the emission logs.

        What leaves after that, leaves at the time of what was received meanwhile: a device that is full for a whole round
        would have every packet of it leave at the beginning, and links give up what they have just sent.
        """
        state = self.state
        state.now = max(state.now, now)
        self.slots.settle(now)
        yield from state.outbox.take()
        ways: list[tuple[Tree, Link]] = []
        while state.dirty or ways:
            if state.dirty:
                # also by what was received while a device was full
                state.dirty = False
                ways = [(tree, link) for tree in state.trees() for link in tree.links()]
            busy = []
            for way in ways:
                burst = self.multicast.burst(*way, state.now, logs=logs)
                if burst is not None:
                    busy.append(way)
                    yield burst
            ways = busy
            yield from state.outbox.take()
        self.slots.settle(now)

    def timer(self) -> float | None:
        state = self.state
        if state.next_timer is not None:
            return min(state.next_timer, state.credit_due)
        return None if state.credit_due == math.inf else state.credit_due

    def on_timer(self, now: float) -> None:
        """Look at groups that are due, repeat what was not answered, notice who is silent."""
        state = self.state
        state.now = now
        if state.credit_due <= now and (state.next_timer is None or state.next_timer > now):
            # nothing else is due
            self.settle(now)
            return
        state.dirty = True
        self.act(self.slots.reports(now), None, now)
        self.control.on_timer(now)
        self.settle(now)

    def events(self) -> list[NodeEvent]:
        events, self.state.events = self.state.events, []
        return events

    # ---------------------------------------------------------------- figures

    @property
    def lacking(self) -> int:
        """Results that the round nearest to its end still lacks here; 0 if no tensor is on its way."""
        running = self.state.running.values()
        return min((one.shard.count - one.down_logged for one in running if one.data), default=0)

    @property
    def groups(self) -> frozenset[int]:
        """Endpoints of the multicast groups that must be received for this node."""
        return frozenset(
            place.parent.group
            for job in self.state.jobs.values()
            for place in job.plan.placements
            if place.parent is not None and place.parent.group
        )

    @property
    def jobs(self) -> int:
        """Jobs this node takes part in."""
        return len(self.state.jobs)

    def sends(self, job_id: int) -> bool:
        """Whether this host has something of a job that its parents lack, begun or about to begin."""
        job = self.state.jobs.get(job_id)
        return job is not None and any(
            state.waiting or (state.collective is not None and state.up is not None and not state.up.done)
            for state in job.shards.values()
        )

    def stats(self) -> dict[str, int]:
        counts, state = self.slots.counts, self.state
        contributions = int(counts[Count.CONTRIBUTIONS])
        return self.slots.figures(
            {
                "contributions_in": contributions,
                "contributions_summed": contributions - int(counts[Count.FIRST]),
                "fragments_completed": int(counts[Count.COMPLETED]),
                "results_in": int(counts[Count.RESULTS]),
                "corrupt_slots": int(counts[Count.CORRUPT_SLOTS]),
                "leaf_contributions": state.leaf_contributions,
                "rows_sent": state.rows_sent,
                "retransmissions": state.retransmissions,
                "results_multicast": state.results_multicast,
                "repairs_multicast": state.repairs_multicast,
                "repairs_unicast": state.repairs_unicast,
                "slots_free": self.memory.free_slots(),
                "slots_total": self.memory.capacity,
            }
        )

    @property
    def drops(self) -> NDArray[np.int64]:
        """Packets dropped by this process, by reason."""
        return self.slots.drops

    def drops_by_reason(self) -> dict[str, int]:
        return labels(self.slots.dropped())
