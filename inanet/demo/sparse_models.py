"""Models of sparse data: their loss on a batch, and the gradient of each key.

A worker pulls the parameters of its batch's keys, float32[u, width], and pushes gradients of the same shape. All gradients
are of the mean logistic loss over the batch.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.demo.clicks import Samples
from inanet.proto.zebra.store import Adagrad, Ftrl, Initial, Optimiser, Uniform, zeros
from inanet.wire.batch import U64

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
#: key of the model's constant
BIAS = np.uint64(0xB1A5_B1A5_B1A5_B1A5)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples in terms of their distinct ``keys`` uint64[u], the constant's first: entry *e* of sample ``sample[e]`` is key
    ``place[e]`` with value ``value[e]``; ``labels`` float64[n].
    """

    keys: U64
    sample: NDArray[np.int64]
    place: NDArray[np.int64]
    value: F64
    labels: F64

    @staticmethod
    def of(samples: Samples) -> "Batch":
        """Number the keys, and scale each sample's features to length 1."""
        found, place = np.unique(samples.keys, return_inverse=True)
        # the hash of a feature could be the constant's key: then they share a parameter
        found = found[found != BIAS] if BIAS in found else found
        keys = np.concatenate([[BIAS], found]).astype(np.uint64)
        order = np.argsort(keys)
        place = order[np.searchsorted(keys[order], samples.keys)]
        count = len(samples)
        sample = np.repeat(np.arange(count), np.diff(samples.start))
        value = samples.values.astype(np.float64)
        length = np.sqrt(np.bincount(sample, weights=value * value, minlength=count))
        value = value / np.maximum(length, 1e-12)[sample]
        return Batch(
            keys,
            np.concatenate([np.arange(count), sample]),
            np.concatenate([np.zeros(count, np.int64), place]),
            np.concatenate([np.ones(count), value]),
            samples.labels.astype(np.float64),
        )

    def per_sample(self, weights: F64) -> F64:
        """Sums of ``weights`` (float64[entries]) by sample."""
        return np.bincount(self.sample, weights=weights, minlength=len(self.labels))

    def per_key(self, weights: F64) -> F64:
        """Sums by key."""
        return np.bincount(self.place, weights=weights, minlength=len(self.keys))


class Model(Protocol):
    """``width`` values per key; ``optimiser`` and ``initial`` are what the PS shards need."""

    name: str

    @property
    def width(self) -> int:
        """Values per key."""
        ...

    @property
    def optimiser(self) -> Optimiser:
        """At the PS."""
        ...

    @property
    def initial(self) -> Initial:
        """First values."""
        ...

    def scores(self, batch: Batch, parameters: F32) -> F64:
        """Logits float64[n] under ``parameters`` float32[u, width]."""
        ...

    def gradients(self, batch: Batch, parameters: F32, error: F64) -> F32:
        """float32[u, width], given the derivative of the loss by each logit, float64[n]."""
        ...


@dataclass(frozen=True, slots=True)
class LogisticRegression:
    """One weight per key, trained with FTRL."""

    name: str = "lr"
    width: int = 1
    optimiser: Optimiser = field(default_factory=lambda: Ftrl(alpha=1.0, beta=0.1))
    initial: Initial = zeros

    def scores(self, batch: Batch, parameters: F32) -> F64:
        """w x."""
        return batch.per_sample(parameters[batch.place, 0].astype(np.float64) * batch.value)

    def gradients(self, batch: Batch, parameters: F32, error: F64) -> F32:
        """error x."""
        return batch.per_key(error[batch.sample] * batch.value).astype(np.float32)[:, None]


@dataclass(frozen=True, slots=True)
class FactorisationMachine:
    """A weight and a vector of ``factors`` per key (Rendle, 2010): w x + the sum over pairs of <v_i, v_j> x_i x_j."""

    factors: int = 4
    name: str = "fm"
    optimiser: Optimiser = field(default_factory=lambda: Adagrad(rate=0.3))
    initial: Initial = field(default_factory=lambda: Uniform(0.05))

    @property
    def width(self) -> int:
        """The weight, then the vector."""
        return 1 + self.factors

    def scores(self, batch: Batch, parameters: F32) -> F64:
        """Pairs as half of (sum v x)^2 - sum (v x)^2, by factor."""
        values = parameters[batch.place].astype(np.float64) * batch.value[:, None]
        out = batch.per_sample(values[:, 0])
        for f in range(1, self.width):
            total = batch.per_sample(values[:, f])
            out = out + 0.5 * (total * total - batch.per_sample(values[:, f] ** 2))
        return out

    def gradients(self, batch: Batch, parameters: F32, error: F64) -> F32:
        """x for the weight; x (sum v x - v x) for each factor; times error."""
        values = parameters[batch.place].astype(np.float64) * batch.value[:, None]
        weight = error[batch.sample] * batch.value
        out = np.zeros((len(batch.keys), self.width), np.float32)
        out[:, 0] = batch.per_key(weight)
        for f in range(1, self.width):
            total = batch.per_sample(values[:, f])
            out[:, f] = batch.per_key(weight * (total[batch.sample] - values[:, f]))
        return out


MODELS = {"lr": LogisticRegression, "fm": FactorisationMachine}


def loss_of(scores: F64, labels: F64) -> float:
    """Mean logistic loss, in nats."""
    return float(np.mean(np.logaddexp(0.0, scores) - labels * scores))


def error_of(scores: F64, labels: F64) -> F64:
    """Its derivative by each logit."""
    return (0.5 * (1 + np.tanh(scores / 2)) - labels) / len(labels)


def area_under_curve(scores: F64, labels: F64) -> float:
    """Probability that a positive sample scores above a negative one; equals count half. 0.5 without either."""
    order = np.argsort(scores, kind="stable")
    _, inverse, several = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(several)
    rank = np.empty(len(order))
    rank[:] = (last - (several - 1) / 2)[inverse]
    positive = labels > 0
    p, n = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - p * (p + 1) / 2) / (p * n)) if p and n else 0.5
