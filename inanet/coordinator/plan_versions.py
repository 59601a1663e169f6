"""A job's plan, version by version: what every member is told, in which order, and whether it has heard.

Aggregators and parameter servers have a version before any worker does. Those that need slots for it make them first
(the *gate*).
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from inanet.coordinator.child_ids import PlanError, Planner
from inanet.coordinator.elasticity import Shrinking
from inanet.coordinator.events import ControlEvent, PlanChanged, PlanRepeated
from inanet.coordinator.goat.rounds import SYSTEM, Steps
from inanet.coordinator.hold import Holding
from inanet.coordinator.lost_servers import Vacancies
from inanet.coordinator.receive_buffers import Receivers, Station
from inanet.coordinator.retired_ids import Settling
from inanet.coordinator.round_ledger import Host
from inanet.coordinator.rounds import Collectives, JobLost
from inanet.coordinator.settings import FormatOf, Settings
from inanet.messages.control import Hello, Hold, Message, Plan
from inanet.planning.topology import Topology, TopologyError
from inanet.planning.trees import Performance
from inanet.proto.common.plan import NodePlan


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What the members of a job still hold after their coordinator was lost.

    ``plans``: the plan each follows. ``blank``: parameter servers that hold nothing of the job any more.
    ``lacking``: (member, tensor) for tensors that others have.
    """

    plans: Mapping[str, NodePlan]
    blank: frozenset[str]
    lacking: frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """What a job on switches gets when these have changed: the number of its next epoch, other trees, a planner under another
    key, the Hellos of all nodes, and a sentence.
    """

    epoch: int
    topology: Topology
    planner: Planner
    hellos: Mapping[str, Hello]
    reason: str


#: Plans a job anew for these hosts without these switches, if asked only where that makes other trees; None if it does not, or
#: if sums cannot be made with the switches that are left.
Reschedule = Callable[[Collection[str], Collection[str], bool], Rescheduled | None]
#: What a job that goes on with so many ranks gets: the number of its next epoch, and a planner under another key.
Renewal = Callable[[int], tuple[int, Planner]]


@dataclass(slots=True)
class _Told:
    """A plan as a member was sent it, and the number of the first ping it gets after that."""

    plan: Plan
    nonce: int


