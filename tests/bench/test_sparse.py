"""The sparse bench in small: both tables, their comparison, and sums that are checked."""

import json

import numpy as np
import pytest

from inanet.bench import sparse
from inanet.bench.sparse import Options, dense_goodput, run, table
from inanet.data.key_batches import Model, generated


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = generated(Model("OA", 100_000, 3000, 0.6), 4, 3, pairs=300)
    monkeypatch.setattr(sparse, "loads", lambda options, _say: [toy])
    monkeypatch.setattr(sparse, "dense_goodput", lambda workers, rate: 9e7)


@pytest.mark.usefixtures("small")
def test_every_system_is_in_every_table_that_it_can_be_in() -> None:
    result = run(Options(workers=(4,), live=2, live_rate=1e9, repetitions=1), lambda text: None)
    assert result["ok"]
    json.dumps(result, allow_nan=False)
    assert [(row["table"], row["system"]) for row in result["rows"]] == [
        ("rack", "zebra"),
        ("rack", "ps"),
        ("rack", "switchml-dense"),
        ("live", "zebra"),
        ("live", "ps"),
    ]
    zebra, ps, dense = result["rows"][:3]
    assert zebra["ratio_to_ps"] == result["ratio_to_ps"] > 1.0
    assert ps["ratio_to_ps"] == 1.0
    assert dense["ms"] == pytest.approx(1000 * 4 * 10_000 / 9e7)
    assert 0.5 < result["in_network_share"] < 0.7
    assert len(table(result)) == 2 + 5 + 3


def test_wrong_sums_are_counted() -> None:
    keys = np.array([1, 2], np.uint64)
    one = np.ones((2, 1), np.float32)
    assert sparse._wrong([[keys]], keys, one) == 0
    assert sparse._wrong([[keys], [keys]], keys, one) == 2
    assert sparse._wrong([[keys]], keys[:1], one[:1]) == 1


def test_dense_sums_run_at_the_rate_of_the_link_less_headers() -> None:
    # 266 B and 66 B of headers for 256 B of values
    assert dense_goodput(2, 1e9, 100_000) == pytest.approx(1e9 / 8 * 256 / 332, rel=0.1)
