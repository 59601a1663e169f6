"""Asynchronous training: how many workers an epoch waits for (GOAT, section V).

The PS closes epoch t when K_t workers' gradients are in. Fewer workers make epochs shorter and more of them necessary;
psi(K) says how many (Eq. (36)), the workers' past intervals say how long (Algorithm 2). A gradient that is late counts in a
later epoch: its remaining interval is p'_w = p_w - h_t, in the search as in training. Only K-SGD discards it (late gradients).

Pure functions; times in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.planning.goat.instance import F64, I64

#: Epochs needed with K participants.
Epochs = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Convergence:
    """What Eq. (36) needs to know of a training task.

    ``excess`` F(x_0) - F(x_*), ``variance`` sigma^2 of a worker's gradient, ``target`` epsilon, the mean squared gradient
    that counts as converged, ``workers`` n.
    """

    excess: float
    variance: float
    target: float
    workers: int

    def __post_init__(self) -> None:
        if min(self.excess, self.variance, self.target) <= 0 or self.workers < 1:
            raise ValueError(f"{self}: excess, variance and target must be positive, workers at least 1")

    @property
    def least(self) -> int:
        """The smallest K that can converge: epsilon K > sigma^2."""
        return int(self.variance // self.target) + 1

    def epochs(self, participants: int) -> float:
        """psi(K) = 4 K^2 (F(x_0) - F(x_*))^2 / (n (epsilon K - sigma^2)^2); infinite where epsilon K <= sigma^2: the
        noise of so few gradients alone exceeds the target, and the square would hide the sign.
        """
        margin = self.target * participants - self.variance
        if margin <= 0:
            return float("inf")
        return 4.0 * participants**2 * self.excess**2 / (self.workers * margin**2)


def mean_epoch(intervals: Sequence[float], participants: int, rounds: int) -> float:
    """Mean length of the next ``rounds`` epochs if each waits for ``participants`` gradients (Algorithm 2, lines 3-12).

    ``intervals``: p_w, how long each worker took from receiving the model to delivering its gradient. Each epoch lasts
    as long as its K-th fastest worker still needs. Those who are in begin anew, the others have that much less to go.
    Raises ``ValueError`` unless 1 <= K <= number of workers and there are rounds.
    """
    full = np.asarray(intervals, np.float64)
    if not 1 <= participants <= len(full) or rounds < 1:
        raise ValueError(f"{participants} of {len(full)} workers over {rounds} rounds; both must be possible")
    left, total = full.copy(), 0.0
    for _ in range(rounds):
        inside = np.argsort(left, kind="stable")[:participants]
        length = float(left[inside[-1]])
        left = np.maximum(left - length, 0.0)
        left[inside] = full[inside]
        total += length
    return total / rounds


@dataclass(frozen=True, slots=True)
class Choice:
    """K_{t+1}, and the estimated seconds of the whole task for every K tried, float64[W], K = 1 first."""

    participants: int
    seconds: F64


def choose(
    intervals: Sequence[float], epochs: Epochs, *, rounds: int | None = None, aggregation: float = 0.0
) -> Choice:
    """Algorithm 2: the K that minimises psi(K) times the mean epoch.

    ``rounds``: M, by default the number of workers; ``aggregation``: H(alpha), what the PS takes in each epoch. Ties go to
    the larger K, as the paper's <= does. Raises ``ValueError`` for no workers, intervals that are not positive, and when
    no K converges.
    """
    if not len(intervals) or min(intervals) <= 0:
        raise ValueError(f"intervals {list(intervals)}: one positive interval for each worker is needed")
    rounds = rounds or len(intervals)
    total = np.array(
        [
            epochs(count) * (mean_epoch(intervals, count, rounds) + aggregation)
            for count in range(1, len(intervals) + 1)
        ]
    )
    if not np.isfinite(total).any():
        raise ValueError(f"no number of workers up to {len(intervals)} reaches the target")
    # sums of floats that ought to be equal are not: a tie is what differs by less than they can
    best = int(np.nonzero(total <= total.min() * (1 + 1e-9))[0][-1])
    return Choice(best + 1, total)


def per_switch(nodes: I64, awaited: NDArray[np.bool_], switches: int) -> I64:
    """K_t^s: gradients each node has to wait for in this epoch, int64[G, S + 1], the PS last.

    ``nodes`` int64[G, W] as a schedule has it (S: the PS), ``awaited`` bool[G, W]: the participants' sub-models that have not
    counted yet. Eq. (20) sums over sub-models; a switch completes each by itself, so the counts are kept apart.
    """
    counts = np.zeros((len(nodes), switches + 1), np.int64)
    submodels, workers = np.nonzero(awaited)
    np.add.at(counts, (submodels, nodes[submodels, workers]), 1)
    return counts


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a run: ``begin`` and ``length`` in seconds, ``inside`` the workers whose gradients count,
    ``staleness`` how many epochs ago each of them got its model, ``discarded`` the workers whose work was thrown away.
    """

    begin: float
    length: float
    inside: tuple[int, ...]
    staleness: tuple[int, ...]
    discarded: tuple[int, ...]


class Timeline:
    """Epoch after epoch of asynchronous training, from the time each worker needs for its next gradient.

    ``discard``: K-SGD. Gradients that are late are thrown away and everybody begins the next epoch with the new model.
    Else late gradients stay on their way, and the PS sends the new model only to those who took part.
    """

    def __init__(self, workers: int, *, discard: bool = False, aggregation: float = 0.0) -> None:
        self.workers = workers
        self.discard = discard
        self.aggregation = aggregation
        self.now = 0.0
        #: p_w as last observed; NaN until a worker's first gradient
        self.history: F64 = np.full(workers, np.nan)
        self._left: F64 = np.full(workers, np.nan)
        self._full: F64 = np.zeros(workers)
        self._age: I64 = np.zeros(workers, np.int64)

    def advance(self, participants: int, needed: Callable[[int], float]) -> Epoch:
        """Run one epoch that waits for ``participants`` gradients; ``needed(worker)`` is asked whenever a worker begins.

        Raises ``ValueError`` for a number of participants that there are not.
        """
        if not 1 <= participants <= self.workers:
            raise ValueError(f"{participants} participants of {self.workers} workers")
        for worker in np.nonzero(np.isnan(self._left))[0].tolist():
            self._left[worker] = self._full[worker] = needed(worker)
            self._age[worker] = 0
        order = np.argsort(self._left, kind="stable")
        inside, late = order[:participants], order[participants:]
        length = max(float(self._left[inside[-1]]), 0.0) + self.aggregation
        epoch = Epoch(
            self.now,
            length,
            tuple(sorted(inside.tolist())),
            tuple(int(self._age[worker]) for worker in sorted(inside.tolist())),
            tuple(sorted(late.tolist())) if self.discard else (),
        )
        self.history[inside] = self._full[inside]
        # below 0: its gradient waits, the longest first
        self._left -= length
        self._age += 1
        self._left[inside] = np.nan
        if self.discard:
            self._left[late] = np.nan
        self.now += length
        return epoch
