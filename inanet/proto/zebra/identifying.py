"""Which keys are hot from now on: decided from the tallies of a job's shards and its switch (section III-C).

By whoever sees all machines: a coordinator, or a group of one process. Shards say when they have counted; the switch is asked
then, since no shard finishes an iteration before it. Until the decision is there shard 0 keeps the end of the next iteration to
itself, because it names the hot set of the one after. So a decision counts from the same iteration on whenever it is made.
"""

import numpy as np

from inanet.proto.common.events import Tally
from inanet.proto.common.plan import Online
from inanet.proto.zebra.hot import OnlineIdentifier
from inanet.proto.zebra.membership import EMPTY, HotSet, fixed, following


class Identification:
    """Of a job with so many ``shards``, whose keys have ``width`` values. Gradients are in steps of 2^-``shift``.

    ``hot`` is the set that is to be used, ``decided`` the last iteration that was decided on. ``changes`` counts other sets.
    """

    def __init__(self, online: Online, shards: int, width: int, shift: int, hot: HotSet = EMPTY) -> None:
        self.hot = hot
        self.decided = 0
        self.changes = 0
        self._every = online.after
        self._shards = shards
        self._shift = shift
        self._identifier = OnlineIdentifier(
            online.threshold,
            fading=online.fading,
            c=online.c,
            memory=online.memory,
            width=width,
            step=online.step,
        )
        #: by iteration, then by place: shards, and behind them the switch
        self._tallies: dict[int, dict[int, Tally]] = {}

    @property
    def distance(self) -> float:
        """Kendall tau distance of the two lists at the last decision."""
        return self._identifier.distance

    @property
    def due(self) -> int:
        """The iteration that is decided on next."""
        return self.decided + self._every

    def take(self, place: int, tally: Tally) -> None:
        """Enter the tally of a shard, by its number, or of the switch, behind the shards. One that comes again is the same."""
        # a shard may be one iteration further than the decision
        if tally.iteration in (self.due, self.due + self._every) and 0 <= place <= self._shards:
            self._tallies.setdefault(tally.iteration, {})[place] = tally

    @property
    def asking(self) -> int:
        """The iteration whose tally the switch is to give now; 0: none."""
        taken = self._tallies.get(self.due, {})
        return self.due if len(taken) == self._shards and self._shards not in taken else 0

    def decide(self) -> bool | None:
        """Decide, if all tallies are in; whether other keys are hot from now on, ``None`` if some are missing."""
        taken = self._tallies.get(self.due, {})
        if len(taken) <= self._shards:
            return None
        del self._tallies[self.due]
        self.decided = self.due
        if max(tally.first for tally in taken.values()) > self.decided - self._every + 1:
            # a machine was restarted and has counts of a part of the iterations: they would say that its keys are cold
            return False
        found = self._identifier.decide(
            self.hot.keys,
            np.concatenate([np.array(tally.keys, np.uint64) for tally in taken.values()]),
            np.concatenate([np.array(tally.counts, np.int64) for tally in taken.values()]),
            sum(tally.others for tally in taken.values()),
        )
        if found is None:
            return False
        self.hot = fixed(following(self.hot.version), found, self._shift)
        self.changes += 1
        return True
