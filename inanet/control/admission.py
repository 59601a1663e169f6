"""Who may join what: jobs that form, and jobs that outlived their coordinator.

A worker's Hello leads to a job: one that forms under its name, or the one whose key it still holds.
Aggregators and parameter servers belong to no job; those that form wait for them, and for all ranks. Start
order does not matter.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Protocol

from inanet.control.entry import check_endpoint, check_entry
from inanet.control.events import ControlEvent, JobOver, JobStarted, PeerJoined, PlanChosen
from inanet.control.fabrics import Fabrics
from inanet.control.fields import Cause
from inanet.control.goat.steps import SYSTEM
from inanet.control.groups import Groups
from inanet.control.job import Job
from inanet.control.joining import Forming, Members, Refused
from inanet.control.messages import (
    Hello,
    JobEnded,
    JobFailed,
    Known,
    Message,
    Resume,
    Welcome,
)
from inanet.control.peers import Peer, Peers
from inanet.control.planner import Planner
from inanet.control.receivers import Receivers
from inanet.control.refusals import Refusals, Sought
from inanet.control.resuming import JobMessage, Resuming
from inanet.control.rounds import Host
from inanet.control.sentences import clip
from inanet.control.settings import FormatOf, Settings
from inanet.control.sparse_jobs import check_sparse
from inanet.control.switches import refusal, sums_only
from inanet.control.topology import Arrangement, Topology
from inanet.control.versions import Rescheduled
from inanet.proto.systems import SPARSE

#: How many ended jobs are remembered, to tell their members when they come back.
_MOST_ENDED = 256
#: Seconds after which a worker may ask again to join a job under the name of one that is about to end.
_ENDING_SECONDS = 0.25
#: Seconds until those who wait hear that somebody was turned away, if nothing else is to be said sooner: many may be.
_SOON_SECONDS = 0.2


class Office(Protocol):
    """What admission asks of the coordinator."""

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message."""

    def say(self, event: ControlEvent) -> None:
        """Report an event."""

    def reject(self, peer: Peer, refusal: Refused, now: float) -> None:
        """Turn a peer away."""


