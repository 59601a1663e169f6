"""Control connections with certificates and tokens: who gets in, who is cut off, who is turned out."""

import asyncio
import shutil
import ssl
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from inanet.aio.channel import ChannelClosed, DeadlineError, connect
from inanet.aio.coordinator import Coordination, InsecureListener
from inanet.aio.query import QueryRefused, ask, overview_of
from inanet.aio.uplink import Uplink
from inanet.coordinator.settings import Settings
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.control import PROTOCOL, Pong, Reject, Welcome
from inanet.messages.registration import Query
from inanet.proto.tree.node import Node
from inanet.trust import authority
from inanet.trust.certificates import Certified, KeyFileError, Keys, WrongCertificate
from inanet.trust.revocation_list import Revocations
from inanet.wire.endpoint import endpoint
from tests.aio.coordinator import FABRIC, PATIENCE, answer, coordinating, hello, of, registration, running


async def _certificates_say_who_somebody_is(keys: Path) -> None:
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(of(keys, "manager")))
        address = coordination.address
        own = of(keys, "w0")
        await running(stack, registration(address, keys=own))
        assert (await ask(address, "", of(keys, "ps"), PATIENCE)).missing in (("s0",), ("w0", "s0"))

        async def said(name: str, keys: Keys, **more: str) -> Welcome | Reject:
            channel = await connect(address, PATIENCE, keys=keys)
            stack.push_async_callback(channel.close)
            return await answer(channel, hello(name, **more))

        assert isinstance(await said("w0", own), Welcome)
        for found, text in (
            (await said("w1", own), "its certificate is that of w0, not of 'w1'"),
            (await said("ps", own, role="ps"), "its certificate is that of w0, not of 'ps'"),
            (await said("w0", own, role="aggregator"), "lets it be status, worker, not to be aggregator"),
            (await said("w0", own, job="steal"), "its certificate is for the jobs train*, not for 'steal'"),
        ):
            assert isinstance(found, Reject)
            assert text in found.reason
            assert "'ina keys issue --role" in found.reason
        with pytest.raises(QueryRefused, match=r"the certificate of a0 lets it be aggregator, not to look"):
            await ask(address, "", of(keys, "a0"), PATIENCE)


async def _what_is_no_message_is_cut_off(keys: Path) -> None:
    """By somebody with a certificate, too; and while nobody else gives the coordinator anything to do."""
    for seconds, frame, text in (
        (0.1, (1 << 19).to_bytes(4, "big") + b"x" * 1000, "no hello within 0.1 s"),
        (PATIENCE, ((1 << 20) + 1).to_bytes(4, "big"), "frame of 1048577 B announced, allowed are 1048576"),
    ):
        async with (
            asyncio.timeout(PATIENCE),
            coordinating(of(keys, "manager"), hello=seconds) as coordination,
        ):
            channel = await connect(coordination.address, PATIENCE, keys=of(keys, "w0"))
            with capture_logs() as logs:
                channel._writer.write(frame)
                async for message in channel:
                    assert isinstance(message, Reject)
            await channel.close()
        assert [entry for entry in logs if entry["reason"].endswith(text)], logs


async def _a_certificate_that_has_expired_is_none(keys: Path) -> None:
    async with coordinating(of(keys, "manager")) as coordination:
        with pytest.raises(
            (ChannelClosed, DeadlineError), match=r"perhaps it does not take this node's certificate|broke"
        ):
            await ask(coordination.address, "", of(keys, "late"), 5.0)
        assert coordination._next_peer == 1


async def _strangers_do_not_get_in(keys: Path) -> None:
    async with coordinating(of(keys, "manager")) as coordination:
        foreign = Keys(str(keys / "ca.pem"), str(keys / "other" / "w0.pem"))
        with pytest.raises((ChannelClosed, DeadlineError)):
            await ask(coordination.address, "", foreign, 0.5)
        with pytest.raises((ChannelClosed, DeadlineError)):
            await ask(coordination.address, "", None, 0.5)
        # and a coordinator of another fabric is none of ours
        with pytest.raises(DeadlineError, match=r"TLS: .*certificate"):
            await ask(coordination.address, "", of(keys / "other", "w0"), 0.5)


