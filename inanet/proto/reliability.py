"""Reliable, flow-controlled hops: XAgg's group acknowledgements (section IV-D), the same in both directions.

A hop carries fragments of a shard from a *sender* to a *receiver*: contributions from child to parent, results from
parent to child. Both sides think in index groups of 1024 fragments, but groups end in **emission order** (R6): the
fragment that is the last of its group to leave carries GROUP_END, whatever its index.

- On GROUP_END the receiver queues the group (the paper's Check Queue), waits one reorder window, looks at its slots, and
  asks for what is missing with a LOST bitmap, again and again with back-off, until the group is complete (the paper's
  Checked List and Lost List).
- When everything has left, the sender says SENT until it hears DONE. SENT makes the receiver check every group that is
  not complete: the tail group, groups whose last packet was lost, and what was asked for but has not come. These are the
  paper's three checks at the end of a send.
- A *link* bounds what is in flight between two neighbours by the receive buffer that the receiver was granted. CREDIT
  returns what was taken; a LOST bitmap returns what will never be; a link that hears nothing for a while starts afresh.

Nothing here reads a clock or a slot: :class:`~inanet.proto.node.Node` does.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from inanet.proto.slots import GROUP

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
    #: the neighbour's last CREDIT
    taken: int = 0
    #: when the link last heard of progress, or became full and started to wait for it
    waiting_since: float = 0.0
    #: (shard row, fragment) to send again, in order, each at most once
    resend: deque[tuple[int, int]] = field(default_factory=deque)
    queued: set[tuple[int, int]] = field(default_factory=set)
    #: packets sent again by this link; what nodes count outlives it
    retransmissions: int = 0
    #: packets taken from this neighbour that it has been told about
    reported: int = 0
    #: plan version that made this link: credit under an older one counts another link's packets
    since: int = 0
    #: results reach this neighbour through a multicast group
    grouped: bool = False

    @property
    def room(self) -> int:
        """Packets that may leave now."""
        return max(0, self.window - self.in_flight)

    def sent(self, packets: int, now: float) -> None:
        """These have left. What was in flight before may date from long ago: only a link that is full waits."""
        self.in_flight += packets
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
        return True

    def written_off(self, packets: int) -> None:
        """These will never be credited: the receiver has just said that they are lost."""
        self.in_flight = max(0, self.in_flight - packets)

    def again(self, row: int, fragment: int) -> bool:
        """Queue one fragment for another transmission; False if it is queued already."""
        entry = (row, fragment)
        if entry in self.queued:
            return False
        self.queued.add(entry)
        self.resend.append(entry)
        return True

    def take_resend(self, most: int) -> list[tuple[int, int]]:
        """Up to ``most`` queued entries, removed."""
        taken = [self.resend.popleft() for _ in range(min(most, len(self.resend)))]
        self.queued.difference_update(taken)
        return taken

    def forget(self, row: int) -> None:
        """Drop queued entries of one shard: its round is over."""
        if self.resend:
            self.resend = deque(entry for entry in self.resend if entry[0] != row)
            self.queued = set(self.resend)


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
    #: a fresh hop into a running round (R5): the neighbour has to say what it lacks first
    attach_due: float | None = None


class Receiver:
    """One shard's round on one incoming hop: which groups are complete, which have to be looked at, and when.

    ``spread`` gives numbers in [0, 1). What is sent to many is missed by many at once: with it they wait up to twice as
    long before they look, and before they ask again, each for another time (R6).
    """

    __slots__ = ("_complete", "_due", "_spread", "_timing", "count", "done", "final", "groups")

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

    def group_ended(self, group: int, now: float) -> None:
        """The last fragment of a group has come."""
        if not self._complete[group] and group not in self._due:
            self._due[group] = (now + self._spread_out(self._timing.reorder), self._timing.retransmit)

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
                at, interval = self._due.get(group, (soon, self._timing.retransmit))
                self._due[group] = (min(at, soon), interval)

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
