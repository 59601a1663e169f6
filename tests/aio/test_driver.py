"""The driver on real sockets: groups that are joined and left while it runs, paths that take no packets."""

import asyncio
import errno
import math
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from structlog.testing import capture_logs

from inanet.aio.driver import LONGEST_TURN, Driver
from inanet.aio.turn import Outcome
from inanet.phy.udp import UdpDevice
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint


class Listener:
    """A node that only listens, and says when it has heard enough."""

    #: results that its round still lacks
    lacking = 0

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


class Narrow(Wrapper):
    """The path to one peer takes no packets of this size, from the start or after the first few."""

    def __init__(self, device: UdpDevice, peer: int, few: int) -> None:
        super().__init__(device)
        self.peer = peer
        self.few = few
        self.offers = 0

    def send(self, transmission: Transmission, start: int = 0) -> int:
        if transmission.destination != self.peer:
            return super().send(transmission, start)
        self.offers += 1
        if start < self.few:
            return self.few - start
        raise OSError(errno.EMSGSIZE, "raise the MTU")


class Speaker(Listener):
    """A node that has something to say."""

    def __init__(self, *words: Transmission) -> None:
        super().__init__()
        self.words = list(words)

    groups: frozenset[int] = frozenset()

    def transmit(self, now: float) -> Iterator[Transmission]:
        while self.words:
            yield self.words.pop(0)


@pytest.mark.parametrize("few", [0, 2], ids=["at once", "later"])
async def test_a_path_that_takes_no_packets_costs_no_other_peer_one(few: int) -> None:
    broken: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, details: broken.append(details))
    narrow, wide = UdpDevice(), UdpDevice()
    device = Narrow(UdpDevice(), narrow.endpoint, few)
    speaker, hearer = Speaker(), Listener()
    driver = Driver(speaker, device, lambda event: None)  # type: ignore[arg-type]
    other = Driver(hearer, wide, lambda event: None)  # type: ignore[arg-type]
    try:
        with capture_logs() as logs:
            for value in (1, 2):
                speaker.words = [packets(narrow.endpoint, 7, 9), packets(wide.endpoint, 5, value)]
                driver.kick()
                assert await hearer.hear(5) == [(device.endpoint, bytes([value]) * 36)] * 5
        assert driver.refused == 2 * (7 - few)
        assert device.offers == (4 if few else 2)
        # once in a while is enough
        assert [log["reason"] for log in logs] == ["raise the MTU"]
    finally:
        driver.close()
        other.close()
        narrow.close()
    assert broken == []


async def test_a_node_with_much_to_come_rests_and_misses_nothing() -> None:
    device, peer, node = UdpDevice(), UdpDevice(), Listener()
    driver = Driver(node, device, lambda event: None)  # type: ignore[arg-type]
    node.lacking = 1 << 20
    try:
        for value in range(40):
            peer.send(packets(device.endpoint, 62, value))
            await node.hear(62)
        rested = driver.batches
        node.lacking = 0
        peer.send(packets(device.endpoint, 5, 99))
        assert await node.hear(5) == [(peer.endpoint, bytes([99]) * 36)] * 5
        assert rested <= 40
    finally:
        driver.close()
        peer.close()


class Waiter(Listener):
    """A node that wants to be called at a time."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.at = at

    def timer(self) -> float:  # type: ignore[override]
        return self.at


async def test_a_turn_that_waits_ends_when_another_node_of_the_process_wants_its_time() -> None:
    """Nodes of one process share its event loop: while one waits inside a turn, no timer of another fires."""
    ends: list[float] = []

    class Recorder:
        deadline = math.inf

        def run(self, now: float, *, sends: bool, until: float) -> Outcome:
            ends.append(until - now)
            return Outcome(0, 0, True, None, False, False)

    soon = asyncio.get_running_loop().time() + 0.01
    busy = Driver(Listener(), UdpDevice(), lambda event: None)  # type: ignore[arg-type]
    other = Driver(Waiter(soon), UdpDevice(), lambda event: None)  # type: ignore[arg-type]
    busy._waits = True
    try:
        busy._run(Recorder(), True)  # type: ignore[arg-type]
        other._arm()
        busy._run(Recorder(), True)  # type: ignore[arg-type]
        other.close()
        busy._run(Recorder(), True)  # type: ignore[arg-type]
    finally:
        busy.close()
        other.close()
    alone, beside, again = ends
    assert alone == again == pytest.approx(LONGEST_TURN)
    assert beside <= 0.01
