"""When an acknowledgement is overdue: after the time of the queue pair's attributes or, adaptively, as round trips have taken.

A fixed time that finds losses soon takes every peer for lost that waits for a processor. Adaptive ones, which network cards
have under that name, too, follow the measured round trip as TCP's do (RFC 6298): its mean and four deviations, of packets that
were sent once only, and twice as long after each time that nothing had come (Karn). They are never shorter than the attribute
says, and never longer than :data:`LONGEST` times that. A peer that says that packets are missing shows that the network loses
some: then it pays to look for losses soon, and the time is the attribute's until :data:`CALM` round trips have been clean; or
twice the shortest time lately from a packet's first sending to its acknowledgement, before which nothing can be overdue.
"""

from math import inf

from inanet.proto.roce.verbs import Attributes
from inanet.wire.roce import timeout_seconds

#: the most that an adaptive time is of the attribute's, and how often that doubles it
LONGEST = 8
_DOUBLINGS = 3
#: clean round trips since the last loss after which late peers are reckoned with again
CALM = 32
#: how much longer the shortest time may become from one acknowledgement to the next
FORGETTING = 1.05
#: weights of a new sample in mean and deviation
_MEAN, _DEVIATION = 1 / 8, 1 / 4


class Overdue:
    """Of one connection; packets are counted from its first on."""

    def __init__(self, attributes: Attributes) -> None:
        self._base = timeout_seconds(attributes.timeout)
        self._adaptive = attributes.adaptive and self._base is not None
        #: the packet, one past it, that is being timed, and when it left
        self._timed: tuple[int, float] | None = None
        #: whether it has been sent again since
        self._unsure = False
        #: the shortest time to an acknowledgement, slowly forgotten
        self._shortest = inf
        self._mean: float | None = None
        self._deviation = 0.0
        self._doublings = 0
        self._lossy = 0

    def sent(self, end: int, now: float) -> None:
        """A packet that asks for an acknowledgement, ``end - 1``, has left for the first time."""
        if self._adaptive and self._timed is None:
            self._timed, self._unsure = (end, now), False

    def went_back(self, *, overdue: bool) -> None:
        """Packets are sent again, because nothing has come or because the peer lacks some: what is timed is ambiguous now."""
        self._unsure = True
        if overdue:
            self._doublings = min(self._doublings + 1, _DOUBLINGS)
        else:
            self._lossy = CALM

    def acknowledged(self, done: int, now: float) -> None:
        """Everything before packet ``done`` has arrived."""
        if self._timed is None or done < self._timed[0]:
            return
        trip, self._timed = now - self._timed[1], None
        self._shortest = min(trip, FORGETTING * self._shortest)
        if self._unsure:
            return
        self._doublings = 0
        self._lossy = max(self._lossy - 1, 0)
        if self._mean is None:
            self._mean, self._deviation = trip, trip / 2
            return
        self._deviation += _DEVIATION * (abs(trip - self._mean) - self._deviation)
        self._mean += _MEAN * (trip - self._mean)

    @property
    def seconds(self) -> float | None:
        """How long to wait from now on; ``None``: for ever."""
        if self._base is None or not self._adaptive:
            return self._base
        if self._lossy:
            least = 0.0 if self._shortest == inf else 2 * self._shortest
            return min(max(self._base, least), LONGEST * self._base)
        measured = 0.0 if self._mean is None else self._mean + 4 * self._deviation
        wanted = max(self._base, measured) * 2**self._doublings
        return float(min(wanted, LONGEST * self._base))
