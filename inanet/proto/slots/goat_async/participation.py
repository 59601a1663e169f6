"""Who an epoch waits for: K_t by Algorithm 2, an estimate of who they will be, and the workers that were first in fact.

At the start of an epoch K_t is chosen from the workers' last intervals. Who the K_t will be is estimated: those whose gradient
waits already, in the order in which they came, then those with the least of their last interval to go. When K_t workers
have sent theirs, it is these: no estimate can hold an epoch up.

Pure state: ``now`` in seconds is an argument.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
#: K of an epoch from the workers' last intervals, float64 seconds of those that take part
Choose = Callable[[F64], int]


def everybody(intervals: F64) -> int:
    """Wait for all: synchronous training."""
    return len(intervals)


class Waiting:
    """``workers`` of a job, by index. Epochs wait for all until a worker's interval is known: the first gradient's would be
    the time that processes take to start.
    """

    def __init__(self, workers: int, choose: Choose) -> None:
        self.choose = choose
        self.epoch = 0
        #: K_t
        self.participants = workers
        #: workers that have not left
        self.there: NDArray[np.bool_] = np.ones(workers, np.bool_)
        #: p_w: seconds from getting the model to having sent the gradient, the last time; NaN before
        self.history: F64 = np.full(workers, np.nan)
        #: when each has got the model last, and in which epoch
        self.given: F64 = np.full(workers, np.nan)
        self.version: NDArray[np.int64] = np.zeros(workers, np.int64)
        #: when the gradient of that model was sent, all of it; NaN: not yet
        self.sent: F64 = np.full(workers, np.nan)
        self.expected: tuple[int, ...] = ()

    def begin(self, now: float) -> None:
        """The next epoch: how many it waits for, and who these will be, as far as one can tell."""
        self.epoch += 1
        there = np.flatnonzero(self.there)
        known = self.history[there]
        if np.isnan(known).all():
            self.participants = len(there)
        else:
            # who has not delivered yet is taken to be as slow as the slowest that has
            seen = np.maximum(np.where(np.isnan(known), np.nanmax(known), known), 1e-9)
            self.participants = min(self.choose(seen), len(there))
        self._estimate(now)

    def _estimate(self, now: float) -> None:
        there = np.flatnonzero(self.there)
        last = np.where(np.isnan(self.history), np.inf, self.history)[there]
        given = self.given[there]
        left = np.maximum(last - np.where(np.isnan(given), 0.0, now - given), 0.0)
        sent = self.sent[there]
        waits = ~np.isnan(sent)
        order = np.lexsort((np.where(waits, sent, left), ~waits))
        self.expected = tuple(sorted(there[order[: self.participants]].tolist()))

    def has_sent(self, worker: int, now: float) -> None:
        """A worker has sent its gradient, all of it."""
        if np.isnan(self.sent[worker]):
            self.sent[worker] = now
            self.history[worker] = now - self.given[worker]

    def first(self) -> tuple[int, ...]:
        """The K_t workers that were the first to send theirs; none while fewer have."""
        sent = np.where(self.there, self.sent, np.nan)
        order = np.argsort(sent, kind="stable")[: int(np.count_nonzero(~np.isnan(sent)))]
        found = order[: self.participants]
        return tuple(sorted(found.tolist())) if len(found) == self.participants else ()

    def give(self, workers: NDArray[np.int64], now: float) -> NDArray[np.int64]:
        """These take part and get the model; for each, how many epochs ago it got the one before."""
        staleness: NDArray[np.int64] = self.epoch - 1 - self.version[workers]
        self.given[workers] = now
        self.version[workers] = self.epoch
        self.sent[workers] = np.nan
        return staleness

    def leave(self, worker: int) -> None:
        """Nobody waits for this one any more."""
        self.there[worker] = False
        self.participants = min(self.participants, int(np.count_nonzero(self.there)))
        self.expected = tuple(one for one in self.expected if one != worker)
