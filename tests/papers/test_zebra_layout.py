"""Fig. 10's counts are the switch's, and what the arithmetic says they must be."""

import numpy as np
import pytest

from inanet.papers import zebra_layout
from inanet.papers.zebra_layout import SCHEMES, Load, count, judge
from inanet.proto.zebra.layout import by_heat, in_sequence
from tests.proto.zebra.rig import passes


def load(seed: int = 0) -> Load:
    rng = np.random.default_rng(seed)
    present = 0.9 ** np.arange(300) + 0.2
    return Load("small", 300, tuple(np.flatnonzero(rng.random(300) < present) for _ in range(3)))


def test_the_switch_counts_what_the_layout_makes_necessary() -> None:
    wanted, packets = 0, 0
    for ranks in load().batches:
        needed = passes(by_heat(300, 8).register[ranks], in_sequence(len(ranks), 10), 8)
        wanted, packets = wanted + int((needed - 1).sum()), packets + len(needed)
    assert count(load(), 10, 8, "layout") == wanted / packets
    assert count(load(), 10, 8, "random") > count(load(), 10, 8, "layout and packaging")


def test_the_outcome_has_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zebra_layout, "PAIRS", (20,))
    monkeypatch.setattr(zebra_layout, "REGISTERS", (8, 32))
    outcome = judge((load(),))
    assert [row[:3] for row in outcome.tables[0].rows] == [("small", 20, 8), ("small", 20, 32)]
    assert len(outcome.tables[0].columns) == 3 + len(SCHEMES)
    assert all(claim.holds for claim in outcome.claims)
