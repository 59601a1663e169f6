"""A coordinator on the loopback, and who calls it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from inanet.aio.channel import Channel
from inanet.aio.coordinator import Coordination
from inanet.aio.registration import Registration
from inanet.coordinator.settings import Settings
from inanet.messages.control import PROTOCOL, Hello, Reject, Welcome
from inanet.planning.topology import Topology
from inanet.service.resources import HostResources
from inanet.trust.certificates import Keys
from inanet.wire.endpoint import endpoint

PATIENCE = 20.0


FABRIC = Topology(roots=("ps",), workers={"w0": ("ps",), "w1": ("ps",)})


def of(directory: Path, name: str) -> Keys:
    return Keys(str(directory / "ca.pem"), str(directory / f"{name}.pem"))


@asynccontextmanager
async def coordinating(
    keys: Keys | None = None, token: str = "", at: str = "127.0.0.1:0", **more: float
) -> AsyncIterator[Coordination]:
    settings = Settings(FABRIC, token, heartbeat=0.05, expected=("w0", "s0"), **more)  # type: ignore[arg-type]
    coordination = Coordination(settings, None, keys=keys)
    await coordination.start(at)
    try:
        yield coordination
    finally:
        await coordination.close("the test is over")


def registration(address: str, name: str = "w0", keys: Keys | None = None, token: str = "") -> Registration:
    return Registration(
        address,
        name,
        "worker",
        token,
        machine=HostResources("127.0.0.1", 10**9),
        endpoint="127.0.0.1:9",
        figures=lambda: {"rows_sent": 7, "drops": {"short": 1}, "secret": 5},
        keys=keys,
    )


def hello(name: str, role: str = "worker", job: str = "train") -> Hello:
    where = endpoint("127.0.0.1", 9000)
    fields = {"job": job, "ranks": (0,), "world": 2} if role == "worker" else {}
    return Hello(protocol=PROTOCOL, name=name, role=role, token="", endpoint=where, rx_window=100, **fields)


async def running(stack: AsyncExitStack, registration: Registration) -> None:
    task = asyncio.create_task(registration.run())

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


async def answer(channel: Channel, message: Hello) -> Welcome | Reject:
    channel.post(message)
    found = await channel.receive(PATIENCE)
    assert isinstance(found, Welcome | Reject)
    return found
