"""What is trained to see whether asynchronous gradients get as far as synchronous ones."""

from typing import Any

import numpy as np

#: Samples of one gradient (GOAT, section VII-B).
BATCH = 64


class Regression:
    """A softmax regression on a seeded mixture of Gaussians; every worker has its own share of the samples."""

    CLASSES, FEATURES, SAMPLES = 10, 32, 1024

    def __init__(self, workers: int, rate: float = 0.5) -> None:
        rng = np.random.default_rng(7)
        centres = rng.standard_normal((self.CLASSES, self.FEATURES))
        self.labels = rng.integers(self.CLASSES, size=self.SAMPLES)
        self.samples = centres[self.labels] + 1.5 * rng.standard_normal((self.SAMPLES, self.FEATURES))
        self.weights = np.zeros((self.FEATURES, self.CLASSES))
        self.rate = rate
        self.shares = np.array_split(np.arange(self.SAMPLES), workers)
        self._rng = np.random.default_rng(8)
        #: the gradient each worker is about to send, from the weights it was given
        self._pending: dict[int, Any] = {}
        self.losses: list[tuple[float, float]] = []

    def _chances(self, samples: Any) -> Any:
        scores = samples @ self.weights
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return scores / scores.sum(axis=1, keepdims=True)

    def begin(self, worker: int) -> None:
        """A worker gets the weights and draws its batch."""
        rows = self._rng.choice(self.shares[worker], BATCH)
        error = self._chances(self.samples[rows])
        error[np.arange(BATCH), self.labels[rows]] -= 1.0
        self._pending[worker] = (self.samples[rows].T @ error / BATCH).ravel()

    def gradient(self, worker: int) -> Any:
        """What a worker sends, float64[FEATURES * CLASSES]."""
        return self._pending[worker]

    def step(self, now: float, workers: tuple[int, ...]) -> None:
        """Take the mean of these workers' gradients."""
        self.apply(now, np.mean([self._pending[worker] for worker in workers], axis=0))

    def apply(self, now: float, mean: Any) -> None:
        """One step along a mean gradient."""
        self.weights -= self.rate * mean.reshape(self.weights.shape)
        self.losses.append((now, self.loss()))

    def loss(self) -> float:
        """Mean cross entropy over all samples."""
        chances = self._chances(self.samples)[np.arange(self.SAMPLES), self.labels]
        return float(-np.log(chances).mean())
