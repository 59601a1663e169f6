"""The fault injector, on scripted devices and a clock that only the test moves."""

from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.phy.fault import FaultInjector
from inanet.phy.memory import MemoryNetwork
from inanet.wire.batch import Transmission
from tests.phy.helpers import PEER, ScriptedDevice, batch_of, contents, numbered

ALL = {"drop": 0.05, "duplicate": 0.05, "reorder": 0.05, "corrupt": 0.05}


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def packets_of(count: int, length: int = 40) -> list[bytes]:
    data = numbered(count, length).tobytes()
    return [data[i * length : (i + 1) * length] for i in range(count)]


def injector(batches: list[list[bytes]], seed: int = 1, **faults: object) -> tuple[FaultInjector, Clock]:
    clock = Clock()
    device = ScriptedDevice(batch_of(packets) for packets in batches)
    return FaultInjector(device, seed, clock, **faults), clock  # type: ignore[arg-type]


def drain(device: FaultInjector) -> list[bytes]:
    got: list[bytes] = []
    while (batch := device.receive()) is not None:
        assert len(batch) > 0
        assert batch.sources.tolist() == [PEER] * len(batch)
        got += contents(batch)
    return got


def drain_all(device: FaultInjector, clock: Clock) -> list[bytes]:
    """Everything, by moving the clock from one deadline to the next."""
    got = drain(device)
    while (due := device.timer()) is not None:
        clock.now = max(clock.now, due)
        got += contents(device.flush(clock.now))
    return got


def split(packets: list[bytes], sizes: list[int]) -> list[list[bytes]]:
    parts, at = [], 0
    for size in sizes:
        parts.append(packets[at : at + size])
        at += size
    return [*parts, packets[at:]]


def test_without_faults_the_batch_itself_is_passed_on() -> None:
    batch = batch_of(packets_of(9))
    device = FaultInjector(ScriptedDevice([batch]), 1, Clock())
    assert device.receive() is batch
    assert device.receive() is None
    assert device.timer() is None


def test_counts_and_bytes_of_a_seed_never_change() -> None:
    packets = packets_of(20_000)
    device, clock = injector(split(packets, [3000] * 6), seed=2024, **ALL)
    got = drain_all(device, clock)
    counts = device.counters()
    assert counts == {
        "rx_packets": 5,
        "injected": 1006,
        "injected_duplicates": 950,
        "injected_corruptions": 896,
        "injected_reorderings": 972,
        "injected_delays": 0,
    }
    assert len(got) == 20_000 - counts["injected"] + counts["injected_duplicates"]
    digest = "00cc02f47c5a6f9140215c32b4de9503e75c7a78567e1b28e0cb8a6faf1ab3cd"
    assert sha256(b"".join(got)).hexdigest() == digest
    again, clock = injector(split(packets, [3000] * 6), seed=2024, **ALL)
    assert drain_all(again, clock) == got
    other, clock = injector(split(packets, [3000] * 6), seed=2025, **ALL)
    assert drain_all(other, clock) != got


@pytest.mark.parametrize("name", ["drop", "duplicate", "reorder", "corrupt"])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_each_fault_hits_its_share(name: str, share: float) -> None:
    count = 20_000
    device, clock = injector([packets_of(count, 8)], seed=5, **{name: share})
    drain_all(device, clock)
    counter = {
        "drop": "injected",
        "duplicate": "injected_duplicates",
        "reorder": "injected_reorderings",
        "corrupt": "injected_corruptions",
    }
    hits = {key: value for key, value in device.counters().items() if key.startswith("injected") and value}
    assert list(hits) == [counter[name]]
    # five standard deviations of the binomial distribution
    assert abs(hits[counter[name]] - count * share) < 5 * (count * share * (1 - share)) ** 0.5


