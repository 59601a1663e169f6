"""A daemon's standing connection: it registers, and reports every heartbeat what its machine has to spare.

Nothing depends on it where a configuration has the trees; a manager plans with it. So a coordinator that does not
answer, or refuses, is no error of the daemon: it is tried again for as long as the daemon runs. The log warns of it, once
each time that it is gone.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog

from inanet.aio.channel import HUNG_UP, UNRESOLVED, Channel, ChannelClosed, DeadlineError, connect
from inanet.aio.uplink import FAREWELL_SECONDS, WELCOME_SECONDS
from inanet.messages.codec import ControlError
from inanet.messages.control import PROTOCOL, Leave, Ping, Pong, Reject, Stats
from inanet.messages.fields import NodeRole
from inanet.messages.registration import Register, Registered
from inanet.service.metrics import Sample
from inanet.service.resources import HostResources
from inanet.trust.certificates import KeyFileError, Keys

#: Seconds for which a connection is tried before the log says that there is none: at first, when daemons that are started
#: together have found each other, and from then on; and pauses after a refusal.
FIRST_SECONDS = 5.0
ATTEMPT_SECONDS = 60.0
REFUSED_SECONDS = 10.0
#: and after a connection that ended before anything was said on it
LOST_SECONDS = 1.0
_log: Any = structlog.get_logger("inanet.registration")


class Registration:
    """Keeps a node registered at the coordinator at ``address``. ``figures()`` are its counters."""

    def __init__(
        self,
        address: str,
        name: str,
        role: NodeRole,
        token: str,
        *,
        machine: HostResources,
        endpoint: str = "",
        software: str = "",
        figures: Callable[[], Mapping[str, object]] = dict,
        keys: Keys | None = None,
    ) -> None:
        self._address = address
        self._card = Register(
            protocol=PROTOCOL,
            name=name,
            role=role,
            token=token,
            address=endpoint,
            cores=machine.cores,
            memory=machine.memory,
            link_bps=machine.link_bps,
            software=software,
        )
        self._machine = machine
        self._figures = figures
        self._keys = keys
        #: whether it is registered now
        self.registered = False
        self._channel: Channel | None = None
        self._left = asyncio.Event()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Register, report, and again when the connection breaks; until it has left, or is cancelled."""
        try:
            await self._stay_registered()
        finally:
            self._over.set()

    async def leave(self, reason: str) -> None:
        """Say good-bye, and wait until the coordinator has heard; :meth:`run` ends, unless it is waiting for a connection."""
        self._left.set()
        if self._channel is None:
            return
        with contextlib.suppress(ChannelClosed):
            self._channel.post(Leave(reason=reason))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._over.wait()

    async def _stay_registered(self) -> None:
        refused = ""
        missed = False
        while not self._left.is_set():
            pause = 0.0
            try:
                seconds = ATTEMPT_SECONDS if missed else FIRST_SECONDS
                channel = await connect(self._address, seconds, keys=self._keys)
            except DeadlineError as error:
                if missed:
                    _log.info("not registered yet", node=self._card.name, reason=str(error))
                else:
                    _log.warning(
                        "coordinator unreachable",
                        node=self._card.name,
                        address=self._address,
                        reason=str(error),
                        fix=f"{_fix(error.reason)}; it is tried until then, and 'ina doctor' looks from here",
                    )
                missed = True
                continue
            except KeyFileError as error:
                # files that are being replaced: there is nobody whom the end of this task would tell
                if str(error) != refused:
                    refused = str(error)
                    _log.warning("not registered", node=self._card.name, reason=refused)
                await asyncio.sleep(REFUSED_SECONDS)
                continue
            missed = False
            self._channel = channel
            try:
                reject = await self._talk(channel)
                pause = reject.retry_after if reject.retry_after is not None else REFUSED_SECONDS
                if reject.reason != refused:
                    # once: what does not change is not said every ten seconds
                    refused = reject.reason
                    _log.warning("not registered", node=self._card.name, reason=refused)
            except (DeadlineError, ChannelClosed, ControlError) as error:
                if self._left.is_set():
                    return
                if self.registered:
                    _log.info("registration lost", node=self._card.name, reason=str(error))
                elif str(error) != refused:
                    refused = str(error)
                    _log.warning("not registered", node=self._card.name, reason=refused)
                # whoever closes connections as soon as they stand is not asked all the time
                pause = 0.0 if self.registered else LOST_SECONDS
            finally:
                self.registered, self._channel = False, None
                await channel.close()
            await asyncio.sleep(pause)

    async def _talk(self, channel: Channel) -> Reject:
        """Until the coordinator refuses. Raises what a channel raises when it is lost."""
        channel.post(self._card)
        loop = asyncio.get_running_loop()
        beat = WELCOME_SECONDS
        due = loop.time() + beat
        while True:
            try:
                message = await channel.receive(max(0.001, due - loop.time()), "Registered")
            except DeadlineError:
                if not self.registered:
                    raise
                due = loop.time() + beat
                self._report(channel)
                continue
            if isinstance(message, Reject):
                return message
            if isinstance(message, Ping):
                channel.post(Pong(nonce=message.nonce))
            elif isinstance(message, Registered):
                self.registered = True
                beat = max(0.05, message.heartbeat)
                due = loop.time() + beat
                _log.info("registered", node=self._card.name, epoch=message.epoch)
                self._report(channel)

    def samples(self) -> Iterator[Sample]:
        """Metrics, read at every scrape."""
        yield Sample("inanet_registered", float(self.registered))

    def _report(self, channel: Channel) -> None:
        channel.post(self._machine.report())
        counters = {
            name: value for name, value in self._figures().items() if type(value) is int and value >= 0
        }
        channel.post(Stats(counters=counters))


def _fix(reason: str) -> str:
    """What to do about a coordinator that is not reached for this reason."""
    if "certificate" in reason:
        return "mend the certificate that the reason is about: 'ina keys show' says whose one is, and until when it is good"
    if reason.startswith("TLS") or reason == HUNG_UP:
        return "set control.ca_file and key_file at the coordinator, too, or correct control.coordinator"
    if reason.startswith(UNRESOLVED):
        return "see to it that the name resolves, or give an IPv4 address in control.coordinator"
    return "start ina-manager, or the ina-ps that coordinates, or correct control.coordinator"
