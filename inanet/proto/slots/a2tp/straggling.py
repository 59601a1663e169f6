"""Gamma, the straggling degree (equation 3): which part of a window is answered in a round trip of the bare network.

A fragment is answered when the last worker's has come, so a straggler slows the answers down for everybody. Clocked by the
answers themselves the degree would always be 1, since a window is answered in the time that a window takes. It is counted
over the *base* round trip instead, which a probe measures that the PS echoes at once: an answer's own round trip contains
the straggler. Answers come in batches, so the time is at least eight intervals between them, and the count is scaled to it.
"""

from collections import deque

#: intervals between batches that a sample lasts at least
INTERVALS = 8
#: echoes of which the fastest is the base round trip
ECHOES = 8


class Straggling:
    """Measured over the base round trip; 1 until there is a measurement."""

    def __init__(self) -> None:
        self.gamma = 1.0
        self._echoes: deque[float] = deque(maxlen=ECHOES)
        self._interval = 0.0
        self._last: float | None = None
        self._since: float | None = None
        self._count = 0

    @property
    def base(self) -> float | None:
        """The base round trip in seconds, once an echo has come."""
        return min(self._echoes, default=None)

    def echoed(self, trip: float) -> None:
        """A probe has come back after ``trip`` seconds; no time at all is below the clock's resolution."""
        if trip > 0.0:
            self._echoes.append(trip)

    def answers(self, count: int, lcw: float, now: float) -> None:
        """``count`` fragments were answered in one batch, while the window was ``lcw``."""
        if self._last is not None and now > self._last:
            interval = now - self._last
            self._interval = (
                interval if self._interval == 0.0 else self._interval + (interval - self._interval) / 8
            )
        self._last = now
        if self._since is None:
            # answers of this very batch belong to the time before
            self._since = now
            return
        self._count += count
        base = self.base
        elapsed = now - self._since
        if base is None or elapsed < max(base, INTERVALS * self._interval) or elapsed <= 0.0:
            return
        self.gamma = min(1.0, self._count / (lcw * elapsed / base))
        self._since, self._count = now, 0

    def updated(self, now: float) -> None:
        """The windows have been updated."""

    def idle(self) -> None:
        """Nothing is in flight: the time until the next batch says nothing."""
        self._last = self._since = None
        self._count = 0


class PublicStraggling(Straggling):
    """As the public program has it: a constant round trip, one sample within 20 to 100 us after an update, weight 1/64."""

    EARLIEST, LATEST, WEIGHT = 20e-6, 100e-6, 1 / 64

    def __init__(self) -> None:
        super().__init__()
        self._started: float | None = None

    def answers(self, count: int, lcw: float, now: float) -> None:
        """See :meth:`Straggling.answers`."""
        self._count += count
        if self._started is None or now - self._started < self.EARLIEST:
            return
        if now - self._started <= self.LATEST:
            self.gamma += self.WEIGHT * (min(1.0, self._count / lcw) - self.gamma)
        self._started = None

    def updated(self, now: float) -> None:
        """The next sample begins."""
        self._started, self._count = now, 0
