"""The in-memory network, and the checks every device makes on what it is given."""

import numpy as np
import pytest

from inanet.phy.device import aligned_offsets, check_transmission
from inanet.phy.memory import BATCH_TRANSMISSIONS, MemoryNetwork
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from tests.phy.helpers import PEER, contents, numbered


def transmission(destination: int, count: int, length: int, seed: int = 0) -> Transmission:
    offsets = np.random.default_rng(seed).permutation(count).astype(np.int64) * length
    return Transmission(destination, numbered(count, length, seed), offsets, length)


def test_packets_arrive_in_order_and_aligned() -> None:
    network = MemoryNetwork()
    first, second, receiver = network.open(), network.open(), network.open()
    sent = []
    for i, (device, length) in enumerate([(first, 1052), (second, 7), (first, 36), (second, 1052)]):
        part = transmission(receiver.endpoint, 5 + i, length, i)
        assert device.send(part, 2) == 3 + i
        sent += [(device.endpoint, packet) for packet in contents(part)[2:]]
    batch = receiver.receive()
    assert batch is not None
    assert list(zip(batch.sources.tolist(), contents(batch), strict=True)) == sent
    assert not (batch.offsets % 4).any()
    assert receiver.receive() is None
    assert receiver.counters()["rx_packets"] == len(sent)
    assert receiver.counters()["rx_bytes"] == sum(len(packet) for _, packet in sent)
    assert first.counters()["tx_packets"] == 3 + 5


def test_sending_copies() -> None:
    network = MemoryNetwork()
    sender, receiver = network.open(), network.open()
    part = transmission(receiver.endpoint, 3, 100)
    expected = contents(part)
    sender.send(part)
    part.arena[:] = 0
    assert contents(receiver.receive()) == expected


def test_a_receive_joins_a_bounded_number_of_sends() -> None:
    network = MemoryNetwork()
    sender, receiver = network.open(), network.open()
    for _ in range(BATCH_TRANSMISSIONS + 1):
        sender.send(transmission(receiver.endpoint, 2, 8))
    sizes = [len(contents(receiver.receive())) for _ in range(3)]
    assert sizes == [2 * BATCH_TRANSMISSIONS, 2, 0]


def test_overflow_keeps_the_first_and_counts_the_rest() -> None:
    network = MemoryNetwork()
    sender, receiver = network.open(), network.open(queue_packets=10)
    assert receiver.rx_budget == 10
    parts = [transmission(receiver.endpoint, 8, 20, seed) for seed in range(3)]
    for part in parts:
        assert sender.send(part) == 8
    assert receiver.counters()["kernel_overflow"] == 14
    assert contents(receiver.receive()) == contents(parts[0]) + contents(parts[1])[:2]
    sender.send(parts[2])
    assert contents(receiver.receive()) == contents(parts[2])


def test_unknown_and_closed_receivers_lose_packets() -> None:
    network = MemoryNetwork()
    sender, receiver = network.open(), network.open()
    receiver.close()
    receiver.close()
    assert sender.send(transmission(receiver.endpoint, 4, 20)) == 4
    assert sender.send(transmission(PEER, 3, 20)) == 3
    assert sender.counters()["unreachable"] == 7
    assert receiver.receive() is None
    with pytest.raises(OSError, match="is closed"):
        receiver.send(transmission(sender.endpoint, 1, 20))


def test_addresses() -> None:
    network = MemoryNetwork()
    device = network.open("10.0.0.1", 7000)
    assert device.endpoint == endpoint("10.0.0.1", 7000)
    with pytest.raises(OSError, match=r"10\.0\.0\.1:7000 is already open"):
        network.open("10.0.0.1", 7000)
    device.close()
    assert network.open("10.0.0.1", 7000).endpoint == device.endpoint
    assert network.open("10.0.0.2").endpoint != network.open("10.0.0.2").endpoint


def test_there_is_nothing_to_watch() -> None:
    device = MemoryNetwork().open()
    with pytest.raises(OSError, match="no file descriptor"):
        device.fileno()
    assert device.timer() is None
    assert device.flush(1.0) is None


@pytest.mark.parametrize(
    ("arena", "offsets", "length", "message"),
    [
        (
            np.zeros(100, np.uint8),
            [0, 60],
            50,
            "offsets 0 to 60 with packets of up to 50 B leave the arena of 100 B",
        ),
        (np.zeros(100, np.uint8), [-1], 50, "offsets -1 to -1"),
        (np.zeros(100, np.uint8), [0], 0, "packets of 0 B"),
        (np.zeros(100, np.int32), [0], 4, "not 1-D int32"),
        (np.zeros((10, 10), np.uint8), [0], 4, "not 2-D uint8"),
        (np.zeros(100, np.uint8)[::2], [0], 4, "contiguous"),
    ],
)
def test_transmissions_outside_their_arena_are_refused(
    arena: np.ndarray, offsets: list[int], length: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_transmission(Transmission(PEER, arena, np.array(offsets, np.int64), length))


def test_offsets_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.9:9: offsets must be contiguous int64, not int32"):
        check_transmission(Transmission(PEER, np.zeros(9, np.uint8), np.zeros(1, np.int32), 4))


def test_aligned_offsets() -> None:
    offsets, size = aligned_offsets(np.array([5, 0, 4, 1], np.int64))
    assert (offsets.tolist(), size) == ([0, 8, 8, 12], 16)
    assert aligned_offsets(np.empty(0, np.int64))[1] == 0
