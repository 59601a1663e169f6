"""Egress queues in virtual time: tables of what passes, what is marked and what is dropped."""

import numpy as np
import pytest

from inanet.switch.egress import LOST, MARKED, PASSED, EgressQueue

#: 1 MB/s; fragments of 1000 B; 10 fit, from the sixth on they are marked
RATE, DEPTH, ECN, SIZE = 8e6, 10_000, 5_000, 1000


@pytest.mark.parametrize(
    ("before", "now", "count", "unmarked", "marked"),
    [
        (0, 0.0, 4, 4, 0),
        (0, 0.0, 5, 5, 0),
        (0, 0.0, 6, 5, 1),
        (0, 0.0, 30, 5, 5),
        (4, 0.0, 3, 1, 2),
        (5, 0.0, 1, 0, 1),
        (10, 0.0, 1, 0, 0),
        # a fragment's worth drains in a millisecond
        (10, 0.001, 5, 0, 1),
        (10, 0.006, 3, 1, 2),
        (10, 0.0055, 9, 1, 4),
        (10, 1.0, 30, 5, 5),
    ],
)
def test_marks_and_drops_go_by_each_fragments_place(
    before: int, now: float, count: int, unmarked: int, marked: int
) -> None:
    queue = EgressQueue("p", RATE, DEPTH, ECN)
    queue.admit(before, SIZE, 0.0)
    assert queue.admit(count, SIZE, now) == (unmarked, marked)


@pytest.mark.parametrize("now", [0.0, 0.0017, 0.004, 0.02])
def test_fragments_of_one_length_are_treated_as_frames_of_that_length(now: float) -> None:
    one, other = (EgressQueue("p", RATE, DEPTH, ECN) for _ in range(2))
    for queue in (one, other):
        queue.admit(7, 990, 0.0)
    fate = other.admit_frames(np.full(12, 990, np.int64), now)
    assert fate is not None
    assert one.admit(12, 990, now) == ((fate == PASSED).sum(), (fate == MARKED).sum())
    assert one.backlog(now) == other.backlog(now)
    assert one.counters() == other.counters()


def test_frames_of_different_lengths() -> None:
    queue = EgressQueue("p", RATE, DEPTH, ECN)
    fate = queue.admit_frames(np.array([4000, 1500, 100, 6000, 4400, 100], np.int64), 0.0)
    assert fate is not None
    assert fate.tolist() == [PASSED, PASSED, MARKED, LOST, MARKED, LOST]
    assert queue.counters() == {"passed": 4, "marked": 2, "dropped": 2, "peak_bytes": 10_000}


def test_an_empty_queue_takes_what_is_larger_than_itself() -> None:
    one, other = EgressQueue("p", RATE, 500, 0), EgressQueue("p", RATE, 500, 0)
    assert one.admit(3, SIZE, 0.0) == (0, 1)
    assert other.admit_frames(np.full(3, SIZE, np.int64), 0.0).tolist() == [MARKED, LOST, LOST]  # type: ignore[union-attr]
    # the rest of it still stands there a little later
    assert one.admit(1, SIZE, 0.0009) == (0, 0)
    assert one.admit(1, SIZE, 0.0011) == (0, 1)


def test_a_port_without_a_rate_takes_everything() -> None:
    queue = EgressQueue("p", None, 1, 0)
    assert queue.admit(100_000, 9000, 0.0) == (100_000, 0)
    assert queue.admit_frames(np.array([9000]), 0.0) is None
    assert queue.expected(np.full(10, 9000), 1.0, 0.0) is None


def test_expected_congestion_grows_with_what_is_before_a_fragment() -> None:
    queue = EgressQueue("p", RATE, DEPTH, ECN)
    queue.admit(3, SIZE, 0.0)
    sizes = np.full(8, SIZE, np.int64)
    half = queue.expected(sizes, 0.5, 0.0)
    assert half is not None
    assert half.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert queue.expected(sizes, 0.0, 0.0) is None
    queue.admit(2, SIZE, 0.0)
    all_of_them = queue.expected(sizes, 0.0, 0.0)
    assert all_of_them is not None
    assert all_of_them.all()
    assert queue.expected(sizes, 0.0, 0.0011) is None


def test_no_threshold_marks_nothing() -> None:
    queue = EgressQueue("p", RATE, DEPTH)
    assert queue.admit(12, SIZE, 0.0) == (10, 0)


@pytest.mark.parametrize(("rate", "depth"), [(0, 1000), (-1, 1000), (1e9, 0)])
def test_queues_that_let_nothing_pass_are_refused(rate: float, depth: int) -> None:
    with pytest.raises(ValueError, match=r"port p: a rate of .* lets nothing pass"):
        EgressQueue("p", rate, depth)
