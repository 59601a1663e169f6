"""A running job: its members, its plan as they come and go, and its end.

The plan changes in few ways only. When an aggregator is lost, its children move to the parent that holds
its id, at once, and the planner retires that id (re-parenting). When one returns, nothing retires, so no packet of
any round may be on its way: hosts are asked to hold before a round none of them has begun, and the plan
changes when everything before it is finished and confirmed. That is also the moment for other trees, when the
planner knows better ones. A job that is scheduled over several switches (GOAT) is scheduled anew when one is lost or comes,
in another epoch. A parameter server that comes back gets everything again (root restart). A worker that is lost ends the
job, or, if that is elastic, has it begin another epoch.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from inanet.coordinator.events import (
    ControlEvent,
    JobOver,
    KeyChanged,
    MembershipChanged,
    PlanChosen,
    ReturnDelayed,
    RootMissed,
    RoundLost,
)
from inanet.coordinator.goat.rounds import AsynchronousRounds
from inanet.coordinator.goat.schedules import Reschedule, Rescheduled, Schedules
from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.plans import Inheritance, PlanVersions
from inanet.coordinator.quiet_moment import Mark, QuietMoment
from inanet.coordinator.receive_buffers import ReceiveBuffers
from inanet.coordinator.round_ledger import Host, Round
from inanet.coordinator.rounds import CoordinatorRounds, JobLost
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.sparse.hot_keys import HotKeys, Servers
from inanet.coordinator.sparse.model import KeptModel
from inanet.messages.control import (
    Begin,
    Finished,
    Gathered,
    Held,
    Hello,
    Hold,
    JobFailed,
    Judge,
    Judged,
    Kept,
    LayoutReady,
    Message,
    Refuse,
)
from inanet.messages.fields import Cause
from inanet.messages.text import clip, show_ranks
from inanet.planning.topology import Topology
from inanet.planning.trees import Performance
from inanet.proto.slots.systems import SYSTEMS
from inanet.proto.zebra.plan import ZebraJob

_GOES_ON = "the job goes on with the others: call again"


#: what a server that has not said what it has of a sparse job's model is waited for with: such a job has no tensors
_MODEL = 0


#: What a job that goes on with so many ranks gets: the number of its next epoch, and a planner under another key.
Renewal = Callable[[int], tuple[int, JobPlan]]
#: Wait for a quiet moment like an aggregator; no node is called that.
REARRANGED, REKEYED = "*", "#"


@dataclass(slots=True)
class LostServers:
    """Parameter servers that are gone and may come back: each is waited for ``seconds``, as the coordinator would be (root restart)."""

    seconds: float
    _since: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def lose(self, name: str, why: str, now: float) -> bool:
        """One is gone; False if that was known."""
        if name in self._since:
            return False
        self._since[name] = (now + self.seconds, why)
        return True

    def fill(self, name: str) -> bool:
        """One is back; False if it was not missed."""
        return self._since.pop(name, None) is not None

    def timer(self) -> float | None:
        """When the first of them is late."""
        return min((deadline for deadline, _ in self._since.values()), default=None)

    def late(self, now: float) -> tuple[str, str] | None:
        """One that has not come back in time, and why it is gone."""
        return next(((name, why) for name, (at, why) in sorted(self._since.items()) if now >= at), None)


@dataclass(slots=True)
class EpochChange:
    """The job goes on in another epoch, without workers that are gone (elastic rounds) or over other switches.

    A round whose contributions are all at the roots is completed, with the lost worker's part in it; any other fails on all
    survivors with one error. Only the roots can tell which it is, so they are asked, and a root that lacks something gives the
    round up before it answers: a round never fails on some ranks only. Hosts hold meanwhile. When all have said what they have
    begun, and nothing is under way any more, the job gets a plan under a new key, the next epoch, with fewer ranks: nodes
    forget everything that was sent before it, so nothing of the old membership can be counted in the new one.

    ``nonce`` is that of the hold hosts are asked for, ``before`` its round.
    """

    reason: str
    nonce: int
    before: int
    held: set[str] = field(default_factory=set)
    #: by round, the roots that have still to say whether they have all of it
    asked: dict[int, set[str]] = field(default_factory=dict)

    def hold_again(self, nonce: int) -> None:
        """Hosts have been sent a plan, which lets them go on: they are asked anew."""
        self.nonce = nonce
        self.held.clear()

    def judged(self, root: str, round_: int, complete: bool) -> bool:
        """A root has answered; whether the round fails with that."""
        waiting = self.asked.get(round_)
        if waiting is None or root not in waiting:
            return False
        waiting.discard(root)
        if not complete or not waiting:
            del self.asked[round_]
        return not complete

    def waits_for(self, root: str) -> Iterator[int]:
        """Rounds about which a root has not answered, which it will not do any more."""
        for round_ in [round_ for round_, roots in self.asked.items() if root in roots]:
            del self.asked[round_]
            yield round_

    def settled(self, hosts: Collection[str]) -> bool:
        """Whether all hosts hold and all roots have answered."""
        return not self.asked and self.held.issuperset(hosts)


class Job:
    """What members are to be sent is appended to ``outbox`` as (name, message), what is worth telling to ``log``.

    ``hellos`` has every member's Hello; ``next_nonce(name)`` is the number of the next ping that member will be sent.
    ``renewal`` has it go on in another epoch, also without workers if it is ``elastic``; ``reschedule`` without a switch.
    """

    def __init__(
        self,
        name: str,
        topology: Topology,
        plan: JobPlan,
        hosts: Mapping[str, Host],
        hellos: Mapping[str, Hello],
        settings: Settings,
        format_of: FormatOf,
        buffers: ReceiveBuffers,
        next_nonce: Callable[[str], int],
        epoch: int = 0,
        renewal: Renewal | None = None,
        reschedule: Reschedule | None = None,
        *,
        elastic: bool = False,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.number = plan.job
        self.hosts = dict(hosts)
        self.over = False
        #: how it ended, once it is over
        self.verdict = ""
        #: the key that an earlier coordinator had given it, if there was one
        self.inherited: int | None = None
        self.outbox: list[tuple[str, Message]] = []
        self.log: list[ControlEvent] = []
        #: every host has rounds of its own
        self.asynchronous = plan.switched is not None and SYSTEMS[plan.switched.system].asynchronous
        made = AsynchronousRounds if self.asynchronous else CoordinatorRounds
        self.rounds = made(name, self.hosts, plan, settings, format_of, self._send, self._guard)
        ledger = self.rounds.ledger
        self.plans = PlanVersions(
            name,
            topology,
            plan,
            self.hosts,
            hellos,
            ledger,
            buffers,
            next_nonce,
            self._send,
            self.log,
            settings.silence,
        )
        #: of jobs that are scheduled over several switches
        self.schedules = None if reschedule is None else Schedules(reschedule)
        #: parts that only sparse jobs have: one finds hot keys while it trains, one begins with a kept model
        self.hot_keys: HotKeys | None = None
        self.model: KeptModel | None = None
        self._settings = settings
        self._now = 0.0
        self._buffers = buffers
        self._renewal = renewal
        self._elastic = elastic and renewal is not None
        #: why the job needs another key, if it does
        self._compromised = ""
        self._change: EpochChange | None = None
        self._ending: tuple[float, JobLost] | None = None
        self._lost_servers = LostServers(settings.resume)
        self._performances: dict[str, Performance] = {}
        #: other trees, for the next moment in which no round is on its way
        self._wanted: Topology | None = None
        self._moment = QuietMoment(ledger, settings.hold)
        facts = plan.switched
        if not isinstance(facts, ZebraJob):
            return
        names = (*topology.roots, *topology.aggregators)
        servers = Servers.of(facts, names, self.plans.hellos)
        if facts.sparse.online is not None:
            self.hot_keys = HotKeys(self.number, servers, self, self._send)
        if facts.sparse.model:
            self.model = KeptModel(self.name, servers, self)
            self.plans.gate = {(name, _MODEL) for name in self.model.awaited}

    def _send(self, name: str, message: Message) -> None:
        self.outbox.append((name, message))

    # ---------- plans

    def start(self, now: float) -> None:
        """Make and send the first version. A failure is told to the members like any later one."""
        self._guard(now, lambda: self._advance("the job starts"))

    def resume(self, returned: Inheritance, now: float) -> None:
        """Take over from an earlier coordinator, which is gone (coordinator restart)."""
        self.plans.current.adopt(returned.plans)
        self._guard(now, lambda: self._take_over(returned))

    def _take_over(self, returned: Inheritance) -> None:
        tensors = self.rounds.tensors
        holders = {*self.plans.topology.needed(self.plans.members)} - self.plans.absent
        self.plans.gate = {(name, tensor) for name, tensor in returned.lacking if name in holders}
        for name, number in self.plans.gate:
            tensor = tensors.book.get(number)
            if tensor is not None:
                tensor.waiting.add(name)
        parents = {
            (place.tree, name): "" if place.parent.name in returned.blank else place.parent.name
            for name, plan in returned.plans.items()
            for place in plan.placements
            if place.parent is not None
        }
        self._advance("the coordinator has started again", parents)
        for name, number in sorted(returned.lacking):
            tensor = tensors.book.get(number)
            if tensor is not None and (
                (name in self.hosts and tensor.ready) or (name, number) in self.plans.gate
            ):
                tensors.tell(name, tensor)
        self.rounds.resume()

    def _advance(self, reason: str, parents: Mapping[tuple[int, str], str] | None = None) -> None:
        """Make and send the next version; see :meth:`~inanet.coordinator.plans.PlanVersions.advance`."""
        self.plans.advance(reason, self._now, parents)
        self._moment.cancel()
        self._open_gate()

    def _open_gate(self) -> None:
        if self.plans.open_gate():
            self._hold_for_change()

    @property
    def facts(self) -> ZebraJob:
        """What the plan of a sparse job says."""
        assert isinstance(self.plans.current.switched, ZebraJob)
        return self.plans.current.switched

    def publish(self, facts: ZebraJob, reason: str, only: Collection[str] | None = None) -> None:
        """Make and send the next version; see :class:`~inanet.coordinator.sparse.hot_keys.PlanOwner`."""
        self.plans.current.switched = facts
        if only is None:
            self._advance(reason)
        else:
            self.plans.inform(reason, only)

    def rewindow(self, now: float) -> None:
        """Other jobs have come or gone: make a new version if that changes any window."""
        if self.plans.stale:
            self._guard(now, lambda: self._advance("another job has changed the windows"))

    def follows(self, name: str, version: int, nonce: int) -> None:
        """A member says which version it acts on, in answer to ping ``nonce``."""
        self.plans.follows(name, version, nonce)
        if self.hot_keys is not None:
            self.hot_keys.answered(name)

    # ---------- what members say and do

    def receive(self, name: str, message: Message, now: float) -> None:
        """One message of a member about this job; what its role may not say is ignored."""
        self._guard(now, lambda: self._receive(name, message, now))

    def _receive(self, name: str, message: Message, now: float) -> None:
        host = name in self.hosts
        if isinstance(message, Begin) and host:
            self.rounds.begin(name, message, now)
            if self.rounds.farewell and self._elastic and self._change is None:
                # somebody has left in good order, and the others are not done
                self._shrink(self.rounds.farewell, self.rounds.ledger.newest, [])
        elif isinstance(message, Refuse) and host:
            self.rounds.refuse(name, message, now)
        elif isinstance(message, Finished):
            self.rounds.finished(name, message)
        elif isinstance(message, LayoutReady) and (message.refused or not host):
            self._layout_ready(name, message)
        elif isinstance(message, Judged):
            self._judged(name, message)
        elif isinstance(message, Gathered) and self.hot_keys is not None:
            self.hot_keys.gathered(name, message)
        elif isinstance(message, Kept) and self.model is not None:
            self.plans.ready(name, _MODEL)
            self.model.kept(name, message)
        elif isinstance(message, Held) and host:
            if self._change is not None and message.nonce == self._change.nonce:
                self._change.held.add(name)
            self._ask_to_hold(self._moment.held(name, message.nonce, self.hosts))

    def _guard(self, now: float, action: Callable[[], None]) -> None:
        """Run something that may find that the job cannot go on, and then what it has made possible."""
        if self.over:
            return
        self._now = now
        try:
            action()
            self._tidy()
        except JobLost as lost:
            self._fail(lost)
        for failure in self.rounds.failures():
            self.log.append(RoundLost(self.number, self.name, failure.round, failure.error, failure.message))

    def _tidy(self) -> None:
        """What may have become possible: the end of the job, the return of an aggregator."""
        if self._ending is not None and not self.rounds.completing:
            raise self._ending[1]
        if not self.hosts:
            # the last one has left: nobody is there whom another plan would be for
            return
        if self._change is not None and self._may_renew:
            reason, self._change = self._change.reason, None
            self._renew(reason, self._anew(reason))
        names = self._moment.ready(self.hosts)
        if names is not None:
            self._enter(names)
        if self._may_hold:
            self._ask_to_hold(self._moment.propose(self._now))

    def _layout_ready(self, name: str, message: LayoutReady) -> None:
        facts = self.plans.current.switched
        if message.refused and isinstance(facts, ZebraJob):
            if name not in self.plans.current.nodes():
                return
            # it has no tensors: this is about the plan
            raise JobLost(message.cause, f"job {self.name!r}: {message.refused}")
        if (name, message.tensor) in self.plans.gate and self.plans.quiet and message.refused:
            self._drop_holder(name, f"{name!r} has no room for tensors in use: {message.refused}")
            return
        self.plans.ready(name, message.tensor)
        self.rounds.layout_ready(name, message)
        self._open_gate()

    def worker_lost(self, name: str, why: str, now: float) -> None:
        """A worker host is gone. Rounds nobody has the result of fail, the others may be completed, then
        the job fails; all survivors are told the same.
        """
        self._guard(now, lambda: self._worker_lost(name, why))

    def _worker_lost(self, name: str, why: str) -> None:
        ranks = self.hosts[name].ranks
        open_ = [round_.number for round_ in self.rounds.ledger if round_.failure is None]
        where = f" in round {open_[0]}" if open_ else ""
        text = f"{show_ranks(ranks)} (host {name}) was lost{where}: {why}"
        if self._elastic and len(self.hosts) > 1 and self._ending is None:
            newest = self.rounds.ledger.newest
            self._shrink(text, newest, self.rounds.part(name, f"{text}; {_GOES_ON}"))
            return
        self.rounds.lose(name, text)
        if self._ending is None:
            lost = JobLost("worker_lost", f"job {self.name!r}: {text}", open_[0] if open_ else None, ranks)
            self._ending = (self._now + self._settings.grace, lost)

    def leave(self, name: str, now: float, why: str = "") -> None:
        """A worker host says farewell, and ``why``; the job is over when all have."""
        if name not in self.hosts:
            return
        for round_ in self.rounds.ledger:
            if round_.failure is None and name in round_.specs and name not in round_.finished:
                self.worker_lost(name, f"it left before it had the result of round {round_.number}", now)
                return
        ranks = show_ranks(self.hosts[name].ranks)
        self._guard(
            now,
            lambda: self._leave(name, f"{ranks} (host {name}) has left the job{f': {why}' if why else ''}"),
        )
        if not self.hosts and not self.over:
            self._close("all workers have left", None)

    def _leave(self, name: str, text: str) -> None:
        self.rounds.leave(name, text)
        facts = self.plans.current.switched
        rest = None if facts is None else facts.without(self.plans.members.index(name))
        if rest is not None and self.hosts:
            self.plans.current.switched = rest
            self.plans.inform(text)

    def holder_lost(self, name: str, why: str, now: float) -> None:
        """An aggregator or parameter server is gone."""
        self._guard(now, lambda: self._holder_lost(name, why))

    def _holder_lost(self, name: str, why: str) -> None:
        self._moment.discard(name)
        for number in self._change.waits_for(name) if self._change is not None else ():
            self._give_up(number)
        if self.schedules is not None and self._ending is None and name in self.plans.topology.aggregators:
            self.schedules.avoided.add(name)
            self._replan(f"switch {name!r} was lost: {why}")
        elif name in self.plans.topology.roots and self.plans.current.switched is not None:
            # what a switch has added up meanwhile, nobody can tell
            self._root_late(name, why)
        elif name in self.plans.topology.roots:
            if self._lost_servers.lose(name, why, self._now):
                self.rounds.ledger.forgive(name)
                self.log.append(RootMissed(self.number, self.name, name, self._lost_servers.seconds, why))
        elif self._wanted is not None and name in self._wanted.aggregators:
            # not with this one: what the workers have is as good as before
            self._wanted = None
            self._moment.discard(REARRANGED)
        if (
            self.schedules is None
            and name in self.plans.current.nodes()
            and name not in self.plans.topology.roots
        ):
            self._drop_holder(name, f"{self.plans.hellos[name].role} {name!r} was lost: {why}")

    def _drop_holder(self, name: str, reason: str) -> None:
        """Go on without an aggregator: its children move up (re-parenting)."""
        self.plans.without(name)
        self._advance(reason)
        self.plans.dismiss(name, reason)
        self.rounds.tensors.holder_lost(name)

    def _root_late(self, name: str, why: str) -> NoReturn:
        raise JobLost("root_lost", f"job {self.name!r}: parameter server {name!r} was lost: {why}")

    # ---------- servers return

    def _root_returned(self, hello: Hello) -> None:
        """A PS is back, with nothing: it gets slots, and its children send what they have again (root restart)."""
        name = hello.name
        self.plans.hellos[name] = hello
        for tensor in self.rounds.tensors.book:
            rounds = [r.number for r in self.rounds.ledger if tensor.layout.spec in r.specs.values()]
            tensor.last_round = min(rounds, default=self.rounds.ledger.newest + 1) - 1
            tensor.waiting.add(name)
            self.plans.gate.add((name, tensor.layout.tensor))
        parents = {
            (tree.tree, child): "" if parent == name else parent
            for tree in self.plans.current.trees
            for child, parent in tree.parents.items()
        }
        self._advance(f"parameter server {name} came back", parents)
        for tensor in self.rounds.tensors.book:
            self.rounds.tensors.tell(name, tensor)

    def holder_returned(self, hello: Hello, now: float) -> None:
        """An aggregator the plan does without is connected again; it comes back in when no round is on its
        way.
        """
        if self._lost_servers.fill(hello.name):
            self._guard(now, lambda: self._root_returned(hello))
        if hello.name in self.plans.absent:
            self.plans.hellos[hello.name] = hello
            self._moment.add(hello.name)
            self._guard(now, lambda: None)
        facts = self.plans.current.switched
        if self.schedules is not None and facts is not None and facts.system in hello.services:
            # a switch that has come: worth another schedule, in a moment in which nothing is under way
            self.schedules.avoided.discard(hello.name)
            if hello.role == "switch" and hello.name not in self.plans.topology.aggregators:
                self._moment.add(REARRANGED)
                self._guard(now, lambda: None)

    @property
    def _may_hold(self) -> bool:
        """Whether this is no moment in which hosts wait for something else, or for nothing."""
        return (
            not self.plans.held_back
            and not self._lost_servers
            and self._ending is None
            and not self.rounds.farewell
            and self._change is None
        )

    def _ask_to_hold(self, mark: Mark | None) -> None:
        if mark is not None:
            for host in self.hosts:
                self._send(host, Hold(job=self.number, nonce=mark.nonce, before=mark.before))

    def _hold_for_change(self) -> None:
        """A plan lets hosts go on; not yet, if another epoch is about to begin."""
        if self._change is not None:
            self._change.hold_again(self._moment.number())
            self._ask_to_hold(Mark(self._change.nonce, self._change.before))

    def _release(self) -> None:
        """Hosts have held for long enough; the aggregators have to wait for a better moment."""
        self._moment.cancel()
        for host in self.hosts:
            self.plans.send(host)

    def _enter(self, names: tuple[str, ...]) -> None:
        if REKEYED in names and self.rounds.farewell and not self._elastic:
            # it is about to end: in another epoch rounds would be had without those that have left
            self._release()
            return
        if REKEYED in names:
            # whoever else has waited comes in the next such moment, under the new key
            for name in {*names} - {REKEYED}:
                self._moment.add(name)
            if self._lost_servers:
                self._moment.insist(REKEYED)
            else:
                self._renew(self._compromised, None)
            return
        if self.schedules is not None:
            found = self.schedules.better(self.hosts)
            if found is None:
                self._release()
            else:
                self._renew("a switch has come", found)
            return
        newest = self.rounds.ledger.newest
        entering = set(names) - {REARRANGED}
        reason = f"{', '.join(sorted(entering))} came back"
        before = set(self.plans.current.holders())
        if self._wanted is not None and REARRANGED in names:
            self.plans.topology, self._wanted = self._wanted, None
            self.plans.current.follow(self.plans.topology.ancestors)
            reason = "the trees were arranged anew"
            entering = set(self.plans.topology.needed(self.plans.members)) - before
            self.plans.absent &= set(self.plans.topology.aggregators)
        elif not entering:
            # the trees that were wanted cannot be had any more
            self._release()
            return
        self.plans.absent -= entering
        self.plans.quiet = True
        self.plans.gate = {
            (name, tensor.layout.tensor) for name in entering for tensor in self.rounds.tensors.book
        }
        self._advance(reason)
        for tensor in self.rounds.tensors.book:
            tensor.last_round = max(tensor.last_round, newest)
            for name in sorted(entering):
                self.rounds.tensors.tell(name, tensor)
        for name in sorted(before - set(self.plans.current.holders())):
            self.plans.dismiss(name, "its place in the tree was given up")

    # ---------- other trees

    def performed(self, performance: Performance) -> tuple[Performance, ...]:
        """How a host fared in the first step; everybody's, once that is known of all, else nothing."""
        if performance.name not in self.hosts or performance.name in self._performances:
            return ()
        self._performances[performance.name] = performance
        if not self._performances.keys() >= set(self.plans.members):
            return ()
        return tuple(self._performances.values())

    @property
    def size(self) -> int:
        """Bytes of all tensors of the job."""
        return sum(tensor.layout.spec.elements * 4 for tensor in self.rounds.tensors.book)

    def rearrange(self, topology: Topology, serving: Mapping[str, Hello], now: float) -> None:
        """Have other trees, with the same roots, from the next moment on in which no round is on its way."""
        if topology == self.plans.topology or topology.roots != self.plans.topology.roots:
            return
        self.plans.hellos.update(
            {name: hello for name, hello in serving.items() if name not in self.plans.hellos}
        )
        self._wanted = topology
        self._moment.add(REARRANGED)
        self._guard(now, lambda: None)

    # ---------- another key

    def change_key(self, reason: str, now: float) -> None:
        """Somebody who must not take part any more knows the job's key: have it go on under another, in the next moment in
        which no round is on its way. Hosts begin none until then, however long it takes: what is under way ends in time.
        """
        if self._renewal is not None and self._change is None:
            self._compromised = reason
            self._moment.insist(REKEYED)
            self._guard(now, lambda: None)

    # ---------- the next epoch

    def _shrink(self, reason: str, newest: int, open_: list[Round]) -> None:
        """Have roots judge the rounds under way, and hosts begin no round after ``newest`` until the next epoch."""
        change = self._change
        if change is None:
            change = self._change = EpochChange(reason, 0, newest + 1)
        change.reason, change.before = reason, max(change.before, newest + 1)
        self._moment.cancel()
        self._hold_for_change()
        for round_ in open_:
            tensors = [self.rounds.tensors.book.find(spec) for spec in dict.fromkeys(round_.specs.values())]
            known = tuple(sorted(tensor.layout.tensor for tensor in tensors if tensor is not None))
            change.asked[round_.number] = set(round_.roots)
            for root in round_.roots:
                self._send(root, Judge(job=self.number, round=round_.number, tensors=known))

    def _judged(self, name: str, message: Judged) -> None:
        if self._change is not None and self._change.judged(name, message.round, message.complete):
            self._give_up(message.round)

    def _give_up(self, number: int) -> None:
        """A round that some root does not have all of, now that nobody will send it any more."""
        round_ = self.rounds.ledger.get(number)
        if round_ is not None and round_.failure is None:
            collectives = self.rounds
            collectives.fail(round_, "worker_lost", collectives.farewell, missing=collectives.departed)

    @property
    def _may_renew(self) -> bool:
        """Whether nothing of the old membership is under way any more."""
        return (
            self._change is not None
            and self._change.settled(self.hosts)
            and not self.rounds.completing
            and not self._lost_servers
        )

    def _renew(self, reason: str, found: Rescheduled | None) -> None:
        """Begin the next epoch, with the hosts that are left; on other switches if ``found`` says so."""
        for name in self.plans.current.holders():
            self.plans.dismiss(name, "the job goes on in a new epoch")
        ranks = sum(len(host.ranks) for host in self.hosts.values())
        fewer = ranks < self.plans.current.ranks
        if found is not None:
            self.epoch, self.plans.topology, plan = found.epoch, found.topology, found.plan
            self.plans.hellos.update(found.hellos)
            self.log.append(PlanChosen(self.number, self.name, found.reason))
        else:
            assert self._renewal is not None
            self.epoch, plan = self._renewal(ranks)
        self.plans.renew(plan)
        self.rounds.renew(plan)
        if fewer or found is not None:
            # what others have done, and trees for them, is of no use
            self._performances, self._wanted = {}, None
            self._moment.discard(REARRANGED)
        self._moment.discard(REKEYED)
        self._compromised = ""
        if found is None and fewer:
            self.log.append(MembershipChanged(self.number, self.name, ranks, self.epoch, reason))
        elif found is None:
            self.log.append(KeyChanged(self.number, self.name, self.epoch, reason))
        self._advance(f"{reason}; {ranks} ranks go on", {})

    def _replan(self, reason: str) -> None:
        """A switch is gone: rounds under way fail, and the job is scheduled anew once all hosts hold."""
        self.rounds.give_up(f"{reason}; the job is scheduled anew: call again")
        self._shrink(reason, self.rounds.ledger.newest, [])

    def _anew(self, reason: str) -> Rescheduled | None:
        """A schedule over the switches that are there now, if it is for that that hosts hold."""
        if self.schedules is None:
            return None
        found = self.schedules.without(self.hosts)
        if found is None:
            text = f"job {self.name!r}: {reason}, and its sums cannot be made without it"
            raise JobLost("aggregator_lost", text)
        return found

    # ---------- time and the end

    def timer(self) -> float | None:
        times = [self.rounds.timer(), self._moment.timer(self._may_hold)]
        if self._ending:
            times.append(self._ending[0])
        if self.plans.gate:
            times.append(self.plans.gate_deadline)
        times.append(self._lost_servers.timer())
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Fail what is late."""
        self._guard(now, self._on_timer)

    def _on_timer(self) -> None:
        self.rounds.on_timer(self._now)
        if self._ending is not None and self._now >= self._ending[0]:
            raise self._ending[1]
        if self._moment.is_late(self._now):
            names, reason = self._moment.fail(self.hosts)
            self.log.append(ReturnDelayed(self.number, self.name, names, reason))
            self._release()
        if late := self._lost_servers.late(self._now):
            self._root_late(
                late[0], f"{late[1]}, and it did not come back within {self._lost_servers.seconds:g} s"
            )
        if self.plans.gate and self._now >= self.plans.gate_deadline:
            self._do_without({name for name, _ in self.plans.gate})

    def _do_without(self, names: set[str]) -> None:
        """Workers wait for slots that are not made."""
        for name in sorted(names):
            seconds = f"within {self._settings.silence:g} s"
            why = f"it did not make slots {seconds}"
            if self.model is not None:
                why = f"it did not say {seconds} what it has of model {self.model.name!r}"
            if name in self.plans.topology.roots:
                self._root_late(name, why)
            self._holder_lost(name, why)

    def _fail(self, lost: JobLost) -> None:
        text = clip(lost.text)
        failed = JobFailed(
            job=self.number, error=lost.error, message=text, round=lost.round, ranks=lost.ranks
        )
        for host in self.hosts:
            self._send(host, failed)
        self._close(text, lost.error)

    def _close(self, reason: str, error: Cause | None) -> None:
        for name in self.plans.current.holders():
            self.plans.dismiss(name, reason)
        self.over = True
        self.verdict = reason
        self._buffers.withdraw(self.number)
        self.log.append(JobOver(self.number, self.name, error, reason))
