"""A2TP's testbed in the simulator; the figures themselves take longer than a test may."""

import pytest

from inanet.papers.a2tp_testbed import ALL_SLOTS, HOST, ROUND, SAMPLE, SCALE, A, B, build, watch
from inanet.proto.slots.a2tp.windows import A2tpPace


def test_a_job_alone_reaches_what_a_host_can_do_and_the_slots_are_one_window() -> None:
    rack = build("atp", (A,), {})
    rack.loop(A, ROUND)
    looks = watch(rack, 3 * SAMPLE)
    assert [look.at for look in looks] == pytest.approx([SAMPLE, 2 * SAMPLE, 3 * SAMPLE])
    assert looks[-1].throughput[A] == pytest.approx(HOST, rel=0.06)
    # a round takes about three of these
    assert 0.25 < looks[1].occupied[A] <= 1.0
    assert rack.jobs[A].workers[0].window.capacity * SCALE == ALL_SLOTS


def test_half_the_slots_as_window_are_less_than_a_host_can_do() -> None:
    rack = build("switchml", (A, B), {B: 13 / HOST}, tick=6e-6)
    rack.loop(A, ROUND)
    # a round trip as long as ATP's
    assert watch(rack, 2 * SAMPLE)[-1].throughput[A] < 0.8 * HOST


def test_a_straggler_bounds_its_job() -> None:
    rack = build("switchml", (A, B), {B: 13 / HOST})
    rack.loop(B, ROUND)
    looks = watch(rack, 2 * SAMPLE)
    # packets of 64 values bear a little more than those of 62
    assert looks[-1].throughput[B] == pytest.approx(13, rel=0.12)
    assert looks[-1].throughput[A] == 0


def test_the_threshold_reaches_the_workers() -> None:
    rack = build("a2tp", (A,), {}, threshold=0.6)
    for worker in rack.jobs[A].workers:
        assert isinstance(worker.pace, A2tpPace)
        assert worker.pace.windows.profile.threshold == 0.6
