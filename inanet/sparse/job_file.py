"""Sparse jobs whose machines are processes: each reads the job's file and is one of the machines in it.

A switch and the PS shards are served (``ina zebra serve FILE NAME``); ranks join:

>>> with inanet.join_sparse("job.toml", rank=0) as member:
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
from typing import Any

import numpy as np

from inanet.config.file import ConfigError, Problem, find_file, read_toml, validate
from inanet.config.sparse import SparseConfig
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
from inanet.proto.zebra.worker import ZebraWorker
from inanet.service.shard_state import StateFile
from inanet.sparse.stations import Machine, Stations
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
        section = self.config.job
        try:
            self.hot = self._hot()
            self.job = Job(
                section.number,
                tuple(endpoint(one.host, one.port) for one in section.workers),
                tuple(endpoint(one.host, one.port) for one in section.shards),
                endpoint(section.switch.host, section.switch.port) if section.switch is not None else 0,
                key=int(section.secret, 16) ^ self._digest(),
                width=section.width,
                registers=section.registers,
                hot_pairs=section.hot_pairs,
                sharding=section.sharding,
            )
        except ValueError as error:
            raise ConfigError(path, [Problem("job", str(error))]) from None
        except OSError as error:
            raise ConfigError(
                path, [Problem("job.hot", f"cannot read {section.hot}: {error.strerror}")]
            ) from None
        link = section.link
        self.timing = Timing(first=0.05, least=0.005) if link is None else Timing(first=0.5, least=0.02)

    def _digest(self) -> int:
        """64 bits of everything that machines must agree on: those whose files differ do not understand each other."""
        section = self.config.job
        parts = (
            section.workers,
            section.shards,
            section.switch,
            section.width,
            section.sharding,
            section.registers,
            section.hot_pairs,
        )
        text = repr((*parts, self.hot is not None and (section.shift, self.hot.keys.tobytes())))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    def _hot(self) -> HotSet | None:
        section = self.config.job
        if section.hot is not None and section.switch is None:
            raise ValueError("nothing can be hot without a switch; give its endpoint, or no hot keys")
        keys = section.hot_keys()
        if keys is None:
            return None
        return fixed(1, np.array(keys, np.uint64), section.shift)

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
        job, section = self.job, self.config.job
        if name == SWITCH:
            program = ZebraProgram(budget=section.memory, timing=self.timing, life=secrets.randbelow(1 << 16))
            program.add_job(job, _GROUP)
            if self.hot is not None:
                program.prepare(job.number, self.hot)
            return SwitchEndpoint(program, {_GROUP: job.workers}), job.switch
        number = int(name.removeprefix("shard"))
        initial = Uniform(section.initial) if section.initial else zeros
        life = secrets.randbelow(1 << 16)
        optimiser = OPTIMISERS[section.optimiser](section.rate, section.beta)
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
