"""What a node is to those around it: a machine that moves packets, and a follower of plans.

:class:`inanet.proto.tree.node.Node` is both, and so is a worker of a switched system
(:class:`inanet.proto.slots.host.SwitchedHost`). A PS of those systems is a machine that a follower beside it looks after
(:mod:`inanet.proto.slots.root`); a switch follows plans and is driven by its ports. Event loops know machines, the control
plane knows followers, and neither knows systems.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart, NodeEvent, Tally
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.wire.batch import PacketBatch, Transmission


class Machine(Protocol):
    """Moves packets. ``now`` is seconds on any clock that does not jump backwards."""

    @property
    def groups(self) -> frozenset[int]:
        """Endpoints of the multicast groups that must be received."""
        ...

    @property
    def lacking(self) -> int:
        """Results that the round nearest to its end still lacks here; 0 to be read as soon as something comes."""
        ...

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take a batch."""
        ...

    def transmit(self, now: float) -> Iterable[Transmission]:
        """What is to be sent, made while it is asked for or before; arenas stay valid until it has been sent."""
        ...

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next; ``None``: never."""
        ...

    def on_timer(self, now: float) -> None:
        """The time that :meth:`timer` has named has come."""
        ...

    def events(self) -> Sequence[NodeEvent]:
        """What happened since the last call."""
        ...


class RunnableMachine(Machine, Protocol):
    """A machine with figures."""

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        ...

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        ...


class Follower(Protocol):
    """Follows the plans of its jobs. What it cannot serve, or has no room for, raises
    :class:`~inanet.proto.common.refusal.Refusal`."""

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Follow a version of a plan; ``attach`` as in :class:`inanet.messages.control.Plan`."""
        ...

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Be ready for rounds of a tensor, after ``last_round``."""
        ...

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """Forget a tensor."""
        ...

    def drop_job(self, job_id: int) -> None:
        """Forget a job."""
        ...

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """Start this host's part in a round; ``arrays`` are 1-D, one per local rank, overwritten by the result."""
        ...

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """A round is over without a result, whether or not it was begun here."""
        ...

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """Whether a root has every contribution to its parts of a round."""
        ...


@runtime_checkable
class TallySource(Protocol):
    """A follower that has counts of a sparse job's keys."""

    def tally(self, job_id: int, iteration: int) -> Tally | None:
        """How often keys were updated in the iterations up to one that all shards have finished; ``None`` for a job without keys."""
        ...


@runtime_checkable
class ModelKeeper(Protocol):
    """A follower that keeps models of sparse jobs."""

    def kept(self, job_id: int) -> ModelPart | None:
        """What is here of a job's model; ``None`` if it is not kept. Raises :class:`~inanet.proto.common.refusal.Refusal`."""
        ...


class NodeMachine(RunnableMachine, Follower, Protocol):
    """Both: what stands behind a device of its own."""

    @property
    def jobs(self) -> int:
        """Jobs it takes part in."""
        ...


@dataclass(frozen=True, slots=True)
class Host:
    """What a server is told of the process that it runs in: ``endpoint`` is where it receives, ``models`` where models can be kept
    (:class:`inanet.proto.zebra.state.Models`, ``None``: nowhere), ``choose`` how many workers a training epoch waits for.
    """

    endpoint: int
    models: Any = None
    choose: Callable[[NDArray[np.float64]], int] | None = None


class Server(RunnableMachine, Protocol):
    """The PS of one system, for any number of jobs."""

    #: whether it can be reached by whole IPv4 packets, too
    takes_raw: bool
    #: whether it keeps models
    keeps: bool

    def settle(self, host: Host) -> None:
        """Where it is; called once, before the first job."""
        ...

    def serve(self, plan: NodePlan) -> None:
        """Serve the job of a plan. Raises ``ValueError`` for one that cannot be."""
        ...

    def follow(self, plan: NodePlan, now: float) -> None:
        """A later version of the plan. Raises ``ValueError`` if it cannot be followed."""
        ...

    def hold(self, job: int, layout: TensorLayout) -> None:
        """A tensor of a job, by its number. Raises ``ValueError`` for one that the system cannot have."""
        ...

    def kept(self, job: int) -> ModelPart | None:
        """What is here of a job's model; ``None`` if it is not kept. Raises ``ValueError``."""
        ...

    def remove_job(self, job: int) -> None:
        """Forget a job, by its number."""
        ...
