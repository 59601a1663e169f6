"""Two connected queue pairs: what is written arrives, whatever the network does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.proto.roce import Attributes, ChannelAdapter, Peer, ProtectionDomain, QueuePair, Received, Status
from inanet.testing.clock import FakeClock
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import endpoint
from inanet.wire.roce import PORT, PSN_MASK
from tests.proto.roce.rig import BASE, Wire, packets_of

#: a patient peer: these tests are about bytes, not about giving up
PATIENT = Attributes(path_mtu=256, window=32, ack_every=8, timeout=10)


def data_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 3, 1023, 1024, 1025, 2048, 170 * 1024, 200_001])
@pytest.mark.parametrize("immediate", [None, 0, 0xFFFFFFFF])
def test_a_write_arrives(size: int, immediate: int | None) -> None:
    wire = Wire()
    wire.b.pair.post_receive(41)
    data = data_of(size)
    wire.a.pair.post_write(data, 5, immediate, wr_id=3)
    wire.run()
    assert (wire.b.memory[5 : 5 + size] == data).all()
    assert not wire.b.memory[:5].any()
    assert not wire.b.memory[5 + size :].any()
    assert wire.a.statuses() == [(3, Status.SUCCESS)]
    key = wire.b.pair.local.key if size else wire.b.pair.domain.key_of(1)
    received = [] if immediate is None else [Received(immediate, 5 if size else 0, size, key, 41)]
    assert wire.b.events == received
    assert wire.a.pair.stats()["packets_sent"] == max(-(-size // 1024), 1)
    assert wire.a.pair.stats()["retransmissions"] == 0
    assert wire.a.pair.timer() is None


def test_arrays_of_any_type_and_other_regions_are_written() -> None:
    wire = Wire()
    other = np.zeros(10, np.float32)
    region = wire.b.pair.domain.register(other, base=64)
    values = np.arange(10, dtype=np.float32)
    wire.a.pair.post_write(values, 64 - BASE, key=region.key)
    frozen = np.frombuffer(b"read-only", np.uint8)
    wire.a.pair.post_write(frozen, 0)
    wire.run()
    assert (other == values).all()
    assert wire.b.memory[:9].tobytes() == b"read-only"


def test_both_directions_at_once_and_many_messages_in_order() -> None:
    wire = Wire(Attributes(window=16))
    for i, host in enumerate(wire.hosts):
        host.pair.post_receive(count=50)
        for k in range(50):
            host.pair.post_write(data_of(100 * k, i * 100 + k), 5000 * k, k, wr_id=k)
    wire.run()
    for i, host in enumerate(wire.hosts):
        assert host.statuses() == [(k, Status.SUCCESS) for k in range(50)]
        peer = wire.hosts[1 - i]
        assert [event.immediate for event in peer.events if isinstance(event, Received)] == list(range(50))
        for k in range(50):
            assert (peer.memory[5000 * k :][: 100 * k] == data_of(100 * k, i * 100 + k)).all()


def test_the_window_bounds_what_is_under_way_and_acknowledgements_are_few() -> None:
    wire = Wire(Attributes(window=16, ack_every=8))
    wire.a.pair.post_write(data_of(100 * 1024), 0)
    assert len(packets_of(wire.a.pair.transmit(0.0))) == 16
    assert wire.a.pair.transmit(0.0) == []
    assert wire.a.pair.unacknowledged == 16
    wire = Wire(Attributes(window=64, ack_every=32))
    wire.a.pair.post_write(data_of(128 * 1024), 0)
    wire.run()
    assert wire.b.pair.stats()["acks_sent"] <= 3


@pytest.mark.parametrize("window", [1, 2, 3, 16, 40])
def test_no_window_waits_for_an_acknowledgement_that_nobody_asked_for(window: int) -> None:
    wire = Wire(Attributes(window=window, ack_every=1000))
    wire.a.pair.post_write(data_of(100 * 1024), 0)
    wire.run()
    assert wire.a.statuses() == [(0, Status.SUCCESS)]
    assert wire.a.pair.stats()["timeouts"] == 0
    assert wire.clock.now == 1000.0


@pytest.mark.parametrize("first", [PSN_MASK, PSN_MASK - 1, PSN_MASK - 40, 0])
def test_sequence_numbers_wrap_in_the_middle_of_a_message(first: int) -> None:
    wire = Wire(psns=(first, 3))
    data = data_of(100 * 1024)
    wire.a.pair.post_write(data, 0)
    wire.run()
    assert (wire.b.memory[: len(data)] == data).all()
    assert wire.a.statuses() == [(0, Status.SUCCESS)]


faults = st.sampled_from([0.0, 0.05, 0.2])


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    drop=faults,
    duplicate=faults,
    reorder=faults,
    corrupt=faults,
    psn=st.sampled_from([0, PSN_MASK - 20, PSN_MASK // 2]),
    sizes=st.lists(st.integers(0, 6000), min_size=1, max_size=8),
)
def test_bytes_are_exact_whatever_is_lost_repeated_reordered_or_damaged(
    seed: int,
    drop: float,
    duplicate: float,
    reorder: float,
    corrupt: float,
    psn: int,
    sizes: list[int],
) -> None:
    def impair(device: Device, name: str, clock: FakeClock) -> Device:
        return FaultInjector(
            device,
            seed + ord(name),
            clock,
            drop=drop,
            duplicate=duplicate,
            reorder=reorder,
            corrupt=corrupt,
            reorder_hold=0.0005,
        )

    wire = Wire(PATIENT, psns=(psn, psn), wrap=impair)
    wire.b.pair.post_receive(count=len(sizes))
    # with two losses in five no number of retries is safe, so the connection is made anew where it gave up
    places = np.cumsum([0, *sizes]).tolist()
    for k, size in enumerate(sizes):
        wire.a.pair.post_write(data_of(size, k), places[k], k, wr_id=k)
    wire.run()
    statuses = wire.a.statuses()
    done = sum(status is Status.SUCCESS for _, status in statuses)
    assert [wr_id for wr_id, _ in statuses] == list(range(len(sizes)))
    if done < len(sizes):
        assert statuses[done:] == [
            (done, Status.RETRY_EXC_ERR),
            *((k, Status.WR_FLUSH_ERR) for k in range(done + 1, len(sizes))),
        ]
        assert drop + corrupt > 0.2
    received = [event for event in wire.b.events if isinstance(event, Received)]
    assert [event.immediate for event in received] == list(range(len(received)))
    assert len(received) >= done
    for k in range(len(received)):
        assert (wire.b.memory[places[k] : places[k + 1]] == data_of(sizes[k], k)).all()
    assert not wire.b.memory[places[-1] :].any()


def test_five_percent_of_everything_is_survived_by_every_message() -> None:
    def impair(device: Device, name: str, clock: FakeClock) -> Device:
        return FaultInjector(
            device,
            ord(name),
            clock,
            drop=0.05,
            duplicate=0.05,
            reorder=0.05,
            corrupt=0.05,
            reorder_hold=0.0005,
        )

    wire = Wire(PATIENT, wrap=impair)
    data = data_of(200_000)
    for first in range(0, len(data), 20_000):
        wire.a.pair.post_write(data[first : first + 20_000], first, wr_id=first)
    wire.run()
    assert (wire.b.memory[: len(data)] == data).all()
    assert wire.a.statuses() == [(first, Status.SUCCESS) for first in range(0, len(data), 20_000)]
    stats, drops = wire.a.pair.stats(), wire.b.pair.drops_by_reason()
    assert stats["naks_received"] > 0
    assert stats["timeouts"] > 0
    assert stats["packets_sent"] - stats["retransmissions"] == 10 * -(-20_000 // 256)
    assert min(drops["bad_icrc"], drops["psn_gap"], drops["duplicate"]) > 0


def test_a_host_serves_many_queue_pairs_behind_one_device() -> None:
    """A ring of three: each host writes to the next one, on two queue pairs per host."""
    wire = Wire(connect=False)
    addresses = [endpoint(f"10.0.1.{i}", 50000) for i in range(3)]
    adapters = [ChannelAdapter(address >> 16) for address in addresses]
    devices = [wire.network.open(f"10.0.1.{i}", PORT) for i in range(3)]
    memories = [np.zeros(5000, np.uint8) for _ in range(3)]
    forward = []
    for i in range(3):
        to = (i + 1) % 3
        domain = ProtectionDomain()
        region = domain.register(memories[to])
        here, there = Peer(addresses[i], 1, psn=i), Peer(addresses[to], 2, psn=7, key=region.key)
        forward.append(QueuePair(here, there))
        backward = QueuePair(there, here, domain=domain)
        adapters[i].add(forward[i])
        adapters[to].add(backward)
        forward[i].connect()
        backward.connect()
        backward.post_receive()
    with pytest.raises(ValueError, match="0x1 is taken"):
        adapters[0].add(forward[0])
    with pytest.raises(ValueError, match="does not belong to this host"):
        adapters[1].add(forward[0])
    for i in range(3):
        forward[i].post_write(data_of(5000, i), 0, i)
    happened = []
    for _ in range(10):
        for adapter, device in zip(adapters, devices, strict=True):
            while (batch := device.receive()) is not None:
                adapter.receive(batch, 0.0)
            for transmission in adapter.transmit(0.0):
                device.send(transmission)
            happened += adapter.events()
    assert len(happened) == 6
    for i in range(3):
        assert (memories[(i + 1) % 3] == data_of(5000, i)).all()
        assert adapters[i].timer() is None
        assert not any(adapters[i].drops_by_reason().values())
    adapters[0].remove(forward[0])
    forward[0].post_write(data_of(1), 0)
    sent = forward[0].transmit(0.0)
    assert isinstance(sent[0], Transmission)
    assert adapters[0].transmit(0.0) == []
    assert adapters[0].timer() is None
