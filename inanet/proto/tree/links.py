"""What leaves by the links of a node: repetitions and the emission logs, as far as windows allow; and credit.

Kernels of :mod:`inanet.proto.tree.flow` choose; this part encodes a host's own contributions just ahead of them, repeats
what was asked for, and looks at links that wait.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree import flow, leaf
from inanet.proto.tree.flow import BURST
from inanet.proto.tree.membership import ShardState, Tree
from inanet.proto.tree.reliability import Link, Sender
from inanet.proto.tree.slot_engine import Reported
from inanet.proto.tree.slots import LINKS, ROW_BYTES, UP_LINK, State
from inanet.proto.tree.state import NodeState
from inanet.proto.tree.xagg import slotwork
from inanet.wire.batch import Transmission
from inanet.wire.xagg import GROUP, Kind


class Links:
    """The links of all trees, those to parents and to single children."""

    def __init__(self, state: NodeState) -> None:
        self._node = state
        self._slots = state.slots
        #: ends of logs that have left, as kernels report them
        self.left = Reported(64 * 32)
        #: what this host holds that is not to be summed
        self._made = Reported(4 * leaf.CHUNK)
        self._withheld: NDArray[np.int64] = np.zeros(LINKS, np.int64)
        self._credits: NDArray[np.int64] = np.zeros((LINKS, 3), np.int64)
        self._soonest: NDArray[np.float64] = np.zeros(1)

    # ---------------------------------------------------------------- what leaves

    def burst(self, tree: Tree, link: Link, now: float, *, logs: bool = True) -> Transmission | None:
        """The next packets for one neighbour: what was asked for again, then the emission logs, oldest round first, if they are
        not sent by somebody else.
        """
        up = link is tree.up
        index = UP_LINK if up else link.bit.bit_length() - 1
        if not up and tree.down.get(index) is not link:
            # replaced while the driver waited for room in a device
            return None
        most = min(link.room, BURST)
        if most == 0:
            if link.in_flight:
                self._node.wake(link.wait_ends(self._node.timing))
            return None
        burst = self._repetitions(link, most, now, up=up)
        if burst is not None or not logs:
            return burst
        lineup = tree.lineup()
        if up:
            self.produce(tree, now)
        offsets = np.empty(most, np.int64)
        found = flow.next_rows(
            self._slots.tables,
            self._slots.flow,
            tree.row,
            index,
            most,
            now,
            offsets,
            self.left.rows,
            self.left.used,
        )
        self.see_ends(now)
        if not found:
            # another data path may have sent the end of a log
            for state in lineup:
                sender = state.up if up else state.down.get(index)
                if sender is not None:
                    self.see_end(state, sender, now)
            return None
        self._node.rows_sent += found
        return Transmission(link.endpoint, self._node.memory.bytes, offsets[:found], ROW_BYTES)

    def _repetitions(self, link: Link, most: int, now: float, *, up: bool) -> Transmission | None:
        while link.resend:
            offsets = self.offsets(link.take_resend(most, now), State.SENT if up else State.RESULT)
            count = len(offsets)
            if count == 0:
                continue
            link.note_burst(-1, 0, now)
            link.sent(count, now)
            link.last = int(offsets[-1]) // ROW_BYTES
            link.retransmissions += count
            self._node.rows_sent += count
            self._node.retransmissions += count
            if not up:
                self._node.repairs_unicast += count
            return Transmission(link.endpoint, self._node.memory.bytes, offsets, ROW_BYTES)
        return None

    def offsets(self, entries: list[tuple[int, int]], whole: State) -> NDArray[np.int64]:
        """Rows of (shard row, fragment) as byte offsets; a slot that was emptied again holds no more than a partial sum."""
        by_row = self._node.by_row
        slots = np.array([by_row[row].slot0 + fragment for row, fragment in entries], np.int64)
        offsets: NDArray[np.int64] = slots[self._node.memory.state[slots] == whole] * ROW_BYTES
        return offsets

    def see_ends(self, now: float) -> None:
        """Rows that end a log, or exponents, have left: when SENT is due."""
        if not self.left.used[0]:
            return
        for _, row, index, _ in self.left.take():
            state = self._node.by_row[row]
            sender = state.up if index == UP_LINK else state.down.get(index)
            if sender is not None:
                sender.sent_due = None
                self.see_end(state, sender, now)

    def see_end(self, state: ShardState, sender: Sender, now: float) -> None:
        """Start the SENT handshake when the last fragment of a round has left.

        Exponents wait for data, which waits for exponents (prologue): nobody would ask for one that is lost before their
        last has left. So they say SENT for what there is when nothing has followed it for a while.
        """
        if sender.done or sender.sent_due is not None:
            return
        timing = self._node.timing
        if sender.cursor == state.shard.count:
            # who has all results says so by itself, before it is asked
            sender.sent_due = now if sender is state.up else now + timing.reorder
        elif sender.cursor and not state.data:
            sender.sent_due = now + timing.retransmit
        else:
            return
        sender.interval = timing.retransmit
        # what was asked before was about less
        sender.asking_since = None
        self._node.wake(sender.sent_due)

    # ---------------------------------------------------------------- own contributions

    def _produce(self, state: ShardState, sender: Sender, most: int, now: float) -> None:
        """Encode the next chunk of a worker's own contribution, just ahead of its transmission."""
        collective = state.collective
        assert collective is not None
        if state.encoded > sender.cursor or state.encoded == state.shard.count:
            return
        ahead = self._data_position(state) if not state.data else 0
        count = collective.ready(state.shard, state.encoded, min(most, leaf.CHUNK), ahead)
        if count:
            first = state.encoded
            state.encoded += count
            self._node.leaf_contributions += count
            self.encode(state, np.arange(first, first + count))

    def produce(self, tree: Tree, now: float) -> bool:
        """Encode what can leave next by the link to the parent; whether anything was."""
        link = tree.up
        if link is None or not (most := min(link.room, BURST)):
            return False
        before = self._node.leaf_contributions
        lineup = tree.lineup()
        made = leaf.produce(
            self._slots.tables,
            self._slots.flow,
            self._node.memory.leaves,
            tree.row,
            most,
            self._made.rows,
            self._made.used,
        )
        self._node.leaf_contributions += made % leaf.OTHERS
        for _, row, low, high in self._made.take() if self._made.used[0] else ():
            self.refuse(row, low, high)
        if made >= leaf.OTHERS:
            for state in lineup:
                if state.collective is not None and state.up is not None:
                    self._produce(state, state.up, most, now)
        return self._node.leaf_contributions != before

    def refuse(self, row: int, low: int, high: int) -> None:
        """Kernels have found what is not to be summed in blocks ``low`` to ``high - 1`` of a shard's tensor."""
        state = self._node.by_row[row]
        if state.collective is not None and not state.collective.refused:
            state.collective.refuse(low, high)
            self._node.refuse(state.job, state.collective)

    @staticmethod
    def _data_position(state: ShardState) -> int:
        """Fragments of the tensor already encoded, for pacing exponents ahead of data."""
        siblings = state.job.shards_of(state.shard.tensor)
        return max((other.shard.first + other.encoded for other in siblings if other.data), default=0)

    def encode(self, state: ShardState, fragments: NDArray[np.int64]) -> None:
        """Encode fragments, in ascending order, into their rows and have them leave, or refuse the round."""
        collective = state.collective
        assert collective is not None
        told = collective.refused
        if told:
            return
        needs, verdicts = collective.encode(state.shard, fragments, self._node.memory.rows, state.slot0)
        told = collective.refused
        if told:
            self._node.refuse(state.job, collective)
            return
        again = self._slots.emit(state.row, fragments, needs, verdicts)
        if again and state.tree.up is not None:
            state.tree.up.again_all(state.row, [fragment for _, _, fragment, _ in again])

    # ---------------------------------------------------------------- links that wait

    def prod(self, tree: Tree, link: Link, now: float) -> None:
        """Repeat the last row of a link that waits, beyond its window: a receiver cannot detect a lost tail by itself."""
        link.prod(now, self._node.timing)
        slot = self._last_sent(tree, link)
        if slot < 0:
            # all of it is answered, so credit must have been lost
            link.give_up(now)
            return
        slotwork.ask_for_check(self._node.memory.rows, slot, tree.job.plan.key)
        self._node.rows_sent += 1
        self._node.retransmissions += 1
        link.retransmissions += 1
        row = np.array([slot * ROW_BYTES], np.int64)
        self._node.outbox.push(Transmission(link.endpoint, self._node.memory.bytes, row, ROW_BYTES))

    def _last_sent(self, tree: Tree, link: Link) -> int:
        """Slot of the last row that has left by a link in rounds that are running and is still what it was; -1 if none is."""
        up = link is tree.up
        whole = State.SENT if up else State.RESULT
        memory = self._node.memory
        running = [state for state in self._node.running.values() if state.tree is tree]
        if memory.state[link.last] == whole and any(
            state.slot0 <= link.last < state.slot0 + state.shard.count for state in running
        ):
            return link.last
        for state in sorted(running, key=lambda state: (state.round or 0, state.data), reverse=True):
            sender = state.up if up else state.down.get(link.bit.bit_length() - 1)
            if sender is None or sender.link is not link:
                continue
            log = memory.up_log if up else memory.down_log
            slots = log[state.slot0 : state.slot0 + sender.cursor].astype(np.int64) + state.slot0
            left = slots[memory.state[slots] == whole]
            if len(left):
                return int(left[-1])
        return -1

    def look(self, tree: Tree, link: Link, now: float) -> None:
        """A window that stays full means that credits or packets were lost: prod the receiver, then start afresh."""
        timing = self._node.timing
        if not link.in_flight or link.room:
            return
        if now >= link.waiting_since + timing.retransmit_max:
            link.give_up(now)
            self._node.wake(now)
            return
        if not link.grouped and now >= link.prod_due(timing):
            self.prod(tree, link, now)
        self._node.wake(link.wait_ends(timing))

    # ---------------------------------------------------------------- credit

    def return_credit(self, now: float) -> None:
        """Tell neighbours what was taken from them, as soon as it is worth a packet or has waited for long enough."""
        timing = self._node.timing
        self._soonest[0] = np.inf
        for job in self._node.jobs.values():
            for tree in job.trees.values():
                self._withheld[:] = 0
                self._slots.withhold(tree, self._withheld)
                count = flow.credits_due(
                    self._slots.tables,
                    self._slots.flow,
                    tree.row,
                    self._withheld,
                    timing.reorder,
                    5 * timing.retransmit,
                    now,
                    self._credits,
                    self._soonest,
                )
                for index, taken, _ in self._credits[:count].tolist():
                    link = tree.up if index == UP_LINK else tree.down[index]
                    assert link is not None
                    self._credit(tree, link, taken)
        self._node.credit_due = float(self._soonest[0])

    def tell(self, tree: Tree, link: Link) -> None:
        """Return what is owed to a neighbour at once: what is asked of it next is judged by that."""
        index = UP_LINK if link is tree.up else link.bit.bit_length() - 1
        self._withheld[:] = 0
        self._slots.withhold(tree, self._withheld)
        owed = int(self._node.memory.taken[tree.row, index]) - link.reported
        if owed > 0 and not self._withheld[index]:
            link.reported += owed
            link.credit_due = None
            self._credit(tree, link, link.reported)

    def _credit(self, tree: Tree, link: Link, taken: int) -> None:
        plan = tree.job.plan
        self._node.outbox.send(
            link.endpoint,
            Kind.CREDIT,
            job=plan.job,
            key=plan.key,
            version=plan.version,
            host=link.bit,
            gradient=taken & 0xFFFFFFFF,
            down=link is tree.up,
            word0=tree.tree,
        )

    # ---------------------------------------------------------------- what neighbours lack

    def newest_seen(self, state: ShardState, child: int, group: int, wanted: NDArray[np.int64]) -> float:
        """When the newest of a group's fragments left that a neighbour has, by those that it lacks; minus infinity if unknown.

        What left before has overtaken nothing: it is lost.
        """
        sender = state.down.get(child) if child >= 0 else state.up
        if sender is None:
            return -np.inf
        log = self._node.memory.down_log if child >= 0 else self._node.memory.up_log
        # a log may be long, and each of its groups be reported: what no burst is remembered of has no time either
        first = sender.sent_before(-np.inf)
        sent = log[state.slot0 + first : state.slot0 + sender.cursor]
        mine = np.flatnonzero(sent // GROUP == group)
        seen = mine[~np.isin(sent[mine], wanted)]
        return sender.link.sent_at(state.row, first + int(seen[-1])) if len(seen) else -np.inf

    def sent_to(
        self, state: ShardState, child: int, group: int, wanted: NDArray[np.int64], before: float
    ) -> NDArray[np.int64]:
        """Those fragments of a group that had left for a neighbour ``before`` a time: it may look before all have come."""
        sender = state.down.get(child) if child >= 0 else state.up
        if sender is None or not len(wanted):
            return wanted
        if child >= 0:
            log, logged = self._node.memory.down_log, state.down_logged
        else:
            log, logged = self._node.memory.up_log, state.up_logged
        ahead = log[state.slot0 + sender.sent_before(before) : state.slot0 + logged]
        return wanted[~np.isin(wanted, ahead[ahead // GROUP == group])] if len(ahead) else wanted
