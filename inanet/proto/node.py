"""A node: worker agent, aggregator and parameter server are the same machine at different places of a tree.

A root has no parent and turns complete fragments into results. An aggregator has both neighbours. A worker has no
children; it contributes the arrays of its local ranks and takes the results. Slot memory, rounds and reliability are
the same for all of them, so that a root or a worker can one day be an aggregator too.

The machine is sans-IO: feed it batches and plans, take transmissions and events, call it when its timer is due.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto import engine
from inanet.proto.collective import Collective, TensorState
from inanet.proto.engine import Count, Event, tables_of
from inanet.proto.events import NodeEvent, PeerSilent, Refused, RoundCommitted, RoundDone
from inanet.proto.formats import make_format
from inanet.proto.membership import Job, ShardState, Tree
from inanet.proto.plan import NodePlan, TensorLayout
from inanet.proto.reliability import Link, Receiver, Sender, Timing
from inanet.proto.slots import (
    LOGGED_DOWN,
    MAX_TREES,
    ROW_BYTES,
    JobColumn,
    OutOfSlots,
    ShardColumn,
    SlotMemory,
    State,
    TreeColumn,
)
from inanet.proto.xagg import policy
from inanet.proto.xagg.control import Header, Outbox, read_header
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import GROUP, LOST_BODY_BYTES, Kind, is_newer

#: largest number of packets in one transmission: four super-frames, so that Python runs once for a quarter of a megabyte
BURST = 248
#: fragments a worker encodes at a time
CHUNK = 248
#: failed rounds of a tensor that are remembered in case they are still on their way
MAX_DEAD = 64


class Node:
    """See the module's documentation. ``capacity`` is slot memory in fragments (1052 B each on the wire and in memory).

    ``timing`` holds all waiting times; ``now`` is always seconds on any clock that does not jump backwards.
    """

    def __init__(self, name: str, capacity: int, timing: Timing | None = None) -> None:
        self.name = name
        self.timing = timing or Timing()
        self.memory = SlotMemory(capacity)
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.counts: NDArray[np.int64] = np.zeros(len(Count), np.int64)
        self._tables = tables_of(self.memory)
        self._jobs: dict[int, Job] = {}
        self._by_row: dict[int, ShardState] = {}
        self._events: list[NodeEvent] = []
        self._outbox = Outbox()
        self._reported: NDArray[np.int64] = np.zeros((256, 4), np.int64)
        self._used: NDArray[np.int64] = np.zeros(1, np.int64)
        self._misfit: NDArray[np.uint8] = np.zeros(CHUNK, np.uint8)
        self._bits: NDArray[np.uint8] = np.zeros(LOST_BODY_BYTES, np.uint8)
        self._next_timer: float | None = None
        #: something has happened since :meth:`transmit` last found nothing more to send
        self._stirred = False
        self.rows_sent = 0
        self._retransmissions = 0
        #: fragments of this host's own tensors, data and exponents, each counted once
        self.leaf_contributions = 0
        self._handlers = {
            Kind.SENT: self._on_sent,
            Kind.LOST: self._on_lost,
            Kind.DONE: self._on_done,
            Kind.READY: self._on_ready,
            Kind.OPEN: self._on_open,
        }

    # ---------------------------------------------------------------- plans, layouts, rounds

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Follow a plan version, atomically between batches. Older versions are ignored.

        ``attach`` names trees in which the parent may know nothing of the rounds that are running: after a failed
        aggregator (R5) or a restarted root (R4) everything it lacks is sent to it again. Raises
        :class:`~inanet.proto.slots.OutOfSlots` for too many jobs or trees; then nothing has changed.
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
                tree = Tree(job, placement.tree, self.memory.add_tree(job.row))
                job.trees[placement.tree] = tree
            again = placement.tree in attach
            moved = tree.place(self.memory, placement, fresh=again)
            for state in job.shards.values():
                if state.tree is tree and state.round is not None and not self._is_committed(state):
                    self._rewire(state, moved or again, now)

    def _rewire(self, state: ShardState, attach: bool, now: float) -> None:
        """Bring a running round in line with changed links."""
        tree = state.tree
        shard = self.memory.shards[state.row]
        for index, link in tree.down.items():
            known = state.down.get(index)
            if known is None or known.link is not link:
                state.down[index] = Sender(link, cursor=int(shard[ShardColumn.DOWN_LOGGED]))
                state.from_children[index] = Receiver(state.shard.count, self.timing)
        for index in [index for index in state.down if index not in tree.down]:
            del state.down[index], state.from_children[index]
        if tree.up is not None and attach:
            policy.restamp(self._tables, state.row)
            state.up = Sender(tree.up, cursor=int(shard[ShardColumn.UP_LOGGED]), attach_due=now)
            state.confirmed = False
            receiver = Receiver(state.shard.count, self.timing)
            state.from_parent = receiver
            for group in range(receiver.groups):
                receiver.group_ended(group, now)
            self._wake(now)
        self._confirm(state, now)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Make slots for a tensor, open for rounds after ``last_round``.

        Raises :class:`~inanet.proto.slots.OutOfSlots`; then nothing was taken.
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
            for link in state.tree.links():
                link.forget(state.row)
            del self._by_row[state.row]
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
            self._retransmissions += sum(link.retransmissions for link in tree.links())
            self.memory.drop_tree(tree.row)
        del self._jobs[job_id]
        self.memory.drop_job(job_id)

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """Start this host's part in a round. ``arrays`` are 1-D, one per local rank, overwritten by the result.

        It is sent as soon as the parent has opened the tensor's slots for it; a straggler elsewhere does not matter.
        """
        job = self._jobs[job_id]
        collective = Collective(job.tensors[tensor], round_, arrays)
        job.collectives[round_] = collective
        if collective.finished:
            self._finish(job, collective)
            return
        if collective.refused:
            self._refuse(job, collective)
            return
        self._stirred = True
        for state in job.shards_of(tensor):
            state.waiting.append(collective)
        self._start_waiting(job, tensor, now)

    def _start_waiting(self, job: Job, tensor: int, now: float) -> None:
        """Start the next round of a tensor where slots are free for it, and see to it that they become free elsewhere."""
        for state in job.shards_of(tensor):
            while state.waiting and self._is_committed(state):
                collective = state.waiting[0]
                number = collective.round & 0xFFFFFFFF
                takes_part = not self._is_over(state, number)
                if takes_part and not collective.decided:
                    if not self._may_decide(job, collective):
                        break
                    collective.decide()
                state.waiting.popleft()
                if takes_part and (state.data or collective.uses_prologue):
                    engine.open_round(self._tables, state.row, number)
                    state.start(number, self.timing)
                    state.collective = collective
            if not state.waiting or self._is_committed(state):
                state.ready_due = None
            elif state.ready_due is None:
                state.ready_due, state.ready_interval = now, self.timing.retransmit
                self._wake(now)

    def _may_decide(self, job: Job, collective: Collective) -> bool:
        """Whether every earlier round of the tensor is over at this host, well or badly."""
        tensor = collective.state.layout.tensor
        return all(self._is_committed(state) for state in job.shards_of(tensor)) and not any(
            other.state is collective.state and other.round < collective.round
            for other in job.collectives.values()
        )

    def _is_over(self, state: ShardState, round_: int) -> bool:
        """Whether a shard will never open this round (any more)."""
        return round_ in state.dead or not is_newer(
            round_, int(self.memory.shards[state.row, ShardColumn.ACTIVE])
        )

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Abandon a round everywhere on this node: its arrays are undefined, its late packets stale (R13)."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        self._stirred = True
        collective = job.collectives.pop(round_, None)
        number = round_ & 0xFFFFFFFF
        concerned = {state.shard.tensor for state in job.shards.values() if self._is_running(state, number)}
        for tensor in concerned.union(tensors):
            if tensor in job.tensors:
                job.tensors[tensor].fail(round_)
            for state in job.shards_of(tensor):
                if collective is not None and collective in state.waiting:
                    state.waiting.remove(collective)
                if self._is_running(state, number):
                    self._close(state, now, failed=True)
                elif is_newer(number, int(self.memory.shards[state.row, ShardColumn.ACTIVE])):
                    self._bury(state, number)
            self._start_waiting(job, tensor, now)

    def _bury(self, state: ShardState, round_: int) -> None:
        """Remember a failed round that has not begun here: a neighbour that has not heard of it may still send it."""
        state.dead.add(round_)
        if len(state.dead) > MAX_DEAD and self._is_committed(state):
            shard = self.memory.shards[state.row]
            active = int(shard[ShardColumn.ACTIVE])
            oldest = min(state.dead, key=lambda number: (number - active) & 0xFFFFFFFF)
            shard[ShardColumn.ACTIVE] = state.over = oldest
            state.over_failed = True
            state.dead.discard(oldest)

    def _open_for(self, state: ShardState, round_: int) -> bool:
        """Open a round that a child speaks of before any of its data has come; False while the last one is running."""
        if not self._is_committed(state) or self._is_over(state, round_):
            return False
        engine.open_round(self._tables, state.row, round_)
        state.start(round_, self.timing)
        return True

    def _is_running(self, state: ShardState, round_: int) -> bool:
        return state.round == round_ and not self._is_committed(state)

    @staticmethod
    def _is_ahead(state: ShardState, round_: int) -> bool:
        """Whether a round is later than any that a shard has seen."""
        return state.round is None or is_newer(round_, state.round)

    def _is_committed(self, state: ShardState) -> bool:
        return bool(self.memory.shards[state.row, ShardColumn.COMMITTED])

    def _close(self, state: ShardState, now: float, *, failed: bool) -> None:
        """The round is over here: later rounds may take the slots, below as well."""
        self.memory.shards[state.row, ShardColumn.COMMITTED] = 1
        round_ = int(self.memory.shards[state.row, ShardColumn.ACTIVE])
        state.over, state.over_failed = round_, failed
        state.dead = {number for number in state.dead if is_newer(number, round_)}
        if failed and state.collective is not None:
            # this host may have its result, others have not
            state.collective.state.fail(state.collective.round)
        for link in state.tree.links():
            link.forget(state.row)
        state.up = state.from_parent = state.collective = None
        state.down, state.from_children = {}, {}
        for link in state.tree.down.values():
            self._say(state, link, Kind.OPEN, down=True, round_=round_, word0=int(failed))
        state.ready_due = None
        self._start_waiting(state.job, state.shard.tensor, now)

    # ---------------------------------------------------------------- receiving

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take one batch through the slot engine, then act on what it reported."""
        need = 4 * len(batch) + 16
        if len(self._reported) < need:
            self._reported = np.zeros((need, 4), np.int64)
        self._used[0] = 0
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
        for code, row, a, b in self._reported[: self._used[0]].tolist():
            if code == Event.CONTROL:
                self._on_control(read_header(arena, int(batch.offsets[a])), batch, arena, a, now)
            else:
                self._on_event(code, self._by_row[row], a, b, now)
        self._return_credit()
        self._sink(now)

    def _on_event(self, code: int, state: ShardState, a: int, b: int, now: float) -> None:
        """One report of the engine about a shard; see :class:`~inanet.proto.engine.Event` for a and b."""
        if code == Event.OPENED:
            state.start(a, self.timing)
            if a in state.dead:
                self._close(state, now, failed=True)
        elif code == Event.GROUP_END:
            receiver = state.from_parent if a < 0 else state.from_children.get(a)
            if receiver is not None:
                receiver.group_ended(b, now)
                self._wake(now + self.timing.reorder)
        elif code == Event.ANSWER:
            link = state.tree.down.get(b)
            if link is not None:
                link.again(state.row, a)
        elif code == Event.AGAIN_UP:
            if state.tree.up is not None:
                state.tree.up.again(state.row, a)
        elif code == Event.AGAIN_DOWN:
            for link in state.tree.down.values():
                link.again(state.row, a)
        elif code in (Event.RESTART, Event.AMNESIA):
            self._on_restart_event(state, code, a, b, now)
        elif code == Event.CORRUPT_SLOT:
            for receiver in state.from_children.values():
                receiver.reopen(a // GROUP, now)
            self._wake(now)

    def _on_restart_event(self, state: ShardState, code: int, fragment: int, b: int, now: float) -> None:
        """A root starts a fragment again, unless a later packet of the batch has settled the matter."""
        slot = state.slot0 + fragment
        touched = self.memory.round[slot] == state.round
        if self._is_committed(state) or (touched and self.memory.state[slot] == State.RESULT):
            return
        attempt = int(self.memory.attempt[slot]) if touched else 0
        if code == Event.RESTART:
            self._restart(state, fragment, attempt + 1, b, now)
        elif is_newer(b, attempt, bits=8):
            # whoever took part in attempt b knows its exponent, all others will propose one
            self._restart(state, fragment, b + 1, 0, now)

    def _restart(self, state: ShardState, fragment: int, attempt: int, exponent: int, now: float) -> None:
        """Empty a slot for a later attempt and tell everybody below (R1, R3); exponent 0 keeps that of the attempt before."""
        slot = state.slot0 + fragment
        before = int(self.memory.attempt[slot]) if self.memory.round[slot] == state.round else 0
        fragments = np.array([fragment], np.int64)
        exponents = np.array([exponent], np.uint8)
        policy.restart(self._tables, state.row, fragments, np.array([attempt & 0xFF], np.uint8), exponents)
        for index, link in state.tree.down.items():
            self._send_restart(state, link, fragment)
            state.from_children[index].reopen(fragment // GROUP, now, self.timing.retransmit)
        if state.tree.down:
            self._wake(now + self.timing.retransmit)
        if state.collective is not None:
            follows = (before + 1 - attempt) & 0xFF == 0
            state.collective.restart(state.shard, fragment, exponent, follows=follows)
            if fragment < state.encoded:
                self._encode(state, fragment, fragment + 1, now)

    def _send_restart(self, state: ShardState, link: Link, fragment: int) -> None:
        self._outbox.send_row(
            link.endpoint,
            Kind.RESTART,
            tables=self._tables,
            row=state.row,
            fragment=fragment,
            host=0,
            exponent=int(self.memory.announced[state.slot0 + fragment]),
        )

    def _on_control(
        self, h: Header, batch: PacketBatch, arena: NDArray[np.int32], index: int, now: float
    ) -> None:
        """One control packet: find whom it concerns, refuse it by name, or hand it to its handler."""
        job = self._jobs[h.job]
        source = int(batch.sources[index])
        if h.kind == Kind.CREDIT:
            self._on_credit(job, h, source, now)
            return
        state = job.shards.get(h.shard)
        if state is None:
            self._drop(Drop.UNKNOWN_SHARD)
            return
        # CREDIT apart, SENT and READY travel with their data, LOST, DONE and OPEN against it
        from_child = h.kind == Kind.READY or (h.kind in (Kind.LOST, Kind.DONE)) == h.down
        if h.kind in (Kind.OPEN, Kind.RESTART):
            from_child = False
        child = h.host.bit_length() - 1 if from_child else -1
        link = state.tree.down.get(child) if from_child else state.tree.up
        if link is None or link.endpoint != source or (link.bit != h.host and h.kind != Kind.RESTART):
            retired = from_child and int(self.memory.trees[state.tree.row, TreeColumn.RETIRED]) & h.host
            self._drop(Drop.STALE_PLAN if retired else Drop.FOREIGN_HOST)
            return
        if h.kind == Kind.RESTART:
            self._on_restart(state, h, now)
            return
        bits = None
        if h.kind == Kind.LOST:
            start = int(batch.offsets[index]) + 24
            bits = batch.arena[start : start + LOST_BODY_BYTES]
        self._handlers[Kind(h.kind)](state, child, link, h, bits, now)

    def _drop(self, reason: Drop) -> None:
        """A packet that the kernel has passed is of no use after all."""
        self.drops[Drop.OK] -= 1
        self.drops[reason] += 1

    def _on_sent(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        """The neighbour has sent everything of a round: look at every group, or say DONE (again)."""
        ahead = state.round is None or is_newer(h.round, state.round)
        if ahead and (child < 0 or not self._open_for(state, h.round)):
            stale = self._is_over(state, h.round)
            if stale and child < 0:
                # these slots were made after that round: nothing below can lack a result of it
                self._say(state, link, Kind.DONE, down=True, round_=h.round)
                return
            self._drop(Drop.STALE_ROUND if stale else Drop.NOT_OPEN)
            return
        receiver = state.from_children.get(child) if child >= 0 else state.from_parent
        over = h.round != state.round or receiver is None
        if over or (receiver is not None and (state.confirmed if child < 0 else receiver.done)):
            self._say(state, link, Kind.DONE, down=child < 0, round_=h.round)
            return
        assert receiver is not None
        receiver.close(now)
        self._wake(now + self.timing.reorder)

    def _on_lost(self, state: ShardState, child: int, link: Link, h: Header, bits: Any, now: float) -> None:
        """The neighbour lacks fragments: send again those that have been sent before, the others will come."""
        if not self._is_running(state, h.round):
            self._drop(Drop.NOT_OPEN if self._is_ahead(state, h.round) else Drop.STALE_ROUND)
            return
        if h.gradient >= -(-state.shard.count // GROUP):
            self._drop(Drop.BAD_FRAGMENT)
            return
        if child < 0 and state.up is not None:
            state.up.attach_due = state.up.asking_since = None
        wanted = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + h.gradient * GROUP
        lost = 0
        for fragment in wanted[wanted < state.shard.count].tolist():
            lost += self._send_again(state, child, link, fragment, now)
        link.written_off(lost)

    def _send_again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        """Repeat a fragment, if this node has something to send for it; True if it will leave by the link once more."""
        slot = state.slot0 + fragment
        memory = self.memory
        if memory.round[slot] != state.round or memory.state[slot] in (State.FREE, State.COLLECT):
            return False
        verdict = policy.mend(self._tables, state.row, fragment)
        self.counts[Count.CORRUPT_SLOTS] += verdict != 0
        holds_result = memory.state[slot] == State.RESULT
        if verdict == 2:
            self._heal(state, fragment, now)
        elif holds_result and child < 0:
            # a parent that lost its memory adopts what its children know already (R4)
            self._outbox.send_row(
                link.endpoint,
                Kind.RESULT,
                tables=self._tables,
                row=state.row,
                fragment=fragment,
                host=link.bit,
            )
        elif holds_result or child < 0:
            return link.again(state.row, fragment)
        return False

    def _heal(self, state: ShardState, fragment: int, now: float) -> None:
        """A row was damaged in this node's memory: get its content again from where it came from (R3)."""
        slot = state.slot0 + fragment
        if state.tree.up is None:
            self._restart(state, fragment, int(self.memory.attempt[slot]) + 1, 0, now)
        elif self.memory.state[slot] == State.RESULT:
            self.memory.state[slot] = State.SENT
            if state.from_parent is not None:
                state.from_parent.reopen(fragment // GROUP, now)
                self._wake(now)
        elif state.collective is not None:
            if not self.memory.logged[slot] & LOGGED_DOWN:
                self._encode(state, fragment, fragment + 1, now)
            # else the result has overwritten this host's contribution: it comes from the parent or not at all
        else:
            self.memory.bitmap[slot] = 0
            self.memory.state[slot] = State.COLLECT
            self.memory.rows[slot, 0] = 0
            for receiver in state.from_children.values():
                receiver.reopen(fragment // GROUP, now)
            self._wake(now)

    def _on_done(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        sender = state.down.get(child) if child >= 0 else state.up
        if h.round != state.round or sender is None:
            self._drop(Drop.NOT_OPEN if self._is_ahead(state, h.round) else Drop.STALE_ROUND)
            return
        sender.done = True
        sender.sent_due = sender.asking_since = sender.attach_due = None
        self._confirm(state, now)

    def _on_ready(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        """A child wants to send a round, or has come to this parent in the middle of one."""
        shard = self.memory.shards[state.row]
        active = int(shard[ShardColumn.ACTIVE])
        if (
            h.word0
            and (h.round == active or is_newer(h.round, active))
            and not (h.round == active and self._is_committed(state))
        ):
            if h.round != active and not self._open_for(state, h.round):
                return
            for group in range(-(-state.shard.count // GROUP)):
                missing = policy.missing_from_child(self._tables, state.row, child, group, self._bits)
                if missing or group == 0:
                    self._say(state, link, Kind.LOST, down=False, gradient=group, bits=self._bits)
            return
        committed = self._is_committed(state)
        if is_newer(h.round, active) and not committed:
            # asking for a later round confirms the one that is running (R4)
            sender = state.down.get(child)
            if sender is not None and not sender.done:
                sender.done = True
                self._confirm(state, now)
                committed = self._is_committed(state)
            if not committed:
                if state.confirmed and state.tree.up is not None:
                    # everything below is done: the OPEN of the parent was lost, or is still to come
                    self._say(state, state.tree.up, Kind.READY, down=False, round_=h.round)
                return
        # the child may be in a round that has not reached this node: name none that can still be going on. Before a round
        # that is open here all are over, even if this node has forgotten them
        over = state.over if self._is_committed(state) else (active - 1) & 0xFFFFFFFF
        self._say(state, link, Kind.OPEN, down=True, round_=over, word0=int(state.over_failed))

    def _on_open(self, state: ShardState, _child: int, _link: Link, h: Header, _: Any, now: float) -> None:
        """A round is over at the parent: so it is in this subtree."""
        active = int(self.memory.shards[state.row, ShardColumn.ACTIVE])
        if is_newer(active, h.round):
            self._drop(Drop.STALE_ROUND)
            return
        if h.round != active:
            self.memory.shards[state.row, ShardColumn.ACTIVE] = h.round
        elif self._is_committed(state):
            return
        self._close(state, now, failed=bool(h.word0))

    def _on_restart(self, state: ShardState, h: Header, now: float) -> None:
        """The root wants a fragment again, as a later attempt and with another exponent."""
        if not self._is_running(state, h.round):
            self._drop(Drop.NOT_OPEN if self._is_ahead(state, h.round) else Drop.STALE_ROUND)
            return
        if h.gradient >= state.shard.count:
            self._drop(Drop.BAD_FRAGMENT)
            return
        slot = state.slot0 + h.gradient
        fresh = self.memory.round[slot] != state.round
        known = 0 if fresh else int(self.memory.attempt[slot])
        if not is_newer(h.attempt, known, bits=8):
            self._drop(Drop.STALE_ATTEMPT)
            return
        if not fresh and self.memory.state[slot] == State.RESULT:
            assert state.tree.up is not None
            self._send_again(state, -1, state.tree.up, h.gradient, now)
        elif not fresh and state.collective is not None and self.memory.logged[slot] & LOGGED_DOWN:
            # a result that is being mended: it has overwritten this host's contribution
            return
        else:
            self._restart(state, h.gradient, h.attempt, h.word0 & 0xFF, now)

    def _on_credit(self, job: Job, h: Header, source: int, now: float) -> None:
        tree = job.trees.get(h.word0)
        link = None
        if tree is not None:
            link = tree.down.get(h.host.bit_length() - 1) if h.down else tree.up
        if link is None or link.endpoint != source or link.bit != h.host:
            self._drop(Drop.FOREIGN_HOST)
        elif is_newer(link.since & 0xFF, h.plan, bits=8):
            self._drop(Drop.STALE_PLAN)
        elif not link.credit(h.gradient, now):
            self._drop(Drop.DUPLICATE)

    def _return_credit(self) -> None:
        """Tell neighbours what was taken from them, a quarter of a window at a time."""
        taken = self.memory.taken
        for job in self._jobs.values():
            for tree in job.trees.values():
                for index, link in tree.down.items():
                    self._credit(job, tree, link, int(taken[tree.row, index]), down=False)
                if tree.up is not None:
                    self._credit(job, tree, tree.up, int(taken[tree.row, 32]), down=True)

    def _credit(self, job: Job, tree: Tree, link: Link, taken: int, *, down: bool) -> None:
        # without knowing how much the neighbour may send: often enough for a small window
        granted = job.plan.window or min(link.window, 64)
        if taken - link.reported < max(1, granted // 4):
            return
        link.reported = taken
        self._outbox.send(
            link.endpoint,
            Kind.CREDIT,
            job=job.job,
            key=job.plan.key,
            version=job.plan.version,
            host=link.bit,
            gradient=taken & 0xFFFFFFFF,
            down=down,
            word0=tree.tree,
        )

    # ---------------------------------------------------------------- results

    def _sink(self, now: float) -> None:
        """Hand new results to the local arrays and see which shards are complete."""
        for state in self._by_row.values():
            if state.round is None or self._is_committed(state) or state.confirmed:
                continue
            logged = int(self.memory.shards[state.row, ShardColumn.DOWN_LOGGED])
            if state.collective is not None and logged > state.decoded:
                fragments = self.memory.down_log[state.slot0 + state.decoded : state.slot0 + logged].astype(
                    np.int64
                )
                state.collective.decode(state.shard, self.memory.rows, fragments + state.slot0, fragments)
                state.decoded = logged
                if state.data and state.collective.finished:
                    self._finish(state.job, state.collective)
            if logged == state.shard.count:
                self._confirm(state, now)

    def _finish(self, job: Job, collective: Collective) -> None:
        job.collectives.pop(collective.round, None)
        tensor = collective.state.layout.tensor
        self._events.append(RoundDone(job.job, collective.round, tensor, collective.overflow))

    def _refuse(self, job: Job, collective: Collective) -> None:
        rank, index = collective.where_refused()
        self._events.append(Refused(job.job, collective.round, collective.state.layout.tensor, rank, index))

    def _confirm(self, state: ShardState, now: float) -> None:
        """Once a whole subtree has the results: the root commits, anybody else tells its parent (R4)."""
        if state.confirmed or state.round is None or self._is_committed(state):
            return
        if int(self.memory.shards[state.row, ShardColumn.DOWN_LOGGED]) != state.shard.count:
            return
        if state.collective is not None and state.decoded != state.shard.count:
            return
        if not all(sender.done for sender in state.down.values()):
            return
        state.confirmed = True
        if state.tree.up is not None:
            if state.ready_due is not None:
                state.ready_due = now + state.ready_interval
                self._wake(state.ready_due)
            self._say(state, state.tree.up, Kind.DONE, down=True, round_=state.round)
            return
        self._events.append(RoundCommitted(state.job.job, state.round, state.shard.tensor, state.shard.shard))
        self._close(state, now, failed=False)

    def events(self) -> list[NodeEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- sending

    def _say(
        self,
        state: ShardState,
        link: Link,
        kind: Kind,
        *,
        down: bool,
        round_: int | None = None,
        gradient: int = 0,
        word0: int = 0,
        bits: NDArray[np.uint8] | None = None,
    ) -> None:
        plan = state.job.plan
        self._outbox.send(
            link.endpoint,
            kind,
            job=plan.job,
            key=plan.key,
            version=plan.version,
            host=link.bit,
            gradient=gradient,
            round_=(state.round or 0) if round_ is None else round_,
            shard=state.shard.shard,
            down=down,
            word0=word0,
            bits=bits,
        )

    def transmit(self, now: float) -> Iterator[Transmission]:
        """What may leave now, control packets first; stop iterating when the device is full."""
        yield from self._outbox.take()
        while self._stirred:
            self._stirred = False
            for job in list(self._jobs.values()):
                for tree in list(job.trees.values()):
                    for link in tree.links():
                        burst = self._burst(tree, link, now)
                        if burst is not None:
                            self._stirred = True
                            yield burst
            if self._outbox:
                yield from self._outbox.take()

    def _burst(self, tree: Tree, link: Link, now: float) -> Transmission | None:
        """The next packets for one neighbour: what was asked for again, then the emission logs, oldest round first."""
        up = link is tree.up
        if not up and tree.down.get(link.bit.bit_length() - 1) is not link:
            # replaced while the driver waited for room in a device
            return None
        most = min(link.room, BURST)
        if most == 0:
            if link.in_flight:
                self._wake(link.waiting_since + self.timing.retransmit_max)
            return None
        while link.resend:
            entries = link.take_resend(most)
            slots = np.array([self._by_row[row].slot0 + fragment for row, fragment in entries], np.int64)
            burst = self._send_rows(link, slots, now, up)
            if burst is not None:
                link.retransmissions += len(burst)
                return burst
        states = [
            state for state in tree.job.shards.values() if state.tree is tree and state.round is not None
        ]
        states.sort(key=lambda state: (state.round or 0, state.data))
        for state in states:
            sender = state.up if up else state.down.get(link.bit.bit_length() - 1)
            if sender is None or sender.link is not link:
                continue
            if up and state.collective is not None:
                self._produce(state, sender, most, now)
            column = ShardColumn.UP_LOGGED if up else ShardColumn.DOWN_LOGGED
            logged = int(self.memory.shards[state.row, column])
            burst = None
            while burst is None and sender.cursor < logged:
                log = self.memory.up_log if up else self.memory.down_log
                stop = min(sender.cursor + most, logged)
                slots = log[state.slot0 + sender.cursor : state.slot0 + stop].astype(np.int64) + state.slot0
                sender.cursor = stop
                burst = self._send_rows(link, slots, now, up)
            self._see_end(state, sender, now)
            if burst is not None:
                return burst
        return None

    def _see_end(self, state: ShardState, sender: Sender, now: float) -> None:
        """Start the SENT handshake when the last fragment of a round has left."""
        if sender.cursor == state.shard.count and not sender.done and sender.sent_due is None:
            sender.sent_due, sender.interval = now, self.timing.retransmit
            self._wake(now)

    def _send_rows(self, link: Link, slots: NDArray[np.int64], now: float, up: bool) -> Transmission | None:
        # a slot that was emptied again holds no more than a partial sum
        slots = slots[self.memory.state[slots] == (State.SENT if up else State.RESULT)]
        if len(slots) == 0:
            return None
        if link.in_flight == 0:
            link.waiting_since = now
        link.in_flight += len(slots)
        self.rows_sent += len(slots)
        return Transmission(link.endpoint, self.memory.bytes, slots * ROW_BYTES, ROW_BYTES)

    def _produce(self, state: ShardState, sender: Sender, most: int, now: float) -> None:
        """Encode the next chunk of a worker's own contribution, just ahead of its transmission."""
        collective = state.collective
        assert collective is not None
        if state.encoded > sender.cursor or state.encoded == state.shard.count:
            return
        count = collective.ready(state.shard, state.encoded, min(most, CHUNK), self._data_position(state))
        if count:
            first = state.encoded
            state.encoded += count
            self.leaf_contributions += count
            self._encode(state, first, first + count, now)

    def _data_position(self, state: ShardState) -> int:
        """Fragments of the tensor already encoded, for pacing exponents ahead of data."""
        siblings = state.job.shards_of(state.shard.tensor)
        return max((other.shard.first + other.encoded for other in siblings if other.data), default=0)

    def _encode(self, state: ShardState, first: int, stop: int, now: float) -> None:
        collective = state.collective
        assert collective is not None
        told = collective.refused
        misfit = self._misfit[: stop - first]
        if not told:
            collective.encode(state.shard, first, stop, self.memory.rows, state.slot0, misfit)
        if collective.refused:
            if not told:
                self._refuse(state.job, collective)
            return
        used = np.zeros(1, np.int64)
        again = np.zeros((stop - first, 4), np.int64)
        policy.contribute(self._tables, state.row, first, stop, misfit, again, used)
        for _, _, fragment, _ in again[: used[0]].tolist():
            if state.tree.up is not None:
                state.tree.up.again(state.row, fragment)

    # ---------------------------------------------------------------- time

    def _wake(self, at: float) -> None:
        if self._next_timer is None or at < self._next_timer:
            self._next_timer = at

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        return self._next_timer

    def on_timer(self, now: float) -> None:
        """Look at groups that are due, repeat what was not answered, notice who is silent."""
        self._next_timer = None
        self._stirred = True
        for state in list(self._by_row.values()):
            self._ready_timer(state, now)
            if state.round is None or self._is_committed(state):
                continue
            for index, receiver in list(state.from_children.items()):
                self._check(state, index, receiver, now)
            if state.from_parent is not None:
                self._check(state, -1, state.from_parent, now)
            for sender in ([state.up] if state.up else []) + list(state.down.values()):
                self._sender_timer(state, sender, now)
        for job in self._jobs.values():
            for tree in job.trees.values():
                for link in tree.links():
                    self._link_timer(link, now)

    def _ready_timer(self, state: ShardState, now: float) -> None:
        if state.ready_due is None or not state.waiting or state.tree.up is None:
            return
        if not state.confirmed and not self._is_committed(state):
            # asking for a later round says that everything of this one is here (R4)
            return
        if state.ready_due <= now:
            self._say(
                state, state.tree.up, Kind.READY, down=False, round_=state.waiting[0].round & 0xFFFFFFFF
            )
            state.ready_due = now + state.ready_interval
            state.ready_interval = min(state.ready_interval * 2, self.timing.retransmit_max)
        self._wake(state.ready_due)

    def _check(self, state: ShardState, child: int, receiver: Receiver, now: float) -> None:
        """The paper's Check Queue: compare due groups with the slots, ask for what is missing."""
        link = state.tree.up if child < 0 else state.tree.down.get(child)
        if link is None:
            return
        for group in receiver.due(now):
            if child < 0:
                missing = policy.missing_results(self._tables, state.row, group, self._bits)
            else:
                missing = policy.missing_from_child(self._tables, state.row, child, group, self._bits)
            receiver.checked(group, missing, now)
            if missing:
                if child >= 0:
                    self._repeat_restarts(state, link, group)
                self._say(state, link, Kind.LOST, down=child < 0, gradient=group, bits=self._bits)
        if receiver.complete and not receiver.done and child >= 0:
            receiver.done = True
            self._say(state, link, Kind.DONE, down=False)
        if receiver.next_due is not None:
            self._wake(receiver.next_due)

    def _repeat_restarts(self, state: ShardState, link: Link, group: int) -> None:
        """A missing fragment of a later attempt may be missing because the child never heard of the restart."""
        start = group * GROUP
        stop = min(start + GROUP, state.shard.count)
        attempts = self.memory.attempt[state.slot0 + start : state.slot0 + stop]
        wanted = np.unpackbits(self._bits, bitorder="little")[: stop - start]
        for fragment in np.flatnonzero((attempts != 0) & (wanted != 0)).tolist():
            if self.memory.round[state.slot0 + start + fragment] == state.round:
                self._send_restart(state, link, start + fragment)

    def _sender_timer(self, state: ShardState, sender: Sender, now: float) -> None:
        if sender.attach_due is not None:
            if sender.attach_due <= now:
                self._say(state, sender.link, Kind.READY, down=False, word0=1)
                sender.attach_due = now + self.timing.retransmit
            self._wake(sender.attach_due)
        if sender.sent_due is None or sender.done:
            return
        down = sender is not state.up
        if sender.sent_due <= now:
            if sender.asking_since is None:
                sender.asking_since = now
            self._say(state, sender.link, Kind.SENT, down=down)
            sender.sent_due = now + sender.interval
            sender.interval = min(sender.interval * 2, self.timing.retransmit_max)
            waited = now - sender.asking_since
            if not down and waited > self.timing.silent:
                self._events.append(PeerSilent(state.job.job, sender.link.name, waited))
                sender.asking_since = now
        self._wake(sender.sent_due)

    def _link_timer(self, link: Link, now: float) -> None:
        """A window that stays full means that credits or packets were lost: start afresh."""
        if link.in_flight and link.room == 0:
            if now - link.waiting_since >= self.timing.retransmit_max:
                link.in_flight = 0
                link.waiting_since = now
                self._wake(now)
            else:
                self._wake(link.waiting_since + self.timing.retransmit_max)

    # ---------------------------------------------------------------- figures

    @property
    def jobs(self) -> int:
        """Jobs this node takes part in."""
        return len(self._jobs)

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        links = [link for job in self._jobs.values() for tree in job.trees.values() for link in tree.links()]
        contributions, completed = int(self.counts[Count.CONTRIBUTIONS]), int(self.counts[Count.COMPLETED])
        return {
            "contributions_in": contributions,
            "contributions_summed": contributions - int(self.counts[Count.FIRST]),
            "fragments_completed": completed,
            "results_in": int(self.counts[Count.RESULTS]),
            "corrupt_slots": int(self.counts[Count.CORRUPT_SLOTS]),
            "leaf_contributions": self.leaf_contributions,
            "rows_sent": self.rows_sent,
            "retransmissions": self._retransmissions + sum(link.retransmissions for link in links),
            "slots_free": self.memory.free_slots(),
            "slots_total": self.memory.capacity,
        }

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}
