"""Asking a coordinator what there is: one connection, one question, one answer."""

from inanet.aio.channel import connect
from inanet.control.exits import Failure
from inanet.control.messages import PROTOCOL, Reject
from inanet.control.standing import Overview, Query
from inanet.control.trust import Keys


class QueryRefused(Failure):
    """The coordinator does not answer this question, and says why."""


async def ask(address: str, token: str, keys: Keys | None, seconds: float) -> Overview:
    """The overview of the coordinator at ``address``.

    Raises :class:`QueryRefused`, :class:`~inanet.aio.channel.DeadlineError` after ``seconds``, and what a channel raises
    when it breaks.
    """
    channel = await connect(address, seconds, keys=keys)
    try:
        channel.post(Query(protocol=PROTOCOL, token=token))
        while True:
            message = await channel.receive(seconds, "an overview")
            if isinstance(message, Overview):
                return message
            if isinstance(message, Reject):
                raise QueryRefused(f"{address} does not answer: {message.reason}")
    finally:
        await channel.close()
