"""Jobs that outlived their coordinator: each waits for its members to come back, and goes on when they have told what they
hold, or is given up.
"""

from inanet.coordinator.ended_jobs import Ended
from inanet.coordinator.events import JobStarted
from inanet.coordinator.job_maker import JobMaker
from inanet.coordinator.members import Refused
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.pending_jobs import Office, Pending
from inanet.coordinator.resumption import JobMessage, Resuming
from inanet.coordinator.settings import Settings
from inanet.messages.control import Hello, JobEnded, Known, Resume
from inanet.messages.text import clip
from inanet.planning.topology import Arrangement, Topology
from inanet.service.refusals import Refusals


class ResumingJobs:
    """Those of ``pending``. A job that resumes takes the name of one that forms."""

    def __init__(
        self,
        settings: Settings,
        pending: Pending,
        maker: JobMaker,
        ended: Ended,
        peers: Peers,
        office: Office,
        refusals: Refusals,
    ) -> None:
        self._settings = settings
        self._fabric = settings.topology
        self._pending = pending
        self._maker = maker
        self._ended = ended
        self._peers = peers
        self._office = office
        self._refusals = refusals

    # ---------- who comes back

    def _of(self, resume: Resume, now: float) -> Resuming:
        resuming = self._pending.resuming
        if resume.key not in resuming:
            deadline = now + self._settings.resume
            resuming[resume.key] = Resuming(resume.job, resume.key, self._maker.next_epoch(), deadline)
        return resuming[resume.key]

    def _number_taken(self, resume: Resume) -> bool:
        return resume.job in self._pending.numbers() and resume.key not in self._pending.resuming

    def admit_holder(self, peer: Peer, hello: Hello, resume: Resume, now: float) -> None:
        """Take an aggregator or parameter server back into a job, or tell it to forget the job."""
        over = self._ended.of(resume.key)
        if over is not None or self._number_taken(resume) or not Resuming.is_sane(resume):
            reason = over or "the job goes on without this node"
            self._office.send(peer, JobEnded(job=resume.job, reason=clip(reason)))
        else:
            self._of(resume, now).admit_holder(hello, resume)

    def admit_worker(self, hello: Hello, now: float) -> Resuming:
        """Take a worker host back into its job. Raises :class:`~inanet.coordinator.members.Refused`."""
        resume = hello.resume[0]
        if len(hello.resume) > 1:
            raise Refused(f"host {hello.name!r} wants to resume {len(hello.resume)} jobs on one connection")
        if self._number_taken(resume):
            raise Refused(f"job {hello.job!r} cannot go on: another job has its number, {resume.job}, now")
        if not Resuming.is_sane(resume):
            raise Refused(f"job {hello.job!r} cannot go on: no job has come to round {resume.next_round}")
        resuming = self._of(resume, now)
        resuming.admit_worker(hello, self._fabric)
        return resuming

    def take(self, peer: Peer, message: JobMessage, now: float) -> bool:
        """A message about a job that resumes; False if there is no such job here."""
        assert peer.hello is not None
        for resuming in self._pending.resuming.values():
            returned = resuming.returned.get(peer.hello.name)
            if resuming.number == message.job and returned is not None:
                returned.take(message)
                self.try_resume(resuming, now)
                return True
        return isinstance(message, Known)

    # ---------- who is still away

    def missing(self, resuming: Resuming, now: float) -> tuple[str, ...]:
        """Who is missing, in words, and why if that is known."""
        return self._still_away(resuming, resuming.topology(self._fabric), now)

    def _still_away(self, resuming: Resuming, topology: Topology | None, now: float) -> tuple[str, ...]:
        if topology is None:
            return ("its plan",)
        words = resuming.missing(topology, set(self._peers.nodes()))
        return self._refusals.explain(words, resuming.members.job, now)

    def look(self, now: float) -> None:
        """Something has changed that jobs may have waited for."""
        for resuming in list(self._pending.resuming.values()):
            self.try_resume(resuming, now)

    def try_resume(self, resuming: Resuming, now: float) -> None:
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
        del self._pending.resuming[resuming.key]
        name = resuming.members.job
        forming = self._pending.forming.pop(name, None)
        job = self._maker.make(name, Arrangement(topology), resuming, resuming.hosts())
        job.inherited = resuming.key
        self._office.say(JobStarted(job.number, name, resuming.members.world, resumed=True, epoch=job.epoch))
        resuming.restore(job, now, self._settings.round)
        for node, hello in self._peers.nodes().items():
            if node in job.absent and node in resuming.returned:
                job.dismiss(node, "its place in the tree was given up")
            job.holder_returned(hello, now)
        for worker in self._pending.workers(forming) if forming else ():
            worker.job = None
            self._office.reject(
                worker, Refused(f"job {name!r} was resumed by the processes that ran it"), now
            )

    # ---------- what is given up

    def supersede(self, name: str) -> None:
        """A job starts under this name: give up what is left of an earlier run."""
        for resuming in list(self._pending.resuming.values()):
            if resuming.members.job == name:
                self._abandon(resuming, f"job {name!r} was started anew, without this process")

    def _abandon(self, resuming: Resuming, text: str) -> None:
        """A job cannot be resumed: tell those who came back."""
        del self._pending.resuming[resuming.key]
        self._ended.remember(resuming.key, text)
        self._refusals.forget(resuming.members.job)
        for name, returned in resuming.returned.items():
            node = self._peers.node(name)
            if returned.hello.role != "worker" and node is not None:
                self._office.send(node, JobEnded(job=resuming.number, reason=clip(text)))
        self._pending.fail(resuming, "worker_lost", text)

    def gone(self, peer: Peer) -> None:
        """A peer is no longer connected."""
        assert peer.hello is not None
        for resuming in list(self._pending.resuming.values()):
            if peer.hello.role != "worker" or peer.job == resuming.number:
                resuming.remove(peer.hello.name)
                if not resuming.returned:
                    del self._pending.resuming[resuming.key]

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        return min((resuming.deadline for resuming in self._pending.resuming.values()), default=None)

    def on_timer(self, now: float) -> None:
        """Go on without those who are late, or give up."""
        for resuming in list(self._pending.resuming.values()):
            if now >= resuming.deadline:
                self.try_resume(resuming, now)
