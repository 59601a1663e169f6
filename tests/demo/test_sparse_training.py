"""Sparse models: their gradients, and training that does not depend on what is hot or lost."""

import numpy as np
import pytest

from inanet.data.clicks import Samples
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.stream import Timing
from inanet.sparse.group import sparse_group
from inanet.training.sparse import hot_by_sampling, train
from inanet.training.sparse_models import (
    BIAS,
    Batch,
    FactorisationMachine,
    LogisticRegression,
    Model,
    NeuralFactorisation,
    area_under_curve,
    error_of,
    loss_of,
)


def made_up(count: int, seed: int = 0) -> Samples:
    """Samples whose label follows from a few of their features."""
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(99).standard_normal(400)
    rows = [np.unique(np.minimum(rng.zipf(1.3, 12) - 1, 399)) for _ in range(count)]
    start = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    labels = np.array([float(truth[row].sum() > 0) for row in rows], np.float32)
    keys = np.concatenate(rows).astype(np.uint64)
    return Samples("made up", start, keys, np.ones(len(keys), np.float32), labels)


@pytest.mark.parametrize(
    "model",
    [LogisticRegression(), FactorisationMachine(3), NeuralFactorisation(3)],
    ids=["lr", "fm", "ncf"],
)
def test_gradients_are_the_losss_derivatives(model: Model) -> None:
    batch = Batch.of(made_up(6), model.dense)
    rng = np.random.default_rng(1)
    parameters = rng.standard_normal((len(batch.keys), model.width)).astype(np.float32)
    found = model.gradients(batch, parameters, error_of(model.scores(batch, parameters), batch.labels))
    # of the network, which comes first, and of features
    for place in [*range(model.width * len(model.dense)), *rng.integers(0, parameters.size, 10).tolist()]:
        ends = []
        for step in (0.01, -0.01):
            moved = parameters.copy()
            moved.reshape(-1)[place] += step
            ends.append(loss_of(model.scores(batch, moved), batch.labels))
        assert found.reshape(-1)[place] == pytest.approx((ends[0] - ends[1]) / 0.02, abs=2e-4)


def test_a_batch_has_the_constant_and_every_key_once() -> None:
    batch = Batch.of(made_up(5))
    assert batch.keys[0] == BIAS
    assert len(np.unique(batch.keys)) == len(batch.keys)
    assert np.allclose(batch.per_sample(batch.value**2), 2.0)
    dense = NeuralFactorisation(2).dense
    batch = Batch.of(made_up(5), dense)
    assert batch.keys[:3].tolist() == dense.tolist()
    assert (batch.place[5:] >= batch.dense).all()


def test_the_area_under_the_curve() -> None:
    scores = np.array([0.1, 0.4, 0.4, 0.8])
    assert area_under_curve(scores, np.array([0.0, 0.0, 1.0, 1.0])) == 0.875
    assert area_under_curve(scores, np.ones(4)) == 0.5


@pytest.mark.parametrize(
    ("model", "steps"),
    [(LogisticRegression(), 10), (FactorisationMachine(2), 5), (NeuralFactorisation(2), 7)],
    ids=["lr", "fm", "ncf"],
)
def test_training_learns_and_loss_changes_no_bit(model: Model, steps: int) -> None:
    batches, held_out = list(made_up(72 * steps).batches(24)), made_up(300, seed=1)
    results = []
    for impair in (0.0, 0.04):
        with sparse_group(
            3,
            2,
            width=model.width,
            optimiser=model.optimiser,
            initial=model.initial,
            impair=impair,
            seed=2,
            timing=Timing(first=0.002, least=0.001, most=0.02),
        ) as group:
            group.use_hot(hot_by_sampling(batches, 0.1, 0, model, 1 << 16))
            results.append(train(group, model, batches, held_out))
            assert group.in_network_share() > 0.2
    clean, lossy = results
    assert clean.auc > 0.75
    assert clean.loss < 0.65
    assert (clean.keys == lossy.keys).all()
    assert clean.values.tobytes() == lossy.values.tobytes()


def test_hot_keys_found_on_the_way() -> None:
    batches = list(made_up(480).batches(20))
    with sparse_group(2, 1, online=Online(after=4, threshold=0.3, step=10)) as group:
        found = train(group, LogisticRegression(), batches, made_up(50, seed=1))
    # what four steps have counted decides what is hot in the sixth
    assert [step.changed for step in found.steps[:6]] == [False] * 5 + [True]
    assert [step.hot for step in found.steps[:5]] == [0] * 5
    assert found.steps[-1].hot > found.steps[-1].cold
