"""Fig. 7 and 8 in small: batches as they are made to be, and what more memory brings."""

import numpy as np
import pytest

from inanet.data.key_batches import Load, Model
from inanet.papers import zebra_memory
from inanet.papers.zebra_memory import hot_counts, memory_cap, skewed

TOY = Model("OA", 200_000, 300, 0.6)


@pytest.fixture
def load() -> Load:
    return skewed(TOY, 4, 2, pairs=400, head=2000)


def test_batches_have_the_models_share_and_a_tail(load: Load) -> None:
    batches = [keys for iteration in load.batches for keys in iteration]
    assert np.mean([len(keys) for keys in batches]) == pytest.approx(400, rel=0.05)
    assert all(len(np.unique(keys)) == len(keys) for keys in batches)
    hot = np.mean([(keys < 300).sum() for keys in batches])
    assert hot == pytest.approx(240, rel=0.1)
    # beyond the hot ones each further stretch has less
    parts = np.histogram(np.concatenate(batches), [300, 600, 900, 1200])[0]
    assert parts[0] > parts[1] > parts[2] > 0


def test_twice_the_memory(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zebra_memory, "dense_goodput", lambda workers, rate, memory, link=None: 1e3 * memory)
    outcome = memory_cap({400: [load]}, 4, (150, 300), (5e-5,))
    (one, two) = outcome.tables[0].rows
    assert one[4] < two[4] == pytest.approx(0.6, rel=0.1)
    assert two[5] == pytest.approx(two[3] / one[3])
    claims = {claim.name: claim for claim in outcome.claims}
    assert claims["SwitchML's gain from twice the memory"].ours == 2.0
    gain = claims["OA, 400 keys: Zebra's gain from twice the memory"]
    assert gain.ours == two[5]
    assert gain.holds == (not gain.reason)


def test_throughput_by_hot_parameters(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zebra_memory, "DEFAULT", 100)
    outcome = hot_counts({400: [load]}, 4, (20, 100, 300))
    rows = outcome.tables[0].rows
    assert [row[2] for row in rows] == [20, 100, 300]
    assert [row[5] for row in rows][1] == 1.0
    assert rows[0][4] < rows[1][4] < rows[2][4]
    assert len(outcome.panels[0].series["OA, 400 keys"]) == 3
