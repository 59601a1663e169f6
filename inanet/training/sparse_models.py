"""Models of sparse data: their loss on a batch, and the gradient of each key.

A worker pulls the parameters of its batch's keys, float32[u, width], and pushes gradients of the same shape. All gradients
are of the mean logistic loss over the batch.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import Samples
from inanet.proto.zebra.store import Adagrad, Ftrl, Initial, Optimiser, Uniform, zeros
from inanet.wire.batch import U64

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
#: key of the model's constant
BIAS = np.uint64(0xB1A5_B1A5_B1A5_B1A5)
ONLY_BIAS: U64 = np.array([BIAS], np.uint64)


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples in terms of their distinct ``keys`` uint64[u]: the ``dense`` ones that every batch has come first, the constant's
    before all others. Entry *e* of sample ``sample[e]`` is key ``place[e]`` with value ``value[e]``; the first n entries are
    the constant's. ``labels`` float64[n].
    """

    keys: U64
    sample: NDArray[np.int64]
    place: NDArray[np.int64]
    value: F64
    labels: F64
    dense: int = 1

    @staticmethod
    def of(samples: Samples, dense: U64 = ONLY_BIAS) -> "Batch":
        """Number the keys, those of the model's ``dense`` part first, and scale each sample's features to length 1."""
        found = np.unique(samples.keys)
        # the hash of a feature could be a dense key: then they share a parameter
        keys = np.concatenate([dense, found[~np.isin(found, dense)]]).astype(np.uint64)
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
            len(dense),
        )

    def per_sample(self, weights: F64) -> F64:
        """Sums of ``weights`` (float64[entries]) by sample."""
        return _by(self.sample, weights, len(self.labels))

    def per_key(self, weights: F64) -> F64:
        """Sums by key."""
        return _by(self.place, weights, len(self.keys))


def _by(places: NDArray[np.int64], weights: F64, count: int) -> F64:
    """Sums of ``weights`` by place, float64[count]."""
    return np.bincount(places, weights, count).astype(np.float64, copy=False)


class Model(Protocol):
    """``width`` values per key; ``optimiser`` and ``initial`` are what the PS shards need. ``dense`` are the keys, uint64, that
    every batch has, the constant's first.
    """

    @property
    def name(self) -> str:
        """In tables."""
        ...

    @property
    def dense(self) -> U64:
        """Keys of every batch."""
        ...

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

    @property
    def dense(self) -> U64:
        """The constant."""
        return ONLY_BIAS

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
    def dense(self) -> U64:
        """The constant."""
        return ONLY_BIAS

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


@dataclass(frozen=True, slots=True)
class NeuralFactorisation:
    """Embeddings, and a network on what they make together: neural collaborative filtering (He et al., 2017).

    The vectors of a sample's features are multiplied pair by pair and the products added up (with a user and an item: their
    product); the sum, a vector f, goes into a layer of ``factors`` rectified units, and the output has both, beside a weight
    per feature: w x + 1 f + o relu(W f + b). The network is the *dense* part, as keys of every batch: the constant's has its
    weight and o, each unit's its b and its row of W.
    """

    factors: int = 8
    name: str = "ncf"
    optimiser: Optimiser = field(default_factory=lambda: Adagrad(rate=0.4))
    initial: Initial = field(default_factory=lambda: Uniform(0.2))

    @property
    def width(self) -> int:
        """The weight, then the vector."""
        return 1 + self.factors

    @property
    def dense(self) -> U64:
        """The constant and the units."""
        return np.concatenate([ONLY_BIAS, BIAS + np.arange(1, self.factors + 1, dtype=np.uint64)])

    def _pooled(self, batch: Batch, parameters: F32) -> tuple[F64, F64, F64]:
        """Vectors times values of all entries without the constants, float64[entries, factors]; by sample their sum, and their
        products' sum, f, float64[n, factors].
        """
        first = len(batch.labels)
        own = parameters[batch.place[first:], 1:].astype(np.float64) * batch.value[first:, None]
        owner = batch.sample[first:]
        sums = np.stack([_by(owner, column, first) for column in own.T], axis=1)
        squares = np.stack([_by(owner, column**2, first) for column in own.T], axis=1)
        return own, sums, 0.5 * (sums**2 - squares)

    def scores(self, batch: Batch, parameters: F32) -> F64:
        """See the class."""
        _, _, pooled = self._pooled(batch, parameters)
        units = parameters[1 : batch.dense].astype(np.float64)
        hidden = np.maximum(pooled @ units[:, 1:].T + units[:, 0], 0.0)
        out = batch.per_sample(parameters[batch.place, 0].astype(np.float64) * batch.value)
        result: F64 = out + pooled.sum(axis=1) + hidden @ parameters[0, 1:].astype(np.float64)
        return result

    def gradients(self, batch: Batch, parameters: F32, error: F64) -> F32:
        """By the chain rule, from the output back to the vectors."""
        own, sums, pooled = self._pooled(batch, parameters)
        units, last = parameters[1 : batch.dense].astype(np.float64), parameters[0, 1:].astype(np.float64)
        before = pooled @ units[:, 1:].T + units[:, 0]
        behind = error[:, None] * last * (before > 0)
        out = np.zeros((len(batch.keys), self.width))
        out[:, 0] = batch.per_key(error[batch.sample] * batch.value)
        out[0, 1:] = error @ np.maximum(before, 0.0)
        out[1 : batch.dense, 0] = behind.sum(axis=0)
        out[1 : batch.dense, 1:] = behind.T @ pooled
        first = len(batch.labels)
        owner, place = batch.sample[first:], batch.place[first:]
        into = (
            (behind @ units[:, 1:] + error[:, None])[owner] * batch.value[first:, None] * (sums[owner] - own)
        )
        for f in range(self.factors):
            out[:, 1 + f] += np.bincount(place, weights=into[:, f], minlength=len(batch.keys))
        return out.astype(np.float32)


MODELS = {"lr": LogisticRegression, "fm": FactorisationMachine, "ncf": NeuralFactorisation}


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
