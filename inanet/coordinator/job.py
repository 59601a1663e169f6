"""A running job: its members, its plan as they come and go, and its end.

The plan changes in few ways only. When an aggregator is lost, its children move to the parent that holds
its id, at once, and the planner retires that id (re-parenting). When one returns, nothing retires, so no packet of
any round may be on its way: hosts are asked to hold before a round none of them has begun, and the plan
changes when everything before it is finished and confirmed. That is also the moment for other trees, when the
planner knows better ones. A job that is scheduled over several switches (GOAT) is scheduled anew when one is lost or comes,
in another epoch. A parameter server that comes back gets everything again (root restart). A worker that is lost ends the
job, or, if that is elastic, has it begin another epoch (:mod:`inanet.coordinator.elasticity`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from inanet.coordinator.events import JobOver, RootMissed, RoundLost
from inanet.coordinator.hold import Mark
from inanet.coordinator.plan_versions import Inheritance
from inanet.coordinator.renewal import REARRANGED, REKEYED, Renewing
from inanet.coordinator.rounds import JobLost
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
from inanet.proto.common.plan import Switched

_GOES_ON = "the job goes on with the others: call again"


#: what a server that has not said what it has of a sparse job's model is waited for with: such a job has no tensors
_MODEL = 0


class Job(Renewing):
    """See the module's documentation, and :class:`~inanet.coordinator.plan_versions.Versions`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: parts that only sparse jobs have: one finds hot keys while it trains, one begins with a kept model
        self.hot_keys: HotKeys | None = None
        self.model: KeptModel | None = None
        facts = self.planner.switched
        if facts is None or facts.sparse is None:
            return
        names = (*self.topology.roots, *self.topology.aggregators)
        servers = Servers.of(facts, names, self.hellos)
        if facts.sparse.online is not None:
            self.hot_keys = HotKeys(self.number, servers, self, self._send)
        if facts.sparse.model:
            self.model = KeptModel(self.name, servers, self)
            self._gate = {(name, _MODEL) for name in self.model.awaited}

    # ---------- plans

    def start(self, now: float) -> None:
        """Make and send the first version. A failure is told to the members like any later one."""
        self._guard(now, lambda: self._advance("the job starts"))

    def resume(self, returned: Inheritance, now: float) -> None:
        """Take over from an earlier coordinator, which is gone (coordinator restart)."""
        self.planner.adopt(returned.plans)
        self._guard(now, lambda: self._resume(returned))

    @property
    def facts(self) -> Switched:
        """What the plan of a job on switches says."""
        assert self.planner.switched is not None
        return self.planner.switched

    def publish(self, facts: Switched, reason: str, only: Collection[str] | None = None) -> None:
        """Make and send the next version; see :class:`~inanet.coordinator.sparse.hot_keys.PlanOwner`."""
        self.planner.switched = facts
        if only is None:
            self._advance(reason)
        else:
            self._inform(reason, only)

    def rewindow(self, now: float) -> None:
        """Other jobs have come or gone: make a new version if that changes any window."""
        if any(self.station(name) != station for name, station in self._stations.items()):
            self._guard(now, lambda: self._advance("another job has changed the windows"))

    def follows(self, name: str, version: int, nonce: int) -> None:
        """See :class:`~inanet.coordinator.plan_versions.Versions`."""
        super().follows(name, version, nonce)
        if self.hot_keys is not None:
            self.hot_keys.answered(name)

    # ---------- what members say and do

    def receive(self, name: str, message: Message, now: float) -> None:
        """One message of a member about this job; what its role may not say is ignored."""
        self._guard(now, lambda: self._receive(name, message, now))

    def _receive(self, name: str, message: Message, now: float) -> None:
        host = name in self.hosts
        if isinstance(message, Begin) and host:
            self.collectives.begin(name, message, now)
            if self.collectives.farewell and self._elastic and self._shrinking is None:
                # somebody has left in good order, and the others are not done
                self._shrink(self.collectives.farewell, self.collectives.ledger.newest, [])
        elif isinstance(message, Refuse) and host:
            self.collectives.refuse(name, message, now)
        elif isinstance(message, Finished):
            self.collectives.finished(name, message)
        elif isinstance(message, LayoutReady) and (message.refused or not host):
            self._layout_ready(name, message)
        elif isinstance(message, Judged):
            self._judged(name, message)
        elif isinstance(message, Gathered) and self.hot_keys is not None:
            self.hot_keys.gathered(name, message)
        elif isinstance(message, Kept) and self.model is not None:
            self._gate.discard((name, _MODEL))
            self.model.kept(name, message)
        elif isinstance(message, Held) and host:
            if self._shrinking is not None and message.nonce == self._shrinking.nonce:
                self._shrinking.held.add(name)
            self._hold(self._holding.held(name, message.nonce, self.hosts))

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
        for failure in self.collectives.failures():
            self.log.append(RoundLost(self.number, self.name, failure.round, failure.error, failure.message))

    def _tidy(self) -> None:
        """What may have become possible: the end of the job, the return of an aggregator."""
        if self._ending is not None and not self.collectives.completing:
            raise self._ending[1]
        if not self.hosts:
            # the last one has left: nobody is there whom another plan would be for
            return
        if self._shrinking is not None and self._may_renew:
            reason, self._shrinking = self._shrinking.reason, None
            self._renew(reason, self._anew(reason))
        names = self._holding.ready(self.hosts)
        if names is not None:
            self._enter(names)
        if self._may_hold:
            self._hold(self._holding.propose(self._now))

    def _layout_ready(self, name: str, message: LayoutReady) -> None:
        facts = self.planner.switched
        if message.refused and facts is not None and facts.sparse is not None:
            if name not in self.planner.nodes():
                return
            # it has no tensors: this is about the plan
            raise JobLost("memory", f"job {self.name!r}: {message.refused}")
        if (name, message.tensor) in self._gate and self._quiet and message.refused:
            self._drop_holder(name, f"{name!r} has no room for tensors in use: {message.refused}")
            return
        self._gate.discard((name, message.tensor))
        self.collectives.layout_ready(name, message)
        self._open_gate()

    def worker_lost(self, name: str, why: str, now: float) -> None:
        """A worker host is gone. Rounds nobody has the result of fail, the others may be completed, then
        the job fails; all survivors are told the same.
        """
        self._guard(now, lambda: self._worker_lost(name, why))

    def _worker_lost(self, name: str, why: str) -> None:
        ranks = self.hosts[name].ranks
        open_ = [round_.number for round_ in self.collectives.ledger if round_.failure is None]
        where = f" in round {open_[0]}" if open_ else ""
        text = f"{show_ranks(ranks)} (host {name}) was lost{where}: {why}"
        if self._elastic and len(self.hosts) > 1 and self._ending is None:
            newest = self.collectives.ledger.newest
            self._shrink(text, newest, self.collectives.part(name, f"{text}; {_GOES_ON}"))
            return
        self.collectives.lose(name, text)
        if self._ending is None:
            lost = JobLost("worker_lost", f"job {self.name!r}: {text}", open_[0] if open_ else None, ranks)
            self._ending = (self._now + self._settings.grace, lost)

    def leave(self, name: str, now: float, why: str = "") -> None:
        """A worker host says farewell, and ``why``; the job is over when all have."""
        if name not in self.hosts:
            return
        for round_ in self.collectives.ledger:
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
        self.collectives.leave(name, text)
        facts = self.planner.switched
        if self.asynchronous and facts is not None and self.hosts:
            # the PS may wait for this one's gradient
            gone = (*facts.departed, self._members.index(name))
            self.planner.switched = replace(facts, departed=gone)
            self._inform(text)

    def holder_lost(self, name: str, why: str, now: float) -> None:
        """An aggregator or parameter server is gone."""
        self._guard(now, lambda: self._holder_lost(name, why))

    def _holder_lost(self, name: str, why: str) -> None:
        self._holding.discard(name)
        for number in self._shrinking.waits_for(name) if self._shrinking is not None else ():
            self._give_up(number)
        if self._reschedule is not None and self._ending is None and name in self.topology.aggregators:
            self._replan(name, f"switch {name!r} was lost: {why}")
        elif name in self.topology.roots and self.planner.switched is not None:
            # what a switch has added up meanwhile, nobody can tell
            self._root_late(name, why)
        elif name in self.topology.roots:
            if self._vacancies.lose(name, why, self._now):
                self.collectives.ledger.forgive(name)
                self.log.append(RootMissed(self.number, self.name, name, self._vacancies.seconds, why))
        elif self._wanted is not None and name in self._wanted.aggregators:
            # not with this one: what the workers have is as good as before
            self._wanted = None
            self._holding.discard(REARRANGED)
        if self._reschedule is None and name in self.planner.nodes() and name not in self.topology.roots:
            self._drop_holder(name, f"{self.hellos[name].role} {name!r} was lost: {why}")

    def _drop_holder(self, name: str, reason: str) -> None:
        """Go on without an aggregator: its children move up (re-parenting)."""
        self.absent.add(name)
        self._gate = {(holder, tensor) for holder, tensor in self._gate if holder != name}
        self._attach.pop(name, None)
        self._advance(reason)
        self.dismiss(name, reason)
        self.collectives.tensors.holder_lost(name)

    def _root_late(self, name: str, why: str) -> NoReturn:
        raise JobLost("root_lost", f"job {self.name!r}: parameter server {name!r} was lost: {why}")

    # ---------- servers return

    def _root_returned(self, hello: Hello) -> None:
        """A PS is back, with nothing: it gets slots, and its children send what they have again (root restart)."""
        name = hello.name
        self.hellos[name] = hello
        for tensor in self.collectives.tensors.book:
            rounds = [r.number for r in self.collectives.ledger if tensor.layout.spec in r.specs.values()]
            tensor.last_round = min(rounds, default=self.collectives.ledger.newest + 1) - 1
            tensor.waiting.add(name)
            self._gate.add((name, tensor.layout.tensor))
        parents = {
            (tree.tree, child): "" if parent == name else parent
            for tree in self.planner.trees
            for child, parent in tree.parents.items()
        }
        self._advance(f"parameter server {name} came back", parents)
        for tensor in self.collectives.tensors.book:
            self.collectives.tensors.tell(name, tensor)

    def holder_returned(self, hello: Hello, now: float) -> None:
        """An aggregator the plan does without is connected again; it comes back in when no round is on its
        way.
        """
        if self._vacancies.fill(hello.name):
            self._guard(now, lambda: self._root_returned(hello))
        if hello.name in self.absent:
            self.hellos[hello.name] = hello
            self._holding.add(hello.name)
            self._guard(now, lambda: None)
        facts = self.planner.switched
        if self._reschedule is not None and facts is not None and facts.system in hello.services:
            # a switch that has come: worth another schedule, in a moment in which nothing is under way
            self._avoided.discard(hello.name)
            if hello.role == "switch" and hello.name not in self.topology.aggregators:
                self._holding.add(REARRANGED)
                self._guard(now, lambda: None)

    @property
    def _may_hold(self) -> bool:
        """Whether this is no moment in which hosts wait for something else, or for nothing."""
        return (
            not self._held_back
            and not self._vacancies
            and self._ending is None
            and not self.collectives.farewell
            and self._shrinking is None
        )

    def _hold(self, mark: Mark | None) -> None:
        if mark is not None:
            for host in self.hosts:
                self._send(host, Hold(job=self.number, nonce=mark.nonce, before=mark.before))

    def _release(self) -> None:
        """Hosts have held for long enough; the aggregators have to wait for a better moment."""
        self._holding.cancel()
        for host in self.hosts:
            self._send_plan(host)

    def _enter(self, names: tuple[str, ...]) -> None:
        if REKEYED in names and self.collectives.farewell and not self._elastic:
            # it is about to end: in another epoch rounds would be had without those that have left
            self._release()
            return
        if REKEYED in names:
            # whoever else has waited comes in the next such moment, under the new key
            for name in {*names} - {REKEYED}:
                self._holding.add(name)
            if self._vacancies:
                self._holding.insist(REKEYED)
            else:
                self._renew(self._compromised, None)
            return
        if self._reschedule is not None:
            found = self._reschedule(self.hosts, self._avoided, True)
            if found is None:
                self._release()
            else:
                self._renew("a switch has come", found)
            return
        newest = self.collectives.ledger.newest
        entering = set(names) - {REARRANGED}
        reason = f"{', '.join(sorted(entering))} came back"
        before = set(self.collectives.tensors.holders())
        if self._wanted is not None and REARRANGED in names:
            self.topology, self._wanted = self._wanted, None
            self.planner.follow(self.topology.ancestors)
            reason = "the trees were arranged anew"
            entering = set(self.topology.needed(self._members)) - before
            self.absent &= set(self.topology.aggregators)
        elif not entering:
            # the trees that were wanted cannot be had any more
            self._release()
            return
        self.absent -= entering
        self._quiet = True
        self._gate = {
            (name, tensor.layout.tensor) for name in entering for tensor in self.collectives.tensors.book
        }
        self._advance(reason)
        for tensor in self.collectives.tensors.book:
            tensor.last_round = max(tensor.last_round, newest)
            for name in sorted(entering):
                self.collectives.tensors.tell(name, tensor)
        for name in sorted(before - set(self.collectives.tensors.holders())):
            self.dismiss(name, "its place in the tree was given up")

    # ---------- other trees

    def performed(self, performance: Performance) -> tuple[Performance, ...]:
        """How a host fared in the first step; everybody's, once that is known of all, else nothing."""
        if performance.name not in self.hosts or performance.name in self._performances:
            return ()
        self._performances[performance.name] = performance
        if not self._performances.keys() >= set(self._members):
            return ()
        return tuple(self._performances.values())

    @property
    def size(self) -> int:
        """Bytes of all tensors of the job."""
        return sum(tensor.layout.spec.elements * 4 for tensor in self.collectives.tensors.book)

    def rearrange(self, topology: Topology, serving: Mapping[str, Hello], now: float) -> None:
        """Have other trees, with the same roots, from the next moment on in which no round is on its way."""
        if topology == self.topology or topology.roots != self.topology.roots:
            return
        self.hellos.update({name: hello for name, hello in serving.items() if name not in self.hellos})
        self._wanted = topology
        self._holding.add(REARRANGED)
        self._guard(now, lambda: None)

    # ---------- another key

    def change_key(self, reason: str, now: float) -> None:
        """Somebody who must not take part any more knows the job's key: have it go on under another, in the next moment in
        which no round is on its way. Hosts begin none until then, however long it takes: what is under way ends in time.
        """
        if self._renewal is not None and self._shrinking is None:
            self._compromised = reason
            self._holding.insist(REKEYED)
            self._guard(now, lambda: None)

    # ---------- time and the end

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        times = [self.collectives.timer(), self._holding.timer(self._may_hold)]
        if self._ending:
            times.append(self._ending[0])
        if self._gate:
            times.append(self._gate_deadline)
        times.append(self._vacancies.timer())
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Fail what is late."""
        self._guard(now, self._on_timer)

    def _on_timer(self) -> None:
        self.collectives.on_timer(self._now)
        if self._ending is not None and self._now >= self._ending[0]:
            raise self._ending[1]
        if self._holding.is_late(self._now):
            self._release()
        if late := self._vacancies.late(self._now):
            self._root_late(
                late[0], f"{late[1]}, and it did not come back within {self._vacancies.seconds:g} s"
            )
        if self._gate and self._now >= self._gate_deadline:
            self._do_without({name for name, _ in self._gate})

    def _do_without(self, names: set[str]) -> None:
        """Workers wait for slots that are not made."""
        for name in sorted(names):
            seconds = f"within {self._settings.silence:g} s"
            why = f"it did not make slots {seconds}"
            if self.model is not None:
                why = f"it did not say {seconds} what it has of model {self.model.name!r}"
            if name in self.topology.roots:
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
        for name in self.collectives.tensors.holders():
            self.dismiss(name, reason)
        self.over = True
        self.verdict = reason
        self._receivers.withdraw(self.number)
        self.log.append(JobOver(self.number, self.name, error, reason))
