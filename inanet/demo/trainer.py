"""A training process of the demo: what a user's own script would be, with its progress on standard output.

``python -m inanet.demo.trainer TASK``, TASK being a :class:`Task` as JSON. One JSON object a line goes to
standard output: ``{"step", "loss"}`` now and then, ``{"weights", "seconds"}`` at the end.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import inanet
from inanet.data.digits import load
from inanet.proto.slots.systems import TREES
from inanet.training.classifier import F32, parameters
from inanet.training.descent import Recipe, digest, train_worker

#: Least seconds between two progress lines.
REPORT_EVERY = 0.1
#: The job's name; the coordinator of a fabric serves any number of jobs.
JOB = "demo"


@dataclass(frozen=True, slots=True)
class Task:
    """What one training process is to do."""

    recipe: Recipe
    rank: int
    socket: str
    """Unix socket of its worker daemon"""
    digits: str
    """file written by :func:`inanet.data.digits.save`"""
    system: str = TREES
    averages: str | None = None
    """where to keep every step's averaged gradient for the audit, an npy file float32[steps, parameters]"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """The reverse of :meth:`to_json`."""
        values = json.loads(text)
        return cls(**{**values, "recipe": Recipe(**values["recipe"])})


class _Progress:
    """Writes a line now and then, and keeps the averages if asked to."""

    def __init__(self, task: Task) -> None:
        self.next_report = 0.0
        self.averages = None
        if task.averages is not None:
            shape = (task.recipe.steps, parameters(task.recipe.units))
            self.averages = np.lib.format.open_memmap(task.averages, "w+", np.float32, shape)

    def __call__(self, step: int, loss: float, averaged: F32) -> None:
        if self.averages is not None:
            self.averages[step] = averaged
        now = time.monotonic()
        if now >= self.next_report:
            self.next_report = now + REPORT_EVERY
            say(step=step, loss=loss)

    def finish(self) -> None:
        """Have the averages in their file."""
        if self.averages is not None:
            self.averages.flush()


def say(**values: Any) -> None:
    """One line of output."""
    print(json.dumps(values), flush=True)


def run(task: Task) -> None:
    """Train and report."""
    digits = load(Path(task.digits))
    progress = _Progress(task)
    with inanet.connect(
        JOB,
        rank=task.rank,
        world=task.recipe.parts,
        local_world=1,
        socket=task.socket,
        system=task.system,
    ) as job:
        started = time.monotonic()
        weights = train_worker(
            task.recipe,
            digits,
            task.rank,
            lambda gradient: job.all_reduce(gradient, op="mean", name="gradient", mode=task.recipe.mode),
            progress,
        )
        seconds = time.monotonic() - started
    progress.finish()
    say(weights=digest(weights), seconds=seconds)


if __name__ == "__main__":
    run(Task.from_json(sys.argv[1]))
