"""The coordinator: the only authority for who is in a job and how its nodes are wired.

A sans-IO machine like those of :mod:`inanet.proto`: connections come and go, messages go in, messages and
events come out, ``now`` is an argument and randomness is injected. It lives in a manager, or beside a parameter
server, which takes part through the same messages as everybody else.
"""

from collections.abc import Callable
from itertools import count

from inanet.coordinator.admission import Admission
from inanet.coordinator.events import (
    ControlEvent,
    NodeRegistered,
    PeerFrozen,
    PeerLost,
    PeerRefused,
    PlanChanged,
    PlanChosen,
    ProbeAsked,
    StatsReceived,
)
from inanet.coordinator.job import Job
from inanet.coordinator.keyholders import Keyholders
from inanet.coordinator.members import Rejection, check_entry
from inanet.coordinator.multicast_groups import probing_group
from inanet.coordinator.overview import overview
from inanet.coordinator.peers import Peer, Peers
from inanet.coordinator.registry import Registry
from inanet.coordinator.resumption import JobMessage
from inanet.coordinator.settings import FormatOf, Settings
from inanet.messages.control import (
    Hello,
    Leave,
    Message,
    PeerSilent,
    Performed,
    Ping,
    Pong,
    Reject,
    Stats,
    Stop,
)
from inanet.messages.registration import Overview, Query, Register, Registered, Report
from inanet.messages.text import clip
from inanet.planning.negotiation import Negotiation, RateMessage
from inanet.planning.trees import Performance
from inanet.service.refusals import Refusals
from inanet.trust.certificates import Certified


