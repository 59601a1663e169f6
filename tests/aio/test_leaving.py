"""Nodes that leave in good order are heard, whatever the coordinator was about to tell them."""

import asyncio
from pathlib import Path

import pytest

from inanet.aio.channel import Channel
from inanet.aio.control_server import serve
from inanet.aio.uplink import Uplink
from inanet.member.identity import Identity
from inanet.member.member import Member
from inanet.messages.control import Hello, Leave, Message, Ping, Pong, Welcome
from inanet.proto.tree.node import Node
from inanet.wire.endpoint import endpoint

PATIENCE = 10.0


def uplink(address: str) -> Uplink:
    member = Member(Node("ps", 16), Identity("ps", "ps", "", endpoint("127.0.0.1", 9001), 100))
    return Uplink(member, address, join=PATIENCE, resume=PATIENCE, wake=lambda: None)


async def turns() -> None:
    """Whatever can go on without anybody else does."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_node_that_leaves_reads_on_until_it_has_been_heard(tmp_path: Path) -> None:
    heard: list[Message] = []
    leaving = asyncio.Event()

    async def coordinator(channel: Channel) -> None:
        heard.append(await channel.receive(PATIENCE))
        channel.post(Welcome(silence=PATIENCE))
        await leaving.wait()
        # on a connection that is closed this breaks it, and what is in it is lost
        for nonce in range(3):
            await channel.send(Ping(nonce=nonce))
            await turns()
        while not isinstance(heard[-1], Leave):
            heard.append(await channel.receive(PATIENCE))

    server = await serve(f"unix:{tmp_path}/c.sock", coordinator)
    link = uplink(server.address)
    running = asyncio.create_task(link.run())
    await link.until(lambda: link.member.welcomed, "Welcome", PATIENCE)
    gone = asyncio.create_task(link.leave("done"))
    await turns()
    leaving.set()
    await asyncio.gather(gone, running)
    assert [type(message) for message in heard if not isinstance(message, Pong)] == [Hello, Leave]
    assert not link.connected
    await server.close()


async def test_a_coordinator_that_does_not_hear_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inanet.aio.uplink.FAREWELL_SECONDS", 0.01)
    deaf = asyncio.Event()

    async def coordinator(channel: Channel) -> None:
        channel.post(Welcome(silence=PATIENCE))
        await deaf.wait()

    server = await serve(f"unix:{tmp_path}/c.sock", coordinator)
    link = uplink(server.address)
    running = asyncio.create_task(link.run())
    await link.until(lambda: link.member.welcomed, "Welcome", PATIENCE)
    await link.leave("done")
    await running
    assert not link.connected
    deaf.set()
    await server.close()
