"""Rounds at a node: begun, opened in the slots, finished, confirmed, committed or failed (confirmed rounds, one outcome)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import RoundCommitted, RoundDone
from inanet.proto.tree import engine, leaf
from inanet.proto.tree.collective import Collective
from inanet.proto.tree.membership import Job, ShardState
from inanet.proto.tree.slots import ShardColumn
from inanet.proto.tree.state import NodeState
from inanet.wire.serial import is_newer
from inanet.wire.xagg import Kind

#: failed rounds of a tensor that are remembered in case they are still on their way
MAX_DEAD = 64


class Rounds:
    """The life of rounds at a node."""

    def __init__(self, state: NodeState) -> None:
        self._node = state

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """Start this host's part in a round. ``arrays`` are 1-D, one per local rank, overwritten by the result.

        It is sent as soon as the parent has opened the tensor's slots for it; a straggler elsewhere does not matter.
        """
        job = self._node.jobs[job_id]
        collective = Collective(job.tensors[tensor], round_, arrays)
        job.collectives[round_] = collective
        if collective.refused:
            self._node.refuse(job, collective)
            return
        self._node.dirty = True
        for state in job.shards_of(tensor):
            state.waiting.append(collective)
        self.start_waiting(job, tensor, now)

    def start_waiting(self, job: Job, tensor: int, now: float) -> None:
        """Start the next round of a tensor where slots are free for it, and see to it that they become free elsewhere."""
        for state in job.shards_of(tensor):
            while state.waiting and state.committed:
                collective = state.waiting[0]
                number = collective.round & 0xFFFFFFFF
                takes_part = not state.is_over(number)
                if takes_part and not collective.decided:
                    if not self._may_decide(job, collective):
                        break
                    collective.decide()
                state.waiting.popleft()
                if takes_part and (state.data or collective.uses_prologue):
                    engine.open_round(self._node.slots.tables, state.row, number)
                    self.start(state, number)
                    state.take_part(collective)
            if not state.waiting or state.committed:
                state.ready_due = None
            elif state.ready_due is None:
                # the parent says by itself that it is ready: asked while that is on its way, it would say so twice
                state.ready_due, state.ready_interval = (
                    now + self._node.timing.reorder,
                    self._node.timing.retransmit,
                )
                self._node.wake(state.ready_due)

    def _may_decide(self, job: Job, collective: Collective) -> bool:
        """Whether every earlier round of the tensor is over at this host, well or badly."""
        tensor = collective.state.layout.tensor
        return all(state.committed for state in job.shards_of(tensor)) and not any(
            other.state is collective.state and other.round < collective.round
            for other in job.collectives.values()
        )

    def fail(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Abandon a round everywhere on this node: its arrays are undefined, its late packets stale (one outcome)."""
        job = self._node.jobs.get(job_id)
        if job is None:
            return
        self._node.dirty = True
        collective = job.collectives.pop(round_, None)
        number = round_ & 0xFFFFFFFF
        concerned = {state.shard.tensor for state in job.shards.values() if state.is_running(number)}
        with self._node.slots.exclusive():
            for tensor in concerned.union(tensors):
                if tensor in job.tensors:
                    job.tensors[tensor].fail(round_)
                for state in job.shards_of(tensor):
                    if collective is not None and collective in state.waiting:
                        state.waiting.remove(collective)
                    if state.is_running(number):
                        self.close(state, now, failed=True)
                    elif is_newer(number, state.active):
                        self._bury(state, number)
                self.start_waiting(job, tensor, now)

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """Whether this root has every contribution to its parts of a round, or has seen the round through (elastic rounds).

        ``tensors`` are those that the round may be of. True where the node is no root of any of their shards; False for
        tensors that it does not know.
        """
        job = self._node.jobs.get(job_id)
        if job is None or not all(tensor in job.tensors for tensor in tensors):
            return False
        number = round_ & 0xFFFFFFFF
        mine = [state for tensor in tensors for state in job.shards_of(tensor) if state.tree.up is None]
        return all(self._is_whole(state, number) for state in mine if state.data)

    def _is_whole(self, state: ShardState, round_: int) -> bool:
        """Whether a root's shard has the result of a round, as opposed to having given it up, or still waiting."""
        if state.is_running(round_):
            return state.down_logged == state.shard.count
        if round_ == state.over:
            return not state.over_failed
        # slots go on to a later round only when everybody has confirmed this one
        return round_ not in state.dead and is_newer(state.active, round_)

    def _bury(self, state: ShardState, round_: int) -> None:
        """Remember a failed round that has not begun here: a neighbour that has not heard of it may still send it."""
        state.dead.add(round_)
        if len(state.dead) > MAX_DEAD and state.committed:
            active = state.active
            oldest = min(state.dead, key=lambda number: (number - active) & 0xFFFFFFFF)
            self._node.memory.shards[state.row, ShardColumn.ACTIVE] = state.over = oldest
            state.over_failed = True
            state.dead.discard(oldest)

    def open_for(self, state: ShardState, round_: int) -> bool:
        """Open a round that a child speaks of before any of its data has come; False while the last one is running."""
        with self._node.slots.exclusive():
            if not state.committed or state.is_over(round_):
                return False
            engine.open_round(self._node.slots.tables, state.row, round_)
            self.start(state, round_)
        return True

    def start(self, state: ShardState, round_: int) -> None:
        """The slots have been opened for a round."""
        state.start(round_, self._node.timing)
        self._node.running[state.row] = state

    def close(self, state: ShardState, now: float, *, failed: bool) -> None:
        """The round is over here: later rounds may take the slots, below as well."""
        node = self._node
        node.slots.closing(state, failed=failed)
        with node.slots.exclusive():
            node.memory.shards[state.row, ShardColumn.COMMITTED] = 1
            node.running.pop(state.row, None)
            round_ = state.active
            state.over, state.over_failed = round_, failed
            state.dead = {number for number in state.dead if is_newer(number, round_)}
            if failed and state.collective is not None:
                # this host may have its result, others have not
                state.collective.state.fail(state.collective.round)
            state.tree.forget(state.row)
            state.stop_sending()
            state.from_parent = None
            state.leave()
            state.from_children = {}
            state.tree.changed()
            for link in state.tree.down.values():
                node.send(state, link, Kind.OPEN, down=True, round_=round_, word0=int(failed))
            state.ready_due = None
            self.start_waiting(state.job, state.shard.tensor, now)

    # ---------------------------------------------------------------- results

    def sink(self, now: float) -> None:
        """Hand new results to the local arrays and see which shards are complete."""
        memory = self._node.memory
        for state in list(self._node.running.values()):
            if state.confirmed:
                continue
            if state.collective is not None:
                leaf.sink_shard(self._node.slots.tables, memory.leaves, state.row)
            logged = state.down_logged
            if state.collective is not None and logged > state.decoded:
                entries = slice(state.slot0 + state.decoded, state.slot0 + logged)
                fragments = memory.down_log[entries].astype(np.int64)
                state.collective.decode(state.shard, memory.rows, fragments + state.slot0, fragments)
                state.decoded = logged
            if logged == state.shard.count:
                self.confirm(state, now)

    def _finish(self, job: Job, collective: Collective) -> None:
        """A shard has all of its results in the arrays: perhaps all shards have."""
        if not collective.finished or job.collectives.pop(collective.round, None) is None:
            return
        collective.finish()
        tensor = collective.state.layout.tensor
        self._node.events.append(RoundDone(job.job, collective.round, tensor, collective.overflow))

    def confirm(self, state: ShardState, now: float) -> None:
        """Once a whole subtree has the results: the root commits, anybody else tells its parent (confirmed rounds)."""
        if state.confirmed or state.round is None or state.committed:
            return
        if state.down_logged != state.shard.count:
            return
        if state.collective is not None:
            if state.decoded != state.shard.count:
                return
            if state.data:
                self._finish(state.job, state.collective)
        if not all(sender.done for sender in state.down.values()):
            return
        state.confirmed = True
        if state.tree.up is not None:
            if state.ready_due is not None:
                state.ready_due = now + state.ready_interval
                self._node.wake(state.ready_due)
            self._node.send(state, state.tree.up, Kind.DONE, down=True, round_=state.round)
            return
        self._node.events.append(
            RoundCommitted(state.job.job, state.round, state.shard.tensor, state.shard.shard)
        )
        self.close(state, now, failed=False)