def test_drops_lose_and_change_nothing_else() -> None:
    packets = packets_of(1000)
    device, _ = injector(split(packets, [400]), drop=0.3)
    got = drain(device)
    kept = set(got)
    assert got == [packet for packet in packets if packet in kept]
    assert len(got) == 1000 - device.counters()["injected"]


def test_a_batch_that_is_lost_whole_does_not_look_like_an_empty_device() -> None:
    device, _ = injector([packets_of(3), packets_of(2)], drop=1.0)
    assert device.receive() is None
    assert device.counters()["injected"] == 5


def test_a_duplicate_follows_its_original() -> None:
    packets = packets_of(300)
    device, _ = injector([packets], duplicate=0.2)
    got = drain(device)
    times = Counter(got)
    assert set(times.values()) == {1, 2}
    assert got == [packet for packet in packets for _ in range(times[packet])]


def test_corruption_flips_exactly_one_bit_of_a_copy() -> None:
    packets = packets_of(8000, 33)
    batch = batch_of(packets)
    device = FaultInjector(ScriptedDevice([batch]), 3, Clock(), corrupt=0.5)
    got = contents(device.receive())
    flipped = []
    for before, after in zip(packets, got, strict=True):
        change = int.from_bytes(before, "little") ^ int.from_bytes(after, "little")
        assert change.bit_count() <= 1
        if change:
            flipped.append(change.bit_length() - 1)
    assert len(flipped) == device.counters()["injected_corruptions"]
    # every bit of the packet is a target
    assert set(flipped) == set(range(33 * 8))
    assert contents(batch) == packets


def test_the_duplicate_of_a_damaged_packet_is_intact() -> None:
    packets = packets_of(50)
    device, _ = injector([packets], corrupt=1.0, duplicate=1.0)
    got = drain(device)
    assert got[1::2] == packets
    assert all(bad != good for bad, good in zip(got[::2], packets, strict=True))


def test_empty_packets_cannot_be_damaged() -> None:
    device, _ = injector([[b"", b"x"]], corrupt=1.0)
    got = drain(device)
    assert got[0] == b""
    assert got[1] != b"x"
    assert device.counters()["injected_corruptions"] == 1


def test_reordered_packets_come_up_to_span_later() -> None:
    packets = packets_of(5000)
    device, clock = injector(split(packets, [70] * 60), reorder=0.1, reorder_span=6)
    got = drain_all(device, clock)
    assert Counter(got) == Counter(packets)
    # each packet is overtaken by at most 6 later ones, and only reordered ones are
    place = {packet: i for i, packet in enumerate(got)}
    where = np.array([place[packet] for packet in packets])
    overtaken = np.array([np.count_nonzero(where[i + 1 : i + 20] < where[i]) for i in range(5000)])
    assert overtaken.max() == 6
    assert np.count_nonzero(overtaken) <= device.counters()["injected_reorderings"]
    assert np.count_nonzero(overtaken) > 400


def test_a_reordered_packet_that_nothing_follows_is_released_by_time() -> None:
    device, clock = injector([packets_of(1)], reorder=1.0, reorder_hold=0.25)
    assert device.receive() is None
    assert device.timer() == 100.25
    assert device.flush(100.2499) is None
    clock.now = 100.25
    assert contents(device.flush(clock.now)) == packets_of(1)
    assert device.timer() is None


def test_receiving_releases_what_is_due_as_well() -> None:
    device, clock = injector([packets_of(2)], delay=(1.0, 1.0))
    assert device.receive() is None
    clock.now = 101.0
    assert contents(device.receive()) == packets_of(2)
    assert device.receive() is None


def test_delays_lie_in_their_range_and_reorder_nothing_else() -> None:
    packets = packets_of(400)
    device, clock = injector([packets], delay=(0.010, 0.030))
    assert drain(device) == []
    assert device.counters()["injected_delays"] == 400
    times, got = [], []
    while (due := device.timer()) is not None:
        clock.now = due
        batch = device.flush(due)
        times.append(due - 100.0)
        got += contents(batch)
    assert 0.010 <= times[0] < 0.011
    assert 0.029 < times[-1] <= 0.030
    assert times == sorted(times)
    assert Counter(got) == Counter(packets)
    assert got != packets


