"""A training process of the asynchronous demo: what a user's own script would be, with its progress on standard output.

``python -m inanet.demo.epochs_trainer TASK``, TASK being a :class:`Task` as JSON. One JSON object a line: ``{"epoch", "loss",
"workers", "awaited", "staleness"}`` for every step, ``{"weights", "loss", "accuracy", "seconds"}`` at the end, loss and accuracy
of held-out digits. Plain SGD: under asynchronous training a step's result is what the weights are to be moved by, and momentum
would have to know the epochs that this worker was not in.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import inanet
from inanet.data.digits import Digits, load
from inanet.demo.trainer import JOB, say
from inanet.training import classifier as model
from inanet.training.classifier import F32
from inanet.training.descent import Recipe, batches, digest, exact_mean, part_gradients

#: What gradients are multiplied by: 32 workers' fit 32 bits as long as each value is below 64.
FACTOR = float(1 << 20)
RATE = np.float32(0.5)
#: Of the latency before each gradient: normal within 0 and 1, times :attr:`Task.pace` (GOAT, section VII-C).
MEAN, DEVIATION = 0.5, 0.2


@dataclass(frozen=True, slots=True)
class Task:
    """What one training process is to do: ``recipe.steps`` epochs, as worker ``rank``, or all parts by itself (-1).

    ``pace`` is how many seconds the longest latency takes.
    """

    recipe: Recipe
    rank: int
    socket: str
    digits: str
    system: str
    pace: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """The reverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "recipe": Recipe(**values["recipe"])})


def latencies(seed: int, rank: int) -> Iterator[float]:
    """One for each gradient, between 0 and 1."""
    rng = np.random.default_rng([seed, 2, rank])
    while True:
        drawn = float(rng.normal(MEAN, DEVIATION))
        if 0.0 <= drawn <= 1.0:
            yield drawn


def train(task: Task, digits: Digits) -> F32:
    """Steps of one worker, until one of them takes part in the last epoch or a later one. Returns its weights."""
    recipe = task.recipe
    weights = model.initial(recipe.units, recipe.seed)
    pauses = latencies(recipe.seed, task.rank)
    with inanet.connect(
        JOB, rank=task.rank, world=recipe.parts, local_world=1, socket=task.socket, system=task.system
    ) as job:
        for parts in batches(recipe, len(digits.images)):
            own = parts[task.rank]
            loss, gradient = model.gradient(weights, recipe.units, digits.images[own], digits.labels[own])
            time.sleep(task.pace * next(pauses))
            step = job.all_reduce_async(gradient, "mean", "gradient", mode="fixed", factor=FACTOR)
            step.wait()
            weights -= RATE * gradient
            part = step.participation
            assert part is not None, "a job without epochs"
            say(loss=loss, **asdict(part))
            if part.epoch >= recipe.steps:
                break
    return weights


def alone(task: Task, digits: Digits) -> tuple[F32, F32]:
    """All epochs with all workers' gradients in this process. Returns the weights, and those after half of the epochs."""
    recipe = task.recipe
    weights = model.initial(recipe.units, recipe.seed)
    halfway = weights
    for step, parts in enumerate(batches(recipe, len(digits.images))):
        if step == recipe.steps // 2:
            halfway = weights.copy()
        _, gradients = part_gradients(recipe, digits, weights, parts)
        weights -= RATE * exact_mean(gradients).astype(np.float32)
    return weights, halfway


def run(task: Task) -> None:
    """Train and report."""
    digits = load(Path(task.digits))
    started = time.monotonic()
    held_out = digits.held_out_images, digits.held_out_labels
    more = {}
    if task.rank < 0:
        weights, halfway = alone(task, digits)
        more["halfway"] = model.score(halfway, task.recipe.units, *held_out)[1]
    else:
        weights = train(task, digits)
    seconds = time.monotonic() - started
    accuracy, loss = model.score(weights, task.recipe.units, *held_out)
    say(weights=digest(weights), loss=loss, accuracy=accuracy, seconds=seconds, **more)


if __name__ == "__main__":
    run(Task.from_json(sys.argv[1]))