class Versions:
    """What :class:`~inanet.coordinator.job.Job` is built on. What members are to be sent is appended to ``outbox`` as (name,
    message).

    ``hellos`` has every member's Hello; ``next_nonce(name)`` is the number of the next ping that member will be sent.
    ``renewal`` has it go on in another epoch, also without workers if it is ``elastic``; ``reschedule`` without a switch.
    """

    def __init__(
        self,
        name: str,
        topology: Topology,
        planner: Planner,
        hosts: Mapping[str, Host],
        hellos: Mapping[str, Hello],
        settings: Settings,
        format_of: FormatOf,
        receivers: Receivers,
        next_nonce: Callable[[str], int],
        epoch: int = 0,
        renewal: Renewal | None = None,
        reschedule: Reschedule | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.number = planner.job
        self.hosts = dict(hosts)
        self.hellos = dict(hellos)
        self.planner = planner
        self.absent: set[str] = set()
        self.over = False
        #: how it ended, once it is over
        self.verdict = ""
        self.outbox: list[tuple[str, Message]] = []
        self.log: list[ControlEvent] = []
        #: every host has rounds of its own
        self.asynchronous = planner.switched is not None and planner.switched.system == SYSTEM
        made = Steps if self.asynchronous else Collectives
        self.collectives = made(name, self.hosts, planner, settings, format_of, self._send, self._guard)
        self._members = tuple(sorted(hosts))
        self.topology = topology
        self._settings = settings
        self._now = 0.0
        self._receivers = receivers
        self._next_nonce = next_nonce
        self._renewal = renewal
        self._elastic = elastic and renewal is not None
        #: the key that an earlier coordinator had given it, if there was one
        self.inherited: int | None = None
        #: why the job needs another key, if it does
        self._compromised = ""
        self._reschedule = reschedule
        #: switches that a job is to do without, though they may be connected
        self._avoided: set[str] = set()
        self._shrinking: Shrinking | None = None
        self._ending: tuple[float, JobLost] | None = None
        self._vacancies = Vacancies(settings.resume)
        self._performances: dict[str, Performance] = {}
        #: other trees, for the next moment in which no round is on its way
        self._wanted: Topology | None = None
        self._holding = Holding(self.collectives.ledger, settings.hold)
        #: (holder, tensor) still to be ready before workers get the plan they wait for
        self._gate: set[tuple[str, int]] = set()
        self._gate_deadline = 0.0
        self._held_back = False
        #: the plan held back was made while no round was on its way
        self._quiet = False
        self._attach: dict[str, set[int]] = {}
        self._settling = Settling(self.collectives.ledger)
        self._stations: dict[str, Station] = {}
        #: what every member was told last
        self._told: dict[str, _Told] = {}

    @abstractmethod
    def _guard(self, now: float, action: Callable[[], None]) -> None:
        """Run something that may find that the job cannot go on, and then what it has made possible."""

    def _send(self, name: str, message: Message) -> None:
        self.outbox.append((name, message))

    def _resume(self, returned: Inheritance) -> None:
        holders = self.topology.needed(self._members)
        self._gate = {(name, tensor) for name, tensor in returned.lacking if name in holders}
        self._gate -= {(name, tensor) for name, tensor in self._gate if name in self.absent}
        for name, tensor in self._gate:
            found = self.collectives.tensors.book.get(tensor)
            if found is not None:
                found.waiting.add(name)
        parents = {
            (place.tree, name): "" if place.parent.name in returned.blank else place.parent.name
            for name, plan in returned.plans.items()
            for place in plan.placements
            if place.parent is not None
        }
        self._advance("the coordinator has started again", parents)
        for name, tensor in sorted(returned.lacking):
            found = self.collectives.tensors.book.get(tensor)
            if found is not None and ((name in self.hosts and found.ready) or (name, tensor) in self._gate):
                self.collectives.tensors.tell(name, found)
        self.collectives.resume()

    def _advance(self, reason: str, parents: Mapping[tuple[int, str], str] | None = None) -> None:
        """Make and send the next version, for the nodes that are present; :class:`JobLost` if there can be
        none.

        ``parents``: what each (tree, node) takes for its parent, if that is not as in the current version.
        """
        if parents is None:
            parents = {(t.tree, child): p for t in self.planner.trees for child, p in t.parents.items()}
        try:
            trees = self.topology.trees(self._members, self.absent)
            self.planner.advance(trees, settled=self._settling.settled(self.hosts), quiet=self._quiet)
        except (TopologyError, PlanError) as error:
            raise JobLost("aggregator_lost", f"job {self.name!r}: {reason}, but {error}") from None
        for tree in trees:
            for child, parent in tree.parents.items():
                if parents.get((tree.tree, child), parent) != parent:
                    self._attach.setdefault(child, set()).add(tree.tree)
        senders: dict[int, int] = {}
        for name, links in self.planner.links().items():
            endpoint = self.hellos[name].endpoint
            senders[endpoint] = senders.get(endpoint, 0) + links
        self._receivers.declare(self.number, senders)
        if self.planner.retires:
            self._settling.track(self.planner.version, {host: self._next_nonce(host) for host in self.hosts})
        self._publish(reason)

    def _inform(self, reason: str, names: Collection[str] | None = None) -> None:
        """Make the next version and send it to aggregators and roots, or to these: it has nothing in it for workers, whose
        connections may be about to close. Without a ``reason`` it is not worth a word.
        """
        trees = self.topology.trees(self._members, self.absent)
        self.planner.advance(trees, settled=self._settling.settled(self.hosts), quiet=self._quiet)
        if reason:
            self.log.append(PlanChanged(self.number, self.name, self.planner.version, reason))
        for name in self.collectives.tensors.holders() if names is None else names:
            self._send_plan(name)

    def _publish(self, reason: str) -> None:
        """Send the current version: aggregators and roots first, workers when the gate is open."""
        self._holding.cancel()
        self._held_back = True
        self._gate_deadline = self._now + self._settings.silence
        self._stations = {name: self.station(name) for name in self.planner.nodes()}
        self.log.append(PlanChanged(self.number, self.name, self.planner.version, reason))
        for name in self.collectives.tensors.holders():
            self._send_plan(name)
        self._open_gate()

    def _open_gate(self) -> None:
        if self._held_back and not self._gate:
            self._held_back = self._quiet = False
            for name in self.hosts:
                self._send_plan(name)
            self._hold_for_shrinking()

    def _hold_for_shrinking(self) -> None:
        """A plan lets hosts go on; not yet, if somebody is about to be left out."""
        if self._shrinking is not None:
            self._shrinking.hold_again(self._holding.number())
            hold = Hold(job=self.number, nonce=self._shrinking.nonce, before=self._shrinking.before)
            for name in self.hosts:
                self._send(name, hold)

    def _send_plan(self, name: str) -> None:
        attach = tuple(sorted(self._attach.pop(name, ())))
        plan = Plan(plan=self.planner.view(name, self.station), attach=attach)
        self._told[name] = _Told(plan, self._next_nonce(name))
        self._send(name, plan)

    def follows(self, name: str, version: int, nonce: int) -> None:
        """A member says which version it acts on, in answer to ping ``nonce``. If it has missed what it was told
        before that ping, it is told again.
        """
        told = self._told.get(name)
        if told is None or nonce < told.nonce or version >= told.plan.plan.version:
            return
        told.nonce = self._next_nonce(name)
        self.log.append(PlanRepeated(self.number, self.name, name, version, told.plan.plan.version))
        self._send(name, told.plan)

    def station(self, name: str) -> Station:
        """Where a member receives, and the window everybody who sends there has."""
        hello = self.hellos[name]
        return replace(self._receivers.station(hello.endpoint, hello.rx_window), listens=hello.groups)

    def answered(self, host: str, nonce: int) -> None:
        """A worker host has answered ping ``nonce``."""
        self._settling.answered(host, nonce)
