"""What neighbours say and what time brings: reports of the slots, control packets, restarts (exponent agreement), repetitions
and mending (linear checksum); checks of groups, repetitions of what was not answered, silent peers.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import PeerSilent
from inanet.proto.tree.engine import Count, Event
from inanet.proto.tree.groups import Groups
from inanet.proto.tree.links import Links
from inanet.proto.tree.membership import ShardState
from inanet.proto.tree.reliability import Link, Receiver, Sender
from inanet.proto.tree.rounds import Rounds
from inanet.proto.tree.slots import LOGGED_DOWN, ShardColumn, State, TreeColumn
from inanet.proto.tree.state import NodeState
from inanet.proto.tree.xagg import slotwork
from inanet.proto.tree.xagg.control import Header, read_header
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop
from inanet.wire.serial import is_newer
from inanet.wire.xagg import GROUP, HEADER_BYTES, LOST_BODY_BYTES, Kind


class Control:
    """Both halves of every hop, in both directions."""

    def __init__(self, state: NodeState, rounds: Rounds, links: Links, groups: Groups) -> None:
        self._node = state
        self._slots = state.slots
        self._rounds = rounds
        self._links = links
        self._groups = groups
        self._bits: NDArray[np.uint8] = np.zeros(LOST_BODY_BYTES, np.uint8)
        self._handlers = {
            Kind.SENT: self._on_sent,
            Kind.LOST: self._on_lost,
            Kind.DONE: self._on_done,
            Kind.READY: self._on_ready,
            Kind.OPEN: self._on_open,
        }

    def report(self, code: int, row: int, a: int, b: int, now: float) -> None:
        """One report of the slots about a shard; see :class:`~inanet.proto.tree.engine.Event` for a and b."""
        state = self._node.by_row.get(row)
        if state is None or (state.round is None and code != Event.OPENED):
            # reported late, by another data path
            return
        if code == Event.OPENED:
            self._rounds.start(state, a)
            if a in state.dead:
                self._rounds.close(state, now, failed=True)
        elif code == Event.GROUP_END:
            receiver = state.from_parent if a < 0 else state.from_children.get(a)
            if receiver is not None:
                self._group_ended(state, receiver, a, b, now)
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
            self.misfits(state, np.array([a]), np.array([b]), now)
        elif code == Event.AMNESIA:
            with self._slots.exclusive():
                self._on_amnesia(state, a, b, now)
        elif code == Event.REFUSED:
            self._links.refuse(row, a, b)
        elif code == Event.CORRUPT_SLOT:
            for receiver in state.from_children.values():
                receiver.reopen(a // GROUP, now)
            self._node.wake(now)

    def _group_ended(self, state: ShardState, receiver: Receiver, child: int, end: int, now: float) -> None:
        """The last fragment of a group has come; where nothing was overtaken, the group is complete already."""
        group = end if end >= 0 else -1 - end
        if not self._missing(state, child, group):
            receiver.checked(group, 0, now)
        receiver.group_ended(group, now, prodded=end < 0)
        if receiver.final or receiver.next_due is not None:
            self._node.wake(now + self._node.timing.reorder)

    def _missing(self, state: ShardState, child: int, group: int) -> int:
        """How many fragments of a group lack, from a child or (-1) from the parent; they are in ``_bits``."""
        if child < 0:
            return int(slotwork.missing_results(self._slots.tables, state.row, group, self._bits))
        return int(slotwork.missing_from_child(self._slots.tables, state.row, child, group, self._bits))

    def misfits(
        self, state: ShardState, fragments: NDArray[np.int64], exponents: NDArray[np.int64], now: float
    ) -> None:
        """A root starts fragments again, unless a later packet of the batch has settled the matter."""
        memory = self._node.memory
        with self._slots.exclusive():
            slots = state.slot0 + fragments
            touched = memory.round[slots] == state.round
            whole = touched & (memory.state[slots] == State.RESULT)
            if not state.committed and not whole.all():
                attempts = np.where(touched, memory.attempt[slots], 0) + 1
                self._restart(state, fragments[~whole], attempts[~whole], exponents[~whole], now)

    def _on_amnesia(self, state: ShardState, fragment: int, known: int, now: float) -> None:
        """A root has forgotten an attempt: whoever took part in it knows its exponent, all others will propose one."""
        memory, slot = self._node.memory, state.slot0 + fragment
        touched = memory.round[slot] == state.round
        if state.committed or (touched and memory.state[slot] == State.RESULT):
            return
        if is_newer(known, int(memory.attempt[slot]) if touched else 0, bits=8):
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
        memory, timing = self._node.memory, self._node.timing
        slots = state.slot0 + fragments
        before = np.where(memory.round[slots] == state.round, memory.attempt[slots], 0)
        announced = exponents.astype(np.uint8)
        self._slots.restart(state.row, fragments, (attempts & 0xFF).astype(np.uint8), announced)
        for group in np.unique(fragments // GROUP).tolist():
            for index, link in state.tree.down.items():
                self._node.send_restarts(state, link, group, now)
                taken = int(memory.taken[state.tree.row, index])
                state.from_children[index].restart(group, taken, now)
        if state.tree.down:
            self._node.wake(now + timing.retransmit)
        if state.collective is not None:
            follows = (before + 1 - attempts) & 0xFF == 0
            state.collective.restart(state.shard, fragments, announced, follows)
            encoded = fragments[fragments < state.encoded]
            if len(encoded):
                self._links.encode(state, encoded)

    # ---------------------------------------------------------------- control packets

    def packet(self, batch: PacketBatch, index: int, now: float) -> None:
        """One control packet: find whom it concerns, refuse it by name, or hand it to its handler."""
        h = read_header(batch.arena[: len(batch.arena) & ~3].view(np.int32), int(batch.offsets[index]))
        job = self._node.jobs[h.job]
        source = int(batch.sources[index])
        if h.kind == Kind.PROBE:
            self._groups.on_probe(job.trees.get(h.word0), h, source, now)
            return
        state = job.shards.get(h.shard)
        if state is None:
            self._node.drop(Drop.UNKNOWN_SHARD)
            return
        # CREDIT and PROBE apart, SENT and READY travel with their data, LOST, DONE and OPEN against it
        from_child = h.kind == Kind.READY or (h.kind in (Kind.LOST, Kind.DONE)) == h.down
        if h.kind in (Kind.OPEN, Kind.RESTART):
            from_child = False
        child = h.host.bit_length() - 1 if from_child else -1
        link = state.tree.down.get(child) if from_child else state.tree.up
        if link is None or link.endpoint != source or (link.bit != h.host and h.kind != Kind.RESTART):
            retired = from_child and int(self._node.memory.trees[state.tree.row, TreeColumn.RETIRED]) & h.host
            self._node.drop(Drop.STALE_PLAN if retired else Drop.FOREIGN_HOST)
            return
        if h.kind == Kind.RESTART:
            start = int(batch.offsets[index]) + HEADER_BYTES
            with self._slots.exclusive():
                self._on_restart(state, h, batch.arena[start : start + GROUP], now)
            return
        bits = None
        if h.kind == Kind.LOST:
            start = int(batch.offsets[index]) + HEADER_BYTES
            bits = batch.arena[start : start + LOST_BODY_BYTES]
        self._handlers[Kind(h.kind)](state, child, link, h, bits, now)

    def _on_sent(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        """The neighbour has sent everything of a round: look at every group, or say DONE (again).

        Exponents may wait for what this node sends: then SENT counts those that have left (paused senders).
        """
        ahead = state.round is None or is_newer(h.round, state.round)
        if ahead and (child < 0 or not self._rounds.open_for(state, h.round)):
            stale = state.is_over(h.round)
            if stale and child < 0:
                # these slots were made after that round: nothing below can lack a result of it
                self._node.send(state, link, Kind.DONE, down=True, round_=h.round)
                return
            self._node.drop(Drop.STALE_ROUND if stale else Drop.NOT_OPEN)
            return
        receiver = state.from_children.get(child) if child >= 0 else state.from_parent
        over = h.round != state.round or receiver is None
        if over or (receiver is not None and (state.confirmed if child < 0 else receiver.done)):
            self._node.send(state, link, Kind.DONE, down=child < 0, round_=h.round)
            return
        assert receiver is not None
        if 0 < h.word0 < state.shard.count:
            receiver.pause(h.word0, now)
        else:
            receiver.close(now)
        self._node.wake(now + self._node.timing.reorder)

    def _on_lost(self, state: ShardState, child: int, link: Link, h: Header, bits: Any, now: float) -> None:
        """The neighbour lacks fragments: send again those that have been sent before, the others will come."""
        if not state.is_running(h.round):
            self._node.drop(Drop.NOT_OPEN if state.is_ahead(h.round) else Drop.STALE_ROUND)
            return
        if h.gradient >= -(-state.shard.count // GROUP):
            self._node.drop(Drop.BAD_FRAGMENT)
            return
        if child < 0 and state.up is not None:
            state.up.attach_due = state.up.asking_since = None
        wanted = np.flatnonzero(np.unpackbits(bits, bitorder="little")) + h.gradient * GROUP
        wanted = wanted[wanted < state.shard.count]
        slots = state.slot0 + wanted
        # most of a group that is asked for again and again may not be known here either: that must cost next to nothing
        holds = State.RESULT if child >= 0 else State.SENT
        sent = (self._node.memory.round[slots] == state.round) & (self._node.memory.state[slots] >= holds)
        seen = self._links.newest_seen(state, child, h.gradient, wanted) - self._node.timing.reorder
        before = link.believed_before(now, self._node.timing.retransmit_max, seen)
        wanted = self._links.sent_to(state, child, h.gradient, wanted[sent], before)
        lost = 0
        for fragment in wanted.tolist():
            # long before it is looked at: a window may be full of what has been asked for often
            if not self._groups.is_coming(state, link, fragment, before):
                lost += self._send_again(state, child, link, fragment, now)
        link.written_off(lost, now)
        if child < 0:
            self._slots.lost(state, h.gradient, bits)

    def _send_again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        """Repeat a fragment, if this node has something to send for it; True if it will leave by the link once more."""
        slot = state.slot0 + fragment
        memory = self._node.memory
        verdict = self._slots.mend(state.row, fragment, up=child < 0)
        self._slots.counts[Count.CORRUPT_SLOTS] += verdict != 0
        holds_result = memory.state[slot] == State.RESULT
        if verdict == 2:
            with self._slots.exclusive():
                self._heal(state, fragment, now)
        elif holds_result and child < 0:
            # a parent that lost its memory adopts what its children know already (root restart), as far as its window allows:
            # it asks for the rest again, and may have it from another child by then
            if not link.room:
                return False
            link.repeated[state.row, fragment] = now
            link.sent(1, now)
            self._node.outbox.send_row(
                link.endpoint,
                Kind.RESULT,
                tables=self._slots.tables,
                row=state.row,
                fragment=fragment,
                host=link.bit,
            )
        elif holds_result or child < 0:
            return self._groups.again(state, child, link, fragment, now)
        return False

    def _heal(self, state: ShardState, fragment: int, now: float) -> None:
        """A row was damaged in this node's memory: get its content again from where it came from (linear checksum)."""
        slot = state.slot0 + fragment
        if state.tree.up is None:
            attempt = int(self._node.memory.attempt[slot]) + 1
            self._restart(state, np.array([fragment]), np.array([attempt]), np.array([0]), now)
        elif self._node.memory.state[slot] == State.RESULT:
            self._node.memory.state[slot] = State.SENT
            if state.from_parent is not None:
                state.from_parent.reopen(fragment // GROUP, now)
                self._node.wake(now)
        elif state.collective is not None:
            if not self._node.memory.logged[slot] & LOGGED_DOWN:
                self._links.encode(state, np.array([fragment]))
            # else the result has overwritten this host's contribution: it comes from the parent or not at all
        else:
            self._node.memory.bitmap[slot] = 0
            self._node.memory.state[slot] = State.COLLECT
            self._node.memory.rows[slot, 0] = 0
            for receiver in state.from_children.values():
                receiver.reopen(fragment // GROUP, now)
            self._node.wake(now)

    def _on_done(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        sender = state.down.get(child) if child >= 0 else state.up
        if h.round != state.round or sender is None:
            active = state.active
            if h.round == active and state.committed:
                # said again, because it was asked for while it was on its way
                return
            self._node.drop(Drop.NOT_OPEN if state.is_ahead(h.round) else Drop.STALE_ROUND)
            return
        sender.done = True
        sender.sent_due = sender.asking_since = sender.attach_due = None
        self._rounds.confirm(state, now)

    def _on_ready(self, state: ShardState, child: int, link: Link, h: Header, _: Any, now: float) -> None:
        """A child wants to send a round, or has come to this parent in the middle of one."""
        active = state.active
        if (
            h.word0
            and (h.round == active or is_newer(h.round, active))
            and not (h.round == active and state.committed)
        ):
            if h.round != active and not self._rounds.open_for(state, h.round):
                return
            for group in range(-(-state.shard.count // GROUP)):
                missing = slotwork.missing_from_child(self._slots.tables, state.row, child, group, self._bits)
                if missing or group == 0:
                    self._node.send(state, link, Kind.LOST, down=False, gradient=group, bits=self._bits)
            return
        if is_newer(h.round, active) and not state.committed:
            # asking for a later round confirms the one that is running (confirmed rounds)
            sender = state.down.get(child)
            if sender is not None and not sender.done:
                sender.done = True
                self._rounds.confirm(state, now)
            # a root that commits by this tells all children, the one that asks among them
            if not state.committed and state.confirmed and state.tree.up is not None:
                # everything below is done: the OPEN of the parent was lost, or is still to come
                self._node.send(state, state.tree.up, Kind.READY, down=False, round_=h.round)
            return
        # the child may be in a round that has not reached this node: name none that can still be going on. Before a round
        # that is open here all are over, even if this node has forgotten them
        over = state.over if state.committed else (active - 1) & 0xFFFFFFFF
        self._node.send(state, link, Kind.OPEN, down=True, round_=over, word0=int(state.over_failed))

    def _on_open(self, state: ShardState, _child: int, _link: Link, h: Header, _: Any, now: float) -> None:
        """A round is over at the parent: so it is in this subtree."""
        active = state.active
        if is_newer(active, h.round):
            if h.round != state.over:
                self._node.drop(Drop.STALE_ROUND)
            # else said again, because it was asked for while it was on its way
            return
        if h.round == active and state.committed:
            return
        with self._slots.exclusive():
            self._node.memory.shards[state.row, ShardColumn.ACTIVE] = h.round
            self._rounds.close(state, now, failed=bool(h.word0))

    def _on_restart(self, state: ShardState, h: Header, body: NDArray[np.uint8], now: float) -> None:
        """The root wants fragments of a group again, as a later attempt and with other exponents."""
        memory = self._node.memory
        if not state.is_running(h.round):
            self._node.drop(Drop.NOT_OPEN if state.is_ahead(h.round) else Drop.STALE_ROUND)
            return
        fragments = np.flatnonzero(body) + h.gradient * GROUP
        if not len(fragments) or fragments[-1] >= state.shard.count:
            self._node.drop(Drop.BAD_FRAGMENT)
            return
        slots = state.slot0 + fragments
        ours = memory.round[slots] == state.round
        newer = (h.attempt - np.where(ours, memory.attempt[slots], 0)) & 0xFF
        later = (newer != 0) & (newer < 0x80)
        if not later.any():
            self._node.drop(Drop.STALE_ATTEMPT)
            return
        results = ours & (memory.state[slots] == State.RESULT)
        for fragment in fragments[later & results].tolist():
            assert state.tree.up is not None
            self._send_again(state, -1, state.tree.up, fragment, now)
        if state.collective is not None:
            # a result that is being mended has overwritten this host's contribution
            later &= ~(ours & (memory.logged[slots] & LOGGED_DOWN != 0))
        later &= ~results
        if later.any():
            again = fragments[later]
            exponents = (
                np.zeros(len(again), np.int64)
                if h.same
                else body[again - h.gradient * GROUP].astype(np.int64)
            )
            self._restart(state, again, np.full(len(again), h.attempt), exponents, now)

    # ---------------------------------------------------------------- what time brings

    def on_timer(self, now: float) -> None:
        """Look at groups that are due, repeat what was not answered, notice who is silent."""
        self._node.next_timer = None
        for state in list(self._node.by_row.values()):
            self._ready_timer(state, now)
            if state.round is None or state.committed:
                continue
            for index, receiver in list(state.from_children.items()):
                self._check(state, index, receiver, now)
            if state.from_parent is not None:
                self._check(state, -1, state.from_parent, now)
            for sender in ([state.up] if state.up else []) + list(state.down.values()):
                self._sender_timer(state, sender, now)
        for tree in self._node.trees():
            self._groups.on_timer(tree, now)
            for link in tree.links():
                self._links.look(tree, link, now)

    def _ready_timer(self, state: ShardState, now: float) -> None:
        if state.ready_due is None or not state.waiting or state.tree.up is None:
            return
        if not state.confirmed and not state.committed:
            # asking for a later round says that everything of this one is here (confirmed rounds)
            return
        if state.ready_due <= now:
            self._node.send(
                state, state.tree.up, Kind.READY, down=False, round_=state.waiting[0].round & 0xFFFFFFFF
            )
            state.ready_due = now + state.ready_interval
            state.ready_interval = min(state.ready_interval * 2, self._node.timing.retransmit_max)
        self._node.wake(state.ready_due)

    def _check(self, state: ShardState, child: int, receiver: Receiver, now: float) -> None:
        """The paper's Check Queue: compare due groups with the slots, ask for what is missing."""
        link = state.tree.up if child < 0 else state.tree.down.get(child)
        if link is None:
            return
        taken = int(self._node.memory.taken[state.tree.row, child])
        for group in receiver.due(now):
            if receiver.is_patient(group, taken, now):
                continue
            missing = self._missing(state, child, group)
            receiver.checked(group, missing, now)
            if missing:
                if child >= 0:
                    self._repeat_restarts(state, link, group, now)
                self._links.tell(state.tree, link)
                self._node.send(state, link, Kind.LOST, down=child < 0, gradient=group, bits=self._bits)
        if receiver.look_due is not None and receiver.look_due <= now:
            self._look(state, child, receiver, link, now)
        if receiver.complete and not receiver.done and child >= 0:
            receiver.done = True
            self._node.send(state, link, Kind.DONE, down=False)
        if receiver.next_due is not None:
            self._node.wake(receiver.next_due)

    def _look(self, state: ShardState, child: int, receiver: Receiver, link: Link, now: float) -> None:
        """The sender has paused (paused senders): ask for what has left and has not come, or tell it that nothing is lost."""
        missing = [self._missing(state, child, group) for group in range(receiver.groups)]
        if not receiver.looked(state.shard.count - sum(missing), now):
            if receiver.asked:
                receiver.asked = False
                self._bits[:] = 0
                self._node.send(state, link, Kind.LOST, down=child < 0, bits=self._bits)
            return
        self._links.tell(state.tree, link)
        for group in np.flatnonzero(missing).tolist():
            self._missing(state, child, group)
            self._node.send(state, link, Kind.LOST, down=child < 0, gradient=group, bits=self._bits)

    def _repeat_restarts(self, state: ShardState, link: Link, group: int, now: float) -> None:
        """A missing fragment of a later attempt may be missing because the child never heard of the restart.

        Or it has not had the time to answer: no window bounds what is said again too soon.
        """
        before = now - 2 * link.patience(self._node.timing)
        if link.restarted.get((state.row, group), -math.inf) <= before:
            size = min(GROUP, state.shard.count - group * GROUP)
            wanted = np.unpackbits(self._bits, bitorder="little")[:size] != 0
            self._node.send_restarts(state, link, group, now, wanted)

    def _is_crossing(self, state: ShardState, sender: Sender, now: float) -> bool:
        """Whether the last exponents before a pause may still be on their way: the receiver has no reason to miss them."""
        if sender.cursor == state.shard.count:
            return False
        link = sender.link
        left = link.sent_at(state.row, sender.cursor - 1)
        return link.overtaken_since < left and now < left + link.patience(self._node.timing)

    def _sender_timer(self, state: ShardState, sender: Sender, now: float) -> None:
        if sender.attach_due is not None:
            if sender.attach_due <= now:
                self._node.send(state, sender.link, Kind.READY, down=False, word0=1)
                # every one is answered with all that lacks, and a parent that lags may have many to answer
                sender.interval = min(
                    2 * sender.interval or self._node.timing.retransmit, self._node.timing.retransmit_max
                )
                sender.attach_due = now + sender.interval
            self._node.wake(sender.attach_due)
        if sender.sent_due is None or sender.done:
            return
        down = sender is not state.up
        if sender.sent_due <= now and sender.asking_since is None and self._is_crossing(state, sender, now):
            sender.sent_due = now + self._node.timing.retransmit / 2
        elif sender.sent_due <= now:
            if sender.asking_since is None:
                sender.asking_since = now
            self._node.send(state, sender.link, Kind.SENT, down=down, word0=sender.cursor)
            sender.sent_due = now + sender.interval
            sender.interval = min(sender.interval * 2, self._node.timing.retransmit_max)
            if not down and now - max(sender.asking_since, sender.told) > self._node.timing.silent:
                waited = now - sender.asking_since
                self._node.events.append(PeerSilent(state.job.job, sender.link.name, waited))
                sender.told = now
        self._node.wake(sender.sent_due)
