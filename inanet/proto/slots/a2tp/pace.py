"""When A2TP's windows change, and which fragments use slots.

An *epoch* is an LCW of fragments. When all of them are answered the windows are updated from their marks, a batch being split
at that number. Which fragments may use slots is planned by number, one window ahead: the first ACW of every LCW. Both depend
on numbers and marks only, and all workers get the same answers, so their plans agree except where gamma differs; a fragment
that uses its slot at one worker and bypasses it at another is completed by the PS.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from inanet.proto.slots.a2tp.straggling import PublicStraggling, Straggling
from inanet.proto.slots.a2tp.windows import Windows
from inanet.proto.slots.window import Index
from inanet.proto.slots.worker import Mask


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
        """Fragments that may be unanswered."""
        return int(self.windows.lcw)

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
