"""GOAT's testbed in small: what the figures are made of, and that no system counts for another."""

import pytest

from inanet.papers import goat_testbed
from inanet.papers.goat_testbed import SCALE, Case, delays, once

#: bytes of a small gradient
TINY = 6.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goat_testbed, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(goat_testbed, "LAYERS", 2)


def bytes_per_packet(payload: int, values: int) -> float:
    """On the wire, with what the network adds, for the bytes of a gradient's values."""
    return (payload + 66) / (4 * values)


def test_without_aggregation_the_ps_receives_every_gradient() -> None:
    found = once(Case("tiny", 4, "Geryon"), seed=1)
    assert found.at_ps == pytest.approx(4 * TINY * 1e6 * bytes_per_packet(284, 64), rel=0.05)
    # its one link takes all of them, one after the other
    assert found.communication * goat_testbed.RATE / 8 * SCALE > 0.5 * found.at_ps


def test_with_memory_for_everything_the_ps_receives_a_sum_from_each_rack() -> None:
    found = once(Case("tiny", 4, "GOAT"), seed=1)
    assert found.at_ps == pytest.approx(2 * TINY * 1e6 * bytes_per_packet(284, 64), rel=0.05)


@pytest.mark.parametrize("scheme", ["ATP", "ESA"])
def test_with_a_window_nobody_runs_ahead_and_the_ps_receives_one_sum(scheme: str) -> None:
    found = once(Case("tiny", 4, scheme, window=True), seed=1)
    # every layer ends with a fragment that is not full
    assert found.at_ps == pytest.approx(TINY * 1e6 * bytes_per_packet(275, 62), rel=0.1)


def test_communication_is_what_comes_after_the_last_worker_was_ready() -> None:
    found = once(Case("tiny", 4, "GOAT"), seed=2)
    assert found.seconds - found.communication == pytest.approx(max(delays(4, 0.2, 2)))
    assert 0 < found.communication < found.seconds
