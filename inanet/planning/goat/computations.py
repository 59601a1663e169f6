"""Schedules that a coordinator computes: one after the other, and elsewhere if somebody has said where.

The linear program of a large tensor takes seconds. A coordinator that solved it in its event loop would answer nobody
meanwhile; HiGHS lets go of the interpreter's lock, so a thread is enough. Memory of the switches is looked at when a draft's
turn comes and taken when it is solved, both in the coordinator's own thread, and no other draft comes between.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Work(Protocol):
    """Something to be computed."""

    def prepare(self) -> None:
        """In the coordinator's thread, right before :meth:`solve`."""
        ...

    def solve(self) -> None:
        """In any thread; whatever goes wrong is kept for who asks for the result."""
        ...


#: Calls its first argument in another thread, then the second with the time, in seconds, in the coordinator's.
Elsewhere = Callable[[Callable[[], None], Callable[[float], None]], None]
Finish = Callable[[], None]
#: Calls something at a time, and what it has made possible.
Guard = Callable[[float, Finish], None]


class Works:
    """``elsewhere``, if it is set, is where work is done; else it is done at once. ``settled`` is called behind every piece."""

    def __init__(self) -> None:
        self.elsewhere: Elsewhere | None = None
        self.settled: Callable[[float], None] = lambda now: None
        self._queue: deque[tuple[Work, Finish, Guard]] = deque()
        self._busy = False

    def add(self, work: Work, finish: Finish, guard: Guard) -> None:
        """Have something computed. ``finish`` is called when that is done, through ``guard`` if it was done elsewhere."""
        if self.elsewhere is None:
            work.prepare()
            work.solve()
            finish()
            return
        self._queue.append((work, finish, guard))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._queue:
            return
        assert self.elsewhere is not None
        work, finish, guard = self._queue.popleft()
        self._busy = True
        work.prepare()

        def done(now: float) -> None:
            self._busy = False
            guard(now, finish)
            self.settled(now)
            self._next()

        self.elsewhere(work.solve, done)
