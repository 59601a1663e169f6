"""What a switch has of one job: the hot set that its registers are laid out for, whose gradients are in them, and its CPU."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.counts import Counts
from inanet.proto.zebra.layout import Layout
from inanet.proto.zebra.ledger import Ledger
from inanet.proto.zebra.logsum import TABLES
from inanet.proto.zebra.membership import EMPTY, HotSet, Job, forget, most_packets, register_bytes
from inanet.proto.zebra.packets import Column, Judged
from inanet.proto.zebra.registers import Registers, empty, gather
from inanet.proto.zebra.serial import ahead
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switchcpu import SwitchCpu
from inanet.wire.batch import I64, U64
from inanet.wire.drops import Drop
from inanet.wire.zebra import Flag, Kind

#: Places parameters: how many, in how many registers.
Place = Callable[[int, int], Layout]


class Served:
    """A job; ``group`` is the number of the group that NEWS go to, ``timing`` the CPU's."""

    def __init__(self, job: Job, group: int, timing: Timing, place: Place) -> None:
        self.job = job
        self.group = group
        self._timing = timing
        self._place = place
        self.cpu = SwitchCpu(job, timing)
        self.rank_of = {address: rank for rank, address in enumerate(job.workers)}
        self.shard_of = {address: shard for shard, address in enumerate(job.shards)}
        #: the open one, and whether a packet has said so
        self.iteration = 1
        self._informed = False
        #: numbers of the processes that have taken the ranks' places, and how often one has taken another's
        self.lives: dict[int, int] = {}
        self.begun = 0
        #: hot sets that packets may ask for
        self.prepared: dict[int, HotSet] = {}
        self.counts = Counts(job.counted, job.listed)
        self._lay_out(EMPTY)

    def _updates(self) -> tuple[U64, I64]:
        """Hot keys, and contributions to them since this was last asked."""
        counts = self.registers.updates.copy()
        self.registers.updates[:] = 0
        return self.hot.keys, counts

    # ------------------------------------------------------------ registers

    def bytes_for(self, count: int) -> int:
        """Registers and ledger for so many hot parameters."""
        layout = self._place(count, self.job.registers)
        return register_bytes(len(self.job.workers), self.job.width, count, layout.registers * layout.depth)

    def claimed(self) -> int:
        """What the largest hot set needs, in place or ready."""
        return max(self.bytes_for(len(hot)) for hot in (self.hot, *self.prepared.values()))

    def _install(self, hot: HotSet) -> None:
        """Put a hot set in place, while the registers are empty."""
        self.counts.keep(self._updates)
        self._lay_out(hot)
        # a worker may be on its way from an older set, never back to it
        forget(self.prepared, hot.version)
        self.prepared.pop(hot.version, None)

    def _lay_out(self, hot: HotSet) -> None:
        job, count = self.job, len(hot)
        self.hot = hot
        self._layout = self._place(count, job.registers)
        self.ledger = Ledger(len(job.workers), most_packets(count), fixed=True)
        self._shards = job.shard_of(hot.keys)
        self.registers = Registers(
            position=np.ascontiguousarray(self._layout.position),
            values=np.zeros((self._layout.registers * self._layout.depth, job.width), np.int32),
            touched=np.zeros(count, np.uint8),
            updates=np.zeros(count, np.int64),
            seen=self.ledger.seen,
            received=self.ledger.received,
            expected=self.ledger.expected,
            mark=np.full(self._layout.registers, -1, np.int64),
            several=np.zeros(self._layout.registers, np.int64),
        )

    # ------------------------------------------------------------ gradients

    def agree(self, judged: Judged, which: I64) -> None:
        """Refuse gradients of another hot set; a new one that is ready is put in place while the registers are empty."""
        versions = judged[Column.VERSION][which]
        for version in np.unique(versions[versions != self.hot.version]).tolist():
            if version in self.prepared and not self.ledger.begun:
                self._install(self.prepared[version])
        other = which[versions != self.hot.version]
        ready = np.isin(judged[Column.VERSION][other], list(self.prepared))
        judged.refuse(other[ready], Drop.STALE_PLAN)
        judged.refuse(other[~ready], Drop.FUTURE_PLAN)

    def fold(self, judged: Judged, which: I64, ranks: I64, most_passes: int) -> I64:
        """Add gradients of workers, ``ranks`` int64[n], to the registers, each packet once; gives the passes that each took."""
        columns = judged.columns[which]
        passes: I64 = np.ones(len(which), np.int64)
        reason: NDArray[np.uint8] = np.zeros(len(which), np.uint8)
        gather(
            self.registers,
            TABLES,
            judged.batch.arena,
            np.ascontiguousarray(judged.batch.offsets[which]),
            np.ascontiguousarray(ranks),
            np.ascontiguousarray(columns[:, Column.SEQUENCE]),
            np.ascontiguousarray(columns[:, Column.PAIRS]),
            (columns[:, Column.FLAGS] & Flag.END).astype(np.uint8),
            self._layout.depth,
            most_passes,
            self.job.floats,
            passes,
            reason,
        )
        judged.reason[which] = reason
        return passes

    # ----------------------------------------------------------- iterations

    def catch_up(self, iterations: I64) -> int:
        """If a worker has begun an iteration that this switch does not know, it was another life that took part in the last ones;
        gives how many these are.

        All before are finished, or the worker would not have begun it; what is here of them is of no use to anybody. A new life
        believes the first packet, whatever its number.
        """
        if not len(iterations):
            return 0
        skipped = 0
        if not self._informed:
            self._informed, first = True, int(iterations[0])
            skipped += first - self.iteration
            self._begin_at(first)
        most = int(ahead(iterations, self.iteration).max())
        if most > 0:
            empty(self.registers, self.job.floats)
            self.ledger.clear()
            skipped += most
            self._begin_at(self.iteration + most)
        return skipped

    def _begin_at(self, iteration: int) -> None:
        """This is the first iteration that all of is seen here."""
        self.iteration = iteration
        self.registers.updates[:] = 0
        self.counts.begin(iteration)

    def begin_anew(self) -> None:
        """The job begins anew, with other processes."""
        empty(self.registers, self.job.floats)
        self.ledger.clear()
        self.cpu = SwitchCpu(self.job, self._timing)
        self.lives.clear()
        self._informed = False
        self.begun += 1

    def finish(self) -> int:
        """Everything of an iteration is in: hand the sums to the CPU; gives how many these are."""
        ranks, words = empty(self.registers, self.job.floats)
        self.cpu.keep(self.hot.version, self.iteration, self._shards[ranks], ranks, words)
        self.counts.finished(self.iteration, self._updates)
        self.ledger.clear()
        self.iteration += 1
        return len(ranks)

    def acknowledged(self, judged: Judged, now: float) -> None:
        """Shards have acknowledged sums."""
        which = judged.of(Kind.ACK)
        columns = judged.columns[which]
        sources = judged.batch.sources[which]
        for address in np.unique(sources).tolist():
            mine = sources == address
            self.cpu.acknowledged(self.shard_of[int(address)], columns[mine], now)
