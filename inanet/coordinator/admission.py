"""How a job comes about.

A worker's Hello leads to a job: one that forms under its name, or, if the worker brings what it holds of one that outlived its
coordinator, one that resumes (coordinator restart). A job that forms waits for its ranks and for the servers that it needs, in
any order; one that resumes for the members that held it. Each starts when all are there, and is given up when they are late.
Aggregators and parameter servers belong to no job; jobs wait for them.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from inanet.coordinator.events import ControlEvent, JobOver, JobStarted, PeerJoined, PlanChosen
from inanet.coordinator.fabrics import Fabrics
from inanet.coordinator.goat.schedules import Rescheduled
from inanet.coordinator.job import Job
from inanet.coordinator.job_plan import JobPlan
from inanet.coordinator.members import Members, Rejection, check_endpoint, check_entry
from inanet.coordinator.multicast_groups import Groups
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.receive_buffers import ReceiveBuffers
from inanet.coordinator.resumption import JobMessage, Resuming
from inanet.coordinator.round_ledger import Host
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.sparse.fabric import check_sparse
from inanet.coordinator.switches import refusal, sums_only
from inanet.messages.control import Hello, JobEnded, JobFailed, Known, Message, Resume, Waiting, Welcome
from inanet.messages.fields import Cause
from inanet.messages.text import clip
from inanet.planning.topology import Arrangement, Topology
from inanet.proto.slots.systems import SYSTEMS, sparse_systems
from inanet.service.refusals import Refusals, Sought

#: Seconds after which a worker may ask again to join a job under the name of one that is about to end.
_ENDING_SECONDS = 0.25
#: Seconds until those who wait hear that somebody was turned away, if nothing else is to be said sooner: many may be.
_SOON_SECONDS = 0.2
#: How many ended jobs are remembered.
_MOST_ENDED = 256


class Responder(Protocol):
    """What admission asks of the coordinator."""

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message."""

    def say(self, event: ControlEvent) -> None:
        """Report an event."""

    def reject(self, peer: Peer, rejection: Rejection, now: float) -> None:
        """Turn a peer away."""


