"""Hosts of a ring in threads of their own; whole packets travel inside datagrams on the loopback, so nobody needs privileges."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inanet.client.ringhost import RingHost, join_ring, ring_of
from inanet.control.exits import Failure
from inanet.phy.udp import UdpDevice
from inanet.proto.netreduce.plan import Sizes
from inanet.proto.netreduce.ring import Member
from inanet.proto.plan import ExponentMode, TensorSpec
from inanet.proto.roce import Attributes
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

ADDRESSES = ("10.9.0.1", "10.9.0.2")
SIZES = Sizes(length=4, packet_bytes=256)
SUM = TensorSpec("t", "i32", (3000,), "sum", ExponentMode.NONE)
DEADLINE = 60.0


class Inside(UdpDevice):
    """Sends to the datagram endpoints of ``others``, by the address that stands in the packets."""

    others: dict[int, int]
    failure: Exception | None = None

    def send(self, transmission: Transmission, start: int = 0) -> int:
        to = self.others[transmission.destination >> 16]
        return super().send(replace(transmission, destination=to), start)

    def receive(self) -> PacketBatch | None:
        if self.failure is not None:
            raise self.failure
        return super().receive()


@pytest.fixture
def hosts() -> Iterator[Callable[..., list[RingHost]]]:
    """Makes a ring of the two addresses, with a member's options."""
    with ExitStack() as stack:

        def make(pause: float = 0.0, attributes: Attributes | None = None, **options: Any) -> list[RingHost]:
            devices = [Inside("127.0.0.1") for _ in ADDRESSES]
            others = {
                endpoint(address, 0) >> 16: device.endpoint
                for address, device in zip(ADDRESSES, devices, strict=True)
            }
            made = []
            for rank, device in enumerate(devices):
                device.others = others
                member = Member(
                    1, 3, rank, 2, 2, SIZES, attributes=attributes or Attributes(path_mtu=256), **options
                )
                made.append(RingHost(join_ring(member, ADDRESSES), device, pause=pause))
                stack.callback(made[-1].close)
                made[-1].add_tensor(0, SUM)
            return made

        yield make


@pytest.mark.parametrize("pause", [0.0, 0.001])
def test_without_a_switch_the_hosts_make_the_sum_themselves(
    hosts: Callable[..., list[RingHost]], pause: float
) -> None:
    ring = hosts(pause)
    for round_ in range(1, 3):
        arrays = [np.arange(3000, dtype=np.int32) * (rank + round_) for rank in range(2)]
        expected = arrays[0] + arrays[1]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda host, array: host.all_reduce(0, [array], DEADLINE), ring, arrays))
        for array in arrays:
            np.testing.assert_array_equal(array, expected)
    assert {host.worker.mode for host in ring} == {"ring"}


def test_a_neighbour_that_does_not_come_is_not_waited_for_beyond_the_deadline(
    hosts: Callable[..., list[RingHost]],
) -> None:
    one, _ = hosts()
    with pytest.raises(
        Failure, match=r"job 1, ring 3, rank 0: round 1 is not done in 0.05 s; .*messages_sent"
    ):
        one.all_reduce(0, [np.zeros(3000, np.int32)], 0.05)


def test_a_ring_that_is_broken_is_told_to_who_waits(hosts: Callable[..., list[RingHost]]) -> None:
    hasty = Attributes(path_mtu=256, timeout=1, retry_cnt=0)
    one, other = hosts(attributes=hasty, mode="ring", skew=0.0)
    other.close()
    with pytest.raises(Failure, match=r"rank 0: the connection to rank 1 .* is gone"):
        one.all_reduce(0, [np.zeros(3000, np.int32)], DEADLINE)


def test_what_goes_wrong_in_the_thread_is_raised_where_somebody_waits(
    hosts: Callable[..., list[RingHost]],
) -> None:
    one, _ = hosts()
    one._device.failure = OSError("the interface has gone")  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="the interface has gone"):
        one.all_reduce(0, [np.zeros(3000, np.int32)], DEADLINE)


def test_a_switch_is_told_what_the_hosts_have() -> None:
    first, second = ring_of(ADDRESSES)
    assert str(first) == "10.9.0.1 -> 10.9.0.2 (QP 17)"
    assert (second.source, second.destination) == (first.destination, first.source)
    member = Member(1, 3, 0, 2, 2, SIZES, attributes=Attributes(path_mtu=256))
    assert join_ring(member, ADDRESSES).inlet.number == first.queue_pair
