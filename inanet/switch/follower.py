"""A switch in a fabric: jobs come and go with the coordinator's plans."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import Tally
from inanet.proto.common.plan import NodePlan, SwitchedJob, TensorLayout
from inanet.proto.common.refusal import NoRoom, Refusal
from inanet.proto.slots.systems import SYSTEMS
from inanet.switch.port import Switch, SwitchPort


class SwitchFollower:
    """See :class:`inanet.proto.common.machine.Follower`. ``programs`` are the names of programs by system; ``opened()`` is called
    when the switch has more ports, ``closing(port)`` before one is closed.
    """

    def __init__(
        self,
        switch: Switch,
        programs: Mapping[str, str],
        opened: Callable[[], None] = lambda: None,
        closing: Callable[[SwitchPort], None] = lambda _port: None,
    ) -> None:
        self._switch = switch
        self._programs = programs
        self._opened = opened
        self._closing = closing
        self._jobs: dict[int, SwitchedJob] = {}

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Serve a job from its first plan on; later ones may have other hot keys. Raises
        :class:`~inanet.proto.common.refusal.Refusal` if that cannot be.
        """
        job = plan.switched
        if job is None:
            return
        before = self._jobs.get(plan.job)
        if before is None:
            name = self._programs.get(job.system)
            if name is None:
                raise Refusal(f"it does not run {job.system}")
            with _refusals():
                self._switch.serve(name, job, plan.key)
            self._jobs[plan.job] = job
            self._opened()
        elif job != before:
            with _refusals():
                self._program(job).follow(job)
            self._jobs[plan.job] = job

    def _program(self, job: SwitchedJob) -> Any:
        name = self._programs[job.system]
        return next(one.program for one in self._switch.pipeline.registrations if one.name == name)

    def tally(self, job_id: int, iteration: int) -> Tally | None:
        """How often hot keys of a sparse job were updated in the iterations up to one that its shards have finished; ``None`` for a
        job that is not, or is over.
        """
        job = self._jobs.get(job_id)
        if job is None or SYSTEMS[job.system].has_tensors:
            return None
        tally: Tally = self._program(job).tally(job.number, iteration)
        return tally

    def drop_job(self, job_id: int) -> None:
        """Free what a job has: slots, ports, its number."""
        job = self._jobs.pop(job_id, None)
        if job is not None:
            self._switch.dismiss(self._programs[job.system], job.number, self._closing)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Hold the sub-models of a job that is summed in several switches; other tensors have no slots of their own.

        Raises :class:`~inanet.proto.common.refusal.Refusal` for slots that are not there.
        """
        job = self._jobs.get(job_id)
        if job is not None and layout.scheduled:
            with _refusals():
                self._program(job).hold(job.number, layout.scheduled)

    def drop_layout(self, job_id: int, tensor: int) -> None:
        """Nothing to forget."""

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """A switch has no ranks."""

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Fragments of a failed round go on to their end, or its job is over."""

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """A switch does not say what its slots hold."""
        return False


@contextmanager
def _refusals() -> Iterator[None]:
    """What a program has no registers for, or the system no port, is refused."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise NoRoom(str(error)) from error
