"""Whether multicast gets from the coordinator to this machine: one datagram on the way that control connections take."""

import asyncio
import secrets
import socket
import struct
from dataclasses import dataclass

import structlog

from inanet.aio.channel import connect
from inanet.aio.query import overview_of
from inanet.trust.certificates import Keys

#: A probe: these bytes, then the nonce, 64 bits, big-endian.
_MAGIC = b"inanet-probe"
_NONCE = struct.Struct(">Q")
#: Times that the coordinator is asked: one datagram may be lost, and switches take a moment to learn who listens.
_ATTEMPTS = 4
_log = structlog.get_logger("inanet.reaching")


@dataclass(frozen=True, slots=True)
class Reach:
    """``local`` is the address of this end of the control connection, empty for a Unix socket; ``downlink`` how the
    coordinator has results sent; ``heard`` whether a datagram to ``group`` (``address:port``) got here.
    """

    local: str
    downlink: str
    group: str
    heard: bool


def send_probe(local: str, group: str, port: int, nonce: int) -> None:
    """Send a probe out of the interface that has the address ``local``; what the system says against it is logged."""
    if not local:
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(local))
            sender.sendto(_MAGIC + _NONCE.pack(nonce), (group, port))
    except OSError as error:
        _log.warning("multicast probe not sent", group=group, interface=local, reason=str(error))


async def reach(address: str, token: str, keys: Keys | None, seconds: float) -> Reach:
    """Ask the coordinator at ``address`` for probes, and listen for them on the interface that leads there.

    Takes up to ``seconds`` if none comes. Raises what :func:`inanet.aio.query.ask` raises, and ``OSError`` if the group
    cannot be joined.
    """
    channel = await connect(address, seconds, keys=keys)
    try:
        seen = await overview_of(channel, token, seconds)
        if not channel.local:
            return Reach("", seen.downlink, seen.group, heard=False)
        group, _, port = seen.group.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
            listener.setblocking(False)
            # daemons of this machine may listen at the same port, for groups of their own
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((group, int(port)))
            membership = socket.inet_aton(group) + socket.inet_aton(channel.local)
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            heard = False
            for _ in range(_ATTEMPTS):
                nonce = secrets.randbits(62) + 1
                await overview_of(channel, token, seconds, nonce)
                if heard := await _comes(listener, nonce, seconds / _ATTEMPTS):
                    break
        return Reach(channel.local, seen.downlink, seen.group, heard)
    finally:
        await channel.close()


async def _comes(listener: socket.socket, nonce: int, seconds: float) -> bool:
    """Whether the probe with this nonce arrives in time; others, and packets of jobs, are passed over."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            while await loop.sock_recv(listener, 2048) != _MAGIC + _NONCE.pack(nonce):
                pass
    except TimeoutError:
        return False
    return True
