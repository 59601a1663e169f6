"""Whom shards wait for, as they tell workers that ask whether they still have their gradients."""

from inanet.proto.zebra.membership import Job
from inanet.proto.zebra.packets import Column, Judged
from inanet.proto.zebra.serial import ahead
from inanet.wire.batch import I64
from inanet.wire.drops import Drop
from inanet.wire.zebra import Kind


class Awaited:
    """What a worker knows of it, in the iteration that it has begun."""

    def __init__(self, job: Job) -> None:
        self._job = job
        #: by shard: the first rank, or behind the ranks the switch, or a decision, and how many ranks more
        self._by_shard: dict[int, tuple[int, int]] = {}

    def clear(self) -> None:
        """An iteration begins."""
        self._by_shard.clear()

    def take(self, judged: Judged, places: I64, iteration: int) -> None:
        """Take what shards say out of a batch, whose packets come from ``places`` int64[n]."""
        for index in judged.of(Kind.WAITING).tolist():
            columns = judged.columns[index]
            if ahead(columns[Column.ITERATION : Column.ITERATION + 1], iteration)[0]:
                judged.reason[index] = Drop.STALE_ROUND
            else:
                found = int(columns[Column.SEQUENCE]), int(columns[Column.VERSION])
                self._by_shard[int(places[index])] = found

    def by(self, shard: int) -> str:
        """For whom a shard waits, in words; nothing if it has not said."""
        if shard not in self._by_shard:
            return ""
        first, more = self._by_shard[shard]
        others = {len(self._job.workers): "the switch", len(self._job.workers) + 1: "word of what is hot"}
        who = others.get(first, f"rank {first}")
        return f": it waits for {who}" + (f" and {more} more" if more else "")

    @property
    def told(self) -> bool:
        """Whether some shard has said for whom it waits."""
        return bool(self._by_shard)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that some shard waits for."""
        return tuple(
            sorted({first for first, _ in self._by_shard.values() if first < len(self._job.workers)})
        )
