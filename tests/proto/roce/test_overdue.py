"""Acknowledgements that are late because somebody waited for a processor, and those that are lost."""

import pytest

from inanet.proto.roce import Attributes, QueuePair
from inanet.proto.roce.queue_pair import CALM, LONGEST, Overdue
from inanet.wire.roce import timeout_seconds
from tests.proto.roce.rig import Wire

CODE = 13
BASE = timeout_seconds(CODE)
assert BASE is not None
TRIP = 0.1


def repeated(attributes: Attributes) -> int:
    """Packets sent again by a writer of forty messages, whose peer takes three times the timeout to answer; none is lost."""
    wire = Wire(attributes)
    a, b, clock = wire.a.pair, wire.b.pair, wire.clock
    data = wire.a.memory[:2048]
    for number in range(40):
        b.post_receive()
        a.post_write(data, 0, immediate=number)
    held: list[tuple[float, object]] = []

    def send(pair: QueuePair, device: object) -> None:
        for one in pair.transmit(clock.now):
            held.append((clock.now + TRIP / 2, (device, one)))

    send(a, wire.a.device)
    while a.pending:
        due = [at for at, _ in held] + [at for at in (a.timer(),) if at is not None]
        clock.now = max(clock.now, min(due))
        for at, (device, one) in [each for each in held if each[0] <= clock.now]:
            held.remove((at, (device, one)))
            device.send(one)
        for host in wire.hosts:
            while (batch := host.device.receive()) is not None:
                host.pair.receive(batch, clock.now)
        at = a.timer()
        if at is not None and at <= clock.now:
            a.on_timer(clock.now)
        for host in wire.hosts:
            send(host.pair, host.device)
    return a.stats()["retransmissions"]


def test_peers_that_are_late_are_not_taken_for_lost_ones() -> None:
    common = {"timeout": CODE, "window": 8, "retry_cnt": 7}
    fixed, adaptive = repeated(Attributes(**common)), repeated(Attributes(**common, adaptive=True))
    assert fixed > 100
    # until silence has doubled the time often enough for one clean round trip
    assert adaptive <= 3 * 8


def test_times_follow_clean_round_trips_and_silence_within_bounds() -> None:
    overdue = Overdue(Attributes(timeout=CODE, adaptive=True))
    assert overdue.seconds == BASE
    overdue.sent(10, 0.0)
    overdue.sent(20, 5.0)
    overdue.acknowledged(9, 0.01)
    assert overdue.seconds == BASE
    overdue.acknowledged(10, 0.04)
    # one sample: three times itself
    assert overdue.seconds == pytest.approx(0.12)
    overdue.went_back(overdue=True)
    assert overdue.seconds == pytest.approx(0.24)
    for _ in range(9):
        overdue.went_back(overdue=True)
    assert overdue.seconds == pytest.approx(LONGEST * BASE)
    # what was sent again says nothing of round trips
    overdue.sent(30, 10.0)
    overdue.went_back(overdue=True)
    overdue.acknowledged(30, 10.001)
    assert overdue.seconds == pytest.approx(LONGEST * BASE)
    # a network that loses is not waited for longer, until it has been calm
    overdue.went_back(overdue=False)
    assert overdue.seconds == BASE
    for k in range(CALM):
        assert overdue.seconds == BASE
        overdue.sent(31 + k, 11.0 + k)
        overdue.acknowledged(31 + k, 11.2 + k)
    assert overdue.seconds > 0.2
    # back to the shortest one
    for k in range(60):
        overdue.sent(80 + k, 80.0 + k)
        overdue.acknowledged(80 + k, 80.001 + k)
    assert overdue.seconds == BASE


def test_others_wait_as_long_as_they_were_told() -> None:
    fixed, forever = Overdue(Attributes(timeout=CODE)), Overdue(Attributes(timeout=0, adaptive=True))
    for one in (fixed, forever):
        one.sent(1, 0.0)
        one.went_back(overdue=True)
        one.acknowledged(1, 9.0)
    assert (fixed.seconds, forever.seconds) == (BASE, None)


def test_a_network_that_loses_is_waited_for_as_long_as_it_takes_to_cross() -> None:
    """On a link of 20 Mbit/s the shortest time was over before anything could be acknowledged, and all was sent five times."""
    overdue = Overdue(Attributes(timeout=CODE, adaptive=True))
    for k in range(3):
        overdue.sent(10 * k + 1, 1.0 * k)
        overdue.went_back(overdue=True)
        overdue.went_back(overdue=False)
        overdue.acknowledged(10 * k + 1, k + TRIP)
        assert overdue.seconds == pytest.approx(2 * TRIP)
    for _ in range(9):
        overdue.went_back(overdue=True)
    # whoever is late time and again has lost something
    assert overdue.seconds == pytest.approx(2 * TRIP)
    overdue.sent(100, 5.0)
    overdue.acknowledged(100, 5.001)
    assert overdue.seconds == BASE
    for k in range(200):
        overdue.sent(101 + k, 6.0 + k)
        overdue.went_back(overdue=False)
        overdue.acknowledged(101 + k, 7.0 + k)
    assert overdue.seconds == pytest.approx(LONGEST * BASE)
