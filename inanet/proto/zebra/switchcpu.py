"""The CPU beside the pipeline (Zebra_s): keeps sums that left the registers until their PS has them (section III-F).

The pipeline need not wait for an answer before it uses the registers again; the copies here are what is repeated. They are kept
until the next iteration's, since a PS shard that is restarted has lost what it had acknowledged: then all are sent again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.layout import in_sequence
from inanet.proto.zebra.membership import Job
from inanet.proto.zebra.packets import Column, Head, Sheaf
from inanet.proto.zebra.serial import ahead
from inanet.proto.zebra.standing import Standing
from inanet.proto.zebra.stream import Path, Stream, Timing
from inanet.wire.batch import I64, Transmission
from inanet.wire.zebra import KIND_SHIFT, Flag, Kind


class SwitchCpu:
    """For one job. Sans-IO; it sends from the switch's address."""

    def __init__(self, job: Job, timing: Timing) -> None:
        self._job = job
        self._paths = [Path(timing) for _ in job.shards]
        self._streams: list[Stream | None] = [None] * len(job.shards)
        # workers ask first, so that a question may be passed on when it comes
        self._standing = [Standing(timing.ask / 2) for _ in job.shards]
        self._iteration = 0
        self._out: list[Transmission] = []
        self.sent = self.repeated = 0

    def keep(self, version: int, iteration: int, shards: I64, ranks: I64, words: NDArray[np.uint32]) -> None:
        """Take over an iteration's sums: ``shards`` and ``ranks`` int64[n], ``words`` uint32[n, width].

        Every shard also gets an END. What was kept of the iteration before has arrived: a shard finishes an iteration only
        with it, and no worker begins one before all shards have finished the last.
        """
        job = self._job
        flags = Flag.FLOAT if job.floats else Flag.NONE
        head = Head(job.number, job.key, 0, version, iteration, job.width, flags)
        self._iteration = iteration
        for shard, address in enumerate(job.shards):
            self._count(shard)
            mine = np.flatnonzero(shards == shard)
            counts = in_sequence(len(mine), job.capacity(Kind.AGGREGATE))
            sheaf = Sheaf(Kind.AGGREGATE, head, counts, ranks[mine].astype(np.uint64), words[mine])
            self._standing[shard].begin()
            self._streams[shard] = Stream(sheaf, [address], self._paths[shard])

    def acknowledged(self, shard: int, columns: I64, now: float) -> None:
        """A shard has acknowledged packets, whose acknowledgements' headers are ``columns`` int64[n, 8]."""
        stream, standing = self._streams[shard], self._standing[shard]
        if stream is None:
            return
        mine = columns[
            (ahead(columns[:, Column.ITERATION], self._iteration) == 0)
            & (columns[:, Column.FLAGS] == (Kind.AGGREGATE << KIND_SHIFT | standing.attempt))
        ]
        if standing.restarted(mine[:, Column.PAIRS]):
            self._count(shard)
            self._streams[shard] = stream.anew(stream.sheaf.attempted(standing.attempt, self._job.key))
            return
        stream.acknowledge(mine[:, Column.SEQUENCE], 0, now)
        if stream.done:
            standing.satisfied(now)

    def asked(self, iteration: I64, now: float) -> None:
        """Workers wait for the end of iterations, int64[n]. If these sums are of one: ask shards whether they still have them."""
        if not (ahead(iteration, self._iteration) == 0).any():
            return
        for stream, standing in zip(self._streams, self._standing, strict=True):
            if stream is not None and stream.done and standing.asks(now):
                self._out += stream.last()

    @property
    def kept(self) -> int:
        """Packets that some shard has not acknowledged."""
        return sum(stream.outstanding for stream in self._streams if stream is not None)

    def transmit(self, now: float) -> list[Transmission]:
        """Sums that leave, for the first time or again."""
        out, self._out = self._out, []
        return out + [t for stream in self._streams if stream is not None for t in stream.transmit(now)]

    def timer(self) -> float | None:
        """When sums are to be sent again."""
        return earliest(self._streams)

    def stats(self) -> dict[str, int]:
        """Packets sent, and sent again."""
        live = [stream for stream in self._streams if stream is not None]
        return {
            "cpu_sent": self.sent + sum(stream.sent for stream in live),
            "cpu_repeated": self.repeated + sum(stream.repeated for stream in live),
            "shard_restarts": sum(standing.restarts for standing in self._standing),
        }

    def _count(self, shard: int) -> None:
        stream = self._streams[shard]
        if stream is not None:
            self.sent += stream.sent
            self.repeated += stream.repeated


def earliest(streams: Sequence[Stream | None]) -> float | None:
    """The first timer of several streams."""
    times = [stream.timer() for stream in streams if stream is not None]
    return min((at for at in times if at is not None), default=None)
