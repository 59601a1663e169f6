"""The sending side of per-packet acknowledgement: a window, timers, retransmission under the same sequence number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.packets import Sheaf, by_length
from inanet.proto.zebra.serial import beyond
from inanet.wire.batch import I64, Transmission

#: A packet is taken for lost, once, when one that was sent this much after it has been answered.
GAP = 3
#: far enough for the longest timeout, whatever the times that were measured
_MOST_DOUBLED = 2.0**20


@dataclass(frozen=True, slots=True)
class Timing:
    """``window`` packets without an answer per stream; retransmission after ``first`` seconds until times have been
    measured, then between ``least`` and ``most``; ``silent`` seconds without progress before somebody is told. A worker whose
    gradients the switch has asks it after ``ask`` seconds, and ever more rarely, whether it still has them.
    """

    window: int = 64
    first: float = 0.05
    least: float = 0.002
    most: float = 1.0
    silent: float = 10.0
    ask: float = 0.25

    def __post_init__(self) -> None:
        if (
            self.window < 1
            or not 0 < self.least <= self.first <= self.most
            or min(self.silent, self.ask) <= 0
        ):
            raise ValueError(f"{self}: a window from 1, 0 < least <= first <= most, silent and ask above 0")


class Path:
    """Round-trip times towards one destination, and the timeout that follows (Jacobson's estimator, doubled after every
    loss until an answer comes to something that was sent once).
    """

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self._mean = self._deviation = 0.0
        self._measured = False
        self._doubled = 1.0

    @property
    def timeout(self) -> float:
        """Seconds after which an unanswered packet is sent again."""
        base = self._mean + 4 * self._deviation if self._measured else self.timing.first
        return min(max(base, self.timing.least) * self._doubled, self.timing.most)

    def measured(self, seconds: float) -> None:
        """An answer took this long."""
        if self._measured:
            error = abs(seconds - self._mean)
            self._deviation += (error - self._deviation) / 4
            self._mean += (seconds - self._mean) / 8
        else:
            self._measured, self._mean, self._deviation = True, seconds, seconds / 2
        self._doubled = 1.0

    def lost(self) -> None:
        """An answer has not come in time."""
        self._doubled = min(self._doubled * 2, _MOST_DOUBLED)


class Stream:
    """Packets of ``sheaf`` to every one of ``receivers``; ``base`` is the sequence number of the first.

    With ``group`` a packet goes there first, for a switch to replicate, and only what is sent again goes to each receiver
    that lacks it.
    """

    def __init__(
        self, sheaf: Sheaf, receivers: Sequence[int], path: Path, *, group: int | None = None, base: int = 0
    ) -> None:
        self.sheaf = sheaf
        self.receivers = tuple(receivers)
        self.base = base
        self.sent = self.repeated = 0
        self._path = path
        self._group = group
        count = len(sheaf)
        self._acked: NDArray[np.bool_] = np.zeros((len(self.receivers), count), np.bool_)
        self._sent_at: NDArray[np.float64] = np.full(count, np.inf)
        self._times: I64 = np.zeros(count, np.int64)
        #: when an answer came last: what is behind it in a queue is not lost
        self._progress = float("-inf")
        #: the last packet that each receiver has answered
        self._heard: I64 = np.full(len(self.receivers), -1, np.int64)
        #: first packet that somebody lacks, first that has not been sent
        self._low = self._next = 0

    @property
    def done(self) -> bool:
        """Whether everybody has everything."""
        return self._low == len(self.sheaf)

    @property
    def outstanding(self) -> int:
        """Answers that have not come."""
        return int((~self._acked).sum())

    def lacking(self) -> list[int]:
        """Receivers that lack something."""
        return [at for at, row in zip(self.receivers, self._acked, strict=True) if not row.all()]

    def acknowledge(self, sequences: I64, receiver: int, now: float) -> NDArray[np.bool_]:
        """Enter answers of a receiver, by its place; says which of them are news, bool[n]."""
        index = beyond(sequences, self.base)
        known = np.flatnonzero(index < self._next)
        candidates = known[~self._acked[receiver, index[known]]]
        _, first = np.unique(index[candidates], return_index=True)
        fresh: NDArray[np.bool_] = np.zeros(len(index), np.bool_)
        fresh[candidates[first]] = True
        news = index[fresh]
        self._acked[receiver, news] = True
        if len(news):
            self._progress = now
        self._heard[receiver] = max(int(self._heard[receiver]), int(news.max(initial=-1)))
        single = news[self._times[news] == 1]
        if len(single):
            self._path.measured(now - float(self._sent_at[single].min()))
        whole: NDArray[np.bool_] = np.asarray(self._acked[:, self._low :].all(axis=0))
        self._low += len(whole) if whole.all() else int(np.argmin(whole))
        return fresh

    def transmit(self, now: float) -> list[Transmission]:
        """What is due: packets that were not answered for too long, or later ones were, then new ones as the window allows."""
        out: list[Transmission] = []
        index = np.arange(self._low, self._next)
        lacking = ~self._acked[:, self._low : self._next]
        overdue = np.maximum(self._sent_at[index], self._progress) + self._path.timeout <= now
        passed = (index < self._heard[:, None] - GAP) & (self._times[index] == 1)
        again = lacking & (overdue | passed)
        late = index[again.any(axis=0)]
        if len(late):
            if (lacking & overdue).any():
                self._path.lost()
            self.repeated += len(late)
            for place, receiver in enumerate(self.receivers):
                out += self._to(receiver, index[again[place]])
            self._mark(late, now)
        fresh = np.arange(self._next, min(self._low + self._path.timing.window, len(self.sheaf)))
        if len(fresh):
            for receiver in self.receivers if self._group is None else (self._group,):
                out += self._to(receiver, fresh)
            self._next = int(fresh[-1]) + 1
            self.sent += len(fresh)
            self._mark(fresh, now)
        return out

    def last(self) -> list[Transmission]:
        """The last packet once more to every receiver, whatever was acknowledged: a question that it answers again."""
        self.repeated += 1
        which = np.array([len(self.sheaf) - 1], np.int64)
        return [t for receiver in self.receivers for t in self._to(receiver, which)]

    def anew(self, sheaf: Sheaf) -> "Stream":
        """A stream of other packets to the same receivers, over the same path, with the same numbers."""
        return Stream(sheaf, self.receivers, self._path, group=self._group, base=self.base)

    def _mark(self, which: I64, now: float) -> None:
        self._sent_at[which] = now
        self._times[which] += 1

    def _to(self, destination: int, which: I64) -> Sequence[Transmission]:
        sheaf = self.sheaf
        return by_length(destination, sheaf.arena, sheaf.offsets[which], sheaf.lengths[which])

    def timer(self) -> float | None:
        """When the next packet is to be sent again."""
        window = slice(self._low, self._next)
        waiting = self._sent_at[window][~self._acked[:, window].all(axis=0)]
        return max(float(waiting.min()), self._progress) + self._path.timeout if len(waiting) else None
