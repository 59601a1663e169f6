"""The driver on real sockets: groups that are joined and left while it runs."""

import asyncio
import socket
from collections.abc import Iterator

import numpy as np

from inanet.aio.driver import Driver
from inanet.phy.udp import UdpDevice
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint


class Listener:
    """A node that only listens, and says when it has heard enough."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, bytes]] = []
        self.wanted = 0
        self.enough = asyncio.Event()

    def receive(self, batch: PacketBatch, now: float) -> None:
        self.heard += [(int(source), batch.packet(i)) for i, source in enumerate(batch.sources)]
        if len(self.heard) >= self.wanted:
            self.enough.set()

    async def hear(self, count: int) -> list[tuple[int, bytes]]:
        """The next ``count`` packets."""
        self.wanted = count
        self.enough.clear()
        if len(self.heard) < count:
            async with asyncio.timeout(10):
                await self.enough.wait()
        taken, self.heard = self.heard, []
        return taken

    def transmit(self, now: float) -> Iterator[Transmission]:
        return iter(())

    def events(self) -> list[object]:
        return []

    def timer(self) -> None:
        return None


def packets(destination: int, count: int, value: int) -> Transmission:
    return Transmission(
        destination, np.full(count * 36, value, np.uint8), np.arange(count, dtype=np.int64) * 36, 36
    )


def free_group() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("239.255.73.9", 0))
        return endpoint(*probe.getsockname())


async def test_a_node_hears_its_groups_and_itself() -> None:
    device, parent, node, group = UdpDevice(), UdpDevice(), Listener(), free_group()
    driver = Driver(node, device, lambda event: None)  # type: ignore[arg-type]
    try:
        driver.join(group)
        driver.join(group)
        parent.send(packets(group, 70, 1))
        assert await node.hear(70) == [(parent.endpoint, bytes([1]) * 36)] * 70
        parent.send(packets(device.endpoint, 5, 2))
        assert await node.hear(5) == [(parent.endpoint, bytes([2]) * 36)] * 5
        driver.leave(group)
        parent.send(packets(group, 70, 3))
        parent.send(packets(device.endpoint, 5, 4))
        assert await node.hear(5) == [(parent.endpoint, bytes([4]) * 36)] * 5
        driver.join(group)
    finally:
        driver.close()
        parent.close()
