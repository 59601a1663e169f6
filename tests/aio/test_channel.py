"""Control connections on both event loops: every wait ends, and says what it waited for and with whom."""

import asyncio
import os
import socket
import ssl
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from inanet.aio import channel as module
from inanet.aio.channel import (
    AddressError,
    Channel,
    ChannelClosed,
    DeadlineError,
    connect,
    parse_address,
)
from inanet.aio.control_server import ControlServer, serve
from inanet.messages.codec import ControlError, encode
from inanet.messages.control import Message, Ping, Pong, Stats, Stop

Test = Callable[[], Awaitable[None]]
Run = Callable[[Test], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine function on one of the loops; leftover tasks and unheard exceptions are failures."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def runner(test: Test) -> None:
        problems: list[object] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
            async with asyncio.timeout(20):
                await test()

        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(main())
        assert problems == []

    return runner


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path / 'control.sock'}"


async def echo(channel: Channel) -> None:
    async for message in channel:
        await channel.send(message)


def test_messages_go_both_ways_in_order(run: Run, address: str) -> None:
    async def test() -> None:
        server = await serve(address, echo)
        channel = await connect(server.address, 5)
        for nonce in range(100):
            channel.post(Ping(nonce=nonce))
        got = [await channel.receive(5, "an echo") for _ in range(100)]
        assert got == [Ping(nonce=nonce) for nonce in range(100)]
        await channel.close()
        await server.close()

    run(test)


def test_the_end_of_a_peer_ends_the_iteration(run: Run, address: str) -> None:
    async def test() -> None:
        async def three(channel: Channel) -> None:
            for nonce in range(3):
                channel.post(Pong(nonce=nonce))

        server = await serve(address, three)
        channel = await connect(server.address, 5)
        assert [message async for message in channel] == [Pong(nonce=nonce) for nonce in range(3)]
        with pytest.raises(ChannelClosed, match="closed the connection"):
            await channel.receive(5)
        await channel.close()
        await channel.close()
        assert channel.closed
        with pytest.raises(ChannelClosed, match="is closed"):
            channel.post(Ping(nonce=1))
        await server.close()
        await server.close()

    run(test)


def test_tcp_sends_small_messages_at_once(run: Run) -> None:
    async def test() -> None:
        options: list[int] = []

        async def look(channel: Channel) -> None:
            raw = channel._writer.get_extra_info("socket")
            options.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        server = await serve("127.0.0.1:0", look)
        channel = await connect(server.address, 5)
        raw = channel._writer.get_extra_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(ChannelClosed):
            await channel.receive(5)
        assert options == [1]
        await channel.close()
        await server.close()

    run(test)


def test_a_wait_names_what_and_whom(run: Run, address: str) -> None:
    async def test() -> None:
        server = await serve(address, echo)
        channel = await connect(server.address, 5)
        with pytest.raises(DeadlineError) as caught:
            await channel.receive(0.01, "Welcome")
        assert str(caught.value) == f"waiting for Welcome from {server.address}: nothing within 0.01 s"
        assert caught.value.seconds == 0.01
        # the connection is still good
        await channel.send(Ping(nonce=1))
        assert await channel.receive(5) == Ping(nonce=1)
        await channel.close()
        await server.close()

    run(test)


def test_silence_has_an_end(run: Run, address: str) -> None:
    async def test() -> None:
        server = await serve(address, echo)
        channel = await connect(server.address, 5, silence=0.01)
        with pytest.raises(DeadlineError, match="waiting for a message from"):
            async for _ in channel:
                pass
        await channel.close()
        await server.close()

    run(test)


def test_connect_waits_for_a_server_that_starts_later(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"unix:{tmp_path / 'later.sock'}"
    servers: list[ControlServer] = []
    pauses: list[float] = []
    pause = asyncio.sleep

    async def start_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            servers.append(await serve(address, echo))
        await pause(0)

    async def test() -> None:
        monkeypatch.setattr(module.asyncio, "sleep", start_meanwhile)
        channel = await connect(address, 10)
        await channel.send(Ping(nonce=1))
        assert await channel.receive(5) == Ping(nonce=1)
        await channel.close()
        await servers[0].close()

    run(test)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0]


def test_connect_gives_up_with_the_last_reason(run: Run, tmp_path: Path) -> None:
    async def test() -> None:
        address = f"unix:{tmp_path / 'nobody.sock'}"
        with pytest.raises(DeadlineError) as caught:
            await connect(address, 0.03)
        assert (
            str(caught.value) == f"connecting to {address}: nothing within 0.03 s (No such file or directory)"
        )
        # a port that was free a moment ago
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with pytest.raises(DeadlineError, match=rf"connecting to 127.0.0.1:{port}: .*refused"):
            await connect(f"127.0.0.1:{port}", 0.03)

    run(test)


@pytest.mark.parametrize(
    "text",
    ["", "7000", "host", "host:", ":7000", "host:-1", "host:65536", "host:x", "unix:", "unix:" + "x" * 108],
)
def test_what_is_no_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


def test_addresses_are_shown_as_they_are_written() -> None:
    for text in ("10.0.0.1:7000", "unix:/run/ina.sock", "node7:0"):
        assert str(parse_address(text)) == text
    assert parse_address("[::1]:7000").host == "::1"


