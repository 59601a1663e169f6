"""What neighbours say: reports of the slot engine, control packets, restarts, repetitions and mending."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.downlink import Downlink
from inanet.proto.tree.engine import Count, Event
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link, Timing
from inanet.proto.tree.slots import (
    LOGGED_DOWN,
    ShardColumn,
    SlotMemory,
    State,
    TreeColumn,
)
from inanet.proto.tree.xagg import slotwork
from inanet.proto.tree.xagg.control import Header
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.xagg import GROUP, HEADER_BYTES, LOST_BODY_BYTES, Kind, is_newer


class Hops(Downlink):
    """Both halves of every hop, in both directions."""

    def __init__(
        self,
        name: str,
        capacity: int,
        timing: Timing | None = None,
        random: Callable[[], float] | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        super().__init__(name, capacity, timing, random, memory)
        self._handlers = {
            Kind.SENT: self._on_sent,
            Kind.LOST: self._on_lost,
            Kind.DONE: self._on_done,
            Kind.READY: self._on_ready,
            Kind.OPEN: self._on_open,
        }

    def _on_event(self, code: int, state: ShardState, a: int, b: int, now: float) -> None:
        """One report of the engine about a shard; see :class:`~inanet.proto.tree.engine.Event` for a and b."""
        if code == Event.OPENED:
            self._start(state, a)
            if a in state.dead:
                self._close(state, now, failed=True)
        elif code == Event.GROUP_END:
            receiver = state.from_parent if a < 0 else state.from_children.get(a)
            if receiver is not None:
                receiver.group_ended(b if b >= 0 else -1 - b, now, prodded=b < 0)
                self._wake(now + self.timing.reorder)
        elif code == Event.ANSWER:
            link = state.tree.down.get(b)
            if link is not None:
                link.again(state.row, a)
        elif code == Event.AGAIN_UP:
            if state.tree.up is not None:
                state.tree.up.again(state.row, a)
        elif code == Event.AGAIN_DOWN:
            state.tree.again_down(state.row, a)
        elif code == Event.RESTART:
            self._on_misfits(state, np.array([a]), np.array([b]), now)
        elif code == Event.AMNESIA:
            self._on_amnesia(state, a, b, now)
        elif code == Event.CORRUPT_SLOT:
            for receiver in state.from_children.values():
                receiver.reopen(a // GROUP, now)
            self._wake(now)

    def _on_misfits(
        self, state: ShardState, fragments: NDArray[np.int64], exponents: NDArray[np.int64], now: float
    ) -> None:
        """A root starts fragments again, unless a later packet of the batch has settled the matter."""
        slots = state.slot0 + fragments
        touched = self.memory.round[slots] == state.round
        whole = touched & (self.memory.state[slots] == State.RESULT)
        if not self._is_committed(state) and not whole.all():
            attempts = np.where(touched, self.memory.attempt[slots], 0) + 1
            self._restart(state, fragments[~whole], attempts[~whole], exponents[~whole], now)

    def _on_amnesia(self, state: ShardState, fragment: int, known: int, now: float) -> None:
        """A root has forgotten an attempt: whoever took part in it knows its exponent, all others will propose one."""
        slot = state.slot0 + fragment
        touched = self.memory.round[slot] == state.round
        if self._is_committed(state) or (touched and self.memory.state[slot] == State.RESULT):
            return
        if is_newer(known, int(self.memory.attempt[slot]) if touched else 0, bits=8):
            self._restart(state, np.array([fragment]), np.array([known + 1]), np.array([0]), now)

    def _restart(
        self,
        state: ShardState,
        fragments: NDArray[np.int64],
        attempts: NDArray[np.int64],
        exponents: NDArray[np.int64],
        now: float,
    ) -> None:
        """Empty slots for a later attempt and tell everybody below (misfits, damage); exponent 0 keeps that of the attempt before.

        ``fragments`` are in ascending order.
        """
        slots = state.slot0 + fragments
        before = np.where(self.memory.round[slots] == state.round, self.memory.attempt[slots], 0)
        numbers, announced = (attempts & 0xFF).astype(np.uint8), exponents.astype(np.uint8)
        slotwork.restart(self._tables, state.row, fragments, numbers, announced)
        for group in np.unique(fragments // GROUP).tolist():
            for index, link in state.tree.down.items():
                self._send_restarts(state, link, group, now)
                state.from_children[index].reopen(group, now, self.timing.retransmit)
        if state.tree.down:
            self._wake(now + self.timing.retransmit)
        if state.collective is not None:
            follows = (before + 1 - attempts) & 0xFF == 0
            state.collective.restart(state.shard, fragments, announced, follows)
            encoded = fragments[fragments < state.encoded]
            if len(encoded):
                self._encode(state, encoded, now)

    # ---------------------------------------------------------------- control packets

    def _on_control(
        self, h: Header, batch: PacketBatch, arena: NDArray[np.int32], index: int, now: float
    ) -> None:
        """One control packet: find whom it concerns, refuse it by name, or hand it to its handler."""
        job = self._jobs[h.job]
        source = int(batch.sources[index])
        if h.kind == Kind.CREDIT:
            self._on_credit(job, h, source, now)
            return
        if h.kind == Kind.PROBE:
            self._on_probe(job, h, source, now)
            return
        state = job.shards.get(h.shard)
        if state is None:
            self._drop(Drop.UNKNOWN_SHARD)
            return
        # CREDIT and PROBE apart, SENT and READY travel with their data, LOST, DONE and OPEN against it
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
            start = int(batch.offsets[index]) + HEADER_BYTES
            self._on_restart(state, h, batch.arena[start : start + GROUP], now)
            return
        bits = None
        if h.kind == Kind.LOST:
            start = int(batch.offsets[index]) + HEADER_BYTES
            bits = batch.arena[start : start + LOST_BODY_BYTES]
        self._handlers[Kind(h.kind)](state, child, link, h, bits, now)

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
        wanted = wanted[wanted < state.shard.count]
        slots = state.slot0 + wanted
        # most of a group that is asked for again and again may not be known here either: that must cost next to nothing
        holds = State.RESULT if child >= 0 else State.SENT
        sent = (self.memory.round[slots] == state.round) & (self.memory.state[slots] >= holds)
        before = link.believed_before(now, self.timing.retransmit_max)
        wanted = self._sent_to(state, child, h.gradient, wanted[sent], before)
        lost = 0
        for fragment in wanted.tolist():
            # long before it is looked at: a window may be full of what has been asked for often
            if not self._is_coming(state, link, fragment, before):
                lost += self._send_again(state, child, link, fragment, now)
        link.written_off(lost, now)

    def _sent_to(
        self, state: ShardState, child: int, group: int, wanted: NDArray[np.int64], before: float
    ) -> NDArray[np.int64]:
        """Those fragments of a group that had left for a neighbour ``before`` a time: it may look before all have come."""
        sender = state.down.get(child) if child >= 0 else state.up
        if sender is None or not len(wanted):
            return wanted
        shard = self.memory.shards[state.row]
        if child >= 0:
            log, logged = self.memory.down_log, int(shard[ShardColumn.DOWN_LOGGED])
        else:
            log, logged = self.memory.up_log, int(shard[ShardColumn.UP_LOGGED])
        ahead = log[state.slot0 + sender.sent_before(before) : state.slot0 + logged]
        return wanted[~np.isin(wanted, ahead[ahead // GROUP == group])] if len(ahead) else wanted

    def _send_again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        """Repeat a fragment, if this node has something to send for it; True if it will leave by the link once more."""
        slot = state.slot0 + fragment
        memory = self.memory
        verdict = slotwork.mend(self._tables, state.row, fragment)
        self.counts[Count.CORRUPT_SLOTS] += verdict != 0
        holds_result = memory.state[slot] == State.RESULT
        if verdict == 2:
            self._heal(state, fragment, now)
        elif holds_result and child < 0:
            # a parent that lost its memory adopts what its children know already (root restart), as far as its window allows:
            # it asks for the rest again, and may have it from another child by then
            if not link.room:
                return False
            link.repeated[state.row, fragment] = now
            link.sent(1, now)
            self._outbox.send_row(
                link.endpoint,
                Kind.RESULT,
                tables=self._tables,
                row=state.row,
                fragment=fragment,
                host=link.bit,
            )
        elif holds_result or child < 0:
            return self._again(state, child, link, fragment, now)
        return False

    def _heal(self, state: ShardState, fragment: int, now: float) -> None:
        """A row was damaged in this node's memory: get its content again from where it came from (linear checksum)."""
        slot = state.slot0 + fragment
        if state.tree.up is None:
            attempt = int(self.memory.attempt[slot]) + 1
            self._restart(state, np.array([fragment]), np.array([attempt]), np.array([0]), now)
        elif self.memory.state[slot] == State.RESULT:
            self.memory.state[slot] = State.SENT
            if state.from_parent is not None:
                state.from_parent.reopen(fragment // GROUP, now)
                self._wake(now)
        elif state.collective is not None:
            if not self.memory.logged[slot] & LOGGED_DOWN:
                self._encode(state, np.array([fragment]), now)
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
            active = int(self.memory.shards[state.row, ShardColumn.ACTIVE])
            if h.round == active and self._is_committed(state):
                # said again, because it was asked for while it was on its way
                return
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
                missing = slotwork.missing_from_child(self._tables, state.row, child, group, self._bits)
                if missing or group == 0:
                    self._say(state, link, Kind.LOST, down=False, gradient=group, bits=self._bits)
            return
        if is_newer(h.round, active) and not self._is_committed(state):
            # asking for a later round confirms the one that is running (confirmed rounds)
            sender = state.down.get(child)
            if sender is not None and not sender.done:
                sender.done = True
                self._confirm(state, now)
            # a root that commits by this tells all children, the one that asks among them
            if not self._is_committed(state) and state.confirmed and state.tree.up is not None:
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
            if h.round != state.over:
                self._drop(Drop.STALE_ROUND)
            # else said again, because it was asked for while it was on its way
            return
        if h.round != active:
            self.memory.shards[state.row, ShardColumn.ACTIVE] = h.round
        elif self._is_committed(state):
            return
        self._close(state, now, failed=bool(h.word0))

    def _on_restart(self, state: ShardState, h: Header, body: NDArray[np.uint8], now: float) -> None:
        """The root wants fragments of a group again, as a later attempt and with other exponents."""
        if not self._is_running(state, h.round):
            self._drop(Drop.NOT_OPEN if self._is_ahead(state, h.round) else Drop.STALE_ROUND)
            return
        fragments = np.flatnonzero(body) + h.gradient * GROUP
        if not len(fragments) or fragments[-1] >= state.shard.count:
            self._drop(Drop.BAD_FRAGMENT)
            return
        slots = state.slot0 + fragments
        ours = self.memory.round[slots] == state.round
        newer = (h.attempt - np.where(ours, self.memory.attempt[slots], 0)) & 0xFF
        later = (newer != 0) & (newer < 0x80)
        if not later.any():
            self._drop(Drop.STALE_ATTEMPT)
            return
        results = ours & (self.memory.state[slots] == State.RESULT)
        for fragment in fragments[later & results].tolist():
            assert state.tree.up is not None
            self._send_again(state, -1, state.tree.up, fragment, now)
        if state.collective is not None:
            # a result that is being mended has overwritten this host's contribution
            later &= ~(ours & (self.memory.logged[slots] & LOGGED_DOWN != 0))
        later &= ~results
        if later.any():
            again = fragments[later]
            exponents = (
                np.zeros(len(again), np.int64)
                if h.same
                else body[again - h.gradient * GROUP].astype(np.int64)
            )
            self._restart(state, again, np.full(len(again), h.attempt), exponents, now)

    # ---------------------------------------------------------------- credit

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

    def _return_credit(self, now: float) -> None:
        """Tell neighbours what was taken from them, as soon as it is worth a packet or has waited for long enough."""
        for job in self._jobs.values():
            for tree in job.trees.values():
                taken = self.memory.taken[tree.row].tolist()
                for index, link in tree.down.items():
                    if taken[index] != link.reported:
                        self._credit(job, tree, link, taken[index], now, down=False)
                if tree.up is not None and taken[32] != tree.up.reported:
                    self._credit(job, tree, tree.up, taken[32], now, down=True)

    def _credit(self, job: Job, tree: Tree, link: Link, taken: int, now: float, *, down: bool) -> None:
        """Credit for one neighbour. One whose window losses have shrunk below the quota would wait for ever without delay."""
        owed = taken - link.reported
        if owed < link.quota:
            if owed <= 0:
                return
            if link.credit_due is None:
                link.credit_due = now + self.timing.reorder
            if link.credit_due > now:
                self._wake(link.credit_due)
                return
        link.credit_due = None
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
