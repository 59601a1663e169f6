"""Pacing in virtual time: what passes in any interval, and when the sender is called again."""

import asyncio
import itertools
import select
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.aio.driver import Driver
from inanet.phy.pacing import BURST, OVERHEAD, Pacer, default_burst
from inanet.phy.timerfd import TimerFd
from inanet.testing.clock import FakeClock
from inanet.wire.batch import Transmission
from tests.phy.helpers import PEER, ScriptedDevice

ROW = 1052
WIRE = ROW + OVERHEAD
GIGABIT = 1e9


class FakeTimer:
    """Remembers what it was set to."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.closed = 0

    def fileno(self) -> int:
        return 77

    def set(self, seconds: float) -> None:
        self.seconds = seconds

    def clear(self) -> None:
        self.seconds = None

    def close(self) -> None:
        self.closed += 1


class Rig:
    """A pacer in front of a device that takes everything, or what its script says."""

    def __init__(self, rate: float = GIGABIT, burst: int = BURST, accepts: Iterable[int] = ()) -> None:
        self.clock = FakeClock()
        self.timer = FakeTimer()
        self.device = ScriptedDevice(accepts=accepts)
        self.pacer = Pacer(self.device, rate, burst, self.clock, self.timer)
        #: time and wire bytes of everything that passed
        self.log: list[tuple[float, int]] = []

    def send(self, transmission: Transmission, start: int = 0) -> int:
        taken = self.pacer.send(transmission, start)
        if taken:
            self.log.append((self.clock.now, taken * (transmission.length + OVERHEAD)))
        return taken

    def push(self, transmission: Transmission, late: float = 0.0) -> None:
        """Send everything, woken ``late`` seconds after each deadline."""
        done = self.send(transmission)
        while done < len(transmission):
            assert self.timer.seconds is not None
            assert self.timer.seconds > 0
            self.clock.advance(self.timer.seconds + late)
            taken = self.send(transmission, done)
            assert taken > 0, "woken for nothing"
            done += taken


def rows(count: int, length: int = ROW) -> Transmission:
    return Transmission(PEER, np.zeros(length, np.uint8), np.zeros(count, np.int64), length)


@pytest.mark.parametrize("rate", [1e6, 1e9, 25e9])
@pytest.mark.parametrize("late", [0.0, 0.2])
def test_the_rate_is_held_exactly_even_when_woken_late(rate: float, late: float) -> None:
    """``late`` as a share of the time one super-frame takes: the second half of the bucket absorbs it."""
    rig = Rig(rate)
    began = rig.clock.now
    rig.push(rows(100_000), late * 62 * WIRE * 8 / rate)
    seconds = rig.clock.now - began
    ideal = (100_000 * WIRE - BURST) * 8 / rate
    assert ideal * 0.999 < seconds < ideal * 1.001


def test_super_frames_stay_whole() -> None:
    rig = Rig()
    rig.push(rows(1000))
    packets = [size // WIRE for _, size in rig.log]
    assert packets == [124, *[62] * 14, 8]


def test_a_small_burst_is_kept_and_still_holds_the_rate() -> None:
    rig = Rig(burst=10 * WIRE)
    began = rig.clock.now
    rig.push(rows(5000))
    assert max(size for _, size in rig.log) == 10 * WIRE
    assert {size for _, size in rig.log[1:-1]} == {5 * WIRE}
    assert rig.clock.now - began == pytest.approx((5000 - 10) * WIRE * 8 / GIGABIT, rel=1e-6)


@given(
    rate=st.floats(1e6, 1e11),
    burst=st.integers(WIRE, 1 << 20),
    steps=st.lists(
        st.tuples(st.integers(1, 700), st.sampled_from([1, 40, 300, ROW]), st.floats(0.0, 0.01)),
        min_size=1,
        max_size=25,
    ),
)
def test_no_interval_sees_more_than_burst_and_rate(
    rate: float, burst: int, steps: list[tuple[int, int, float]]
) -> None:
    rig = Rig(rate, burst)
    for count, length, pause in steps:
        transmission = rows(count, length)
        done = 0
        for _ in range(4):
            done += rig.send(transmission, done)
            if done == count:
                break
            rig.clock.advance(rig.timer.seconds if rig.timer.seconds is not None else pause)
        rig.clock.advance(pause)
    for first, last in itertools.combinations_with_replacement(range(len(rig.log)), 2):
        seconds = rig.log[last][0] - rig.log[first][0]
        passed = sum(size for _, size in rig.log[first : last + 1])
        assert passed <= burst + seconds * rate / 8 + 1


def test_an_empty_bucket_gives_nothing_whatever_rounding_left_in_it() -> None:
    """At this rate a float of seconds resolves less than the slack: the bucket ends a hair below empty."""
    rig = Rig(95130053606.0, 24519)
    transmission = rows(35)
    done = rig.send(transmission)
    while done < 35:
        assert rig.timer.seconds is not None
        rig.clock.advance(rig.timer.seconds)
        done += rig.send(transmission, done)
    assert [rig.send(rows(12)) for _ in range(3)] == [0, 0, 0]


def test_the_default_burst_covers_a_busy_millisecond() -> None:
    assert default_burst(1e9) == BURST
    assert default_burst(10e9) == 1_250_000
    rig = Rig(10e9, 1_250_000)
    rig.push(rows(5000))
    # four super-frames at a time: at such rates waking up for each would be too much work
    assert {size // WIRE for _, size in rig.log[1:-1]} == {248}


def test_a_send_that_takes_long_does_not_add_to_the_burst() -> None:
    rig = Rig()
    send = rig.device.send

    def slowly(transmission: Transmission, start: int = 0) -> int:
        rig.clock.advance(1.0)
        return send(transmission, start)

    rig.device.send = slowly  # type: ignore[method-assign]
    assert rig.send(rows(124)) == 124
    assert rig.send(rows(62)) == 0


def test_idle_time_is_worth_one_burst() -> None:
    rig = Rig()
    rig.clock.advance(1000)
    assert rig.send(rows(1000)) == 124
    rig.clock.advance(1000)
    assert rig.send(rows(1000)) == 124


def test_few_packets_do_not_wait_for_a_super_frame() -> None:
    rig = Rig()
    assert rig.send(rows(124)) == 124
    assert rig.send(rows(5)) == 0
    assert rig.timer.seconds is not None
    spare = BURST - 124 * WIRE
    assert rig.timer.seconds == pytest.approx((5 * WIRE - spare) * 8 / GIGABIT)
    rig.clock.advance(rig.timer.seconds)
    assert rig.send(rows(5)) == 5
    assert rig.timer.seconds is None


def test_only_what_the_device_took_is_charged_and_its_own_descriptor_is_waited_for() -> None:
    rig = Rig(accepts=[40])
    assert rig.send(rows(62)) == 40
    assert rig.pacer.retry_at is None
    assert rig.pacer.retry_fileno() is None
    assert rig.send(rows(84)) == 84
    assert rig.send(rows(62)) == 0
    assert rig.pacer.retry_at is not None
    assert rig.pacer.retry_fileno() == 77
    assert rig.pacer.counters() == {"rx_packets": 5, "paced": 1}


def test_from_start_on() -> None:
    rig = Rig()
    transmission = rows(200)
    assert rig.send(transmission, 150) == 50
    assert rig.send(transmission, 200) == 0
    assert rig.timer.seconds is None


def test_what_can_never_pass_is_refused() -> None:
    rig = Rig(burst=1000)
    with pytest.raises(
        ValueError, match=r"packets of 1094 B to 127.0.0.9:9, .* burst of 1000 B: raise the burst"
    ):
        rig.send(rows(1))
    for rate, burst in ((0, BURST), (GIGABIT, 0)):
        with pytest.raises(ValueError, match="lets nothing pass"):
            Rig(rate, burst)


def test_closing_closes_both() -> None:
    rig = Rig()
    rig.pacer.close()
    assert (rig.timer.closed, rig.device.closed) == (1, 1)


def test_a_timerfd_is_readable_from_its_expiry_until_it_is_set_again() -> None:
    timer = TimerFd()
    poll = select.poll()
    poll.register(timer.fileno(), select.POLLIN)
    timer.set(1e-6)
    assert poll.poll(10_000)
    timer.set(3600.0)
    assert not poll.poll(0)
    timer.set(0.0)
    assert poll.poll(10_000)
    timer.clear()
    assert not poll.poll(0)
    timer.close()
    timer.close()
    assert timer.fileno() == -1
    with pytest.raises(OSError, match="setting a timer"):
        timer.set(1.0)


class OneTransmission:
    """A node that has one thing to send, once."""

    groups: frozenset[int] = frozenset()

    def __init__(self, transmission: Transmission) -> None:
        self.waiting = [transmission]

    def transmit(self, now: float) -> Iterable[Transmission]:
        while self.waiting:
            yield self.waiting.pop()

    def events(self) -> list[object]:
        return []

    def timer(self) -> None:
        return None


class Recorder(ScriptedDevice):
    """Counts the packets of each send until there were 500, and has a descriptor of its own."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.sizes: list[int] = []
        self.complete = asyncio.Event()

    def fileno(self) -> int:
        return self.descriptor

    def counters(self) -> dict[str, int]:
        return {}

    def send(self, transmission: Transmission, start: int = 0) -> int:
        taken = super().send(transmission, start)
        self.sizes.append(taken)
        if sum(self.sizes) == 500:
            self.complete.set()
        return taken


async def test_the_driver_goes_on_when_the_timer_fires() -> None:
    """With real descriptors, and virtual time that passes when the timer is set."""
    idle, timer, clock = TimerFd(), TimerFd(), FakeClock()
    device = Recorder(idle.fileno())
    set_timer = timer.set

    def fire(seconds: float) -> None:
        clock.advance(seconds)
        set_timer(0.0)

    timer.set = fire  # type: ignore[method-assign]
    pacer = Pacer(device, GIGABIT, BURST, clock, timer)
    driver = Driver(OneTransmission(rows(500)), pacer, lambda event: None)  # type: ignore[arg-type]
    try:
        driver.kick()
        async with asyncio.timeout(10):
            await device.complete.wait()
        assert device.sizes == [124, *[62] * 6, 4]
        poll = select.poll()
        poll.register(timer.fileno(), select.POLLIN)
        assert not poll.poll(0), "the loop would spin"
    finally:
        driver.close()
        idle.close()
