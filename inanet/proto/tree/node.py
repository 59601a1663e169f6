"""A node: worker agent, aggregator and parameter server are the same machine at different places of a tree.

A root has no parent and turns complete fragments into results. An aggregator has both neighbours. A worker has no
children; it contributes the arrays of its local ranks and takes the results. Slot memory, rounds and reliability are
the same for all of them, so that a root or a worker can one day be an aggregator too.

The machine is sans-IO: feed it batches and plans, take transmissions and events, call it when its timer is due.
"""

from collections.abc import Collection

import numpy as np

from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.tree.collective import TensorState
from inanet.proto.tree.engine import Event
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Receiver, Sender
from inanet.proto.tree.slots import (
    MAX_TREES,
    JobColumn,
    OutOfSlots,
    ShardColumn,
)
from inanet.proto.tree.upkeep import Upkeep
from inanet.proto.tree.xagg import policy, slotwork
from inanet.proto.tree.xagg.control import read_header
from inanet.wire.batch import PacketBatch


class Node(Upkeep):
    """See the module's documentation. ``capacity`` is slot memory in fragments (1052 B each on the wire and in memory).

    ``timing`` holds all waiting times; ``now`` is always seconds on any clock that does not jump backwards.
    """

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Follow a plan version, atomically between batches. Older versions are ignored.

        ``attach`` names trees in which the parent may know nothing of the rounds that are running: after a failed
        aggregator (re-parenting) or a restarted root (root restart) everything it lacks is sent to it again. Raises
        :class:`~inanet.proto.tree.slots.OutOfSlots` for too many jobs or trees; then nothing has changed.
        """
        job = self._jobs.get(plan.job)
        if job is not None and plan.version < job.plan.version:
            return
        trees = job.trees if job is not None else {}
        if not self.memory.room_for_trees(sum(placement.tree not in trees for placement in plan.placements)):
            raise OutOfSlots(
                f"job {plan.job}: this node already takes part in {MAX_TREES} trees; wait for a job to end"
            )
        if job is None:
            job = Job(plan.job, self.memory.add_job(plan.job, plan.version, plan.key), plan)
            self._jobs[plan.job] = job
        job.plan = plan
        self._stirred = True
        self.memory.jobs[job.row, JobColumn.VERSION] = plan.version & 0xFF
        self.memory.keys[job.row] = plan.key
        for placement in plan.placements:
            tree = job.trees.get(placement.tree)
            if tree is None:
                row = self.memory.add_tree(job.row)
                tree = Tree(job, placement.tree, row, timing=self.timing, random=self._random)
                job.trees[placement.tree] = tree
            again = placement.tree in attach
            moved = tree.place(self.memory, placement, fresh=again)
            if tree.multicast is not None:
                self._wake(now)
            for state in job.shards.values():
                if state.tree is tree and state.round is not None and not self._is_committed(state):
                    self._rewire(state, moved or again, now)

    def _rewire(self, state: ShardState, attach: bool, now: float) -> None:
        """Bring a running round in line with changed links."""
        tree = state.tree
        tree.changed()
        shard = self.memory.shards[state.row]
        for index, link in tree.down.items():
            known = state.down.get(index)
            if known is None or known.link is not link:
                state.down[index] = Sender(link, cursor=int(shard[ShardColumn.DOWN_LOGGED]))
                state.from_children[index] = Receiver(state.shard.count, self.timing)
        for index in [index for index in state.down if index not in tree.down]:
            del state.down[index], state.from_children[index]
        if tree.up is not None and attach:
            slotwork.restamp(self._tables, state.row)
            state.up = Sender(tree.up, cursor=int(shard[ShardColumn.UP_LOGGED]), attach_due=now)
            state.confirmed = False
            receiver = tree.receiver(state.shard.count)
            state.from_parent = receiver
            for group in range(receiver.groups):
                receiver.group_ended(group, now)
            self._wake(now)
        self._confirm(state, now)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Make slots for a tensor, open for rounds after ``last_round``.

        Raises :class:`~inanet.proto.tree.slots.OutOfSlots`; then nothing was taken.
        """
        job = self._jobs[job_id]
        if layout.tensor in job.tensors:
            return
        made: list[ShardState] = []
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
        except MemoryError:
            for state in made:
                self.memory.drop_shard(state.row)
            raise
        job.add(layout.tensor, made)
        self._by_row.update((state.row, state) for state in made)
        job.tensors[layout.tensor] = TensorState(layout, make_format(layout.spec, job.plan.ranks))

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """Give a tensor's slots back."""
        job = self._jobs[job_id]
        for state in job.remove(tensor):
            state.tree.forget(state.row)
            del self._by_row[state.row]
            self._running.pop(state.row, None)
            self.memory.drop_shard(state.row)
        known = job.tensors.pop(tensor, None)
        job.collectives = {n: its for n, its in job.collectives.items() if its.state is not known}

    def drop_job(self, job_id: int) -> None:
        """Forget a job; its late packets are ``foreign_job``."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return
        self._jobs[job_id] = job
        for tensor in list(job.tensors):
            self.drop_layout(job_id, tensor)
        for tree in job.trees.values():
            self.memory.drop_tree(tree.row)
        del self._jobs[job_id]
        self.memory.drop_job(job_id)

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take one batch through the slot engine, then act on what it reported."""
        need = 4 * len(batch) + 16
        if len(self._reported) < need:
            self._reported = np.zeros((need, 4), np.int64)
        self._used[0] = 0
        self._told = now
        self._stirred = True
        arena = batch.arena[: len(batch.arena) & ~3].view(np.int32)
        policy.ingest(
            self._tables,
            arena,
            batch.offsets,
            batch.lengths,
            batch.sources,
            self._reported,
            self._used,
            self.counts,
            self.drops,
        )
        reported = self._reported[: self._used[0]]
        misfits = reported[reported[:, 0] == Event.RESTART]
        for code, row, a, b in reported.tolist():
            if code == Event.CONTROL:
                self._on_control(read_header(arena, int(batch.offsets[a])), batch, arena, a, now)
            elif code != Event.RESTART:
                self._on_event(code, self._by_row[row], a, b, now)
        for row in np.unique(misfits[:, 1]).tolist():
            # together: a packet tells everybody below of all of them
            concerned = misfits[misfits[:, 1] == row]
            concerned = concerned[np.argsort(concerned[:, 2])]
            self._on_misfits(self._by_row[row], concerned[:, 2], concerned[:, 3], now)
        self._return_credit(now)
        self._sink(now)
