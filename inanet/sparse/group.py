"""Sparse jobs: keys and values pushed and pulled through Zebra.

>>> with sparse_group(workers=2, shards=2, optimiser=Sgd(0.1)) as group:
...     group.use_hot(hot_keys)                       # summed by the switch; all others by their PS shard
...     group.push_all([(keys0, grads0), (keys1, grads1)])
...     weights = group.jobs[0].pull(keys0)

Training is bulk synchronous: the k-th push of a rank is summed with the k-th push of every other rank, and a pull that a
rank asks for after its k-th push sees exactly the first k pushes of all ranks. Threads, one per rank, may call
:meth:`SparseJob.push_pull`; a single thread uses :meth:`SparseGroup.push_all`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from inanet.errors import RoundTimeout
from inanet.phy.access import AccessLink
from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.memory import MemoryNetwork
from inanet.phy.udp import UdpDevice
from inanet.proto.common.events import Counted
from inanet.proto.zebra.hot import Identification
from inanet.proto.zebra.job import (
    DEFAULT_SHIFT,
    EMPTY,
    F32,
    PACKET_BYTES,
    HotSet,
    Job,
    Sharding,
    fixed,
    following,
    with_exponents,
)
from inanet.proto.zebra.journal import BadState
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import Initial, Optimiser, Sum, zeros
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switch import DEFAULT_BUDGET, ZebraProgram
from inanet.proto.zebra.worker import ZebraWorker
from inanet.service.shard_state import StateFile
from inanet.sparse.arguments import keys_of, values_of
from inanet.sparse.job import SparseJob
from inanet.sparse.stations import Machine, Stations
from inanet.switch.endpoint import SwitchEndpoint
from inanet.wire.batch import U64


class Shards:
    """Makes PS shards, each with its state file in ``folder`` if there is one, and makes them again."""

    def __init__(
        self, job: Job, optimiser: Optimiser, initial: Initial, timing: Timing, folder: Path | None
    ) -> None:
        self._of = job, optimiser, initial, timing
        self._files: dict[int, StateFile] = {}
        self._paths: list[Path] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._paths = [folder / f"shard{number}.state" for number in range(len(job.shards))]
        self._made = 0

    def first(self) -> list[ParameterShard]:
        """All shards, with the model that is in the folder. Raises :class:`~inanet.proto.zebra.journal.BadState` and ``OSError``."""
        last = []
        for number, path in enumerate(self._paths):
            file = self._files[number] = StateFile(path)
            last.append(max((entry.iteration for entry in file.entries()), default=0))
            file.keep()
        if last and max(last) > min(last) + 1:
            raise BadState(
                f"{self._paths[0].parent}: the shards' parts are of the models after iterations {', '.join(map(str, last))}, which "
                "do not belong together; put the right files there, or none"
            )
        common = min(last) if last else None
        return [self._make(number, common, anew=True) for number in range(len(self._of[0].shards))]

    def _make(self, number: int, iteration: int | None, *, anew: bool) -> ParameterShard:
        job, optimiser, initial, timing = self._of
        self._made += 1
        life, file = self._made & 0xFFFF, self._files.get(number)
        shard = ParameterShard(job, number, optimiser, initial, timing, life=life, journal=file)
        shard.restore(file.entries() if file is not None else (), anew=anew, iteration=iteration)
        return shard

    def again(self, number: int) -> ParameterShard:
        """A shard whose process is gone, without having been asked. Raises as :meth:`first`."""
        if number in self._files:
            self._files.pop(number).close()
            self._files[number] = StateFile(self._paths[number])
        return self._make(number, None, anew=False)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


#: what carries packets: queues of this process, or UDP sockets on the loopback interface
Phy = Literal["memory", "udp"]
_GROUP = 1


class SparseGroup:
    """All ranks of a sparse job, its switch and its PS shards, in this process. ``shards`` makes one again that was restarted;
    ``identification`` decides which keys are hot while the job trains.
    """

    def __init__(
        self,
        job: Job,
        machines: Mapping[str, Machine],
        devices: Mapping[str, Device],
        timeout: float,
        shards: Shards,
        identification: Identification | None = None,
    ) -> None:
        self.job = job
        self.identification = identification
        self.timeout = timeout
        self._made = shards
        made = machines.values()
        self.workers = [machine for machine in made if isinstance(machine, ZebraWorker)]
        self.shards = [machine for machine in made if isinstance(machine, ParameterShard)]
        switch = machines.get("switch")
        self._switch = switch if isinstance(switch, SwitchEndpoint) else None
        self.jobs = [SparseJob(self, worker.rank, worker) for worker in self.workers]
        self.hot = EMPTY
        #: sets that a worker may still use
        self._sets: list[HotSet] = []
        self._stations = Stations({name: (machine, devices[name]) for name, machine in machines.items()})

    @property
    def program(self) -> ZebraProgram | None:
        """What the switch runs, if there is one."""
        program = self._switch.program if self._switch is not None else None
        return program if isinstance(program, ZebraProgram) else None

    def restart_switch(self) -> None:
        """Have the switch lose everything: registers, ledger, what its CPU kept, its counters. It is given its job and hot sets
        again; workers find out by themselves and nothing of the model is lost. Raises ``ValueError`` without a switch.
        """
        before = self.program
        if before is None or self._switch is None:
            raise ValueError("this job has no switch to restart")
        after = before.restarted()
        for hot in self._sets:
            after.prepare(self.job.number, hot)
        self._switch.program = after

    def restart_shard(self, number: int) -> None:
        """Have a PS shard lose everything but its state file, at once. With one nothing is lost; without, the next that every rank
        asks for raises :class:`~inanet.errors.FabricError`, if an iteration was finished.
        """

        def restart(now: float) -> None:
            shard = self._made.again(number)
            for hot in self._sets:
                shard.prepare(hot)
            if number == 0 and not shard.finished:
                shard.announce(self.hot.version)
            if self.identification is not None:
                shard.settle(self.identification.decided)
            self.shards[number] = shard
            self._stations.replace(f"shard{number}", shard)

        self.do(restart)

    # ------------------------------------------------------------ hot keys

    def use_hot(
        self, keys: ArrayLike, *, shift: int = DEFAULT_SHIFT, magnitudes: ArrayLike | None = None
    ) -> HotSet:
        """Have the switch sum these keys (uint64[k], hottest first), from the first iteration or the one after next on.

        Gradients travel as integers of 2^-shift, or, given ``magnitudes`` float32[k] that each key's gradients hardly exceed,
        with an exponent per key. Gradients that do not fit go to the PS. Raises ``ValueError`` when the keys do not fit into
        the switch, without a switch, and in the middle of a job that finds its hot keys by itself.
        """
        if self.program is None:
            raise ValueError("this job has no switch: nothing can be hot")
        identification = self.identification
        if identification is not None and not self._first:
            raise ValueError(
                "this job finds its hot keys by itself, while it trains; give it some before that"
            )
        wanted, version = keys_of(keys).copy(), following(self.hot.version)
        if magnitudes is None:
            hot = fixed(version, wanted, shift)
        else:
            most = values_of(magnitudes, len(wanted), 1)[:, 0]
            if not np.isfinite(most).all() or (most < 0).any():
                raise ValueError("magnitudes are finite, and not below 0")
            hot = with_exponents(version, wanted, most, len(self.workers))
        # ranks in other threads may be carrying packets
        self.do(lambda now: self._use(hot))
        if identification is not None:
            identification.hot = hot
        return hot

    @property
    def _first(self) -> bool:
        """Whether no rank has begun an iteration."""
        return not any(worker.begun for worker in self.workers)

    def _use(self, hot: HotSet) -> None:
        assert self.program is not None
        self.program.prepare(self.job.number, hot)
        everyone: list[ZebraWorker | ParameterShard] = [*self.workers, *self.shards]
        for machine in everyone:
            machine.prepare(hot)
        self.shards[0].announce(hot.version)
        if self._first:
            for worker in self.workers:
                worker.start(hot.version)
        self.hot = hot
        used = {worker.hot.version for worker in self.workers}
        oldest = next((i for i, one in enumerate(self._sets) if one.version in used), 0)
        self._sets = [*self._sets[oldest:], hot]

    def _identify(self, shard: int, counted: Counted) -> None:
        """A shard has counted updates: with the last of them it is decided whether other keys are hot."""
        identification, program = self.identification, self.program
        if identification is None or program is None:
            return
        identification.take(shard, counted.tally)
        while identification.asking:
            identification.take(len(self.shards), program.tally(self.job.number, identification.asking))
            if identification.decide():
                self._use(identification.hot)
            self.shards[0].settle(identification.decided)

    # ---------------------------------------------------------- iterations

    def push_all(
        self, gradients: Sequence[tuple[ArrayLike, ArrayLike]], timeout: float | None = None
    ) -> None:
        """One iteration: a push of every rank, by rank. Raises as :meth:`SparseJob.push`: no rank has pushed after ``ValueError``."""
        if len(gradients) != len(self.jobs):
            raise ValueError(f"{len(self.jobs)} ranks push, gradients are of {len(gradients)}")
        checked = [job.checked(*pair) for job, pair in zip(self.jobs, gradients, strict=True)]
        for job, (keys, values) in zip(self.jobs, checked, strict=True):
            job.push(keys, values, wait=False)
        for job in self.jobs:
            job.wait(timeout)

    def pull_all(self, keys: Sequence[ArrayLike], timeout: float | None = None) -> list[F32]:
        """A pull of every rank, by rank, all on their way together. Raises as :meth:`SparseJob.pull`."""
        checked = [keys_of(wanted) for wanted in keys]
        tickets = [job.ask(wanted) for job, wanted in zip(self.jobs, checked, strict=True)]
        return [job.take(ticket, timeout) for job, ticket in zip(self.jobs, tickets, strict=True)]

    def do(self, action: Callable[[float], Any]) -> Any:
        """Do something with a machine."""
        return self._stations.do(action, self._listen)

    def wait_for(self, until: Callable[[], bool], job: SparseJob, timeout: float | None) -> None:
        """Carry packets until a condition of a rank holds. Raises :class:`~inanet.errors.RoundTimeout`."""
        patience = self.timeout if timeout is None else timeout
        if not self._stations.wait(until, self._listen, time.monotonic() + patience):
            missing = tuple(self.program.missing(self.job.number)) if self.program is not None else ()
            raise RoundTimeout(
                f"not finished after {patience:g} s: {job.why()}",
                job=str(self.job.number),
                rank=job.rank,
                round=job.worker.done + 1,
                ranks=missing or job.worker.ranks_waited_for,
            )

    def _listen(self, name: str, event: Any) -> None:
        if name.startswith("worker"):
            self.jobs[int(name.removeprefix("worker"))].heard(event)
        elif isinstance(event, Counted):
            self._identify(int(name.removeprefix("shard")), event)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of every machine, by its name."""
        found = {f"worker{worker.rank}": worker.stats() for worker in self.workers}
        found |= {f"shard{shard.number}": shard.stats() for shard in self.shards}
        return found | ({"switch": self.program.stats()} if self.program is not None else {})

    def in_network_share(self) -> float:
        """Part of all contributions that the switch has summed."""
        hot = sum(worker.hot_pairs for worker in self.workers)
        total = hot + sum(worker.cold_pairs for worker in self.workers)
        return hot / total if total else 0.0

    def model(self) -> tuple[U64, F32]:
        """All keys that were ever pushed, ascending, and their values float32[n, width]."""
        parts = [shard.store.items() for shard in self.shards]
        keys = np.concatenate([k for k, _ in parts])
        order: NDArray[np.int64] = np.argsort(keys)
        return keys[order], np.concatenate([v for _, v in parts])[order]

    def close(self) -> None:
        """Close all devices and state files."""
        self._stations.close()
        self._made.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sparse_group(
    workers: int,
    shards: int = 1,
    *,
    width: int = 1,
    optimiser: Optimiser | None = None,
    initial: Initial = zeros,
    switch: bool = True,
    floats: bool = False,
    sharding: Sharding = "hash",
    registers: int = 32,
    hot_pairs: int = 20,
    packet_bytes: int = PACKET_BYTES,
    budget: int = DEFAULT_BUDGET,
    phy: Phy = "memory",
    rate: float | None = None,
    impair: float = 0.0,
    seed: int = 0,
    state: str | Path | None = None,
    timing: Timing | None = None,
    timeout: float = 60.0,
    online: Online | None = None,
    shift: int = DEFAULT_SHIFT,
) -> SparseGroup:
    """A sparse job in this process: ``workers`` ranks, ``shards`` PS shards, and a switch unless ``switch=False``.

    ``width`` float32 values per key; ``optimiser`` turns sums of gradients into values (:mod:`inanet.proto.zebra.store`; by
    default they are added up) that begin as ``initial`` says. Hot gradients travel as integers, or, with ``floats``, as
    floats that the switch adds by tables. ``registers`` of the switch, ``budget`` bytes in all, ``hot_pairs`` in a packet to it. ``phy``: "memory", or
    "udp" for sockets on 127.0.0.1. ``rate`` puts links of that many bits per second
    between ranks and shards and the switch. ``impair`` loses, repeats, reorders and damages packets with this probability
    each, from ``seed``. With a folder ``state`` each shard keeps its part of the model in a file there: it is the checkpoint from which a shard
    goes on that is restarted, and a group of the same shape begins.
    ``timeout`` seconds are the default for pushes and pulls. With ``online`` the job finds its hot keys while it trains, whose
    gradients are in steps of 2^-shift.
    """
    names = [f"worker{rank}" for rank in range(workers)] + [f"shard{number}" for number in range(shards)]
    devices = _devices([*names, *(["switch"] if switch else [])], phy, rate, impair, seed)
    at = {name: device.endpoint for name, device in devices.items()}
    try:
        job = Job(
            1,
            tuple(at[f"worker{rank}"] for rank in range(workers)),
            tuple(at[f"shard{number}"] for number in range(shards)),
            at.get("switch", 0),
            key=int(np.random.default_rng(seed).integers(2**63)),
            width=width,
            packet_bytes=packet_bytes,
            registers=registers,
            hot_pairs=hot_pairs,
            sharding=sharding,
            floats=floats,
            counted=online.after if online is not None else 0,
            listed=online.most(width) if online is not None else 0,
        )
        if online is not None and not switch:
            raise ValueError("nothing can be hot without a switch")
        identification = None if online is None else Identification(online, shards, width, shift)
    except ValueError:
        for device in devices.values():
            device.close()
        raise
    timing = timing or (Timing(first=0.02, least=0.005) if rate is None else Timing(first=0.5, least=0.02))
    machines: dict[str, Machine] = {
        f"worker{rank}": ZebraWorker(job, rank, timing) for rank in range(workers)
    }
    made = Shards(job, optimiser or Sum(), initial, timing, None if state is None else Path(state))
    try:
        machines |= {f"shard{shard.number}": shard for shard in made.first()}
        if switch:
            program = ZebraProgram(budget=budget, timing=timing)
            program.add_job(job, _GROUP)
            program.check(job.number, job.listed)
            machines["switch"] = SwitchEndpoint(program, {_GROUP: job.workers})
    except (ValueError, OSError):
        made.close()
        for device in devices.values():
            device.close()
        raise
    return SparseGroup(job, machines, devices, timeout, made, identification)


def _devices(
    names: Sequence[str], phy: Phy, rate: float | None, impair: float, seed: int
) -> dict[str, Device]:
    network = MemoryNetwork()
    made: dict[str, Device] = {}
    for number, name in enumerate(names):
        device: Device = network.open() if phy == "memory" else UdpDevice()
        if impair:
            device = FaultInjector(
                device,
                seed * 1009 + number,
                time.monotonic,
                drop=impair,
                duplicate=impair,
                reorder=impair,
                corrupt=impair,
            )
        if rate is not None and name != "switch":
            # the switch's ports are the other ends of the same links
            device = AccessLink(device, rate, time.monotonic)
        made[name] = device
    return made
