from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.data.digits import Digits, fetch
from inanet.demo import audit
from inanet.proto.common import quantised
from inanet.training import descent as training
from inanet.training.descent import Recipe
from tests.demo.emulation import EmulatedFabric

RECIPE = Recipe(parts=4, steps=20, seed=3, units=32)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return fetch()


def through_fabric(recipe: Recipe, digits: Digits) -> tuple[np.ndarray, str]:
    """Averaged gradients of a run through the emulated fabric, and the digest of its final weights."""
    fabric, descent, averages = EmulatedFabric(recipe.mode == "carried"), training.Descent(recipe), []
    for parts in training.batches(recipe, len(digits.images)):
        _, gradients = training.part_gradients(recipe, digits, descent.weights, parts)
        averages.append(fabric.average(gradients))
        descent.step(averages[-1])
    return np.stack(averages), training.digest(descent.weights)


@pytest.fixture(scope="module")
def run(digits):
    return through_fabric(RECIPE, digits)


@pytest.mark.parametrize("mode", ["prologue", "carried"])
@pytest.mark.parametrize("parts", [1, 3, 4])
def test_an_honest_run_is_within_its_bounds(digits, parts, mode):
    recipe = Recipe(parts=parts, steps=12, seed=parts, units=32, mode=mode)
    averages, weights = through_fabric(recipe, digits)
    verdict = audit.audit(recipe, digits, averages)
    assert verdict.within_bound
    assert verdict.weights == weights
    assert verdict.gradient_error <= verdict.gradient_bound
    assert verdict.max_weight_difference <= verdict.bound < 1e-5


def test_the_gradient_bound_is_tight(run, digits):
    """Of hundreds of thousands of averages the worst comes within a few per cent of what the format
    allows."""
    verdict = audit.audit(RECIPE, digits, run[0])
    assert verdict.gradient_error > 0.9 * verdict.gradient_bound


def test_the_single_process_run_is_the_baseline(digits):
    single = training.Descent(RECIPE)
    averages = []
    for parts in training.batches(RECIPE, len(digits.images)):
        _, gradients = training.part_gradients(RECIPE, digits, single.weights, parts)
        averages.append(training.exact_mean(gradients).astype(np.float32))
        single.step(averages[-1])
    verdict = audit.audit(RECIPE, digits, np.stack(averages))
    assert verdict.max_weight_difference == 0
    assert (verdict.accuracy, verdict.loss) == (verdict.baseline_accuracy, verdict.baseline_loss)


def lose_a_contribution(averages, step):
    averages[step, :256] *= np.float32(0.75)


def flip_one_bit(averages, step):
    averages[step].view(np.uint32)[np.abs(averages[step]).argmax()] ^= 1 << 5


def shift_a_fragment(averages, step):
    averages[step, 256:512] = averages[step, 512:768]


def repeat_the_step_before(averages, step):
    averages[step] = averages[step - 1]


def poison(averages, step):
    averages[step, 300] = np.nan


@pytest.mark.parametrize(
    "damage", [lose_a_contribution, flip_one_bit, shift_a_fragment, repeat_the_step_before, poison]
)
def test_damage_to_a_single_average_is_found_where_it_happened(run, digits, damage):
    averages = run[0].copy()
    damage(averages, 11)
    with np.errstate(invalid="ignore"):
        verdict = audit.audit(RECIPE, digits, averages)
    assert not verdict.steps_within_bound
    assert verdict.worst_step == 11
    assert verdict.weights != run[1]


def test_drift_beyond_the_rounding_is_found(run, digits):
    """A run that took other averages than it shows has other weights than the audit's replay."""
    descent = training.Descent(RECIPE)
    for average in run[0][:-1]:
        descent.step(average)
    descent.step(run[0][-1] * np.float32(1.0001))
    assert training.digest(descent.weights) != audit.audit(RECIPE, digits, run[0]).weights


finite = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)


@given(
    n=st.integers(1, 40),
    rounds=st.lists(st.lists(finite, min_size=1, max_size=12), min_size=1, max_size=4),
    carried=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_bound_holds_for_any_numbers(n, rounds, carried, seed):
    """Number format: whatever the contributions and the rounds before were, against the exact mean in rationals."""
    order = np.random.default_rng(seed)
    fabric = EmulatedFabric(carried)
    last = None
    for values in rounds:
        values = np.resize(np.array(values, np.float32), len(rounds[0]))
        parts = np.stack([order.permutation(values) * np.float32((-1) ** k) for k in range(n)])
        bound = audit.average_bound(parts, last if carried else None, 256 if carried else 8)
        last = parts
        average = fabric.average(parts)
        for index in range(len(values)):
            exact = sum((Fraction(float(x)) for x in parts[:, index]), Fraction(0)) / n
            assert abs(Fraction(float(average[index])) - exact) <= Fraction(float(bound[index]))


def test_the_headroom_of_carried_exponents_is_the_formats():
    assert (audit.MOST_HEADROOM, audit.SLACK) == (quantised.MOST_HEADROOM, quantised.SLACK)


def test_block_exponents_are_exact_at_powers_of_two():
    values = np.zeros(4 * 256, np.float32)
    values[0], values[256], values[512] = 1.0, np.nextafter(np.float32(1), np.float32(0)), -(2.0**-140)
    assert audit.block_exponents(values, 256).tolist() == [1, 0, -126, -126]


def test_too_many_contributions_are_refused():
    with pytest.raises(ValueError, match="129 contributions"):
        audit.average_bound(np.zeros((129, 1), np.float32), None, 8)
