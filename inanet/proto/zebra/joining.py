"""A worker's place in a job: it belongs to the first process that takes it, for gradients of two must not meet in a sum.

A process that is started in the place of one that died cannot know what that one had sent of an iteration, and to whom. So every
process has a number of its life, and before anything else it tells all shards and the switch. A shard remembers the first of a
rank, in its state file as well, and refuses another. The switch forgets what it has of the job: if the whole job has begun anew,
that is of the one before.
"""

from collections.abc import Sequence

import numpy as np

from inanet.proto.zebra.membership import Job
from inanet.proto.zebra.packets import Column, Head, Judged, Sheaf
from inanet.proto.zebra.serial import SERIAL
from inanet.proto.zebra.stream import Path, Stream
from inanet.wire.batch import I64, Transmission
from inanet.wire.endpoint import show
from inanet.wire.zebra import KIND_SHIFT, Kind


class Joining:
    """``life`` is the process's number, 32 bits; ``None`` for a worker whose process ends with the job: it need not join."""

    def __init__(self, job: Job, rank: int, life: int | None, paths: Sequence[Path]) -> None:
        if life is not None and not 0 <= life <= SERIAL:
            raise ValueError(f"the number of a worker's life has 32 bits, {life} does not fit")
        self.life = life
        self._job = job
        self._streams: list[Stream] = []
        if life is not None:
            head = Head(job.number, job.key, rank, 0, life, job.width)
            sheaf = Sheaf(Kind.JOIN, head, np.zeros(0, np.int64), None, None)
            places = (*job.shards, job.switch) if job.switch else job.shards
            self._streams = [Stream(sheaf, [at], path) for at, path in zip(places, paths, strict=False)]

    @property
    def done(self) -> bool:
        """Whether every shard has taken the process, and the switch."""
        return all(stream.done for stream in self._streams)

    def end(self) -> None:
        """Ask no more."""
        self._streams = []

    def acknowledged(self, judged: Judged, places: I64, now: float) -> bool:
        """Take acknowledgements out of a batch, whose packets come from ``places`` int64[n]; whether there was anything new."""
        if self.done:
            return False
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        ours = (columns[:, Column.FLAGS] >> KIND_SHIFT == Kind.JOIN) & (
            columns[:, Column.ITERATION] == self.life
        )
        moved = False
        for place, stream in enumerate(self._streams):
            mine = ours & (places[which] == place)
            moved |= bool(stream.acknowledge(columns[mine, Column.SEQUENCE], 0, now).any())
        return moved

    def transmit(self, now: float) -> list[Transmission]:
        """What is to be sent."""
        return [t for stream in self._streams for t in stream.transmit(now)]

    def timer(self) -> float | None:
        """When something is to be sent again."""
        return min((at for stream in self._streams if (at := stream.timer()) is not None), default=None)

    def waiting(self) -> list[str]:
        """Who has not answered."""
        return [
            f"{self._job.called(place)} ({show(stream.receivers[0])}) has not let this rank join"
            for place, stream in enumerate(self._streams)
            if not stream.done
        ]