def test_a_share_of_packets_is_delayed_and_due_ones_come_before_the_next_batch() -> None:
    packets = packets_of(200)
    device, clock = injector(split(packets, [100]), delay=(0.5, 1.0), delayed=0.25)
    early = contents(device.receive())
    late = [packet for packet in packets[:100] if packet not in early]
    assert 10 < len(late) < 45
    clock.now = 101.0
    second = contents(device.receive())
    assert set(second[: len(late)]) == set(late)
    assert set(second[len(late) :]) < set(packets[100:])


@given(
    sizes=st.lists(st.integers(0, 12), max_size=12),
    seed=st.integers(0, 1000),
    reorder=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_outcome_does_not_depend_on_how_packets_were_batched(
    sizes: list[int], seed: int, reorder: float
) -> None:
    packets = packets_of(90, 12)
    faults = {"drop": 0.2, "duplicate": 0.2, "corrupt": 0.2, "reorder": reorder}
    whole, clock = injector([packets], seed, **faults)
    expected = drain(whole)
    parts, clock = injector(split(packets, sizes), seed, **faults)
    assert drain(parts) == expected
    # what is still held is the same, too
    clock.now += 1.0
    assert contents(parts.flush(clock.now)) == contents(whole.flush(clock.now))
    assert whole.counters() == parts.counters()


def test_packets_held_back_survive_the_reuse_of_the_arena() -> None:
    network = MemoryNetwork()
    sender, clock = network.open(), Clock()
    device = FaultInjector(network.open(), 1, clock, delay=(1.0, 1.0))
    part = Transmission(device.endpoint, numbered(20, 100), np.arange(20) * 100, 100)
    sender.send(part)
    assert device.receive() is None
    sender.send(Transmission(device.endpoint, np.zeros(2000, np.uint8), np.arange(20) * 100, 100))
    assert device.receive() is None
    clock.now = 101.0
    assert contents(device.flush(clock.now))[:20] == contents(part)
    device.close()
    assert network.device(device.endpoint) is None


def test_held_packets_of_an_inner_injector_are_impaired_by_the_outer_one() -> None:
    clock = Clock()
    inner = FaultInjector(ScriptedDevice([batch_of(packets_of(10))]), 1, clock, delay=(1.0, 1.0))
    outer = FaultInjector(inner, 2, clock, delay=(0.5, 0.5))
    assert outer.receive() is None
    assert outer.timer() == 101.0
    assert outer.flush(101.0) is None
    assert outer.timer() == 101.5
    assert contents(outer.flush(101.5)) == packets_of(10)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"drop": 1.1}, "drop is a probability between 0 and 1, not 1.1"),
        ({"corrupt": -0.1}, "corrupt is a probability"),
        ({"reorder": float("nan")}, "reorder is a probability"),
        ({"delay": (2.0, 1.0)}, "delay is a range"),
        ({"delay": (-1.0, 1.0)}, "delay is a range"),
        ({"reorder_span": 0}, "reorder_span is a number of packets"),
    ],
)
def test_nonsense_is_refused(faults: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        injector([], **faults)


def test_everything_else_goes_to_the_device() -> None:
    device = ScriptedDevice([], [2])
    wrapped = FaultInjector(device, 1, Clock(), **ALL)  # type: ignore[arg-type]
    assert wrapped.endpoint == device.endpoint
    assert wrapped.rx_budget == device.rx_budget
    assert wrapped.fileno() == 42
    assert wrapped.send(Transmission(PEER, np.zeros(40, np.uint8), np.zeros(5, np.int64), 8), 1) == 2
    wrapped.close()
    assert device.closed == 1
