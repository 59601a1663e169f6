"""A coordinator behind a listening socket, and its own node beside it as a peer like any other."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import structlog

from inanet.aio.channel import Channel, ChannelClosed, parse_address
from inanet.aio.control_server import ControlServer, serve
from inanet.aio.reachability import send_probe
from inanet.aio.run_clock import RunClock
from inanet.coordinator import events
from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.registry import Registry
from inanet.coordinator.settings import Settings
from inanet.member.member import Member
from inanet.messages.codec import ControlError, encode
from inanet.messages.control import Away, Continue, Continued, Heard, Message, Reject, Welcome
from inanet.messages.delivery import Delivery
from inanet.messages.text import clip
from inanet.proto.common.formats import make_format
from inanet.service.addresses import is_loopback
from inanet.service.exits import Exit, Failure
from inanet.service.metrics import Sample
from inanet.trust.certificates import Keys

#: peer number of the node in this process
LOCAL = 0
#: seconds after which somebody whose message could not be acted on may call again
RETRY_SECONDS = 3.0
#: seconds between looks at the list of revoked certificates, for those who say nothing
RECHECK_SECONDS = 1.0
#: jobs that have metrics of their own: there may be any number over time
MOST_JOBS = 64
_log: Any = structlog.get_logger("inanet.coordinator")


class InsecureListener(Failure):
    """A coordinator would listen beyond its machine without TLS, and nobody has said that it may."""

    code = Exit.USAGE


@dataclass(slots=True, eq=False)
class _Link:
    """A peer of the coordinator, and the connection that leads to it; None while it is away and expected back."""

    peer: int
    channel: Channel | None
    delivery: Delivery = field(default_factory=Delivery)
    #: the secret with which it may call again; empty before it was welcomed
    session: str = ""
    #: it has said that it will
    away: bool = False


class Coordination:
    """Runs a :class:`~inanet.coordinator.coordinator.Coordinator`; ``local`` is the member of this process's own node, if
    it has one.

    ``wake`` is called after the local member has acted on messages. ``registry`` and ``epochs`` are the coordinator's;
    with ``keys``, control connections over TCP are TLS.
    """

    def __init__(
        self,
        settings: Settings,
        local: Member | None,
        wake: Callable[[], None] = lambda: None,
        *,
        registry: Registry | None = None,
        epochs: Callable[[], int] | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.coordinator = Coordinator(
            settings, make_format, lambda: secrets.randbits(64), registry=registry, epochs=epochs
        )
        self.coordinator.works.elsewhere = self._elsewhere
        self.coordinator.reaches = self._reaches
        self._keys = keys
        self._local = local
        self._wake = wake
        self._links: dict[int, _Link] = {}
        self._sessions: dict[str, _Link] = {}
        self._next_peer = LOCAL + 1
        self._loop = asyncio.get_running_loop()
        self._now = RunClock()
        self._timer: asyncio.TimerHandle | None = None
        self._rechecking: asyncio.TimerHandle | None = None
        self._server: ControlServer | None = None
        self.address = ""
        #: this was asked to stop, and so may all others have been
        self.stopping = False
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False

    async def start(self, address: str) -> None:
        """Listen for nodes, and let the local node join. Raises :class:`InsecureListener` without keys, unless the address
        is one of this machine or the settings say that it may be insecure.
        """
        target = parse_address(address)
        if (
            self._keys is None
            and not target.path
            and target.host != "localhost"
            and not is_loopback(target.host)
        ):
            if not self.coordinator.settings.insecure:
                raise InsecureListener(
                    f"refused to listen on {address}: other machines reach it, and control connections would not be "
                    "encrypted; set control.ca_file and key_file, which 'ina keys' makes, listen on loopback or "
                    "unix:/path, or set insecure = true"
                )
            _log.warning(
                "control connections are not encrypted: whoever sees the network may read the token",
                address=address,
                fix="'ina keys', control.ca_file and key_file",
            )
        self._server = await serve(address, self._connection, keys=self._keys)
        self.address = self._server.address
        if self._local is not None:
            self.coordinator.connected(LOCAL, self._now())
            self._local.connected()
        if self._keys is not None and self._keys.revoked is not None:
            self.recheck()
        self.pump()

    async def _connection(self, channel: Channel) -> None:
        link = self._links[self._next_peer] = _Link(self._next_peer, channel)
        self._next_peer += 1
        self.coordinator.connected(link.peer, self._now(), channel.certificate)
        why, path = "its connection closed", False
        try:
            self._check(channel)
            # who has just come has a deadline, too
            self._arm()
            while True:
                message = await channel.receive()
                self._check(channel)
                for one in (message, *channel.take()):
                    link = self._receive(link, channel, one)
                self.pump()
        except (ChannelClosed, ControlError) as error:
            why = str(error)
            if isinstance(error, ControlError):
                raise
            path = isinstance(error, ChannelClosed) and error.path
        finally:
            self._disconnected(link, channel, why, path)

    def _receive(self, link: _Link, channel: Channel, message: Message) -> _Link:
        """One message of a connection; the link that it belongs to from then on."""
        if link.channel is not channel:
            # it has called again meanwhile, and says anew what was not heard before that
            return link
        if isinstance(message, Continue):
            return self._continue(link, channel, message)
        if isinstance(message, Away):
            link.away = True
        elif isinstance(message, Heard):
            link.delivery.heard(message.count)
        else:
            count = link.delivery.take()
            if count is not None:
                self._post(channel, encode(Heard(count=count)))
            try:
                self.coordinator.receive(link.peer, message, self._now())
            except Exception as error:
                # one message that cannot be acted on is no reason to leave its sender without a word, or others without service
                _log.exception("a message cannot be acted on", peer=channel.peer, kind=message.kind)
                text = f"the coordinator failed at {message.kind}: {type(error).__name__}: {error}; its log has the details"
                self._post(channel, encode(Reject(reason=clip(text), retry_after=RETRY_SECONDS)))
                raise ChannelClosed(f"{channel.peer} was refused: {text}") from error
        return link

    def _continue(self, link: _Link, channel: Channel, message: Continue) -> _Link:
        """A member calls again, and goes on where it was if this proves that it is the same."""
        known = self._sessions.get(message.session)
        if (
            known is None
            or not known.delivery.continues(message.heard)
            or not self.coordinator.continued(known.peer, channel.certificate)
        ):
            self._post(channel, encode(Continued(known=False)))
            return link
        self._links.pop(link.peer)
        self.coordinator.disconnected(link.peer, self._now())
        old, known.channel, known.away = known.channel, channel, False
        if old is not None:
            old.abort()
        _log.info("connection continued", peer=self.coordinator.label(known.peer), address=channel.peer)
        self._post(channel, encode(Continued(known=True, heard=known.delivery.received)))
        for frame in known.delivery.lacking(message.heard):
            self._post(channel, frame)
        return known

    def _disconnected(self, link: _Link, channel: Channel, why: str, path: bool) -> None:
        """A connection is gone: with it the peer, unless that lives and will call again; then it has until it counts as silent."""
        if link.channel is not channel or self._closed:
            return
        link.channel = None
        if link.session and (link.away or path) and self.coordinator.label(link.peer):
            _log.info(
                "connection lost, its other end is waited for",
                peer=self.coordinator.label(link.peer),
                address=channel.peer,
                reason="it has said that it calls again" if link.away else why,
            )
            return
        self._forget(link)
        self.coordinator.disconnected(link.peer, self._now(), why)
        self.pump()

    def _forget(self, link: _Link) -> None:
        self._links.pop(link.peer, None)
        self._sessions.pop(link.session, None)

    def _reaches(self, peer: int) -> bool:
        """Whether a peer's kernel still answers for it."""
        link = self._links.get(peer)
        return link is not None and link.channel is not None and link.channel.acknowledged

    def _send(self, peer: int, message: Message) -> None:
        """A message for a peer; for one that is away it is kept."""
        link = self._links.get(peer)
        if link is None:
            return
        if isinstance(message, Welcome):
            if not link.session:
                link.session = secrets.token_hex(16)
                self._sessions[link.session] = link
            message = message.model_copy(update={"session": link.session})
        frame = link.delivery.send(encode(message))
        if link.channel is not None:
            self._post(link.channel, frame)

    def _post(self, channel: Channel, frame: bytes) -> None:
        try:
            channel.post_frame(frame)
        except ChannelClosed as error:
            _log.info("message not delivered", reason=str(error))

    def _check(self, channel: Channel) -> None:
        """What comes from somebody whose certificate has been revoked is not heard."""
        if self._keys is not None and self._keys.withdrawn(channel.certificate):
            self.recheck()

    def recheck(self) -> None:
        """Turn out everybody whose certificate has been revoked, those who keep silent included, and change what they know.
        By itself every :data:`RECHECK_SECONDS`.
        """
        if self._keys is None or self._closed:
            return
        if self._rechecking is not None:
            self._rechecking.cancel()
        self._rechecking = self._loop.call_later(RECHECK_SECONDS, self.recheck)
        self.coordinator.recheck(self._keys.withdrawn, self._now())
        self.pump()

    def pump(self) -> None:
        """Carry messages both ways until nobody has anything to say, then arm the timer."""
        acted = False
        busy = True
        while busy:
            busy = False
            for message in self._local.outgoing() if self._local is not None else ():
                busy = True
                self.coordinator.receive(LOCAL, message, self._now())
            for peer, message in self.coordinator.outgoing():
                busy = True
                if peer == LOCAL and self._local is not None:
                    acted = True
                    self._local.receive(message, self._loop.time())
                else:
                    self._send(peer, message)
        for event in self.coordinator.events():
            self._report(event)
            if isinstance(event, events.NodeRegistered | events.PeerLost):
                self._notify()
        self._arm()
        if acted:
            self._wake()

    def _elsewhere(self, work: Callable[[], None], done: Callable[[float], None]) -> None:
        """Run something slow in a thread, and have the coordinator act on it."""

        def finished(future: "asyncio.Future[None]") -> None:
            if self._closed:
                return
            if not future.cancelled() and (error := future.exception()) is not None:
                _log.error("a schedule failed", exc_info=error)
            done(self._now())
            self.pump()

        self._loop.run_in_executor(None, work).add_done_callback(finished)

    async def changed(self) -> None:
        """Wait until a node has registered, or a connection is gone."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def figures(self) -> dict[str, object]:
        """Counters for the end of a daemon that has no data plane."""
        coordinator = self.coordinator
        return {"nodes": len(list(coordinator.registry)), "jobs": len(coordinator.jobs)}

    def samples(self) -> Iterator[Sample]:
        """Metrics, read at every scrape."""
        yield Sample("inanet_jobs", len(self.coordinator.jobs))
        yield Sample("inanet_nodes", len(list(self.coordinator.registry)))
        yield from self.job_samples()

    def job_samples(self) -> Iterator[Sample]:
        """Those of single jobs, :data:`MOST_JOBS` of them."""
        # a copy: the loop's thread may begin and end jobs meanwhile
        for job in islice(list(self.coordinator.jobs.values()), MOST_JOBS):
            yield Sample("inanet_job_rounds", job.rounds.ledger.newest, (job.name,))

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _report(self, event: events.ControlEvent) -> None:
        if isinstance(event, events.PeerJoined):
            _log.info("joined", peer=event.name, peer_role=event.role)
        elif isinstance(event, events.NodeRegistered):
            _log.info("registered", peer=event.name, peer_role=event.role, nodes=event.known)
        elif isinstance(event, events.PeerFrozen):
            _log.warning(
                "no answer, though its host acknowledges what is sent: it is waited for",
                peer=event.name,
                peer_role=event.role,
                seconds=round(event.seconds, 1),
            )
        elif isinstance(event, events.PeerRefused):
            link = self._links.get(event.peer)
            where = link.channel.peer if link is not None and link.channel is not None else ""
            _log.warning("refused", peer=event.name or where, address=where, reason=event.reason)
            self._close(event.peer)
        elif isinstance(event, events.PeerLost):
            # a job that ends with somebody's farewell says itself whether that was the end it should have
            say, what = (_log.info, "left") if event.left or self.stopping else (_log.warning, "lost")
            if not event.told:
                say(what, peer=event.name, peer_role=event.role, reason=event.reason)
            self._close(event.peer)
        elif isinstance(event, events.ProbeAsked):
            link = self._links.get(event.peer)
            if link is not None and link.channel is not None:
                send_probe(link.channel.local, event.group, event.port, event.nonce)
        elif isinstance(event, events.JobStarted):
            _log.info(
                "job started", job=event.name, ranks=event.ranks, resumed=event.resumed, epoch=event.epoch
            )
        elif isinstance(event, events.PlanChosen):
            _log.info("plan chosen", job=event.name, reason=event.reason)
        elif isinstance(event, events.PlanChanged):
            _log.info("plan changed", job=event.name, version=event.version, reason=event.reason)
        elif isinstance(event, events.MembershipChanged):
            _log.warning(
                "job continues with fewer ranks",
                job=event.name,
                ranks=event.ranks,
                epoch=event.epoch,
                reason=event.reason,
            )
        elif isinstance(event, events.KeyChanged):
            _log.warning(
                "job continues under another key", job=event.name, epoch=event.epoch, reason=event.reason
            )
        elif isinstance(event, events.PlanRepeated):
            _log.warning(
                "plan retransmitted", job=event.name, peer=event.node, held=event.held, version=event.version
            )
        elif isinstance(event, events.RootMissed):
            _log.warning(
                "waiting for a lost parameter server",
                job=event.name,
                peer=event.node,
                seconds=event.seconds,
                reason=event.reason,
            )
        elif isinstance(event, events.ReturnDelayed):
            _log.warning(
                "not taken into the job yet",
                job=event.name,
                peer=", ".join(event.names),
                reason=event.reason,
                fix="nothing: it is tried again, later each time",
            )
        elif isinstance(event, events.RoundLost):
            _log.warning("round failed", job=event.name, round=event.round, reason=event.message)
        elif isinstance(event, events.JobOver):
            say = _log.warning if event.error else _log.info
            say("job over", job=event.name, error=event.error, reason=event.message)

    def _close(self, peer: int) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        self._sessions.pop(link.session, None)
        if link.channel is None:
            self._forget(link)
        else:
            # what was posted before, a Reject for instance, still leaves
            self._loop.create_task(link.channel.close())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self.coordinator.timer()
        self._timer = self._now.call_at(at, self._expired) if at is not None else None

    def _expired(self) -> None:
        self._timer = None
        self.coordinator.on_timer(self._now() + 0.001)
        self.pump()

    async def close(self, reason: str) -> None:
        """Tell everybody, then close all connections."""
        self.coordinator.stop(reason)
        self.pump()
        self._closed = True
        self._now.close()
        for timer in (self._timer, self._rechecking):
            if timer is not None:
                timer.cancel()
        if self._server is not None:
            await self._server.close()
