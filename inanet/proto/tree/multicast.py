"""Multicast results: who hears a multicast group, who asked for what again, and whom to probe.

A parent sends each result once to the group of its children, never faster than the slowest of them returns credit. A
child that returns none at all for a while, or asks again for most of what the group was sent, is excluded: it is served
by unicast from where it stood, so that it holds up nobody, and comes back once it has answered a probe. The first
exclusion is short, every further one twice as long.

Nothing here reads a clock or a slot: :class:`~inanet.proto.tree.groups.Groups` does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from inanet.proto.common.recovery import Timing
from inanet.proto.tree.reliability import Link
from inanet.wire.serial import is_newer

#: a child may be without progress for this many retransmission intervals, or round trips, before the others go on without it
PATIENCE = 2
#: a child that has asked again for this many fragments, and for more than half of what the group was sent, hears nothing
FEW = 8
#: packets after which what was lost before counts half
LONG_AGO = 4096
#: longest time in seconds between probes, and that a child is kept out for: to try one that stalls again costs the others
#: no more than their patience, and one that has a processor again should not be served by itself for rounds
SELDOM = 5.0
LONGEST_EXCLUSION = 4.0


@dataclass(slots=True)
class Listener:
    """A child that was told to join the group."""

    link: Link
    #: it is believed to hear the group
    hears: bool
    #: answers count from the probe after this one
    after: int = 0
    #: when it was last taken in, and how long it was kept out before that
    since: float = 0.0
    exclusion: float = 0.0
    excluded_until: float = 0.0
    #: fragments it has asked for again since the group had been sent ``base`` packets
    lost: int = 0
    base: int = 0


@dataclass(slots=True)
class Multicast:
    """One tree's group at the parent. ``link`` leads to all who listen; its repetitions are for everybody."""

    link: Link
    #: by child index
    listeners: dict[int, Listener] = field(default_factory=dict)
    #: links of the children that get their results through the group; none or at least two
    grouped: tuple[Link, ...] = ()
    #: probes sent so far, modulo 2^32
    probes: int = 0
    probe_due: float | None = None
    probe_interval: float = 0.0
    #: (shard row, fragment) to the bits of those who asked for it, until ``asked_due``
    asked: dict[tuple[int, int], int] = field(default_factory=dict)
    asked_due: float | None = None
    #: fragments of running rounds that were sent again to all; who still lacks one gets it by unicast
    repeated: set[tuple[int, int]] = field(default_factory=set)

    @property
    def sent(self) -> int:
        """Packets sent to the group."""
        return self.link.packets

    def follow(self, links: Mapping[int, Link], *, trusted: bool) -> None:
        """These children listen now; ``trusted``: those that are new hear the group until the contrary shows."""
        before = self.listeners
        self.listeners = {}
        for index, link in links.items():
            known = before.get(index)
            if known is None or known.link is not link:
                known = Listener(link, trusted, self.probes, base=self.sent)
            self.listeners[index] = known
        self.probe_due = None
        self._regroup()

    def dissolve(self) -> None:
        """Everybody is served by unicast from now on."""
        self.listeners = {}
        self._regroup()

    def _regroup(self) -> None:
        """Draw the group's members anew; one alone is served by unicast. What waits for those who left is theirs."""
        before = self.grouped
        hearing = [listener.link for listener in self.listeners.values() if listener.hears]
        self.grouped = tuple(hearing) if len(hearing) > 1 else ()
        for link in self.grouped:
            link.grouped = True
        for link in before:
            if not any(link is other for other in self.grouped):
                link.grouped = False
                for row, fragment in self.link.resend:
                    link.again(row, fragment)
        if not self.grouped:
            self.link.drop_resend()

    # ---------------------------------------------------------------- who hears

    def exclude(self, bits: int, now: float, timing: Timing) -> None:
        """The children with these ids make no progress: go on without them."""
        for listener in self.listeners.values():
            if not listener.link.bit & bits:
                continue
            lasted = now - listener.since > 2 * listener.exclusion
            again = timing.retransmit_max if lasted else 2 * listener.exclusion
            listener.exclusion = min(max(again, timing.retransmit_max), LONGEST_EXCLUSION)
            listener.excluded_until = now + listener.exclusion
            listener.hears = False
            listener.after = self.probes
            # what the group has sent waits in a buffer that is not that of unicast, or it is lost and will be asked for
            listener.link.give_up(now)
        self.probe_due = None
        self._regroup()

    def answered(self, index: int, count: int, now: float) -> bool:
        """A child has answered probe ``count``; False if that proves nothing."""
        listener = self.listeners.get(index)
        if listener is None or not is_newer(count, listener.after) or now < listener.excluded_until:
            return False
        if not listener.hears:
            listener.hears = True
            listener.since = now
            listener.lost, listener.base = 0, self.sent
            self._regroup()
        return True

    def probe(self, now: float, timing: Timing) -> bool:
        """Whether to send a probe now; ``probes`` is its number, ``probe_due`` the time of the next one."""
        deaf = [listener.excluded_until for listener in self.listeners.values() if not listener.hears]
        if not deaf or len(self.listeners) < 2:
            self.probe_due = None
            return False
        if self.probe_due is None:
            self.probe_due, self.probe_interval = max(now, min(deaf)), timing.retransmit
        if now < self.probe_due:
            return False
        self.probes = (self.probes + 1) & 0xFFFFFFFF
        self.probe_due = max(now + self.probe_interval, min(deaf))
        self.probe_interval = min(2 * self.probe_interval, SELDOM)
        return True

    # ---------------------------------------------------------------- repetitions

    def ask(self, row: int, fragment: int, bit: int) -> bool:
        """A child of the group lacks a fragment; False if it has said so already."""
        bits = self.asked.get((row, fragment), 0)
        self.asked[row, fragment] = bits | bit
        return not bits & bit

    def decide(self, now: float, timing: Timing) -> None:
        """Repeat what was asked for: by multicast if more than a quarter of the group wants it, else by unicast.

        That happens once: whom a repetition does not reach either may not hear the group.
        """
        asked, self.asked, self.asked_due = self.asked, {}, None
        for entry, bits in asked.items():
            # to one alone, unicast costs no more
            shared = bits.bit_count() > 1 and 4 * bits.bit_count() > len(self.grouped) > 0
            if shared and entry not in self.repeated:
                self.repeated.add(entry)
                self.link.again(*entry)
                bits &= ~sum(link.bit for link in self.grouped)
            for listener in self.listeners.values():
                if listener.link.bit & bits:
                    listener.link.again(*entry)
        self._judge(asked.values(), now, timing)

    def _judge(self, asked: Iterable[int], now: float, timing: Timing) -> None:
        """Exclude whoever asks for most of what the group is sent: its window need never fill, but it waits every time."""
        deaf = 0
        for listener in self.listeners.values():
            listener.lost += sum(listener.link.bit & bits != 0 for bits in asked)
            sent = self.sent - listener.base
            if listener.hears and listener.lost >= FEW and 2 * listener.lost > sent:
                deaf |= listener.link.bit
            if sent > LONG_AGO:
                # what is asked for next is of what was sent before: that must not be taken for most of the next few packets
                listener.lost //= 2
                listener.base = self.sent - sent // 2
        if deaf:
            self.exclude(deaf, now, timing)

    def forget(self, row: int) -> None:
        """The round of a shard is over."""
        if self.asked:
            self.asked = {entry: bits for entry, bits in self.asked.items() if entry[0] != row}
        if self.repeated:
            self.repeated = {entry for entry in self.repeated if entry[0] != row}