async def _whoever_says_nothing_takes_no_more_than_there_is(keys: Path) -> None:
    """Before the handshake, too: the connections beyond are closed at once, and one that ends makes room."""
    async with AsyncExitStack() as stack, coordinating(of(keys, "manager")) as coordination:
        server = coordination._server
        assert server is not None
        server._most = 3
        host, _, port = coordination.address.rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
        for _, writer in strangers:
            stack.callback(writer.close)
        # taken in the order in which they came
        assert [await reader.read() for reader, _ in strangers[3:]] == [b""] * 5
        assert len(server._handshakes) == 3
        strangers[0][1].close()
        done, _ = await asyncio.wait(
            server._handshakes, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
        )
        assert len(done) == 1
        assert (await ask(coordination.address, "", of(keys, "w0"), PATIENCE)).nodes == ()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "body",
    [
        _whoever_says_nothing_takes_no_more_than_there_is,
        _certificates_say_who_somebody_is,
        _what_is_no_message_is_cut_off,
        _a_certificate_that_has_expired_is_none,
        _strangers_do_not_get_in,
    ],
)
def test_tls(
    keys: Path,
    loop: Callable[[], asyncio.AbstractEventLoop],
    body: Callable[[Path], Coroutine[None, None, None]],
) -> None:
    """On both loops: each has a TLS of its own."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(body(keys))


async def test_a_node_does_not_take_another_node_for_its_coordinator(keys: Path) -> None:
    """Nor does that one listen, unless it is another program's."""

    class Unexamined(Keys):
        def certified(self) -> Certified:
            return Certified(coordinator=True)

    with pytest.raises(
        WrongCertificate,
        match=r"ps\.pem is not that of a coordinator: .* lets it be ps, status, not to coordinate",
    ):
        await Coordination(Settings(FABRIC, ""), None, keys=of(keys, "ps")).start("127.0.0.1:0")
    unexamined = Unexamined(str(keys / "ca.pem"), str(keys / "ps.pem"))
    async with coordinating(unexamined) as coordination:
        with pytest.raises(DeadlineError, match=r"not that of a coordinator|TLS: "):
            await ask(coordination.address, "", of(keys, "w0"), 0.3)


async def test_one_who_takes_all_connections_leaves_those_that_stand() -> None:
    async with AsyncExitStack() as stack, coordinating() as coordination:
        assert coordination._server is not None
        coordination._server._most = 2
        channels = [await connect(coordination.address, PATIENCE) for _ in range(4)]
        for channel in channels:
            stack.push_async_callback(channel.close)
        # at once, and not after the time that a stranger has
        for refused in channels[2:]:
            assert [message async for message in refused] == []
        assert (await overview_of(channels[0], "", PATIENCE)).nodes == ()


async def test_who_never_shakes_hands_makes_room_for_others(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inanet.aio.control_server.MOST_HANDSHAKES", 8)
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(of(keys, "manager")))
        host, port = coordination.address.split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
        channel = await connect(coordination.address, PATIENCE, keys=of(keys, "w0"))
        assert isinstance(await answer(channel, hello("w0")), Welcome)
        await channel.close()
        # all but the newest have been closed
        async with asyncio.timeout(PATIENCE):
            for reader, _ in idle[:50]:
                with suppress(ConnectionError):
                    assert await reader.read(1) == b""
        for _, writer in idle:
            writer.close()


async def test_nobody_listens_beyond_this_machine_without_certificates() -> None:
    refused = Coordination(Settings(FABRIC, "the right one 123"), None)
    with pytest.raises(
        InsecureListener, match=r"refused to listen on 0\.0\.0\.0:0: .* set control\.ca_file and key_file"
    ):
        await refused.start("0.0.0.0:0")
    warned = Coordination(Settings(FABRIC, "the right one 123", insecure=True), None)
    await warned.start("0.0.0.0:0")
    await warned.close("the test is over")


async def test_who_is_revoked_is_turned_out_and_away(keys: Path, tmp_path: Path) -> None:
    """While it is connected, when it comes again, and with a coordinator whose own certificate was revoked."""
    listed = tmp_path / "revoked.txt"
    listed.write_text("")
    knowing = Keys(str(keys / "ca.pem"), str(keys / "manager.pem"), Revocations(str(listed)))
    other = Keys(str(keys / "ca.pem"), str(keys / "w0.pem"), Revocations(str(listed)))

    def revoke(*names: str) -> None:
        listed.write_text("".join(line for line in issued if line.split()[1] in names))

    issued = (keys / "issued.txt").read_text().splitlines(keepends=True)
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(knowing))
        channel = await connect(coordination.address, PATIENCE, keys=of(keys, "w0"))
        stack.push_async_callback(channel.close)
        assert isinstance(await answer(channel, hello("w0")), Welcome)
        revoke("w0")
        channel.post(Pong(nonce=0))
        while not isinstance(last := await channel.receive(PATIENCE), Reject):
            pass
        assert "the certificate of w0 was revoked: 'ina keys issue' makes another" in last.reason
        with pytest.raises(ChannelClosed):
            await channel.receive(PATIENCE)
        with pytest.raises(QueryRefused, match="the certificate of w0 was revoked"):
            await ask(coordination.address, "", of(keys, "w0"), PATIENCE)
        revoke("manager")
        with pytest.raises(DeadlineError, match="the certificate of manager was revoked"):
            await connect(coordination.address, 0.3, keys=other)
        revoke("nobody")
        channel = await connect(coordination.address, PATIENCE, keys=other)
        stack.push_async_callback(channel.close)
        revoke("manager")
        channel.post(Query(protocol=PROTOCOL, token=""))
        with pytest.raises(ChannelClosed, match="given up: the certificate of manager was revoked"):
            await channel.receive(PATIENCE)


