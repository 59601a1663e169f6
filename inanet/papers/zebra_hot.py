"""Zebra's Fig. 4, Fig. 9 and Table II: how unevenly parameters are updated, and how well the hot ones are found.

Two real data sets, both the sources of Python's standard library (:func:`inanet.demo.clicks.corpus`): with pairs of
neighbouring words, and words alone. Two generated ones have the shares that the paper gives for its industrial models: the
hottest 30,000 parameters have 50 % (OA) and 70 % (SE) of the updates. Their updates are Poisson, ranks follow r^-s with the s
that gives the share; only the :data:`HEAD` hottest are drawn one by one, the rest is one mass that nobody mistakes for hot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from inanet.demo.clicks import Samples, corpus
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.zebra.hot import Ranking, kendall_tau, of_updates, precision, ranking, sample, stop_rule

RATES = (0.01, 0.02, 0.04, 0.08, 0.16)
#: parameters of the generated models that are drawn one by one
HEAD = 200_000
#: updates of a generated training: the 30,000th parameter has some hundreds to a thousand
UPDATES = 400_000_000
#: iterations of a training, and those after which the online method decides (Table II)
ITERATIONS, FIRST = 200, 10
WORKERS = 4
_SEED = 9


@dataclass(frozen=True, slots=True)
class Generated:
    """``parameters`` of which the hottest 30,000 have ``share`` of the updates."""

    name: str
    parameters: int
    share: float
    hot: int = 30_000

    def expected(self) -> tuple[NDArray[np.float64], float]:
        """Expected updates of the head, float64[HEAD], and of everything else."""
        return _fitted(self)

    def draw(self, part: float, seed: int) -> Ranking:
        """Updates of a random ``part`` of the training. The mass of the tail is in the total as one last parameter."""
        head, rest = self.expected()
        rng = np.random.default_rng(seed)
        counts = rng.poisson(head * part)
        ranked = ranking(np.arange(HEAD, dtype=np.uint64), counts.astype(np.int64))
        return Ranking(
            np.append(ranked.keys, np.uint64(HEAD)), np.append(ranked.counts, np.int64(rest * part))
        )


@cache
def _fitted(model: Generated) -> tuple[NDArray[np.float64], float]:
    """Find the s that gives a model's share."""
    low, high = 0.3, 2.0
    for _ in range(60):
        s = (low + high) / 2
        weight = np.arange(1, HEAD + 1, dtype=np.float64) ** -s
        rest = _tail(s, HEAD, model.parameters)
        if weight[: model.hot].sum() / (weight.sum() + rest) < model.share:
            low = s
        else:
            high = s
    total = weight.sum() + rest
    return UPDATES * weight / total, float(UPDATES * rest / total)


def _tail(s: float, first: int, last: int) -> float:
    """About the sum of r^-s over first < r <= last."""
    if abs(s - 1) < 1e-9:
        return float(np.log(last / first))
    return float((last ** (1 - s) - first ** (1 - s)) / (1 - s))


#: share of the paper's Fig. 4, sizes of its models
OA = Generated("OA", 150_000_000, 0.5)
SE = Generated("SE", 9_000_000, 0.7)


#: real data by name
REAL: tuple[tuple[str, Callable[[], Samples]], ...] = (
    ("corpus", corpus),
    ("corpus words", lambda: corpus(pairs=False)),
)


def measured() -> tuple[tuple[str, float, float, float], ...]:
    """Data set, sampling rate, precision, tau."""
    rows = []
    for name, data in REAL:
        samples = data()
        truth = ranking(samples.keys)
        hot = truth.top(stop_rule(truth)).keys
        for rate in RATES:
            part = samples.take(sample(len(samples), rate, np.random.default_rng(_SEED)))
            seen = ranking(part.keys)
            rows.append((name, rate, *_quality(hot, seen)))
    for model in (OA, SE):
        truth = model.draw(1.0, _SEED)
        hot = truth.top(stop_rule(truth)).keys
        rows += [(model.name, rate, *_quality(hot, model.draw(rate, _SEED + 1))) for rate in RATES]
    return tuple(rows)


