"""Jobs that form: each waits for its ranks, and for the nodes that it needs, and starts when all are there."""

from inanet.coordinator.events import JobStarted, PlanChosen
from inanet.coordinator.fabrics import Fabrics
from inanet.coordinator.job_maker import JobMaker
from inanet.coordinator.members import Forming, Members
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.pending_jobs import Office, Pending
from inanet.coordinator.resuming_jobs import ResumingJobs
from inanet.coordinator.settings import Settings
from inanet.coordinator.sparse.fabric import check_sparse
from inanet.messages.control import Hello
from inanet.service.refusals import Refusals, Sought

#: Seconds until those who wait hear that somebody was turned away, if nothing else is to be said sooner: many may be.
_SOON_SECONDS = 0.2


class FormingJobs:
    """Those of ``pending``. A job that forms ends what is left of an earlier run under its name in ``resuming``."""

    def __init__(
        self,
        settings: Settings,
        pending: Pending,
        resuming: ResumingJobs,
        maker: JobMaker,
        fabrics: Fabrics,
        peers: Peers,
        office: Office,
        refusals: Refusals,
    ) -> None:
        self._settings = settings
        self._pending = pending
        self._resuming = resuming
        self._maker = maker
        self._fabrics = fabrics
        self._peers = peers
        self._office = office
        self._refusals = refusals

    def admit(self, hello: Hello, now: float) -> Forming:
        """Take a worker host into the job of its name. Raises :class:`~inanet.coordinator.members.Refused`."""
        forming = self._pending.forming.get(hello.job)
        if forming is None:
            key = self._maker.next_key()
            deadline, next_waiting = now + self._settings.join, now + self._settings.waiting
            members = Members(hello.job)
            # taken before the host is admitted: an epoch that nothing comes of is no harm
            forming = Forming(
                members,
                self._pending.free_number(key),
                key,
                self._maker.next_epoch(),
                deadline,
                next_waiting,
            )
        check_sparse(hello, forming.members)
        forming.members.admit(hello, self._fabrics.of(hello.system))
        self._pending.forming[hello.job] = forming
        return forming

    def tell(self, worker: Peer, forming: Forming, now: float) -> None:
        """Say to a worker whom its job waits for."""
        self._office.send(worker, forming.waiting(self.missing(forming, now)))

    def missing(self, forming: Forming, now: float) -> tuple[str, ...]:
        """Who is missing, in words, and why if that is known."""
        members = forming.members
        words = members.missing(self._fabrics.of(members.system), self._peers.nodes())
        return self._refusals.explain(words, members.job, now)

    def look(self, now: float) -> None:
        """Something has changed that jobs may have waited for."""
        for forming in list(self._pending.forming.values()):
            self.try_start(forming, now)

    def try_start(self, forming: Forming, now: float) -> None:
        """Start a job if everybody is there."""
        members = forming.members
        if members.missing(self._fabrics.of(members.system), self._peers.nodes()):
            return
        self._resuming.supersede(members.job)
        del self._pending.forming[members.job]
        self._refusals.forget(members.job)
        chosen = self._fabrics.of(members.system).arrange(members.hellos, self._peers.nodes())
        job = self._maker.make(members.job, chosen, forming, members.hosts())
        self._office.say(JobStarted(job.number, job.name, members.world, resumed=False, epoch=job.epoch))
        if chosen.reason:
            self._office.say(PlanChosen(job.number, job.name, chosen.reason))
        job.start(now)

    def turned_away(self, whom: Sought, now: float) -> None:
        """Those who wait for somebody who was refused hear of it with the next line, which comes soon."""
        for forming in self._pending.forming.values():
            if whom.job in ("", forming.members.job):
                forming.next_waiting = min(forming.next_waiting, now + _SOON_SECONDS)

    def gone(self, peer: Peer) -> None:
        """A peer is no longer connected."""
        assert peer.hello is not None
        for forming in list(self._pending.forming.values()):
            if peer.hello.role == "worker" and forming.number == peer.job:
                del forming.members.hellos[peer.hello.name]
                if not forming.members.hellos:
                    del self._pending.forming[forming.members.job]
                    self._refusals.forget(forming.members.job)

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        times = (min(forming.deadline, forming.next_waiting) for forming in self._pending.forming.values())
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        """Tell those who wait for whom; give up what is late."""
        for forming in list(self._pending.forming.values()):
            if now >= forming.deadline:
                self._give_up(forming, now)
            elif now >= forming.next_waiting:
                forming.next_waiting = now + self._settings.waiting
                waiting = forming.waiting(self.missing(forming, now))
                for worker in self._pending.workers(forming):
                    self._office.send(worker, waiting)

    def _give_up(self, forming: Forming, now: float) -> None:
        """The members did not all come in time."""
        members = forming.members
        waiting = forming.waiting(self.missing(forming, now))
        text = (
            f"job {members.job!r} is not complete after {self._settings.join:g} s: joined {waiting.joined} "
            f"of {waiting.expected} ranks, missing: {', '.join(waiting.missing)}"
        )
        del self._pending.forming[members.job]
        self._refusals.forget(members.job)
        self._pending.fail(forming, "timeout", text)
