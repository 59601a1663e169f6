"""Nodes on real sockets of one process: groups are joined when a plan names them, used once they are proven, and left."""

import asyncio
import socket

import numpy as np
import pytest
from structlog.testing import capture_logs

from inanet.aio.driver import Driver
from inanet.phy.udp import UdpDevice
from inanet.proto.common.events import RoundDone
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.tree.node import Node
from inanet.wire.endpoint import address_of
from tests.aio.test_driver import free_group

WORKERS = ("w0", "w1", "w2")
COUNT = 128 * 600
KEY = 77


class Fabric:
    """A root and three workers that send to it, probing whether they hear a group."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.devices = {name: UdpDevice() for name in ("ps", *WORKERS)}
        self.nodes = {name: Node(name, 4096) for name in self.devices}
        self.done: asyncio.Queue[int] = asyncio.Queue()
        self.drivers = {
            name: Driver(self.nodes[name], device, self._on_event) for name, device in self.devices.items()
        }
        spec = TensorSpec("t", "i32", (COUNT,), "sum", ExponentMode.NONE)
        form = make_format(spec, len(WORKERS))
        shard = Shard(0, 0, 0, Part.DATA, form.fold, 0, form.fragments)
        self.plan(group)
        for node in self.nodes.values():
            node.add_layout(0, TensorLayout(0, spec, (shard,)))

    def _on_event(self, event: object) -> None:
        if isinstance(event, RoundDone):
            self.done.put_nowait(event.round)

    def plan(self, group: int, version: int = 1) -> None:
        """Give every node its view of a plan with this group, or without one."""
        children = tuple(
            Child(name, self.devices[name].endpoint, 1 << i, 1, 512, group != 0)
            for i, name in enumerate(WORKERS)
        )
        places = {"ps": Placement(0, None, children, (), group, group != 0)}
        for child in children:
            up = Parent("ps", self.devices["ps"].endpoint, child.bit, 512, group)
            places[child.name] = Placement(0, up)
        for name, place in places.items():
            self.nodes[name].apply(NodePlan(0, version, KEY, 3, (place,), 512), self.drivers[name].now())
            self.drivers[name].kick()

    async def reduce(self, round_: int) -> None:
        """One round, with the right result on every worker."""
        arrays = [np.random.default_rng((round_, i)).integers(-999, 999, COUNT, np.int32) for i in range(3)]
        total = sum(array.astype(np.int64) for array in arrays)
        for name, array in zip(WORKERS, arrays, strict=True):
            self.nodes[name].begin(0, 0, round_, [array], self.drivers[name].now())
            self.drivers[name].kick()
        async with asyncio.timeout(30):
            for _ in WORKERS:
                assert await self.done.get() == round_
        assert all((array == total).all() for array in arrays)

    async def until_multicast(self) -> int:
        """Rounds until a result has gone out by multicast; the next round's number."""
        round_ = 1
        while not self.nodes["ps"].stats()["results_multicast"]:
            await self.reduce(round_)
            round_ += 1
            assert round_ < 1000
        return round_

    def sockets(self) -> int:
        """Groups that the kernel holds open for the workers."""
        return sum(len(device._groups) for device in self.devices.values())

    def close(self) -> None:
        for driver in self.drivers.values():
            driver.close()


@pytest.fixture
async def fabric():
    fabric = Fabric(free_group())
    yield fabric
    fabric.close()


async def test_a_group_is_joined_proven_used_and_left_with_its_plan(fabric):
    round_ = await fabric.until_multicast()
    assert fabric.sockets() == 3
    before = fabric.devices["ps"].counters()["tx_packets"]
    await fabric.reduce(round_)
    # 600 results for all three, and few control packets
    assert fabric.devices["ps"].counters()["tx_packets"] - before < 2 * 600
    fabric.plan(0, version=2)
    await fabric.reduce(round_ + 1)
    assert fabric.sockets() == 0
    sent = fabric.nodes["ps"].stats()["results_multicast"]
    fabric.plan(fabric.group, version=3)
    await fabric.reduce(round_ + 2)
    assert fabric.sockets() == 3
    assert fabric.nodes["ps"].stats()["results_multicast"] >= sent


async def test_the_end_of_a_job_leaves_its_groups(fabric):
    await fabric.until_multicast()
    for name, node in fabric.nodes.items():
        node.drop_job(0)
        fabric.drivers[name].kick()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert fabric.sockets() == 0


async def test_a_group_that_cannot_be_joined_is_reported_and_results_come_by_unicast():
    group = free_group()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        # somebody else has the port of all addresses to itself
        taken.bind(("0.0.0.0", address_of(group)[1]))
        with capture_logs() as logs:
            fabric = Fabric(group)
            try:
                for round_ in (1, 2, 3):
                    await fabric.reduce(round_)
                assert fabric.sockets() == 0
                assert fabric.nodes["ps"].stats()["results_multicast"] == 0
                fabric.plan(0, version=2)
                await fabric.reduce(4)
            finally:
                fabric.close()
    said = [log for log in logs if log["event"] == "multicast group not joined"]
    assert len(said) == 3
    assert all("cannot join" in log["reason"] for log in said)
