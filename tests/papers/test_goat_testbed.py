"""GOAT's testbed in small: what the figures are made of, and that no system counts for another."""

import pytest

from inanet.papers import goat_testbed
from inanet.papers.goat_testbed import Case, delays, once

#: bytes of a small gradient
TINY = 6.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goat_testbed, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(goat_testbed, "LAYERS", 2)


@pytest.mark.parametrize(("scheme", "times"), [("Geryon", 4), ("GOAT", 2), ("ATP", 1), ("ESA", 1)])
def test_what_reaches_the_ps_is_everything_or_a_sum_of_each_rack_or_one(scheme: str, times: int) -> None:
    found = once(Case("tiny", 4, scheme), seed=1)
    # every layer ends with a fragment that is not full
    assert found.at_ps == pytest.approx(times * TINY * 1e6, rel=0.1)
    # the link of the PS takes all of it, one packet after the other, or of a worker
    assert found.communication >= TINY * 1e6 * 8 / 100e9


def test_communication_is_what_comes_after_the_last_worker_was_ready() -> None:
    found = once(Case("tiny", 4, "GOAT"), seed=2)
    assert found.seconds - found.communication == pytest.approx(max(delays(4, 0.2, 2)))
    assert 0 < found.communication < found.seconds
