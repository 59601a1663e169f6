"""A shard's optimisers, against their formulas one number at a time, and first values."""

import math

import numpy as np
import pytest

from inanet.proto.zebra.store import Adagrad, Ftrl, Optimiser, Sgd, Store, Sum, Uniform

GRADIENTS = [0.5, -1.25, 2.0]


def ftrl(gradients: list[float], a: float, b: float, l1: float, l2: float) -> float:
    w = z = n = 0.0
    for g in gradients:
        sigma = (math.sqrt(n + g * g) - math.sqrt(n)) / a
        z += g - sigma * w
        n += g * g
        w = 0.0 if abs(z) <= l1 else -(z - math.copysign(l1, z)) / ((b + math.sqrt(n)) / a + l2)
    return w


def adagrad(gradients: list[float], rate: float) -> float:
    w = s = 0.0
    for g in gradients:
        s += g * g
        w -= rate * g / (math.sqrt(s) + 1e-8)
    return w


@pytest.mark.parametrize(
    ("optimiser", "wanted"),
    [
        (Sum(), sum(GRADIENTS)),
        (Sgd(0.1), -0.1 * sum(GRADIENTS)),
        (Adagrad(0.1), adagrad(GRADIENTS, 0.1)),
        (Ftrl(0.2, 1.0, 0.1, 0.5), ftrl(GRADIENTS, 0.2, 1.0, 0.1, 0.5)),
        (Ftrl(0.2, 1.0, 100.0, 0.5), 0.0),
    ],
    ids=["sum", "sgd", "adagrad", "ftrl", "ftrl-sparse"],
)
def test_optimisers_follow_their_formulas(optimiser: Optimiser, wanted: float) -> None:
    store = Store(1, optimiser)
    key, one = np.array([7], np.uint64), np.array([2], np.int64)
    for gradient in GRADIENTS:
        found = store.apply(key, np.array([[gradient]], np.float32), one)
    assert found[0, 0] == pytest.approx(wanted, rel=1e-5)
    assert store.read(key)[0, 0] == found[0, 0]
    keys, counts = store.updates()
    assert (keys.tolist(), counts.tolist()) == ([7], [6])
    assert store.updates()[1].tolist() == [0]


def test_first_values_depend_on_the_key_alone() -> None:
    store = Store(4, Sum(), Uniform(0.5, seed=3))
    keys = np.arange(2000, dtype=np.uint64)
    before = store.read(keys)
    assert len(store) == 0
    store.apply(keys[::-1].copy(), np.zeros((2000, 4), np.float32), np.zeros(2000, np.int64))
    assert (store.read(keys) == before).all()
    assert len(np.unique(before)) > 7000
    assert abs(before.mean()) < 0.02
    assert before.min() >= -0.5
    assert before.max() < 0.5
