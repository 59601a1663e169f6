"""Zebra's Fig. 4, Fig. 9 and Table II: how unevenly parameters are updated, and how well the hot ones are found.

Real data are what every machine has: the sources of Python's standard library (:func:`inanet.data.clicks.corpus`), with pairs
of neighbouring words and words alone; with its tests, and with the packages that this one needs, to see what the size of the
data does; and which words occur in which files (:func:`inanet.data.interactions.interactions`), as users and items of NCF. Two
generated ones have the shares that the paper gives for its industrial models: the
hottest 30,000 parameters have 50 % (OA) and 70 % (SE) of the updates. Their updates are Poisson, ranks follow r^-s with the s
that gives the share; only the :data:`HEAD` hottest are drawn one by one, the rest is one mass that nobody mistakes for hot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import Samples, corpus
from inanet.data.interactions import interactions
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
    ("interactions", interactions),
    ("corpus+tests", lambda: corpus("tests")),
    ("corpus+packages", lambda: corpus("packages")),
    ("corpus+packages words", lambda: corpus("packages", pairs=False)),
)


_DRAWN = (
    "items of negative samples are drawn alike from all, so that below the hottest all are updated about as often, and chance "
    "decides which of them are in the hot set"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a sample of ``rate`` finds. The data have ``samples`` (updates, of generated ones), and the last of their hot
    parameters ``edge`` updates.
    """

    data: str
    samples: int
    rate: float
    precision: float
    tau: float
    edge: int

    @property
    def why(self) -> str:
        """What makes it hard."""
        if self.data == "interactions":
            return _DRAWN
        return (
            f"{self.samples} samples are few: the last of the hot parameters has {self.edge} updates in all of them, and "
            f"about {self.edge * self.rate:.0f} in the sample"
        )


def measured() -> tuple[Sampled, ...]:
    """All data at all rates."""
    rows = []
    for name, data in REAL:
        samples = data()
        truth = ranking(samples.keys)
        hot = truth.top(stop_rule(truth))
        for rate in RATES:
            part = samples.take(sample(len(samples), rate, np.random.default_rng(_SEED)))
            quality = _quality(hot.keys, ranking(part.keys))
            rows.append(Sampled(name, len(samples), rate, *quality, int(hot.counts[-1])))
    for model in (OA, SE):
        truth = model.draw(1.0, _SEED)
        hot = truth.top(stop_rule(truth))
        for rate in RATES:
            quality = _quality(hot.keys, model.draw(rate, _SEED + 1))
            rows.append(Sampled(model.name, UPDATES, rate, *quality, int(hot.counts[-1])))
    return tuple(rows)


def _quality(hot: NDArray[np.uint64], seen: Ranking) -> tuple[float, float]:
    found = seen.top(stop_rule(seen)).keys
    return precision(hot, found), kendall_tau(hot, found)


def fig9() -> Outcome:
    """Precision and tau of sampling, against the rate."""
    found = measured()
    claims = []
    for rate, paper in ((0.04, 0.8), (0.08, 0.9)):
        for one in found:
            if one.rate == rate:
                name = f"{one.data}: precision with a sample of {rate:.0%}"
                reason = one.why if one.precision < paper else ""
                claims.append(Claim(name, paper, one.precision, ">=", 0.0, reason))
    claims += [
        Claim(
            f"{one.data}: Kendall tau with a sample of 8%",
            0.5,
            one.tau,
            ">=",
            reason=one.why if one.tau < 0.5 else "",
        )
        for one in found
        if one.rate == 0.08
    ]
    rows = tuple((one.data, one.rate, one.precision, one.tau, one.samples, one.edge) for one in found)
    names = tuple(dict.fromkeys(row[0] for row in rows))
    columns = ("data", "rate", "precision", "tau", "samples", "updates_of_the_last")
    return Outcome(
        tuple(claims),
        (Table("sampling", columns, rows),),
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
        *(
            Claim(f"{name}: share of the hottest 5,000 (NCF)", 0.5, its.share(5000), ">=")
            for name, its in ranked
            if name == "interactions"
        ),
    )
    series = {name: [(k, its.share(k)) for k in tops] for name, its in ranked}
    return Outcome(
        claims,
        (Table("cumulative share of updates", ("data", "top", "share"), rows),),
        (Panel("cumulative share", "hottest parameters", "share of updates", series),),
        ("the generated models are made to have the paper's shares; the corpus is what it is",),
    )


_FEW = "the data are few: a parameter at the edge of the hot set is in one or two batches of the first iterations, or in none"


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
        Claim(
            f"{name}: precision after {FIRST} of {ITERATIONS} iterations",
            0.691,
            found,
            ">=",
            reason="" if found >= 0.691 else _DRAWN if name == "interactions" else _FEW,
        )
        for name, found, _ in rows
    )
    return Outcome(
        claims,
        (Table("online identification", ("data", "precision", "tau"), tuple(rows)),),
        notes=(f"an update is a key in one of {WORKERS} workers' batches, as switch and PS count them",),
    )
