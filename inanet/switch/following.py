"""A switch in a fabric: jobs come and go with the coordinator's plans."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from inanet.proto.common.events import Tally
from inanet.proto.common.plan import NodePlan, Switched, TensorLayout
from inanet.switch.port import Switch, SwitchPort
from inanet.switch.programs import Job
from inanet.switch.registration import Registration


@dataclass(frozen=True, slots=True)
class Offer:
    """What jobs can have of a program: see :class:`inanet.messages.services.Service`."""

    slots: int
    own: bool
    quota: int
    values: int


def offer(registration: Registration, job_slots: int | None) -> Offer:
    """``job_slots`` is what one job may have: its share where jobs have shares, its quota where they share."""
    file = registration.program.file
    if file.shared:
        return Offer(file.shared, False, job_slots or 0, file.width)
    return Offer(min(file.free, job_slots or file.free), True, 0, file.width)


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
        self._jobs: dict[int, Switched] = {}

    def _job(self, facts: Switched, key: int = 0) -> Job:
        slots = facts.slots if facts.own else None
        if facts.sparse is not None:
            return Job(facts.number, facts.workers, facts=facts, key=key)
        if facts.sites:
            here = self._switch.endpoints()[self._programs[facts.system]]
            node = next((k for k, site in enumerate(facts.sites, 1) if site.endpoint == here), 0)
            if not node:
                raise ValueError(f"job {facts.number}: this switch is none of those that sum for it")
            return Job(facts.number, facts.workers, facts.ps, facts=facts, node=node, key=key)
        quota = facts.quota or None
        return Job(facts.number, facts.workers, facts.ps, slots, quota, rings=facts.rings)

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Serve a job from its first plan on; later ones may have other hot keys. Raises ``MemoryError`` if that cannot be."""
        facts = plan.switched
        if facts is None:
            return
        if plan.job in self._jobs:
            self._follow(plan.job, facts)
            return
        name = self._programs.get(facts.system)
        if name is None:
            raise MemoryError(f"it does not run {facts.system}")
        try:
            self._switch.serve(name, self._job(facts, plan.key))
        except (ValueError, OSError) as error:
            raise MemoryError(str(error)) from error
        self._jobs[plan.job] = facts
        self._opened()

    def _follow(self, job_id: int, facts: Switched) -> None:
        if facts.decided <= self._jobs[job_id].decided:
            return
        try:
            self._program(facts).follow(facts)
        except ValueError as error:
            raise MemoryError(str(error)) from error
        self._jobs[job_id] = facts

    def _program(self, facts: Switched) -> Any:
        name = self._programs[facts.system]
        return next(one.program for one in self._switch.pipeline.registrations if one.name == name)

    def tally(self, job_id: int, iteration: int) -> Tally | None:
        """How often hot keys of a sparse job were updated in the iterations up to one that its shards have finished; ``None`` for a
        job that is not, or is over.
        """
        facts = self._jobs.get(job_id)
        if facts is None or facts.sparse is None:
            return None
        found: Tally = self._program(facts).tally(facts.number, iteration)
        return found

    def drop_job(self, job_id: int) -> None:
        """Free what a job has: slots, ports, its number."""
        facts = self._jobs.pop(job_id, None)
        if facts is not None:
            self._switch.dismiss(self._programs[facts.system], self._job(facts), self._closing)

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Hold the sub-models of a job that is summed in several switches; other tensors have no slots of their own.

        Raises ``MemoryError`` for slots that are not there.
        """
        facts = self._jobs.get(job_id)
        if facts is None or not layout.scheduled:
            return
        try:
            self._program(facts).hold(facts.number, layout.scheduled)
        except ValueError as error:
            raise MemoryError(str(error)) from error

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
