"""Clients of a daemon's pages are strangers: idle, slow, garbage, many. None costs a thread, a traceback or another's time."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from inanet.service import http
from inanet.service.addresses import Resolved
from inanet.service.http import MOST, Answer, HttpServer, Request
from inanet.service.metrics import MetricsPage, Sample, Scrape

PATIENCE = 20.0
BODY = b"x" * 100_000


@asynccontextmanager
async def serving() -> AsyncIterator[HttpServer]:
    def page(request: Request) -> Answer:
        return Answer("text/plain", BODY if "large" in request.parameters else b"page\n")

    server = await HttpServer.open(Resolved("127.0.0.1", 0, "here"), "page", {"/page": page})
    try:
        yield server
    finally:
        server.close()
        await asyncio.sleep(0)


async def call(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 24)


async def ask(server: HttpServer, data: bytes, *, ends: bool = False) -> bytes:
    """All that is answered until the server closes."""
    reader, writer = await call(server)
    writer.write(data)
    if ends:
        writer.write_eof()
    found = b""
    async with asyncio.timeout(PATIENCE):
        with suppress(ConnectionResetError):
            while some := await reader.read(1 << 16):
                found += some
    writer.close()
    return found


async def served(server: HttpServer) -> bool:
    return (await ask(server, b"GET /page HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\npage\n")


@pytest.fixture(autouse=True)
def _no_traceback(capfd: pytest.CaptureFixture[str]) -> "object":
    threads = threading.active_count()
    yield
    assert threading.active_count() <= threads
    assert "Traceback" not in capfd.readouterr().err


REQUESTS: dict[str, tuple[bytes, bytes]] = {
    "as browsers ask": (b"GET /page HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", b"200"),
    "as old clients ask": (b"GET /page HTTP/1.0\r\n\r\n", b"200"),
    "head": (b"HEAD /page HTTP/1.0\r\n\r\n", b"200"),
    "absolute": (b"GET http://h/page?a=b HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", b"200"),
    "another path": (b"GET /../etc/passwd HTTP/1.1\r\nHost: h\r\n\r\n", b"404"),
    "another method": (b"DELETE /page HTTP/1.1\r\nHost: h\r\n\r\n", b"405"),
    "a body": (b"POST /page HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nabcd", b"413"),
    "an endless body": (
        b"GET /page HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
        b"413",
    ),
    "no host": (b"GET /page HTTP/1.1\r\n\r\n", b"400"),
    "noise": (bytes(range(256)) * 4 + b"\r\n\r\n", b"400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", b"400"),
    "ssh": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"400"),
    "half a request": (b"GET /page HT", b""),
    "nothing": (b"", b""),
    "long headers": (b"GET /page HTTP/1.1\r\nHost: h\r\nA: " + b"a" * 100_000, b"431"),
    "a long line": (b"GET /" + b"a" * 100_000, b"431"),
    "many headers": (b"GET /page HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", b"4"),
    "many parameters": (b"GET /page?" + b"&".join([b"a=b"] * 50) + b" HTTP/1.0\r\n\r\n", b"200"),
    "too many parameters": (b"GET /page?" + b"&".join([b"a=b"] * 500) + b" HTTP/1.0\r\n\r\n", b"400"),
    "a target that is none": (b"GET http://[::1/page HTTP/1.0\r\n\r\n", b"400"),
    "a length that is none": (b"GET /page HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", b"400"),
}


@pytest.mark.parametrize("what", REQUESTS)
async def test_whatever_is_asked_is_answered_or_refused(what: str) -> None:
    data, status = REQUESTS[what]
    async with serving() as server:
        answer = await ask(server, data, ends=status == b"")
        assert answer.partition(b" ")[2][:3].startswith(status), answer[:200]
        assert await served(server)


async def test_a_connection_serves_many_requests_in_order() -> None:
    async with serving() as server:
        many = b"GET /page HTTP/1.1\r\nHost: h\r\n\r\n" * 300
        last = b"GET /page?large HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        found = await ask(server, many + last)
        assert found.count(b"HTTP/1.1 200") == 301
        assert found.endswith(BODY)


async def test_idle_clients_make_room_and_leave_together_unnoticed() -> None:
    async with serving() as server:
        idle = [await call(server) for _ in range(5 * MOST)]
        assert await served(server)
        assert server.clients <= MOST
        assert server.evicted >= 4 * MOST
        for _, writer in idle:
            writer.transport.abort()
        assert await served(server)
        async with asyncio.timeout(PATIENCE):
            while server.clients:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("said", [b"", b"GET /page HTTP/1.1\r\nHo", b"GET /page HTTP/1.1\r\nHost: h\r\n\r\n"])
async def test_who_says_no_more_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.05)
    async with serving() as server:
        assert (await ask(server, said)).count(b"200 ") == said.count(b"\r\n\r\n")


async def test_a_drop_at_a_time_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.2)
    async with serving() as server:
        reader, writer = await call(server)
        ends = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE):
            while not ends.done():
                writer.write(b"G")
                await asyncio.wait({ends}, timeout=0.01)
        with suppress(ConnectionError):
            assert b" 200 " not in ends.result()
        writer.close()


async def test_who_does_not_read_costs_one_answer_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SECONDS", 0.3)
    async with serving() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            with suppress(BlockingIOError):
                for _ in range(10_000):
                    deaf.send(b"GET /page?large HTTP/1.1\r\nHost: h\r\n\r\n")
            assert await served(server)
            async with asyncio.timeout(PATIENCE):
                while server.clients:  # noqa: ASYNC110 - bounded
                    await asyncio.sleep(0.01)


def test_uvloop_serves_as_well() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for what in REQUESTS:
            runner.run(test_whatever_is_asked_is_answered_or_refused(what))
        runner.run(test_a_connection_serves_many_requests_in_order())
        runner.run(test_idle_clients_make_room_and_leave_together_unnoticed())


def test_a_page_that_is_asked_for_all_the_time_is_not_made_all_the_time() -> None:
    now, made = [0.0], [0]

    def source() -> list[Sample]:
        made[0] += 1
        return [Sample("inanet_jobs", made[0])]

    scrape = Scrape()
    scrape.add(source)
    page = MetricsPage(scrape, lambda: now[0])
    for _ in range(100):
        now[0] += 0.01
        assert b"inanet_jobs" in page(Request({}, "")).body
    assert made[0] <= 5
    assert "openmetrics" in page(Request({}, "application/openmetrics-text; version=1.0.0")).content_type
