"""XAgg's Fig. 21: the negotiator between a port that narrows and a worker that follows, TCP beside it."""

import pytest

from inanet.papers.xagg_rates import (
    DROPS,
    NARROW,
    PERIOD,
    QUEUE,
    RETURNS,
    WIDE,
    Port,
    bandwidth,
    negotiated,
    reno,
    run,
)


def test_a_port_drops_what_its_queue_cannot_hold() -> None:
    port = Port()
    assert port.offer(WIDE * 0.01, 0.0, 0.01) == 0.0
    # 2 Gbit/s too much fill the queue first
    assert port.offer(0.62, 0.0, 0.01) == pytest.approx(0.02 - QUEUE)
    assert port.offer(0.61, 0.0, 0.01) == pytest.approx(0.01)
    assert port.offer(0.0, 0.0, 0.01) == 0.0
    assert (bandwidth(DROPS - 0.01), bandwidth(DROPS), bandwidth(RETURNS)) == (WIDE, NARROW, WIDE)


def test_the_rate_follows_within_three_periods_and_never_collapses() -> None:
    trace = {round(at / PERIOD): rate for at, rate in negotiated()}
    drop = round(DROPS / PERIOD)
    assert trace[drop - 1] == pytest.approx(WIDE)
    assert trace[drop + 2] < NARROW
    assert min(trace.values()) > NARROW / 2


def test_tcp_waits_for_its_timer() -> None:
    after = [rate for at, rate in reno() if DROPS + PERIOD <= at < DROPS + 0.15]
    assert set(after) == {0.0}


def test_the_claims_hold() -> None:
    outcome = run()
    assert len(outcome.claims) == 5
    assert all(claim.holds for claim in outcome.claims), [claim.as_dict() for claim in outcome.claims]
