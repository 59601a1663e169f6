"""A rank that trains with DistributedDataParallel, by Gloo or through the fabric. ``RANK WORLD FILE DIGITS``.

Both ways live in the same process and take turns, so that they meet the same machine. Questions are JSON lines:
``{"do": "train", ...}`` trains a fresh model and answers with its losses, ``{"do": "time", ...}`` measures steps of
one that stays, and ``{"do": "metrics", ...}`` the reductions of metrics between steps.
"""

import hashlib
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import inanet.torch
from inanet.data.digits import CLASSES, PIXELS, Digits, load

#: images of a step, per rank
BATCH = 32
_SEED = 1797
_WIDTH = 2048
_LEARNING_RATE = 0.01


def cnn() -> nn.Module:
    """A small convolutional network for the digits: 38,282 parameters, hardly anything to communicate."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


def mlp() -> nn.Module:
    """Wide layers and a batch that is small for them: 4,349,962 parameters, mostly communication."""
    return nn.Sequential(
        nn.Linear(PIXELS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, CLASSES)
    )


class Transformer(nn.Module):  # type: ignore[misc]
    """Two layers over the rows of a digit, with LayerNorm: 26,218 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.zeros(8, 32))
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32[n, 64] to float32[n, 10]."""
        rows = self.enter(images.unflatten(1, (8, 8))) + self.place
        return self.leave(self.layers(rows).mean(1))


class Embedding(nn.Module):  # type: ignore[misc]
    """A row for each pair of neighbours' grey values: 295,978 parameters, of which a step meets few."""

    _GREYS = 17

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(PIXELS * self._GREYS**2, 16, mode="mean")
        self.leave = nn.Linear(16, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float32[n, 64] to float32[n, 10]."""
        greys = (images * (self._GREYS - 1) / images.max().clamp(min=1e-6)).round().long()
        pairs = greys * self._GREYS + greys.roll(1, 1) + torch.arange(PIXELS) * self._GREYS**2
        return self.leave(self.rows(pairs))


MODELS = {"cnn": cnn, "mlp": mlp, "transformer": Transformer, "embedding": Embedding}


def build(model: str, way: str, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """The same model on every rank, and the state of its hook if ``way`` is "ina".

    "gloo": no hook. "double": by Gloo as well, in float64.
    """
    torch.manual_seed(_SEED)
    ddp = DistributedDataParallel(MODELS[model]())
    if way == "double":
        ddp.register_comm_hook(None, mean_in_double)
    if way in ("gloo", "double"):
        return ddp, None
    state, reduce = inanet.torch.hook(require_ina=True, **options)
    ddp.register_comm_hook(state, reduce)
    return ddp, state


def mean_in_double(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook: what gradients are if their sums are not rounded to float32 on the way."""
    wide = bucket.buffer().double()
    dist.all_reduce(wide)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result((wide / dist.get_world_size()).to(bucket.buffer().dtype))
    return done


class Batches:
    """The images of each step: the ranks' parts of one shuffle per epoch, the same in every run."""

    def __init__(self, digits: Digits, rank: int, world: int) -> None:
        self._images = torch.from_numpy(digits.images)
        self._labels = torch.from_numpy(digits.labels)
        self._rank, self._world = rank, world

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[BATCH, 64] and int64[BATCH]."""
        whole = BATCH * self._world
        epoch, place = divmod(step, len(self._labels) // whole)
        order = np.random.default_rng((_SEED, epoch)).permutation(len(self._labels))
        mine = torch.from_numpy(order[place * whole + self._rank * BATCH :][:BATCH])
        return self._images[mine], self._labels[mine]


def train(way: str, model: str, steps: int, digits: Digits, **options: Any) -> dict[str, Any]:
    """Train a fresh model: ``losses`` of the steps (mean over ranks), ``digest`` of the weights, ``accuracy`` on the images
    held out, and ``sent``, bytes of values that this rank's agent has sent since it began. Needs a default process group."""
    ddp, state = build(model, way, **options)
    optimizer: torch.optim.Optimizer
    if model == "transformer":
        optimizer = torch.optim.AdamW(ddp.parameters(), _LEARNING_RATE / 5)
    else:
        optimizer = torch.optim.Adam(ddp.parameters(), _LEARNING_RATE)
    batches = Batches(digits, dist.get_rank(), dist.get_world_size())
    losses = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        images, labels = batches(step)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(images), labels)
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
    dist.all_reduce(losses)
    with torch.no_grad():
        guesses = ddp.module(torch.from_numpy(digits.held_out_images)).argmax(1)
    right = guesses == torch.from_numpy(digits.held_out_labels)
    digest = hashlib.sha256()
    for parameter in ddp.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    sent = 0
    if state is not None:
        figures = state.stats()
        # of the switch systems; XAgg's rows have 1,024 B of values
        sent = figures.get("gradient_sent", 1024 * figures.get("rows_sent", 0))
        state.close()
    return {
        "sent": sent,
        "losses": (losses / dist.get_world_size()).tolist(),
        "digest": digest.hexdigest(),
        "accuracy": float(right.double().mean()),
    }