def _quality(hot: NDArray[np.uint64], seen: Ranking) -> tuple[float, float]:
    found = seen.top(stop_rule(seen)).keys
    return precision(hot, found), kendall_tau(hot, found)


_SMALL = (
    "a data set of 38,000 samples: a parameter at the edge of the hot set has two dozen updates in all of it and one or two "
    "in the sample; the generated models, as large as the paper's, do not have that"
)


def fig9() -> Outcome:
    """Precision and tau of sampling, against the rate."""
    rows = measured()
    claims = []
    for rate, paper in ((0.04, 0.8), (0.08, 0.9)):
        for name in dict.fromkeys(row[0] for row in rows):
            (found,) = (row[2] for row in rows if row[0] == name and row[1] == rate)
            reason = _SMALL if found < paper else ""
            claims.append(
                Claim(f"{name}: precision with a sample of {rate:.0%}", paper, found, ">=", 0.0, reason)
            )
        claims += [
            Claim(f"{row[0]}: Kendall tau with a sample of {rate:.0%}", 0.5, row[3], ">=")
            for row in rows
            if row[1] == rate and rate == 0.08
        ]
    names = tuple(dict.fromkeys(row[0] for row in rows))
    return Outcome(
        tuple(claims),
        (Table("sampling", ("data", "rate", "precision", "tau"), rows),),
        (
            Panel(
                "precision",
                "sampling rate",
                "precision",
                {n: [(r[1], r[2]) for r in rows if r[0] == n] for n in names},
            ),
            Panel(
                "rank precision",
                "sampling rate",
                "tau",
                {n: [(r[1], r[3]) for r in rows if r[0] == n] for n in names},
            ),
        ),
        (
            "k by the paper's rule on either side: steps of 1,000 until one adds less than 1 % of the updates",
            "the paper calls tau a distance and finds it good when it is high; here it is the coefficient, over common keys",
        ),
    )


def fig4() -> Outcome:
    """Cumulative share of updates."""
    tops = (100, 1000, 5000, 10_000, 30_000, 100_000)
    ranked = [(name, ranking(data().keys)) for name, data in REAL]
    ranked += [(model.name, model.draw(1.0, _SEED)) for model in (OA, SE)]
    rows = tuple((name, k, its.share(k)) for name, its in ranked for k in tops)
    share = {name: its.share(30_000) for name, its in ranked}
    claims = (
        Claim("OA, generated: share of the hottest 30,000", 0.5, share["OA"], "~", 0.02),
        Claim("SE, generated: share of the hottest 30,000", 0.7, share["SE"], "~", 0.02),
        Claim("corpus: share of the hottest 30,000", 0.4, share["corpus"], ">="),
    )
    series = {name: [(k, its.share(k)) for k in tops] for name, its in ranked}
    return Outcome(
        claims,
        (Table("cumulative share of updates", ("data", "top", "share"), rows),),
        (Panel("cumulative share", "hottest parameters", "share of updates", series),),
        ("the generated models are made to have the paper's shares; the corpus is what it is",),
    )


def table2() -> Outcome:
    """Precision of the hot set after 10 of 200 iterations."""
    rows = []
    for name, data in REAL:
        samples = data().shuffled(_SEED)
        size = len(samples) // (ITERATIONS * WORKERS)
        updates = [np.unique(batch.keys) for batch in samples.batches(size)][: ITERATIONS * WORKERS]
        truth, seen = of_updates(updates), of_updates(updates[: FIRST * WORKERS])
        rows.append((name, *_quality(truth.top(stop_rule(truth)).keys, seen)))
    for model in (OA, SE):
        truth = model.draw(1.0, _SEED)
        part = model.draw(FIRST / ITERATIONS, _SEED + 2)
        rows.append((model.name, *_quality(truth.top(stop_rule(truth)).keys, part)))
    claims = tuple(
        Claim(f"{name}: precision after {FIRST} of {ITERATIONS} iterations", 0.691, found, ">=")
        for name, found, _ in rows
    )
    return Outcome(
        claims,
        (Table("online identification", ("data", "precision", "tau"), tuple(rows)),),
        notes=(f"an update is a key in one of {WORKERS} workers' batches, as switch and PS count them",),
    )
