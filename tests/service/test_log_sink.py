"""Logging never breaks service: whatever becomes of the reader, and whatever is logged, whoever logs goes on."""

import contextlib
import errno
import io
import json
import logging
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog

from inanet.service import log_sink, logs
from inanet.service.log_sink import LogSink
from inanet.service.logs import RATE_BURST, RATE_SECONDS, RateLimiter, configure
from inanet.service.strangers import MINUTE, Strangers


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


def text(stack: contextlib.ExitStack, fd: int) -> TextIO:
    stream = os.fdopen(fd, "w")

    def close() -> None:
        with contextlib.suppress(OSError):
            stream.close()

    stack.callback(close)
    return stream


def full_device(stack: contextlib.ExitStack) -> TextIO:
    return text(stack, os.open("/dev/full", os.O_WRONLY))


def pipe_without_reader(stack: contextlib.ExitStack) -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return text(stack, writer)


def pipe_nobody_reads(stack: contextlib.ExitStack) -> TextIO:
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    return text(stack, writer)


def nonblocking_pipe_nobody_reads(stack: contextlib.ExitStack) -> TextIO:
    stream = pipe_nobody_reads(stack)
    os.set_blocking(stream.fileno(), False)
    return stream


def socket_without_peer(stack: contextlib.ExitStack) -> TextIO:
    one, other = socket.socketpair()
    other.close()
    return text(stack, one.detach())


def socket_nobody_reads(stack: contextlib.ExitStack) -> TextIO:
    one, other = socket.socketpair()
    stack.enter_context(other)
    return text(stack, one.detach())


def read_only(stack: contextlib.ExitStack) -> TextIO:
    return text(stack, os.open("/dev/null", os.O_RDONLY))


def closed(stack: contextlib.ExitStack) -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


def closed_descriptor(stack: contextlib.ExitStack) -> TextIO:
    stream = text(stack, os.open("/dev/null", os.O_WRONLY))
    stream.close()
    return stream


def terminal_that_is_gone(stack: contextlib.ExitStack) -> TextIO:
    parent, child = pty.openpty()
    os.close(parent)
    return text(stack, child)


