"""What time brings: checks of groups, repetitions of what was not answered, links that start afresh, silent peers."""

import math

import numpy as np

from inanet.proto.common.events import PeerSilent
from inanet.proto.tree.hops import Hops
from inanet.proto.tree.membership import ShardState, Tree
from inanet.proto.tree.reliability import Link, Receiver, Sender
from inanet.proto.tree.xagg import slotwork
from inanet.wire.xagg import GROUP, Kind


class Upkeep(Hops):
    """Timers; all of them are found anew at every call, so that none can be forgotten."""

    def on_timer(self, now: float) -> None:
        """Look at groups that are due, repeat what was not answered, notice who is silent."""
        self._next_timer = None
        self._told = now
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
                self._multicast_timer(tree, now)
                for link in tree.links():
                    self._link_timer(tree, link, now)
        self._return_credit(now)

    def _ready_timer(self, state: ShardState, now: float) -> None:
        if state.ready_due is None or not state.waiting or state.tree.up is None:
            return
        if not state.confirmed and not self._is_committed(state):
            # asking for a later round says that everything of this one is here (confirmed rounds)
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
                missing = slotwork.missing_results(self._tables, state.row, group, self._bits)
            else:
                missing = slotwork.missing_from_child(self._tables, state.row, child, group, self._bits)
            receiver.checked(group, missing, now)
            if missing:
                if child >= 0:
                    self._repeat_restarts(state, link, group, now)
                self._say(state, link, Kind.LOST, down=child < 0, gradient=group, bits=self._bits)
        if receiver.complete and not receiver.done and child >= 0:
            receiver.done = True
            self._say(state, link, Kind.DONE, down=False)
        if receiver.next_due is not None:
            self._wake(receiver.next_due)

    def _repeat_restarts(self, state: ShardState, link: Link, group: int, now: float) -> None:
        """A missing fragment of a later attempt may be missing because the child never heard of the restart.

        Or it has not had the time to answer: no window bounds what is said again too soon.
        """
        before = now - 2 * link.patience(self.timing)
        if link.restarted.get((state.row, group), -math.inf) <= before:
            size = min(GROUP, state.shard.count - group * GROUP)
            wanted = np.unpackbits(self._bits, bitorder="little")[:size] != 0
            self._send_restarts(state, link, group, now, wanted)

    def _sender_timer(self, state: ShardState, sender: Sender, now: float) -> None:
        if sender.attach_due is not None:
            if sender.attach_due <= now:
                self._say(state, sender.link, Kind.READY, down=False, word0=1)
                # every one is answered with all that lacks, and a parent that lags may have many to answer
                sender.interval = min(
                    2 * sender.interval or self.timing.retransmit, self.timing.retransmit_max
                )
                sender.attach_due = now + sender.interval
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

    def _link_timer(self, tree: Tree, link: Link, now: float) -> None:
        """A window that stays full means that credits or packets were lost: prod the receiver, then start afresh."""
        if not link.in_flight or link.room:
            return
        if now >= link.waiting_since + self.timing.retransmit_max:
            link.give_up(now)
            self._wake(now)
            return
        if not link.grouped and now >= link.prod_due(self.timing):
            self._prod(tree, link, now)
        self._wake(link.wait_ends(self.timing))