async def test_whoever_is_silent_when_it_is_revoked_is_cut_off(keys: Path, tmp_path: Path) -> None:
    """It answers nothing; the second has not even said who it is."""
    listed = tmp_path / "revoked.txt"
    listed.write_text("")
    knowing = Keys(str(keys / "ca.pem"), str(keys / "manager.pem"), Revocations(str(listed)))
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(knowing))
        channels = [
            await connect(coordination.address, PATIENCE, keys=of(keys, name)) for name in ("w0", "ps")
        ]
        for channel in channels:
            stack.push_async_callback(channel.close)
        assert isinstance(await answer(channels[0], hello("w0")), Welcome)
        await overview_of(channels[1], "", PATIENCE)
        shutil.copy(keys / "issued.txt", listed)
        coordination.recheck()
        for channel in channels:
            said = [message async for message in channel]
            assert isinstance(said[-1], Reject)
            assert "was revoked" in said[-1].reason


async def test_an_uplink_waits_for_keys_that_are_not_there(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was revoked connects again before its new certificate has come: that ends no daemon."""
    monkeypatch.setattr("inanet.aio.uplink.PAUSE_SECONDS", 0.0)
    own = tmp_path / "ps.pem"
    looked = 0

    class Late(Keys):
        def client(self) -> ssl.SSLContext:
            nonlocal looked
            try:
                return super().client()
            except KeyFileError:
                looked += 1
                if looked == 3:
                    own.write_bytes((keys / "ps.pem").read_bytes())
                raise

    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(of(keys, "manager")))
        member = Member(Node("ps", 16), Identity("ps", "ps", "", endpoint("127.0.0.1", 9001), 100))
        late = Late(str(keys / "ca.pem"), str(own))
        link = Uplink(
            member, coordination.address, join=PATIENCE, resume=PATIENCE, wake=lambda: None, keys=late
        )
        with capture_logs() as logs:
            running = asyncio.create_task(link.run())
            await link.until(lambda: member.welcomed, "Welcome", PATIENCE)
        await link.leave("the test is over")
        await running
    (warned,) = [entry for entry in logs if entry["event"] == "not connected yet"]
    assert f"cannot read {own}" in warned["reason"]
    assert member.failed is None


async def test_but_not_for_ever(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inanet.aio.uplink.PAUSE_SECONDS", 0.01)
    member = Member(Node("ps", 16), Identity("ps", "ps", "", endpoint("127.0.0.1", 9001), 100))
    gone = Keys(str(keys / "ca.pem"), str(tmp_path / "gone.pem"))
    link = Uplink(member, "127.0.0.1:9", join=0.02, resume=0.02, wake=lambda: None, keys=gone)
    await link.run()
    assert member.failed is not None
    assert member.failed.cause == "coordinator_lost"
    assert "connecting to 127.0.0.1:9: nothing within 0.02 s (cannot read " in member.failed.message
    assert "gone.pem" in member.failed.message


async def test_questions_need_the_token_too() -> None:
    async with coordinating(token="the right one 123") as coordination:
        assert (await ask(coordination.address, "the right one 123", None, PATIENCE)).nodes == ()
        with pytest.raises(QueryRefused, match="whoever asks has another token"):
            await ask(coordination.address, "a guess", None, PATIENCE)


def test_files_that_are_no_keys_are_named(keys: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    for pair in (
        Keys(str(tmp_path / "x.pem"), str(keys / "w0.pem")),
        Keys(str(keys / "ca.pem"), str(tmp_path / "x.pem")),
    ):
        with pytest.raises(KeyFileError, match=r"x\.pem holds no usable keys"):
            pair.client()
    with pytest.raises(KeyFileError, match=r"cannot read .*gone\.pem"):
        Keys(str(keys / "ca.pem"), str(tmp_path / "gone.pem")).server()


def test_an_authority_is_made_once_and_its_key_is_nobody_elses(keys: Path) -> None:
    with pytest.raises(authority.AuthorityError, match="exists already"):
        authority.initialise(keys, 1)
    with pytest.raises(authority.AuthorityError, match="exists already"):
        authority.issue(keys, "w0", roles=("worker",), days=1)
    with pytest.raises(ValueError, match="is not a name"):
        authority.issue(keys, "../w0", roles=("worker",), days=1)
    assert authority.show(keys / "w0.pem").names == (
        "inanet:node:w0",
        "inanet:role:worker",
        "inanet:role:status",
        "inanet:job:train*",
    )
    for name, mode in (("ca.key", 0o600), ("w0.pem", 0o600), ("ca.pem", 0o644)):
        assert (keys / name).stat().st_mode & 0o777 & ~0o044 == mode & ~0o044
        assert mode == 0o644 or not (keys / name).stat().st_mode & 0o077