class EndedJobs:
    """What became of the latest jobs that ended, by key, for members that come back."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    def remember(self, key: int, text: str) -> None:
        """A job is over, or goes on under another key."""
        self._words[key] = text
        if len(self._words) > _MOST_ENDED:
            del self._words[next(iter(self._words))]

    def of(self, key: int) -> str | None:
        """What became of a job; None if nobody knows that it ended."""
        return self._words.get(key)


@dataclass(slots=True)
class Forming:
    """A job that waits for its members since the first one joined."""

    members: Members
    number: int
    key: int
    epoch: int
    deadline: float
    next_waiting: float

    def waiting(self, missing: tuple[str, ...]) -> Waiting:
        """The progress line for those who wait."""
        return Waiting(joined=len(self.members.joined), expected=self.members.world, missing=missing)


class Admission:
    """Hellos, and the jobs on their way into ``jobs`` (by number) that these lead to. Jobs share receive buffers
    (``receivers``) and the addresses of ``groups``.
    """

    def __init__(
        self,
        settings: Settings,
        format_of: FormatOf,
        key_source: Callable[[], int],
        peers: Peers,
        jobs: dict[int, Job],
        responder: Responder,
        epochs: Callable[[], int],
        refusals: Refusals,
    ) -> None:
        self._settings = settings
        self._fabric = settings.topology
        self._format_of = format_of
        self._key_source = key_source
        self._epochs = epochs
        self._peers = peers
        self._jobs = jobs
        self._responder = responder
        self._refusals = refusals
        #: by the system that a job has chosen
        self.fabrics = Fabrics(settings, peers, jobs)
        self.ended = EndedJobs()
        self.buffers = ReceiveBuffers()
        self.groups = Groups(settings.group_range, settings.group_port)
        #: of the last job that was admitted or taken over
        self.epoch = 0
        #: by name
        self._forming: dict[str, Forming] = {}
        #: by key
        self._resuming: dict[int, Resuming] = {}

    # ---------- Hello

    def hello(self, peer: Peer, hello: Hello, now: float) -> None:
        """A node introduces itself. Raises :class:`~inanet.coordinator.members.Rejection`."""
        if peer.hello is not None and not (peer.hello.role == hello.role == "worker" and peer.job is None):
            raise Rejection(f"{peer.label} has said hello already")
        check_entry(hello, self._settings.token, peer.certificate)
        if refused := self._refused(hello):
            raise Rejection(refused)
        check_endpoint(hello)
        if hello.role != "worker":
            self._admit_holder(peer, hello, now)
            return
        self._refuse_twin(hello, now)
        if hello.resume:
            resuming = self._readmit(hello, now)
            self._accept(peer, hello, resuming, now)
            self._try_resume(resuming, now)
        else:
            forming = self._join(hello, now)
            self._accept(peer, hello, forming, now)
            self._responder.send(peer, forming.waiting(self._missing(forming, now)))
            self._try_start(forming, now)

    def _refused(self, hello: Hello) -> str:
        """Why a node of this role and name has no place in the fabric; empty if it has."""
        if hello.role == "switch":
            refused = refusal(self._settings, hello.name)
            if self._settings.any_switch:
                refused = refused or self._fabric.refusal("switch", hello.name)
            return refused
        if hello.role == "worker" and hello.system in sparse_systems():
            return self.fabrics.of(hello.system).refusal(hello.role, hello.name)
        return self._fabric.refusal(hello.role, hello.name)

    def _refuse_twin(self, hello: Hello, now: float) -> None:
        """Refuse a worker whose job runs already."""
        for peer in self._peers:
            if (
                peer.hello
                and peer.job is not None
                and (peer.hello.job, peer.hello.name) == (hello.job, hello.name)
            ):
                raise self._connected_already(peer, now)
        for resume in hello.resume:
            over = self.ended.of(resume.key)
            if over is not None:
                why = over.removeprefix(f"job {hello.job!r}: ")
                raise Rejection(f"job {hello.job!r} is over: {why}")
        for job in self._jobs.values():
            if job.name == hello.job and hello.resume and hello.resume[0].key != job.plans.current.key:
                raise Rejection(
                    f"this process of host {hello.name!r} belongs to an earlier run of job {job.name!r}"
                )
            if job.name == hello.job and job.rounds.farewell and not self._settings.elastic:
                # its other ranks may be about to leave, too, and to come back like this one
                text = f"job {job.name!r} has still to end: {job.rounds.farewell}"
                raise Rejection(text, retry_after=_ENDING_SECONDS)
            if job.name == hello.job:
                raise Rejection(f"job {job.name!r} is running; wait until it ends or choose another name")

    def _connected_already(self, old: Peer, now: float) -> Rejection:
        """The refusal of a second connection under one name; the first is asked whether it is alive."""
        patience = self._settings.probe
        self._responder.send(old, self._peers.ping(old, now, patience))
        text = f"{old.label} is connected already; if that process is dead, this shows within {patience:g} s"
        return Rejection(text, retry_after=patience)

    def _admit_holder(self, peer: Peer, hello: Hello, now: float) -> None:
        """An aggregator, parameter server or switch is here: jobs may have waited for it."""
        old = self._peers.node(hello.name)
        if old is not None:
            raise self._connected_already(old, now)
        self._accept(peer, hello, None, now)
        for resume in hello.resume:
            self._readmit_holder(peer, hello, resume, now)
        for job in self._jobs.values():
            job.holder_returned(hello, now)
        self.look(now)

    def _accept(self, peer: Peer, hello: Hello, job: Forming | Resuming | None, now: float) -> None:
        self._refusals.came(_sought(hello))
        peer.hello = hello
        peer.job = job.number if job else None
        peer.deadline = None
        silence = self._settings.silence
        welcome = Welcome(silence=silence)
        if job is not None:
            welcome = Welcome(
                job=job.number,
                silence=silence,
                deadline=max(0.0, job.deadline - now),
                epoch=job.epoch,
                evaluate=self._settings.evaluate,
            )
        self._responder.send(peer, welcome)
        self._responder.say(PeerJoined(peer.id, hello.name, hello.role))

    def turned_away(self, hello: Hello, reason: str, now: float) -> None:
        """A node does not come in, or is sent away: those who wait for it hear of it with the next line, which comes soon."""
        whom = _sought(hello)
        self._refusals.add(reason, now, whom)
        for forming in self._forming.values():
            if whom.job in ("", forming.members.job):
                forming.next_waiting = min(forming.next_waiting, now + _SOON_SECONDS)

    def look(self, now: float) -> None:
        """A node has come: jobs may have waited for it."""
        for forming in list(self._forming.values()):
            self._try_start(forming, now)
        for resuming in list(self._resuming.values()):
            self._try_resume(resuming, now)

    # ---------- jobs that form

    def _join(self, hello: Hello, now: float) -> Forming:
        """Take a worker host into the job of its name. Raises :class:`~inanet.coordinator.members.Rejection`."""
        forming = self._forming.get(hello.job)
        if forming is None:
            key = self._next_key()
            # the epoch is taken before the host is admitted: one that nothing comes of is no harm
            forming = Forming(
                Members(hello.job),
                self._free_number(key),
                key,
                self._next_epoch(),
                now + self._settings.join,
                now + self._settings.waiting,
            )
        check_sparse(hello, forming.members)
        forming.members.admit(hello, self.fabrics.of(hello.system))
        self._forming[hello.job] = forming
        return forming

    def _missing(self, forming: Forming, now: float) -> tuple[str, ...]:
        """Who is missing, in words, and why if that is known."""
        members = forming.members
        words = members.missing(self.fabrics.of(members.system), self._peers.nodes())
        return self._refusals.explain(words, members.job, now)

    def _try_start(self, forming: Forming, now: float) -> None:
        """Start a job if everybody is there. It ends what is left of an earlier run under its name."""
        members = forming.members
        fabric, nodes = self.fabrics.of(members.system), self._peers.nodes()
        if members.missing(fabric, nodes):
            return
        for resuming in list(self._resuming.values()):
            if resuming.members.job == members.job:
                self._abandon(resuming, f"job {members.job!r} was started anew, without this process")
        self._forget(forming)
        chosen = fabric.arrange(members.hellos, nodes)
        job = self._make(members.job, chosen, forming, members.hosts())
        self._responder.say(JobStarted(job.number, job.name, members.world, resumed=False, epoch=job.epoch))
        if chosen.reason:
            self._responder.say(PlanChosen(job.number, job.name, chosen.reason))
        job.start(now)

    def _forget(self, forming: Forming) -> None:
        """A job has formed, or will not."""
        del self._forming[forming.members.job]
        self._refusals.forget(forming.members.job)

    def _give_up(self, forming: Forming, now: float) -> None:
        """The members did not all come in time."""
        members = forming.members
        waiting = forming.waiting(self._missing(forming, now))
        text = (
            f"job {members.job!r} is not complete after {self._settings.join:g} s: joined {waiting.joined} "
            f"of {waiting.expected} ranks, missing: {', '.join(waiting.missing)}"
        )
        self._forget(forming)
        self._fail(forming, "timeout", text)

    # ---------- jobs that resume

    def _resuming_of(self, resume: Resume, now: float) -> Resuming:
        if resume.key not in self._resuming:
            deadline = now + self._settings.resume
            self._resuming[resume.key] = Resuming(resume.job, resume.key, self._next_epoch(), deadline)
        return self._resuming[resume.key]

    def _number_taken(self, resume: Resume) -> bool:
        return resume.job in self._numbers() and resume.key not in self._resuming

    def _readmit_holder(self, peer: Peer, hello: Hello, resume: Resume, now: float) -> None:
        """Take an aggregator or parameter server back into a job, or tell it to forget the job."""
        over = self.ended.of(resume.key)
        if over is not None or self._number_taken(resume) or not Resuming.is_sane(resume):
            reason = over or "the job goes on without this node"
            self._responder.send(peer, JobEnded(job=resume.job, reason=clip(reason)))
        else:
            self._resuming_of(resume, now).admit_holder(hello, resume)

    def _readmit(self, hello: Hello, now: float) -> Resuming:
        """Take a worker host back into its job. Raises :class:`~inanet.coordinator.members.Rejection`."""
        resume = hello.resume[0]
        if len(hello.resume) > 1:
            raise Rejection(f"host {hello.name!r} wants to resume {len(hello.resume)} jobs on one connection")
        if self._number_taken(resume):
            raise Rejection(f"job {hello.job!r} cannot go on: another job has its number, {resume.job}, now")
        if not Resuming.is_sane(resume):
            raise Rejection(f"job {hello.job!r} cannot go on: no job has come to round {resume.next_round}")
        resuming = self._resuming_of(resume, now)
        resuming.admit_worker(hello, self._fabric)
        return resuming

    def take(self, peer: Peer, message: JobMessage, now: float) -> bool:
        """A message about a job that resumes; False if there is no such job here."""
        assert peer.hello is not None
        for resuming in self._resuming.values():
            returned = resuming.returned.get(peer.hello.name)
            if resuming.number == message.job and returned is not None:
                returned.take(message)
                self._try_resume(resuming, now)
                return True
        return isinstance(message, Known)

    def _still_away(self, resuming: Resuming, topology: Topology | None, now: float) -> tuple[str, ...]:
        """Who is missing, in words, and why if that is known."""
        if topology is None:
            return ("its plan",)
        words = resuming.missing(topology, set(self._peers.nodes()))
        return self._refusals.explain(words, resuming.members.job, now)

    def _try_resume(self, resuming: Resuming, now: float) -> None:
        """Let a job go on if everybody is back; or if only aggregators are missing, and time is up. It takes the name of a job
        that forms.
        """
        late = now >= resuming.deadline
        topology = resuming.topology(self._fabric)
        missing = self._still_away(resuming, topology, now)
        name = resuming.members.job
        if topology is None or missing:
            if late:
                who = ", ".join(missing)
                seconds = f"{self._settings.resume:g} s"
                text = f"job {name!r} cannot go on after the coordinator's restart: {who} did not come back within {seconds}"
                self._abandon(resuming, text)
            return
        if resuming.absentees(topology) and not late:
            return
        del self._resuming[resuming.key]
        forming = self._forming.pop(name, None)
        job = self._make(name, Arrangement(topology), resuming, resuming.hosts())
        job.inherited = resuming.key
        self._responder.say(
            JobStarted(job.number, name, resuming.members.world, resumed=True, epoch=job.epoch)
        )
        resuming.restore(job, now, self._settings.round)
        for node, hello in self._peers.nodes().items():
            if node in job.plans.absent and node in resuming.returned:
                job.plans.dismiss(node, "its place in the tree was given up")
            job.holder_returned(hello, now)
        for worker in self._workers(forming) if forming else ():
            worker.job = None
            self._responder.reject(
                worker, Rejection(f"job {name!r} was resumed by the processes that ran it"), now
            )

    def _abandon(self, resuming: Resuming, text: str) -> None:
        """A job cannot be resumed: tell those who came back."""
        del self._resuming[resuming.key]
        self.ended.remember(resuming.key, text)
        self._refusals.forget(resuming.members.job)
        for name, returned in resuming.returned.items():
            node = self._peers.node(name)
            if returned.hello.role != "worker" and node is not None:
                self._responder.send(node, JobEnded(job=resuming.number, reason=clip(text)))
        self._fail(resuming, "worker_lost", text)

    # ---------- jobs that do not run yet, whether they form or resume

    def pending(self, now: float) -> Iterator[tuple[Forming | Resuming, tuple[str, ...]]]:
        """Jobs that do not run yet, and what each waits for."""
        for forming in self._forming.values():
            yield forming, self._missing(forming, now)
        for resuming in self._resuming.values():
            yield resuming, self._still_away(resuming, resuming.topology(self._fabric), now)

    def _numbers(self) -> set[int]:
        """Numbers of jobs, those that run included."""
        pending: list[Forming | Resuming] = [*self._forming.values(), *self._resuming.values()]
        return {*self._jobs, *(job.number for job in pending)}

    def _free_number(self, key: int) -> int:
        """A job number; derived from the key, so that those of an earlier coordinator are unlikely to come again."""
        used = self._numbers()
        return next(n for n in ((key + i) & 0xFFFF for i in range(0x10000)) if n not in used)

    def _workers(self, job: Forming | Resuming) -> list[Peer]:
        """The workers of a job that are here."""
        workers = [self._peers.worker(job.number, name) for name in job.members.hellos]
        return [peer for peer in workers if peer is not None]

    def _fail(self, job: Forming | Resuming, error: Cause, text: str) -> None:
        """Tell the workers of a job that it does not come about. They may say Hello again."""
        members = job.members
        failed = JobFailed(job=job.number, error=error, message=clip(text), ranks=members.missing_ranks)
        for worker in self._workers(job):
            self._responder.send(worker, failed)
            worker.job = None
        self._responder.say(JobOver(job.number, members.job, error, text))

    def gone(self, peer: Peer) -> None:
        """A peer is no longer connected."""
        hello = peer.hello
        assert hello is not None
        for resuming in list(self._resuming.values()):
            if hello.role != "worker" or peer.job == resuming.number:
                resuming.remove(hello.name)
                if not resuming.returned:
                    del self._resuming[resuming.key]
        for forming in list(self._forming.values()):
            if hello.role == "worker" and forming.number == peer.job:
                del forming.members.hellos[hello.name]
                if not forming.members.hellos:
                    self._forget(forming)

    def timer(self) -> float | None:
        forming = [min(job.deadline, job.next_waiting) for job in self._forming.values()]
        return min(forming + [job.deadline for job in self._resuming.values()], default=None)

    def on_timer(self, now: float) -> None:
        """Tell those who wait for whom; give up what is late, or go on without those who are."""
        for forming in list(self._forming.values()):
            if now >= forming.deadline:
                self._give_up(forming, now)
            elif now >= forming.next_waiting:
                forming.next_waiting = now + self._settings.waiting
                waiting = forming.waiting(self._missing(forming, now))
                for worker in self._workers(forming):
                    self._responder.send(worker, waiting)
        for resuming in list(self._resuming.values()):
            if now >= resuming.deadline:
                self._try_resume(resuming, now)

    # ---------- the job

    def _next_epoch(self) -> int:
        """That of the next job, or of one that goes on."""
        self.epoch = self._epochs()
        return self.epoch

    def _next_key(self) -> int:
        """The key of the next job, or of one that goes on."""
        return self._key_source() & 0xFFFFFFFFFFFFFFFF

    def _make(
        self, name: str, chosen: Arrangement, pending: Forming | Resuming, hosts: dict[str, Host]
    ) -> Job:
        """A job that has still to start, or to take over what its members hold."""
        number, members = pending.number, pending.members
        format_of = self._format_of if chosen.switched is None else sums_only(self._format_of)
        downlink = self._settings.downlink

        def plan(its: Arrangement, key: int, ranks: int) -> JobPlan:
            return JobPlan(
                number,
                key,
                ranks,
                its.topology.ancestors,
                group_of=None if downlink == "unicast" else partial(self.groups.of, number, key),
                probe=downlink == "auto",
                switched=its.switched,
                publish=its.publish,
            )

        def fresh_key() -> int:
            self.ended.remember(job.plans.current.key, "it goes on without this host")
            self.groups.withdraw(number)
            return self._next_key()

        def renewal(ranks: int) -> tuple[int, JobPlan]:
            return self._next_epoch(), plan(chosen, fresh_key(), ranks)

        def reschedule(
            hosts: Collection[str], avoided: Collection[str], only_other: bool
        ) -> Rescheduled | None:
            switched = job.plans.current.switched
            fabric = None if switched is None else self.fabrics.scheduled(switched.system)
            assert switched is not None
            assert fabric is not None
            workers = {name: job.plans.hellos[name] for name in hosts}
            current = job.plans.topology if only_other else None
            anew = fabric.rearrange(workers, switched.number, avoided, current)
            if anew is None:
                return None
            made = plan(anew, fresh_key(), job.plans.current.ranks)
            return Rescheduled(self._next_epoch(), anew.topology, made, self._peers.nodes(), anew.reason)

        def next_nonce(name: str) -> int:
            peer = self._peers.worker(number, name) or self._peers.node(name)
            return peer.nonce + 1 if peer else 0

        hellos = {**self._peers.nodes(), **members.hellos}
        job = Job(
            name,
            chosen.topology,
            plan(chosen, pending.key, members.ranks),
            hosts,
            hellos,
            self._settings,
            format_of,
            self.buffers,
            next_nonce,
            pending.epoch,
            renewal if chosen.switched is None else None,
            # slots of asynchronous training have gradients that nobody sends again
            reschedule if chosen.publish is not None and not SYSTEMS[members.system].asynchronous else None,
            elastic=self._settings.elastic,
        )
        self._jobs[number] = job
        return job


def _sought(hello: Hello) -> Sought:
    return Sought(hello.name, hello.job if hello.role == "worker" else "")