def test_bytes_that_are_no_message_close_the_connection(run: Run, address: str) -> None:
    async def test() -> None:
        ends: list[str] = []

        async def listen(channel: Channel) -> None:
            try:
                async for _ in channel:
                    pass
            except ControlError as error:
                ends.append(str(error))
                assert channel.closed
                raise

        server = await serve(address, listen)
        channel = await connect(server.address, 5)
        channel._writer.write(b"\x00\x00\x00\x01\xc1")
        with pytest.raises(ChannelClosed):
            await channel.receive(5)
        await server.close()
        assert "not msgpack" in ends[0]
        await channel.close()

    run(test)


def test_a_frame_cut_off_is_said_to_be(run: Run, address: str) -> None:
    async def test() -> None:
        async def half(channel: Channel) -> None:
            channel._writer.write(encode(Ping(nonce=1))[:-3])

        server = await serve(address, half)
        channel = await connect(server.address, 5)
        with pytest.raises(ChannelClosed, match=r"in the middle of a message \(19 B\)"):
            await channel.receive(5)
        await channel.close()
        await server.close()

    run(test)


def test_messages_already_here_are_taken_without_waiting(run: Run, address: str) -> None:
    async def test() -> None:
        async def burst(channel: Channel) -> None:
            channel._writer.write(b"".join(encode(Pong(nonce=nonce)) for nonce in range(5)))

        server = await serve(address, burst)
        channel = await connect(server.address, 5)
        messages: list[Message] = [await channel.receive(5)]
        messages += channel.take()
        while len(messages) < 5:
            messages.append(await channel.receive(5))
        assert messages == [Pong(nonce=nonce) for nonce in range(5)]
        assert channel.take() == []
        await channel.close()
        await server.close()

    run(test)


def test_a_peer_that_does_not_read_is_given_up(run: Run, address: str) -> None:
    async def test() -> None:
        done = asyncio.Event()

        async def deaf(channel: Channel) -> None:
            await done.wait()

        server = await serve(address, deaf)
        channel = await connect(server.address, 5)
        large = Stats(counters={f"{index:04d}{'x' * 200}": index for index in range(4000)})

        async def send_much() -> None:
            for _ in range(30):
                await channel.send(large, 0.01)

        def post_much() -> None:
            for _ in range(30):
                channel.post(large)

        with pytest.raises(DeadlineError, match=r"sending stats to .*: nothing within 0.01 s"):
            await send_much()
        with pytest.raises(ChannelClosed, match="unread"):
            post_much()
        assert channel.closed
        done.set()
        await channel.close()
        await server.close()

    run(test)


def test_closing_the_server_ends_its_connections(run: Run, address: str) -> None:
    async def test() -> None:
        server = await serve(address, echo)
        channels = [await connect(server.address, 5) for _ in range(3)]
        for channel in channels:
            await channel.send(Ping(nonce=1))
            await channel.receive(5)
        await server.close()
        for channel in channels:
            with pytest.raises(ChannelClosed):
                await channel.receive(5)
            await channel.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test)
    assert not os.path.exists(address.removeprefix("unix:"))


def test_a_handler_that_fails_costs_its_own_connection_only(run: Run, address: str) -> None:
    async def test() -> None:
        async def fragile(channel: Channel) -> None:
            async for message in channel:
                if isinstance(message, Stop):
                    raise RuntimeError("bug")
                await channel.send(message)

        server = await serve(address, fragile)
        first, second = [await connect(server.address, 5) for _ in range(2)]
        await first.send(Stop(reason="x"))
        with pytest.raises(ChannelClosed):
            await first.receive(5)
        await second.send(Ping(nonce=2))
        assert await second.receive(5) == Ping(nonce=2)
        await first.close()
        await second.close()
        await server.close()

    run(test)


def test_a_unix_socket_is_private_and_replaces_only_dead_ones(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def test() -> None:
        server = await serve(f"unix:{path}", echo)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(AddressError, match="a running process listens there"):
            await serve(f"unix:{path}", echo)
        channel = await connect(server.address, 5)
        await channel.close()
        await server.close()
        path.write_text("not a socket")
        with pytest.raises(AddressError, match="exists and is no socket"):
            await serve(f"unix:{path}", echo)
        assert path.read_text() == "not a socket"

    run(test)


def test_a_port_in_use_is_named(run: Run) -> None:
    async def test() -> None:
        server = await serve("127.0.0.1:0", echo)
        assert int(server.address.rpartition(":")[2]) > 0
        port = server.address.rpartition(":")[2]
        says = (
            f"cannot listen on {server.address}: .*in use; change control.listen.*'ss -ltnp sport = {port}'"
        )
        with pytest.raises(AddressError, match=says):
            await serve(server.address, echo)
        await server.close()

    run(test)


def test_the_loop_of_the_process_is_left_alone() -> None:
    policy = type(asyncio.get_event_loop_policy())
    assert not policy.__module__.startswith("uvloop"), sys.modules["uvloop"]


def test_a_certificate_that_is_no_coordinators_is_told_as_that() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = 26, "unsuitable certificate purpose"
    said = module.reason_of(error)
    assert said.startswith("TLS: unsuitable certificate purpose; ")
    assert "ina keys issue --coordinator" in said
    error.verify_code, error.verify_message = 10, "certificate has expired"
    assert module.reason_of(error) == "TLS: certificate has expired"
