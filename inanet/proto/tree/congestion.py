"""What a path bears: windows that losses shrink, for senders that have not negotiated rates.

A window bounds what lies in a receive buffer, but queues on the way may be smaller than the windows of all who share
them. Where more than 1 % is lost, a link takes less than it was granted, by the share that was lost (the paper's rule for
rates, XAgg section IV-C), and feels its way up again all the time. Acknowledgements are cumulative, so all it needs is
how many packets were sent, credited and reported lost.
"""

import math
from dataclasses import dataclass

#: A link begins with four super-frames and doubles its window each time it was used up, until more than this share is
#: lost.
FIRST_WINDOW = 248
TOLERATED_LOSS = 0.01
#: From then on a window grows by this share of itself each time, less the share that was lost: it settles where queues
#: overflow a little, and not at nothing where packets are lost for other reasons. It never shrinks below half a
#: super-frame.
GROWTH = 1 / 16
LEAST_WINDOW = 32
#: Round trips that are believed while none is known, over those that always are.
AT_FIRST = 10


@dataclass(slots=True)
class Congestion:
    """State of one link. All counts are in packets, times in seconds."""

    #: what may be in flight, as far as the path is concerned
    window: float = FIRST_WINDOW
    has_lost: bool = False
    #: Windows double at most from one measurement to the next, but several links fill a queue at once, and what an empty one
    #: took says nothing about it: as many seconds are believed in any case as a node waits before it repeats something
    plausible: float = 0.02
    #: smoothed time from sending to credit where nothing was lost, 0 before the first; never below what was seen last
    round_trip: float = 0.0
    #: packets sent and lost since the window was last reconsidered
    _sent: int = 0
    _lost: int = 0
    #: packets whose fate is known, how many of them there will be when a packet timed is among them, and its time
    _settled: int = 0
    _mark: int = -1
    _marked_at: float = 0.0

    def sent(self, packets: int, in_flight: int, now: float) -> None:
        """``packets`` have left, with which ``in_flight`` are on their way."""
        self._sent += packets
        if self._mark < 0:
            self._mark, self._marked_at = self._settled + in_flight, now

    def settled(self, credited: int, lost: int, granted: int, now: float) -> None:
        """The receiver has credited some packets, or reported some lost. ``granted`` is the receiver's own window."""
        self._settled += credited + lost
        self._lost += lost
        if lost:
            # how long it takes to miss something says nothing about the path
            self._mark = -1
        if 0 <= self._mark <= self._settled:
            # whoever waits for lost packets, or for a neighbour that has no processor, measures anything
            most = max(2 * self.round_trip, self.plausible) if self.round_trip else AT_FIRST * self.plausible
            sample = min(now - self._marked_at, most)
            self.round_trip = max(sample, self.round_trip + (sample - self.round_trip) / 8)
            self._mark = -1
        window = min(granted, self.window)
        if self._sent < window:
            return
        share = self._lost / self._sent
        self.has_lost |= share > TOLERATED_LOSS
        growth = GROWTH if self.has_lost else 1.0
        self.window = min(max(window * (1 + growth - min(share, 0.5)), LEAST_WINDOW), 2 * granted)
        self._sent = self._lost = 0

    @property
    def timed_since(self) -> float:
        """When the packet left that is being timed, and with it all before it; infinity if none is."""
        return self._marked_at if self._mark >= 0 else math.inf

    @property
    def crossing(self) -> float:
        """Seconds in which what was sent may be reported missing although it is on its way; queues may have grown."""
        return 2 * self.round_trip

    def reset(self) -> None:
        """What is in flight is given up: it cannot time anything."""
        self._mark = -1
