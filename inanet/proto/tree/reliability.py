"""Reliable, flow-controlled hops: XAgg's group acknowledgements (section IV-D), the same in both directions.

A hop carries fragments of a shard from a *sender* to a *receiver*: contributions from child to parent, results from
parent to child. Both sides think in index groups of 1024 fragments, but groups end in **emission order** (emission
groups): the fragment that is the last of its group to leave carries GROUP_END, whatever its index.

- On GROUP_END the receiver queues the group (the paper's Check Queue), waits one reorder window, looks at its slots, and
  asks for what is missing with a LOST bitmap, again and again with back-off, until the group is complete (the paper's
  Checked List and Lost List).
- When everything has left, the sender says SENT until it hears DONE. SENT makes the receiver check every group that is
  not complete: the tail group, groups whose last packet was lost, and what was asked for but has not come. These are the
  paper's three checks at the end of a send.
- A *link* bounds what is in flight between two neighbours by the receive buffer that the receiver was granted. CREDIT
  returns what was taken; a LOST bitmap returns what will never be; a link that hears nothing for a while starts afresh.
  What queues on the way do not bear, a link does not send either: :mod:`inanet.proto.tree.flow`.

Nothing here reads a clock or a slot: :class:`~inanet.proto.tree.node.Node` does. Times are seconds on the node's clock, windows
and counts are packets. A *row* is a shard's row in the tables, a *position* an index into its emission log.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.recovery import Timing
from inanet.proto.tree import flow
from inanet.proto.tree.slots import BURSTS, GROUP, LINKS, LinkColumn, LinkTime, SlotMemory

#: seconds that packets may be on their way by a link that has never timed a round trip
UNKNOWN = 0.1
#: packets in flight that fit any queue and do not delay one another
MANY = 64


def _integer(column: LinkColumn) -> Any:
    """A column of the link table as an attribute."""
    at = int(column)

    def read(self: "_Row") -> int:
        return int(self.n[self.row, at])

    def write(self: "_Row", value: int) -> None:
        self.n[self.row, at] = value

    return property(read, write, doc=column.__doc__)


def _number(column: LinkTime) -> Any:
    at = int(column)

    def read(self: "_Row") -> float:
        return float(self.x[self.row, at])

    def write(self: "_Row", value: float) -> None:
        self.x[self.row, at] = value

    return property(read, write, doc=column.__doc__)


class _Row:
    """A row of the link table."""

    def __init__(self, n: NDArray[np.int64], x: NDArray[np.float64], row: int) -> None:
        self.n, self.x, self.row = n, x, row


def _rows(count: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return np.zeros((count, len(LinkColumn)), np.int64), np.zeros((count, len(LinkTime)))


class Congestion(_Row):
    """What a link's path bears, as far as losses show it. All counts are in packets, times in seconds."""

    #: what may be in flight
    window: float = _number(LinkTime.CONGESTION)
    #: A measured round trip is believed up to twice the known one, because windows double at most from one measurement to the
    #: next; and up to this in any case, because several links fill a queue at once: what a node waits before it repeats
    #: something
    plausible: float = _number(LinkTime.PLAUSIBLE)
    #: smoothed time from sending to credit where nothing was lost, 0 before the first; never below what was seen last
    round_trip: float = _number(LinkTime.ROUND_TRIP)
    _mark: int = _integer(LinkColumn.MARK)

    def __init__(
        self,
        window: float = flow.FIRST_WINDOW,
        plausible: float = 0.02,
        *,
        row: tuple[NDArray[np.int64], NDArray[np.float64], int] | None = None,
    ) -> None:
        super().__init__(*(row or (*_rows(), 0)))
        self.window, self.plausible = window, plausible
        self._mark = -1

    def sent(self, packets: int, in_flight: int, now: float) -> None:
        flow.count_sent(self.n, self.x, self.row, packets, in_flight, now)

    def settled(self, credited: int, lost: int, granted: int, now: float) -> None:
        flow.settle(self.n, self.x, self.row, credited, lost, granted, now)

    @property
    def timed_since(self) -> float:
        """When the packet left that is being timed, and with it all before it; infinity if none is."""
        return float(self.x[self.row, LinkTime.MARKED_AT]) if self._mark >= 0 else math.inf

    @property
    def crossing(self) -> float:
        """Seconds in which what was sent may be reported missing although it is on its way; queues may have grown."""
        return 2 * self.round_trip

    def reset(self) -> None:
        """What is in flight is given up: it cannot time anything."""
        self._mark = -1


