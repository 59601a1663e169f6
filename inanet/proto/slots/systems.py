"""The systems whose sums are made in a switch, by the names users select them by: a worker, a program, perhaps a PS.

Light to import: a part brings its kernels along only when it is made. A job without a switch is XAgg's, whose nodes
(:class:`inanet.proto.tree.node.Node`) form trees and need no entry here.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inanet.proto.common.plan import Switched
    from inanet.proto.slots.window import Timing
    from inanet.proto.slots.worker import Membership, Worker

#: the system of jobs whose nodes sum in trees
TREES = "xagg"


@dataclass(frozen=True, slots=True)
class System:
    """Where the parts of a system are, as ``module:name``, and the packets that are its unless told otherwise.

    ``worker`` is called with a membership, what the plan says (:class:`~inanet.proto.common.plan.Switched`) and waiting times.
    ``program`` is a class made with ``budget`` (bytes of registers) and ``age`` (seconds), and the further ``options``.
    ``frame`` is the frame type of its PS, empty where it has none. ``ports`` are UDP ports; with ``raw`` it also has raw
    frames (ethertype 0x0700). ``static``: every job has slots of its own.
    """

    worker: str
    program: str
    frame: str
    ports: range
    raw: bool = False
    static: bool = False
    options: tuple[str, ...] = ()
    #: a PS that is not one of ATP's kind
    server: str = ""

    @property
    def has_server(self) -> bool:
        """Whether jobs need a PS for more than exponents."""
        return bool(self.frame or self.server)

    def make_worker(
        self, member: "Membership", facts: "Switched", timing: "Timing", **options: Any
    ) -> "Worker":
        """A worker's machine, with the host's own ``options``. Raises ``ValueError`` for facts that the system cannot have."""
        worker: Worker = _load(self.worker)(member, facts, timing, **options)
        return worker

    def make_program(self, **options: Any) -> Any:
        """The switch's program; raises ``ValueError`` for memory in which not one slot fits."""
        return _load(self.program)(**options)

    def make_server(self) -> Any:
        """The system's PS, if it has one: a :class:`~inanet.proto.slots.root.Server`, or, of sparse jobs, a
        :class:`~inanet.proto.slots.root.Sharded`.
        """
        if self.server:
            return _load(self.server)()
        if not self.frame:
            return None
        from inanet.proto.slots.atp.ps import ParameterServer

        return ParameterServer(_load(self.frame))


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


SYSTEMS: Mapping[str, System] = {
    "switchml": System(
        "inanet.proto.slots.switchml.worker:join",
        "inanet.proto.slots.switchml.program:SwitchMLProgram",
        "",
        range(0xBEE0, 0xBEF0),
        static=True,
        options=("values", "values_per_pass"),
    ),
    "atp": System(
        "inanet.proto.slots.atp.worker:join",
        "inanet.proto.slots.atp.program:AtpProgram",
        "inanet.wire.atp:FRAME",
        range(7410, 7411),
        raw=True,
        options=("shared",),
    ),
    "esa": System(
        "inanet.proto.slots.esa.worker:join",
        "inanet.proto.slots.esa.program:EsaProgram",
        "inanet.wire.esa:FRAME",
        range(7411, 7412),
        options=("shared",),
    ),
    "a2tp": System(
        "inanet.proto.slots.a2tp.worker:join",
        "inanet.proto.slots.a2tp.program:A2tpProgram",
        "inanet.wire.a2tp:FRAME",
        range(7412, 7413),
        raw=True,
        options=("shared",),
    ),
    "netreduce": System(
        "inanet.proto.netreduce.tunnel:join",
        "inanet.proto.netreduce.tunnel:TunnelProgram",
        "",
        range(7413, 7414),
        static=True,
    ),
    "goat": System(
        "inanet.proto.slots.goat.worker:join",
        "inanet.proto.slots.goat.program:GoatProgram",
        "",
        range(7414, 7415),
        static=True,
        server="inanet.proto.slots.goat.ps:GoatServer",
    ),
    # GOAT's asynchronous training
    "goat-async": System(
        "inanet.proto.slots.goat_async.worker:join",
        "inanet.proto.slots.goat_async.program:EpochProgram",
        "",
        range(7415, 7416),
        static=True,
        server="inanet.proto.slots.goat_async.ps:EpochServer",
    ),
}
#: what a job may choose
NAMES = (TREES, *SYSTEMS)
#: systems of jobs that push and pull keys, which have no tensors; their ranks join by themselves
SPARSE: Mapping[str, System] = {
    "zebra": System(
        "",
        "inanet.proto.zebra.switch:daemon_program",
        "",
        range(7416, 7417),
        static=True,
        server="inanet.proto.zebra.shards:ShardServer",
    ),
}
#: whatever has a program for switches
PROGRAMS: Mapping[str, System] = {**SYSTEMS, **SPARSE}
