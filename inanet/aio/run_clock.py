"""Seconds for which this process has run: a clock that stands still while the process does."""

import asyncio
from collections import deque
from collections.abc import Callable

#: Seconds between two looks at the loop's clock, and how many between two readings mean that the process was stopped.
TICK = 0.25
STOPPED = 1.0
_REMEMBERED = 16


class RunClock:
    """The running loop's time without what the process missed: SIGSTOP, a suspended machine, a slow disk, a long collection.

    Deadlines counted with it excuse others for as long as this process was away itself: what they sent meanwhile is read
    before their time is up.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        #: seconds missed so far, and the latest times of that: when it went on, and after how long
        self.missed = 0.0
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(TICK, self._tick)

    def __call__(self) -> float:
        """The time now."""
        now = self._loop.time()
        if now - self._last > STOPPED:
            self.missed += now - self._last - TICK
            self._gaps.append((now, now - self._last - TICK))
        self._last = now
        return now - self.missed

    def ran(self, seconds: float) -> float:
        """For how many of the last ``seconds`` the process has run."""
        self()
        return max(0.0, seconds - sum(gap for at, gap in self._gaps if at > self._last - seconds))

    def call_at(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """As the loop's, at a time of this clock; early if the process misses more until then."""
        return self._loop.call_at(when + self.missed, callback)

    def _tick(self) -> None:
        self()
        self._timer = self._loop.call_later(TICK, self._tick)

    def close(self) -> None:
        """Stop looking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
