"""The part of a job that is scheduled over several switches: it gets another schedule when one of them is lost or comes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from inanet.coordinator.job_plan import JobPlan
from inanet.messages.control import Hello
from inanet.planning.topology import Topology


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """What the job gets: the number of its next epoch, other trees, a planner under another key, the Hellos of all nodes, and
    a sentence.
    """

    epoch: int
    topology: Topology
    plan: JobPlan
    hellos: Mapping[str, Hello]
    reason: str


#: Plans a job anew for these hosts without these switches, if asked only where that makes other trees; None if it does not, or
#: if sums cannot be made with the switches that are left.
Reschedule = Callable[[Collection[str], Collection[str], bool], Rescheduled | None]


@dataclass(slots=True)
class Schedules:
    """``avoided``: switches that the job is to do without, though they may be connected."""

    reschedule: Reschedule
    avoided: set[str] = field(default_factory=set)

    def without(self, hosts: Collection[str]) -> Rescheduled | None:
        """A schedule over the switches that are there now; None if sums cannot be made."""
        return self.reschedule(hosts, self.avoided, False)

    def better(self, hosts: Collection[str]) -> Rescheduled | None:
        """Another schedule, if there is one now that a switch has come."""
        return self.reschedule(hosts, self.avoided, True)
