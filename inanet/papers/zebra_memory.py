"""Zebra's Fig. 7 and Fig. 8: what twice the memory in the switch is worth, and more or fewer hot parameters.

Zebra's machines and a PS on a rack in virtual time, divided by ten as in Fig. 6. The point is how many updates lie beyond the
30,000th parameter. Ranks follow r^-s over the whole model, with the s that puts the model's share of a batch into the hottest
30,000. The paper does not say how large a batch is, and much hangs on it: a hot parameter that few workers have in their batches
costs more than it saves, since its sum goes to the PS and its new value to everybody. So there are two sizes of batches.

SwitchML's throughput follows its memory when the pool of slots is smaller than what is under way to and from the workers, as it
was in the paper's testbed. Here that depends on the links' delay, so it is shown for two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from inanet.bench.sparse import dense_goodput
from inanet.data.key_batches import OA, SCALE, SE, Load, Model
from inanet.papers.claims import Claim, ratio
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.papers.zebra_throughput import ITERATIONS, RATE, TIMING
from inanet.sim.link import LinkSpec
from inanet.sim.sparse import SparseRack

WORKERS = 16
#: keys in a batch; the last is Fig. 6's
PAIRS = (1200, 4000)
#: parameters that are drawn one by one; the others are hardly ever in a batch twice
HEAD = 20_000
#: hot parameters; the paper's default, and twice that
COUNTS = tuple(count // SCALE for count in (10_000, 20_000, 30_000, 40_000, 50_000, 60_000))
DEFAULT, DOUBLE = 30_000 // SCALE, 60_000 // SCALE
#: for SwitchML, which is not divided, since its rack has the paper's rate
MEMORIES = (1 << 20, 2 << 20)
#: of SwitchML's rack, which has the paper's rate: seconds from a host to the switch. A host's own time is most of the second.
FAST, DELAYS = 100e9, (5e-6, 50e-6)
_SEED = 7


@cache
def _shape(model: Model, pairs: int, head: int) -> tuple[NDArray[np.float64], float]:
    """Probabilities of the ``head`` hottest to be in a batch, and how many others are, on average."""
    ranks = np.arange(1, head + 1, dtype=np.float64)

    def batch(s: float) -> tuple[NDArray[np.float64], float]:
        weight, rest = ranks**-s, (float(model.parameters) ** (1 - s) - float(head) ** (1 - s)) / (1 - s)
        low, high = 0.0, 1e6
        for _ in range(50):
            factor = (low + high) / 2
            total = float(-np.expm1(-weight * factor).sum()) + factor * rest
            low, high = (factor, high) if total < pairs else (low, factor)
        return -np.expm1(-weight * low), low * rest

    slow, fast = 0.301, 1.9
    for _ in range(20):
        s = (slow + fast) / 2
        present, _ = batch(s)
        slow, fast = (s, fast) if present[: model.hot].sum() < model.share * pairs else (slow, s)
    return batch(slow)


def skewed(model: Model, workers: int, iterations: int, pairs: int, head: int = HEAD) -> Load:
    """Batches of ``pairs`` keys of a model that is as large as it says; keys are ranks."""
    rng = np.random.default_rng(_SEED)
    present, others = _shape(model, pairs, head)

    def batch() -> NDArray[np.uint64]:
        warm = np.flatnonzero(rng.random(head) < present)
        cold = np.unique(rng.integers(head, model.parameters, round(others)))
        return np.concatenate([warm, cold]).astype(np.uint64)

    batches = [[batch() for _ in range(workers)] for _ in range(iterations)]
    return Load(model.name, model.parameters, np.arange(head, dtype=np.uint64), batches)


def loads(pairs: int) -> list[Load]:
    """Both industrial models, divided."""
    small = [
        replace(model, parameters=model.parameters // SCALE, hot=model.hot // SCALE) for model in (OA, SE)
    ]
    return [skewed(model, WORKERS, ITERATIONS, pairs) for model in small]


def throughput(load: Load, workers: int, hot: int | None) -> tuple[float, float]:
    """Keys summed per second, and the part of them that the switch summed, with ``hot`` parameters; ``None``: by the PS alone."""
    chosen = None if hot is None else load.hot[:hot]
    rack = SparseRack(workers, 1, LinkSpec(rate=RATE), chosen, timing=TIMING)
    measured = rack.measure(load.of(workers))
    return measured.keys_per_second, measured.in_network_share


def fig7() -> Outcome:
    """Twice the memory."""
    return memory_cap({pairs: loads(pairs) for pairs in PAIRS})


def fig8() -> Outcome:
    """More and fewer hot parameters."""
    return hot_counts({pairs: loads(pairs) for pairs in PAIRS})


#: the paper's gains from twice the memory
PAPER = {"OA": 1.07, "SE": 1.017}
_REASON = (
    "the hot parameters beyond the 30,000th have {:.1%} of a batch; the paper gives neither the size of its batches nor how "
    "updates are spread beyond"
)


def memory_cap(
    by_pairs: Mapping[int, Sequence[Load]],
    workers: int = WORKERS,
    counts: tuple[int, int] = (DEFAULT, DOUBLE),
    delays: Sequence[float] = DELAYS,
) -> Outcome:
    """Zebra with ``counts`` hot parameters, loads by the keys of a batch, and SwitchML with 1 and 2 MB."""
    dense = {
        (delay, memory): dense_goodput(workers, FAST, memory, LinkSpec(rate=FAST, delay=delay))
        for delay in delays
        for memory in MEMORIES
    }
    slow = ratio(dense[delays[-1], MEMORIES[1]], dense[delays[-1], MEMORIES[0]])
    # at this rate 1 MB of slots fills the link already, and 2 MB do no more
    goodput = dense_goodput(workers, RATE, MEMORIES[0])
    rows: list[tuple[str, int, int, float, float, float]] = []
    claims = [Claim("SwitchML's gain from twice the memory", 2.0, slow, "~", 0.1)]
    for pairs, load in ((pairs, load) for pairs, several in by_pairs.items() for load in several):
        (one, share), (two, more) = (throughput(load, workers, count) for count in counts)
        rows += [
            (load.name, pairs, counts[0], one, share, 1.0),
            (load.name, pairs, counts[1], two, more, two / one),
        ]
        title, paper, gain = f"{load.name}, {pairs} keys", PAPER[load.name], two / one
        reason = _REASON.format(more - share) if abs(gain / paper - 1) > 0.1 else ""
        pushed = sum(len(keys) for keys in load.of(workers)[-1])
        claims += [
            Claim(f"{title}: Zebra's gain from twice the memory", paper, gain, "~", 0.1, reason),
            Claim(f"{title}: it is less than SwitchML's, which is", slow, gain, "<="),
            Claim(
                f"{title}: SwitchML with twice the memory over Zebra without",
                0.456,
                ratio(pushed / (4 * load.parameters / goodput), one),
                "<=",
            ),
        ]
    doubled = [row for row in rows if row[2] == counts[1]]
    columns = ("data", "batch", "hot", "keys_per_second", "in_network_share", "over_default")
    return Outcome(
        tuple(claims),
        (
            Table("Zebra", columns, tuple(rows)),
            Table(
                f"SwitchML, {FAST / 1e9:g} Gbit/s",
                ("delay_us", "memory_mb", "gbit_per_second"),
                tuple((1e6 * delay, memory >> 20, 8e-9 * its) for (delay, memory), its in dense.items()),
            ),
        ),
        (
            Panel(
                "throughput with twice the memory",
                "data, keys in a batch",
                "over that with the default",
                {
                    "Zebra": [(f"{row[0]}, {row[1]}", row[5]) for row in doubled],
                    "SwitchML": [(f"{row[0]}, {row[1]}", slow) for row in doubled],
                },
            ),
        ),
        (
            f"{workers} workers; Zebra at {RATE / 1e9:g} Gbit/s, hot sets, models and batches a tenth of the paper's",
            "a pool of slots limits SwitchML only where it is less than rate times round trip: with the shorter delay it is not",
        ),
    )


def hot_counts(
    by_pairs: Mapping[int, Sequence[Load]], workers: int = WORKERS, counts: Sequence[int] = COUNTS
) -> Outcome:
    """Zebra's throughput against the number of hot parameters."""
    rows, claims = [], []
    for pairs, load in ((pairs, load) for pairs, several in by_pairs.items() for load in several):
        ps, _ = throughput(load, workers, None)
        found = [throughput(load, workers, count) for count in counts]
        default = found[list(counts).index(DEFAULT)][0]
        rows += [
            (load.name, pairs, count, keys, share, keys / default, keys / ps)
            for count, (keys, share) in zip(counts, found, strict=True)
        ]
        gains = np.diff([keys / default for keys, _ in found])
        title = f"{load.name}, {pairs} keys"
        claims += [
            Claim(
                f"{title}: what the last step adds, less than the first one's",
                float(gains[0]),
                float(gains[-1]),
                "<=",
            ),
            Claim(f"{title}: over the PS with the default", 1.0, default / ps, ">="),
        ]
    columns = ("data", "batch", "hot", "keys_per_second", "in_network_share", "over_default", "ratio_to_ps")
    series: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        series.setdefault(f"{row[0]}, {row[1]} keys", []).append((row[2], row[5]))
    return Outcome(
        tuple(claims),
        (Table("throughput by hot parameters", columns, tuple(rows)),),
        (Panel("Zebra's throughput", "hot parameters", f"over that with {DEFAULT}", series),),
        (f"{workers} workers, {RATE / 1e9:g} Gbit/s; hot sets, models and batches a tenth of the paper's",),
    )
