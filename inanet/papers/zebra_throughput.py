"""Zebra's Fig. 6 and Fig. 11: aggregation throughput against workers, and what loss costs.

Workers, a PS and a switch on one rack in virtual time, with Zebra's own machines. The baseline is the same job without
anything hot: sparse push and pull, as PS-lite does it, over the same packets, windows and acknowledgements. An iteration is
a push and a pull of the same keys by every worker.

Models have the hot sets and shares of section III-A, divided by ten (:mod:`inanet.data.key_batches`); a batch has 4,000 keys, of
which the model's share is hot, the hotter the likelier (a key is in a batch at most once, so 30,000 hot keys with half of all
updates leave room for 60,000 keys in a batch; here it is two thirds of that). SwitchML sends whole models: its goodput comes
from the rack of the switch systems, with the slots that its share of the memory holds; the time is the model over that.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from inanet.bench.sparse import dense_goodput
from inanet.data.clicks import corpus
from inanet.data.key_batches import DEEP_LIGHT, OA, SCALE, SE, Load, generated, of_samples
from inanet.papers.claims import Claim, ratio
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.zebra.stream import Timing
from inanet.sim.link import LinkSpec
from inanet.sim.sparse import Measured, SparseRack

RATE = 1e9
WORKERS = (4, 8, 16, 32)
#: iterations, the first of which is not measured
ITERATIONS = 3
#: samples of the corpus in a worker's batch
SAMPLES = 64
#: 1 MB of registers (section V-A), scaled
MEMORY = (1 << 20) // SCALE
#: as the daemons': what is lost at the end of a stream costs two milliseconds and the time that queues take
TIMING = Timing(window=64, first=0.05, least=0.002, silent=60.0)
LOSSES = (0.0001, 0.0003, 0.001)


def measure(
    load: Load, workers: int, *, zebra: bool, link: LinkSpec | None = None, seed: int = 0
) -> Measured:
    """Zebra, or the PS alone."""
    link = link or LinkSpec(rate=RATE)
    rack = SparseRack(workers, 1, link, load.hot if zebra else None, seed=seed, timing=TIMING)
    return rack.measure(load.of(workers))


def fig6() -> Outcome:
    """All models, and real data: the corpus, its words alone, which are more often hot, and a corpus five times as large."""
    most = WORKERS[-1]
    drawn = [generated(model, most, ITERATIONS) for model in (OA, SE, DEEP_LIGHT)]
    real = {
        "corpus": corpus(),
        "corpus words": corpus(pairs=False),
        "corpus+packages": corpus("packages"),
    }
    found = [
        replace(of_samples(samples, most, SAMPLES, ITERATIONS), name=name) for name, samples in real.items()
    ]
    return judge((*drawn, *found))


_SHARE = "{:.0%} of what is pushed is hot: with the others at the PS, {:.2f} is the most that can be had"
_NEARLY_DENSE = (
    "the whole model, sent densely, is fewer bytes than what so many workers' keys and values are together; the paper does "
    "not say how many values its parameters have"
)


def judge(loads: Sequence[Load], workers: Sequence[int] = WORKERS) -> Outcome:
    """Throughputs, and claims about the most workers."""
    goodput = {n: dense_goodput(n, RATE, MEMORY) for n in workers}
    rows: list[tuple[Any, ...]] = []
    for load in loads:
        for n in workers:
            zebra, ps = measure(load, n, zebra=True), measure(load, n, zebra=False)
            pairs = zebra.pairs / zebra.iterations
            dense = pairs / (4 * load.parameters / goodput[n])
            rows.append(
                (
                    load.name,
                    n,
                    zebra.keys_per_second,
                    ps.keys_per_second,
                    dense,
                    ratio(zebra.keys_per_second, ps.keys_per_second),
                    zebra.in_network_share,
                )
            )
    claims = []
    for load in loads:
        mine = [row for row in rows if row[0] == load.name]
        least, last = mine[0], mine[-1]
        claims += [
            Claim(
                f"{load.name}: over the PS with {last[1]} workers, at least",
                1.5,
                last[5],
                ">=",
                reason=_SHARE.format(last[6], 1 / (1 - last[6])) if last[5] < 1.5 else "",
            ),
            Claim(f"{load.name}: over the PS with {last[1]} workers, at most", 4.0, last[5], "<="),
            Claim(
                f"{load.name}: the advantage with {last[1]} workers over that with {least[1]}",
                1.0,
                last[5] / least[5],
                ">=",
            ),
            Claim(
                f"{load.name}: Zebra over SwitchML with {last[1]} workers",
                1.0,
                ratio(last[2], last[4]),
                ">=",
                reason=_NEARLY_DENSE if last[4] > last[2] else "",
            ),
        ]
    columns = ("data", "workers", "zebra", "ps", "switchml", "ratio_to_ps", "in_network_share")
    panels = tuple(
        Panel(
            load.name,
            "workers",
            "throughput / Zebra's",
            {
                name: [(row[1], row[i] / row[2]) for row in rows if row[0] == load.name]
                for name, i in (("Zebra", 2), ("PS", 3), ("SwitchML", 4))
            },
        )
        for load in loads
    )
    return Outcome(
        tuple(claims),
        (Table("keys summed per second", columns, tuple(rows)),),
        panels,
        (
            f"{RATE / 1e9:g} Gbit/s to every host, one PS; hot sets, models and batches are a tenth of the paper's",
            "a hot packet has 20 pairs and the switch 32 registers; its passes take no time here, as at line rate",
        ),
    )


def fig11() -> Outcome:
    """What loss costs OA at its full size, with four workers: seconds of communication alone."""
    workers, seeds = 4, range(3)
    load = generated(OA, workers, ITERATIONS, scale=1)
    base = measure(load, workers, zebra=True).seconds
    rows = []
    for loss in LOSSES:
        link = LinkSpec(rate=RATE, loss=loss)
        runs = [measure(load, workers, zebra=True, link=link, seed=seed) for seed in seeds]
        slower = 100 * (float(np.mean([run.seconds for run in runs])) / base - 1)
        rows.append((loss, slower, sum(run.repeated for run in runs) / len(seeds)))
    last = rows[-1][1]
    return Outcome(
        (Claim("slowdown at 0.1 % loss, per cent", 3.0, last, "<=", reason=_TIMEOUT if last > 3.0 else ""),),
        (Table("slowdown", ("loss", "per_cent", "repeated"), tuple(rows)),),
        (Panel("loss", "loss", "slowdown, per cent", {"OA": [(row[0], row[1]) for row in rows]}),),
        (
            f"communication alone, {1000 * base / (ITERATIONS - 1):.0f} ms an iteration without loss; the paper measures "
            "training time, of which that is a part",
        ),
    )


_TIMEOUT = "of training time, computing included, it would be less; a loss at the end of a stream is missed only by a timer"
