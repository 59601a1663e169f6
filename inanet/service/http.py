"""Pages of a daemon over HTTP/1.1, served by its own event loop: a few connections, each for a short time.

Clients are strangers. One that is slow, idle, or speaks something else costs one of :data:`MOST` connections for at most
:data:`SECONDS`; when all are taken, the one that has been quiet for longest makes room. There is no thread, no task, and no
request body.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import parse_qs, urlsplit

import h11

from inanet.service.addresses import Resolved
from inanet.service.exits import Failure

#: Connections at a time.
MOST = 64
#: Seconds in which a request must have come whole, its answer have been read, and the next one have begun.
SECONDS = 10.0
#: Bytes of a request's line and headers.
MOST_HEADERS = 8 << 10
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks: the values of each parameter, and its ``Accept`` header."""

    parameters: Mapping[str, list[str]]
    accept: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A page."""

    content_type: str
    body: bytes


Page = Callable[[Request], Answer]


class HttpServer:
    """Serves ``pages`` by their paths; made by :meth:`open`, inside a running loop. ``section`` is that of its ``listen``."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self.port = 0
        #: connections closed to make room for others, and requests that were none
        self.evicted = self.malformed = 0
        #: the one that has been quiet for longest first
        self._clients: dict[_Client, None] = {}
        self._server: asyncio.Server | None = None

    @classmethod
    async def open(cls, address: Resolved, section: str, pages: Mapping[str, Page]) -> "HttpServer":
        """Listen on ``address`` (port 0: any). Raises :class:`Failure` naming the address if it cannot be had."""
        server = cls(pages)
        loop = asyncio.get_running_loop()
        try:
            server._server = await loop.create_server(
                lambda: _Client(server), address.address, address.port, backlog=_BACKLOG
            )
        except OSError as error:
            where = f"{address.address}:{address.port}"
            raise Failure(
                f"cannot serve {section} on {where} ({error.strerror}): change {section}.listen, or end what "
                f"listens there ('ss -ltnp sport = {address.port}' shows it)"
            ) from error
        server.port = server._server.sockets[0].getsockname()[1]
        return server

    def enter(self, client: "_Client") -> None:
        """A client has come, or has made itself heard: it is the last to make room."""
        self._clients.pop(client, None)
        if len(self._clients) >= MOST:
            oldest = next(iter(self._clients))
            self.evicted += 1
            self.leave(oldest)
            oldest.abort()
        self._clients[client] = None

    def leave(self, client: "_Client") -> None:
        """A client is gone."""
        self._clients.pop(client, None)

    @property
    def clients(self) -> int:
        """Connections now."""
        return len(self._clients)

    def close(self) -> None:
        """Stop listening and close all connections. Idempotent."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.abort()


class _Client(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._request: h11.Request | None = None
        #: the client does not read its answer
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no classes of asyncio
        self._transport = connected = cast(asyncio.Transport, transport)
        # one answer is as much as waits for a client that does not read
        connected.set_write_buffer_limits(0)
        self._server.enter(self)
        self._again()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.leave(self)
        for handle in (self._timer, self._soon):
            if handle is not None:
                handle.cancel()
        self._transport = self._timer = self._soon = None

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _again(self) -> None:
        """A request may begin: its time, too."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SECONDS, self.abort)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._go_on()

    def data_received(self, data: bytes) -> None:
        if self._http.their_state is h11.ERROR:
            return
        with contextlib.suppress(h11.RemoteProtocolError):
            self._http.receive_data(data)
        if self._transport is not None and (self._full or self._soon is not None):
            # requests ahead of their answers wait in the kernel
            self._transport.pause_reading()
            return
        self._go_on()

    def _go_on(self) -> None:
        """Act on what has come, one request in a turn of the loop."""
        self._soon = None
        transport = self._transport
        if transport is None or transport.is_closing() or self._full:
            return
        try:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._request = event
                self._server.enter(self)
                event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._server.malformed += 1
            self._refuse(error.error_status_hint, "this is no request that is understood here")
            return
        if isinstance(event, h11.Data):
            self._refuse(413, "no body is taken here")
        elif isinstance(event, h11.EndOfMessage):
            self._respond()
        elif event is h11.NEED_DATA:
            transport.resume_reading()
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            transport.close()

    def _respond(self) -> None:
        request = self._request
        assert request is not None
        try:
            target = urlsplit(request.target.decode("latin-1"))
            parameters = parse_qs(target.query, keep_blank_values=True, max_num_fields=100)
        except ValueError:
            self._server.malformed += 1
            self._refuse(400, "this is no address of a page")
            return
        page = self._server.pages.get(target.path)
        if request.method not in (b"GET", b"HEAD"):
            self._refuse(405, "GET and HEAD are what there is", [("Allow", "GET, HEAD")])
            return
        if page is None:
            self._refuse(404, f"there is {', '.join(sorted(self._server.pages))}")
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
        answer = page(Request(parameters, headers.get("accept", "")))
        self._write(200, answer.content_type, answer.body, [])
        if self._http.our_state is h11.MUST_CLOSE or self._transport is None:
            if self._transport is not None:
                self._transport.close()
            return
        self._http.start_next_cycle()
        self._again()
        # whoever sends many at once has others served in between
        self._soon = asyncio.get_running_loop().call_soon(self._go_on)

    def _refuse(self, status: int, text: str, headers: list[tuple[str, str]] | None = None) -> None:
        """Say why not, and close."""
        with contextlib.suppress(h11.LocalProtocolError):
            body = f"{text}\n".encode()
            self._write(
                status, "text/plain; charset=utf-8", body, [*(headers or []), ("Connection", "close")]
            )
        if self._transport is not None:
            self._transport.close()

    def _write(self, status: int, kind: str, body: bytes, headers: list[tuple[str, str]]) -> None:
        about = [("Content-Type", kind), ("Content-Length", str(len(body))), *headers]
        head = self._request is not None and self._request.method == b"HEAD"
        pieces = [self._http.send(h11.Response(status_code=status, headers=about))]
        pieces += [] if head else [self._http.send(h11.Data(data=body))]
        pieces.append(self._http.send(h11.EndOfMessage()))
        if self._transport is not None:
            self._transport.write(b"".join(piece for piece in pieces if piece))
