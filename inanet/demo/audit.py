"""How far a training run through the fabric may be from the single-process run, and whether it is.

The audit has the averaged gradients that came out of the network, one per step, and replays the run from
them beside the single-process run. Three statements are checked; together they pin the whole run down:

1. *Every average is right.* With n contributions x_i of a block (8 elements in ``prologue`` mode, 256 in ``carried``), all |x_i| < 2^e, the fabric
   adds integers rint(x_i 2^s), s = 31 - ceil(log2 n) - e (docs/protocol.md, number format). Each rounding is
   off by at most half a unit 2^-s; integer sums are exact; so the mean is off by at most 2^(-s - 1), plus
   half a unit in the last place for its conversion to float32. (Up to n = 128 a float32 never reaches the
   clamp of the number format: it has 24 significant bits.) A block's exponent is the largest of the contributions' in
   ``prologue`` mode, and in ``carried`` mode at most the larger of that and that of the last step's plus six bits, and
   never more than eight bits above it.
   The audit recomputes the contributions at the run's own weights and compares every element of every step
   with that bound.
2. *The run is what its averages make of it.* The replayed weights have the digest that every worker reported.
3. *The runs stay together.* Write D for the difference of the two runs' weights and V for that of their
   velocities. One step adds to V the difference of the exact gradients at the two weight vectors and the
   errors bounded above, and to D the rate times V; float32 rounding adds half a unit in the last place per
   operation. Adding up magnitudes gives a bound of |D| for each element after each step. It cannot be known
   before the run, since it follows both runs.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inanet.data.digits import Digits, load
from inanet.training import classifier as model
from inanet.training.classifier import F32
from inanet.training.descent import F64, Descent, Recipe, batches, digest, exact_mean, part_gradients

#: Elements that share an exponent (number format), by mode.
BLOCKS = {"prologue": 8, "carried": 256}
#: In ``carried`` mode a block's exponent lies at most this many bits above that of the last step's contributions,
MOST_HEADROOM = 6
#: and this many above that of this step's; it is the only bound for a block that was zeros.
SLACK = 8
#: Largest number of contributions for which the bound below holds.
MAX_CONTRIBUTIONS = 128
#: Half a unit in the last place of float32, relative; the excess covers the float64 steps around it.
HALF_ULP = 2.0**-24 * (1 + 2.0**-20)
#: Half the smallest float32, for results that are denormal.
HALF_DENORMAL = 2.0**-150


def block_exponents(values: NDArray[np.floating], width: int) -> NDArray[np.int32]:
    """The smallest e >= -126 with every |x| < 2^e, for each block of ``width`` along the last axis: int32[...,
    blocks]."""
    *lead, count = values.shape
    blocks = -(-count // width)
    padded = np.zeros((*lead, blocks * width), values.dtype)
    padded[..., :count] = np.abs(values)
    largest = padded.reshape(*lead, blocks, width).max(axis=-1)
    _, exponent = np.frexp(largest)
    return np.where(largest == 0, -126, np.maximum(exponent, -126)).astype(np.int32)


def average_bound(parts: F32, last_parts: F32 | None, width: int) -> F64:
    """Largest error the fabric may make in the mean of ``parts``, float32[n, count]: float64[count].

    ``last_parts`` are the previous step's, if exponents are carried over from it, else ``None``; blocks have ``width``
    elements. Raises ``ValueError`` for more than :data:`MAX_CONTRIBUTIONS` parts.
    """
    n, count = parts.shape
    if n > MAX_CONTRIBUTIONS:
        raise ValueError(f"{n} contributions: the bound is proven for up to {MAX_CONTRIBUTIONS}")
    exponents = block_exponents(parts, width).max(axis=0)
    if last_parts is not None:
        last = block_exponents(last_parts, width).max(axis=0)
        carried = np.where(last == -126, exponents + SLACK, last + MOST_HEADROOM)
        exponents = np.maximum(exponents, np.minimum(carried, exponents + SLACK))
    half_unit = np.ldexp(1.0, exponents + (n - 1).bit_length() - 32)
    fixed = np.repeat(half_unit, width)[:count]
    bound: F64 = fixed + HALF_ULP * (np.abs(exact_mean(parts)) + fixed) + HALF_DENORMAL
    return bound


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the audit found; differences and bounds are absolute, of float32 weights and gradients."""

    weights: str
    """SHA-256 of the weights that the averaged gradients lead to"""
    steps_within_bound: bool
    worst_step: int
    """the element whose average was the first to exceed its bound, or else came closest to it"""
    worst_element: int
    gradient_error: float
    gradient_bound: float
    """error of that average, and what it may be"""
    weights_within_bound: bool
    max_weight_difference: float
    bound: float
    """largest difference to the single-process run's weights, and the largest value of its bound"""
    accuracy: float
    baseline_accuracy: float
    loss: float
    baseline_loss: float
    """fraction of held-out digits recognised, and mean cross-entropy there, of the two runs"""

    @property
    def within_bound(self) -> bool:
        """Whether every average and the final weights are within their bounds."""
        return self.steps_within_bound and self.weights_within_bound


