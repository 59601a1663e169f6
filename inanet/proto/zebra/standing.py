"""What a worker knows of its switch in an iteration: which life of it acknowledges, and when to ask whether it still lives.

A switch that has been restarted has lost what it had acknowledged, and a worker whose packets are all acknowledged would never
hear of it. So it asks, by its END once more, while the iteration is not finished; the answer has the number of the life.

Acknowledgements of a life that has ended may come late, after those of the next. So a worker numbers its attempts to send an
iteration, and the switch returns the number. When two lives acknowledge one attempt, the next one begins: its packets were
all sent when the later of the two lived already, so the earlier cannot acknowledge any of them.
"""

import numpy as np

from inanet.wire.batch import I64
from inanet.wire.zebra import ATTEMPTS

#: the longest pause between two questions, in first ones
MOST = 8.0


class Standing:
    """``ask`` seconds after everything is acknowledged comes the first question; each pause is twice the one before."""

    def __init__(self, ask: float) -> None:
        self.attempt = 0
        self.restarts = 0
        self.due = float("inf")
        self._first = self._pause = ask
        self._life = -1

    def begin(self) -> None:
        """An iteration begins."""
        self.attempt = 0
        self._life = -1
        self.due = float("inf")

    def restarted(self, lives: I64) -> bool:
        """Take the lives, int64[n], of acknowledgements of the running attempt. Whether they are several: then the next attempt
        is to begin.
        """
        if (lives == self._life).all():
            return False
        several = np.unique(lives).tolist()
        if self._life < 0 and len(several) == 1:
            self._life = several[0]
        if several == [self._life]:
            return False
        self.attempt = (self.attempt + 1) % ATTEMPTS
        self.restarts += 1
        self._life = -1
        self.due = float("inf")
        return True

    def satisfied(self, now: float) -> None:
        """Everything is acknowledged: ask from now on, unless that is known already."""
        if self.due == float("inf"):
            self._pause = self._first
            self.due = now + self._pause

    def asks(self, now: float) -> bool:
        """Whether to ask at this time; if so the next question comes later."""
        if now < self.due:
            return False
        self._pause = min(2 * self._pause, MOST * self._first)
        self.due = now + self._pause
        return True
