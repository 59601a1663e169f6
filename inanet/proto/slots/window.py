"""What a worker has in flight: the result is the acknowledgement, gaps and time tell what is lost.

Fragments are numbered for the life of a job. Those from ``base`` on are unanswered or were answered out of order; nothing
beyond ``base`` plus the window has left. Two workers are therefore less than two windows apart, which is how far back the
slots of a switch (two sets) and the table of a PS (two windows) can answer.

- *Gap*: a fragment is sent again when one at least :attr:`Timing.gap` numbers later has been answered; and once more
  each time one has been answered that was sent so much later than the repetition, itself a round trip or two ago.
- *Time*: a fragment that is not answered within the retransmission timeout is sent again. The timeout follows the round
  trips seen (RFC 6298; of fragments sent once only), because answers of a job with a straggler are late without being
  lost. Answers to all that is in flight count as one sample (RFC 7323, appendix G): one answer of many that was late
  because another worker's fragment was lost is no reason to wait longer. The timeout doubles until something is answered,
  once for all that was sent before it last doubled. When answers to several windows were all for repeated fragments, the
  timeout is too short rather than the network bad, and it stays doubled until a round trip has been measured (Karn). After one
  such window already their round trips count from the first sending: too long at worst, which is soon unlearned, while
  everything is repeated for as long as the timeout is too short.
- *Probe*: a window that is held up by its lowest fragment sends nothing whose answer could tell that a repetition was lost
  as well. When no answer at all has come for two of the shortest round trips, that fragment alone is sent again, without
  waiting for the timeout, which may be hundreds of them; each time it has to wait twice as long.
"""

from math import inf
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.proto.common.recovery import RetransmissionTimer, Timing
from inanet.wire.serial import unwrapped

Index = NDArray[np.int64]
_NONE: Index = np.zeros(0, np.int64)
#: windows of answers to repeated fragments alone after which the timeout stays doubled
UNCLEAR = 4


#: waiting times of workers whose host says nothing else
TIMING = Timing(retransmit=0.01, retransmit_max=1.0)


@njit(
    types.UniTuple(types.int64, 5)(
        types.int64[::1],
        types.int64,
        types.int64,
        types.boolean[::1],
        types.float64[::1],
        types.float64[::1],
        types.int64[::1],
        types.int64[::1],
        types.int64[::1],
        types.float64,
        types.boolean[::1],
        types.float64[::1],
    ),
    cache=True,
    nogil=True,
    _nrt=False,
)
def _take(
    numbers: Any,
    base: int,
    end: int,
    answered: Any,
    sent_at: Any,
    first_at: Any,
    times_sent: Any,
    beside: Any,
    order: Any,
    now: float,
    new: Any,
    trips: Any,
) -> Any:
    """Note answers; ``new[k]`` says whether one counts. Returns the new base, how many count, the highest of them, how many
    are of fragments that were sent several times, and the most that was in flight beside one of them.

    ``trips`` becomes, of those sent once: sum of round trips, the shortest, sum of shares of what was in flight, latest sending;
    and the shortest time since the first sending of one that was repeated.
    """
    size = answered.size
    count, unsure, highest, most = 0, 0, base - 1, 1
    trips[0], trips[1], trips[2], trips[3], trips[4] = 0.0, np.inf, 0.0, -1.0, np.inf
    for k in range(numbers.size):
        number = numbers[k]
        place = number % size
        new[k] = base <= number < end and not answered[place]
        if not new[k]:
            continue
        answered[place] = True
        count += 1
        highest = max(highest, number)
        most = max(most, beside[place])
        if times_sent[place] != 1:
            unsure += 1
            trips[4] = min(trips[4], now - first_at[place])
            continue
        trip = now - sent_at[place]
        trips[0] += trip
        trips[1] = min(trips[1], trip)
        trips[2] += 1.0 / beside[place]
        trips[3] = max(trips[3], np.float64(order[place]))
    while base < end and answered[base % size]:
        base += 1
    return base, count, highest, unsure, most


