"""A worker's gradients on their way: a stream to every PS shard and, last, one to the switch, until an iteration is over.

A shard or switch that has been restarted has lost what it had acknowledged; :mod:`~inanet.proto.zebra.standing` says how that is
noticed. Gradients are kept until the iteration is over, so they can be sent again.
"""

from collections.abc import Callable, Sequence

from inanet.proto.zebra.membership import Job
from inanet.proto.zebra.packets import Column, Judged, Sheaf
from inanet.proto.zebra.serial import ahead
from inanet.proto.zebra.standing import Standing
from inanet.proto.zebra.stream import Path, Stream
from inanet.proto.zebra.streams import Streams
from inanet.wire.batch import I64, Transmission
from inanet.wire.drops import Drop
from inanet.wire.endpoint import show
from inanet.wire.zebra import KIND_SHIFT, Kind


class Pushing(Streams):
    """Places are shards by number, then the switch. ``paths`` has one for each, ``ask`` is the pause before the first question."""

    def __init__(self, job: Job, paths: Sequence[Path], ask: float) -> None:
        self._job = job
        self._paths = paths
        self._receivers = (*job.shards, job.switch)
        super().__init__(len(self._receivers))
        self._standing = [Standing(ask) for _ in self._receivers]

    def begin(self, sheaves: Sequence[Sheaf | None]) -> None:
        """Begin an iteration: what goes to each place, ``None`` for nothing at all."""
        for place, sheaf in enumerate(sheaves):
            self._standing[place].begin()
            if sheaf is not None:
                self.streams[place] = Stream(sheaf, [self._receivers[place]], self._paths[place])

    # ------------------------------------------------------------- packets

    def acknowledged(self, judged: Judged, places: I64, iteration: int, now: float) -> bool:
        """Take acknowledgements of an iteration's gradients out of a batch, whose packets come from ``places`` int64[n]; whether
        there was anything new.
        """
        which = judged.of(Kind.ACK)
        if not len(which):
            return False
        columns = judged.columns[which]
        live = ahead(columns[:, Column.ITERATION], iteration) == 0
        judged.reason[which[~live]] = Drop.STALE_ROUND
        moved = False
        for place, stream in enumerate(self.streams):
            if stream is not None:
                kind = Kind.HOT if place == len(self._job.shards) else Kind.COLD
                mine = live & (places[which] == place) & (columns[:, Column.FLAGS] >> KIND_SHIFT == kind)
                moved |= self._enter(place, stream, columns[mine], now)
        return moved

    def _enter(self, place: int, stream: Stream, columns: I64, now: float) -> bool:
        standing = self._standing[place]
        mine = columns[columns[:, Column.FLAGS] & 0x0F == standing.attempt]
        if not len(mine):
            return False
        if standing.restarted(mine[:, Column.PAIRS]):
            self._forget(place)
            self.streams[place] = stream.anew(stream.sheaf.attempted(standing.attempt, self._job.key))
            return True
        moved = bool(stream.acknowledge(mine[:, Column.SEQUENCE], 0, now).any())
        if stream.done:
            standing.satisfied(now)
        return moved

    # ------------------------------------------------------------ contract

    def transmit(self, now: float, missing: Callable[[], list[int]]) -> list[Transmission]:
        """What is to be sent; the switch and the shards that are ``missing``, which have not finished the iteration, are asked whether
        they still have it.
        """
        out: list[Transmission] = []
        for place, stream in enumerate(self.streams):
            if stream is not None:
                out += stream.transmit(now)
                if self._asked(place, stream, missing) and self._standing[place].asks(now):
                    out += stream.last()
        return out

    def _asked(self, place: int, stream: Stream, missing: Callable[[], list[int]]) -> bool:
        return stream.done and (place == len(self._job.shards) or place in missing())

    def timer(self, missing: Callable[[], list[int]]) -> float | None:
        """When something is to be sent again, or somebody asked."""
        times = [stream.timer() for stream in self.streams if stream is not None]
        times += [
            self._standing[place].due
            for place, stream in enumerate(self.streams)
            if stream is not None and self._asked(place, stream, missing)
        ]
        return min((at for at in times if at is not None), default=None)

    def waiting(self) -> list[str]:
        """Who has not acknowledged what."""
        return [
            f"{self._job.called(place)} ({show(stream.receivers[0])}) has not acknowledged {stream.outstanding} packets"
            for place, stream in enumerate(self.streams)
            if stream is not None and not stream.done
        ]

    @property
    def restarts(self) -> int:
        """How often a shard or the switch was found to be another one."""
        return sum(standing.restarts for standing in self._standing)
