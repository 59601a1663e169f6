"""A2TP's two windows: how they change, how straggling is measured, and which fragments use slots.

ACW bounds the fragments that use the switch's slots, LCW those that are in flight; ACW is part of LCW. Once per LCW of answers
(about a round trip; equations 1 to 6 of the paper):

- (1) ``alpha <- (1 - w) alpha + w h``, *h* the share of the fragments within ACW that were marked Col;
- (2) ``beta <- (1 - g) beta + g e``, *e* the share of those within LCW that were marked ECN (the paper prints an index too
  many: the old value is meant);
- (3) ``gamma``, the straggling degree, is measured (:class:`Straggling`);
- ``p = (alpha - H) / (1 - H)``, at least 0; (5) ``d = p ** gamma``;
- (4) if ``p > 0``: ``ACW <- ACW (1 - d / 2)``, else one fragment more (section 4.4);
- (6) if anything was marked ECN: ``LCW <- LCW (1 - beta / 2)``, else one fragment more;
- ``ACW <- min(ACW, LCW)``.

The public program has other constants and a decrease of its own; :data:`ARTIFACT` follows it.

*Tenants.* Windows that grow by a *weight* instead of one fragment share slots in proportion to the weights, as additive
increase does; with ``straggling=False`` every job counts as one without stragglers (gamma is 1), which is plain fairness.

*Straggling.* A fragment is answered when the last worker's has come, so a straggler slows the answers down for everybody.
Clocked by the answers themselves the degree would always be 1, since a window is answered in the time that a window takes. It
is counted over the *base* round trip instead, which a probe measures that the PS echoes at once: an answer's own round trip
contains the straggler. Answers come in batches, so the time is at least eight intervals between them, and the count is scaled.

*Plan.* When all fragments of an LCW are answered the windows are updated from their marks, a batch being split at that number
(window updates).
Which fragments may use slots is planned by number, one window ahead: the first ACW of every LCW. Both depend on numbers and
marks only, and all workers get the same answers, so their plans agree except where gamma differs; a fragment that uses its slot
at one worker and bypasses it at another is completed by the PS.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from inanet.proto.slots.window import Index
from inanet.proto.slots.worker import Mask


@dataclass(frozen=True, slots=True)
class Profile:
    """Constants of a variant of A2TP."""

    name: str
    #: weights of new samples in alpha and beta
    w: float
    g: float
    #: collisions below this share do not count as congestion
    threshold: float
    #: windows decrease as the public program has it: not without a Col mark in the last window, by another formula
    public: bool = False


PAPER = Profile("paper", w=1 / 16, g=1 / 16, threshold=0.15)
ARTIFACT = Profile("artifact", w=1 / 8, g=1 / 8, threshold=0.1, public=True)
PROFILES = {profile.name: profile for profile in (PAPER, ARTIFACT)}


def congestion_degree(alpha: float, threshold: float) -> float:
    """p: how far alpha is above the threshold, 0 to 1."""
    return max(0.0, (alpha - threshold) / (1.0 - threshold))


def decreasing_factor(p: float, gamma: float) -> float:
    """Equation 5; 0 without congestion, whatever gamma is."""
    return p**gamma if p > 0.0 else 0.0


class Windows:
    """ACW and LCW in fragments, from 1 to ``largest``; both begin with ``initial``."""

    def __init__(
        self,
        initial: int,
        largest: int,
        profile: Profile = PAPER,
        *,
        weight: float = 1.0,
        straggling: bool = True,
    ) -> None:
        if not 1 <= initial <= largest or weight <= 0.0:
            raise ValueError(
                f"windows of {initial} to {largest} fragments with weight {weight}: the first is at least 1 and at most"
                " the second, the weight positive"
            )
        self.profile = profile
        self.largest = float(largest)
        self.weight = weight
        self.straggling = straggling
        self.alpha = self.beta = 0.0
        self.acw = self.lcw = float(initial)

    def update(self, h: float, e: float, gamma: float) -> None:
        """A window has been answered: ``h`` and ``e`` are shares of marked fragments, ``gamma`` the straggling degree."""
        profile = self.profile
        self.alpha += profile.w * (h - self.alpha)
        self.beta += profile.g * (e - self.beta)
        if not self.straggling:
            gamma = 1.0
        factor = self._public(h, gamma) if profile.public else self._printed(gamma)
        self.acw = self.acw * factor if factor < 1.0 else self.acw + self.weight
        self.lcw = self.lcw * (1.0 - self.beta / 2.0) if e > 0.0 else self.lcw + 1.0
        self.lcw = min(max(self.lcw, 1.0), self.largest)
        self.acw = min(max(self.acw, 1.0), self.lcw)

    def _printed(self, gamma: float) -> float:
        p = congestion_degree(self.alpha, self.profile.threshold)
        return 1.0 - decreasing_factor(p, gamma) / 2.0

    def _public(self, h: float, gamma: float) -> float:
        over = self.alpha - self.profile.threshold
        if h == 0.0 or over <= 0.0:
            return 1.0
        return 1.0 - float(over**gamma) / (2.0 - self.profile.threshold)


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
        self._count += count
        if self._started is None or now - self._started < self.EARLIEST:
            return
        if now - self._started <= self.LATEST:
            self.gamma += self.WEIGHT * (min(1.0, self._count / lcw) - self.gamma)
        self._started = None

    def updated(self, now: float) -> None:
        """The next sample begins."""
        self._started, self._count = now, 0


@dataclass(slots=True)
class _Part:
    """Fragments ``start`` to ``stop - 1``; those before ``slots`` use slots."""

    start: int
    slots: int
    stop: int


class A2tpPace:
    """``first`` is the number of the first fragment."""

    def __init__(self, windows: Windows, first: int = 0) -> None:
        self.windows = windows
        self.straggling = PublicStraggling() if windows.profile.public else Straggling()
        self.updates = 0
        self._start, self._finish = first, first + self.window
        self._plan: deque[_Part] = deque()
        self._planned = first
        self._extend()
        #: marks of fragments from ``_start`` on, in order of arrival
        self._answers: list[tuple[Index, Mask, Mask]] = []

    @property
    def window(self) -> int:
        return int(self.windows.lcw)

    def degrees(self) -> dict[str, float]:
        """alpha, beta, gamma and both windows now."""
        windows = self.windows
        return {
            "alpha": windows.alpha,
            "beta": windows.beta,
            "gamma": self.straggling.gamma,
            "acw": windows.acw,
            "lcw": windows.lcw,
        }

    def _extend(self) -> None:
        """Plan up to where the window can reach before the next update."""
        end = self._finish + self.window
        if end > self._planned:
            slots = min(self._planned + int(self.windows.acw), end)
            # two windows at the start: each has its share
            if end - self._planned > self.window:
                middle = end - self.window
                self._plan.append(_Part(self._planned, min(slots, middle), middle))
                self._planned, slots = middle, min(middle + int(self.windows.acw), end)
            self._plan.append(_Part(self._planned, slots, end))
            self._planned = end

    def uses_slots(self, numbers: Index) -> Mask:
        """Which of these fragments are within ACW."""
        may = np.zeros(len(numbers), np.bool_)
        for part in self._plan:
            may |= (numbers >= part.start) & (numbers < part.slots)
        return may

    def answered(self, numbers: Index, ecn: Mask, col: Mask, base: int, now: float) -> None:
        """Note marks; update the windows for every epoch that is answered as a whole."""
        self.straggling.answers(len(numbers), self.windows.lcw, now)
        self._answers.append((numbers, ecn, col))
        while base >= self._finish:
            self._update(now)
        while len(self._plan) > 1 and self._plan[0].stop <= self._start:
            self._plan.popleft()

    def _update(self, now: float) -> None:
        numbers = np.concatenate([numbers for numbers, _, _ in self._answers])
        ecn = np.concatenate([marks for _, marks, _ in self._answers])
        col = np.concatenate([marks for _, _, marks in self._answers])
        mine = numbers < self._finish
        slotted = mine & self.uses_slots(numbers)
        within = max(1, int(np.count_nonzero(slotted)))
        h = int(np.count_nonzero(col & slotted)) / within
        e = int(np.count_nonzero(ecn & mine)) / max(1, self._finish - self._start)
        self.windows.update(h, min(1.0, e), self.straggling.gamma)
        self.straggling.updated(now)
        self.updates += 1
        self._answers = [(numbers[~mine], ecn[~mine], col[~mine])]
        self._start, self._finish = self._finish, self._finish + self.window
        self._extend()
