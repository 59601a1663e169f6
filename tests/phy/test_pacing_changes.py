"""A pacer whose rate changes: tokens are neither given away nor lost, and whoever waits is called."""

import pytest

from inanet.phy.pacing import BURST
from tests.phy.test_pacing import GIGABIT, WIRE, Rig, rows


def seconds(rig: Rig, packets: int) -> float:
    """How long it takes to send them."""
    began = rig.clock.now
    rig.push(rows(packets))
    return rig.clock.now - began


def test_the_new_rate_is_held() -> None:
    rig = Rig()
    rig.push(rows(1000))
    rig.pacer.set_rate(GIGABIT / 4, BURST)
    assert seconds(rig, 5000) == pytest.approx(5000 * WIRE * 8 / (GIGABIT / 4), rel=0.02)
    rig.pacer.set_rate(10 * GIGABIT, BURST)
    assert seconds(rig, 50_000) == pytest.approx(50_000 * WIRE * 8 / (10 * GIGABIT), rel=0.02)


def test_an_empty_bucket_stays_empty() -> None:
    rig = Rig()
    assert rig.send(rows(1000)) == 124
    rig.pacer.set_rate(GIGABIT, 10 * BURST)
    # what the bucket lacked it lacks still, and what it has grown by as well
    assert rig.send(rows(1000)) == 0
    rig.clock.advance(5 * BURST * 8 / GIGABIT)
    assert 0 < rig.send(rows(2000)) <= 5 * BURST / WIRE + 4


def test_a_full_bucket_holds_no_more_than_its_new_size() -> None:
    rig = Rig(burst=10 * BURST)
    rig.pacer.set_rate(GIGABIT, BURST)
    assert rig.send(rows(1000)) == 124


def test_who_waits_is_called_at_once() -> None:
    rig = Rig(1e6)
    rig.send(rows(1000))
    assert rig.timer.seconds is not None
    assert rig.timer.seconds > 0.1
    rig.pacer.set_rate(GIGABIT, BURST)
    assert rig.timer.seconds == 0.0
    rig.send(rows(1000))
    assert 0 < rig.timer.seconds < 0.001


def test_who_does_not_wait_is_not_called() -> None:
    rig = Rig()
    rig.pacer.set_rate(GIGABIT / 2, BURST)
    assert rig.timer.seconds is None


@pytest.mark.parametrize(("rate", "burst"), [(0.0, BURST), (-1.0, BURST), (1e9, 0)])
def test_nothing_is_no_rate(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="lets nothing pass"):
        Rig().pacer.set_rate(rate, burst)
