"""What leaves a node: control packets, repetitions, and the emission logs, as far as windows allow."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from inanet.proto.tree.core import CHUNK
from inanet.proto.tree.membership import ShardState, Tree
from inanet.proto.tree.reliability import Link, Sender
from inanet.proto.tree.rounds import Rounds
from inanet.proto.tree.slots import (
    ROW_BYTES,
    ShardColumn,
    State,
)
from inanet.proto.tree.xagg import slotwork
from inanet.wire.batch import Transmission

#: largest number of packets in one transmission: eight super-frames, so that Python runs once for half a megabyte
BURST = 496


class Sending(Rounds):
    """Transmissions, and the contributions of this host encoded just ahead of them."""

    def transmit(self, now: float) -> Iterator[Transmission]:
        """What may leave now, control packets first; stop iterating when the device is full.

        What leaves after that, leaves at the time of what was received meanwhile: a device that is full for a whole round
        would have every packet of it leave at the beginning, and links give up what they have just sent.
        """
        self._told = max(self._told, now)
        yield from self._outbox.take()
        ways: list[tuple[Tree, Link]] = []
        while self._stirred or ways:
            if self._stirred:
                # also by what was received while a device was full
                self._stirred = False
                trees = [tree for job in self._jobs.values() for tree in job.trees.values()]
                ways = [(tree, link) for tree in trees for link in tree.links()]
            busy = []
            for way in ways:
                burst = self._burst(*way, self._told)
                if burst is not None:
                    busy.append(way)
                    yield burst
            ways = busy
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
                self._wake(link.wait_ends(self.timing))
            return None
        while link.resend:
            entries = link.take_resend(most, now)
            slots = np.array([self._by_row[row].slot0 + fragment for row, fragment in entries], np.int64)
            # a slot that was emptied again holds no more than a partial sum
            whole = self.memory.state[slots] == (State.SENT if up else State.RESULT)
            burst = self._send_rows(link, slots[whole] * ROW_BYTES, now)
            if burst is not None:
                link.retransmissions += len(burst)
                self._retransmissions += len(burst)
                if not up:
                    self.repairs_unicast += len(burst)
                return burst
        index = link.bit.bit_length() - 1
        for state in tree.lineup():
            sender = state.up if up else state.down.get(index)
            if sender is None or sender.link is not link:
                continue
            if up and state.collective is not None:
                self._produce(state, sender, most, now)
            column = ShardColumn.UP_LOGGED if up else ShardColumn.DOWN_LOGGED
            logged = int(self.memory.shards[state.row, column])
            if link.grouped:
                # the rest comes with the group
                logged = min(logged, state.group_cursor)
            burst = None
            while burst is None and sender.cursor < logged:
                stop = min(sender.cursor + most, logged)
                offsets = np.empty(stop - sender.cursor, np.int64)
                found = slotwork.logged_rows(self._tables, state.row, sender.cursor, stop, up, offsets)
                sender.advance(stop, now)
                burst = self._send_rows(link, offsets[:found], now)
                sender.sent_due = None
            self._see_end(state, sender, now)
            if burst is not None:
                return burst
        return None

    def _see_end(self, state: ShardState, sender: Sender, now: float) -> None:
        """Start the SENT handshake when the last fragment of a round has left.

        Exponents wait for data, which waits for exponents (exponent agreement): nobody would ask for one that is lost before
        their last has left. So they say SENT for what there is when nothing has followed it for a while.
        """
        if sender.done or sender.sent_due is not None:
            return
        if sender.cursor == state.shard.count:
            # who has all results says so by itself, before it is asked
            sender.sent_due = now if sender is state.up else now + self.timing.reorder
        elif sender.cursor and not state.data:
            sender.sent_due = now + self.timing.retransmit
        else:
            return
        sender.interval = self.timing.retransmit
        self._wake(sender.sent_due)

    def _send_rows(self, link: Link, offsets: NDArray[np.int64], now: float) -> Transmission | None:
        count = len(offsets)
        if count == 0:
            return None
        link.sent(count, now)
        link.last = int(offsets[-1]) // ROW_BYTES
        self.rows_sent += count
        return Transmission(link.endpoint, self.memory.bytes, offsets, ROW_BYTES)

    def _prod(self, tree: Tree, link: Link, now: float) -> None:
        """Repeat the last row of a link that waits, beyond its window: lost tails are missed by nobody."""
        link.prod(now, self.timing)
        slot = self._last_sent(tree, link)
        if slot < 0:
            # all of it is answered, so credit must have been lost
            link.give_up(now)
            return
        slotwork.ask_for_check(self.memory.rows, slot, tree.job.plan.key)
        self.rows_sent += 1
        self._retransmissions += 1
        link.retransmissions += 1
        row = np.array([slot * ROW_BYTES], np.int64)
        self._outbox.push(Transmission(link.endpoint, self.memory.bytes, row, ROW_BYTES))

    def _last_sent(self, tree: Tree, link: Link) -> int:
        """Slot of the last row that has left by a link in rounds that are running and is still what it was; -1 if none is."""
        up = link is tree.up
        whole = State.SENT if up else State.RESULT
        running = [state for state in self._running.values() if state.tree is tree]
        if self.memory.state[link.last] == whole and any(
            state.slot0 <= link.last < state.slot0 + state.shard.count for state in running
        ):
            return link.last
        for state in sorted(running, key=lambda state: (state.round or 0, state.data), reverse=True):
            sender = state.up if up else state.down.get(link.bit.bit_length() - 1)
            if sender is None or sender.link is not link:
                continue
            log = self.memory.up_log if up else self.memory.down_log
            slots = log[state.slot0 : state.slot0 + sender.cursor].astype(np.int64) + state.slot0
            left = slots[self.memory.state[slots] == whole]
            if len(left):
                return int(left[-1])
        return -1

    def _produce(self, state: ShardState, sender: Sender, most: int, now: float) -> None:
        """Encode the next chunk of a worker's own contribution, just ahead of its transmission."""
        collective = state.collective
        assert collective is not None
        if state.encoded > sender.cursor or state.encoded == state.shard.count:
            return
        ahead = self._data_position(state) if not state.data else 0
        count = collective.ready(state.shard, state.encoded, min(most, CHUNK), ahead)
        if count:
            first = state.encoded
            state.encoded += count
            self.leaf_contributions += count
            self._encode(state, np.arange(first, first + count), now)

    def _data_position(self, state: ShardState) -> int:
        """Fragments of the tensor already encoded, for pacing exponents ahead of data."""
        siblings = state.job.shards_of(state.shard.tensor)
        return max((other.shard.first + other.encoded for other in siblings if other.data), default=0)

    def _encode(self, state: ShardState, fragments: NDArray[np.int64], now: float) -> None:
        """This host's contribution to fragments, in ascending order."""
        collective = state.collective
        assert collective is not None
        told = collective.refused
        if told:
            return
        needs, verdicts = collective.encode(state.shard, fragments, self.memory.rows, state.slot0)
        told = collective.refused
        if told:
            self._refuse(state.job, collective)
            return
        again = np.empty((len(fragments), 4), np.int64)
        self._used[0] = 0
        slotwork.contribute(self._tables, state.row, fragments, needs, verdicts, again, self._used)
        if self._used[0] and state.tree.up is not None:
            state.tree.up.again_all(state.row, again[: self._used[0], 2].tolist())