class Admission:
    """Jobs on their way into ``jobs``, by name while they form, by key while they resume."""

    def __init__(
        self,
        settings: Settings,
        format_of: FormatOf,
        key_source: Callable[[], int],
        peers: Peers,
        jobs: dict[int, Job],
        office: Office,
        epochs: Callable[[], int],
        refusals: Refusals,
    ) -> None:
        self.receivers = Receivers()
        self.groups = Groups(settings.group_range, settings.group_port)
        self._settings = settings
        self._fabric = settings.topology
        #: by the system that a job has chosen
        self.fabrics = Fabrics(settings, peers, jobs)
        self._format_of = format_of
        self._key_source = key_source
        self._peers = peers
        self._jobs = jobs
        self._office = office
        self._epochs = epochs
        self._refusals = refusals
        #: of the last job that was admitted or taken over
        self.epoch = 0
        self._forming: dict[str, Forming] = {}
        self._resuming: dict[int, Resuming] = {}
        #: what became of earlier jobs, by key
        self._ended: dict[int, str] = {}

    # ---------- Hello

    def hello(self, peer: Peer, hello: Hello, now: float) -> None:
        """A node introduces itself. Raises :class:`~inanet.control.joining.Refused`."""
        if peer.hello is not None and not (peer.hello.role == hello.role == "worker" and peer.job is None):
            raise Refused(f"{peer.label} has said hello already")
        check_entry(hello, self._settings.token, peer.certificate)
        if hello.role == "switch":
            refused = refusal(self._settings, hello.name)
            if self._settings.any_switch:
                refused = refused or self._fabric.refusal("switch", hello.name)
        elif hello.role == "worker" and hello.system in SPARSE:
            refused = self.fabrics.of(hello.system).refusal(hello.role, hello.name)
        else:
            refused = self._fabric.refusal(hello.role, hello.name)
        if refused:
            raise Refused(refused)
        check_endpoint(hello)
        if hello.role != "worker":
            self._holder(peer, hello, now)
        elif hello.resume:
            self._refuse_twin(hello, now)
            self._worker_returns(peer, hello, now)
        else:
            self._refuse_twin(hello, now)
            self._worker(peer, hello, now)

    def turned_away(self, hello: Hello, reason: str, now: float) -> None:
        """A node does not come in, or is sent away: those who wait for it hear of it with the next line, which comes soon."""
        whom = _sought(hello)
        self._refusals.add(reason, now, whom)
        for forming in self._forming.values():
            if whom.job in ("", forming.members.job):
                forming.next_waiting = min(forming.next_waiting, now + _SOON_SECONDS)

    def _accept(self, peer: Peer, hello: Hello, job: Forming | Resuming | None, now: float) -> None:
        self._refusals.came(_sought(hello))
        peer.hello = hello
        peer.job = job.number if job else None
        peer.deadline = None
        silence = self._settings.silence
        welcome = Welcome(silence=silence)
        if job is not None:
            left = max(0.0, job.deadline - now)
            welcome = Welcome(
                job=job.number,
                silence=silence,
                deadline=left,
                epoch=job.epoch,
                evaluate=self._settings.evaluate,
            )
        self._office.send(peer, welcome)
        self._office.say(PeerJoined(peer.id, hello.name, hello.role))

    def _connected_already(self, old: Peer, now: float) -> Refused:
        """The refusal of a second connection under one name; the first is asked whether it is alive."""
        patience = self._settings.probe
        self._office.send(old, self._peers.ping(old, now, patience))
        text = f"{old.label} is connected already; if that process is dead, this shows within {patience:g} s"
        return Refused(text, retry_after=patience)

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
            if resume.key in self._ended:
                why = self._ended[resume.key].removeprefix(f"job {hello.job!r}: ")
                raise Refused(f"job {hello.job!r} is over: {why}")
        for job in self._jobs.values():
            if job.name == hello.job and hello.resume and hello.resume[0].key != job.planner.key:
                raise Refused(
                    f"this process of host {hello.name!r} belongs to an earlier run of job {job.name!r}"
                )
            if job.name == hello.job and job.collectives.farewell and not self._settings.elastic:
                # its other ranks may be about to leave, too, and to come back like this one
                text = f"job {job.name!r} has still to end: {job.collectives.farewell}"
                raise Refused(text, retry_after=_ENDING_SECONDS)
            if job.name == hello.job:
                raise Refused(f"job {job.name!r} is running; wait until it ends or choose another name")

    def _holder(self, peer: Peer, hello: Hello, now: float) -> None:
        old = self._peers.node(hello.name)
        if old is not None:
            raise self._connected_already(old, now)
        self._accept(peer, hello, None, now)
        for resume in hello.resume:
            self._holder_returns(peer, hello, resume, now)
        for job in self._jobs.values():
            job.holder_returned(hello, now)
        self.look(now)

    def look(self, now: float) -> None:
        """A node has come: jobs may have waited for it."""
        for forming in list(self._forming.values()):
            self._try_start(forming, now)
        for resuming in list(self._resuming.values()):
            self._try_resume(resuming, now)

    def _worker(self, peer: Peer, hello: Hello, now: float) -> None:
        forming = self._forming.get(hello.job)
        if forming is None:
            key = self._key_source() & 0xFFFFFFFFFFFFFFFF
            deadline, next_waiting = now + self._settings.join, now + self._settings.waiting
            members = Members(hello.job)
            # taken before the host is admitted: an epoch that nothing comes of is no harm
            forming = Forming(
                members, self._free_number(key), key, self._next_epoch(), deadline, next_waiting
            )
        check_sparse(hello, forming.members)
        forming.members.admit(hello, self.fabrics.of(hello.system))
        self._forming[hello.job] = forming
        self._accept(peer, hello, forming, now)
        self._office.send(peer, forming.waiting(self._missing(forming, now)))
        self._try_start(forming, now)

    # ---------- forming

    def _next_epoch(self) -> int:
        self.epoch = self._epochs()
        return self.epoch

    def _numbers(self) -> set[int]:
        forming = {forming.number for forming in self._forming.values()}
        return {*self._jobs, *forming, *(resuming.number for resuming in self._resuming.values())}

    def _free_number(self, key: int) -> int:
        """A job number; derived from the key, so that those of an earlier coordinator are unlikely to come
        again.
        """
        used = self._numbers()
        return next(n for n in ((key + i) & 0xFFFF for i in range(0x10000)) if n not in used)

    def _new_job(
        self, name: str, chosen: Arrangement, pending: Forming | Resuming, hosts: dict[str, Host]
    ) -> Job:
        number, members = pending.number, pending.members
        format_of = self._format_of if chosen.switched is None else sums_only(self._format_of)
        downlink = self._settings.downlink

        def planner(its: Arrangement, key: int, ranks: int) -> Planner:
            return Planner(
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
            self.remember(job.planner.key, "it goes on without this host")
            self.groups.withdraw(number)
            return self._key_source() & 0xFFFFFFFFFFFFFFFF

        def renewal(ranks: int) -> tuple[int, Planner]:
            return self._next_epoch(), planner(chosen, fresh_key(), ranks)

        def reschedule(
            hosts: Collection[str], avoided: Collection[str], only_other: bool
        ) -> Rescheduled | None:
            assert job.planner.switched is not None
            workers = {name: job.hellos[name] for name in hosts}
            current = job.topology if only_other else None
            anew = self.fabrics.scheduled.rearrange(workers, job.planner.switched.number, avoided, current)
            if anew is None:
                return None
            made = planner(anew, fresh_key(), job.planner.ranks)
            return Rescheduled(self._next_epoch(), anew.topology, made, self._peers.nodes(), anew.reason)

        def next_nonce(name: str) -> int:
            peer = self._peers.worker(number, name) or self._peers.node(name)
            return peer.nonce + 1 if peer else 0

        hellos = {**self._peers.nodes(), **members.hellos}
        job = Job(
            name,
            chosen.topology,
            planner(chosen, pending.key, members.ranks),
            hosts,
            hellos,
            self._settings,
            format_of,
            self.receivers,
            next_nonce,
            pending.epoch,
            renewal if chosen.switched is None else None,
            # slots of asynchronous training have gradients that nobody sends again
            reschedule if chosen.publish is not None and members.system != SYSTEM else None,
            elastic=self._settings.elastic,
        )
        self._jobs[number] = job
        return job

    def _try_start(self, forming: Forming, now: float) -> None:
        members = forming.members
        if members.missing(self.fabrics.of(members.system), self._peers.nodes()):
            return
        for resuming in list(self._resuming.values()):
            if resuming.members.job == members.job:
                self._abandon(resuming, f"job {members.job!r} was started anew, without this process")
        del self._forming[members.job]
        chosen = self.fabrics.of(members.system).arrange(members.hellos, self._peers.nodes())
        job = self._new_job(members.job, chosen, forming, members.hosts())
        self._office.say(JobStarted(job.number, job.name, members.world, resumed=False, epoch=job.epoch))
        if chosen.reason:
            self._office.say(PlanChosen(job.number, job.name, chosen.reason))
        job.start(now)

    def _missing(self, forming: Forming, now: float) -> tuple[str, ...]:
        """Who is missing, in words, and why if that is known."""
        members = forming.members
        words = members.missing(self.fabrics.of(members.system), self._peers.nodes())
        return self._refusals.explain(words, members.job, now)

    def _give_up(self, forming: Forming, now: float) -> None:
        """The members did not all come in time."""
        members = forming.members
        waiting = forming.waiting(self._missing(forming, now))
        text = (
            f"job {members.job!r} is not complete after {self._settings.join:g} s: joined {waiting.joined} "
            f"of {waiting.expected} ranks, missing: {', '.join(waiting.missing)}"
        )
        del self._forming[members.job]
        self._fail(forming, "timeout", text)

    def _fail(self, pending: Forming | Resuming, error: Cause, text: str) -> None:
        """Tell the workers of a job that it does not come about. They may say Hello again."""
        members = pending.members
        failed = JobFailed(job=pending.number, error=error, message=clip(text), ranks=members.missing_ranks)
        for worker in self._workers(pending):
            self._office.send(worker, failed)
            worker.job = None
        self._office.say(JobOver(pending.number, members.job, error, text))

    def _workers(self, pending: Forming | Resuming) -> list[Peer]:
        found = [self._peers.worker(pending.number, name) for name in pending.members.hellos]
        return [peer for peer in found if peer is not None]

    def pending(self, now: float) -> Iterator[tuple[Forming | Resuming, tuple[str, ...]]]:
        """Jobs that do not run yet, and what each waits for."""
        for forming in self._forming.values():
            yield forming, self._missing(forming, now)
        for resuming in self._resuming.values():
            yield resuming, self._still_away(resuming, resuming.topology(self._fabric), now)

    def _still_away(self, resuming: Resuming, topology: Topology | None, now: float) -> tuple[str, ...]:
        if topology is None:
            return ("its plan",)
        words = resuming.missing(topology, set(self._peers.nodes()))
        return self._refusals.explain(words, resuming.members.job, now)

    # ---------- resuming

    def _resuming_for(self, resume: Resume, now: float) -> Resuming:
        if resume.key not in self._resuming:
            deadline = now + self._settings.resume
            self._resuming[resume.key] = Resuming(resume.job, resume.key, self._next_epoch(), deadline)
        return self._resuming[resume.key]

    def _number_taken(self, resume: Resume) -> bool:
        return resume.job in self._numbers() and resume.key not in self._resuming

    def _holder_returns(self, peer: Peer, hello: Hello, resume: Resume, now: float) -> None:
        over = self._ended.get(resume.key)
        if over is not None or self._number_taken(resume) or not Resuming.is_sane(resume):
            reason = over or "the job goes on without this node"
            self._office.send(peer, JobEnded(job=resume.job, reason=clip(reason)))
        else:
            self._resuming_for(resume, now).admit_holder(hello, resume)

    def _worker_returns(self, peer: Peer, hello: Hello, now: float) -> None:
        resume = hello.resume[0]
        if len(hello.resume) > 1:
            raise Refused(f"host {hello.name!r} wants to resume {len(hello.resume)} jobs on one connection")
        if self._number_taken(resume):
            raise Refused(f"job {hello.job!r} cannot go on: another job has its number, {resume.job}, now")
        if not Resuming.is_sane(resume):
            raise Refused(f"job {hello.job!r} cannot go on: no job has come to round {resume.next_round}")
        resuming = self._resuming_for(resume, now)
        resuming.admit_worker(hello, self._fabric)
        self._accept(peer, hello, resuming, now)
        self._try_resume(resuming, now)

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

    def _try_resume(self, resuming: Resuming, now: float) -> None:
        """Let a job go on if everybody is back; or if only aggregators are missing, and time is up."""
        late = now >= resuming.deadline
        topology = resuming.topology(self._fabric)
        missing = self._still_away(resuming, topology, now)
        if topology is None or missing:
            if late:
                who = ", ".join(missing)
                text = (
                    f"job {resuming.members.job!r} cannot go on after the coordinator's restart: "
                    f"{who} did not come back within {self._settings.resume:g} s"
                )
                self._abandon(resuming, text)
            return
        if resuming.absentees(topology) and not late:
            return
        del self._resuming[resuming.key]
        name = resuming.members.job
        forming = self._forming.pop(name, None)
        job = self._new_job(name, Arrangement(topology), resuming, resuming.hosts())
        job.inherited = resuming.key
        self._office.say(JobStarted(job.number, name, resuming.members.world, resumed=True, epoch=job.epoch))
        resuming.restore(job, now, self._settings.round)
        for node, hello in self._peers.nodes().items():
            if node in job.absent and node in resuming.returned:
                job.dismiss(node, "its place in the tree was given up")
            job.holder_returned(hello, now)
        for worker in self._workers(forming) if forming else ():
            worker.job = None
            self._office.reject(
                worker, Refused(f"job {name!r} was resumed by the processes that ran it"), now
            )

    def _abandon(self, resuming: Resuming, text: str) -> None:
        """A job cannot be resumed: tell those who came back."""
        del self._resuming[resuming.key]
        self.remember(resuming.key, text)
        for name, returned in resuming.returned.items():
            node = self._peers.node(name)
            if returned.hello.role != "worker" and node is not None:
                self._office.send(node, JobEnded(job=resuming.number, reason=clip(text)))
        self._fail(resuming, "worker_lost", text)

    # ---------- time and losses

    def remember(self, key: int, text: str) -> None:
        """A job is over; its members may come back and ask."""
        self._ended[key] = text
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def gone(self, peer: Peer) -> None:
        """A peer is no longer connected."""
        assert peer.hello is not None
        for resuming in list(self._resuming.values()):
            if peer.hello.role != "worker" or peer.job == resuming.number:
                resuming.remove(peer.hello.name)
                if not resuming.returned:
                    del self._resuming[resuming.key]
        for forming in list(self._forming.values()):
            if peer.hello.role == "worker" and forming.number == peer.job:
                del forming.members.hellos[peer.hello.name]
                if not forming.members.hellos:
                    del self._forming[forming.members.job]

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        times = [min(forming.deadline, forming.next_waiting) for forming in self._forming.values()]
        times += [resuming.deadline for resuming in self._resuming.values()]
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        """Tell those who wait for whom; give up what is late."""
        for forming in list(self._forming.values()):
            if now >= forming.deadline:
                self._give_up(forming, now)
            elif now >= forming.next_waiting:
                forming.next_waiting = now + self._settings.waiting
                waiting = forming.waiting(self._missing(forming, now))
                for worker in self._workers(forming):
                    self._office.send(worker, waiting)
        for resuming in list(self._resuming.values()):
            if now >= resuming.deadline:
                self._try_resume(resuming, now)


def _sought(hello: Hello) -> Sought:
    return Sought(hello.name, hello.job if hello.role == "worker" else "")
