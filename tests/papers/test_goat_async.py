"""The timing model of asynchronous training."""

import numpy as np
import pytest

from inanet.papers.goat_async import (
    BATCH,
    DEVIATION,
    SCHEMES,
    SYNCHRONOUS_EPOCH,
    Model,
    Regression,
    Run,
    Scheme,
    _finish_claims,
    base_of,
    latencies,
    train,
)


def test_latencies_are_normal_within_a_second() -> None:
    drawn = latencies(0.5, 4000, np.random.default_rng(1))
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.02)
    assert drawn.std() == pytest.approx(DEVIATION, abs=0.02)


def test_synchronous_epochs_are_as_long_as_the_papers() -> None:
    run = train("GOAT", 16, Model(), 1, epochs=60)
    assert run.seconds / 60 == pytest.approx(SYNCHRONOUS_EPOCH, rel=0.02)
    assert (run.participants, run.discarded, run.staleness) == (16, 0, 0)
    assert run.images == pytest.approx(16 * BATCH * 60 / run.seconds)
    assert base_of(Model(base=0.25)) == 0.25


def test_only_ksgd_discards_and_only_asynchronous_gradients_are_stale() -> None:
    runs = {scheme: train(scheme, 8, Model(noise=0.125), 1, epochs=30) for scheme in SCHEMES}
    assert runs["K-SGD"].discarded > 0
    assert runs["K-SGD"].staleness == 0
    assert runs["GOAT-Async"].discarded == 0
    assert runs["GOAT-Async"].staleness > 0
    assert runs["GOAT-Async"].seconds < runs["K-SGD"].seconds < runs["GOAT"].seconds
    assert runs["GOAT-Async"] == train("GOAT-Async", 8, Model(noise=0.125), 1, epochs=30)


def test_stale_gradients_train_to_the_same_loss() -> None:
    finals = {}
    for scheme in ("GOAT", "GOAT-Async"):
        task = Regression(8)
        before = task.loss()
        train(scheme, 8, Model(noise=0.125), 1, begin=task.begin, step=task.step, epochs=60)
        finals[scheme] = task.loss()
        assert finals[scheme] < before / 3
    assert finals["GOAT-Async"] == pytest.approx(finals["GOAT"], rel=0.1)


def test_claims_are_about_all_epochs_and_about_the_same_loss() -> None:
    runs: dict[Scheme, Run] = {
        scheme: Run(seconds, 1, 5.0, 0, 0)
        for scheme, seconds in (("GOAT", 400.0), ("K-SGD", 150.0), ("GOAT-Async", 100.0))
    }
    final: dict[Scheme, float] = {"GOAT": 1.0, "K-SGD": 1.0, "GOAT-Async": 1.04}
    reached: dict[Scheme, float] = {"GOAT": 90.0, "K-SGD": 90.0, "GOAT-Async": 50.0}
    claims = _finish_claims(0.1, runs, final, reached)
    assert [(claim.paper, claim.ours, claim.holds) for claim in claims] == [
        (2.02, 4.0, True),
        (1.56, 1.5, False),
        (2.02, 1.8, False),
        (1.56, 1.8, True),
        (1.0, 1.04, True),
    ]
    assert claims[1].reason