class Coordinator:
    """See the module's documentation.

    ``format_of(spec, ranks)`` is :func:`inanet.proto.common.formats.make_format` or something with the same facts;
    ``key_source()`` returns 64 random bits, the key of a new job; ``epochs()`` a number that is higher every time.
    ``registry`` is shared with whoever plans with it.
    """

    def __init__(
        self,
        settings: Settings,
        format_of: FormatOf,
        key_source: Callable[[], int],
        *,
        registry: Registry | None = None,
        epochs: Callable[[], int] | None = None,
    ) -> None:
        self.settings = settings
        self.registry = registry if registry is not None else Registry()
        #: whether a peer's host acknowledges what it is sent, though the process there may not act on it
        self.reaches: Callable[[int], bool] = lambda _peer: False
        #: running jobs by number
        self.jobs: dict[int, Job] = {}
        self._peers = Peers(settings)
        epochs = epochs if epochs is not None else count(1).__next__
        self._refusals = Refusals()
        self._admission = Admission(
            settings, format_of, key_source, self._peers, self.jobs, self, epochs, self._refusals
        )
        self.works = self._admission.fabrics.works
        self.works.settled = self._settle
        self._negotiation: Negotiation | None = None
        if settings.negotiate:
            multicast = settings.downlink != "unicast"
            self._negotiation = Negotiation(multicast=multicast, threshold=settings.loss_threshold)
        self._keyholders = Keyholders()
        self._generation = 0
        #: (job, aggregator) for those that are left out because they are busy
        self._spared: set[tuple[int, str]] = set()
        self._outgoing: list[tuple[int, Message]] = []
        self._events: list[ControlEvent] = []

    # ---------- the core contract

    def connected(self, peer: int, now: float, certificate: Certified | None = None) -> None:
        """A connection was made; ``peer`` is any number that is not in use, ``certificate`` what TLS says of it."""
        self._peers.add(peer, now, certificate)

    def disconnected(self, peer: int, now: float, why: str = "its connection closed") -> None:
        """A connection is gone. Peers that were refused or given up before are ignored."""
        found = self._peers.get(peer)
        if found is not None:
            self._gone(found, why, now)
            self._settle(now)

    def label(self, peer: int) -> str:
        """The name of a peer that was let in; empty if there is none."""
        found = self._peers.get(peer)
        return found.hello.name if found is not None and found.hello is not None else ""

    def continued(self, peer: int, certificate: Certified | None) -> bool:
        """Whether a peer may go on over another connection, which has this certificate; it is there with that."""
        found = self._peers.get(peer)
        if found is None or found.hello is None or (certificate is None) != (found.certificate is None):
            return False
        hello = found.hello
        if certificate is not None and certificate.refusal(hello.name, hello.role, hello.job):
            return False
        found.certificate = certificate
        self._peers.heard(found)
        return True

    def recheck(self, withdrawn: Callable[[Certified | None], str], now: float) -> None:
        """Turn out every peer whose certificate is no longer good, as ``withdrawn`` says with a reason, and have jobs whose
        key such a one knows go on under another.
        """
        for peer in self._peers:
            if self._peers.get(peer.id) is not None and (why := withdrawn(peer.certificate)):
                self.reject(peer, Rejection(why), now)
        for job in self.jobs.values():
            whys = [withdrawn(one) for one in self._keyholders.of(job.plans.current.key)]
            if job.plans.current.key == job.inherited:
                whys.append("an earlier coordinator had told its key, and nobody knows whom")
            if why := next(filter(None, whys), ""):
                job.change_key(why, now)
        self._settle(now)

    def receive(self, peer: int, message: Message, now: float) -> None:
        """One message from a peer. What a node must not send is answered with a Reject."""
        found = self._peers.get(peer)
        if found is None:
            return
        self._peers.heard(found)
        try:
            self._dispatch(found, message, now)
        except Rejection as refusal:
            self.reject(found, refusal, now, message if isinstance(message, Hello) else None)
        self._settle(now)

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do; None if never."""
        times = [self._peers.timer(), self._admission.timer(), *(job.timer() for job in self.jobs.values())]
        return min((at for at in times if at is not None), default=None)

    def on_timer(self, now: float) -> None:
        """Send pings and progress, give up what is late. May be called early."""
        due = self.timer()
        late = now - due if due is not None else 0.0
        if late > self.settings.silence / 3:
            self._peers.excuse(late)
        for peer in self._peers:
            self._check_peer(peer, now)
        self._admission.on_timer(now)
        for job in self.jobs.values():
            job.on_timer(now)
        self._settle(now)

    def outgoing(self) -> list[tuple[int, Message]]:
        """(peer, message) to send since the last call, in order."""
        out, self._outgoing = self._outgoing, []
        return out

    def events(self) -> list[ControlEvent]:
        events, self._events = self._events, []
        return events

    def stop(self, reason: str) -> None:
        """Tell everybody that the coordinator shuts down in good order."""
        for peer in self._peers:
            self.send(peer, Stop(reason=clip(reason)))

    # ---------- messages

    def send(self, peer: Peer, message: Message) -> None:
        """Put a message into :meth:`outgoing`."""
        self._keyholders.told(peer.certificate, message)
        self._outgoing.append((peer.id, message))

    def say(self, event: ControlEvent) -> None:
        """Put an event into :meth:`events`."""
        self._events.append(event)

    def _dispatch(self, peer: Peer, message: Message, now: float) -> None:
        if isinstance(message, Ping):
            self.send(peer, Pong(nonce=message.nonce))
        elif isinstance(message, Hello):
            self._admission.hello(peer, message, now)
            if message.role != "worker":
                self._renew(now)
            if self._negotiation is not None:
                # not before: whoever is refused must not say anything about links
                self._negotiation.joined(message)
        elif isinstance(message, Register):
            self._register(peer, message, now)
        elif isinstance(message, Query):
            check_entry(message, self.settings.token, peer.certificate)
            if message.nonce:
                group, port = probing_group(self.settings.group_range), self.settings.group_port
                self.say(ProbeAsked(peer.id, group, port, message.nonce))
            self.send(peer, self.overview(now))
        elif peer.card is not None:
            self._registered(peer, peer.card, message, now)
        elif peer.hello is None:
            raise Rejection(f"the first message must be hello, not {message.kind}")
        elif isinstance(message, Pong):
            self._answered(peer, message)
        elif isinstance(message, Stats):
            self.say(StatsReceived(peer.hello.name, dict(message.counters)))
        elif isinstance(message, Leave):
            self._leave(peer, message, now)
        elif isinstance(message, PeerSilent):
            self._peer_silent(peer, message, now)
        elif isinstance(message, Performed):
            self._performed(peer.hello.name, peer, message, now)
        elif isinstance(message, JobMessage):
            self._about_job(peer, message, now)
        elif isinstance(message, RateMessage):
            if self._negotiation is not None and peer.job == message.job:
                self._negotiation.receive(peer.hello.name, message)
        else:
            raise Rejection(f"{message.kind} is a message of coordinators, not of {peer.label}")

    def _answered(self, peer: Peer, pong: Pong) -> None:
        assert peer.hello is not None
        name = peer.hello.name
        if peer.job in self.jobs:
            self.jobs[peer.job].plans.answered(name, pong.nonce)
        for held in pong.plans:
            job = self.jobs.get(held.job)
            if job is not None and job.plans.current.key == held.key:
                job.follows(name, held.version, pong.nonce)

    def _performed(self, name: str, peer: Peer, message: Performed, now: float) -> None:
        """A worker's first step is over; with the last of them, the trees may be arranged anew."""
        job = self.jobs.get(message.job)
        if job is None or peer.job != message.job or job.plans.current.switched is not None:
            return
        workers = job.performed(Performance(name, message.training, message.transmission))
        if workers:
            serving = self._peers.nodes()
            chosen = self.settings.topology.improve(job.plans.topology, workers, job.size, serving)
            self.say(PlanChosen(job.number, job.name, chosen.reason))
            job.rearrange(chosen.topology, serving, now)

    def _register(self, peer: Peer, card: Register, now: float) -> None:
        """A daemon registers, on a connection that it uses for nothing else."""
        check_entry(card, self.settings.token, peer.certificate)
        if peer.known is not None:
            raise Rejection(f"{peer.label} uses this connection already; register on one of its own")
        old = self._peers.registered(card.name)
        if old is not None:
            self.send(old, self._peers.ping(old, now, self.settings.probe))
            text = f"a node called {card.name!r} has registered already; give each its own name"
            raise Rejection(text, retry_after=self.settings.probe)
        peer.card, peer.deadline = card, None
        self.registry.enter(card, now)
        self.send(peer, Registered(heartbeat=self.settings.heartbeat, epoch=self._admission.epoch))
        self.say(NodeRegistered(peer.id, card.name, card.role, len(list(self.registry))))
        self._admission.look(now)
        self._renew(now)

    def _registered(self, peer: Peer, card: Register, message: Message, now: float) -> None:
        if isinstance(message, Report):
            peer.told = False
            self.registry.report(card.name, message, now)
            self._weigh(card.name, now)
        elif isinstance(message, Stats):
            self.registry.count(card.name, message.counters)
        elif isinstance(message, Leave):
            self._gone(peer, f"it left: {message.reason}" if message.reason else "it left", now, left=True)
        elif not isinstance(message, Pong):
            raise Rejection(f"{message.kind} has no place on a connection for registration")

    def _weigh(self, name: str, now: float) -> None:
        """A server has reported its load: leave it out of jobs, or take it back into those it was left out of."""
        why = self.settings.topology.busy(name)
        hello = self._peers.nodes().get(name)
        for job in self.jobs.values():
            if job.plans.current.switched is not None:
                continue
            if why and name in job.plans.topology.aggregators and name not in job.plans.absent:
                self._spared.add((job.number, name))
                job.holder_lost(name, f"it is busy: {why}", now)
            elif not why and hello is not None and (job.number, name) in self._spared:
                self._spared.discard((job.number, name))
                job.holder_returned(hello, now)

    def _renew(self, now: float) -> None:
        """A server has come: jobs that run may be better off with it."""
        serving = self._peers.nodes()
        for job in self.jobs.values():
            if job.plans.current.switched is None:
                chosen = self.settings.topology.renew(job.plans.topology, tuple(job.hosts), serving)
                if chosen is not None:
                    self.say(PlanChosen(job.number, job.name, chosen.reason))
                    job.rearrange(chosen.topology, serving, now)

    def overview(self, now: float) -> Overview:
        """Everything there is to see."""
        settings = self.settings
        seen = overview(
            self.registry, self._peers.nodes(), self.jobs, self._admission, settings.expected, now
        )
        group = f"{probing_group(settings.group_range)}:{settings.group_port}"
        about = {"refused": self._refusals.latest(now), "downlink": settings.downlink, "group": group}
        return seen.model_copy(update=about)

    def _about_job(self, peer: Peer, message: JobMessage, now: float) -> None:
        assert peer.hello is not None
        if peer.hello.role == "worker" and peer.job != message.job:
            return  # about a job that has ended meanwhile
        if not self._admission.take(peer, message, now) and message.job in self.jobs:
            self.jobs[message.job].receive(peer.hello.name, message, now)

    def _leave(self, peer: Peer, message: Leave, now: float) -> None:
        assert peer.hello is not None
        if peer.hello.role == "worker" and peer.job in self.jobs:
            self.jobs[peer.job].leave(peer.hello.name, now, clip(message.reason))
        self._gone(peer, f"it left: {message.reason}" if message.reason else "it left", now, left=True)

    def _peer_silent(self, peer: Peer, message: PeerSilent, now: float) -> None:
        """A neighbour cannot be reached on the data plane: ask it, or believe it after a while."""
        assert peer.hello is not None
        job = self.jobs.get(message.job)
        if job is None or (peer.hello.role == "worker" and peer.job != message.job):
            return
        if message.name in job.plans.topology.aggregators and message.seconds >= self.settings.silence:
            why = f"{peer.label} has had no answer from it for {message.seconds:.0f} s"
            job.holder_lost(message.name, why, now)
            return
        silent = self._peers.worker(message.job, message.name) or self._peers.node(message.name)
        if silent is not None:
            self.send(silent, self._peers.ping(silent, now, self.settings.probe))

    # ---------- time and losses

    def _check_peer(self, peer: Peer, now: float) -> None:
        if peer.deadline is not None and now >= peer.deadline:
            if peer.known is None:
                self.reject(peer, Rejection(f"no hello within {self.settings.hello:g} s"), now)
            elif self._is_frozen(peer, now):
                peer.deadline = now + self.settings.probe
            else:
                self._gone(peer, f"no answer for {now - peer.asked:.0f} s", now)
        elif peer.known is not None and now >= peer.next_ping:
            self.send(peer, self._peers.ping(peer, now, self.settings.silence))

    def _is_frozen(self, peer: Peer, now: float) -> bool:
        """Whether a peer that does not answer lives, and is one that a job cannot do without: its process was stopped
        (SIGSTOP, a slow disk), which is no death. It has as long as a round may take.
        """
        hello = peer.hello
        silent = now - peer.asked
        if hello is None or hello.role not in ("worker", "ps") or silent >= self.settings.round:
            return False
        if not self.reaches(peer.id):
            return False
        if not peer.frozen:
            peer.frozen = True
            self.say(PeerFrozen(peer.id, hello.name, hello.role, silent))
        return True

    def reject(self, peer: Peer, refusal: Rejection, now: float, hello: Hello | None = None) -> None:
        """Refuse a peer, which is gone with that; ``hello`` is what it has just said, if it was not taken."""
        reason = clip(refusal.reason)
        said = hello or peer.hello
        if said is not None:
            self._admission.turned_away(said, reason, now)
        else:
            self._refusals.add(reason, now)
        self.send(peer, Reject(reason=reason, retry_after=refusal.retry_after))
        self.say(PeerRefused(peer.id, peer.known.name if peer.known else "", reason))
        self._gone(peer, f"it was refused: {reason}", now)

    def _gone(self, peer: Peer, why: str, now: float, left: bool = False) -> None:
        """A peer is no longer there: work out what that means for its jobs."""
        self._peers.remove(peer)
        if peer.card is not None:
            self.registry.leave(peer.card.name)
            told = peer.told or self._peers.serves(peer.card.name)
            self.say(PeerLost(peer.id, peer.card.name, peer.card.role, why, left, told))
        if peer.hello is None:
            return
        name, role = peer.hello.name, peer.hello.role
        # a worker whose job is over goes because of that
        left = left or (role == "worker" and peer.job is None)
        self.say(PeerLost(peer.id, name, role, why, left))
        card = self._peers.registered(name)
        if card is not None and (role != "worker" or not left):
            # else it has left a job: it is there
            card.told = True
        self._admission.gone(peer)
        if role != "worker":
            for job in self.jobs.values():
                job.holder_lost(name, why, now)
        elif peer.job in self.jobs and name in self.jobs[peer.job].hosts:
            self.jobs[peer.job].worker_lost(name, why, now)

    def _settle(self, now: float) -> None:
        """Collect what jobs say, forget those that are over, and share receive buffers out anew."""
        running = list(self.jobs.values())
        for job in running:
            self._collect(job)
        if any(job.over for job in running):
            # others may have waited for what it had of a switch
            self._admission.look(now)
            for job in list(self.jobs.values()):
                self._collect(job)
        while self._generation != self._admission.buffers.generation:
            self._generation = self._admission.buffers.generation
            for job in list(self.jobs.values()):
                job.rewindow(now)
                self._collect(job)
        for name, grant in self._negotiation.grants() if self._negotiation is not None else ():
            member = self._peers.worker(grant.job, name) or self._peers.node(name)
            if member is not None:
                self.send(member, grant)

    def _tell_negotiation(self, job: Job) -> None:
        """What has become of a job, as far as rates depend on it."""
        if self._negotiation is None:
            return
        if any(isinstance(event, PlanChanged) for event in job.log):
            self._negotiation.planned(job.number, job.plans.current.trees)
        if job.over:
            self._negotiation.over(job.number)
        elif all(round_.failure is not None for round_ in job.rounds.ledger):
            self._negotiation.rest(job.number)

    def _collect(self, job: Job) -> None:
        for name, message in job.outbox:
            peer = self._peers.worker(job.number, name) or self._peers.node(name)
            if peer is not None:
                self.send(peer, message)
        job.outbox.clear()
        self._tell_negotiation(job)
        self._events.extend(job.log)
        job.log.clear()
        if job.over:
            del self.jobs[job.number]
            self._spared = {(number, name) for number, name in self._spared if number != job.number}
            self._admission.ended.remember(job.plans.current.key, job.verdict)
            self._refusals.forget(job.name)
            self._keyholders.keep({j.plans.current.key for j in self.jobs.values()})
            self._admission.groups.withdraw(job.number)
            for peer in self._peers:
                if peer.job == job.number:
                    peer.job = None
