"""What is in flight, what is lost, when to try again; and the switch's memory."""

from dataclasses import replace

import numpy as np
import pytest

from inanet.proto.common.recovery import Timing
from inanet.proto.slots.registers import OutOfRegisters, RegisterFile
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.window import TIMING, Window


def accept(window: Window, *numbers: int, now: float = 0.0) -> list[bool]:
    return window.accept(np.array(numbers, np.int64), now).tolist()


def test_the_window_moves_with_the_lowest_unanswered_number():
    window = Window(8, TIMING, first=100)
    assert window.fresh(4, 200, 0.0).tolist() == [100, 101, 102, 103]
    assert accept(window, 101, 103) == [True, True]
    assert window.fresh(4, 200, 0.0).tolist() == []
    accept(window, 100)
    assert window.base == 102
    assert window.fresh(4, 200, 0.0).tolist() == [104, 105]
    # never beyond its capacity, nor beyond what is ready
    assert window.fresh(100, 108, 0.0).tolist() == [106, 107]
    assert window.fresh(100, 200, 0.0).tolist() == [108, 109]
    assert window.in_flight == 7


def test_answers_count_once_and_only_for_what_was_sent():
    window = Window(8, TIMING, first=10)
    window.fresh(8, 14, 0.0)
    assert accept(window, 9, 11, 11, 14, 12) == [False, True, False, False, True]
    assert accept(window, 11) == [False]


@pytest.mark.parametrize("bits", [24, 32])
def test_numbers_are_the_nearest_to_what_is_expected(bits):
    first = 3 * 2**bits - 2
    window = Window(16, TIMING, first=first)
    window.fresh(8, first + 8, 0.0)
    numbers = np.arange(first, first + 8)
    np.testing.assert_array_equal(window.absolute(numbers & (2**bits - 1), bits), numbers)
    late = np.array([first - 2 ** (bits - 1), first + 2 ** (bits - 1) - 1])
    np.testing.assert_array_equal(window.absolute(late & (2**bits - 1), bits), late)


def test_a_gap_is_filled_once_and_then_by_time():
    window = Window(32, replace(TIMING, retransmit=0.01, gap=4, probe=1.0))
    window.fresh(32, 32, 0.0)
    accept(window, 3, now=0.001)
    assert window.lost(0.001).tolist() == []
    accept(window, 5, now=0.001)
    assert window.lost(0.001).tolist() == [0, 1]
    accept(window, *range(6, 32), now=0.001)
    assert window.lost(0.001).tolist() == [2, 4]
    assert window.lost(0.002).tolist() == []
    assert window.lost(window.timer()).tolist() == [0, 1, 2, 4]
    assert (window.resent_by_gap, window.resent_by_time) == (4, 4)


def test_a_repetition_that_was_lost_is_told_by_what_was_sent_after_it():
    window = Window(64, replace(TIMING, retransmit=0.01, gap=4))
    window.fresh(16, 16, 0.0)
    accept(window, *range(1, 8), now=0.001)
    assert window.lost(0.001).tolist() == [0]
    # answered since, but sent before the repetition
    accept(window, *range(8, 16), now=0.001)
    assert window.lost(0.001).tolist() == []
    window.fresh(64, 32, 0.0015)
    accept(window, *range(16, 20), now=0.0025)
    # four sendings later are not five
    assert window.lost(0.0025).tolist() == []
    accept(window, 20, now=0.0025)
    # two of the shortest round trips have not passed since: it may be on its way
    assert window.lost(0.0025).tolist() == []
    accept(window, 21, now=0.003)
    assert window.lost(0.003).tolist() == [0]
    assert (window.resent_by_gap, window.resent_by_time, window.probed) == (2, 0, 0)


def test_a_window_that_stands_still_probes_its_lowest_fragment():
    """Nothing can be sent whose answer would tell, and the timeout is many round trips away."""
    window = Window(8, replace(TIMING, retransmit=0.1, gap=2, probe=0.001))
    window.fresh(8, 100, 0.0)
    # no round trip has been measured
    assert window.timer() == 0.1
    accept(window, *range(2, 8), now=0.0001)
    assert window.lost(0.0001).tolist() == [0, 1]
    times = []
    for _ in range(4):
        times.append(window.timer())
        assert window.lost(times[-1]).tolist() == [0]
    assert np.diff([0.0001, *times]).tolist() == pytest.approx([0.002, 0.004, 0.008, 0.016])
    # whatever is answered says that the window moves: the next lowest waits anew, and no longer than its own repetitions say
    accept(window, 0, now=0.05)
    assert window.timer() == pytest.approx(0.052)
    assert (window.resent_by_gap, window.resent_by_time, window.probed) == (2, 0, 4)
    # round trips of milliseconds: twice the shortest of them
    window = Window(8, replace(TIMING, retransmit=0.1, probe=0.001))
    window.fresh(8, 100, 0.0)
    accept(window, *range(1, 8), now=0.004)
    assert window.timer() == pytest.approx(0.012)