def longest_file(stack: contextlib.ExitStack) -> TextIO:
    """One that has the size that RLIMIT_FSIZE allows."""
    file = stack.enter_context(tempfile.TemporaryFile("w"))  # noqa: SIM115 - the stack closes it
    file.truncate(1 << 20)
    file.seek(1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    return file


def nothing(stack: contextlib.ExitStack) -> None:
    """As where standard error is closed when Python starts."""


READERS: list[Callable[[contextlib.ExitStack], TextIO | None]] = [
    full_device,
    pipe_without_reader,
    pipe_nobody_reads,
    nonblocking_pipe_nobody_reads,
    socket_without_peer,
    socket_nobody_reads,
    read_only,
    closed,
    closed_descriptor,
    terminal_that_is_gone,
    longest_file,
    nothing,
]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("format", ["pretty", "json", "plain"])
def test_who_logs_goes_on(
    reader: Callable[[contextlib.ExitStack], TextIO | None],
    format: logs.Format,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    written = configure("info", format, stream=reader(stack), environ={})
    stack.callback(written.sink.close)
    for number in range(1500):
        structlog.get_logger().critical("x" * 400, number=number)
    assert written.sink.unwritten > 0
    logging.getLogger("asyncio").error("from a library")
    written.look()


def test_each_errno_is_told_once_lines_get_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ECONNRESET, errno.ENOBUFS):
        with tempfile.TemporaryFile("w+") as file:
            configure("info", "json", stream=file, environ={})
            write = os.write

            def fail(fd: int, data: bytes, number: int = number, own: int = file.fileno()) -> int:
                if fd == own:
                    raise OSError(number, os.strerror(number))
                return write(fd, data)  # noqa: B023 - the same in all turns

            with monkeypatch.context() as patched:
                patched.setattr(os, "write", fail)
                for _ in range(3):
                    structlog.get_logger().info("lost")
            structlog.get_logger().info("there")
            file.seek(0)
            lines = [json.loads(line) for line in file]
            assert [line["event"] for line in lines] == ["there", "log lines were not written"]
            assert (lines[1]["lines"], lines[1]["reason"]) == (3, os.strerror(number))


def test_a_line_that_was_cut_off_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile("w+") as file:
        sink = LogSink(file, lambda lines, reason: None)
        answers: list[int | OSError] = [3, OSError(errno.ENOSPC, "full"), 1, OSError(errno.ENOSPC, "full")]
        write = os.write

        def some(fd: int, data: bytes) -> int:
            if fd != file.fileno() or not answers:
                return write(fd, data)
            answer = answers.pop(0)
            if isinstance(answer, OSError):
                raise answer
            return write(fd, data[:answer])

        monkeypatch.setattr(os, "write", some)
        for line in ("first", "second", "third"):
            sink.write(line)
        file.seek(0)
        assert file.read().splitlines()[-1] == "third"
        assert sink.unwritten == 2


def test_what_a_slow_reader_leaves_is_kept_in_order_and_bounded() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        told: list[tuple[int, str]] = []
        sink = LogSink(stream, lambda lines, reason: told.append((lines, reason)))
        for number in range(60_000):
            sink.write(f"{number:08}")
        assert sink._waiting <= log_sink.ROOM
        found = b""
        while sink._lines:
            found += os.read(reader, 1 << 16)
            sink.flush()
        found += os.read(reader, 1 << 16)
    os.close(reader)
    numbers = [int(line) for line in found.split()]
    assert numbers == list(range(len(numbers)))
    assert told == [(60_000 - len(numbers), "its reader does not read")]


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


@pytest.mark.parametrize("format", ["pretty", "json", "plain"])
@pytest.mark.parametrize(
    "value", [_Unprintable(), "\ud800", b"\xff", float("nan"), {1: {2, 3}}, "\0\x1b[2J", 1 << 5000]
)
def test_whatever_is_logged_does_not_raise(format: logs.Format, value: Any) -> None:
    with tempfile.TemporaryFile("w+") as file:
        written = configure("info", format, stream=file, environ={})
        structlog.get_logger().warning("odd", value=value)
        structlog.get_logger().warning("even")
        file.seek(0)
        assert "even" in file.read()
        assert written.sink.unwritten <= 1


@pytest.mark.parametrize("format", ["pretty", "json", "plain"])
def test_exception_tells_the_exception(format: logs.Format) -> None:
    stream = io.StringIO()
    configure("info", format, stream=stream, environ={})
    try:
        _ = {}["missing key"]
    except KeyError:
        structlog.get_logger().bind(role="ps").exception("broke", peer="w0")
    text = stream.getvalue()
    assert "Traceback" in text
    assert "KeyError" in text
    assert "missing key" in text
    assert "error" in text


# ---------------------------------------------------------------- floods


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def passed(limiter: RateLimiter, event: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(limiter(None, event["level"], event))
    except structlog.DropEvent:
        return None


STRANGERS: dict[str, Callable[[int], dict[str, str]]] = {
    "port": lambda n: {"reason": f"10.0.0.7:{n} closed the connection"},
    "length": lambda n: {"reason": f"from it: frame of {n} B announced, allowed are 1048576"},
    "name": lambda n: {"reason": f"host 'w{n}' has another token than this coordinator"},
    "name without a digit": lambda n: {"reason": f"host {'x' * n!r} is refused"},
    "name in other quotes": lambda n: {"reason": f"host {chr(39) * n + 'o!'!r} is refused"},
    "hexadecimal": lambda n: {"reason": f"unknown kind of message: {n:08x}ab"},
    "text": lambda n: {"reason": "a" * n},
    "address of the socket": lambda n: {"reason": "no hello", "peer": f"10.0.0.7:{n}"},
}


@pytest.mark.parametrize("what", STRANGERS)
def test_lines_a_stranger_can_cause_are_limited_by_kind(what: str) -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    lines = [
        passed(
            limiter,
            {"level": "info", "event": "control connection ended", "peer": f"10.0.0.7:{n}"}
            | STRANGERS[what](n),
        )
        for n in range(1, 2000)
    ]
    assert sum(line is not None for line in lines) <= 3 * RATE_BURST
    # others are told meanwhile
    assert passed(limiter, {"level": "warning", "event": "lost", "peer": "w0"})
    clock.now = RATE_SECONDS
    summaries = list(limiter.left_out())
    assert summaries[0]["of"] == "control connection ended"
    if what != "text":
        assert str(summaries[0]["most_from"]).startswith("10.0.0.7 (")
    assert len(summaries) <= 2
    assert sum(int(str(one["suppressed"])) for one in summaries) >= 1999 - 3 * RATE_BURST
    assert not list(limiter.left_out())


def test_addresses_that_caused_most_are_named() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    for host, count in {"10.0.0.1": 50, "10.0.0.2": 300, "10.0.0.3": 7, "10.0.0.4": 90}.items():
        for port in range(count):
            passed(limiter, {"level": "info", "event": "refused", "peer": f"{host}:{port}"})
    clock.now = RATE_SECONDS
    line = passed(limiter, {"level": "info", "event": "refused", "peer": "10.0.0.5:1"})
    assert line is not None
    assert line["suppressed"] == 447 - RATE_BURST
    assert line["most_from"] == "10.0.0.2 (300), 10.0.0.4 (90), 10.0.0.1 (50)"


def test_strangers_at_a_data_port_are_told_once_a_minute_and_kind() -> None:
    strangers = Strangers()
    drops = {"bad_magic": 0, "short": 0, "duplicate": 10**6, "stale_round": 5}
    told = []
    for second in range(0, 180, 5):
        drops["bad_magic"] += 1000
        drops["short"] += second == 60
        told += [(second, *line) for line in strangers.seen(drops, float(second))]
    assert [line[:2] for line in told if line[1] == "bad_magic"] == [
        (0, "bad_magic"),
        (60, "bad_magic"),
        (120, "bad_magic"),
    ]
    assert [line for line in told if line[1] != "bad_magic"] == [(60, "short", 1, 1)]
    assert sum(line[2] for line in told if line[1] == "bad_magic") == 25_000
    assert MINUTE == 60.0


# ---------------------------------------------------------------- a daemon

_READERS = ["/dev/full", "no reader", "closed"]


@pytest.mark.processes
@pytest.mark.parametrize("reader", _READERS)
def test_a_daemon_serves_on_and_ends_with_0(reader: str, tmp_path: Path) -> None:
    from tests.daemons.processes import PATIENCE, ROOT, config, toy_command

    address = str(tmp_path / "notify")
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(address)
        channel.settimeout(PATIENCE)
        command = toy_command("--config", str(config(tmp_path, "a0")))
        pipe: tuple[int, int] | None = None
        if reader == "closed":
            command = ["sh", "-c", 'exec "$0" "$@" 2>&-', *command]
        if reader == "no reader":
            pipe = os.pipe()
            os.close(pipe[0])
        stderr = pipe[1] if pipe else stack.enter_context(open("/dev/full", "w"))
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "NOTIFY_SOCKET": address}, stderr=stderr
        )
        if pipe:
            os.close(pipe[1])
        try:

            def until(word: str) -> None:
                while word not in channel.recv(4096).decode():
                    pass

            until("READY")
            for _ in range(3):
                process.send_signal(signal.SIGHUP)
                until("RELOADING")
                until("READY")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()
