"""Marked packets are answered by notifications; notifications slow the sender down, and it recovers. In virtual time."""

import numpy as np
import pytest

from inanet.phy.device import Device
from inanet.phy.wrapper import Wrapper
from inanet.proto.roce import Attributes, Status
from inanet.proto.roce.dcqcn import NOTIFICATION_INTERVAL, Dcqcn, Rate
from inanet.testing.clock import FakeClock
from inanet.wire.batch import PacketBatch
from inanet.wire.roce import CNP_TOS, CONGESTED, Opcode
from tests.proto.roce.rig import Wire, batch_of, packets_of

LINE = 10e9


class Marker(Wrapper):
    """A switch that marks every packet while ``congested``."""

    congested = True

    def receive(self) -> PacketBatch | None:
        """Receive, marked."""
        batch = super().receive()
        if batch is not None and self.congested:
            batch.arena[batch.offsets + 1] |= CONGESTED
        return batch


def marking_towards_b(device: Device, name: str, clock: FakeClock) -> Device:
    return Marker(device) if name == "b" else device


def test_marked_packets_are_answered_once_per_interval() -> None:
    wire = Wire()
    wire.a.pair.post_write(np.ones(4096, np.uint8), 0)
    marked = [bytearray(sent.packet(i)) for sent in wire.a.pair.transmit(0.0) for i in range(len(sent))]
    for packet in marked:
        packet[1] |= CONGESTED
    answers = []
    for at in (0.0, 0.4, 0.9, 1.01, 1.7, 2.1):
        now = 1000 + at * NOTIFICATION_INTERVAL
        wire.b.pair.receive(batch_of(map(bytes, marked)), now)
        answers.append([p.opcode for p in packets_of(wire.b.pair.transmit(now))].count(Opcode.CNP))
    assert answers == [1, 0, 0, 1, 0, 1]
    assert wire.b.pair.stats()["marked_received"] == 24
    wire.b.pair.receive(batch_of(map(bytes, marked)), 2000.0)
    notification = packets_of(wire.b.pair.transmit(2000.0))[-1]
    assert (notification.qp, notification.becn, notification.tos) == (0x11, True, CNP_TOS)
    assert wire.b.memory[:4096].all()


def test_marked_acknowledgements_are_taken_and_not_answered() -> None:
    wire = Wire()
    wire.a.pair.post_write(np.ones(1, np.uint8), 0)
    wire.b.pair.receive(batch_of(sent.packet(0) for sent in wire.a.pair.transmit(0.0)), 0.0)
    (answer,) = wire.b.pair.transmit(0.0)
    packet = bytearray(answer.packet(0))
    packet[1] |= CONGESTED
    wire.a.pair.receive(batch_of([bytes(packet)]), 0.0)
    assert wire.a.pair.pending == 0
    assert wire.a.pair.transmit(0.0) == []


def test_notifications_reach_queue_pairs_of_other_partitions() -> None:
    wire = Wire(Attributes(partition=0x8005), wrap=marking_towards_b)
    wire.a.pair.post_write(np.ones(4096, np.uint8), 0)
    wire.run()
    assert wire.a.pair.stats()["cnps_received"] == 1


def test_notifications_halve_the_rate_and_time_brings_it_back() -> None:
    rate = Rate(LINE)
    rate.notify(1.0)
    assert rate.current == pytest.approx(LINE / 2)
    assert rate.target == LINE
    interval = rate.constants.increase_interval
    for stage in range(1, 6):
        rate.advance(1.0 + stage * interval * 1.0001)
        assert rate.current == pytest.approx(LINE - LINE / 2 ** (stage + 1), rel=1e-3)
    rate.advance(1.01)
    assert rate.current == rate.target == LINE
    assert not rate.congested


