"""What shards tell a worker when they have finished an iteration: new values of hot parameters, and the hot set of the next."""

import numpy as np

from inanet.proto.zebra.cache import HotCache
from inanet.proto.zebra.ledger import BEYOND, FRESH, SEEN, Ledger
from inanet.proto.zebra.membership import EMPTY, Job
from inanet.proto.zebra.packets import Column, Head, Judged, acknowledgements
from inanet.proto.zebra.serial import ahead
from inanet.wire.batch import I64, PacketBatch, Transmission
from inanet.wire.drops import Drop
from inanet.wire.zebra import HEADER_BYTES, NEXT_BYTES, Flag, Kind


class News:
    """For worker ``rank``, whose hot parameters are in ``cache``."""

    def __init__(self, job: Job, rank: int, cache: HotCache) -> None:
        #: the hot set that shard 0 has announced last
        self.wanted = EMPTY.version
        self._job = job
        self._rank = rank
        self._cache = cache
        self._ledger = Ledger(len(job.shards))
        self._out: list[Transmission] = []

    def begin(self) -> None:
        """An iteration begins."""
        self._ledger.clear()

    @property
    def complete(self) -> bool:
        """Whether every shard has finished the iteration."""
        return self._ledger.complete

    def missing(self) -> list[int]:
        """Shards that have not."""
        return self._ledger.missing()

    def take(self, judged: Judged, iteration: int, *, begun: bool) -> bool:
        """Take NEWS of ``iteration`` out of a batch, if it has ``begun`` and is not over. Whether there were any that are new."""
        which = judged.of(Kind.NEWS)
        if not len(which):
            return False
        columns = judged.columns[which]
        early = ahead(columns[:, Column.ITERATION], iteration)
        judged.reason[which[early > 0]] = Drop.NOT_OPEN
        judged.refuse(which[columns[:, Column.SENDER] >= len(self._job.shards)], Drop.UNKNOWN_SHARD)
        late = early < 0 if begun else early <= 0
        judged.refuse(which[late], Drop.STALE_ROUND)
        live = which[judged.reason[which] == 0]
        columns = judged.columns[live]
        ends = columns[:, Column.FLAGS] & Flag.END != 0
        how = self._ledger.enter(columns[:, Column.SENDER], columns[:, Column.SEQUENCE], ends)
        judged.reason[live[how == SEEN]] = Drop.DUPLICATE
        judged.reason[live[how == BEYOND]] = Drop.BAD_FRAGMENT
        fresh = live[how == FRESH]
        self._learn(judged, fresh)
        answered = which[np.isin(judged.reason[which], (Drop.OK, Drop.DUPLICATE, Drop.STALE_ROUND))]
        self._thank(judged, answered)
        return bool(len(fresh))

    def _learn(self, judged: Judged, fresh: I64) -> None:
        for index in fresh.tolist():
            if judged.columns[index, Column.FLAGS] & Flag.END and judged.columns[index, Column.SENDER] == 0:
                at = int(judged.batch.offsets[index]) + HEADER_BYTES
                self.wanted = int.from_bytes(judged.batch.arena[at : at + NEXT_BYTES].tobytes(), "big")
        if len(fresh):
            ranks, words = judged.entries(fresh)
            values = words.view(np.float32).reshape(len(ranks), self._job.width)
            self._cache.learn(ranks.astype(np.int64), values)

    def _thank(self, judged: Judged, which: I64) -> None:
        """Acknowledge NEWS to their shards, through whatever address they came."""
        job = self._job
        sources = judged.batch.sources.copy()
        shards = judged[Column.SENDER][which]
        sources[which] = np.array(job.shards, np.uint64)[shards]
        answered = PacketBatch(judged.batch.arena, judged.batch.offsets, judged.batch.lengths, sources)
        head = Head(job.number, job.key, self._rank, 0, 0, job.width)
        self._out += acknowledgements(judged.as_from(answered), which, head)

    def transmit(self) -> list[Transmission]:
        """Acknowledgements."""
        out, self._out = self._out, []
        return out
