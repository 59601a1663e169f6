"""Reliable, flow-controlled hops: XAgg's group acknowledgements (section IV-D), the same in both directions.

A hop carries fragments of a shard from a *sender* to a *receiver*: contributions from child to parent, results from
parent to child. Both sides think in index groups of 1024 fragments, but groups end in **emission order** (emission groups): the
fragment that is the last of its group to leave carries GROUP_END, whatever its index.

- On GROUP_END the receiver queues the group (the paper's Check Queue), waits one reorder window, looks at its slots, and
  asks for what is missing with a LOST bitmap, again and again with back-off, until the group is complete (the paper's
  Checked List and Lost List).
- When everything has left, the sender says SENT until it hears DONE. SENT makes the receiver check every group that is
  not complete: the tail group, groups whose last packet was lost, and what was asked for but has not come. These are the
  paper's three checks at the end of a send.
- A *link* bounds what is in flight between two neighbours by the receive buffer that the receiver was granted. CREDIT
  returns what was taken; a LOST bitmap returns what will never be; a link that hears nothing for a while starts afresh.
  What queues on the way do not bear, a link does not send either: :mod:`inanet.proto.tree.congestion`.

Nothing here reads a clock or a slot: :class:`~inanet.proto.tree.node.Node` does.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from inanet.proto.tree.congestion import Congestion
from inanet.proto.tree.slots import GROUP

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Timing:
    """Waiting times in seconds."""

    #: how long a check waits for packets that were overtaken
    reorder: float = 0.002
    #: first interval between repetitions of SENT, LOST and READY; doubles up to ``retransmit_max``
    retransmit: float = 0.02
    retransmit_max: float = 0.5
    #: a parent that answers no SENT for this long is reported as silent
    silent: float = 5.0


@dataclass(slots=True)
class Link:
    """What this node may send to one neighbour in one tree. ``bit`` is the child's one-hot id on this hop."""

    name: str
    endpoint: int
    bit: int
    window: int
    in_flight: int = 0
    congestion: Congestion = field(default_factory=Congestion)
    #: the neighbour's last CREDIT
    taken: int = 0
    #: when the link last heard of progress, or became full and started to wait for it
    waiting_since: float = 0.0
    #: slot of the last row that was sent; when it was repeated because of a wait, and how long to wait for an effect
    last: int = -1
    prodded: float = -math.inf
    prod_interval: float = 0.0
    #: (shard row, fragment) to send again, in order, each at most once
    resend: deque[tuple[int, int]] = field(default_factory=deque)
    queued: set[tuple[int, int]] = field(default_factory=set)
    #: when what was sent again in running rounds has left
    repeated: dict[tuple[int, int], float] = field(default_factory=dict)
    #: when fragments of a group were last started again, for a later attempt in running rounds
    restarted: dict[tuple[int, int], float] = field(default_factory=dict)
    #: packets sent again by this link; what nodes count outlives it
    retransmissions: int = 0
    #: packets taken from this neighbour that it has been told about, and how many more are worth telling
    reported: int = 0
    quota: int = 1
    #: when it is told in any case
    credit_due: float | None = None
    #: plan version that made this link: credit under an older one counts another link's packets
    since: int = 0
    #: results reach this neighbour through a multicast group
    grouped: bool = False

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
        room = min(self.window, self.congestion.window) - self.in_flight
        return int(room) if room > 0 else 0

    def sent(self, packets: int, now: float) -> None:
        """These have left. What was in flight before may date from long ago: only a link that is full waits."""
        self.in_flight += packets
        self.congestion.sent(packets, self.in_flight, now)
        if self.room == 0:
            self.waiting_since = now

    def credit(self, taken: int, now: float) -> bool:
        """The receiver has taken ``taken`` packets so far (modulo 2^32); False if that is no news."""
        gained = (taken - self.taken) & _MASK32
        if not 0 < gained < 1 << 31:
            return False
        self.taken = taken
        self.in_flight = max(0, self.in_flight - gained)
        self.waiting_since = now
        self.congestion.settled(gained, 0, self.window, now)
        return True

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
            (self.congestion.timed_since, max(timing.retransmit, self._doubted(timing.retransmit_max))),
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
        """That has been done."""
        again = self.prodded >= min(self.waiting_since, self.congestion.timed_since)
        self.prod_interval = (
            min(2 * self.prod_interval, timing.retransmit_max) if again else self.patience(timing)
        )
        self.prodded = now

    def written_off(self, packets: int, now: float) -> None:
        """These will never be credited: the receiver has just said that they are lost."""
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
        return True

    def again_all(self, row: int, fragments: Sequence[int]) -> None:
        """As :meth:`again`, for many."""
        entries = [(row, fragment) for fragment in fragments]
        if self.queued:
            entries = [entry for entry in entries if entry not in self.queued]
        self.queued.update(entries)
        self.resend.extend(entries)

    def is_coming(self, row: int, fragment: int, before: float) -> bool:
        """Whether a fragment waits to be sent again, or has been after ``before`` (:meth:`believed_before`)."""
        entry = (row, fragment)
        return entry in self.queued or self.repeated.get(entry, -math.inf) > before

    def believed_before(self, now: float, most: float) -> float:
        """The neighbour is believed to lack what left by then, as far as it says so.

        Later packets may be on their way; a stall of the other side is no reason to think so for more than ``most``
        seconds. It has looked for all that left before it was prodded, once it has heard of that: what it said before
        crossed the prod.
        """
        heard = now - self.prodded >= min(self.congestion.round_trip, most)
        return max(now - self._doubted(most), self.prodded if heard else -math.inf)

    def _doubted(self, most: float) -> float:
        """Seconds in which what has left may be on its way."""
        return min(self.congestion.crossing, most)

    def take_resend(self, most: int, now: float) -> list[tuple[int, int]]:
        """Up to ``most`` queued entries, removed because they leave."""
        taken = [self.resend.popleft() for _ in range(min(most, len(self.resend)))]
        self.queued.difference_update(taken)
        self.repeated.update(dict.fromkeys(taken, now))
        return taken

    def drop_resend(self) -> None:
        """Drop all queued entries."""
        self.resend.clear()
        self.queued.clear()

    def forget(self, row: int) -> None:
        """Drop queued entries of one shard: its round is over, and a pause may follow that times nothing."""
        self.congestion.reset()
        if self.resend:
            self.resend = deque(entry for entry in self.resend if entry[0] != row)
            self.queued = set(self.resend)
        if self.repeated:
            self.repeated = {entry: at for entry, at in self.repeated.items() if entry[0] != row}
        if self.restarted:
            self.restarted = {entry: at for entry, at in self.restarted.items() if entry[0] != row}


