"""A link of a rate around a memory device, at literal times."""

import numpy as np
import pytest

from inanet.phy.access import AccessLink
from inanet.phy.memory import MemoryDevice, MemoryNetwork
from inanet.testing.clock import FakeClock
from inanet.wire.batch import Transmission

#: 100 B packets at 8000 bit/s without headers: one every 0.1 s
RATE, LENGTH = 8000.0, 100


def packets(destination: int, first: int, count: int) -> Transmission:
    arena = np.repeat(np.arange(first, first + count), LENGTH).astype(np.uint8)
    return Transmission(destination, arena, np.arange(count, dtype=np.int64) * LENGTH, LENGTH)


def pair(queue: int = 10_000) -> tuple[FakeClock, AccessLink, MemoryDevice]:
    clock, network = FakeClock(0.0), MemoryNetwork()
    return clock, AccessLink(network.open(), RATE, clock, queue=queue, overhead=0), network.open()


def numbers(device: AccessLink | MemoryDevice) -> list[int]:
    batch = device.receive()
    return [] if batch is None else [batch.packet(i)[0] for i in range(len(batch))]


def test_packets_leave_at_the_rate() -> None:
    clock, link, far = pair()
    assert link.send(packets(far.endpoint, 1, 3)) == 3
    assert numbers(far) == []
    assert link.timer() == pytest.approx(0.1)
    clock.now = 0.25
    assert link.flush(clock.now) is None
    assert numbers(far) == [1, 2]
    assert link.timer() == pytest.approx(0.3)
    clock.now = 0.5
    link.send(packets(far.endpoint, 4, 1))
    assert numbers(far) == [3]
    assert link.timer() == pytest.approx(0.6)


def test_packets_arrive_at_the_rate_and_in_order() -> None:
    clock, link, far = pair()
    far.send(packets(link.endpoint, 1, 2))
    assert numbers(link) == []
    far.send(packets(link.endpoint, 3, 2))
    clock.now = 0.3
    # 3 and 4 are seen now, and come behind what is on the link
    assert numbers(link) == [1, 2]
    assert link.timer() == pytest.approx(0.4)
    clock.now = 0.51
    assert numbers(link) == [3, 4]
    assert link.timer() is None


def test_full_queues_lose_what_comes_last() -> None:
    clock, link, far = pair(queue=250)
    link.send(packets(far.endpoint, 1, 4))
    far.send(packets(link.endpoint, 5, 4))
    link.receive()
    clock.now = 10.0
    assert numbers(link) == [5, 6]
    assert numbers(far) == [1, 2]
    assert link.counters()["access_lost_in"] == link.counters()["access_lost_out"] == 2


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="a rate and a queue"):
        AccessLink(MemoryNetwork().open(), 0.0, FakeClock())
