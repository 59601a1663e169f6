"""Results by multicast: one cursor through the emission log for all children that hear a group.

The group's cursor is never behind that of its slowest member. A member further back, because it was served by unicast
for a while, catches up by unicast and then follows the group; one further ahead lets the group come.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.multicast import PATIENCE, Multicast
from inanet.proto.tree.reliability import Link, Sender
from inanet.proto.tree.sending import BURST, Sending
from inanet.proto.tree.slots import ROW_BYTES, ShardColumn, State
from inanet.proto.tree.xagg import slotwork
from inanet.proto.tree.xagg.control import Header
from inanet.wire.batch import Transmission
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind


class Downlink(Sending):
    """What concerns several children at once."""

    def _burst(self, tree: Tree, link: Link, now: float) -> Transmission | None:
        """As below, and for a multicast group, whose link has no bit."""
        if link.bit:
            if link.grouped and not link.resend and not self._is_behind(tree, link):
                return None
            return super()._burst(tree, link, now)
        group = tree.multicast
        if group is None or group.link is not link or not group.grouped:
            return None
        # what one member alone lacks goes before what is new to all, as on any link, or the slowest would get it last
        most = min(BURST, *(member.room - len(member.resend) for member in group.grouped))
        if most <= 0:
            # what was to be repaired may be void by now: then nothing leaves, and the group has to be looked at again
            self._stirred |= all(member.room for member in group.grouped)
            self._see_stall(tree, group, now)
            return None
        while link.resend:
            entries = link.take_resend(most, now)
            slots = np.array([self._by_row[row].slot0 + fragment for row, fragment in entries], np.int64)
            burst = self._to_group(group, slots[self.memory.state[slots] == State.RESULT] * ROW_BYTES, now)
            if burst is not None:
                self.repairs_multicast += len(burst)
                self._retransmissions += len(burst)
                return burst
        for state in tree.lineup():
            burst = self._results(state, group, most, now)
            if burst is not None:
                self.results_multicast += len(burst)
                return burst
        return None

    @staticmethod
    def _is_behind(tree: Tree, link: Link) -> bool:
        """Whether a member of the group lacks what the group was sent before it listened; all else comes with the group."""
        index = link.bit.bit_length() - 1
        return any(
            index in state.down and state.down[index].cursor < state.group_cursor for state in tree.lineup()
        )

    @staticmethod
    def _members(state: ShardState) -> list[Sender]:
        """Senders of the group's members in one shard; sets the group's cursor to where it can go on."""
        senders = [sender for sender in state.down.values() if sender.link.grouped]
        slowest = min((sender.cursor for sender in senders), default=0)
        state.group_cursor = max(state.group_cursor, slowest)
        return senders

    def _results(self, state: ShardState, group: Multicast, most: int, now: float) -> Transmission | None:
        """The next results of one shard for the group."""
        senders = self._members(state)
        logged = int(self.memory.shards[state.row, ShardColumn.DOWN_LOGGED])
        burst = None
        while burst is None and state.group_cursor < logged:
            start = state.group_cursor
            stop = min(start + most, logged)
            offsets = np.empty(stop - start, np.int64)
            found = slotwork.logged_rows(self._tables, state.row, start, stop, False, offsets)
            state.group_cursor = stop
            for sender in senders:
                if start <= sender.cursor < stop:
                    sender.advance(stop, now)
                    sender.sent_due = None
            burst = self._to_group(group, offsets[:found], now)
        for sender in senders:
            self._see_end(state, sender, now)
        return burst

    def _to_group(self, group: Multicast, offsets: NDArray[np.int64], now: float) -> Transmission | None:
        """Rows for everybody in the group, at everybody's expense."""
        count = len(offsets)
        if count == 0:
            return None
        for link in group.grouped:
            link.sent(count, now)
            link.last = int(offsets[-1]) // ROW_BYTES
        group.sent += count
        self.rows_sent += count
        return Transmission(group.link.endpoint, self.memory.bytes, offsets, ROW_BYTES)

    def _see_stall(self, tree: Tree, group: Multicast, now: float) -> None:
        """The group waits for credit. Who has returned none for too long is not waited for."""
        waits = bool(group.link.resend)
        for state in tree.lineup():
            self._members(state)
            waits |= state.group_cursor < int(self.memory.shards[state.row, ShardColumn.DOWN_LOGGED])
        if not waits:
            return
        full = [link for link in group.grouped if link.room == 0]
        for link in full:
            if link.prod_due(self.timing) <= now:
                # it may have lost no more than the end of what was sent
                self._prod(tree, link, now)
        ends = {link.bit: link.waiting_since + PATIENCE * link.patience(self.timing) for link in full}
        stalled = sum(bit for bit, end in ends.items() if end <= now)
        if stalled:
            group.exclude(stalled, now, self.timing)
            self._stirred = True
            self._wake(now)
        for link in full:
            if not link.bit & stalled:
                self._wake(min(ends[link.bit], link.prod_due(self.timing)))

    # ---------------------------------------------------------------- repetitions

    @staticmethod
    def _is_coming(state: ShardState, link: Link, fragment: int, before: float) -> bool:
        """Whether a fragment that a neighbour lacks waits to leave for it once more, or has done so after ``before``.

        Who asks again meanwhile does not know of it, and must not have it twice.
        """
        if link.is_coming(state.row, fragment, before):
            return True
        group = state.tree.multicast
        return link.grouped and group is not None and group.link.is_coming(state.row, fragment, before)

    def _again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        """Repeat a fragment for a neighbour that lacks it; in a group, others may ask for it within a moment."""
        group = state.tree.multicast
        if child < 0 or group is None or not link.grouped:
            return link.again(state.row, fragment)
        if group.asked_due is None:
            group.asked_due = now + self.timing.reorder
            self._wake(group.asked_due)
        return group.ask(state.row, fragment, link.bit)

    # ---------------------------------------------------------------- probes

    def _multicast_timer(self, tree: Tree, now: float) -> None:
        group = tree.multicast
        if group is None:
            return
        if group.asked_due is not None:
            if group.asked_due <= now:
                group.decide(now, self.timing)
            else:
                self._wake(group.asked_due)
        if group.probe(now, self.timing):
            self._probe(tree.job, tree, group.link, group.probes, down=True)
        if group.probe_due is not None:
            self._wake(group.probe_due)

    def _probe(self, job: Job, tree: Tree, link: Link, count: int, *, down: bool) -> None:
        plan = job.plan
        self._outbox.send(
            link.endpoint,
            Kind.PROBE,
            job=plan.job,
            key=plan.key,
            version=plan.version,
            host=link.bit,
            gradient=count,
            down=down,
            word0=tree.tree,
        )

    def _on_probe(self, job: Job, h: Header, source: int, now: float) -> None:
        """A parent asks its group who hears it, or a child answers."""
        tree = job.trees.get(h.word0)
        link = None
        if tree is not None:
            link = tree.up if h.down else tree.down.get(h.host.bit_length() - 1)
        if tree is None or link is None or link.endpoint != source or h.host != (0 if h.down else link.bit):
            self._drop(Drop.FOREIGN_HOST)
        elif h.down:
            self._probe(job, tree, link, h.gradient, down=False)
        elif tree.multicast is None or not tree.multicast.answered(h.host.bit_length() - 1, h.gradient, now):
            self._drop(Drop.DUPLICATE)