class _Stopwatch:
    """Models that stay, and seconds of their steps."""

    def __init__(self, digits: Digits) -> None:
        self._batches = Batches(digits, dist.get_rank(), dist.get_world_size())
        self._models: dict[tuple[str, str], DistributedDataParallel] = {}

    def seconds(self, way: str, model: str, steps: int) -> float:
        """Mean of a step; without communication for the way "alone"."""
        ddp = self._model("gloo" if way == "alone" else way, model)
        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            images, labels = self._batches(step)
            ddp.zero_grad()
            with ddp.no_sync() if way == "alone" else nullcontext():
                cross_entropy(ddp(images), labels).backward()
        return (time.perf_counter() - start) / steps

    def _model(self, way: str, model: str) -> DistributedDataParallel:
        if (way, model) not in self._models:
            ddp = self._models[way, model] = build(model, way)[0]
            # buckets are built anew after the first step, and memory is mapped in the next
            for step in range(2):
                images, labels = self._batches(step)
                cross_entropy(ddp(images), labels).backward()
        return self._models[way, model]


class _Metrics:
    """What a training loop logs between steps: reductions of one element each, of mixed dtypes, by a process group."""

    def __init__(self) -> None:
        self._groups = {"gloo": dist.group.WORLD, "ina": dist.new_group(backend="ina")}

    def seconds(self, way: str, steps: int) -> float:
        """Mean of a step. Raises ``ValueError`` for a wrong result."""
        group = self._groups[way]
        rank, world = dist.get_rank(), dist.get_world_size()
        ranks = world * (world - 1) / 2
        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            for dtype, op in METRICS:
                value = torch.tensor([step % 100 + rank], dtype=dtype)
                dist.all_reduce(value, op, group=group)
                found = value.item()
                right = step % 100 * world + ranks if op == dist.ReduceOp.SUM else step % 100 + world - 1
                if found != right:
                    raise ValueError(f"{way}: {op} of {dtype} is {found}, not {right}")
        return (time.perf_counter() - start) / steps


#: reductions of a step: losses and counts, what was right, the largest norms and times
METRICS = (
    *[(torch.float32, dist.ReduceOp.SUM)] * 12,
    *[(torch.int64, dist.ReduceOp.SUM)] * 8,
    *[(torch.float64, dist.ReduceOp.SUM)] * 4,
    *[(torch.float32, dist.ReduceOp.MAX)] * 4,
    *[(torch.int32, dist.ReduceOp.SUM)] * 2,
    *[(torch.float64, dist.ReduceOp.MAX)] * 2,
)


def main() -> None:
    """Answer questions until standard input ends."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    digits = load(Path(sys.argv[4]))
    watch = _Stopwatch(digits)
    metrics = _Metrics()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        way, model, steps = question["way"], question["model"], int(question["steps"])
        if question["do"] == "train":
            options = {"mode": question["mode"]} if way == "ina" and "mode" in question else {}
            answer = train(way, model, steps, digits, **options)
        elif question["do"] == "metrics":
            answer = {"seconds": metrics.seconds(way, steps)}
        else:
            answer = {"seconds": watch.seconds(way, model, steps)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
