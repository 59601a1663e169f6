"""Who may join what.

A worker's Hello leads to a job: one that forms under its name, or the one whose key it still holds because it outlived its
coordinator. Aggregators and parameter servers belong to no job; those that form wait for them, and for all ranks. Start
order does not matter.
"""

from collections.abc import Callable, Iterator

from inanet.coordinator.authentication import check_endpoint, check_entry
from inanet.coordinator.ended_jobs import Ended
from inanet.coordinator.events import PeerJoined
from inanet.coordinator.fabrics import Fabrics
from inanet.coordinator.forming_jobs import FormingJobs
from inanet.coordinator.job import Job
from inanet.coordinator.job_maker import JobMaker
from inanet.coordinator.members import Forming, Refused
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.pending_jobs import Office, Pending
from inanet.coordinator.resuming_jobs import ResumingJobs
from inanet.coordinator.resumption import JobMessage, Resuming
from inanet.coordinator.settings import FormatOf, Settings
from inanet.coordinator.switches import refusal
from inanet.messages.control import Hello, Welcome
from inanet.proto.slots.systems import SPARSE
from inanet.service.refusals import Refusals, Sought

#: Seconds after which a worker may ask again to join a job under the name of one that is about to end.
_ENDING_SECONDS = 0.25


class Admission:
    """Hellos, and the jobs on their way into ``jobs`` that these lead to."""

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
        self._settings = settings
        self._fabric = settings.topology
        #: by the system that a job has chosen
        self.fabrics = Fabrics(settings, peers, jobs)
        self._peers = peers
        self._jobs = jobs
        self._office = office
        self._refusals = refusals
        #: what became of earlier jobs
        self.ended = Ended()
        self.maker = JobMaker(settings, format_of, key_source, epochs, peers, jobs, self.fabrics, self.ended)
        self._pending = Pending(peers, jobs, office)
        self._resuming = ResumingJobs(
            settings, self._pending, self.maker, self.ended, peers, office, refusals
        )
        self._forming = FormingJobs(
            settings, self._pending, self._resuming, self.maker, self.fabrics, peers, office, refusals
        )

    # ---------- Hello

    def hello(self, peer: Peer, hello: Hello, now: float) -> None:
        """A node introduces itself. Raises :class:`~inanet.coordinator.members.Refused`."""
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
        self._forming.turned_away(whom, now)

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
            over = self.ended.of(resume.key)
            if over is not None:
                why = over.removeprefix(f"job {hello.job!r}: ")
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
            self._resuming.admit_holder(peer, hello, resume, now)
        for job in self._jobs.values():
            job.holder_returned(hello, now)
        self.look(now)

    def look(self, now: float) -> None:
        """A node has come: jobs may have waited for it."""
        self._forming.look(now)
        self._resuming.look(now)

    def _worker(self, peer: Peer, hello: Hello, now: float) -> None:
        forming = self._forming.admit(hello, now)
        self._accept(peer, hello, forming, now)
        self._forming.tell(peer, forming, now)
        self._forming.try_start(forming, now)

    def _worker_returns(self, peer: Peer, hello: Hello, now: float) -> None:
        resuming = self._resuming.admit_worker(hello, now)
        self._accept(peer, hello, resuming, now)
        self._resuming.try_resume(resuming, now)

    # ---------- jobs that do not run yet

    def pending(self, now: float) -> Iterator[tuple[Forming | Resuming, tuple[str, ...]]]:
        """Jobs that do not run yet, and what each waits for."""
        for forming in self._pending.forming.values():
            yield forming, self._forming.missing(forming, now)
        for resuming in self._pending.resuming.values():
            yield resuming, self._resuming.missing(resuming, now)

    def take(self, peer: Peer, message: JobMessage, now: float) -> bool:
        """A message about a job that resumes; False if there is no such job here."""
        return self._resuming.take(peer, message, now)

    def gone(self, peer: Peer) -> None:
        """A peer is no longer connected."""
        self._resuming.gone(peer)
        self._forming.gone(peer)

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do."""
        times = (self._forming.timer(), self._resuming.timer())
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Tell those who wait for whom; give up what is late."""
        self._forming.on_timer(now)
        self._resuming.on_timer(now)


def _sought(hello: Hello) -> Sought:
    return Sought(hello.name, hello.job if hello.role == "worker" else "")
