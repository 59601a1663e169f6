"""The coordinator: the only authority for who is in a job and how its nodes are wired.

A sans-IO machine like those of :mod:`inanet.proto`: connections come and go, messages go in, messages and
events come out, ``now`` is an argument and randomness is injected. It lives beside the parameter server,
which takes part through the same messages as everybody else. Jobs are found by name while they form, by
number once they run.
"""

import hmac
from collections.abc import Callable, Collection

from inanet.control.events import (
    ControlEvent,
    JobOver,
    JobStarted,
    PeerJoined,
    PeerLost,
    PeerRefused,
    StatsReceived,
)
from inanet.control.job import Job
from inanet.control.joining import Forming, Members, Refused
from inanet.control.messages import (
    PROTOCOL,
    Begin,
    Finished,
    Held,
    Hello,
    JobEnded,
    JobFailed,
    Known,
    LayoutReady,
    Leave,
    Message,
    PeerSilent,
    Ping,
    Pong,
    Refuse,
    Reject,
    Resume,
    Stats,
    Stop,
    Welcome,
)
from inanet.control.peers import Peer, Peers
from inanet.control.planner import Planner
from inanet.control.receivers import Receivers
from inanet.control.resuming import Resuming
from inanet.control.rounds import Host
from inanet.control.sentences import clip, listing
from inanet.control.settings import FormatOf, Settings

#: How many ended jobs are remembered, to tell their members when they come back.
_MOST_ENDED = 256
_JobMessage = Known | Begin | LayoutReady | Refuse | Finished | Held


