"""A job's plan, version by version: what every member is told, in which order, and whether it has heard.

Aggregators and parameter servers have a version before any worker does. Those that need slots for it make them first
(the *gate*).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from inanet.coordinator.events import ControlEvent, PlanChanged, PlanRepeated
from inanet.coordinator.job_plan import JobPlan, PlanError
from inanet.coordinator.receive_buffers import Destination, ReceiveBuffers
from inanet.coordinator.round_ledger import Host, RoundLedger
from inanet.coordinator.rounds import JobLost
from inanet.messages.control import Hello, JobEnded, Message, Plan
from inanet.messages.text import clip
from inanet.planning.topology import Topology, TopologyError
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


@dataclass(slots=True)
class _Told:
    """A plan as a member was sent it, and the number of the first ping it gets after that."""

    plan: Plan
    nonce: int


@dataclass(slots=True)
class _Retired:
    version: int
    #: the ping each host still has to answer
    nonces: dict[str, int]
    #: the newest round begun when all had answered
    horizon: int | None = None


class RetiredIds:
    """Plan versions that retired ids, the oldest first, and when these may be issued again: when no packet can carry one in a
    round that still matters (child ids).

    The coordinator sees Begins late: a host may have begun a round, and the lost aggregator forwarded its part,
    before the coordinator knew of the round. But a host that answers a ping sent after a plan has said Begin
    for every round it began before that plan. So the rounds in question are those begun when all hosts have
    answered, and the id is free when all of them are over.
    """

    def __init__(self, ledger: RoundLedger) -> None:
        self._ledger = ledger
        self._versions: list[_Retired] = []

    def track(self, version: int, nonces: dict[str, int]) -> None:
        """A version retired ids; ``nonces`` are the next pings of the hosts."""
        self._versions.append(_Retired(version, nonces))

    def answered(self, host: str, nonce: int) -> None:
        """A host has answered a ping."""
        for entry in self._versions:
            if entry.nonces.get(host, nonce + 1) <= nonce:
                del entry.nonces[host]
            if not entry.nonces and entry.horizon is None:
                entry.horizon = self._ledger.newest

    def settled(self, hosts: Collection[str]) -> int:
        """The newest version such that the ids retired in it and before it are free; 0 if there is none.

        Hosts not among ``hosts`` are gone and are not waited for.
        """
        version = 0
        for entry in self._versions:
            if any(host in hosts for host in entry.nonces):
                break
            if entry.horizon is None:
                entry.horizon = self._ledger.newest
            if not self._ledger.settled_up_to(entry.horizon):
                break
            version = entry.version
        self._versions = [entry for entry in self._versions if entry.version > version]
        return version


class PlanVersions:
    """``hosts``, ``hellos``: the job's, by name; every member has said Hello. ``next_nonce(name)`` is the number of the next ping
    that member will be sent. ``send(name, message)`` sends, ``log`` takes events. ``silence``: seconds in which slots are made.
    """

    def __init__(
        self,
        name: str,
        topology: Topology,
        plan: JobPlan,
        hosts: Mapping[str, Host],
        hellos: Mapping[str, Hello],
        ledger: RoundLedger,
        buffers: ReceiveBuffers,
        next_nonce: Callable[[str], int],
        send: Callable[[str, Message], None],
        log: list[ControlEvent],
        silence: float,
    ) -> None:
        self.topology = topology
        self.current = plan
        self.hellos = dict(hellos)
        #: names of the hosts that the job has had since its epoch began
        self.members = tuple(sorted(hosts))
        #: aggregators that the plan does without
        self.absent: set[str] = set()
        #: (holder, tensor) still to be ready before workers get the plan they wait for, and until when
        self.gate: set[tuple[str, int]] = set()
        self.gate_deadline = 0.0
        #: workers do not have the current version
        self.held_back = False
        #: it was made while no round was on its way
        self.quiet = False
        self.retired = RetiredIds(ledger)
        self._name = name
        self._hosts = hosts
        self._ledger = ledger
        self._buffers = buffers
        self._next_nonce = next_nonce
        self._send = send
        self._log = log
        self._silence = silence
        self._attach: dict[str, set[int]] = {}
        self._destinations: dict[str, Destination] = {}
        #: what every member was told last
        self._told: dict[str, _Told] = {}

    @property
    def parents(self) -> dict[tuple[int, str], str]:
        """The parent of each (tree, node) in the current version."""
        return {(t.tree, child): p for t in self.current.trees for child, p in t.parents.items()}

    def advance(self, reason: str, now: float, parents: Mapping[tuple[int, str], str] | None = None) -> None:
        """Make the next version, for the nodes that are present, and send it to aggregators and roots; workers get it when the
        gate is open. Raises :class:`~inanet.coordinator.rounds.JobLost` if there can be none.

        ``parents``: what each (tree, node) takes for its parent, if that is not as in the current version.
        """
        if parents is None:
            parents = self.parents
        try:
            trees = self.topology.trees(self.members, self.absent)
            self.current.advance(trees, settled=self.retired.settled(self._hosts), quiet=self.quiet)
        except (TopologyError, PlanError) as error:
            raise JobLost("aggregator_lost", f"job {self._name!r}: {reason}, but {error}") from None
        for tree in trees:
            for child, parent in tree.parents.items():
                if parents.get((tree.tree, child), parent) != parent:
                    self._attach.setdefault(child, set()).add(tree.tree)
        senders: dict[int, int] = {}
        for name, links in self.current.links().items():
            endpoint = self.hellos[name].endpoint
            senders[endpoint] = senders.get(endpoint, 0) + links
        self._buffers.declare(self.current.job, senders)
        if self.current.retires:
            self.retired.track(self.current.version, {host: self._next_nonce(host) for host in self._hosts})
        self.publish(reason, now)

    def inform(self, reason: str, names: Collection[str] | None = None) -> None:
        """Make the next version and send it to aggregators and roots, or to these: it has nothing in it for workers, whose
        connections may be about to close. Without a ``reason`` it is not worth a word.
        """
        trees = self.topology.trees(self.members, self.absent)
        self.current.advance(trees, settled=self.retired.settled(self._hosts), quiet=self.quiet)
        if reason:
            self._log.append(PlanChanged(self.current.job, self._name, self.current.version, reason))
        for name in self.current.holders() if names is None else names:
            self.send(name)

    def publish(self, reason: str, now: float) -> None:
        """Send the current version to aggregators and roots."""
        self.held_back = True
        self.gate_deadline = now + self._silence
        self._destinations = {name: self.destination(name) for name in self.current.nodes()}
        self._log.append(PlanChanged(self.current.job, self._name, self.current.version, reason))
        for name in self.current.holders():
            self.send(name)

    def open_gate(self) -> bool:
        """Send the current version to workers, if they do not have it and all slots for it are made; whether that was so."""
        if not self.held_back or self.gate:
            return False
        self.held_back = self.quiet = False
        for name in self._hosts:
            self.send(name)
        return True

    def ready(self, name: str, tensor: int) -> None:
        """A holder is ready for a tensor."""
        self.gate.discard((name, tensor))

    def without(self, name: str) -> None:
        """The plan is to do without an aggregator."""
        self.absent.add(name)
        self.gate = {(holder, tensor) for holder, tensor in self.gate if holder != name}
        self._attach.pop(name, None)

    def dismiss(self, name: str, reason: str) -> None:
        """Tell an aggregator that the job goes on without it."""
        self._told.pop(name, None)
        self._send(name, JobEnded(job=self.current.job, reason=clip(reason)))

    def renew(self, plan: JobPlan) -> None:
        """Begin an epoch with the hosts that are left: nodes forget everything, and get plans of another planner, numbered on."""
        plan.follow(self.topology.ancestors)
        plan.version = self.current.version
        self.current = plan
        self.members = tuple(sorted(self._hosts))
        self.retired = RetiredIds(self._ledger)
        self.gate, self._attach = set(), {}
        self.quiet = self.held_back = False

    @property
    def stale(self) -> bool:
        """Whether a member's window is no longer what the current version says."""
        return any(self.destination(name) != destination for name, destination in self._destinations.items())

    def send(self, name: str) -> None:
        """Send the current version to a member."""
        attach = tuple(sorted(self._attach.pop(name, ())))
        plan = Plan(plan=self.current.view(name, self.destination), attach=attach)
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
        self._log.append(PlanRepeated(self.current.job, self._name, name, version, told.plan.plan.version))
        self._send(name, told.plan)

    def destination(self, name: str) -> Destination:
        """Where a member receives, and the window everybody who sends there has."""
        hello = self.hellos[name]
        return replace(self._buffers.destination(hello.endpoint, hello.rx_window), listens=hello.groups)

    def answered(self, host: str, nonce: int) -> None:
        """A worker host has answered ping ``nonce``."""
        self.retired.answered(host, nonce)
