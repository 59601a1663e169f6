"""What workers of a sparse job push: batches of real samples, or drawn after the paper's models."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inanet.data.clicks import Samples
from inanet.proto.zebra.hot import ranking, stop_rule
from inanet.wire.batch import U64

#: the paper's hot sets, models and batches are divided by this unless told otherwise
SCALE = 10
#: keys in a worker's batch, at that scale
PAIRS = 4000
_SEED = 6


@dataclass(frozen=True, slots=True)
class Model:
    """``parameters`` of which ``hot`` have ``share`` of the updates (section III-A), undivided."""

    name: str
    parameters: int
    hot: int
    share: float


OA = Model("OA", 150_000_000, 30_000, 0.5)
SE = Model("SE", 9_000_000, 30_000, 0.7)
DEEP_LIGHT = Model("DeepLight", 320_000, 40_000, 0.4)


@dataclass(frozen=True, slots=True)
class Load:
    """``hot`` keys, hottest first, and what each worker pushes in each iteration: ``batches[iteration][worker]``."""

    name: str
    parameters: int
    hot: U64
    batches: Sequence[Sequence[U64]]

    def of(self, workers: int) -> list[list[U64]]:
        """The first workers' batches."""
        return [list(iteration[:workers]) for iteration in self.batches]


def generated(model: Model, workers: int, iterations: int, scale: int = SCALE, pairs: int = PAIRS) -> Load:
    """Batches of a model, divided by ``scale``; ``pairs`` keys in one, at :data:`SCALE`.

    A key is in a batch at most once, and the model's share of a batch is hot, the hotter the likelier.
    """
    rng = np.random.default_rng(_SEED)
    hot, pairs = model.hot // scale, pairs * SCALE // scale
    weight = np.arange(1, hot + 1, dtype=np.float64) ** -0.9
    low, high = 0.0, 1e9
    for _ in range(80):
        factor = (low + high) / 2
        low, high = (
            (factor, high) if -np.expm1(-weight * factor).sum() < pairs * model.share else (low, factor)
        )
    present = -np.expm1(-weight * low)
    cold, space = round(pairs * (1 - model.share)), model.parameters // scale - hot

    def batch() -> U64:
        warm = np.flatnonzero(rng.random(hot) < present)
        return np.concatenate([warm, hot + np.unique(rng.integers(0, space, cold))]).astype(np.uint64)

    batches = [[batch() for _ in range(workers)] for _ in range(iterations)]
    return Load(model.name, model.parameters // scale, np.arange(hot, dtype=np.uint64), batches)


def of_samples(samples: Samples, workers: int, size: int, iterations: int) -> Load:
    """Batches of ``size`` real samples; the hot set by the stop rule over all of them."""
    ranked = ranking(samples.keys)
    parts = iter(samples.shuffled(_SEED).batches(size))
    batches = [[np.unique(next(parts).keys) for _ in range(workers)] for _ in range(iterations)]
    return Load(samples.name, len(ranked.keys), ranked.top(stop_rule(ranked)).keys, batches)
