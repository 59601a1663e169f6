"""When a busy node waits before it reads again."""

import pytest

from inanet.aio.moderation import LONGEST, Moderation

#: results that are far from the end of a round
MANY = 50_000
#: fragments of 4 MiB of receive buffer, and of what distributions allow
LARGE, SMALL = 7812, 186


def pause(packets: int, seconds: float, *, lacking: int = MANY, budget: int = LARGE) -> float:
    """The pause after ``packets`` were taken, ``seconds`` after the read before."""
    moderation = Moderation(budget)
    moderation.pause(1, lacking, 5.0)
    return moderation.pause(packets, lacking, 5.0 + seconds)


def test_it_waits_for_a_batch_at_the_rate_at_which_packets_come() -> None:
    # three links of 1 Gbit/s bring 300 fragments in a millisecond
    assert pause(300, 0.001) == pytest.approx(496 / 300 / 1000)
    # one link of 1 Gbit/s
    assert pause(62, 0.00053) == LONGEST


@pytest.mark.parametrize(
    ("packets", "seconds", "lacking", "budget"),
    [
        pytest.param(600, 0.001, MANY, LARGE, id="a batch comes before a timer can fire"),
        pytest.param(62, 0.00053, 1900, LARGE, id="the end of a round is near"),
        pytest.param(62, 0.00053, 0, LARGE, id="no round is on its way"),
        pytest.param(62, 0.00053, MANY, SMALL, id="the receive buffer is small"),
        pytest.param(62, 0.5, MANY, LARGE, id="nothing has come for long"),
        pytest.param(0, 0.001, MANY, LARGE, id="nothing was there"),
    ],
)
def test_it_does_not_wait_when(packets: int, seconds: float, lacking: int, budget: int) -> None:
    assert pause(packets, seconds, lacking=lacking, budget=budget) == 0


def test_the_first_read_is_followed_by_another_at_once() -> None:
    assert Moderation(LARGE).pause(62, MANY, 1e6) == 0