class _Drift:
    """Elementwise bounds of the two runs' difference: statement 3 of the module."""

    def __init__(self, count: int, recipe: Recipe) -> None:
        self.velocity = np.zeros(count)
        self.weights = np.zeros(count)
        self.rate = float(np.float32(recipe.learning_rate))
        self.momentum = float(np.float32(recipe.momentum))

    def step(self, gradients: F64, before: tuple[F32, F32], run: Descent, single: Descent) -> None:
        """``gradients``: bound of the difference of the gradients followed; ``before``: the velocities
        before the step."""
        rounding = sum(
            self.momentum * np.abs(old) + np.abs(descent.velocity)
            for old, descent in zip(before, (run, single), strict=True)
        )
        self.velocity = self.momentum * self.velocity + gradients + HALF_ULP * rounding + 4 * HALF_DENORMAL
        rounding = sum(
            self.rate * np.abs(descent.velocity) + np.abs(descent.weights) for descent in (run, single)
        )
        self.weights += self.rate * self.velocity + HALF_ULP * rounding + 4 * HALF_DENORMAL


def audit(recipe: Recipe, digits: Digits, averages: F32) -> Verdict:
    """Check a run from its averaged gradients, float32[steps, parameters]; see the module's text."""
    run, single = Descent(recipe), Descent(recipe)
    count = run.weights.size
    drift = _Drift(count, recipe)
    worst = (-1.0, 0, 0, 0.0, 0.0)
    last: F32 | None = None
    for step, parts in enumerate(batches(recipe, len(digits.images))):
        _, contributions = part_gradients(recipe, digits, run.weights, parts)
        exact = exact_mean(contributions)
        carried = last if recipe.mode == "carried" else None
        bound = average_bound(contributions, carried, BLOCKS[recipe.mode])
        averaged = np.asarray(averages[step])
        error = np.abs(averaged - exact)
        # a NaN in the average must count as the worst error, not vanish in a comparison
        ratio = np.nan_to_num(error / bound, nan=np.inf)
        element = int(ratio.argmax())
        # the first average that is off explains the ones after it
        if worst[0] <= 1 and ratio[element] > worst[0]:
            worst = (float(ratio[element]), step, element, float(error[element]), float(bound[element]))
        _, single_parts = part_gradients(recipe, digits, single.weights, parts)
        single_exact = exact_mean(single_parts)
        before = (run.velocity.copy(), single.velocity.copy())
        run.step(averaged)
        single.step(single_exact.astype(np.float32))
        drift.step(
            np.abs(exact - single_exact) + bound + HALF_ULP * np.abs(single_exact), before, run, single
        )
        last = contributions
    difference = np.abs(run.weights.astype(np.float64) - single.weights)
    held_out = (digits.held_out_images, digits.held_out_labels)
    accuracy, loss = model.score(run.weights, recipe.units, *held_out)
    baseline_accuracy, baseline_loss = model.score(single.weights, recipe.units, *held_out)
    return Verdict(
        weights=digest(run.weights),
        steps_within_bound=worst[0] <= 1,
        worst_step=worst[1],
        worst_element=worst[2],
        gradient_error=worst[3],
        gradient_bound=worst[4],
        weights_within_bound=bool(np.all(difference <= drift.weights)),
        max_weight_difference=float(difference.max()),
        bound=float(drift.weights.max()),
        accuracy=accuracy,
        baseline_accuracy=baseline_accuracy,
        loss=loss,
        baseline_loss=baseline_loss,
    )


def main() -> None:
    """``python -m inanet.demo.audit RECIPE DIGITS AVERAGES``: print the verdict as one JSON object.

    RECIPE is JSON, DIGITS and AVERAGES are files. A process of its own, started with one BLAS thread like
    the workers, so that it repeats their float32 arithmetic bit for bit.
    """
    recipe = Recipe(**json.loads(sys.argv[1]))
    verdict = audit(recipe, load(Path(sys.argv[2])), np.load(sys.argv[3], mmap_mode="r"))
    print(json.dumps(asdict(verdict)), flush=True)


if __name__ == "__main__":
    main()
