"""A worker's pull: what it does not know itself is asked of the shards, packet by packet."""

from dataclasses import dataclass, field

import numpy as np

from inanet.proto.zebra.cache import HotCache
from inanet.proto.zebra.layout import in_sequence
from inanet.proto.zebra.membership import F32, Job
from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf
from inanet.proto.zebra.serial import beyond
from inanet.proto.zebra.stream import Path, Stream
from inanet.proto.zebra.streams import Streams
from inanet.wire.batch import I64, U64, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import show
from inanet.wire.zebra import Kind


@dataclass(slots=True)
class Pull:
    """``keys`` uint64[n] that a ticket asks for; ``out`` float32[n, width] fills up."""

    ticket: int
    keys: U64
    out: F32
    #: per shard: places in ``keys`` in the order of transmission
    places: dict[int, I64] = field(default_factory=dict)


class Pulling(Streams):
    """One pull at a time. ``streams`` has one per shard, or ``None``; an answer is a packet's acknowledgement."""

    def __init__(self, job: Job, rank: int, paths: list[Path]) -> None:
        super().__init__(len(job.shards))
        self._job = job
        self._rank = rank
        self._paths = paths
        #: sequence numbers that shards have seen, so that a late answer is not taken for one to another pull
        self._asked = [0] * len(job.shards)
        self.cached = 0

    def ask(self, pull: Pull, cache: HotCache, iteration: int) -> None:
        """Begin: values are to be those after ``iteration``."""
        job = self._job
        here = cache.read(pull.keys, pull.out)
        self.cached += int(here.sum())
        away = np.flatnonzero(~here)
        shards = job.shard_of(pull.keys[away])
        for shard, address in enumerate(job.shards):
            mine = away[shards == shard]
            if not len(mine):
                continue
            base = self._asked[shard]
            counts = in_sequence(len(mine), job.capacity(Kind.PULL))
            head = Head(job.number, job.key, self._rank, cache.hot.version, iteration, job.width)
            sheaf = Sheaf(Kind.PULL, head, counts, pull.keys[mine], None, base=base, end=False)
            pull.places[shard] = mine
            self.streams[shard] = Stream(sheaf, [address], self._paths[shard], base=base)
            self._asked[shard] += len(counts)

    @property
    def done(self) -> bool:
        """Whether every answer is in."""
        return all(stream is None or stream.done for stream in self.streams)

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        return [t for stream in self.streams if stream is not None for t in stream.transmit(now)]

    def timer(self) -> float | None:
        """When something is to be sent again."""
        times = [stream.timer() for stream in self.streams if stream is not None]
        return min((at for at in times if at is not None), default=None)

    def waiting(self) -> list[str]:
        """Who has not answered what."""
        return [
            f"shard {shard} ({show(stream.receivers[0])}) has not answered {stream.outstanding} pulls"
            for shard, stream in enumerate(self.streams)
            if stream is not None and not stream.done
        ]

    def take(self, judged: Judged, shards: I64, pull: Pull | None, now: float) -> bool:
        """Take answers out of a batch, whose packets come from ``shards`` int64[n]; whether there was anything new."""
        which = judged.of(Kind.VALUES)
        moved = False
        for shard in np.unique(shards[which]).tolist():
            mine = which[shards[which] == shard]
            stream = self.streams[shard]
            if stream is None or pull is None:
                judged.reason[mine] = Drop.UNMATCHED
            else:
                moved |= self._fill(judged, mine, stream, pull, shard, now)
        return moved

    def _fill(self, judged: Judged, mine: I64, stream: Stream, pull: Pull, shard: int, now: float) -> bool:
        most = self._job.capacity(Kind.PULL)
        place = beyond(judged[Column.SEQUENCE][mine], stream.base)
        wanted = np.minimum(len(pull.places[shard]) - place * most, most)
        judged.reason[mine[judged[Column.PAIRS][mine] != wanted]] = Drop.UNMATCHED
        sound = judged.reason[mine] == 0
        mine, place = mine[sound], place[sound]
        fresh = stream.acknowledge(place + stream.base, 0, now)
        judged.reason[mine[~fresh]] = Drop.DUPLICATE
        mine, place = mine[fresh], place[fresh]
        if not len(mine):
            return False
        _, words = judged.entries(mine)
        counts = judged[Column.PAIRS][mine]
        step = np.arange(len(words)) - np.repeat(np.cumsum(counts) - counts, counts)
        pull.out[pull.places[shard][np.repeat(place * most, counts) + step]] = words.view(np.float32)
        return True
