"""Connections that break between processes that live: the member goes on over the next one, and nobody is told as lost."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import structlog
from structlog.testing import LogCapture

from inanet.aio.channel import Channel, ChannelClosed, connect
from inanet.aio.coordinator import Coordination
from inanet.aio.run_clock import RunClock
from inanet.aio.uplink import Uplink
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.control import Continue, Continued
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.tree.node import Node
from inanet.wire.endpoint import endpoint
from tests.aio.coordinator import PATIENCE, coordinating, hello

SPEC = TensorSpec("w", "f32", (1000,), "sum", ExponentMode.PROLOGUE)


@pytest.fixture
def logged() -> LogCapture:
    return LogCapture()


@pytest.fixture(autouse=True)
def capture(logged: LogCapture) -> None:
    structlog.configure(processors=[logged])


class Path:
    """The way from a member to its coordinator, which may be cut or hold everything back."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.holds = asyncio.Event()
        self.holds.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self.writers += [writer, back]

        async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    await self.holds.wait()
                    sink.write(data)
                sink.close()

        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    def cut(self) -> None:
        """Both ends see a connection that was reset."""
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def path_to(address: str) -> AsyncIterator[tuple[Path, str]]:
    path = Path(int(address.rpartition(":")[2]))
    server = await asyncio.start_server(path.carry, "127.0.0.1", 0)
    try:
        yield path, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        path.cut()
        path.holds.set()
        server.close()


class Job:
    """Two hosts and a parameter server; ``w0`` calls over a path that can be broken."""

    def __init__(self, stack: AsyncExitStack, coordination: Coordination, path: Path, through: str) -> None:
        self.coordination, self.path = coordination, path
        self.uplinks: dict[str, Uplink] = {}
        for number, (name, address) in enumerate(
            {"ps": coordination.address, "w1": coordination.address, "w0": through}.items()
        ):
            who = {"job": "train", "ranks": (int(name[1]),), "world": 2} if name != "ps" else {}
            identity = Identity(
                name, "worker" if who else "ps", "", endpoint("127.0.0.1", 9100 + number), 100, **who
            )
            uplink = Uplink(
                Member(Node(name, 64), identity), address, join=PATIENCE, resume=PATIENCE, wake=lambda: None
            )
            self.uplinks[name] = uplink
            task = asyncio.create_task(uplink.run())

            async def end(task: "asyncio.Task[None]" = task) -> None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            stack.push_async_callback(end)

    def member(self, name: str) -> Member:
        return self.uplinks[name].member

    async def joined(self) -> None:
        for name in ("w0", "w1"):
            await self.uplinks[name].until(lambda name=name: self.member(name).joined, "plan", PATIENCE)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.01)


@asynccontextmanager
async def job(**settings: float) -> AsyncIterator[Job]:
    async with (
        AsyncExitStack() as stack,
        coordinating(**settings) as coordination,
        path_to(coordination.address) as (path, through),
    ):
        running = Job(stack, coordination, path, through)
        await running.joined()
        yield running


async def away(running: Job) -> None:
    """The member itself gives the connection up, as after a long silence."""
    await running.uplinks["w0"]._drop()


async def silent(running: Job) -> None:
    """Nothing gets through until the member has given up; the coordinator hears of its end last."""
    running.path.holds.clear()
    channel = running.uplinks["w0"]._channel
    assert channel is not None
    await running.uplinks["w0"]._drop()
    await running.until(lambda: running.uplinks["w0"]._channel is not None)
    running.path.holds.set()


BREAKS: dict[str, Callable[[Job], Awaitable[None]]] = {"away": away, "silent": silent}


@pytest.mark.parametrize("how", BREAKS)
async def test_a_member_goes_on_over_another_connection(how: str, logged: LogCapture) -> None:
    async with job() as running:
        (number,) = running.coordination.coordinator.jobs
        failed: list[object] = []
        for times in range(3):
            first = running.uplinks["w0"]._channel
            await BREAKS[how](running)
            # said while there was no connection, and answered on the next one
            running.member("w0").begin(times + 1, SPEC, (), 0.0, failed.append)
            running.uplinks["w0"].flush()
            await running.until(lambda first=first: running.uplinks["w0"]._channel not in (None, first))
            await running.until(
                lambda number=number, times=times: (
                    running.coordination.coordinator.jobs[number].rounds.ledger.newest == times + 1
                )
            )
        assert not failed
        assert running.member("w0").failed is None
        events = [entry["event"] for entry in logged.entries]
        assert events.count("connection continued") >= 3
        assert not {"lost", "refused", "round failed", "job over"} & set(events)


