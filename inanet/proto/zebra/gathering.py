"""The open iteration of a PS shard: gradients of the workers, sums of the switch, and of whom something is missing."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inanet.proto.zebra.ledger import BEYOND, FRESH, SEEN, Ledger
from inanet.proto.zebra.membership import EMPTY, F32, HotSet, Job
from inanet.proto.zebra.packets import Column, Judged
from inanet.proto.zebra.piles import Pile, added
from inanet.proto.zebra.serial import ahead
from inanet.wire.batch import I64, U64
from inanet.wire.drops import Drop
from inanet.wire.zebra import Flag, Kind


@dataclass(frozen=True, slots=True)
class Taken:
    """Indices of a batch's gradients, int64[n] each: ``owed`` an acknowledgement, ``early`` ones of an iteration that cannot have
    begun, and ENDs that have come before, ``again``.
    """

    owed: I64
    early: I64
    again: I64


class Gathering:
    """``known`` are hot sets that packets may name, by version. All of an iteration are of one ``version``: the first one's."""

    def __init__(self, job: Job, known: Mapping[int, HotSet]) -> None:
        self.version = EMPTY.version
        self.workers = Ledger(len(job.workers))
        self._job = job
        self._known = known
        self._switch = Ledger(1)
        self._cold, self._sums = Pile(), Pile()

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self.workers.begun or self._switch.begun

    @property
    def lacks_sums(self) -> bool:
        """Whether some of the switch's are missing."""
        return self._job.switch != 0 and not self._switch.complete

    @property
    def complete(self) -> bool:
        """Whether everything is in."""
        return self.workers.complete and not self.lacks_sums

    def clear(self) -> None:
        """The next iteration is open."""
        self.workers.clear()
        self._switch.clear()
        self._cold, self._sums = Pile(), Pile()

    def added(self) -> tuple[U64, F32, I64]:
        """What :func:`~inanet.proto.zebra.piles.added` makes of everything."""
        return added(self._job, self._known[self.version], self._cold, self._sums)

    def take(self, judged: Judged, kind: Kind, ranks: I64, iteration: int) -> Taken:
        """Take a batch's gradients of ``iteration``: COLD of the workers, whose packets come from ``ranks`` int64[n], or the switch's
        AGGREGATE.
        """
        which = judged.of(kind)
        if not len(which):
            return Taken(which, which, which)
        off = ahead(judged[Column.ITERATION][which], iteration)
        early, late = which[off > 0], which[off < 0]
        judged.refuse(early, Drop.NOT_OPEN)
        versions = judged[Column.VERSION][which]
        judged.refuse(which[~np.isin(versions, list(self._known)) & (off == 0)], Drop.FUTURE_PLAN)
        live = self._agreed(judged, which[(off == 0) & (judged.reason[which] == 0)])
        if kind == Kind.AGGREGATE:
            names, _ = judged.entries(live)
            packet = np.repeat(live, judged[Column.PAIRS][live])
            judged.refuse(packet[names >= len(self._known[self.version])], Drop.BAD_SLOT)
            live = live[judged.reason[live] == 0]
            sources, ledger, pile = np.zeros(len(ranks), np.int64), self._switch, self._sums
        else:
            sources, ledger, pile = ranks, self.workers, self._cold
        columns = judged.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = ledger.enter(sources[live], columns[:, Column.SEQUENCE], ends)
        judged.reason[live[how == SEEN]] = Drop.DUPLICATE
        judged.reason[live[how == BEYOND]] = Drop.BAD_FRAGMENT
        judged.reason[late] = Drop.STALE_ROUND
        fresh = live[how == FRESH]
        if len(fresh):
            columns = judged.columns[fresh]
            names, words = judged.entries(fresh)
            place = sources[fresh] << 32 | columns[:, Column.SEQUENCE]
            pile.add(np.repeat(place, columns[:, Column.PAIRS]), names, words)
        return Taken(np.concatenate([live[how != BEYOND], late]), early, live[(how == SEEN) & ends])

    def _agreed(self, judged: Judged, live: I64) -> I64:
        """Refuse packets of another hot set than the iteration's; gives the others."""
        if not len(live):
            return live
        if not self.begun:
            self.version = int(judged[Column.VERSION][live[0]])
        judged.refuse(live[judged[Column.VERSION][live] != self.version], Drop.STALE_PLAN)
        agreed: I64 = live[judged.reason[live] == 0]
        return agreed
