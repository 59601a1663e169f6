"""Who tells the machines of a parameter server about jobs on switches.

Exponents are agreed with one machine, sums that the switch could not finish go to another, one for each system. They share
nothing with the slots of jobs that sum in trees; which jobs are whose is in their plans.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart
from inanet.proto.common.machine import Follower, Server
from inanet.proto.common.plan import NodePlan, SwitchedJob, TensorLayout
from inanet.proto.common.refusal import NoRoom, Refusal
from inanet.proto.slots.systems import SYSTEMS


class SwitchedRoot:
    """Follows the plans of all jobs: those without a switch are for ``trees``. ``servers`` are by service: a system, or
    :data:`~inanet.proto.slots.systems.EXPONENTS`.
    """

    def __init__(self, trees: Follower, servers: Mapping[str, Server]) -> None:
        self._trees = trees
        self._servers = servers
        self._jobs: dict[int, SwitchedJob] = {}

    def _servers_of(self, job: SwitchedJob) -> list[Server]:
        """The machines that serve a job. Raises :class:`~inanet.proto.common.refusal.Refusal` if there is none."""
        wanted = SYSTEMS[job.system].services(job.system)
        if any(name not in self._servers for name in wanted):
            raise Refusal(f"it does not serve {job.system}")
        return [self._servers[name] for name in wanted]

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Serve a job on a switch from its first plan on."""
        job = plan.switched
        if job is None:
            self._trees.apply(plan, now, attach=attach)
            return
        before, servers = self._jobs.get(plan.job), self._servers_of(job)
        with _refusals():
            if before is None:
                self._serve(servers, plan, job.number)
            elif job != before:
                for server in servers:
                    server.follow(plan, now)
        self._jobs[plan.job] = job

    @staticmethod
    def _serve(servers: Sequence[Server], plan: NodePlan, number: int) -> None:
        """Have all of them serve a job, or none."""
        for index, server in enumerate(servers):
            try:
                server.serve(plan)
            except ValueError:
                for one in servers[:index]:
                    one.remove_job(number)
                raise

    def kept(self, job_id: int) -> ModelPart | None:
        """What is here of a sparse job's model; ``None`` if it is not kept. Raises :class:`~inanet.proto.common.refusal.Refusal` for one
        that cannot be read.
        """
        job = self._jobs.get(job_id)
        if job is None:
            return None
        with _refusals():
            parts = [server.kept(job.number) for server in self._servers_of(job)]
        return next((part for part in parts if part is not None), None)

    def drop_job(self, job_id: int) -> None:
        job = self._jobs.pop(job_id, None)
        if job is None:
            self._trees.drop_job(job_id)
            return
        for server in self._servers_of(job):
            server.remove_job(job.number)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Have the servers of a job know a tensor. Raises :class:`~inanet.proto.common.refusal.Refusal` for one that they cannot have."""
        job = self._jobs.get(job_id)
        if job is None:
            self._trees.add_layout(job_id, layout, last_round)
            return
        with _refusals():
            for server in self._servers_of(job):
                server.hold(job.number, layout)

    def drop_layout(self, job_id: int, tensor: int) -> None:
        if job_id not in self._jobs:
            self._trees.drop_layout(job_id, tensor)

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """A parameter server has no ranks of its own but as a node of trees."""
        self._trees.begin(job_id, tensor, round_, arrays, now)

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Fragments of a failed round on a switch go on to their end."""
        if job_id not in self._jobs:
            self._trees.fail_round(job_id, round_, tensors, now)

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """As for any root of trees; what is in a switch, nobody here knows."""
        return job_id not in self._jobs and self._trees.holds_all(job_id, round_, tensors)


@contextmanager
def _refusals() -> Iterator[None]:
    """What a machine cannot have is refused."""
    try:
        yield
    except ValueError as error:
        raise NoRoom(str(error)) from error
