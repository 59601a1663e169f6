"""The connection of a member to its coordinator: connect, talk, come back when it breaks, give up with a name."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog

from inanet.aio.channel import Channel, ChannelClosed, DeadlineError, connect
from inanet.member.identity import Failed
from inanet.member.member import Member
from inanet.messages.codec import ControlError, encode
from inanet.messages.control import Away, Continue, Continued, Heard, Message, Welcome
from inanet.messages.delivery import Delivery
from inanet.service.addresses import AddressError, refuse_loopback
from inanet.trust.certificates import KeyFileError, Keys
from inanet.wire.endpoint import address_of

#: seconds a coordinator may take to answer a Hello
WELCOME_SECONDS = 10.0
#: seconds a coordinator may take to hear that a node leaves
FAREWELL_SECONDS = 2.0
#: seconds between attempts that the other end, or a file, has put an end to
PAUSE_SECONDS = 1.0
_log: Any = structlog.get_logger("inanet.uplink")


class Uplink:
    """Keeps ``member`` connected to the coordinator at ``address``.

    ``wake`` is called after every message that was acted on, so that the data plane can follow. ``resume`` is how long
    a lost coordinator may take to come back (coordinator restart) before the member is abandoned. With ``keys`` the connection
    is TLS.
    """

    def __init__(
        self,
        member: Member,
        address: str,
        *,
        join: float,
        resume: float,
        wake: Callable[[], None],
        keys: Keys | None = None,
    ) -> None:
        self.member = member
        self.address = address
        self._join = join
        self._resume = resume
        self._wake = wake
        self._keys = keys
        self._channel: Channel | None = None
        self._delivery = Delivery()
        #: the secret with which this member goes on over another connection, as the coordinator has welcomed it
        self._session = ""
        #: the connection is this session's: what there is to say may be said
        self._open = False
        self._changed = asyncio.Event()
        self._left = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the coordinator now."""
        return self._channel is not None

    def flush(self) -> None:
        """Send what the member has to say, if there is a connection; what is said while it breaks is kept."""
        channel = self._channel
        if channel is None or not self._open:
            return
        try:
            for message in self.member.outgoing():
                frame = self._delivery.send(encode(message))
                if not channel.closed:
                    channel.post_frame(frame)
        except ChannelClosed as error:
            _log.info("control connection lost", node=self.member.identity.name, reason=str(error))

    async def run(self) -> None:
        """Stay connected until the member has failed or left, or this task is cancelled.

        The member is abandoned, with the reason, when the coordinator refuses it for good or stays away, and before
        an unexpected error is raised.
        """
        try:
            await self._stay_connected()
        except Exception as error:
            _log.exception("following the coordinator failed", node=self.member.identity.name)
            self._give_up("protocol", f"following {self.address} failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._changed.set()

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        patience = self._join
        told = ""
        while self.member.failed is None and not self._left:
            started = loop.time()
            try:
                self._channel = await self._reach(patience)
            except DeadlineError as error:
                self._give_up("coordinator_lost", self._unserved(str(error)))
                return
            if why := self._unreachable(self._channel):
                await self._drop()
                self._give_up("rejected", why)
                return
            try:
                await self._talk(self._channel)
            except (DeadlineError, ChannelClosed, ControlError) as error:
                if not self._left and (self.member.welcomed or str(error) != told):
                    # before there was a welcome, what does not change is not said every second
                    told = str(error)
                    _log.warning("control connection lost", node=self.member.identity.name, reason=told)
                if not self._left and not self.member.welcomed:
                    # whoever closes connections as soon as they stand is not asked all the time
                    await asyncio.sleep(PAUSE_SECONDS)
            finally:
                await self._drop()
            if not self._left and not self._session and not self.member.disconnected():
                self._give_up("coordinator_lost", self._unserved(""))
                return
            if self.member.joined or self.member.welcomed:
                patience = self._resume
                if self.member.needs_coordinator and self.member.silence is not None:
                    # in vain, unless it is the same coordinator, which may be there again soon
                    patience = min(patience, self.member.silence)
            else:
                patience -= loop.time() - started
                if patience <= 0:
                    rejected = self.member.rejected
                    why = rejected.reason if rejected is not None else told
                    text = (
                        f"no welcome from {self.address} within {self._join:g} s{f': {why}' if why else ''}"
                    )
                    self._give_up("coordinator_lost", text)
                    return

    def _unserved(self, reason: str) -> str:
        """Why a member whose coordinator is gone cannot go on."""
        if not self.member.needs_coordinator:
            return reason
        text = f"the connection to {self.address} is gone; a job on a switch cannot go on without its coordinator"
        return f"{text} ({reason})" if reason else text

    def _unreachable(self, channel: Channel) -> str:
        """Why others cannot reach this node where it says that it is; empty if they can, as far as is seen. Before there is a
        connection nobody may know where the coordinator is.
        """
        identity = self.member.identity
        if not channel.remote:
            return ""
        try:
            refuse_loopback(identity.name, address_of(identity.endpoint)[0], channel.remote)
        except AddressError as error:
            return str(error)
        return ""

    async def _reach(self, seconds: float) -> Channel:
        """A connection. Raises :class:`DeadlineError`: also files with keys that are gone are waited for, since they may be
        about to be replaced.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        told = ""
        while True:
            try:
                left = max(0.0, deadline - loop.time())
                # no other process than the one that welcomed it can serve such a member: without one there is none
                listens = self.member.needs_coordinator
                return await connect(self.address, left, keys=self._keys, listens=listens)
            except KeyFileError as error:
                if loop.time() + PAUSE_SECONDS > deadline:
                    raise DeadlineError(f"connecting to {self.address}", seconds, str(error)) from None
                if str(error) != told:
                    told = str(error)
                    _log.warning("not connected yet", node=self.member.identity.name, reason=told)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _talk(self, channel: Channel) -> None:
        member = self.member
        if self._session and not await self._continue(channel):
            self._session = ""
            if not member.disconnected():
                raise ChannelClosed(f"{channel.peer} does not know this member any more")
        if not self._session:
            self._delivery = Delivery()
            member.connected()
        self._open = True
        self.flush()
        while True:
            waiting_for = "Welcome" if not member.welcomed else "a word"
            seconds = member.silence if member.welcomed and member.silence else WELCOME_SECONDS
            self._take(await channel.receive(seconds, waiting_for), channel)
            for more in channel.take():
                self._take(more, channel)
            self.flush()
            self._changed.set()
            self._wake()
            if member.rejected is not None:
                self._session = ""
                if member.rejected.retry_after is None:
                    self._give_up("rejected", member.rejected.reason)
                    return
                _log.warning("the coordinator asks to wait", reason=member.rejected.reason)
                await asyncio.sleep(member.rejected.retry_after)
                return
            if member.failed is not None:
                self._give_up(member.failed.cause, member.failed.message)
                return
            if member.stopped is not None:
                _log.warning("the coordinator has stopped", reason=member.stopped)
                member.stopped = None

    async def _continue(self, channel: Channel) -> bool:
        """Go on over another connection; False if there is nobody who could."""
        channel.post(Continue(session=self._session, heard=self._delivery.received))
        answer = await channel.receive(WELCOME_SECONDS, "an answer to Continue")
        if (
            not isinstance(answer, Continued)
            or not answer.known
            or not self._delivery.continues(answer.heard)
        ):
            return False
        for frame in self._delivery.lacking(answer.heard):
            channel.post_frame(frame)
        _log.info("control connection continued", node=self.member.identity.name)
        return True

    def _take(self, message: Message, channel: Channel) -> None:
        """One message of the coordinator."""
        if isinstance(message, Heard):
            self._delivery.heard(message.count)
            return
        count = self._delivery.take()
        if count is not None:
            channel.post(Heard(count=count))
        if isinstance(message, Welcome):
            self._session = message.session
            if not message.session:
                self._delivery.keep_nothing()
        self.member.receive(message, asyncio.get_running_loop().time())

    def _give_up(self, cause: str, text: str) -> None:
        self.member.abandon(Failed(cause, text))
        self._wake()

    async def _drop(self) -> None:
        channel, self._channel = self._channel, None
        self._open = False
        self._changed.set()
        if channel is None:
            return
        if self._session and not self._left and self.member.failed is None and not channel.closed:
            with contextlib.suppress(ChannelClosed):
                # this end's closing is not its death
                channel.post(Away())
        await channel.close()

    async def until(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until a condition on the member holds. Raises :class:`DeadlineError`; returns early if it failed."""
        try:
            async with asyncio.timeout(seconds):
                while not condition() and self.member.failed is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{self.member.identity.name}: waiting for {what} from {self.address}", seconds
            ) from None

    async def leave(self, reason: str) -> None:
        """Say good-bye and close; :meth:`run` ends.

        The coordinator closes when it has heard. What it has sent before is read until then: on a connection that is closed it
        could not be sent, and this node would be taken for lost, not for one that has left.
        """
        self._left = True
        self.member.leave(reason)
        self.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while self._channel is not None:
                    self._changed.clear()
                    await self._changed.wait()
        await self._drop()
