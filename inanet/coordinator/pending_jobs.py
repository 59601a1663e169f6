"""Jobs that do not run yet, whether they form or resume: their numbers, and what their workers hear if nothing comes of them."""

from collections.abc import Mapping
from typing import Protocol

from inanet.coordinator.events import ControlEvent, JobOver
from inanet.coordinator.job import Job
from inanet.coordinator.members import Forming, Refused
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.resumption import Resuming
from inanet.messages.control import JobFailed, Message
from inanet.messages.fields import Cause
from inanet.messages.text import clip


class Office(Protocol):
    """What admission asks of the coordinator."""

    def send(self, peer: Peer, message: Message) -> None:
        """Send a message."""

    def say(self, event: ControlEvent) -> None:
        """Report an event."""

    def reject(self, peer: Peer, refusal: Refused, now: float) -> None:
        """Turn a peer away."""


class Pending:
    """Jobs on their way into ``jobs``: ``forming`` by name, ``resuming`` by key."""

    def __init__(self, peers: Peers, jobs: Mapping[int, Job], office: Office) -> None:
        self.forming: dict[str, Forming] = {}
        self.resuming: dict[int, Resuming] = {}
        self._peers = peers
        self._jobs = jobs
        self._office = office

    def numbers(self) -> set[int]:
        """Those in use, by jobs that run, too."""
        forming = {forming.number for forming in self.forming.values()}
        return {*self._jobs, *forming, *(resuming.number for resuming in self.resuming.values())}

    def free_number(self, key: int) -> int:
        """A job number; derived from the key, so that those of an earlier coordinator are unlikely to come
        again.
        """
        used = self.numbers()
        return next(n for n in ((key + i) & 0xFFFF for i in range(0x10000)) if n not in used)

    def workers(self, job: Forming | Resuming) -> list[Peer]:
        """The workers of a job that are here."""
        found = [self._peers.worker(job.number, name) for name in job.members.hellos]
        return [peer for peer in found if peer is not None]

    def fail(self, job: Forming | Resuming, error: Cause, text: str) -> None:
        """Tell the workers of a job that it does not come about. They may say Hello again."""
        members = job.members
        failed = JobFailed(job=job.number, error=error, message=clip(text), ranks=members.missing_ranks)
        for worker in self.workers(job):
            self._office.send(worker, failed)
            worker.job = None
        self._office.say(JobOver(job.number, members.job, error, text))
