"""Zebra's Fig. 12: time to train a model to a threshold, with Zebra and with a PS alone.

Models are trained, for real, by Zebra's machines on a rack in virtual time: logistic regression on the standard library's
sources, and an embedding model with a network (:class:`~inanet.training.sparse_models.NeuralFactorisation`) on which words occur in
which files. Of the paper's industrial models there are only sizes and shares; click logs of their shape, divided by ten, are drawn
(:mod:`inanet.data.drawn_clicks`), and logistic regression is trained on those. Both systems train until the model ranks held-out
samples well enough. They train the same model but for what integers of the switch round off, so that a step more or less is
chance: what is compared is the time of a step, and how many steps each took is a claim of its own.

A step is pulling, computing and pushing, one after the other. What computing takes depends on whose processors do it; the paper
does not say. Its two ranges do: a gain of 1.5 to 4 in communication that makes 1.4 to 2.6 of a whole step leaves 14 to 18 % of a
PS's step to computing. Claims are judged with :data:`COMPUTING` of it; the table has others beside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.data.clicks import Samples, corpus
from inanet.data.drawn_clicks import SAMPLES, drawn
from inanet.data.interactions import interactions
from inanet.data.key_batches import OA, SE, Load, generated
from inanet.papers.claims import Claim, ratio
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.papers.zebra_throughput import ITERATIONS, RATE, TIMING, measure
from inanet.sim.link import LinkSpec
from inanet.sim.sparse import SparseRack
from inanet.training.sparse import hot_by_sampling
from inanet.training.sparse_models import (
    Batch,
    LogisticRegression,
    Model,
    NeuralFactorisation,
    area_under_curve,
    error_of,
)
from inanet.wire.batch import U64

WORKERS = 16
#: share of a PS's step that is computing: the middle of what the paper's ranges imply, and others
COMPUTING, SHARES = 0.16, (0.0, 0.16, 0.5)
#: samples that are held out; share of the batches that hot parameters are looked for in
HELD_OUT, SAMPLING = 2000, 0.08
#: steps between two looks at the held-out samples, and after which a training has failed
EVERY, MOST = 2, 60
#: steps for which there are drawn samples
DRAWN = 40
BUDGET = 1 << 20
SHIFT = 24
_SEED = 12


@dataclass(frozen=True, slots=True)
class Task:
    """A model to be trained on samples, ``batch`` of them for a worker at a time, until the area under its curve is
    ``threshold``. Samples come ``in_order`` where batches were drawn as a whole, else shuffled.
    """

    name: str
    model: Model
    samples: Samples
    batch: int
    threshold: float
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """``steps`` that it took, virtual ``seconds`` of communication in all, ``auc`` at the end, the part summed in the switch."""

    steps: int
    seconds: float
    auc: float
    in_network_share: float


def tasks() -> tuple[Task, ...]:
    """Those that are trained."""
    batches = WORKERS * DRAWN
    return (
        Task("LR, corpus", LogisticRegression(), corpus(), 64, 0.77),
        Task("NCF, interactions", NeuralFactorisation(), interactions(), 256, 0.78),
        *(
            Task(
                f"LR, {model.name}'s shape",
                LogisticRegression(),
                drawn(model, batches),
                SAMPLES,
                threshold,
                True,
            )
            for model, threshold in ((OA, 0.72), (SE, 0.78))
        ),
    )


class _Data:
    """Batches that go round and round, and what is held out."""

    def __init__(self, task: Task, workers: int) -> None:
        samples = task.samples if task.in_order else task.samples.shuffled(_SEED)
        held = min(HELD_OUT, len(samples) // 5)
        self.held_out = Batch.of(samples.take(np.arange(held)), task.model.dense)
        rows = held + np.arange(MOST * workers * task.batch) % (len(samples) - held)
        self.batches = list(samples.take(rows).batches(task.batch))


def trained(task: Task, workers: int, *, zebra: bool, data: _Data) -> Training:
    """One training. Raises ``RuntimeError`` when the threshold is not reached."""
    model = task.model
    hot: U64 | None = hot_by_sampling(data.batches, SAMPLING, _SEED, model, BUDGET) if zebra else None
    rack = SparseRack(
        workers,
        1,
        LinkSpec(rate=RATE),
        hot,
        budget=BUDGET,
        timing=TIMING,
        width=model.width,
        optimiser=model.optimiser,
        initial=model.initial,
        shift=SHIFT,
    )
    for step in range(1, MOST + 1):
        first = (step - 1) * workers
        mine = [Batch.of(samples, model.dense) for samples in data.batches[first : first + workers]]
        pulled = rack.pull([batch.keys for batch in mine])
        gradients = [
            model.gradients(batch, its, error_of(model.scores(batch, its), batch.labels) / workers)
            for batch, its in zip(mine, pulled, strict=True)
        ]
        rack.push([batch.keys for batch in mine], gradients)
        if step % EVERY == 0:
            scores = model.scores(data.held_out, rack.read(data.held_out.keys))
            auc = area_under_curve(scores, data.held_out.labels)
            if auc >= task.threshold:
                hot_pairs = sum(worker.hot_pairs for worker in rack.workers)
                total = hot_pairs + sum(worker.cold_pairs for worker in rack.workers)
                return Training(step, rack.network.now, auc, hot_pairs / total)
    raise RuntimeError(f"{task.name}: {auc:.3f} after {MOST} steps, not {task.threshold}")


def whole(zebra: float, ps: float, share: float) -> float:
    """How much faster steps are that communicate for ``zebra`` and ``ps`` seconds, when computing, which is the same for both, is
    ``share`` of the PS's.
    """
    computing = ps * share / (1 - share)
    return (ps + computing) / (zebra + computing)


def fig12() -> Outcome:
    """All of them."""
    return judge(tasks(), [generated(model, WORKERS, ITERATIONS) for model in (OA, SE)])


def judge(trainings: Sequence[Task], loads: Sequence[Load], workers: int = WORKERS) -> Outcome:
    """Times and claims."""
    rows: list[tuple[Any, ...]] = []
    for task in trainings:
        data = _Data(task, workers)
        ours, theirs = (trained(task, workers, zebra=zebra, data=data) for zebra in (True, False))
        rows.append(
            (
                task.name,
                ours.steps,
                theirs.steps,
                1000 * ours.seconds,
                1000 * theirs.seconds,
                ours.in_network_share,
                *(whole(ours.seconds / ours.steps, theirs.seconds / theirs.steps, share) for share in SHARES),
            )
        )
    for load in loads:
        zebra, ps = (measure(load, workers, zebra=zebra) for zebra in (True, False))
        rows.append(
            (
                load.name,
                None,
                None,
                1000 * zebra.seconds,
                1000 * ps.seconds,
                zebra.in_network_share,
                *(whole(zebra.seconds, ps.seconds, share) for share in SHARES),
            )
        )
    place = 6 + SHARES.index(COMPUTING)
    claims = []
    for row in rows:
        share = row[5]
        reason = (
            f"{share:.0%} of what is pushed is hot: {whole(1 - share, 1.0, COMPUTING):.2f} is the most that can be had, and "
            "batches are so small that the new values of all hot parameters, which go to everybody, take a good part of it"
            if row[place] < 1.4
            else ""
        )
        claims += [
            Claim(f"{row[0]}: end to end over the PS, at least", 1.4, row[place], ">=", 0.0, reason),
            Claim(f"{row[0]}: end to end over the PS, at most", 2.6, row[place], "<="),
        ]
        if row[1] is not None:
            claims.append(Claim(f"{row[0]}: steps over the PS's", 1.0, ratio(row[1], row[2]), "~", 0.2))
    columns = (
        "model",
        "steps",
        "steps_ps",
        "ms",
        "ms_ps",
        "in_network_share",
        *(f"over_ps_computing_{share:.0%}" for share in SHARES),
    )
    return Outcome(
        tuple(claims),
        (Table("communication until the threshold, or of two iterations; end to end", columns, tuple(rows)),),
        (
            Panel(
                "training time",
                "model",
                "over PS-lite's",
                {"Zebra": [(row[0], 1 / row[place]) for row in rows], "PS": [(row[0], 1.0) for row in rows]},
            ),
        ),
        (
            f"{workers} workers, {RATE / 1e9:g} Gbit/s, one PS; computing takes {COMPUTING:.0%} of the PS's step, as the paper's ranges "
            "imply",
        ),
    )
