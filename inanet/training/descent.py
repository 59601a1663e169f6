"""Data-parallel training of the demo's model, and the same training in one process.

Both walk the same batches from the same weights. A batch falls into one part per worker; the gradient of a
step is the mean of the parts' gradients. In the fabric each worker computes one part and the network
averages; the single-process run computes all parts and averages in float64. Everything else, down to the
order of float32 operations, is shared, so what may differ is exactly the rounding of the average (see
:mod:`inanet.demo.audit`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.data.digits import Digits
from inanet.training import classifier as model
from inanet.training.classifier import F32

F64 = NDArray[np.float64]
Indices = NDArray[np.int64]

#: Images a step looks at, all parts together (rounded down to a multiple of the parts).
BATCH = 128


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides a training run; equal recipes give equal runs."""

    parts: int
    steps: int
    seed: int
    units: int = 256
    learning_rate: float = 0.1
    momentum: float = 0.9
    mode: str = "prologue"
    """how the fabric agrees on block exponents. Gradients of a small batch change too much from step to step for
    ``carried`` ones to fit always, and what does not fit is sent again: agreeing first costs less here"""

    @property
    def part_size(self) -> int:
        """Images per part and step; equal parts make the mean of their gradients the batch's gradient."""
        return max(1, BATCH // self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for handing the recipe to another process; ``Recipe(**values)`` is the way back."""
        return asdict(self)


class Descent:
    """Stochastic gradient descent with momentum; all state and arithmetic float32."""

    def __init__(self, recipe: Recipe) -> None:
        self.weights = model.initial(recipe.units, recipe.seed)
        self.velocity = np.zeros_like(self.weights)
        self.rate = np.float32(recipe.learning_rate)
        self.momentum = np.float32(recipe.momentum)

    def step(self, mean_gradient: F32) -> None:
        """Follow the averaged gradient: velocity = momentum * velocity + gradient; weights -= rate *
        velocity."""
        self.velocity *= self.momentum
        self.velocity += mean_gradient
        self.weights -= self.rate * self.velocity


def batches(recipe: Recipe, images: int) -> Iterator[list[Indices]]:
    """For each step the image indices of each part: a reshuffle per epoch, incomplete batches skipped."""
    generator = np.random.default_rng([recipe.seed, 1])
    size = recipe.part_size * recipe.parts
    order = np.empty(0, np.int64)
    for _ in range(recipe.steps):
        if len(order) < size:
            order = generator.permutation(images)
        batch, order = order[:size], order[size:]
        yield list(batch.reshape(recipe.parts, recipe.part_size))


def digest(weights: F32) -> str:
    """SHA-256 of the weights' bytes: equal digests mean bit-identical weights."""
    return hashlib.sha256(np.ascontiguousarray(weights, "<f4").tobytes()).hexdigest()


def part_gradients(recipe: Recipe, digits: Digits, weights: F32, parts: list[Indices]) -> tuple[float, F32]:
    """Loss of the batch, and the gradient of every part as float32[parts, parameters]."""
    results = [model.gradient(weights, recipe.units, digits.images[p], digits.labels[p]) for p in parts]
    return float(np.mean([loss for loss, _ in results])), np.stack([part for _, part in results])


def exact_mean(parts: F32) -> F64:
    """Mean over the first axis in float64: exact for the purposes of float32, whatever the order."""
    mean: F64 = parts.mean(axis=0, dtype=np.float64)
    return mean


def train_worker(
    recipe: Recipe,
    digits: Digits,
    rank: int,
    average: Callable[[F32], None],
    on_step: Callable[[int, float, F32], None],
) -> F32:
    """Train as one of the workers and return the final weights.

    ``average(gradient)`` replaces this worker's gradient, float32[parameters], by the mean over all workers
    in place. ``on_step(step, loss, averaged)`` is called after every step with this worker's own loss
    before the step.
    """
    descent = Descent(recipe)
    for step, parts in enumerate(batches(recipe, len(digits.images))):
        own = parts[rank]
        loss, gradient = model.gradient(descent.weights, recipe.units, digits.images[own], digits.labels[own])
        average(gradient)
        descent.step(gradient)
        on_step(step, loss, gradient)
    return descent.weights
