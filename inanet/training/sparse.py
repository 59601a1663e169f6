"""Data-parallel training of a sparse model through a sparse job, bulk synchronous."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.data.clicks import Samples
from inanet.proto.zebra.hot import choose, of_updates, sample
from inanet.sparse.group import SparseGroup
from inanet.training.sparse_models import F32, F64, Batch, Model, area_under_curve, error_of, loss_of
from inanet.wire.batch import U64


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration: mean ``loss`` before it, pairs that went to the switch and to the PS, whether its hot set is another one than
    that of the iteration before.
    """

    number: int
    loss: float
    hot: int
    cold: int
    changed: bool


@dataclass(frozen=True, slots=True)
class Trained:
    """``steps`` taken; ``loss`` and ``auc`` on samples that were held out; ``seconds`` of wall time; the model's keys and
    values at the end.
    """

    steps: tuple[Step, ...]
    loss: float
    auc: float
    seconds: float
    keys: U64
    values: NDArray[np.float32]


def hot_by_sampling(batches: Sequence[Samples], rate: float, seed: int, model: Model, budget: int) -> U64:
    """The offline method: hot keys of a share of the batches (an update is a key in a worker's batch), as many as fit into a
    quarter of the switch's ``budget`` bytes, which leaves room for the ledger.
    """
    rows = sample(len(batches), rate, np.random.default_rng(seed))
    seen = of_updates([Batch.of(batches[i], model.dense).keys for i in rows.tolist()])
    k = choose(seen, c=0.25, memory=budget, width=model.width, step=max(1, len(seen.keys) // 100)).k
    return seen.top(k).keys


def train(
    group: SparseGroup,
    model: Model,
    batches: Sequence[Samples],
    held_out: Samples,
    *,
    tell: Callable[[Step], None] = lambda step: None,
) -> Trained:
    """Train with one batch for each rank and step, until they are used up; what is left over is not used.

    Raises what pushes and pulls raise.
    """
    ranks = len(group.jobs)
    steps: list[Step] = []
    before = (0, 0)
    begin = time.perf_counter()
    for number in range(len(batches) // ranks):
        losses, pushes = [], []
        mine = [Batch.of(batches[number * ranks + rank], model.dense) for rank in range(ranks)]
        pulled = group.pull_all([batch.keys for batch in mine])
        for batch, parameters in zip(mine, pulled, strict=True):
            loss, gradients = lesson(model, batch, parameters, ranks)
            losses.append(loss)
            pushes.append((batch.keys, gradients))
        version = group.workers[0].hot.version
        group.push_all(pushes)
        now = (
            sum(worker.hot_pairs for worker in group.workers),
            sum(worker.cold_pairs for worker in group.workers),
        )
        steps.append(
            Step(
                number,
                float(np.mean(losses)),
                now[0] - before[0],
                now[1] - before[1],
                group.workers[0].hot.version != version,
            )
        )
        before = now
        tell(steps[-1])
    seconds = time.perf_counter() - begin
    keys, values = group.model()
    loss, auc = evaluate(group.jobs[0].pull, model, held_out)
    return Trained(tuple(steps), loss, auc, seconds, keys, values)


def lesson(model: Model, batch: Batch, parameters: F32, ranks: int) -> tuple[float, F32]:
    """What one of ``ranks`` makes of its batch: the mean loss under ``parameters`` float32[u, width], and its part of the
    gradients, of the same shape.
    """
    scores = model.scores(batch, parameters)
    error = error_of(scores, batch.labels) / ranks
    return loss_of(scores, batch.labels), model.gradients(batch, parameters, error)


def evaluate(pull: Callable[[U64], F32], model: Model, samples: Samples) -> tuple[float, float]:
    """Loss and area under the curve of the model as a rank pulls it."""
    batch = Batch.of(samples, model.dense)
    scores: F64 = model.scores(batch, pull(batch.keys))
    return loss_of(scores, batch.labels), area_under_curve(scores, batch.labels)
