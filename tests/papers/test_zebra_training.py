"""Fig. 12 in small: real gradients through the simulated rack, and what is said of whole steps."""

import numpy as np
import pytest

from inanet.data.drawn_clicks import drawn
from inanet.data.key_batches import OA, Model, generated
from inanet.papers import zebra_training
from inanet.papers.zebra_training import Task, _Data, judge, trained, whole
from inanet.training.sparse_models import LogisticRegression
from tests.demo.test_sparse_training import made_up


@pytest.fixture
def task() -> Task:
    return Task("toy", LogisticRegression(), made_up(1500), 20, 0.72)


def test_both_systems_train_the_same_model_and_zebra_in_less_time(task: Task) -> None:
    data = _Data(task, 3)
    ours, theirs = (trained(task, 3, zebra=zebra, data=data) for zebra in (True, False))
    assert ours.steps == theirs.steps > 0
    assert ours.auc == pytest.approx(theirs.auc, abs=1e-3)
    assert ours.auc >= task.threshold
    assert ours.in_network_share > 0.2
    assert theirs.in_network_share == 0.0
    assert ours.seconds != theirs.seconds


def test_a_threshold_that_is_not_reached_is_told(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zebra_training, "MOST", 2)
    hopeless = Task("toy", task.model, task.samples, 20, 0.9999)
    with pytest.raises(RuntimeError, match=r"toy: 0\.\d+ after 2 steps, not 0.9999"):
        trained(hopeless, 2, zebra=False, data=_Data(hopeless, 2))


def test_drawn_logs_have_the_models_shape_and_can_be_learnt() -> None:
    """Each key of a batch is in one of its samples; half of the model's keys are pushed as often as all others."""
    samples = drawn(OA, 90, scale=50)
    assert len(samples) == 90 * 100
    hot = OA.hot // 50
    for batch in samples.batches(100):
        assert len(np.unique(batch.keys)) == len(batch.keys)
        assert (batch.keys < hot).mean() == pytest.approx(0.5, abs=0.05)
    log = Task("drawn", LogisticRegression(), samples, 100, 0.6, in_order=True)
    ours, theirs = (trained(log, 4, zebra=zebra, data=_Data(log, 4)) for zebra in (True, False))
    assert ours.steps == theirs.steps
    assert ours.in_network_share == pytest.approx(0.5, abs=0.05)
    assert theirs.seconds > 1.2 * ours.seconds


def test_computing_dilutes_what_communication_gains() -> None:
    assert whole(1.0, 2.0, 0.0) == 2.0
    # computing takes as long as the PS's communication
    assert whole(1.0, 2.0, 0.5) == pytest.approx(4 / 3)
    # the paper's ranges, and the share of computing that joins them
    assert whole(1.0, 1.5, 1 / 7) == pytest.approx(1.4)
    assert whole(1.0, 4.0, 0.1795) == pytest.approx(2.6, abs=1e-3)


def test_the_outcome_has_every_model(task: Task) -> None:
    load = generated(Model("OA", 100_000, 3000, 0.6), 3, 2, pairs=400)
    outcome = judge([task], [load], 3)
    rows = outcome.tables[0].rows
    assert [row[0] for row in rows] == ["toy", "OA"]
    assert all(np.isfinite(row[6:]).all() for row in rows)
    # without computing the ratio is that of communication
    assert rows[1][6] == pytest.approx(rows[1][4] / rows[1][3])
    assert rows[0][6] > rows[0][8] or rows[0][6] < 1.0
    steps = next(claim for claim in outcome.claims if claim.name == "toy: steps over the PS's")
    assert steps.holds
