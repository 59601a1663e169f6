"""A sparse job around a switch in virtual time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra import journal
from inanet.proto.zebra.job import HotSet, Job
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Optimiser
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switch import ZebraProgram
from inanet.proto.zebra.worker import IterationDone, Pulled, ZebraWorker
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire.endpoint import endpoint

Gradients = Sequence[tuple[NDArray[np.uint64], NDArray[np.float32]]]
#: short, so that virtual time is not what a test waits for
TIMING = Timing(window=8, first=0.001, least=0.0002, silent=5.0, ask=0.01)


class Notes:
    """A shard's journal in memory, which is long from ``long`` bytes on."""

    def __init__(self, data: bytes = b"", long: int = 1 << 30) -> None:
        self.data = data
        self.long = long
        self.rewritten = 0

    def append(self, record: bytes) -> bool:
        self.data += record
        return len(self.data) > self.long

    def rewrite(self, records: bytes) -> None:
        self.data = records
        self.rewritten += 1

    def entries(self) -> list[journal.Entry]:
        return [entry for _, entry in journal.records(self.data)]


class Rig:
    """``workers`` and ``shards`` around a program; ``switch=False``: around nothing that adds. ``lives`` are the workers'."""

    def __init__(
        self,
        workers: int,
        shards: int,
        impairment: Impairment | None = None,
        *,
        switch: bool = True,
        optimiser: Optimiser | None = None,
        lives: Sequence[int | None] | None = None,
        long: int = 1 << 30,
        **options: object,
    ) -> None:
        options = {"key": 77, "packet_bytes": 120, "registers": 4} | options
        self.job = Job(
            3,
            tuple(endpoint(f"10.0.1.{i + 1}", 4000) for i in range(workers)),
            tuple(endpoint(f"10.0.2.{i + 1}", 5000) for i in range(shards)),
            SWITCH if switch else 0,
            **options,  # type: ignore[arg-type]
        )
        self.program = ZebraProgram(timing=TIMING)
        self.program.add_job(self.job, 3)
        self.star = Star(self.program if switch else None, impairment)
        self.star.group(3, self.job.workers)
        self.sets: list[HotSet] = []
        self.workers = [
            ZebraWorker(self.job, rank, TIMING, life)
            for rank, life in enumerate(lives if lives is not None else [None] * workers)
        ]
        self._optimiser = optimiser
        self.notes = [Notes(long=long) for _ in range(shards)]
        self.shards = [self._shard(number) for number in range(shards)]
        for address, machine in (*zip(self.job.workers, self.workers, strict=True),):
            self.star.attach(address, machine)
        for address, shard in zip(self.job.shards, self.shards, strict=True):
            self.star.attach(address, shard)

    def prepare(self, hot: HotSet) -> None:
        """Give a hot set to all."""
        self.sets.append(hot)
        self.program.prepare(self.job.number, hot)
        for machine in (*self.workers, *self.shards):
            machine.prepare(hot)
        self.shards[0].announce(hot.version)

    def start(self, hot: HotSet) -> None:
        """Use a hot set from the first iteration on."""
        self.prepare(hot)
        for worker in self.workers:
            worker.start(hot.version)

    def restart(self) -> None:
        """Put another life of the switch, which has its job and its hot sets, in the place of this one."""
        self.program = self.program.restarted()
        for hot in self.sets:
            self.program.prepare(self.job.number, hot)
        self.star.program = self.program

    def _shard(self, number: int) -> ParameterShard:
        notes = self.notes[number]
        shard = ParameterShard(self.job, number, self._optimiser, timing=TIMING, journal=notes)
        shard.restore(notes.entries())
        return shard

    def restart_shard(self, number: int, *, lost: bool = False) -> None:
        """Put another process in the place of a shard, which has its journal unless that is ``lost``."""
        if lost:
            self.notes[number] = Notes()
        shard = self.shards[number] = self._shard(number)
        if lost:
            shard.life = 999
        for hot in self.sets:
            shard.prepare(hot)
        self.star.attach(self.job.shards[number], shard)

    def push(self, gradients: Gradients) -> None:
        """One iteration."""
        before = len(self.star.log)
        for worker, (keys, values) in zip(self.workers, gradients, strict=True):
            worker.push(keys, values, self.star.now)
        self.star.run(lambda: self._count(before, IterationDone) == len(self.workers), deadline=20.0)

    def pull(self, keys: NDArray[np.uint64]) -> list[NDArray[np.float32]]:
        """The same pull by every worker."""
        before = len(self.star.log)
        for worker in self.workers:
            worker.pull(keys, self.star.now)
        self.star.run(lambda: self._count(before, Pulled) == len(self.workers), deadline=20.0)
        found = {e.rank: e.values for _, e in self.star.log[before:] if isinstance(e, Pulled)}
        return [found[rank] for rank in range(len(self.workers))]

    def _count(self, before: int, sort: type) -> int:
        return sum(isinstance(event, sort) for _, event in self.star.log[before:])


def random_gradients(
    rng: np.random.Generator, workers: int, space: int, most: int, width: int = 1
) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Distinct keys spread over 64 bits, gradients that are multiples of 2^-10: their sums are exact."""
    out = []
    for _ in range(workers):
        keys = rng.choice(space, int(rng.integers(0, min(most, space) + 1)), replace=False).astype(np.uint64)
        values = rng.integers(-(2**12), 2**12, (len(keys), width)) / 2.0**10
        out.append((spread(keys), values.astype(np.float32)))
    return out


def spread(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Small numbers to keys all over the key space."""
    return keys * np.uint64(0x9E3779B97F4A7C15)


def summed(pushed: Gradients, width: int = 1) -> dict[int, NDArray[np.float64]]:
    """What the keys add up to."""
    total: dict[int, NDArray[np.float64]] = {}
    for keys, values in pushed:
        for key, value in zip(keys.tolist(), values.astype(np.float64), strict=True):
            total[key] = total.get(key, np.zeros(width)) + value
    return total


def passes(register: NDArray[np.int64], counts: NDArray[np.int64], registers: int) -> NDArray[np.int64]:
    """int64[packets]: passes that each packet needs, the most parameters that it has of one register; 1 for an empty one.

    ``register`` is in the order of encoding.
    """
    packet = np.repeat(np.arange(len(counts)), counts)
    place, several = np.unique(packet * registers + register, return_counts=True)
    needed: NDArray[np.int64] = np.ones(len(counts), np.int64)
    np.maximum.at(needed, place // registers, several)
    return needed
