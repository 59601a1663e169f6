"""A coordinator behind a listening socket, and its own node beside it as a peer like any other."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from inanet.aio.channel import Channel, ChannelClosed, parse_address
from inanet.aio.control_server import ControlServer, serve
from inanet.aio.reachability import send_probe
from inanet.coordinator import events
from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.registry import Registry
from inanet.coordinator.settings import Settings
from inanet.member.member import Member
from inanet.messages.codec import ControlError
from inanet.proto.common.formats import make_format
from inanet.service.addresses import is_loopback
from inanet.service.exits import Exit, Failure
from inanet.service.metrics import Sample
from inanet.trust.certificates import Keys

#: peer number of the node in this process
LOCAL = 0
#: seconds between looks at the list of revoked certificates, for those who say nothing
RECHECK_SECONDS = 1.0
_log: Any = structlog.get_logger("inanet.coordinator")


class InsecureListener(Failure):
    """A coordinator would listen beyond its machine without TLS, and nobody has said that it may."""

    code = Exit.USAGE


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
        self._keys = keys
        self._local = local
        self._wake = wake
        self._channels: dict[int, Channel] = {}
        self._next_peer = LOCAL + 1
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rechecking: asyncio.TimerHandle | None = None
        self._server: ControlServer | None = None
        self.jobs_running = 0
        self.address = ""
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
            self.coordinator.connected(LOCAL, self._loop.time())
            self._local.connected()
        if self._keys is not None and self._keys.revoked is not None:
            self.recheck()
        self.pump()

    async def _connection(self, channel: Channel) -> None:
        peer = self._next_peer
        self._next_peer += 1
        self._channels[peer] = channel
        self.coordinator.connected(peer, self._loop.time(), channel.certificate)
        why = "its connection closed"
        try:
            self._check(channel)
            # who has just come has a deadline, too
            self._arm()
            while True:
                message = await channel.receive()
                self._check(channel)
                self.coordinator.receive(peer, message, self._loop.time())
                for more in channel.take():
                    self.coordinator.receive(peer, more, self._loop.time())
                self.pump()
        except (ChannelClosed, ControlError) as error:
            why = str(error)
            if isinstance(error, ControlError):
                raise
        finally:
            self._channels.pop(peer, None)
            self.coordinator.disconnected(peer, self._loop.time(), why)
            self.pump()

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
        self.coordinator.recheck(self._keys.withdrawn, self._loop.time())
        self.pump()

    def pump(self) -> None:
        """Carry messages both ways until nobody has anything to say, then arm the timer."""
        acted = False
        busy = True
        while busy:
            busy = False
            for message in self._local.outgoing() if self._local is not None else ():
                busy = True
                self.coordinator.receive(LOCAL, message, self._loop.time())
            for peer, message in self.coordinator.outgoing():
                busy = True
                if peer == LOCAL and self._local is not None:
                    acted = True
                    self._local.receive(message, self._loop.time())
                elif peer in self._channels:
                    try:
                        self._channels[peer].post(message)
                    except ChannelClosed as error:
                        _log.info("message not delivered", reason=str(error))
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
            done(self._loop.time())
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
        elif isinstance(event, events.PeerRefused):
            _log.warning("refused", peer=event.name, reason=event.reason)
            self._close(event.peer)
        elif isinstance(event, events.PeerLost):
            # a job that ends with somebody's farewell says itself whether that was the end it should have
            say, what = (_log.info, "left") if event.left else (_log.warning, "lost")
            if not event.told:
                say(what, peer=event.name, peer_role=event.role, reason=event.reason)
            self._close(event.peer)
        elif isinstance(event, events.ProbeAsked) and event.peer in self._channels:
            send_probe(self._channels[event.peer].local, event.group, event.port, event.nonce)
        elif isinstance(event, events.JobStarted):
            self.jobs_running += 1
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
        elif isinstance(event, events.RoundLost):
            _log.warning("round failed", job=event.name, round=event.round, reason=event.message)
        elif isinstance(event, events.JobOver):
            self.jobs_running -= 1
            say = _log.warning if event.error else _log.info
            say("job over", job=event.name, error=event.error, reason=event.message)

    def _close(self, peer: int) -> None:
        channel = self._channels.get(peer)
        if channel is not None:
            # what was posted before, a Reject for instance, still leaves
            self._loop.create_task(channel.close())

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = self.coordinator.timer()
        self._timer = self._loop.call_at(at, self._expired) if at is not None else None

    def _expired(self) -> None:
        self._timer = None
        self.coordinator.on_timer(self._loop.time() + 0.001)
        self.pump()

    async def close(self, reason: str) -> None:
        """Tell everybody, then close all connections."""
        self._closed = True
        self.coordinator.stop(reason)
        self.pump()
        for timer in (self._timer, self._rechecking):
            if timer is not None:
                timer.cancel()
        if self._server is not None:
            await self._server.close()
