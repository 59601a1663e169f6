"""Sparse jobs whose machines are processes: each reads the job's file and is one of the machines in it.

A switch and the PS shards are served (``ina zebra serve FILE NAME``); ranks join:

>>> with join_sparse("job.toml", rank=0) as member:
...     rows = member.job.push_pull(keys, gradients)

All machines may be started in any order. A switch that ends may be started again at any time, and the job loses nothing; nor
does it with a PS shard that has a state file. Without one a shard has lost its part of the model, and a rank that ends its place in
the iteration: then the job is over, and every rank is told at once.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from inanet.client.sparse_job import SparseJob
from inanet.client.stations import Machine, Stations
from inanet.config.file import ConfigError, Problem, find_file, read_toml, validate
from inanet.config.sparse import SparseConfig
from inanet.errors import RoundTimeout
from inanet.phy.access import AccessLink
from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.udp import UdpDevice
from inanet.proto.common.events import PeerSilent
from inanet.proto.zebra.job import HotSet, Job, fixed
from inanet.proto.zebra.shard import ParameterShard
from inanet.proto.zebra.store import OPTIMISERS, Uniform, zeros
from inanet.proto.zebra.stream import Timing
from inanet.proto.zebra.switch import ZebraProgram
from inanet.proto.zebra.worker import IterationDone, Pulled, Refused, Stalled, ZebraWorker
from inanet.service.shard_state import StateFile
from inanet.switch.endpoint import SwitchEndpoint
from inanet.wire.drops import Drop
from inanet.wire.endpoint import address_of, endpoint, show

_GROUP = 1
#: seconds between two looks at whether a served machine is to end
_LOOK = 0.1
SWITCH = "switch"


class SparseFile:
    """A job's file, read and understood. Raises :class:`~inanet.config.file.ConfigError` for anything wrong in it."""

    def __init__(self, name: str | Path) -> None:
        path = find_file(name)
        self.config = validate(SparseConfig, read_toml(path), path)
        its = self.config.job
        try:
            self.hot = self._hot()
            self.job = Job(
                its.number,
                tuple(endpoint(one.host, one.port) for one in its.workers),
                tuple(endpoint(one.host, one.port) for one in its.shards),
                endpoint(its.switch.host, its.switch.port) if its.switch is not None else 0,
                key=int(its.secret, 16) ^ self._digest(),
                width=its.width,
                registers=its.registers,
                hot_pairs=its.hot_pairs,
                sharding=its.sharding,
            )
        except ValueError as error:
            raise ConfigError(path, [Problem("job", str(error))]) from None
        except OSError as error:
            raise ConfigError(
                path, [Problem("job.hot", f"cannot read {its.hot}: {error.strerror}")]
            ) from None
        link = its.link
        self.timing = Timing(first=0.05, least=0.005) if link is None else Timing(first=0.5, least=0.02)

    def _digest(self) -> int:
        """64 bits of everything that machines must agree on: those whose files differ do not understand each other."""
        its = self.config.job
        parts = its.workers, its.shards, its.switch, its.width, its.sharding, its.registers, its.hot_pairs
        text = repr((*parts, self.hot is not None and (its.shift, self.hot.keys.tobytes())))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _hot(self) -> HotSet | None:
        its = self.config.job
        if its.hot is not None and its.switch is None:
            raise ValueError("nothing can be hot without a switch; give its endpoint, or no hot keys")
        keys = its.hot_keys()
        if keys is None:
            return None
        return fixed(1, np.array(keys, np.uint64), its.shift)

    def names(self) -> tuple[str, ...]:
        """Machines that are served: the shards, and the switch if there is one."""
        shards = tuple(f"shard{number}" for number in range(len(self.job.shards)))
        return (*shards, SWITCH) if self.job.switch else shards

    def device(self, address: int, *, shaped: bool = True) -> Device:
        """The socket of a machine at one of the job's addresses. Raises ``OSError`` when it cannot be bound."""
        device: Device = UdpDevice(*address_of(address))
        how = self.config.impair
        if how.active:
            rates = {name: getattr(how, name) for name in ("drop", "duplicate", "reorder", "corrupt")}
            device = FaultInjector(device, how.seed * 1009 + address % 1009, time.monotonic, **rates)
        link = self.config.job.link
        return AccessLink(device, link, time.monotonic) if link is not None and shaped else device

    def machine(self, name: str, state: StateFile | None = None, **how: Any) -> tuple[Machine, int]:
        """A machine that is served, with its hot set, and its address. A shard begins with its ``state``, which ``how`` is said as
        to :meth:`~inanet.proto.zebra.shard.ParameterShard.restore`.

        Raises ``ValueError`` for an unknown name, for hot keys that do not fit into the switch, and for a state that is not of
        this shard.
        """
        if name not in self.names():
            raise ValueError(f"the job has no {name!r}; it has {', '.join(self.names())}")
        job, its = self.job, self.config.job
        if name == SWITCH:
            program = ZebraProgram(budget=its.memory, timing=self.timing, life=secrets.randbelow(1 << 16))
            program.add_job(job, _GROUP)
            if self.hot is not None:
                program.prepare(job.number, self.hot)
            return SwitchEndpoint(program, {_GROUP: job.workers}), job.switch
        number = int(name.removeprefix("shard"))
        initial = Uniform(its.initial) if its.initial else zeros
        life = secrets.randbelow(1 << 16)
        optimiser = OPTIMISERS[its.optimiser](its.rate, its.beta)
        shard = ParameterShard(job, number, optimiser, initial, self.timing, life=life, journal=state)
        shard.restore(() if state is None else state.entries(), **how)
        if self.hot is not None:
            shard.prepare(self.hot)
            if number == 0 and not shard.finished:
                shard.announce(self.hot.version)
        return shard, job.shards[number]

    def worker(self, rank: int) -> ZebraWorker:
        """A rank's machine, with its hot set. Raises ``ValueError`` for a rank that the job does not have."""
        if not 0 <= rank < len(self.job.workers):
            raise ValueError(f"the job has ranks 0 to {len(self.job.workers) - 1}, not {rank}")
        worker = ZebraWorker(self.job, rank, self.timing, secrets.randbits(32))
        if self.hot is not None:
            worker.prepare(self.hot)
            worker.start(self.hot.version)
        return worker


