"""Asking a coordinator what there is: one connection, one question, one answer."""

from inanet.aio.channel import Channel, connect
from inanet.messages.control import PROTOCOL, Reject
from inanet.messages.registration import Overview, Query
from inanet.service.exits import Failure
from inanet.trust.certificates import Keys


class QueryRefused(Failure):
    """The coordinator does not answer this question, and says why."""


async def ask(address: str, token: str, keys: Keys | None, seconds: float) -> Overview:
    """The overview of the coordinator at ``address``.

    Raises :class:`QueryRefused`, :class:`~inanet.aio.channel.DeadlineError` after ``seconds``, and what a channel raises
    when it breaks.
    """
    channel = await connect(address, seconds, keys=keys)
    try:
        return await overview_of(channel, token, seconds)
    finally:
        await channel.close()


async def overview_of(channel: Channel, token: str, seconds: float, nonce: int = 0) -> Overview:
    """The same over a connection that stands; with a ``nonce``, a probe of multicast is sent before the answer.

    Raises what :func:`ask` raises.
    """
    channel.post(Query(protocol=PROTOCOL, token=token, nonce=nonce))
    while True:
        message = await channel.receive(seconds, "an overview")
        if isinstance(message, Overview):
            return message
        if isinstance(message, Reject):
            raise QueryRefused(f"{channel.peer} does not answer: {message.reason}")
