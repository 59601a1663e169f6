"""The machines of a parameter server that serves jobs on switches, and who tells them about these jobs.

Exponents are agreed with one machine, sums that the switch could not finish go to another, one for each framing. They share
nothing with the slots of jobs that sum in trees; which jobs are whose is in their plans.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart
from inanet.proto.common.machine import Follower, Machine
from inanet.proto.common.plan import NodePlan, Switched, TensorLayout
from inanet.proto.slots.atp.ps import PSJob
from inanet.proto.slots.exponents import ExponentRoot


class Server(Machine, Protocol):
    """The PS of one system, for any number of jobs."""

    def add_job(self, job: PSJob) -> None:
        """Serve a job."""
        ...

    def remove_job(self, job: int) -> None:
        """Forget a job."""
        ...


@runtime_checkable
class Epochs(Server, Protocol):
    """A PS that closes epochs: it knows the tensor, and who has left. ``choose`` says how many workers an epoch waits for, from
    the last interval of each, float64 seconds.
    """

    choose: Callable[[NDArray[np.float64]], int]

    def hold(self, job: int, layout: TensorLayout) -> None:
        """The tensor of a job. Raises ``ValueError`` for a second one."""
        ...

    def leave(self, job: int, worker: int, now: float) -> None:
        """A worker, by index, has left a job."""
        ...


@runtime_checkable
class Sharded(Machine, Protocol):
    """A PS that keeps keys of sparse jobs. ``endpoint`` is where it receives, ``models`` where it keeps models."""

    endpoint: int
    models: Any

    def serve(self, plan: NodePlan, facts: Switched) -> None:
        """Serve the job of a plan. Raises ``ValueError`` for one that cannot be."""
        ...

    def follow(self, facts: Switched) -> None:
        """A later plan: other keys may be hot."""
        ...

    def kept(self, job: int) -> ModelPart | None:
        """What is here of a job's model; ``None`` if it is not kept. Raises ``ValueError``."""
        ...

    def remove_job(self, job: int) -> None:
        """Forget a job."""
        ...


class SwitchedRoot:
    """Follows the plans of all jobs: those without a switch are for ``trees``. ``servers`` are by system."""

    def __init__(
        self, trees: Follower, exponents: ExponentRoot, servers: Mapping[str, Server | Sharded]
    ) -> None:
        self._trees = trees
        self._exponents = exponents
        self._servers = servers
        self._switched: dict[int, Switched] = {}

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Serve a job on a switch from its first plan on."""
        facts = plan.switched
        if facts is None:
            self._trees.apply(plan, now, attach=attach)
            return
        if plan.job in self._switched:
            self._take_leave(plan.job, facts, now)
            return
        if facts.sparse is not None:
            self._keep(plan, facts)
            return
        self._switched[plan.job] = facts
        members = {worker: 1 << index for index, worker in enumerate(facts.workers)}
        self._exponents.add_job(facts.number, plan.key, members)
        server = self._servers.get(facts.system)
        if server is not None and not isinstance(server, Sharded):
            switch = (facts.switch,)
            job = PSJob(facts.number, members, switch, facts.window, facts.slots, switch, key=plan.key)
            server.add_job(job)

    def _keep(self, plan: NodePlan, facts: Switched) -> None:
        """Be a shard of a sparse job. Raises ``MemoryError`` if that cannot be."""
        server = self._servers.get(facts.system)
        if not isinstance(server, Sharded):
            raise MemoryError(f"it does not serve {facts.system}")
        try:
            server.serve(plan, facts)
        except ValueError as error:
            raise MemoryError(str(error)) from error
        self._switched[plan.job] = facts

    def _take_leave(self, job_id: int, facts: Switched, now: float) -> None:
        """Tell a PS that closes epochs who has left since the plan before, and shards what is hot now."""
        before = self._switched[job_id]
        gone = set(facts.departed) - set(before.departed)
        self._switched[job_id] = facts
        server = self._servers.get(facts.system)
        if isinstance(server, Sharded) and (facts.decided, facts.begin) > (before.decided, before.begin):
            try:
                server.follow(facts)
            except ValueError as error:
                raise MemoryError(str(error)) from error
        if isinstance(server, Epochs):
            for worker in sorted(gone):
                server.leave(facts.number, worker, now)

    def kept(self, job_id: int) -> ModelPart | None:
        """What is here of a sparse job's model; ``None`` if it is not kept. Raises ``MemoryError`` for one that cannot be read."""
        facts = self._switched.get(job_id)
        server = self._servers.get(facts.system) if facts is not None else None
        if facts is None or not isinstance(server, Sharded):
            return None
        try:
            return server.kept(facts.number)
        except ValueError as error:
            raise MemoryError(str(error)) from error

    def drop_job(self, job_id: int) -> None:
        """Forget a job."""
        facts = self._switched.pop(job_id, None)
        if facts is None:
            self._trees.drop_job(job_id)
            return
        if facts.sparse is None:
            self._exponents.remove_job(facts.number)
        server = self._servers.get(facts.system)
        if server is not None:
            server.remove_job(facts.number)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Tensors on a switch have no slots here; a PS that closes epochs has to know them. Raises ``MemoryError`` for one that it
        cannot have.
        """
        facts = self._switched.get(job_id)
        if facts is None:
            self._trees.add_layout(job_id, layout, last_round)
            return
        server = self._servers.get(facts.system)
        if isinstance(server, Epochs):
            try:
                server.hold(facts.number, layout)
            except ValueError as error:
                raise MemoryError(str(error)) from error

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """Forget a tensor."""
        if job_id not in self._switched:
            self._trees.drop_layout(job_id, tensor)

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """A parameter server has no ranks of its own but as a node of trees."""
        self._trees.begin(job_id, tensor, round_, arrays, now)

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Fragments of a failed round on a switch go on to their end."""
        if job_id not in self._switched:
            self._trees.fail_round(job_id, round_, tensors, now)

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """As for any root of trees; what is in a switch, nobody here knows."""
        return job_id not in self._switched and self._trees.holds_all(job_id, round_, tensors)
