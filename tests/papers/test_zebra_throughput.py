"""Fig. 6 and 11 in small: the same machines, fewer of them."""

import numpy as np
import pytest

from inanet.data.key_batches import Load, Model, generated
from inanet.papers import zebra_throughput
from inanet.papers.zebra_throughput import judge, measure
from inanet.sim.link import LinkSpec


@pytest.fixture
def load() -> Load:
    return generated(Model("toy", 100_000, 3000, 0.6), 6, 3, pairs=400)


def test_zebra_is_ahead_of_the_ps_and_more_so_with_more_workers(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zebra_throughput, "dense_goodput", lambda workers, rate, memory: 1e8)
    rows = judge((load,), (2, 6)).tables[0].rows
    assert [row[1] for row in rows] == [2, 6]
    assert rows[1][5] > max(rows[0][5], 1.2)
    assert all(0.55 < row[6] < 0.65 for row in rows)


def test_loss_is_repaired_and_everything_arrives(load: Load) -> None:
    clean = measure(load, 4, zebra=True)
    lossy = measure(load, 4, zebra=True, link=LinkSpec(rate=zebra_throughput.RATE, loss=0.02), seed=1)
    assert (lossy.pairs, lossy.hot) == (clean.pairs, clean.hot)
    assert lossy.repeated > clean.repeated
    assert lossy.seconds > clean.seconds


def test_batches_have_the_models_share(load: Load) -> None:
    hot = [int(np.isin(keys, load.hot).sum()) for keys in load.batches[0]]
    assert np.mean(hot) == pytest.approx(240, rel=0.1)
