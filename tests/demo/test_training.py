import hashlib

import numpy as np
import pytest

from inanet.data.digits import CLASSES, HELD_OUT, PIXELS, Digits, fetch, load, save, split
from inanet.training import classifier as model
from inanet.training import descent as training
from inanet.training.descent import Recipe


@pytest.fixture(scope="module")
def digits() -> Digits:
    return fetch()


def test_the_data_set_is_split_once_and_survives_the_file(digits, tmp_path):
    assert digits.images.dtype == np.float32
    assert digits.images.shape == (1797 - HELD_OUT, PIXELS)
    assert digits.held_out_images.shape == (HELD_OUT, PIXELS)
    assert digits.images.max() == 1
    assert set(digits.labels) == set(digits.held_out_labels) == set(range(CLASSES))
    save(digits, tmp_path / "digits.npz")
    again = load(tmp_path / "digits.npz")
    for name in Digits.__slots__:
        np.testing.assert_array_equal(getattr(again, name), getattr(digits, name))


def test_no_held_out_image_trains():
    images = np.arange(1797, dtype=np.float64)[:, None] * np.ones(PIXELS)
    parts = split(images, np.zeros(1797, np.int64))
    assert not set(parts.images[:, 0]) & set(parts.held_out_images[:, 0])


def test_the_gradient_is_the_slope_of_the_loss():
    generator = np.random.default_rng(0)
    units, count = 5, 7
    images = generator.random((count, PIXELS)).astype(np.float32)
    labels = generator.integers(0, CLASSES, count)
    # in float64 the difference quotient is accurate; the code under test keeps the type it is given
    weights = model.initial(units, 3).astype(np.float64)
    _, gradient = model.gradient(weights, units, images.astype(np.float64), labels)
    for index in (0, PIXELS * units - 1, PIXELS * units + 2, (PIXELS + 1) * units + 11, len(weights) - 1):
        step = np.zeros_like(weights)
        step[index] = 1e-5
        above, _ = model.gradient(weights + step, units, images.astype(np.float64), labels)
        below, _ = model.gradient(weights - step, units, images.astype(np.float64), labels)
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-9)


def test_everything_a_worker_computes_is_float32(digits):
    weights = model.initial(16, 0)
    loss, gradient = model.gradient(weights, 16, digits.images[:8], digits.labels[:8])
    descent = training.Descent(Recipe(parts=1, steps=1, seed=0, units=16))
    descent.step(gradient)
    assert {weights.dtype, gradient.dtype, descent.weights.dtype, descent.velocity.dtype} == {
        np.dtype(np.float32)
    }
    assert loss > 0


def test_layers_cover_the_flat_vector_once():
    flat = np.arange(model.parameters(3), dtype=np.float32)
    views = model.layers(flat, 3)
    parts = [views.hidden, views.hidden_bias, views.output, views.output_bias]
    np.testing.assert_array_equal(np.concatenate([part.ravel() for part in parts]), flat)
    assert all(np.shares_memory(part, flat) for part in parts)


@pytest.mark.parametrize("parts", [1, 3, 4, 16])
def test_a_batch_falls_into_equal_disjoint_parts(parts):
    recipe = Recipe(parts=parts, steps=30, seed=5)
    seen = list(training.batches(recipe, 1437))
    assert len(seen) == 30
    for batch in seen:
        assert [len(part) for part in batch] == [128 // parts] * parts
        assert len(set(np.concatenate(batch))) == parts * (128 // parts)
    epoch = 1437 // (128 // parts * parts)
    first_epoch = np.concatenate([np.concatenate(batch) for batch in seen[:epoch]])
    assert len(set(first_epoch)) == len(first_epoch)


def test_batches_and_weights_depend_on_the_seed_alone():
    def start(seed):
        recipe = Recipe(parts=2, steps=3, seed=seed)
        return training.digest(training.Descent(recipe).weights), [
            np.concatenate(batch).tolist() for batch in training.batches(recipe, 500)
        ]

    assert start(1) == start(1)
    assert start(1)[0] != start(2)[0]
    assert start(1)[1] != start(2)[1]


def test_descent_with_momentum():
    descent = training.Descent(Recipe(parts=1, steps=1, seed=0, units=2, learning_rate=0.5, momentum=0.5))
    before = descent.weights.copy()
    ones = np.ones_like(before)
    descent.step(ones)
    descent.step(ones)
    np.testing.assert_allclose(descent.weights, before - 0.5 * (1 + 1.5), rtol=1e-6)


def test_workers_with_an_exact_average_train_what_one_process_trains(digits):
    """All ranks in lockstep through generators, averaging as the single process does."""
    recipe = Recipe(parts=4, steps=12, seed=2, units=32)
    single = training.Descent(recipe)
    averages = []
    for parts in training.batches(recipe, len(digits.images)):
        _, gradients = training.part_gradients(recipe, digits, single.weights, parts)
        averages.append(training.exact_mean(gradients).astype(np.float32))
        single.step(averages[-1])

    for rank in range(4):
        arriving = iter(averages)
        losses = []

        def average(gradient, arriving=arriving):
            gradient[:] = next(arriving)

        weights = training.train_worker(
            recipe, digits, rank, average, lambda step, loss, _, losses=losses: losses.append((step, loss))
        )
        assert training.digest(weights) == training.digest(single.weights)
        assert [step for step, _ in losses] == list(range(12))


def test_training_learns(digits):
    recipe = Recipe(parts=4, steps=120, seed=2)
    descent = training.Descent(recipe)
    for parts in training.batches(recipe, len(digits.images)):
        _, gradients = training.part_gradients(recipe, digits, descent.weights, parts)
        descent.step(training.exact_mean(gradients).astype(np.float32))
    accuracy, loss = model.score(
        descent.weights, recipe.units, digits.held_out_images, digits.held_out_labels
    )
    assert accuracy > 0.9
    assert loss < 0.35


def test_the_digest_is_of_the_bits():
    weights = np.array([0.0, 1.0], np.float32)
    assert training.digest(weights) == hashlib.sha256(weights.tobytes()).hexdigest()
    assert training.digest(weights) != training.digest(np.array([-0.0, 1.0], np.float32))
