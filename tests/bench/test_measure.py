"""Medians of pairs, lines, and idle processors, from numbers that are given."""

import pytest

from inanet.bench.measure import Ticks, fit, idle_share, paired_ratio, short_of_cpu, ticks


def test_ratios_are_of_pairs() -> None:
    assert paired_ratio([1.0, 3.0, 9.0], [2.0, 4.0, 30.0]) == 0.5
    assert paired_ratio([1.0], []) is None


def test_a_line_and_how_far_its_points_are_off() -> None:
    line = fit([1, 2, 4, 128], [7, 9, 13, 261])
    assert (line.offset, line.slope) == pytest.approx((5, 2))
    assert line.deviation == pytest.approx(0, abs=1e-9)
    bent = fit([1, 2, 4], [1, 4, 16])
    assert bent.deviation > 0.1
    for xs, ys in (([1], [1]), ([1, 1], [1, 2]), ([1, 2], [0, 1])):
        with pytest.raises(ValueError, match="two different sizes"):
            fit(xs, ys)


def test_idle_time_is_what_the_kernel_calls_idle_or_waiting_for_a_disk() -> None:
    before = ticks("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 ...")
    assert before == Ticks(100, 80)
    after = ticks("cpu  60 0 60 110 20 0 0 50 9 9\n")  # 50 stolen
    assert idle_share(before, after) == pytest.approx(50 / 200)
    assert idle_share(before, before) is None
    assert ticks().total > 0


def test_short_of_cpu_by_the_median_of_what_is_known() -> None:
    assert short_of_cpu([0.01, None, 0.02, 0.9]) is True
    assert short_of_cpu([0.2]) is False
    assert short_of_cpu([None]) is None
