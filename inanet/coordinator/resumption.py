"""Jobs that outlive their coordinator (coordinator restart): members come back to a new one and say what they hold."""

from dataclasses import dataclass, field

from inanet.coordinator.job import Job
from inanet.coordinator.layouts import Tensor
from inanet.coordinator.members import Members
from inanet.coordinator.plans import Inheritance
from inanet.coordinator.round_ledger import Host
from inanet.messages.control import (
    Begin,
    Finished,
    Gathered,
    Held,
    Hello,
    Judged,
    Kept,
    Known,
    LayoutReady,
    Refuse,
    Resume,
)
from inanet.planning.topology import Fabric, Topology
from inanet.proto.common.plan import TensorLayout, TensorSpec

#: Messages about its rounds that a member may send before the job has been taken over.
_MOST_QUEUED = 1 << 16
#: No job has come this far: numbers beyond are errors, and would leave no room to count on.
_SANE = 1 << 48
#: What members say about a job.
JobMessage = Known | Begin | LayoutReady | Refuse | Finished | Held | Judged | Gathered | Kept


@dataclass(slots=True)
class Returned:
    """One member and what it has told so far. Messages after that wait in ``queue``."""

    hello: Hello
    resume: Resume
    layouts: dict[int, TensorLayout] = field(default_factory=dict)
    opened: dict[int, TensorSpec] = field(default_factory=dict)
    queue: list[JobMessage] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether it has told everything that its Hello announced."""
        return len(self.layouts) >= self.resume.layouts and len(self.opened) >= self.resume.open

    def take(self, message: JobMessage) -> None:
        """One message about the job."""
        if isinstance(message, Known):
            if message.layout.tensor < _SANE:
                self.layouts[message.layout.tensor] = message.layout
        elif isinstance(message, Begin) and len(self.opened) < self.resume.open:
            if message.round < self.resume.next_round:
                self.opened[message.round] = message.spec
        elif len(self.queue) < _MOST_QUEUED:
            self.queue.append(message)


@dataclass(slots=True)
class Resuming:
    """A job of an earlier coordinator, known by its key, whose members are coming back."""

    number: int
    key: int
    epoch: int
    deadline: float
    members: Members = field(default_factory=lambda: Members(""))
    #: workers, aggregators and parameter servers that hold something of the job
    returned: dict[str, Returned] = field(default_factory=dict)

    @staticmethod
    def is_sane(resume: Resume) -> bool:
        """Whether a job can have got as far as this says."""
        return resume.plan.version < _SANE and resume.next_round < _SANE

    def admit_worker(self, hello: Hello, fabric: Fabric) -> None:
        """Take a worker host back. Raises :class:`~inanet.coordinator.members.Rejection`."""
        self.members.job = self.members.job or hello.job
        self.members.admit(hello, fabric)
        self.members.left = hello.resume[0].plan.ranks
        self.returned[hello.name] = Returned(hello, hello.resume[0])

    def admit_holder(self, hello: Hello, resume: Resume) -> None:
        """Take an aggregator or parameter server back."""
        self.returned[hello.name] = Returned(hello, resume)

    def remove(self, name: str) -> None:
        """A member is gone again."""
        self.members.hellos.pop(name, None)
        self.returned.pop(name, None)

    def topology(self, fabric: Fabric) -> Topology | None:
        """The job's trees, as far as those who are back tell."""
        return fabric.recall({name: r.resume.plan for name, r in self.returned.items()}, self.members.hellos)

    def missing(self, topology: Topology, connected: set[str]) -> tuple[str, ...]:
        """What cannot be done without, in words: ranks, parameter servers, and members still telling."""
        if not self.members.hellos:
            return ("all workers",)
        words = list(self.members.missing(topology, connected | set(topology.aggregators)))
        words += [f"the state of {name}" for name, r in self.returned.items() if not r.complete]
        return tuple(words)

    def absentees(self, topology: Topology) -> set[str]:
        """Aggregators that members speak of and that are not back."""
        named = {
            place.parent.name
            for returned in self.returned.values()
            for place in returned.resume.plan.placements
            if place.parent is not None
        }
        return {name for name in named if name in topology.aggregators and name not in self.returned}

    def _agrees(self, name: str, topology: Topology) -> bool:
        """Whether an aggregator is still where it says: its parent counts on it, its children send to it.

        If not, its children have been moved, and its partial sums must not come in again (re-parenting).
        """
        for place in self.returned[name].resume.plan.placements:
            if place.parent is None:
                return False
            above = self.returned.get(place.parent.name)
            if above is None and place.parent.name not in topology.roots:
                return False
            if above is not None and name not in _children(above.resume, place.tree):
                return False
            for child in place.children:
                below = self.returned.get(child.name)
                if below is not None and _parent(below.resume, place.tree) != name:
                    return False
        return True

    def absent(self, topology: Topology) -> set[str]:
        """Aggregators the job must go on without. One that is dropped may make its neighbours disagree,
        too.
        """
        present = {name for name in self.returned if name in topology.aggregators}
        present -= {name for name in present if not self._agrees(name, topology)}
        return {
            name for name in topology.needed(self.members.hellos) if name in topology.aggregators
        } - present

    def hosts(self) -> dict[str, Host]:
        """The worker hosts, each with the next round it will begin."""
        hosts = self.members.hosts()
        for name, host in hosts.items():
            host.next_round = self.returned[name].resume.next_round
        return hosts

    def restore(self, job: Job, now: float, round_seconds: float) -> None:
        """Give a new job the state its members have, and let it go on."""
        job.plans.absent = self.absent(job.plans.topology)
        job.rounds.ledger.adopt(
            {name: self.returned[name].opened for name in self.members.hellos}, now, round_seconds
        )
        layouts: dict[TensorSpec, TensorLayout] = {}
        for returned in self.returned.values():
            for layout in returned.layouts.values():
                if layout.spec not in layouts or layouts[layout.spec].tensor < layout.tensor:
                    layouts[layout.spec] = layout
        before = min(host.next_round for host in job.hosts.values()) - 1
        for layout in sorted(layouts.values(), key=lambda layout: layout.tensor):
            rounds = [r.number for r in job.rounds.ledger if layout.spec in r.specs.values()]
            job.rounds.tensors.book.adopt(Tensor(layout, min(rounds, default=before + 1) - 1))
        holders = set(job.plans.topology.needed(self.members.hellos)) - job.plans.absent
        lacking = {
            (name, layout.tensor)
            for name in (*job.hosts, *holders)
            for layout in layouts.values()
            if name not in self.returned or layout.tensor not in self.returned[name].layouts
        }
        plans = {name: returned.resume.plan for name, returned in self.returned.items()}
        blank = frozenset(root for root in job.plans.topology.roots if root not in self.returned)
        job.resume(Inheritance(plans, blank, frozenset(lacking)), now)
        for name, returned in self.returned.items():
            for message in returned.queue:
                job.receive(name, message, now)


def _children(resume: Resume, tree: int) -> set[str]:
    return {c.name for place in resume.plan.placements if place.tree == tree for c in place.children}


def _parent(resume: Resume, tree: int) -> str | None:
    return next((p.parent.name for p in resume.plan.placements if p.tree == tree and p.parent), None)
