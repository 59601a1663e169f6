"""A2TP's testbed in the simulator; the figures themselves take longer than a test may."""

import pytest

from inanet.papers.a2tp_testbed import HOST, ROUND, SAMPLE, SCALE, SLOTS, A, B, build, watch


def test_a_job_alone_reaches_what_a_host_can_do_and_the_slots_are_one_window() -> None:
    rack = build("atp", (A,), 1.0)
    rack.loop(A, ROUND)
    looks = watch(rack, 3 * SAMPLE)
    assert [look.at for look in looks] == pytest.approx([SAMPLE, 2 * SAMPLE, 3 * SAMPLE])
    assert looks[-1].throughput[A] == pytest.approx(HOST, rel=0.06)
    assert 0.25 < looks[-1].occupied[A] <= 1.0
    assert SLOTS * SCALE == 450


def test_a_straggler_bounds_its_job() -> None:
    rack = build("switchml", (A, B), 13 / HOST)
    rack.loop(B, ROUND)
    looks = watch(rack, 2 * SAMPLE)
    # packets of 64 values bear a little more than those of 62
    assert looks[-1].throughput[B] == pytest.approx(13, rel=0.12)
    assert looks[-1].throughput[A] == 0
