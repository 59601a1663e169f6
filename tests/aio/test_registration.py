"""Registration and questions over real connections on the loopback, in one event loop."""

import asyncio
import socket
import ssl
from collections.abc import Callable, MutableMapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from inanet.aio.channel import Channel, connect
from inanet.aio.query import ask
from inanet.aio.reachability import reach
from inanet.aio.uplink import Uplink
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.control import Reject
from inanet.proto.tree.node import Node
from inanet.service.metrics import Durations
from inanet.trust.certificates import KeyFileError, Keys
from inanet.wire.endpoint import endpoint
from tests.aio.coordinator import PATIENCE, answer, coordinating, hello, of, registration, running


async def test_a_node_registers_reports_and_is_seen() -> None:
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating())
        changed = asyncio.create_task(coordination.changed())
        await running(stack, registration(coordination.address))
        await asyncio.wait_for(changed, PATIENCE)
        async with asyncio.timeout(PATIENCE):
            while True:
                seen = await ask(coordination.address, "", None, PATIENCE)
                (node,) = seen.nodes
                if node.idle_cores is not None and node.counters:
                    break
    assert (node.name, node.role, node.registered, node.serves) == ("w0", "worker", True, False)
    assert (node.address, node.link_bps) == ("127.0.0.1:9", 10**9)
    assert node.cores >= 1
    assert 0 < node.memory_used < node.memory
    # nested counters and those that nobody wants to see stay behind
    assert node.counters == {"rows_sent": 7}
    assert seen.missing == ("s0",)


async def test_who_stops_in_order_says_so() -> None:
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating())
        logs = stack.enter_context(capture_logs())
        changed = asyncio.create_task(coordination.changed())
        node = registration(coordination.address)
        task = asyncio.create_task(node.run())
        await asyncio.wait_for(changed, PATIENCE)
        await node.leave("the worker was asked to stop")
        await asyncio.wait_for(task, PATIENCE)
    (said,) = [entry for entry in logs if entry["event"] in ("left", "lost", "registration lost")]
    assert (said["event"], said["log_level"], said["peer"]) == ("left", "info", "w0")
    assert said["reason"] == "it left: the worker was asked to stop"


async def test_a_coordinator_that_is_not_there_is_warned_of_once_and_found_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has nothing else to say before it has a job: its log would be silent about a wrong address until then."""
    monkeypatch.setattr("inanet.aio.registration.FIRST_SECONDS", 0.01)
    monkeypatch.setattr("inanet.aio.registration.ATTEMPT_SECONDS", 0.01)
    address = f"unix:{tmp_path}/gone"
    node = registration(address)

    def registered() -> list[float | Durations]:
        return [sample.value for sample in node.samples()]

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - a log tells nobody that it has grown
                await asyncio.sleep(0)

    def missed() -> int:
        return sum(entry["event"] == "not registered yet" for entry in logs)

    async with AsyncExitStack() as stack:
        logs = stack.enter_context(capture_logs())
        await running(stack, node)
        for _ in range(2):
            before = missed()
            await until(lambda: missed() >= before + 3)  # noqa: B023 - it is awaited here
            assert registered() == [0.0]
            async with coordinating(at=address):
                await until(lambda: registered() == [1.0])
    # again when it was there meanwhile, and is not any more
    warned = [entry for entry in logs if entry["event"] == "coordinator unreachable"]
    assert [entry["log_level"] for entry in warned] == ["warning"] * 2
    assert (warned[0]["node"], warned[0]["address"]) == ("w0", address)
    assert "nothing within 0.01 s (No such file or directory)" in warned[0]["reason"]
    assert "correct control.coordinator" in warned[0]["fix"]


async def test_a_coordinator_that_is_there_is_not_to_be_started(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certificate is of another authority; or it has none."""
    monkeypatch.setattr("inanet.aio.registration.FIRST_SECONDS", 1.0)
    async with AsyncExitStack() as stack:
        foreign = await stack.enter_async_context(coordinating(of(keys / "other", "w0")))
        plain = await stack.enter_async_context(coordinating())
        logs = stack.enter_context(capture_logs())
        for coordination in (foreign, plain):
            await running(stack, registration(coordination.address, keys=of(keys, "w0")))

        def fixes() -> dict[str, str]:
            return {one["address"]: one["fix"] for one in logs if one["event"] == "coordinator unreachable"}

        async with asyncio.timeout(PATIENCE):
            while len(fixes()) < 2:  # noqa: ASYNC110 - a log tells nobody that it has grown
                await asyncio.sleep(0)
    assert fixes()[foreign.address].startswith(
        "mend the certificate that the reason is about: 'ina keys show'"
    )
    assert fixes()[plain.address].startswith("set control.ca_file and key_file at the coordinator, too")