class Link(_Row):
    """What this node may send to one neighbour in one tree: a row of the link table, and what is to be repeated there.

    ``bit`` is the child's one-hot id on this hop. ``memory`` and ``row`` say where the table is; without them the link
    has one of its own.
    """

    endpoint: int = _integer(LinkColumn.ENDPOINT)
    bit: int = _integer(LinkColumn.BIT)
    window: int = _integer(LinkColumn.WINDOW)
    in_flight: int = _integer(LinkColumn.IN_FLIGHT)
    #: the neighbour's last CREDIT
    taken: int = _integer(LinkColumn.TAKEN)
    #: slot of the last row that was sent
    last: int = _integer(LinkColumn.LAST)
    #: packets taken from this neighbour that it has been told about, and how many more are worth telling
    reported: int = _integer(LinkColumn.REPORTED)
    quota: int = _integer(LinkColumn.QUOTA)
    #: packets sent by this process
    packets: int = _integer(LinkColumn.PACKETS)
    #: plan version that made this link: credit under an older one counts another link's packets
    since: int = _integer(LinkColumn.SINCE)
    #: when the link last heard of progress, or became full and started to wait for it
    waiting_since: float = _number(LinkTime.WAITING_SINCE)
    #: when the last row was repeated because of a wait, and how long to wait for an effect
    prodded: float = _number(LinkTime.PRODDED)
    prod_interval: float = _number(LinkTime.PROD_INTERVAL)

    def __init__(
        self,
        name: str,
        endpoint: int,
        bit: int,
        window: int,
        *,
        plausible: float = 0.02,
        since: int = 0,
        memory: SlotMemory | None = None,
        row: int = 0,
    ) -> None:
        if memory is None:
            super().__init__(*_rows(), row)
            self._bursts = np.zeros((1, BURSTS)), np.zeros((1, BURSTS, 3), np.int64)
        else:
            super().__init__(memory.links, memory.link_times, row)
            self._bursts = memory.burst_times, memory.bursts
        self.n[row], self.x[row] = 0, 0.0
        self.name = name
        self.endpoint, self.bit, self.window, self.since = endpoint, bit, window, since
        self.last, self.prodded, self.quota = -1, -math.inf, 1
        self.n[row, LinkColumn.LIVE] = 1
        self.credit_due = None
        self.congestion = Congestion(plausible=plausible, row=(self.n, self.x, row))
        #: (shard row, fragment) to send again, in order, each at most once
        self.resend: deque[tuple[int, int]] = deque()
        self.queued: set[tuple[int, int]] = set()
        #: when each (shard row, fragment) that was sent again in a running round has left
        self.repeated: dict[tuple[int, int], float] = {}
        #: when fragments of each (shard row, group) were last started again, as a later attempt of a running round
        self.restarted: dict[tuple[int, int], float] = {}
        #: packets sent again by this link; what nodes count outlives it
        self.retransmissions = 0

    def drop(self) -> None:
        """The link is no more: its row is free, and what still holds the link has a copy."""
        row = self.row
        n, x = self.n[row : row + 1].copy(), self.x[row : row + 1].copy()
        bursts = self._bursts[0][row : row + 1].copy(), self._bursts[1][row : row + 1].copy()
        self.n[row, LinkColumn.LIVE] = 0
        self.n, self.x, self.row, self._bursts = n, x, 0, bursts
        self.congestion.n, self.congestion.x, self.congestion.row = n, x, 0

    @property
    def grouped(self) -> bool:
        """Results reach this neighbour through a multicast group."""
        return bool(self.n[self.row, LinkColumn.GROUPED])

    @grouped.setter
    def grouped(self, value: bool) -> None:
        self.n[self.row, LinkColumn.GROUPED] = value

    @property
    def credit_due(self) -> float | None:
        """When the neighbour is told in any case what was taken from it."""
        due = float(self.x[self.row, LinkTime.CREDIT_DUE])
        return None if due == math.inf else due

    @credit_due.setter
    def credit_due(self, value: float | None) -> None:
        self.x[self.row, LinkTime.CREDIT_DUE] = math.inf if value is None else value

    def grants(self, window: int) -> None:
        """The neighbour may have ``window`` packets in flight towards this node, 0: who knows.

        It is told what was taken a quarter of a window at a time, or half of a large one, where the rest is enough to
        keep it busy.
        """
        granted = window or min(self.window, 64)
        self.quota = max(1, granted // (2 if granted >= 2 * GROUP else 4))

    @property
    def room(self) -> int:
        """Packets that may leave now."""
        return int(flow.room(self.n, self.x, self.row))

    def sent(self, packets: int, now: float) -> None:
        flow.sent(self.n, self.x, self.row, packets, now)

    def credit(self, taken: int, now: float) -> bool:
        return bool(flow.credit(self.n, self.x, self.row, taken, now))

    def patience(self, timing: Timing) -> float:
        """Seconds without a word from the neighbour that mean something: where queues are long, nothing is heard sooner."""
        return max(timing.retransmit, min(self.congestion.round_trip, timing.retransmit_max))

    def prod_due(self, timing: Timing) -> float:
        """When to repeat the last row of a full link: what follows a loss shows it to the receiver.

        That is when nothing was heard for a while, and when credit trickles in although more is overdue. Then most of
        what seems to be in flight is lost, and a window would pass a packet for each that comes until its group ends.
        """
        waits = (
            (self.waiting_since, self.patience(timing)),
            (
                self.congestion.timed_since,
                max(timing.retransmit, min(self.congestion.crossing, timing.retransmit_max)),
            ),
        )
        again = self.prodded + self.prod_interval
        return min(since + patience if self.prodded < since else again for since, patience in waits)

    def wait_ends(self, timing: Timing) -> float:
        """When something has to be done about a full link that hears nothing, or too little.

        A group goes on without such a member before long.
        """
        afresh = self.waiting_since + timing.retransmit_max
        return afresh if self.grouped else min(self.prod_due(timing), afresh)

    def prod(self, now: float, timing: Timing) -> None:
        """The last row has been repeated: when to do so again."""
        again = self.prodded >= min(self.waiting_since, self.congestion.timed_since)
        self.prod_interval = (
            min(2 * self.prod_interval, timing.retransmit_max) if again else self.patience(timing)
        )
        self.prodded = now

    def written_off(self, packets: int, now: float) -> None:
        """So many packets will never be credited: the receiver has just said that they are lost."""
        self.in_flight = max(0, self.in_flight - packets)
        if packets:
            self.waiting_since = now
            self.congestion.settled(0, packets, self.window, now)

    def give_up(self, now: float) -> None:
        """Nothing was heard for too long: start afresh."""
        self.in_flight = 0
        self.waiting_since = now
        self.congestion.reset()

    def again(self, row: int, fragment: int) -> bool:
        """Queue one fragment for another transmission; False if it is queued already."""
        entry = (row, fragment)
        if entry in self.queued:
            return False
        self.queued.add(entry)
        self.resend.append(entry)
        self._count()
        return True

    def again_all(self, row: int, fragments: Sequence[int]) -> None:
        """As :meth:`again`, for many."""
        entries = [(row, fragment) for fragment in fragments]
        if self.queued:
            entries = [entry for entry in entries if entry not in self.queued]
        self.queued.update(entries)
        self.resend.extend(entries)
        self._count()

    def is_coming(self, row: int, fragment: int, before: float) -> bool:
        """Whether a fragment waits to be sent again, or has been after ``before`` (:meth:`believed_before`)."""
        entry = (row, fragment)
        return entry in self.queued or self.repeated.get(entry, -math.inf) > before

    def believed_before(self, now: float, most: float, seen: float = -math.inf) -> float:
        """The neighbour is believed to lack what left by then, as far as it says so.

        That is what left before something that it has, which left at ``seen``, or that it has told of with a CREDIT. Later packets may be on their way; a stall of
        the other side is no reason to think so for more than ``most`` seconds. It has looked for all that left before it was
        prodded, once it has heard of that: what it said before crossed the prod.
        """
        crossing, round_trip = min(self.congestion.crossing, most), self.congestion.round_trip
        heard = round_trip and now - self.prodded >= min(round_trip, most)
        if not round_trip and self.in_flight > MANY:
            # nobody knows yet, and queues grow
            crossing = min(UNKNOWN, most)
        return max(seen, self.overtaken_since, now - crossing, self.prodded if heard else -math.inf)

    def take_resend(self, most: int, now: float) -> list[tuple[int, int]]:
        """Up to ``most`` queued entries, removed because they leave."""
        taken = [self.resend.popleft() for _ in range(min(most, len(self.resend)))]
        self.queued.difference_update(taken)
        self.repeated.update(dict.fromkeys(taken, now))
        self._count()
        return taken

    def drop_resend(self) -> None:
        """Drop all queued entries."""
        self.resend.clear()
        self.queued.clear()
        self._count()

    def forget(self, row: int) -> None:
        """Drop queued entries of one shard, whose round is over. A pause may follow, so nothing in flight is timed any more."""
        self.congestion.reset()
        if self.resend:
            self.resend = deque(entry for entry in self.resend if entry[0] != row)
            self.queued = set(self.resend)
            self._count()
        if self.repeated:
            self.repeated = {entry: at for entry, at in self.repeated.items() if entry[0] != row}
        if self.restarted:
            self.restarted = {entry: at for entry, at in self.restarted.items() if entry[0] != row}

    def _count(self) -> None:
        self.n[self.row, LinkColumn.QUEUED] = len(self.resend)

    def note_burst(self, row: int, start: int, now: float) -> None:
        """The log of a shard is sent from ``start`` on, or for row -1 something once more; :meth:`sent` follows."""
        flow.note_burst(*self._bursts, self.n, self.row, row, start, now)

    def sent_before(self, row: int, cursor: int, when: float) -> int:
        return int(flow.sent_before(*self._bursts, self.n, self.row, row, cursor, when))

    @property
    def overtaken_since(self) -> float:
        """See :func:`inanet.proto.tree.flow.overtaken_since`."""
        return float(flow.overtaken_since(*self._bursts, self.n, self.row))

    def sent_at(self, row: int, position: int) -> float:
        return float(flow.sent_at(*self._bursts, self.n, self.row, row, position))


class Sender:
    """One shard's round on one outgoing hop: how far its emission log has been sent, and the SENT/DONE handshake.

    The cursor is entry ``[row, index]`` of ``cursors``, int64[shards, links of a tree].
    """

    __slots__ = (
        "_cursors",
        "asking_since",
        "attach_due",
        "done",
        "index",
        "interval",
        "link",
        "row",
        "sent_due",
        "told",
    )

    def __init__(
        self,
        link: Link,
        cursor: int = 0,
        attach_due: float | None = None,
        *,
        cursors: NDArray[np.int64] | None = None,
        row: int = 0,
        index: int = 0,
    ) -> None:
        self.link = link
        self._cursors = np.zeros((1, LINKS), np.int64) if cursors is None else cursors
        self.row, self.index = row, index
        self.cursor = cursor
        #: when SENT is due again; None before everything has left, or as long as exponents keep leaving
        self.sent_due: float | None = None
        self.interval = 0.0
        #: since when SENT has gone unanswered
        self.asking_since: float | None = None
        #: when that was last told to the coordinator
        self.told = -math.inf
        self.done = False
        #: a fresh hop into a running round: the neighbour has to say what it lacks first
        self.attach_due = attach_due

    @property
    def cursor(self) -> int:
        """Position in the emission log up to which it has been sent."""
        return int(self._cursors[self.row, self.index])

    @cursor.setter
    def cursor(self, value: int) -> None:
        self._cursors[self.row, self.index] = value

    def advance(self, stop: int, now: float) -> None:
        """The log has been sent up to ``stop``."""
        self.link.note_burst(self.row, self.cursor, now)
        self.cursor = stop

    def sent_before(self, when: float) -> int:
        """How far the log had been sent at a time."""
        return self.link.sent_before(self.row, self.cursor, when)

    def close(self) -> None:
        """Nothing more is sent on this hop."""
        self.cursor = -1


class Receiver:
    """One shard's round on one incoming hop: which groups are complete, which have to be looked at, and when.

    ``count`` is the number of fragments of the shard. ``spread`` gives numbers in [0, 1). What is sent to many is missed by
    many at once: with it they wait up to twice as long before they look, and before they ask again, each for another time
    (multicast results).
    """

    __slots__ = (
        "_complete",
        "_due",
        "_left",
        "_look_interval",
        "_passed",
        "_patient",
        "_spread",
        "_timing",
        "asked",
        "count",
        "done",
        "final",
        "groups",
        "look_due",
    )

    def __init__(self, count: int, timing: Timing, spread: Callable[[], float] | None = None) -> None:
        self.count = count
        self.groups = -(-count // GROUP)
        #: SENT was heard
        self.final = False
        #: DONE was said
        self.done = False
        self._timing = timing
        self._spread = spread
        self._complete = bytearray(self.groups)
        #: by group: when it is looked at, and how long to wait from then if something is missing
        self._due: dict[int, tuple[float, float]] = {}
        #: groups of which much is on its way again: packets taken from the neighbour when they were last looked at, and until when
        #: that is a reason to wait
        self._patient: dict[int, tuple[int, float]] = {}
        #: groups before this one are complete, or to be looked at
        self._passed = 0
        #: fragments that have left, as a sender says that waits; whether it has said so twice, and wants to hear something; when
        #: to look whether all of them have come
        self._left = 0
        self.asked = False
        self.look_due: float | None = None
        self._look_interval = 0.0

    def group_ended(self, group: int, now: float, *, prodded: bool = False) -> None:
        """The last fragment of a group has come: look at it, and at earlier ones whose last fragment may be lost.

        ``prodded``: it has come before, and its sender waits. Then groups that were looked at before are no exception.
        """
        self._patient.pop(group, None)
        soon = now + self._spread_out(self._timing.reorder)
        for ended in (*range(self._passed, group), group):
            if not self._complete[ended]:
                self._due.setdefault(ended, (soon, self._timing.retransmit))
        self._passed = max(self._passed, group)
        self._hasten(0 if prodded else group, group, soon)

    def _hasten(self, first: int, last: int, soon: float) -> None:
        """Look at groups again soon that are waiting for a later look."""
        for group, (at, _) in self._due.items():
            if at > soon and first <= group <= last:
                self._due[group] = (soon, self._timing.retransmit)

    def _spread_out(self, seconds: float) -> float:
        return seconds if self._spread is None else seconds * (1.0 + self._spread())

    def close(self, now: float) -> None:
        """SENT was heard: every group that is not complete is looked at after one reorder window.

        Also if it was looked at before, and more has come since.
        """
        self.final = True
        self.look_due = None
        self._patient.clear()
        soon = now + self._spread_out(self._timing.reorder)
        for group in range(self.groups):
            if not self._complete[group]:
                self._due.setdefault(group, (soon, self._timing.retransmit))
        self._hasten(0, self.groups, soon)

    def pause(self, left: int, now: float) -> None:
        """SENT was heard, and more will follow: ``left`` fragments are to be here after one reorder window."""
        if self.final:
            return
        self.asked |= left <= self._left
        self._left = max(self._left, left)
        soon = now + self._spread_out(self._timing.reorder)
        if self.look_due is None or self.look_due > soon:
            self.look_due, self._look_interval = soon, self._timing.retransmit

    def looked(self, here: int, now: float) -> bool:
        """``here`` fragments are here. Whether some that have left are not; then they are looked for again."""
        if here >= self._left:
            self.look_due = None
            return False
        self.asked = False
        self.look_due = now + self._spread_out(self._look_interval)
        self._look_interval = min(2 * self._look_interval, self._timing.retransmit_max)
        return True

    def reopen(self, group: int, now: float) -> None:
        """A fragment of this group is owed again, because its slot was damaged: ask for it."""
        self._complete[group] = 0
        self.done = False
        self._due[group] = (now, self._timing.retransmit)

    def restart(self, group: int, taken: int, now: float) -> None:
        """Fragments of this group come once more by themselves: ask for them when nothing comes any more, or after the longest
        timeout, for what comes may be something else. ``taken`` packets have been taken from the neighbour so far.
        """
        self.reopen(group, now + self._timing.retransmit)
        self._patient[group] = taken, now + self._timing.retransmit_max

    def is_patient(self, group: int, taken: int, now: float) -> bool:
        """Whether a group that is due waits a little longer, because its sender goes on; ``taken`` as for :meth:`restart`."""
        before, until = self._patient.pop(group, (taken, now))
        if before == taken or now >= until:
            return False
        self.reopen(group, now + self._timing.retransmit)
        self._patient[group] = taken, until
        return True

    def due(self, now: float) -> Iterator[int]:
        """Groups to look at now."""
        yield from [group for group, (at, _) in self._due.items() if at <= now]

    def checked(self, group: int, missing: int, now: float) -> None:
        """A group was looked at: ``missing`` of its fragments are not there. If none are missing, it is complete."""
        _, interval = self._due.pop(group, (0.0, self._timing.retransmit))
        if missing:
            self._due[group] = (
                now + self._spread_out(interval),
                min(interval * 2, self._timing.retransmit_max),
            )
        else:
            self._complete[group] = 1

    @property
    def next_due(self) -> float | None:
        """When the next group, or what a pause has shown, has to be looked at."""
        due = [at for at, _ in self._due.values()]
        if self.look_due is not None:
            due.append(self.look_due)
        return min(due, default=None)

    @property
    def complete(self) -> bool:
        """All groups were found complete after the sender said that everything had left."""
        return self.final and not self._due and all(self._complete)