class Lanes:
    """Ways that fragments take: only what has left later on the same one tells that one is lost. Places are a window's."""

    def __init__(self) -> None:
        self._lane: Index = _NONE
        self._reached: Index = np.full(1, -1, np.int64)

    def resize(self, places: int) -> None:
        """Have room for so many places."""
        self._lane = np.zeros(places, np.int64)

    def assign(self, numbers: Index, lanes: Index) -> None:
        """Say which lanes fragments are on; they have just left."""
        missing = int(lanes.max(initial=0)) + 1 - len(self._reached)
        if missing > 0:
            self._reached = np.append(self._reached, np.full(missing, -1, np.int64))
        self._lane[numbers % len(self._lane)] = lanes

    def accept(self, numbers: Index) -> None:
        """These have been answered."""
        np.maximum.at(self._reached, self._lane[numbers % len(self._lane)], numbers)

    def reached(self, numbers: Index) -> Index:
        """The highest number that has been answered on the lane of each of these, -1 at first."""
        return self._reached[self._lane[numbers % len(self._lane)]]


class Window:
    """``capacity`` bounds every window; ``first`` is the number of the first fragment ever; ``lanes`` if there are several."""

    def __init__(
        self, capacity: int, timing: Timing = TIMING, first: int = 0, lanes: Lanes | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a window of {capacity} fragments: at least one is needed")
        self.capacity = capacity
        self.timing = timing
        self._timer = RetransmissionTimer(timing.retransmit, timing.retransmit_max)
        self.base = self.next = first
        self._size = 1 << (2 * capacity - 1).bit_length()
        self._lanes = lanes
        if lanes is not None:
            lanes.resize(self._size)
        self._answered: NDArray[np.bool_] = np.zeros(self._size, np.bool_)
        self._sent_at: NDArray[np.float64] = np.zeros(self._size)
        self._first_at: NDArray[np.float64] = np.zeros(self._size)
        self._times_sent: NDArray[np.int64] = np.zeros(self._size, np.int64)
        #: which sending of all it was, and the latest that has been answered beyond doubt
        self._order: NDArray[np.int64] = np.zeros(self._size, np.int64)
        self._sendings = 0
        self._furthest = -1
        self._trips: NDArray[np.float64] = np.zeros(5)
        #: how many were in flight when it was sent
        self._beside: NDArray[np.int64] = np.ones(self._size, np.int64)
        self._highest = first - 1
        #: the shortest round trip, and when the last answer came
        self._shortest, self._heard = inf, -inf
        #: answers to repeated fragments since the last to one that was sent once
        self._unclear = 0
        #: when the timeout was doubled last: what was sent before that is no reason to double it again
        self._doubled = -inf
        #: no unanswered fragment was sent before this; finding out which was first is not worth it for every answer
        self._oldest = inf
        #: something has been answered since gaps were looked for
        self._news = False
        self.resent_by_gap = self.resent_by_time = self.probed = 0

    # ---------------------------------------------------------------- sending

    def fresh(self, window: int, limit: int, now: float) -> Index:
        """Numbers that may leave for the first time, below ``limit``; they are in flight from now on."""
        stop = max(self.next, min(limit, self.base + max(1, min(window, self.capacity))))
        numbers = np.arange(self.next, stop)
        places = numbers % self._size
        self._answered[places] = False
        self._sent_at[places] = self._first_at[places] = now
        self._times_sent[places] = 1
        self._number_sendings(places)
        self._beside[places] = stop - self.base
        if len(numbers):
            self._oldest = now if self.base == self.next else min(self._oldest, now)
        self.next = stop
        return numbers

    def lost(self, now: float) -> Index:
        """Numbers to send again; they count as sent at ``now``."""
        gaps = self._news and self.base + self.timing.gap <= self._highest
        if not gaps and (self.base == self.next or self._due() > now):
            return _NONE
        self._news = False
        waiting = self._waiting()
        places = waiting % self._size
        gap = self._overtaken(waiting) & ((self._times_sent[places] == 1) | self._lost_again(places, now))
        late = self._sent_at[places] + self.timeout <= now
        probed = len(waiting) > 0 and not gap[0] and not late[0] and self._probe_at() <= now
        self.resent_by_gap += int(np.count_nonzero(gap))
        late &= ~gap
        if late.any():
            self.resent_by_time += int(np.count_nonzero(late))
            if (self._sent_at[places[late]] >= self._doubled).any():
                self._timer.back_off()
                self._doubled = now
        if probed:
            self.probed += 1
            gap[0] = True
        numbers: Index = waiting[gap | late]
        self._sent_at[numbers % self._size] = now
        self._times_sent[numbers % self._size] += 1
        self._number_sendings(numbers % self._size)
        self._oldest = float(self._sent_at[places].min(initial=inf))
        return numbers

    def _number_sendings(self, places: Index) -> None:
        self._order[places] = np.arange(self._sendings, self._sendings + len(places))
        self._sendings += len(places)

    def _lost_again(self, places: Index, now: float) -> NDArray[np.bool_]:
        """Which of these, repeated some round trips ago, have seen one answered that was sent well after the repetition."""
        later: NDArray[np.bool_] = self._order[places] + self.timing.gap <= self._furthest
        return later & (self._sent_at[places] + 2 * self._shortest <= now)

    def _overtaken(self, waiting: Index) -> NDArray[np.bool_]:
        """Which of these have seen one answered that left well after them."""
        reached = self._highest if self._lanes is None else self._lanes.reached(waiting)
        later: NDArray[np.bool_] = waiting + self.timing.gap <= reached
        return later

    # ---------------------------------------------------------------- answers

    def absolute(self, low: Index, bits: int) -> Index:
        """Whole numbers from the ``bits`` of them that travel: the ones nearest to what is in flight."""
        return unwrapped(low, self.base, bits)

    def accept(self, numbers: Index, now: float) -> NDArray[np.bool_]:
        """Which of these answers are new and were asked for; they are answered from now on."""
        new = np.empty(len(numbers), np.bool_)
        self.base, count, highest, unsure, beside = _take(
            numbers,
            self.base,
            self.next,
            self._answered,
            self._sent_at,
            self._first_at,
            self._times_sent,
            self._beside,
            self._order,
            now,
            new,
            self._trips,
        )
        if not count:
            return new
        if self._lanes is not None:
            self._lanes.accept(numbers[new])
        self._news = True
        self._heard = now
        self._highest = max(self._highest, highest)
        self._unclear = 0 if unsure < count else self._unclear + count
        if self._unclear <= UNCLEAR * beside:
            self._timer.reset()
        total, shortest, share, furthest, longer = self._trips.tolist()
        if self._unclear > beside:
            self._timer.measure(longer, min(1.0, count / beside))
        elif unsure < count:
            self._furthest = max(self._furthest, int(furthest))
            self._shortest = min(self._shortest, shortest)
            self._timer.measure(total / (count - unsure), min(1.0, share))
        return new

    def complete(self, end: int, now: float) -> None:
        """All below ``end`` counts as answered, whatever answers are lost."""
        self.accept(np.arange(self.base, end), now)

    # ---------------------------------------------------------------- time

    def _probe_at(self) -> float:
        """When the lowest unanswered fragment is sent again by itself; never before a round trip has been measured."""
        place = self.base % self._size
        doublings = min(int(self._times_sent[place]) - 1, 16)
        wait = max(self.timing.probe, 2 * self._shortest) * (1 << doublings)
        return max(self._heard, float(self._sent_at[place])) + wait

    def _due(self) -> float:
        """When something is late, or before that; something is in flight."""
        return min(self._oldest + self.timeout, self._probe_at())

    @property
    def timeout(self) -> float:
        """Seconds after which an unanswered fragment is sent again."""
        return self._timer.timeout

    def timer(self) -> float | None:
        """When the oldest unanswered fragment is late, or before that; None while nothing is in flight."""
        return self._due() if self.base < self.next else None

    def look(self) -> None:
        """Find out which unanswered fragment is the oldest: :meth:`timer` says when it is late, and not before."""
        self._oldest = float(self._sent_at[self._waiting() % self._size].min(initial=inf))

    def _waiting(self) -> Index:
        numbers: Index = np.arange(self.base, self.next)
        return numbers[~self._answered[numbers % self._size]]

    @property
    def in_flight(self) -> int:
        """Fragments that are sent and not answered."""
        return len(self._waiting())