def test_the_estimate_falls_in_silence_so_that_a_later_notification_costs_less() -> None:
    rate = Rate(LINE)
    rate.notify(1.0)
    rate.notify(1.0 + 50e-6)
    assert rate.alpha == pytest.approx(1.0)
    rate.notify(1.5)
    before = rate.alpha
    assert before == pytest.approx(1 / 256, rel=0.01)
    assert rate.current == pytest.approx(LINE, rel=0.001)
    for i in range(1000):
        rate.notify(1.5 + (i + 1) * 50e-6)
    assert rate.alpha == pytest.approx(0.98, abs=0.02)
    assert rate.current == rate.constants.lowest


def test_bytes_raise_the_rate_as_well_and_both_together_fastest() -> None:
    constants = Dcqcn(increase_bytes=1_000_000, increase_interval=1.0, additive=40e6, hyper=400e6)
    rate = Rate(100e9, constants)
    for i in range(20):
        rate.notify(1.0 + i * 1e-6)
    floor = rate.current
    rate.sent(4_000_000, 1.1)
    assert rate.target < 0.1e9
    rate.sent(1_000_000, 1.1)
    after_recovery = rate.target
    assert after_recovery == pytest.approx(floor + 40e6)
    rate.sent(1_000_000, 1.1)
    assert rate.target == pytest.approx(after_recovery + 40e6)
    rate.advance(7.5)
    # six rises of time: five while one of both counts is still in recovery, then the first beyond it
    assert rate.target == pytest.approx(after_recovery + 40e6 + 5 * 40e6 + 400e6)


def test_a_flow_over_a_congested_link_slows_down_and_recovers_when_it_clears() -> None:
    wire = Wire(Attributes(line_rate=LINE, window=64), memory=1 << 19, wrap=marking_towards_b)
    pair, marker = wire.a.pair, wire.b.device
    assert isinstance(marker, Marker)
    assert pair.rate is not None
    data = np.ones(1 << 19, np.uint8)

    def transfer() -> float:
        """Bits per second of a message of half a mebibyte."""
        begun = wire.clock.advance(0.001)
        pair.post_write(data, 0)
        wire.run()
        return data.nbytes * 8 / (wire.clock.now - begun)

    marker.congested = False
    free = transfer()
    # a burst leaves at once
    assert free == pytest.approx(LINE * (1 << 19) / ((1 << 19) * 1068 / 1024 - 65536), rel=0.05)
    marker.congested = True
    congested = transfer()
    assert congested < free / 4
    assert pair.rate.current < LINE / 4
    assert pair.stats()["cnps_received"] == wire.b.pair.stats()["cnps_sent"] > 3
    marker.congested = False
    for _ in range(60):
        transfer()
        if not pair.rate.congested:
            break
    assert transfer() == pytest.approx(free, rel=0.1)
    assert pair.stats()["retransmissions"] == 0
    assert {status for _, status in wire.a.statuses()} == {Status.SUCCESS}


def test_without_a_line_rate_notifications_are_only_counted() -> None:
    wire = Wire(Attributes(window=64), wrap=marking_towards_b)
    wire.a.pair.post_write(np.ones(1 << 17, np.uint8), 0)
    wire.run()
    assert wire.a.pair.rate is None
    assert wire.a.pair.stats()["cnps_received"] > 0
    assert wire.a.statuses() == [(0, Status.SUCCESS)]


def test_pacing_lets_a_burst_go_and_then_keeps_to_the_rate() -> None:
    wire = Wire(Attributes(line_rate=1e9, window=10_000), memory=1 << 22)
    pair = wire.a.pair
    pair.post_write(np.ones(1 << 22, np.uint8), 0)
    now, sent, begun = 5.0, 0, 5.0
    first = sum(len(t) * t.length for t in pair.transmit(now))
    assert 0.9 * 65536 < first <= 65536
    sent = first
    while now < begun + 0.02:
        at = pair.timer()
        assert at is not None
        assert at > now
        now = at
        pair.on_timer(now)
        sent += sum(len(t) * t.length for t in pair.transmit(now))
    assert (sent - first) * 8 / (now - begun) == pytest.approx(1e9, rel=0.01)