class Coordinator:
    """See the module's documentation.

    ``format_of(spec, ranks)`` is :func:`inanet.proto.formats.make_format` or something with the same facts;
    ``key_source()`` returns 64 random bits for each new job.
    """

    def __init__(self, settings: Settings, format_of: FormatOf, key_source: Callable[[], int]) -> None:
        self.settings = settings
        self.jobs: dict[int, Job] = {}
        self._format_of = format_of
        self._key_source = key_source
        self._peers = Peers(settings)
        self._receivers = Receivers()
        self._generation = 0
        self._forming: dict[str, Forming] = {}
        self._resuming: dict[int, Resuming] = {}
        #: what became of earlier jobs, by key
        self._ended: dict[int, str] = {}
        self._outgoing: list[tuple[int, Message]] = []
        self._events: list[ControlEvent] = []

    # ---------- the core contract

    def connected(self, peer: int, now: float) -> None:
        """A connection was made; ``peer`` is any number that is not in use."""
        self._peers.add(peer, now)

    def disconnected(self, peer: int, now: float, why: str = "its connection closed") -> None:
        """A connection is gone. Unknown peers, as those refused or lost before, are ignored."""
        found = self._peers.get(peer)
        if found is not None:
            self._gone(found, why, now)
            self._settle(now)

    def receive(self, peer: int, message: Message, now: float) -> None:
        """One message from a peer. What a node must not send is answered with a Reject."""
        found = self._peers.get(peer)
        if found is None:
            return
        self._peers.heard(found)
        try:
            self._dispatch(found, message, now)
        except Refused as refusal:
            self._reject(found, refusal, now)
        self._settle(now)

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do; None if never."""
        times = [self._peers.timer(), *(job.timer() for job in self.jobs.values())]
        for forming in self._forming.values():
            times += [forming.deadline, forming.next_waiting]
        times += [resuming.deadline for resuming in self._resuming.values()]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Send pings and progress, give up what is late. May be called early."""
        due = self.timer()
        late = now - due if due is not None else 0.0
        if late > self.settings.silence / 3:
            self._peers.excuse(late)
        for peer in self._peers:
            self._check_peer(peer, now)
        for forming in list(self._forming.values()):
            self._check_forming(forming, now)
        for resuming in list(self._resuming.values()):
            if now >= resuming.deadline:
                self._try_resume(resuming, now, late=True)
        for job in self.jobs.values():
            job.on_timer(now)
        self._settle(now)

    def outgoing(self) -> list[tuple[int, Message]]:
        """Messages to send since the last call, in order."""
        out, self._outgoing = self._outgoing, []
        return out

    def events(self) -> list[ControlEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def stop(self, reason: str) -> None:
        """Tell everybody that the coordinator shuts down in good order."""
        for peer in self._peers:
            self._send(peer, Stop(reason=reason))

    # ---------- messages

    def _send(self, peer: Peer, message: Message) -> None:
        self._outgoing.append((peer.id, message))

    def _dispatch(self, peer: Peer, message: Message, now: float) -> None:
        if isinstance(message, Ping):
            self._send(peer, Pong(nonce=message.nonce))
        elif isinstance(message, Hello):
            self._hello(peer, message, now)
        elif peer.hello is None:
            raise Refused(f"the first message must be hello, not {message.kind}")
        elif isinstance(message, Pong):
            if peer.job in self.jobs:
                self.jobs[peer.job].answered(peer.hello.name, message.nonce)
        elif isinstance(message, Stats):
            self._events.append(StatsReceived(peer.hello.name, dict(message.counters)))
        elif isinstance(message, Leave):
            self._leave(peer, message, now)
        elif isinstance(message, PeerSilent):
            self._peer_silent(peer, message, now)
        elif isinstance(message, _JobMessage):
            self._about_job(peer, message, now)
        else:
            raise Refused(f"{message.kind} is a message of coordinators, not of {peer.label}")

    def _about_job(self, peer: Peer, message: _JobMessage, now: float) -> None:
        assert peer.hello is not None
        if peer.hello.role == "worker" and peer.job != message.job:
            return  # about a job that has ended meanwhile
        for resuming in self._resuming.values():
            returned = resuming.returned.get(peer.hello.name)
            if resuming.number == message.job and returned is not None:
                returned.take(message)
                self._try_resume(resuming, now)
                return
        if message.job in self.jobs:
            self.jobs[message.job].receive(peer.hello.name, message, now)

    def _leave(self, peer: Peer, message: Leave, now: float) -> None:
        assert peer.hello is not None
        if peer.hello.role == "worker" and peer.job in self.jobs:
            self.jobs[peer.job].leave(peer.hello.name, now)
        self._gone(peer, f"it left: {message.reason}" if message.reason else "it left", now)

    def _peer_silent(self, peer: Peer, message: PeerSilent, now: float) -> None:
        """A neighbour cannot be reached on the data plane: ask it, or believe it after a while."""
        assert peer.hello is not None
        job = self.jobs.get(message.job)
        if job is None or (peer.hello.role == "worker" and peer.job != message.job):
            return
        if message.name in self.settings.topology.aggregators and message.seconds >= self.settings.silence:
            why = f"{peer.label} has had no answer from it for {message.seconds:.0f} s"
            job.holder_lost(message.name, why, now)
            return
        silent = self._peers.worker(message.job, message.name) or self._peers.node(message.name)
        if silent is not None:
            self._send(silent, self._peers.ping(silent, now, self.settings.probe))

    # ---------- Hello

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        if peer.hello is not None and not (peer.hello.role == hello.role == "worker" and peer.job is None):
            raise Refused(f"{peer.label} has said hello already")
        if hello.protocol != PROTOCOL:
            raise Refused(
                f"{hello.name!r} speaks control protocol {hello.protocol}, this coordinator {PROTOCOL}: "
                "install the same version of inanet on both"
            )
        if not hmac.compare_digest(hello.token.encode(), self.settings.token.encode()):
            raise Refused(
                f"{hello.name!r} has another token than this coordinator; use the same on all nodes"
            )
        self._check_role(hello)
        if hello.role == "worker":
            self._worker_hello(peer, hello, now)
        else:
            self._node_hello(peer, hello, now)

    def _check_role(self, hello: Hello) -> None:
        topology = self.settings.topology
        known: Collection[str] = topology.roots
        if hello.role != "ps":
            known = topology.workers if hello.role == "worker" else topology.aggregators
        if hello.name not in known:
            names = listing(sorted(known)[:20]) or "none"
            raise Refused(f"{hello.role} {hello.name!r} is not in the topology, which has {names}")

    def _accept(self, peer: Peer, hello: Hello, welcome: Welcome) -> None:
        peer.hello = hello
        peer.job = welcome.job
        peer.deadline = None
        self._send(peer, welcome)
        self._events.append(PeerJoined(peer.id, hello.name, hello.role))

    def _node_hello(self, peer: Peer, hello: Hello, now: float) -> None:
        old = self._peers.node(hello.name)
        if old is not None:
            self._send(old, self._peers.ping(old, now, self.settings.probe))
            raise Refused(
                f"{hello.role} {hello.name!r} is connected already; if that process is dead, this will be noticed "
                f"within {self.settings.probe:g} s",
                retry_after=self.settings.probe,
            )
        self._accept(peer, hello, Welcome(silence=self.settings.silence))
        for resume in hello.resume:
            self._holder_returns(peer, hello, resume, now)
        for job in self.jobs.values():
            job.holder_returned(hello, now)
        for forming in list(self._forming.values()):
            self._try_start(forming, now)
        for resuming in list(self._resuming.values()):
            self._try_resume(resuming, now)

    def _holder_returns(self, peer: Peer, hello: Hello, resume: Resume, now: float) -> None:
        over = self._ended.get(resume.key)
        in_use = resume.job in self._numbers() - {self._number_resuming(resume.key)}
        if over is not None or in_use:
            self._send(peer, JobEnded(job=resume.job, reason=over or "the job goes on without this node"))
            return
        self._resuming_for(resume, now).admit_holder(hello, resume)

    def _worker_hello(self, peer: Peer, hello: Hello, now: float) -> None:
        for job in self.jobs.values():
            if job.name == hello.job:
                self._refuse_running(job, hello, now)
        if hello.resume:
            self._worker_returns(peer, hello, now)
            return
        forming = self._forming.get(hello.job)
        if forming is None:
            key = self._key_source() & 0xFFFFFFFFFFFFFFFF
            deadline = now + self.settings.join
            forming = Forming(
                Members(hello.job), self._free_number(key), key, deadline, now + self.settings.waiting
            )
        forming.members.admit(hello, self.settings.topology)
        self._forming[hello.job] = forming
        left = max(0.0, forming.deadline - now)
        self._accept(
            peer,
            hello,
            Welcome(job=forming.number, key=forming.key, silence=self.settings.silence, deadline=left),
        )
        self._send(peer, forming.waiting(self.settings.topology, self._peers.nodes()))
        self._try_start(forming, now)

    def _refuse_running(self, job: Job, hello: Hello, now: float) -> None:
        old = self._peers.worker(job.number, hello.name)
        if old is not None and old.hello is not None and old.hello.ranks == hello.ranks:
            self._send(old, self._peers.ping(old, now, self.settings.probe))
            raise Refused(
                f"host {hello.name!r} takes part in job {job.name!r} already; if that process is dead, this will be "
                f"noticed within {self.settings.probe:g} s",
                retry_after=self.settings.probe,
            )
        if hello.resume and hello.resume[0].key != job.planner.key:
            raise Refused(
                f"this process of host {hello.name!r} belongs to an earlier run of job {job.name!r}"
            )
        raise Refused(f"job {job.name!r} is running; wait until it ends or choose another name")

    def _worker_returns(self, peer: Peer, hello: Hello, now: float) -> None:
        resume = hello.resume[0]
        over = self._ended.get(resume.key)
        if len(hello.resume) > 1:
            raise Refused(f"host {hello.name!r} wants to resume {len(hello.resume)} jobs at once")
        if over is not None:
            raise Refused(f"job {hello.job!r} is over: {over}")
        if resume.job in self._numbers() - {self._number_resuming(resume.key)}:
            raise Refused(
                f"job {hello.job!r} cannot be resumed: its number {resume.job} is in use by another job"
            )
        resuming = self._resuming_for(resume, now)
        resuming.admit_worker(hello, self.settings.topology)
        left = max(0.0, resuming.deadline - now)
        self._accept(
            peer,
            hello,
            Welcome(job=resuming.number, key=resuming.key, silence=self.settings.silence, deadline=left),
        )
        self._try_resume(resuming, now)

    # ---------- jobs come about

    def _numbers(self) -> set[int]:
        forming = {forming.number for forming in self._forming.values()}
        return {*self.jobs, *forming, *(resuming.number for resuming in self._resuming.values())}

    def _number_resuming(self, key: int) -> int | None:
        return self._resuming[key].number if key in self._resuming else None

    def _free_number(self, key: int) -> int:
        used = self._numbers()
        return next(n for n in ((key + i) & 0xFFFF for i in range(0x10000)) if n not in used)

    def _resuming_for(self, resume: Resume, now: float) -> Resuming:
        if resume.key not in self._resuming:
            self._resuming[resume.key] = Resuming(resume.job, resume.key, now + self.settings.resume)
        return self._resuming[resume.key]

    def _new_job(self, name: str, number: int, key: int, members: Members, hosts: dict[str, Host]) -> Job:
        planner = Planner(number, key, members.world, self.settings.topology.ancestors)

        def next_nonce(host: str) -> int:
            peer = self._peers.worker(number, host)
            return peer.nonce + 1 if peer else 0

        hellos = {**self._peers.nodes(), **members.hellos}
        job = Job(name, planner, hosts, hellos, self.settings, self._format_of, self._receivers, next_nonce)
        self.jobs[number] = job
        return job

    def _try_start(self, forming: Forming, now: float) -> None:
        members = forming.members
        if members.missing(self.settings.topology, self._peers.nodes()):
            return
        for key, resuming in list(self._resuming.items()):
            if resuming.members.job == members.job:
                del self._resuming[key]
                self._abandon(resuming, f"job {members.job!r} was started anew, without this process", now)
        del self._forming[members.job]
        job = self._new_job(members.job, forming.number, forming.key, members, members.hosts())
        self._events.append(JobStarted(job.number, job.name, members.world, resumed=False))
        job.start(now)

    def _try_resume(self, resuming: Resuming, now: float, late: bool = False) -> None:
        topology = self.settings.topology
        name = resuming.members.job
        missing = resuming.missing(topology, set(self._peers.nodes()))
        if missing or not name:
            if late:
                del self._resuming[resuming.key]
                seconds = f"{self.settings.resume:g} s after the coordinator's restart"
                text = f"job {name!r} cannot go on: {seconds}, {', '.join(missing) or 'all workers'} still missing"
                self._abandon(resuming, text, now)
            return
        if resuming.absentees(topology) and not late:
            return
        del self._resuming[resuming.key]
        forming = self._forming.pop(name, None)
        job = self._new_job(name, resuming.number, resuming.key, resuming.members, resuming.hosts())
        self._events.append(JobStarted(job.number, name, resuming.members.world, resumed=True))
        resuming.restore(job, now, self.settings.round)
        for node, hello in self._peers.nodes().items():
            if node in job.absent and node in resuming.returned:
                job.outbox.append(
                    (node, JobEnded(job=job.number, reason="its place in the tree was given up"))
                )
            job.holder_returned(hello, now)
        if forming is not None:
            self._turn_away(forming, f"job {name!r} was resumed by the processes that ran it before", now)

    def _abandon(self, resuming: Resuming, text: str, now: float) -> None:
        """A job cannot be resumed: tell those who came back."""
        self._remember(resuming.key, text)
        missing = resuming.members.missing_ranks
        for name, returned in resuming.returned.items():
            worker = self._peers.worker(resuming.number, name)
            if returned.hello.role == "worker" and worker is not None:
                failed = JobFailed(
                    job=resuming.number, error="worker_lost", message=clip(text), ranks=missing
                )
                self._send(worker, failed)
                worker.job = None
            elif node := self._peers.node(name):
                self._send(node, JobEnded(job=resuming.number, reason=clip(text)))
        self._events.append(JobOver(resuming.number, resuming.members.job, "worker_lost", text))

    def _turn_away(self, forming: Forming, text: str, now: float) -> None:
        for name in forming.members.hellos:
            worker = self._peers.worker(forming.number, name)
            if worker is not None:
                worker.job = None
                self._reject(worker, Refused(text), now)

    def _remember(self, key: int, text: str) -> None:
        self._ended[key] = text
        if len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    # ---------- time and losses

    def _check_peer(self, peer: Peer, now: float) -> None:
        if peer.deadline is not None and now >= peer.deadline:
            if peer.hello is None:
                self._reject(peer, Refused(f"no hello within {self.settings.hello:g} s"), now)
            else:
                self._gone(peer, f"no answer for {self.settings.silence:g} s", now)
        elif peer.hello is not None and now >= peer.next_ping:
            self._send(peer, self._peers.ping(peer, now, self.settings.silence))

    def _check_forming(self, forming: Forming, now: float) -> None:
        waiting = forming.waiting(self.settings.topology, self._peers.nodes())
        workers = [self._peers.worker(forming.number, name) for name in forming.members.hellos]
        if now >= forming.deadline:
            del self._forming[forming.members.job]
            text = clip(
                f"job {forming.members.job!r} is not complete after {self.settings.join:g} s: joined {waiting.joined} "
                f"of {waiting.expected} ranks, missing: {', '.join(waiting.missing)}"
            )
            for worker in filter(None, workers):
                missing = forming.members.missing_ranks
                self._send(
                    worker, JobFailed(job=forming.number, error="timeout", message=text, ranks=missing)
                )
                worker.job = None
            self._events.append(JobOver(forming.number, forming.members.job, "timeout", text))
        elif now >= forming.next_waiting:
            forming.next_waiting = now + self.settings.waiting
            for worker in filter(None, workers):
                self._send(worker, waiting)

    def _reject(self, peer: Peer, refusal: Refused, now: float) -> None:
        """Refuse a peer, which is gone with that."""
        reason = clip(refusal.reason)
        self._send(peer, Reject(reason=reason, retry_after=refusal.retry_after))
        self._events.append(PeerRefused(peer.id, peer.hello.name if peer.hello else "", reason))
        if peer.hello is not None:
            self._gone(peer, f"it was refused: {reason}", now)
        self._peers.remove(peer)

    def _gone(self, peer: Peer, why: str, now: float) -> None:
        """A peer is no longer there: work out what that means for its jobs."""
        self._peers.remove(peer)
        if peer.hello is None:
            return
        name = peer.hello.name
        self._events.append(PeerLost(peer.id, name, peer.hello.role, why))
        for resuming in self._resuming.values():
            if peer.hello.role != "worker" or peer.job == resuming.number:
                resuming.remove(name)
        if peer.hello.role != "worker":
            for job in self.jobs.values():
                job.holder_lost(name, why, now)
            return
        for forming in list(self._forming.values()):
            if forming.number == peer.job:
                del forming.members.hellos[name]
                if not forming.members.hellos:
                    del self._forming[forming.members.job]
        if peer.job in self.jobs and name in self.jobs[peer.job].hosts:
            self.jobs[peer.job].worker_lost(name, why, now)

    def _settle(self, now: float) -> None:
        """Collect what jobs say, forget those that are over, and share receive buffers out anew."""
        for job in list(self.jobs.values()):
            self._collect(job)
        while self._generation != self._receivers.generation:
            self._generation = self._receivers.generation
            for job in list(self.jobs.values()):
                job.rewindow(now)
                self._collect(job)

    def _collect(self, job: Job) -> None:
        nodes = {peer.hello.name: peer for peer in self._peers if peer.hello and peer.hello.role != "worker"}
        workers = {peer.hello.name: peer for peer in self._peers if peer.hello and peer.job == job.number}
        for name, message in job.outbox:
            peer = workers.get(name) or nodes.get(name)
            if peer is not None:
                self._send(peer, message)
        job.outbox.clear()
        self._events.extend(job.log)
        job.log.clear()
        if job.over:
            del self.jobs[job.number]
            self._remember(job.planner.key, job.verdict)
            for peer in workers.values():
                peer.job = None
