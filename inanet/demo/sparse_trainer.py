"""A rank of zebra's demo: what a user's own script would be, with its progress on standard output.

``python -m inanet.demo.sparse_trainer TASK``, TASK being a :class:`Task` as JSON. One JSON object a line goes to standard
output: a :class:`~inanet.training.sparse.Step` of this rank alone after each, ``{"stats", "seconds"}`` at the end. Rank 0 says
``loss`` and ``auc`` on the samples that were held out as well, and keeps the model.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import inanet
from inanet.data.clicks import Samples
from inanet.training.sparse import Step, evaluate, lesson
from inanet.training.sparse_models import MODELS, Batch

#: seconds that the others may take for a step, on a machine with too much to do
PATIENCE = 120.0
_ARRAYS = ("start", "keys", "values", "labels")


@dataclass(frozen=True, slots=True)
class Task:
    """What one rank is to do: train ``model``, one of :data:`~inanet.training.sparse_models.MODELS`, with every ``ranks``-th batch of
    ``size`` samples in the file ``data`` of :func:`save`, as a rank of the job in the file ``job``. Rank 0 keeps the ``result``, an
    npz file: keys uint64[n], values float32[n, width].
    """

    rank: int
    ranks: int
    job: str
    data: str
    model: str
    size: int
    result: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """The reverse of :meth:`to_json`."""
        return cls(**json.loads(text))


def save(path: Path, **parts: Samples) -> None:
    """Samples by name, in an npz file."""
    arrays = {f"{name}_{one}": getattr(part, one) for name, part in parts.items() for one in _ARRAYS}
    np.savez(path, **arrays)


def read(path: str, name: str) -> Samples:
    """The reverse of :func:`save`."""
    with np.load(path) as arrays:
        return Samples(name, *(arrays[f"{name}_{one}"] for one in _ARRAYS))


def say(values: dict[str, Any]) -> None:
    """One line of output."""
    print(json.dumps(values), flush=True)


def run(task: Task) -> None:
    """Train and report."""
    model = MODELS[task.model]()
    batches = [Batch.of(part, model.dense) for part in read(task.data, "batches").batches(task.size)]
    steps = len(batches) // task.ranks
    with inanet.join_sparse(task.job, task.rank, timeout=PATIENCE) as member:
        job, worker = member.job, member.worker
        started = time.monotonic()
        for number, batch in enumerate(batches[task.rank :: task.ranks][:steps]):
            hot, cold, version = worker.hot_pairs, worker.cold_pairs, worker.hot.version
            loss, gradients = lesson(model, batch, job.pull(batch.keys), task.ranks)
            job.push(batch.keys, gradients)
            changed = worker.hot.version != version
            step = Step(number, loss, worker.hot_pairs - hot, worker.cold_pairs - cold, changed)
            say(asdict(step))
        seconds = time.monotonic() - started
        found: dict[str, Any] = {"seconds": seconds, "hot_parameters": len(worker.hot)}
        if task.rank == 0:
            found["loss"], found["auc"] = evaluate(job.pull, model, read(task.data, "held_out"))
            keys = np.unique(np.concatenate([batch.keys for batch in batches[: steps * task.ranks]]))
            np.savez(task.result, keys=keys, values=job.pull(keys))
        say({"stats": worker.stats(), **found})


if __name__ == "__main__":
    run(Task.from_json(sys.argv[1]))