async def test_messages_to_a_member_that_is_away_come_when_it_is_back() -> None:
    async with job() as running:
        (number,) = running.coordination.coordinator.jobs
        failed: list[object] = []
        running.member("w0").begin(1, SPEC, (), 0.0, failed.append)
        running.uplinks["w0"].flush()
        await running.until(lambda: running.coordination.coordinator.jobs[number].rounds.ledger.newest == 1)
        running.path.holds.clear()
        await running.uplinks["w0"]._drop()
        running.member("w1").refuse_mismatch(1, SPEC, 1, "they differ", failed.append)
        running.uplinks["w1"].flush()
        await running.until(lambda: len(failed) == 1)
        running.path.holds.set()
        await running.until(lambda: len(failed) == 2)
        assert len(set(map(str, failed))) == 1


async def test_a_member_whose_process_has_ended_is_lost_at_once(logged: LogCapture) -> None:
    async with job(silence=1e6) as running:
        running.path.cut()
        await running.until(lambda: not running.coordination.coordinator.jobs)
        events = [(entry["event"], entry.get("peer")) for entry in logged.entries]
        assert ("lost", "w0") in events
        # and only that one
        await running.until(lambda: ("left", "w1") in [(e["event"], e.get("peer")) for e in logged.entries])
        assert ("lost", "w1") not in [(entry["event"], entry.get("peer")) for entry in logged.entries]


async def test_one_that_said_it_was_away_and_does_not_come_is_lost_when_its_time_is_up(
    logged: LogCapture,
) -> None:
    async with job(silence=0.6) as running:
        running.path.holds.clear()
        await running.uplinks["w0"]._drop()
        running.uplinks["w0"]._left = True
        running.path.cut()
        running.path.holds.set()
        await running.until(lambda: not running.coordination.coordinator.jobs)
        assert ("lost", "w0") in [(entry["event"], entry.get("peer")) for entry in logged.entries]


@pytest.mark.parametrize("session", ["", "guess", "0" * 32])
async def test_nobody_takes_a_connection_over_without_its_secret(session: str) -> None:
    async with job() as running:
        channel = await connect(running.coordination.address, PATIENCE)
        channel.post(Continue(session=session, heard=0))
        answer = await channel.receive(PATIENCE)
        assert answer == Continued(known=False)
        # it may introduce itself like anybody
        channel.post(hello("w0"))
        assert (await channel.receive(PATIENCE)).kind == "reject"
        await channel.close()
        assert running.member("w0").failed is None
        assert running.uplinks["w0"].connected


async def test_a_clock_stands_still_while_its_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    clock = RunClock()
    monkeypatch.setattr(clock, "_loop", type("Loop", (), {"time": lambda self: now})())
    began = clock()
    for passes, seen in [(0.2, 0.2), (0.9, 0.9), (20.0, 0.25), (0.5, 0.5), (3600.0, 0.25)]:
        now += passes
        before, began = began, clock()
        assert began - before == pytest.approx(seen)
    assert clock.missed == pytest.approx(20.0 - 0.25 + 3600.0 - 0.25)
    monkeypatch.undo()
    clock.close()


_CLIENT = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1); sys.stdin.read()"


@pytest.mark.processes
async def test_the_kernel_of_a_stopped_process_acknowledges_and_that_of_a_dead_one_does_not() -> None:
    channels: list[Channel] = []
    server = await asyncio.start_server(lambda r, w: channels.append(Channel(r, w, "it")), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", _CLIENT, str(port)], stdin=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while not channels:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.01)
        (channel,) = channels
        os.kill(process.pid, signal.SIGSTOP)
        channel.post_frame(b"x" * 100)
        await asyncio.sleep(0.1)
        assert channel.acknowledged
        process.kill()
        process.wait()
        with pytest.raises(ChannelClosed):
            await channel.receive(PATIENCE)
        channel.abort()
        assert not channel.acknowledged
    finally:
        process.kill()
        process.communicate()
        server.close()


async def test_a_unix_socket_always_reaches() -> None:
    one, other = socket.socketpair()
    with other:
        reader, writer = await asyncio.open_unix_connection(sock=one)
        channel = Channel(reader, writer, "it")
        assert channel.acknowledged
        channel.abort()