@dataclass(slots=True)
class Sender:
    """One shard's round on one outgoing hop: how far its emission log has been sent, and the SENT/DONE handshake."""

    link: Link
    cursor: int = 0
    #: when SENT is due again; None before everything has left, or as long as exponents keep leaving
    sent_due: float | None = None
    interval: float = 0.0
    #: since when SENT has gone unanswered
    asking_since: float | None = None
    done: bool = False
    #: a fresh hop into a running round (re-parenting): the neighbour has to say what it lacks first
    attach_due: float | None = None
    #: when bursts have left that may still be on their way, and from which position of the log on
    _bursts: deque[tuple[float, int]] = field(default_factory=deque)

    def advance(self, stop: int, now: float) -> None:
        """The log has been sent up to ``stop``."""
        self._bursts.append((now, self.cursor))
        self.cursor = stop

    def sent_before(self, when: float) -> int:
        """How far the log had been sent at a time that is never earlier than one asked for before."""
        while self._bursts and self._bursts[0][0] <= when:
            self._bursts.popleft()
        return self._bursts[0][1] if self._bursts else self.cursor


class Receiver:
    """One shard's round on one incoming hop: which groups are complete, which have to be looked at, and when.

    ``spread`` gives numbers in [0, 1). What is sent to many is missed by many at once: with it they wait up to twice as
    long before they look, and before they ask again, each for another time (multicast results).
    """

    __slots__ = ("_complete", "_due", "_passed", "_spread", "_timing", "count", "done", "final", "groups")

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
        self._due: dict[int, tuple[float, float]] = {}
        #: groups before this one are complete, or to be looked at
        self._passed = 0

    def group_ended(self, group: int, now: float, *, prodded: bool = False) -> None:
        """The last fragment of a group has come: look at it, and at earlier ones whose last fragment may be lost.

        ``prodded``: it has come before, and its sender waits. Then groups that were looked at before are no exception.
        """
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
        soon = now + self._spread_out(self._timing.reorder)
        for group in range(self.groups):
            if not self._complete[group]:
                self._due.setdefault(group, (soon, self._timing.retransmit))
        self._hasten(0, self.groups, soon)

    def reopen(self, group: int, now: float, wait: float = 0.0) -> None:
        """A fragment of this group is owed again (restart, or a damaged slot); ask for it after ``wait``."""
        self._complete[group] = 0
        self.done = False
        self._due[group] = (now + wait, self._timing.retransmit)

    def due(self, now: float) -> Iterator[int]:
        """Groups to look at now."""
        yield from [group for group, (at, _) in self._due.items() if at <= now]

    def checked(self, group: int, missing: int, now: float) -> None:
        """Outcome of a look at a group."""
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
        """When the next group has to be looked at."""
        return min((at for at, _ in self._due.values()), default=None)

    @property
    def complete(self) -> bool:
        """All groups were found complete after the sender said that everything had left."""
        return self.final and not self._due and all(self._complete)