def serve(
    file: SparseFile,
    name: str,
    tell: Callable[[str], None],
    check: Callable[[], None],
    *,
    state: str | Path | None = None,
    anew: bool = False,
    iteration: int | None = None,
) -> None:
    """Be a switch or a PS shard until ``check``, which is called ten times a second, raises. ``tell`` is told when the machine is
    ready, and whom a shard waits for.

    A shard goes on from its file ``state`` and keeps it; ``anew`` with the model in it, that of ``iteration`` if there is another,
    for a job whose processes are all new. Raises ``ValueError`` and ``OSError`` as :meth:`SparseFile.machine`,
    :meth:`SparseFile.device` and :class:`~inanet.service.shard_state.StateFile`, and ``OSError`` when the state cannot be written.
    """
    if name == SWITCH and state is not None:
        raise ValueError("a switch has no state: it may be started again without one")
    if state is None and anew:
        raise ValueError("there is no model to begin with; give the shard's state file")
    if iteration is not None and not anew:
        raise ValueError(
            "a job whose ranks live goes on from the last iteration; another can only begin anew"
        )
    kept = None if state is None else StateFile(state)
    try:
        if kept is not None and anew:
            kept.keep()
        machine, address = file.machine(name, kept, anew=anew, iteration=iteration)
        device = file.device(address, shaped=name != SWITCH)
        stations = Stations({name: (machine, device)})
    except (ValueError, OSError):
        if kept is not None:
            kept.close()
        raise

    def heard(name: str, event: Any) -> None:
        if isinstance(event, PeerSilent):
            tell(f"waiting: {name} has heard nothing of {event.name} for {event.seconds:.0f} s")

    try:
        tell(f"ready: {name} at {show(address)}{_model(machine)}")
        foreign = file.config.impair.active
        while True:
            check()
            stations.wait(lambda: False, heard, time.monotonic() + _LOOK)
            if not foreign and _foreign(machine):
                foreign = True
                tell(
                    f"foreign: {name} has had packets whose tags do not fit: of a machine whose file or hot keys are others, or of "
                    "somebody without the secret"
                )
    finally:
        stations.close()
        if kept is not None:
            kept.close()


def _model(machine: Machine) -> str:
    """What a shard begins with."""
    if not isinstance(machine, ParameterShard) or not machine.began:
        return ""
    how = f"after iteration {machine.began}" + ("" if machine.finished else ", for a job that begins anew")
    return f", with {len(machine.store)} keys, {how}"


def _foreign(machine: Machine) -> int:
    """Packets that do not belong to the job, whatever they say."""
    program = machine.program if isinstance(machine, SwitchEndpoint) else machine
    return int(program.drops[Drop.BAD_TAG]) if isinstance(program, ZebraProgram | ParameterShard) else 0


class SparseMember:
    """One rank of a sparse job, whose other machines are other processes. Made by :func:`join_sparse`."""

    def __init__(self, worker: ZebraWorker, device: Device, timeout: float) -> None:
        self.worker = worker
        self.timeout = timeout
        #: of the job, in errors
        self.name = str(worker.job.number)
        self.job = SparseJob(self, worker.rank, worker)
        self._stations = Stations({"worker": (worker, device)})

    def do(self, action: Callable[[float], Any]) -> Any:
        """Do something with the machine."""
        return self._stations.do(action, self._listen)

    def wait_for(self, until: Callable[[], bool], job: SparseJob, timeout: float | None) -> None:
        """Carry packets until a condition holds. Raises :class:`~inanet.errors.RoundTimeout`."""
        patience = self.timeout if timeout is None else timeout
        if not self._stations.wait(until, self._listen, time.monotonic() + patience):
            raise RoundTimeout(
                f"not finished after {patience:g} s: {job.why()}",
                job=self.name,
                rank=job.rank,
                round=self.worker.done + 1,
                ranks=self.worker.ranks_waited_for,
            )

    def _listen(self, name: str, event: Any) -> None:
        if isinstance(event, Pulled | Stalled | Refused | IterationDone):
            self.job.heard(event)

    def close(self) -> None:
        """Leave: close the socket."""
        self._stations.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def join_sparse(file: str | Path, rank: int, *, timeout: float = 60.0) -> SparseMember:
    """Be a rank of the job in ``file``; ``timeout`` seconds are the default for its pushes and pulls.

    Raises :class:`~inanet.config.file.ConfigError` for a file that makes no sense, ``ValueError`` for a rank that the job
    does not have, ``OSError`` when the rank's address cannot be bound.
    """
    found = SparseFile(file)
    worker = found.worker(rank)
    return SparseMember(worker, found.device(found.job.workers[rank]), timeout)
