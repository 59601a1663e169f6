"""A sparse job on one rack in virtual time: workers and PS shards around a switch, with Zebra or with a PS alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.zebra.job import DEFAULT_SHIFT, F32, Job, fixed
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Initial, Optimiser, zeros
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switch import ZebraProgram
from inanet.proto.zebra.worker import IterationDone, Pulled, ZebraWorker
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.sim.nodes import Machine
from inanet.wire.batch import U64
from inanet.wire.endpoint import endpoint

SWITCH = endpoint("10.0.0.254", 0xBEE0)
#: Queues of a rack make round trips long: 32 workers' windows are some tens of milliseconds of a PS's link of 1 Gbit/s.
TIMING = Timing(window=64, first=0.2, least=0.02, silent=60.0)
_GROUP = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """``seconds`` of virtual time of ``iterations``; ``pairs`` pushed by all workers, ``hot`` of them summed by the switch;
    ``repeated`` packets of all senders.
    """

    seconds: float
    iterations: int
    pairs: int
    hot: int
    repeated: int

    @property
    def keys_per_second(self) -> float:
        """Pairs that were summed, per second."""
        return self.pairs / self.seconds

    @property
    def in_network_share(self) -> float:
        """Part of the pairs that the switch summed."""
        return self.hot / self.pairs if self.pairs else 0.0


class SparseRack:
    """``hot`` keys (uint64[k], hottest first) are summed by the switch; without any (``None``) it only forwards, and the job
    is one of a PS. ``link`` joins every host to the switch. A key has ``width`` values, which begin as ``initial`` says and
    which ``optimiser`` changes; hot gradients are in steps of 2^-``shift``.
    """

    def __init__(
        self,
        workers: int,
        shards: int,
        link: LinkSpec,
        hot: U64 | None,
        *,
        seed: int = 0,
        budget: int = 1 << 20,
        timing: Timing = TIMING,
        width: int = 1,
        optimiser: Optimiser | None = None,
        initial: Initial = zeros,
        shift: int = DEFAULT_SHIFT,
    ) -> None:
        self.network = Network(seed)
        self.job = Job(
            1,
            tuple(endpoint(f"10.1.{i // 250}.{i % 250 + 1}", 4000) for i in range(workers)),
            tuple(endpoint(f"10.2.0.{i + 1}", 5000) for i in range(shards)),
            0 if hot is None else SWITCH,
            key=1,
            width=width,
        )
        self.workers = [ZebraWorker(self.job, rank, timing) for rank in range(workers)]
        self.shards = [ParameterShard(self.job, i, optimiser, initial, timing) for i in range(shards)]
        program = None
        if hot is not None:
            program = ZebraProgram(budget=budget, timing=timing)
            program.add_job(self.job, _GROUP)
            self._use(program, hot, shift)
        self.program = program
        switch = self.network.add_switch("switch", program, SWITCH)
        switch.groups[_GROUP] = self.job.workers
        machines: list[Machine] = [*self.workers, *self.shards]
        hosts = [(f"worker{i}", at) for i, at in enumerate(self.job.workers)]
        hosts += [(f"shard{i}", at) for i, at in enumerate(self.job.shards)]
        for (name, at), machine in zip(hosts, machines, strict=True):
            self.network.add_host(name, at, machine)
            self.network.connect(name, "switch", link)

    def _use(self, program: ZebraProgram, hot: U64, shift: int) -> None:
        chosen = fixed(1, hot, shift)
        program.prepare(self.job.number, chosen)
        everyone: list[ZebraWorker | ParameterShard] = [*self.workers, *self.shards]
        for machine in everyone:
            machine.prepare(chosen)
        self.shards[0].announce(1)
        for worker in self.workers:
            worker.start(1)

    def iterate(self, keys: Sequence[U64], gradients: Sequence[NDArray[np.float32]]) -> None:
        """One iteration of all workers: push, then pull the same keys."""
        seen = len(self.network.log)
        for rank, worker in enumerate(self.workers):
            worker.push(keys[rank], gradients[rank], self.network.now)
            worker.pull(keys[rank], self.network.now)
            self.network.wake(f"worker{rank}")
        self._everybody(Pulled, seen)

    def push(self, keys: Sequence[U64], gradients: Sequence[F32]) -> None:
        """An iteration's push of all workers; its end is when the last of them knows that it is finished."""
        seen = len(self.network.log)
        for rank, worker in enumerate(self.workers):
            worker.push(keys[rank], gradients[rank], self.network.now)
            self.network.wake(f"worker{rank}")
        self._everybody(IterationDone, seen)

    def pull(self, keys: Sequence[U64]) -> list[F32]:
        """A pull of all workers, by rank."""
        seen = len(self.network.log)
        for rank, worker in enumerate(self.workers):
            worker.pull(keys[rank], self.network.now)
            self.network.wake(f"worker{rank}")
        found = self._everybody(Pulled, seen)
        return [found[f"worker{rank}"].values for rank in range(len(self.workers))]

    def read(self, keys: U64) -> F32:
        """Values of keys as their shards have them, without a packet: float32[n, width]."""
        out: F32 = np.zeros((len(keys), self.job.width), np.float32)
        shard_of = self.job.shard_of(keys)
        for shard in self.shards:
            mine = shard_of == shard.number
            out[mine] = shard.store.read(keys[mine])
        return out

    def _everybody(self, sort: type, seen: int) -> dict[str, Any]:
        """Let time pass until every worker has told of something, later than entry ``seen`` of the log: what each told."""
        log, found = self.network.log, dict[str, Any]()

        def over() -> bool:
            nonlocal seen
            found.update((name, event) for name, event in log[seen:] if isinstance(event, sort))
            seen = len(log)
            return len(found) == len(self.workers)

        self.network.run(over, deadline=600.0)
        return found

    def model(self) -> tuple[U64, NDArray[np.float32]]:
        """All keys that were pushed, ascending, and their sums, float32[n, 1]."""
        parts = [shard.store.items() for shard in self.shards]
        keys = np.concatenate([k for k, _ in parts])
        order = np.argsort(keys)
        return keys[order], np.concatenate([v for _, v in parts])[order]

    def measure(self, batches: Sequence[Sequence[U64]]) -> Measured:
        """One iteration per entry of ``batches``, which has each worker's keys; every gradient is 1. The first is not
        measured: nobody knows the values of hot parameters before it.
        """
        begin, first = 0.0, 0
        for number, keys in enumerate(batches):
            if number == 1:
                begin, first = self.network.now, len(self.network.log)
            self.iterate(keys, [np.ones((len(k), 1), np.float32) for k in keys])
        done = [e for _, e in self.network.log[first:] if isinstance(e, IterationDone)]
        repeated = sum(worker.stats()["repeated"] for worker in self.workers)
        repeated += sum(shard.stats()["news_repeated"] for shard in self.shards)
        return Measured(
            self.network.now - begin,
            len(batches) - 1,
            sum(event.pairs for event in done),
            sum(event.hot for event in done),
            repeated,
        )
