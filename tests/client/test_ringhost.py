"""Hosts of a ring in threads of their own; whole packets travel inside datagrams on the loopback, so nobody needs privileges."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inanet.client.ringhost import RingHost, join_ring, join_rings, ring_of
from inanet.phy.udp import UdpDevice
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.parallel import members
from inanet.proto.netreduce.ring import Member, Sizes
from inanet.proto.roce import Attributes
from inanet.service.exits import Failure
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import endpoint

ADDRESSES = ("10.9.0.1", "10.9.0.2")
SIZES = Sizes(length=4, packet_bytes=256)
SUM = TensorSpec("t", "i32", (3000,), "sum", ExponentMode.NONE)
DEADLINE = 20.0


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


def devices() -> list[Inside]:
    made = [Inside("127.0.0.1") for _ in ADDRESSES]
    others = {
        endpoint(address, 0) >> 16: device.endpoint for address, device in zip(ADDRESSES, made, strict=True)
    }
    for device in made:
        device.others = others
    return made


@pytest.fixture
def hosts() -> Iterator[Callable[..., list[RingHost]]]:
    """Makes a ring of the two addresses, with a member's options."""
    with ExitStack() as stack:

        def make(pause: float = 0.0, attributes: Attributes | None = None, **options: Any) -> list[RingHost]:
            made = []
            for rank, device in enumerate(devices()):
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
        Failure, match=r"job 1, ring 3, rank 0: round 1 is not done in 0.05 s: .*messages_sent"
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


def test_ranks_of_a_host_share_their_memory_and_have_a_ring_each() -> None:
    """Three ranks on each of two hosts: parallel rings on one device, each with a piece of the tensor."""
    each = 3
    options = {"sizes": SIZES, "attributes": Attributes(path_mtu=256)}
    with ExitStack() as stack:
        ring = []
        for host, device in enumerate(devices()):
            places = members("parallel-ring", 1, 3, host, 2, each, **options)
            ring.append(RingHost(join_rings(places, ADDRESSES, each), device))
            stack.callback(ring[-1].close)
            ring[-1].add_tensor(0, SUM)
        arrays = [
            [np.arange(3000, dtype=np.int32) * (3 * host + rank) for rank in range(each)] for host in (0, 1)
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda host, mine: host.all_reduce(0, mine, DEADLINE), ring, arrays))
        for array in (*arrays[0], *arrays[1]):
            np.testing.assert_array_equal(array, np.arange(3000) * 15)
        assert [len(host.worker.parts) for host in ring] == [each, each]  # type: ignore[union-attr]
    pairs = {one.queue_pair for number in range(each) for one in ring_of(ADDRESSES, number)}
    assert len(pairs) == each


def test_a_switch_is_told_what_the_hosts_have() -> None:
    first, second = ring_of(ADDRESSES)
    assert str(first) == "10.9.0.1 -> 10.9.0.2 (QP 17)"
    assert (second.source, second.destination) == (first.destination, first.source)
    member = Member(1, 3, 0, 2, 2, SIZES, attributes=Attributes(path_mtu=256))
    assert join_ring(member, ADDRESSES).inlet.number == first.queue_pair


def _both(ring: list[RingHost], arrays: list[np.ndarray], deadline: float = DEADLINE) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda host, array: host.all_reduce(0, [array], deadline), ring, arrays))


def test_a_round_that_was_given_up_ends_no_later_one_and_leaves_its_array_alone(
    hosts: Callable[..., list[RingHost]],
) -> None:
    one, other = hosts()
    late = np.full(3000, 7, np.int32)
    with pytest.raises(Failure, match="round 1 is not done"):
        one.all_reduce(0, [late], 0.01)
    # the neighbour comes after all: that ends round 1 here, too
    other.all_reduce(0, [np.full(3000, 1, np.int32)], DEADLINE)
    arrays = [np.arange(3000, dtype=np.int32), np.arange(3000, dtype=np.int32)]
    _both([one, other], arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, 2 * np.arange(3000))
    assert (late == 7).all()


def test_a_ring_that_is_over_says_so_again_at_once(hosts: Callable[..., list[RingHost]]) -> None:
    hasty = Attributes(path_mtu=256, timeout=1, retry_cnt=0)
    one, other = hosts(attributes=hasty, mode="ring", skew=0.0)
    other.close()
    for _ in range(2):
        with pytest.raises(Failure, match=r"rank 0: the connection to rank 1 .* is gone"):
            one.all_reduce(0, [np.zeros(3000, np.int32)], DEADLINE)


def test_an_array_that_does_not_suit_is_the_callers_error_alone(
    hosts: Callable[..., list[RingHost]],
) -> None:
    ring = hosts()
    with pytest.raises(ValueError, match="2999"):
        ring[0].all_reduce(0, [np.zeros(2999, np.int32)], DEADLINE)
    with pytest.raises(KeyError):
        ring[0].all_reduce(5, [np.zeros(3000, np.int32)], DEADLINE)
    arrays = [np.ones(3000, np.int32) for _ in ring]
    _both(ring, arrays)
    assert (arrays[0] == 2).all()


def test_an_integer_sum_that_does_not_fit_is_refused_on_all_hosts(
    hosts: Callable[..., list[RingHost]],
) -> None:
    ring = hosts()
    arrays = [np.zeros(3000, np.int32) for _ in ring]
    for array in arrays:
        array[1234] = 1 << 30
    with ThreadPoolExecutor(2) as pool:
        rounds = [
            pool.submit(host.all_reduce, 0, [array], DEADLINE)
            for host, array in zip(ring, arrays, strict=True)
        ]
    for one in rounds:
        with pytest.raises(Failure, match=r"round 1: .*element 1234 does not fit"):
            one.result()
