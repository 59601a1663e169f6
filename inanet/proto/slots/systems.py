"""The table of systems whose sums are made in a switch, by the names users select them by.

A system is one package and one record here: what plans say of its jobs, its program for switches, a worker, a PS, and how the
coordinator lays its jobs out. Nobody else knows systems by name. Light to import: a part brings its kernels along only when
it is made. A job without a switch is XAgg's, whose nodes (:class:`inanet.proto.tree.node.Node`) form trees and need no entry here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inanet.proto.common.machine import Server
    from inanet.proto.common.plan import SwitchedJob
    from inanet.proto.common.recovery import Timing
    from inanet.proto.slots.worker import Membership, Worker

#: the system of jobs whose nodes sum in trees
TREES = "xagg"
#: the service that agrees on exponents of floats, whatever the system
EXPONENTS = "exponents"


class FabricKind(Enum):
    """How the coordinator lays out jobs of a system."""

    #: one switch sums for all workers
    ONE_SWITCH = auto()
    #: a controller schedules parts of tensors over several switches
    SCHEDULED = auto()
    #: ranks push and pull keys of servers that keep shards; there are no tensors
    SHARDED = auto()


@dataclass(frozen=True, slots=True)
class System:
    """Where the parts of a system are, as ``module:name``, and the packets that are its unless told otherwise.

    ``job`` is the type of what a plan says (:class:`~inanet.proto.common.plan.SwitchedJob`). ``program`` is called with ``budget``
    (bytes of registers) and ``age`` (seconds), and the further ``options`` of ``[[switch.programs]]``. ``worker`` is called
    with a membership, the job and waiting times, and what the host's configuration says in ``section``; empty where ranks
    join by themselves. ``server`` makes the system's PS, empty where it has none. ``ports`` are UDP ports; with ``raw`` it
    also has raw frames (ethertype 0x0700).
    """

    job: str
    program: str
    ports: range
    worker: str = ""
    server: str = ""
    fabric: FabricKind = FabricKind.ONE_SWITCH
    raw: bool = False
    options: tuple[str, ...] = ()
    #: what the option ``values`` may be
    formats: tuple[int, ...] = ()
    section: str = ""
    #: workers take part in training epochs, and the job goes on without those that leave
    asynchronous: bool = False

    @property
    def has_tensors(self) -> bool:
        """Whether jobs sum tensors, and agree on exponents of floats with a root."""
        return self.fabric is not FabricKind.SHARDED

    def services(self, system: str) -> tuple[str, ...]:
        """What a parameter server has to offer for jobs of the system of this name."""
        return (EXPONENTS,) * self.has_tensors + (system,) * bool(self.server)

    def load_job(self) -> "type[SwitchedJob]":
        """The type of what a plan says of a job."""
        job: type[SwitchedJob] = _load(self.job)
        return job

    def make_worker(
        self, member: "Membership", job: "SwitchedJob", timing: "Timing", **options: Any
    ) -> "Worker":
        """A worker's machine, with the host's own ``options``. Raises ``ValueError`` for a job that the system cannot have."""
        worker: Worker = _load(self.worker)(member, job, timing, **options)
        return worker

    def make_program(self, **options: Any) -> Any:
        """The switch's program (:class:`~inanet.proto.common.program.TenantProgram`); raises ``ValueError`` for memory in which not one
        slot fits.
        """
        return _load(self.program)(**options)

    def make_server(self) -> "Server | None":
        """The system's PS, if it has one."""
        server: Server | None = _load(self.server)() if self.server else None
        return server


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


SYSTEMS: Mapping[str, System] = {
    "switchml": System(
        job="inanet.proto.slots.switchml.job:SwitchMLJob",
        program="inanet.proto.slots.switchml.program:SwitchMLProgram",
        worker="inanet.proto.slots.switchml.worker:join",
        ports=range(0xBEE0, 0xBEF0),
        options=("values", "values_per_pass"),
        formats=(64, 256),
    ),
    "atp": System(
        job="inanet.proto.slots.atp.job:AtpJob",
        program="inanet.proto.slots.atp.program:AtpProgram",
        worker="inanet.proto.slots.atp.worker:join",
        server="inanet.proto.slots.atp.ps:atp_server",
        ports=range(7410, 7411),
        raw=True,
        options=("shared",),
    ),
    "esa": System(
        job="inanet.proto.slots.atp.job:AtpJob",
        program="inanet.proto.slots.esa.system:EsaProgram",
        worker="inanet.proto.slots.esa.system:join",
        server="inanet.proto.slots.esa.system:make_server",
        ports=range(7411, 7412),
        options=("shared",),
    ),
    "a2tp": System(
        job="inanet.proto.slots.atp.job:AtpJob",
        program="inanet.proto.slots.a2tp.system:A2tpProgram",
        worker="inanet.proto.slots.a2tp.system:join",
        server="inanet.proto.slots.a2tp.system:make_server",
        ports=range(7412, 7413),
        raw=True,
        options=("shared",),
        section="a2tp",
    ),
    "netreduce": System(
        job="inanet.proto.netreduce.job:NetReduceJob",
        program="inanet.proto.netreduce.tunnel:TunnelProgram",
        worker="inanet.proto.netreduce.tunnel:join",
        ports=range(7413, 7414),
        options=("rings",),
    ),
    "goat": System(
        job="inanet.proto.slots.goat.job:GoatJob",
        program="inanet.proto.slots.goat.program:GoatProgram",
        worker="inanet.proto.slots.goat.worker:join",
        server="inanet.proto.slots.goat.ps:goat_server",
        fabric=FabricKind.SCHEDULED,
        ports=range(7414, 7415),
    ),
    # GOAT's asynchronous training
    "goat-async": System(
        job="inanet.proto.slots.goat.job:GoatAsyncJob",
        program="inanet.proto.slots.goat_async.program:EpochProgram",
        worker="inanet.proto.slots.goat_async.worker:join",
        server="inanet.proto.slots.goat_async.ps:EpochServer",
        fabric=FabricKind.SCHEDULED,
        ports=range(7415, 7416),
        asynchronous=True,
    ),
    "zebra": System(
        job="inanet.proto.zebra.plan:ZebraJob",
        program="inanet.proto.zebra.switch:daemon_program",
        server="inanet.proto.zebra.shards:ShardServer",
        fabric=FabricKind.SHARDED,
        ports=range(7416, 7417),
    ),
}


def tensor_systems() -> tuple[str, ...]:
    """Systems that jobs with tensors may choose beside :data:`TREES`."""
    return tuple(name for name, system in SYSTEMS.items() if system.has_tensors)


def sparse_systems() -> tuple[str, ...]:
    """Systems of jobs that push and pull keys, which have no tensors; their ranks join by themselves."""
    return tuple(name for name, system in SYSTEMS.items() if not system.has_tensors)
