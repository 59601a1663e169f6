"""How often keys are updated, as a switch and PS shards count it: one tally for every so many iterations (section III-C).

A machine takes a tally in the moment in which it finishes the last of these iterations, when nothing of the next is counted. So
all that is decided from tallies is the same whenever packets come, and however long messages take.
"""

from collections.abc import Callable

import numpy as np

from inanet.proto.common.events import Tally
from inanet.proto.zebra.hot import ranking
from inanet.wire.batch import I64, U64

#: Tallies that may be asked for. A switch can be one ahead of a decision, if there is one after every iteration.
_KEPT = 2

#: Keys, and their updates since the last call.
Fetch = Callable[[], tuple[U64, I64]]


class Counts:
    """Of one machine, for one job, every ``every`` iterations (0: never). A tally lists the ``most`` hottest keys."""

    def __init__(self, every: int, most: int) -> None:
        self._every = every
        self._most = most
        self._first = 1
        self._past: list[tuple[U64, I64]] = []
        self._tallies: dict[int, Tally] = {}

    def begin(self, iteration: int) -> None:
        """Count from this iteration on: those before had another life of the machine."""
        self._first = iteration
        self._past.clear()

    def keep(self, fetch: Fetch) -> None:
        """Take counts over that the machine is about to lose."""
        if self._every:
            self._past.append(fetch())

    def finished(self, iteration: int, fetch: Fetch) -> Tally | None:
        """The machine has finished an iteration: the tally, if it is time for one."""
        if not self._every or iteration % self._every:
            return None
        parts = [*self._past, fetch()]
        keys = np.concatenate([part for part, _ in parts])
        counts = np.concatenate([part for _, part in parts])
        ranked = ranking(keys[counts > 0], counts[counts > 0])
        most = self._most
        tally = Tally(
            iteration,
            self._first,
            tuple(ranked.keys[:most].tolist()),
            tuple(ranked.counts[:most].tolist()),
            int(ranked.counts[most:].sum()),
        )
        self.begin(iteration + 1)
        self._tallies[iteration] = tally
        for old in list(self._tallies)[:-_KEPT]:
            del self._tallies[old]
        return tally

    def of(self, iteration: int) -> Tally:
        """The tally of an iteration that is finished; an empty one if it was taken by another life of the machine."""
        return self._tallies.get(iteration, Tally(iteration, iteration + 1))