def test_timeouts_double_until_something_is_answered_and_follow_the_round_trip():
    timing = Timing(retransmit=0.01, retransmit_max=0.05)
    window = Window(4, timing)
    window.fresh(1, 10, 0.0)
    times = []
    for _ in range(5):
        now = window.timer()
        times.append(now)
        assert window.lost(now).tolist() == [0]
    assert np.diff([0.0, *times]).tolist() == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05])
    accept(window, 0, now=times[-1])
    assert window.timer() is None
    # an answer to a repetition says nothing about the round trip (Karn)
    assert window.timeout == 0.01
    for number in range(1, 30):
        window.fresh(1, 100, float(number))
        accept(window, number, now=number + 0.02)
    assert 0.02 < window.timeout < 0.04


def test_fragments_sent_at_different_times_double_the_timeout_once():
    window = Window(8, replace(TIMING, retransmit=0.01))
    for number in range(4):
        window.fresh(number + 1, 8, number * 0.001)
    # each is late at a time of its own, and none of them was sent after the timeout had doubled
    late = {
        number: window.lost(0.01 + number * 0.001 if number == 0 else 0.02 + number * 0.001)
        for number in range(4)
    }
    assert [numbers.tolist() for numbers in late.values()] == [[0], [1], [2], [3]]
    assert window.timeout == 0.02
    # what was sent since is: doubled again
    assert window.lost(0.04).tolist() == [0]
    assert window.timeout == 0.04


def test_round_trips_longer_than_the_timeout_are_learned_though_everything_is_repeated():
    window, now, repeated = Window(64, Timing(retransmit=0.01, retransmit_max=10.0)), 0.0, []
    for round_ in range(12):
        numbers, answered = window.fresh(64, 64 * (round_ + 1), now), now + 0.1
        before = window.resent_by_time
        while (due := window.timer()) < answered:
            window.lost(due)
        now = answered
        assert window.accept(numbers, now).all()
        repeated.append(window.resent_by_time - before)
    assert repeated[:2] == [192, 192]
    assert repeated[-3:] == [0, 0, 0]


def test_a_timeout_below_the_round_trip_is_found_out_within_three_windows():
    """The first fragments' answers come at once and are measured; those behind a queue are all repeated before theirs come."""
    window = Window(64, Timing(retransmit=0.01, retransmit_max=10.0))
    numbers = window.fresh(64, 64, 0.0)
    window.accept(numbers[:8], 0.002)
    repeated, now = [], 0.002
    for round_ in range(6):
        numbers, answered = window.fresh(64, 64 * (round_ + 2), now), now + 0.016
        before = window.resent_by_time
        while (due := window.timer()) < answered:
            window.lost(due)
        now = answered
        window.accept(np.arange(window.base, window.next), now)
        repeated.append(window.resent_by_time - before)
    assert sum(repeated) <= 3 * 64
    assert repeated[3:] == [0, 0, 0]


def test_one_late_answer_of_many_does_not_stretch_the_timeout():
    """A fragment that another worker has lost is answered late by everybody's; that is no round trip of the network."""
    window = Window(256, replace(TIMING, retransmit=0.001))
    for round_ in range(5):
        numbers = window.fresh(256, 256 * (round_ + 1), float(round_))
        window.accept(numbers[:-1], round_ + 0.002)
        before = window.timeout
        window.accept(numbers[-1:], round_ + 0.5)
        assert window.timeout < before + 0.01
    # a straggler makes all of them late
    for round_ in range(5, 30):
        window.accept(window.fresh(256, 256 * (round_ + 1), float(round_)), round_ + 0.5)
    assert window.timeout > 0.4


def test_shares_are_given_back_in_one_piece():
    file = RegisterFile(64, budget=(4 * 64 + 24) * 10)
    starts = [file.take(job, 3) for job in range(3)]
    assert starts == [0, 3, 6]
    with pytest.raises(OutOfRegisters, match="job 9 asks for 2 slots of 280 B; 1 of 10"):
        file.take(9, 2)
    for start in (3, 0, 6):
        file.give(start, 3)
    assert file.take(4, 10) == 0
    with pytest.raises(ValueError, match="at least one is needed"):
        RegisterFile(64, budget=100)


@pytest.mark.parametrize(
    "members", [{}, {1: 0}, {1: 3, 2: 2}, {1: 1 << 32}], ids=["none", "no bit", "shared bit", "33rd"]
)
def test_tenants_whose_workers_have_no_bits_of_their_own_are_refused(members):
    with pytest.raises(ValueError, match="job 1"):
        Tenant(1, members, 1)
