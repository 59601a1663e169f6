"""Where a coordinator listens: one handler task for each control connection, over TCP, with TLS or without, or a Unix socket."""

import asyncio
import errno
import os
import resource
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog

from inanet.aio.channel import (
    Address,
    AddressError,
    Channel,
    ChannelClosed,
    DeadlineError,
    parse_address,
    reason_of,
)
from inanet.messages.codec import ControlError
from inanet.trust.certificates import HANDSHAKE_SECONDS, Keys

_log = structlog.get_logger("inanet.listening")
Handler = Callable[[Channel], Awaitable[None]]
#: connections that the kernel holds until they are taken, and seconds until it is asked again after it had none to give
_BACKLOG = 128
#: TLS handshakes at a time
MOST_HANDSHAKES = 128
_PAUSE = 0.1


class ControlServer:
    """Listens and runs one handler task per connection; made by :func:`serve`."""

    def __init__(self, handler: Handler, silence: float | None, keys: Keys | None = None) -> None:
        self._handler = handler
        self._keys = keys
        self._silence = silence
        self._channels: dict[asyncio.Task[None], Channel] = {}
        #: TLS handshakes under way, the oldest first
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._taking: asyncio.Task[None] | None = None
        #: half of the files that this process may open; those beyond that were refused
        self._most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._refused = 0
        self._server: asyncio.Server | None = None
        self._path = ""
        #: where it listens, with the port the system chose if 0 was asked for
        self.address = ""

    async def _listen(self, address: str, mode: int) -> None:
        target = parse_address(address)
        try:
            if target.path:
                _remove_stale(target.path)
                self._server = await asyncio.start_unix_server(self._accept, target.path)
                self._path = target.path
                os.chmod(target.path, mode)
                self.address = address
            elif self._keys is None:
                self._server = await asyncio.start_server(self._accept, target.host, target.port)
                port = self._server.sockets[0].getsockname()[1]
                self.address = str(Address(target.host, port))
            else:
                context = self._keys.server()
                listener = socket.create_server((target.host, target.port), backlog=_BACKLOG)
                listener.setblocking(False)
                self.address = str(Address(target.host, listener.getsockname()[1]))
                self._taking = asyncio.get_running_loop().create_task(self._take_all(listener, context))
        except OSError as error:
            hint = ""
            if error.errno == errno.EADDRINUSE:
                hint = (
                    "; change control.listen, or end what listens there "
                    f"('ss -ltnp sport = {target.port}' shows it)"
                )
            raise AddressError(f"cannot listen on {address}: {reason_of(error)}{hint}") from None

    async def _take_all(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Take connections and shake hands with each in a task: an asyncio server counts none before it has shown a
        certificate, and strangers who never do would take every descriptor there is.
        """
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, peer = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("control connection not taken", reason=reason_of(error))
                    await asyncio.sleep(_PAUSE)
                    continue
                if self._is_full():
                    connection.close()
                    continue
                if len(self._handshakes) >= MOST_HANDSHAKES:
                    # each takes memory, and a stranger needs nothing for one: the one that takes longest makes room
                    oldest = next(iter(self._handshakes))
                    del self._handshakes[oldest]
                    oldest.cancel()
                task = loop.create_task(self._shake_hands(connection, str(Address(*peer)), context))
                self._handshakes[task] = None
                task.add_done_callback(partial(self._shaken, connection))

    def _shaken(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():
            # perhaps before it began
            connection.close()

    async def _shake_hands(self, connection: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, self._accept, loop=loop)
        try:
            await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:
            _log.info("control connection ended", peer=peer, reason=f"no TLS handshake: {reason_of(error)}")

    def _is_full(self) -> bool:
        """Whether there are as many connections as may be; whoever opens more must not keep this process from what it has
        open already.
        """
        if len(self._channels) + len(self._handshakes) < self._most:
            return False
        self._refused += 1
        if self._refused.bit_count() == 1:
            _log.warning("control connection refused", refused=self._refused, reason="too many are open")
        return True

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # not a coroutine: asyncio would report its cancellation as an unheard exception. What shook hands was counted before
        if self._taking is None and self._is_full():
            writer.transport.abort()
            return
        channel = Channel(reader, writer, _peer_name(writer, self.address), self._silence)
        task = asyncio.get_running_loop().create_task(self._serve(channel))
        self._channels[task] = channel
        task.add_done_callback(self._ended)

    async def _serve(self, channel: Channel) -> None:
        try:
            await self._handler(channel)
            await channel.close()
        except (ControlError, ChannelClosed, DeadlineError) as error:
            _log.info("control connection ended", peer=channel.peer, reason=str(error))
        except Exception:
            _log.exception("control connection handler failed", peer=channel.peer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        # here and not in the task, which may be cancelled before it has run at all
        self._channels.pop(task).abort()

    async def close(self, seconds: float = 5.0) -> None:
        """Stop listening, cancel the handlers, remove the Unix socket. Idempotent.

        Raises :class:`DeadlineError` if a handler does not end within ``seconds``.
        """
        if self._server is not None:
            self._server.close()
        tasks = [*self._channels, *self._handshakes, *([self._taking] if self._taking is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=seconds)
            if running:
                raise DeadlineError(f"closing {self.address}: {len(running)} connections", seconds)
        if self._path:
            with suppress(FileNotFoundError):
                os.unlink(self._path)


async def serve(
    address: str,
    handler: Handler,
    silence: float | None = None,
    mode: int = 0o600,
    keys: Keys | None = None,
) -> ControlServer:
    """Listen on ``address`` and run ``handler(channel)`` for each connection, which is closed when it
    returns. With ``keys``, TCP connections are TLS, and only certificates of the same authority get in.

    Port 0 lets the system choose, see :attr:`ControlServer.address`. ``mode`` are the permissions of a Unix
    socket; a socket file left behind by a dead process is replaced, one of a live process is not. Raises
    :class:`AddressError`.
    """
    server = ControlServer(handler, silence, keys)
    await server._listen(address, mode)
    return server


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise AddressError(f"{path} exists and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise AddressError(f"cannot listen on unix:{path}: a running process listens there")


def _peer_name(writer: asyncio.StreamWriter, local: str) -> str:
    name = writer.get_extra_info("peername")
    if isinstance(name, tuple):
        return str(Address(str(name[0]), int(name[1])))
    return f"a client of {local}"
