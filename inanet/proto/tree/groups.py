"""Results by multicast: one cursor through the emission log for all children that hear a group (multicast results).

The group's cursor is never behind that of its slowest member. A member further back, because it was served by unicast
for a while, catches up by unicast and then follows the group; one further ahead lets the group come.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree import flow
from inanet.proto.tree.links import Links
from inanet.proto.tree.membership import ShardState, Tree
from inanet.proto.tree.multicast import PATIENCE, Multicast
from inanet.proto.tree.reliability import Link
from inanet.proto.tree.slots import ROW_BYTES, State
from inanet.proto.tree.state import NodeState
from inanet.proto.tree.xagg.control import Header
from inanet.wire.batch import Transmission
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind


class Groups:
    """The multicast groups of all trees, and what is sent to children one by one because of them."""

    def __init__(self, state: NodeState, links: Links) -> None:
        self._node = state
        self._slots = state.slots
        self._links = links

    def burst(self, tree: Tree, link: Link, now: float, *, logs: bool = True) -> Transmission | None:
        """The next packets for one neighbour, or for a group, whose link has no bit; without ``logs``, only what is repeated."""
        if link.bit:
            if link.grouped and not link.resend and not self.is_behind(tree, link):
                return None
            return self._links.burst(tree, link, now, logs=logs)
        group = tree.multicast
        if group is None or group.link is not link or not group.grouped:
            return None
        lineup = tree.lineup()
        # what one member alone lacks goes before what is new to all, as on any link, or the slowest would get it last
        most = flow.group_room(self._slots.flow, tree.row)
        if most <= 0:
            # what was to be repaired may be void by now: then nothing leaves, and the group has to be looked at again
            self._node.dirty |= all(member.room for member in group.grouped)
            self._see_stall(tree, group, lineup, now)
            return None
        while link.resend:
            offsets = self._links.offsets(link.take_resend(most, now), State.RESULT)
            count = len(offsets)
            if count:
                last = int(offsets[-1]) // ROW_BYTES
                flow.sent_to_group(self._slots.flow, tree.row, count, last, True, now)
                self._node.rows_sent += count
                self._node.repairs_multicast += count
                self._node.retransmissions += count
                return self._transmission(link, offsets)
        if not logs:
            return None
        offsets = np.empty(most, np.int64)
        left = self._links.left
        found = flow.next_for_group(
            self._slots.tables, self._slots.flow, tree.row, most, now, offsets, left.rows, left.used
        )
        self._links.see_ends(now)
        if not found:
            for state in lineup:
                for sender in state.down.values():
                    if sender.link.grouped:
                        self._links.see_end(state, sender, now)
            return None
        self._node.rows_sent += found
        self._node.results_multicast += found
        return self._transmission(link, offsets[:found])

    def _transmission(self, link: Link, offsets: NDArray[np.int64]) -> Transmission:
        return Transmission(link.endpoint, self._node.memory.bytes, offsets, ROW_BYTES)

    def is_behind(self, tree: Tree, link: Link) -> bool:
        tree.lineup()
        return bool(flow.is_behind(self._slots.flow, tree.row, link.bit.bit_length() - 1))

    def _see_stall(self, tree: Tree, group: Multicast, lineup: list[ShardState], now: float) -> None:
        """The group waits for credit. Who has returned none for too long is not waited for."""
        waits = bool(group.link.resend)
        for state in lineup:
            waits |= bool(flow.align_group(self._slots.tables, self._slots.flow, tree.row, state.row))
        if not waits:
            return
        timing = self._node.timing
        full = [link for link in group.grouped if link.room == 0]
        for link in full:
            if link.prod_due(timing) <= now:
                # it may have lost no more than the end of what was sent
                self._links.prod(tree, link, now)
        ends = {link.bit: link.waiting_since + PATIENCE * link.patience(timing) for link in full}
        stalled = sum(bit for bit, end in ends.items() if end <= now)
        if stalled:
            group.exclude(stalled, now, timing)
            self._node.dirty = True
            self._node.wake(now)
        for link in full:
            if not link.bit & stalled:
                self._node.wake(min(ends[link.bit], link.prod_due(timing)))

    # ---------------------------------------------------------------- repetitions

    @staticmethod
    def is_coming(state: ShardState, link: Link, fragment: int, before: float) -> bool:
        """Whether a fragment that a neighbour lacks waits to leave for it once more, or has done so after ``before``.

        Who asks again meanwhile does not know of it, and must not have it twice.
        """
        if link.is_coming(state.row, fragment, before):
            return True
        group = state.tree.multicast
        return link.grouped and group is not None and group.link.is_coming(state.row, fragment, before)

    def again(self, state: ShardState, child: int, link: Link, fragment: int, now: float) -> bool:
        """Repeat a fragment for a neighbour that lacks it; in a group, others may ask for it within a moment."""
        group = state.tree.multicast
        if child < 0 or group is None or not link.grouped:
            again = link.again(state.row, fragment)
        else:
            if group.asked_due is None:
                group.asked_due = now + self._node.timing.reorder
                self._node.wake(group.asked_due)
            again = group.ask(state.row, fragment, link.bit)
        if again:
            self._slots.repeated(state, link, fragment)
        return again

    # ---------------------------------------------------------------- probes

    def on_timer(self, tree: Tree, now: float) -> None:
        """Decide how to repeat what was asked for, and ask who hears the group."""
        group = tree.multicast
        if group is None:
            return
        if group.asked_due is not None:
            if group.asked_due <= now:
                group.decide(now, self._node.timing)
            else:
                self._node.wake(group.asked_due)
        if group.probe(now, self._node.timing):
            self._probe(tree, group.link, group.probes, down=True)
        if group.probe_due is not None:
            self._node.wake(group.probe_due)

    def _probe(self, tree: Tree, link: Link, count: int, *, down: bool) -> None:
        plan = tree.job.plan
        self._node.outbox.send(
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

    def on_probe(self, tree: Tree | None, h: Header, source: int, now: float) -> None:
        """A parent asks its group who hears it, or a child answers."""
        link = None
        if tree is not None:
            link = tree.up if h.down else tree.down.get(h.host.bit_length() - 1)
        if tree is None or link is None or link.endpoint != source or h.host != (0 if h.down else link.bit):
            self._node.drop(Drop.FOREIGN_HOST)
        elif h.down:
            self._probe(tree, link, h.gradient, down=False)
        elif tree.multicast is None or not tree.multicast.answered(h.host.bit_length() - 1, h.gradient, now):
            self._node.drop(Drop.DUPLICATE)
