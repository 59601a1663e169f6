"""Rate negotiation in messages: the root's side beside the coordinator, and a worker's beside its member.

Both are sans-IO. What a node may send is decided in :mod:`inanet.planning.rates`; here its words become calls, and grants
become messages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from inanet.messages.control import Hello, RateDone, RateGrant, RateLoss, RateReady
from inanet.planning.rates import LOSS_THRESHOLD, Capacity, Grant, Negotiator
from inanet.planning.topology import Tree

#: What a worker says.
RateMessage = RateReady | RateDone | RateLoss
#: Seconds of a statistical period: Fig. 21 shows rates every 10 ms.
PERIOD = 0.01
#: Periods after one with loss in which a worker reports although it has lost nothing, so that it can be given more.
RECOVERY = 200


class Negotiation:
    """The root's side. ``multicast``: results are sent once for all children of a parent."""

    def __init__(self, *, multicast: bool, threshold: float = LOSS_THRESHOLD) -> None:
        self._negotiator = Negotiator(threshold)
        self._multicast = multicast
        #: something has been heard since the last grants
        self._stale = False

    def joined(self, hello: Hello) -> None:
        """A node is here, with the rates of its link. Nodes at one address share it; on the loopback each has its own,
        since there one machine stands for many."""
        address = IPv4Address(hello.endpoint >> 16)
        capacity = Capacity(hello.send_bps or math.inf, hello.receive_bps or math.inf)
        self._negotiator.node(hello.name, capacity, "" if address.is_loopback else str(address))

    def planned(self, job: int, trees: tuple[Tree, ...]) -> None:
        """A job has a new version of its plan."""
        self._negotiator.plan(job, trees, multicast=self._multicast)
        self._stale = True

    def rest(self, job: int) -> None:
        """A job has no round on its way."""
        self._negotiator.rest(job)
        self._stale = True

    def over(self, job: int) -> None:
        """A job has ended."""
        self._negotiator.end(job)
        self._stale = True

    def receive(self, name: str, message: RateMessage) -> None:
        """What a worker says."""
        if isinstance(message, RateReady):
            self._negotiator.ready(message.job, name, message.sequence, message.maximum or math.inf)
        elif isinstance(message, RateDone):
            self._negotiator.done(message.job, name, message.sequence)
        else:
            self._negotiator.loss(message.job, name, message.sequence, message.sent, message.lost)
        self._stale = True

    def grants(self) -> list[tuple[str, RateGrant]]:
        """(node, grant) for all whose rates have changed, those first who get less."""
        if not self._stale:
            return []
        self._stale = False
        return [(name, _message(grant)) for name, grant in self._negotiator.grants()]


def _message(grant: Grant) -> RateGrant:
    """In whole bits, never more than was granted."""
    up, down = (math.floor(rate) if math.isfinite(rate) else None for rate in (grant.up, grant.down))
    return RateGrant(job=grant.job, sequence=grant.sequence, up=up, down=down)


def granted(message: RateGrant) -> Grant:
    """The grant in a message."""
    up, down = (math.inf if rate is None else float(rate) for rate in (message.up, message.down))
    return Grant(message.job, message.sequence, up, down)


@dataclass(slots=True)
class RateRequests:
    """A worker's side, for one job: it says when it begins and ends to send, and what it loses meanwhile.

    ``sends()`` tells whether the node has something of the job that its parents lack. ``counts()`` are its fragments
    sent, and sent again, so far. ``maximum`` in bits per second, 0 if its link has no limit.
    """

    job: int
    sends: Callable[[], bool]
    counts: Callable[[], tuple[int, int]]
    maximum: int = 0
    _sequence: int = 0
    _sending: bool = False
    _since: float = 0.0
    _counted: tuple[int, int] = (0, 0)
    _recovering: int = field(default=0)

    def look(self, now: float) -> list[RateMessage]:
        """What there is to say now; call it whenever a round begins, and every :data:`PERIOD`."""
        sends = self.sends()
        if sends and not self._sending:
            self._sending = True
            self._since, self._counted = now, self.counts()
            self._sequence += 1
            return [RateReady(job=self.job, sequence=self._sequence, maximum=self.maximum)]
        if not sends and self._sending:
            self._sending = False
            self._sequence += 1
            return [RateDone(job=self.job, sequence=self._sequence)]
        if sends and now - self._since >= PERIOD:
            return self._report(now)
        return []

    def _report(self, now: float) -> list[RateMessage]:
        counts = self.counts()
        sent, lost = (after - before for after, before in zip(counts, self._counted, strict=True))
        self._since, self._counted = now, counts
        if lost:
            self._recovering = RECOVERY
        if sent <= 0 or not self._recovering:
            return []
        self._recovering -= 1
        self._sequence += 1
        return [RateLoss(job=self.job, sequence=self._sequence, sent=sent, lost=min(sent, lost))]

    def again(self) -> None:
        """The root may have forgotten everything: it is told anew with the next look."""
        self._sending = False

    @property
    def active(self) -> bool:
        """Whether it has said that it sends."""
        return self._sending