async def test_a_coordinators_name_may_resolve_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a boot, before DNS is up."""
    monkeypatch.setattr("inanet.aio.registration.FIRST_SECONDS", 0.05)
    asked = 0
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating())
        port = int(coordination.address.rpartition(":")[2])

        async def resolved(*asking: object, **how: object) -> list[object]:
            nonlocal asked
            asked += 1
            if not warned():
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        def warned() -> list[MutableMapping[str, Any]]:
            return [entry for entry in logs if entry["event"] == "coordinator unreachable"]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
        logs = stack.enter_context(capture_logs())
        changed = asyncio.create_task(coordination.changed())
        await running(stack, registration(f"manager.invalid:{port}"))
        await asyncio.wait_for(changed, PATIENCE)
    (said,) = warned()
    assert said["log_level"] == "warning"
    assert "its name does not resolve: Temporary failure in name resolution" in said["reason"]
    assert said["fix"].startswith("see to it that the name resolves, or give an IPv4 address")
    assert asked > 1


async def test_a_loopback_address_is_not_announced_to_a_coordinator_that_was_found_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Channel, "remote", "10.9.8.7")
    async with coordinating() as coordination:
        member = Member(Node("ps", 16), Identity("ps", "ps", "", endpoint("127.0.0.1", 9001), 100))
        await Uplink(member, coordination.address, join=PATIENCE, resume=PATIENCE, wake=lambda: None).run()
    assert member.failed is not None
    assert member.failed.message.startswith("ps would advertise 127.0.0.1 to the coordinator at 10.9.8.7")


async def test_keys_that_are_being_replaced_are_waited_for(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was revoked is turned out at once, and its new certificate comes a moment later."""
    monkeypatch.setattr("inanet.aio.registration.REFUSED_SECONDS", 0.0)
    own = tmp_path / "w0.pem"

    class Late(Keys):
        def client(self) -> ssl.SSLContext:
            try:
                return super().client()
            except KeyFileError:
                own.write_bytes((keys / "w0.pem").read_bytes())
                raise

    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(of(keys, "manager")))
        changed = asyncio.create_task(coordination.changed())
        with capture_logs() as logs:
            await running(
                stack, registration(coordination.address, keys=Late(str(keys / "ca.pem"), str(own)))
            )
            await asyncio.wait_for(changed, PATIENCE)
    (warned,) = [entry for entry in logs if entry["event"] == "not registered"]
    assert f"cannot read {own}" in warned["reason"]


async def test_who_forgot_its_certificates_is_told_once_what_may_be_missing(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inanet.aio.registration.LOST_SECONDS", 0.0)

    def failed() -> int:
        return sum("no TLS handshake: TLS: WRONG_VERSION" in str(entry.get("reason")) for entry in logs)

    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating(of(keys, "manager")))
        logs = stack.enter_context(capture_logs())
        await running(stack, registration(coordination.address))
        async with asyncio.timeout(PATIENCE):
            while failed() < 3:  # noqa: ASYNC110 - a log tells nobody that it has grown
                await asyncio.sleep(0)
    (said,) = [entry for entry in logs if entry["event"] in ("not registered", "registration lost")]
    assert (said["event"], said["log_level"]) == ("not registered", "warning")
    assert "it may want TLS: set control.ca_file and key_file" in said["reason"]


async def test_multicast_from_the_coordinator_is_heard_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One datagram on the interface of the control connection: here the loopback."""
    async with coordinating() as coordination:
        found = await reach(coordination.address, "", None, PATIENCE)
        assert (found.local, found.downlink, found.heard) == ("127.0.0.1", "unicast", True)
        assert found.group == "239.195.255.255:7401"
        # who sends out of another interface is not heard on this one
        monkeypatch.setattr("inanet.aio.coordinator.send_probe", lambda *_: None)
        assert not (await reach(coordination.address, "", None, 0.2)).heard


async def test_who_was_turned_away_is_told_to_whoever_asks() -> None:
    async with AsyncExitStack() as stack:
        coordination = await stack.enter_async_context(coordinating())
        for _ in range(2):
            channel = await connect(coordination.address, PATIENCE)
            stack.push_async_callback(channel.close)
            assert isinstance(await answer(channel, hello("w9")), Reject)
        (refused,) = (await ask(coordination.address, "", None, PATIENCE)).refused
        assert refused.startswith("worker 'w9' is not in the topology")
