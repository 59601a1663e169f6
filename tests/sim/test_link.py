"""One link: when packets arrive, which are marked, dropped, lost."""

import numpy as np
import pytest

from inanet.sim.burst import Burst, batch_of, rows_of
from inanet.sim.link import Link, LinkSpec

#: 1,000 B on the wire take 1 ms
RATE = 8e6


def burst(count: int, length: int = 1000) -> Burst:
    data = np.arange(count, dtype=np.uint8)[:, None].repeat(length, axis=1)
    return Burst(1, 2, data, np.zeros(count, np.bool_))


def spec(**how: object) -> LinkSpec:
    return LinkSpec(**{"rate": RATE, "delay": 0.5, "overhead": 0, "grain": 1, **how})  # type: ignore[arg-type]


def test_packets_leave_one_after_the_other_and_arrive_a_delay_later() -> None:
    link = Link("l", spec(), 0)
    assert [at for at, _ in link.carry(burst(3), 10.0)] == pytest.approx([10.501, 10.502, 10.503])
    # the fourth waits for them, one that comes when they are gone does not
    assert [at for at, _ in link.carry(burst(1), 10.001)] == pytest.approx([10.504])
    assert [at for at, _ in link.carry(burst(1), 11.0)] == pytest.approx([11.501])
    assert link.backlog(11.0) == pytest.approx(1000)
    assert link.drained(11.0, 250) == pytest.approx(11.00075)


def test_overhead_takes_its_time_and_counts_on_the_wire() -> None:
    link = Link("l", spec(overhead=66), 0)
    assert [at for at, _ in link.carry(burst(2), 0.0)] == pytest.approx([0.501066, 0.502132])
    assert link.counters()["bytes"] == 2 * 1066


@pytest.mark.parametrize(("grain", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (32, [5])])
def test_a_piece_arrives_with_its_last_packet(grain: int, sizes: list[int]) -> None:
    pieces = list(Link("l", spec(grain=grain), 0).carry(burst(5), 0.0))
    assert [len(piece) for _, piece in pieces] == sizes
    assert [at for at, _ in pieces] == pytest.approx([0.5 + end / 1000 for end in np.cumsum(sizes)])
    assert np.concatenate([piece.data[:, 0] for _, piece in pieces]).tolist() == [0, 1, 2, 3, 4]


def test_packets_are_marked_by_their_own_place_and_keep_their_marks() -> None:
    link = Link("l", spec(ecn=2500, grain=2), 0)
    marks = np.concatenate([piece.marked for _, piece in link.carry(burst(6), 0.0)])
    # before the fourth stand 3,000 B
    assert marks.tolist() == [False, False, False, True, True, True]
    already = Burst(1, 2, burst(1).data, np.ones(1, np.bool_))
    ((_, piece),) = Link("l", spec(ecn=2500), 0).carry(already, 0.0)
    assert piece.marked.all()
    assert link.congested(0.0035)
    assert not link.congested(0.0036)


def test_what_does_not_fit_the_queue_is_dropped_from_the_tail() -> None:
    link = Link("l", spec(queue=3500, grain=8), 0)
    ((at, piece),) = link.carry(burst(6), 0.0)
    assert (len(piece), at) == (3, pytest.approx(0.503))
    assert piece.data[:, 0].tolist() == [0, 1, 2]
    assert link.counters() == {
        "packets": 3,
        "bytes": 3000,
        "marked": 0,
        "dropped": 3,
        "lost": 0,
        "peak_bytes": 3000,
    }
    # a packet later there is room again
    assert len(list(link.carry(burst(2), 0.001))) == 1


def test_losses_come_from_the_seed_and_take_their_time_on_the_wire() -> None:
    def run(seed: int) -> tuple[list[int], dict[str, int]]:
        link = Link("l", spec(loss=0.3, grain=4), seed)
        there = [piece.data[:, 0] for _, piece in link.carry(burst(200), 0.0)]
        assert link.backlog(0.0) == 200_000
        return np.concatenate(there).tolist(), link.counters()

    there, counters = run(5)
    assert (there, counters) == run(5)
    assert there != run(6)[0]
    assert counters["lost"] == 200 - len(there)
    assert 30 < counters["lost"] < 90


def test_without_a_rate_only_the_delay_counts() -> None:
    link = Link("l", spec(rate=None), 0)
    assert {at for at, _ in link.carry(burst(5), 1.0)} == {1.5}
    assert link.drained(1.0, 0) == 1.0


@pytest.mark.parametrize("bad", [{"loss": 1.0}, {"delay": -1.0}, {"grain": 0}, {"rate": None, "delay": 0.0}])
def test_links_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"from 0|stand still"):
        spec(**bad)


@pytest.mark.parametrize(
    "offsets", [[], [3], [0, 5, 10], [0, 6, 12], [9, 12, 15], [4, 2, 0], [0, 3, 1], [2, 2]]
)
def test_rows_are_copies_of_packets_wherever_they_lie(offsets: list[int]) -> None:
    arena = np.arange(18, dtype=np.uint8)
    rows = rows_of(arena, np.array(offsets, np.int64), 3)
    assert rows.tolist() == [list(range(start, start + 3)) for start in offsets]
    rows[:] = 99
    assert arena.tolist() == list(range(18))


def test_a_batch_holds_the_packets_of_all_bursts_in_order() -> None:
    batch = batch_of([burst(2, 10), burst(1, 7), burst(1, 8)])
    assert batch.lengths.tolist() == [10, 10, 7, 8]
    assert (batch.offsets % 4 == 0).all()
    assert [batch.packet(index) for index in range(4)] == [bytes(10), b"\1" * 10, bytes(7), bytes(8)]
