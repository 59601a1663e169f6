"""What every engine's loss recovery has in common: how long to wait for an answer, by the round trips that were seen.

The estimator is Jacobson's (RFC 6298): the smoothed round trip and four mean deviations, doubled each time that nothing has
come (Karn's algorithm: what was sent twice measures nothing). Three policies use it, because what is known of a loss differs:
a window of fragments that are answered one by one (:mod:`inanet.proto.slots.window`), go-back-N of a queue pair
(:mod:`inanet.proto.roce.queue_pair`) and a stream with an acknowledgement for each packet (:mod:`inanet.proto.zebra.stream`).
"""

from dataclasses import dataclass

#: gains of the smoothed round trip and of its mean deviation, and deviations in a timeout (RFC 6298, section 2)
_ALPHA, _BETA, _K = 1 / 8, 1 / 4, 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Waiting times in seconds."""

    #: how long a check waits for packets that were overtaken
    reorder: float = 0.002
    #: the shortest retransmission timeout, and the first; it doubles up to ``retransmit_max``
    retransmit: float = 0.02
    retransmit_max: float = 0.5
    #: windows of fragments: how far ahead of a fragment an answer is that shows its loss, and the shortest wait for the answer
    #: that holds up the window
    gap: int = 8
    probe: float = 0.001
    #: nothing heard from a neighbour for this long is reported
    silent: float = 5.0


class RetransmissionTimer:
    """The timeout towards one peer: between ``least`` and ``most`` seconds, ``first`` (default: ``least``) until a round trip
    has been measured, doubled ``doublings`` times at most.
    """

    __slots__ = ("_deviation", "_doublings", "_doublings_max", "_first", "_least", "_mean", "_most")

    def __init__(self, least: float, most: float, *, first: float | None = None, doublings: int = 16) -> None:
        self._least, self._most = least, most
        self._first = least if first is None else first
        self._doublings_max = doublings
        self._mean: float | None = None
        self._deviation = 0.0
        self._doublings = 0

    def measure(self, round_trip: float, weight: float = 1.0) -> None:
        """Note a round trip, in seconds, of something that was sent once. ``weight`` is the part of a window that the sample
        stands for (RFC 7323, appendix G), 0 to 1.
        """
        if self._mean is None:
            self._mean, self._deviation = round_trip, round_trip / 2
            return
        self._deviation += weight * _BETA * (abs(round_trip - self._mean) - self._deviation)
        self._mean += weight * _ALPHA * (round_trip - self._mean)

    def back_off(self) -> None:
        """Nothing has come in time: double the timeout."""
        self._doublings = min(self._doublings + 1, self._doublings_max)

    def reset(self) -> None:
        """Something that was sent once has been answered: the timeout is that of the estimate again."""
        self._doublings = 0

    @property
    def timeout(self) -> float:
        """Seconds after which what is unanswered is sent again."""
        estimate = self._first if self._mean is None else self._mean + _K * self._deviation
        return min(max(estimate, self._least) * (1 << self._doublings), self._most)
