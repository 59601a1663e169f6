"""``ina demo --system goat-async``: asynchronous training through three switches, beside the same epochs in one process.

Workers are late by a latency of their own for each gradient. What is checked is what asynchronous training promises: everybody
was told the same about every epoch, the workers that are said to have taken part are those that got its model, none twice,
and the loss on held-out digits is in the neighbourhood of what the same number of epochs with all gradients leads to: at most
a quarter above it, or where the single process was after half of the epochs. There is no bit-identity: who is in an epoch
depends on time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inanet.demo.epochs_trainer import Task
from inanet.demo.run import MEMORY, Options, Session, Show, kernels_of
from inanet.launch.counters import Traffic, traffic
from inanet.launch.fabric import Fabric
from inanet.launch.reports import DemoError
from inanet.training.descent import Recipe

#: how much above the single process's loss still is its neighbourhood
NEAR = 1.25
#: seconds of the longest latency
PACE = 0.05


@dataclass(frozen=True, slots=True)
class Step:
    """A worker's step: the epoch, who is said to have taken part, K_t, and how many epochs the worker was not in before it."""

    worker: int
    epoch: int
    workers: tuple[int, ...]
    awaited: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Result:
    """``loss`` and ``accuracy`` on held-out digits, of the worker with the newest model and of the single process (``alone``)."""

    options: Options
    steps: tuple[Step, ...]
    loss: float
    accuracy: float
    alone_loss: float
    alone_accuracy: float
    traffic: Traffic
    seconds: float
    training_seconds: float
    problems: tuple[str, ...]

    @property
    def epochs(self) -> dict[int, Step]:
        """A step of each epoch."""
        return {step.epoch: step for step in self.steps}


def judge(steps: list[Step], epochs: int, loss: float, alone: float, halfway: float) -> list[str]:
    """What is wrong with a run; empty if nothing is. ``alone`` and ``halfway``: the single process's loss, and half-way there."""
    problems = []
    said: dict[int, set[tuple[tuple[int, ...], int]]] = {}
    heard: dict[int, list[int]] = {}
    for step in steps:
        said.setdefault(step.epoch, set()).add((step.workers, step.awaited))
        heard.setdefault(step.epoch, []).append(step.worker)
    for epoch, words in sorted(said.items()):
        ((workers, awaited), *others) = sorted(words)
        if others:
            problems.append(f"epoch {epoch}: workers were told different things about who took part")
        elif sorted(heard[epoch]) != list(workers):
            problems.append(
                f"epoch {epoch}: workers {workers} are said to have taken part, {sorted(heard[epoch])} got its model"
            )
        elif len(workers) < awaited:
            problems.append(f"epoch {epoch}: {len(workers)} took part, {awaited} were waited for")
    missing = [epoch for epoch in range(1, epochs + 1) if epoch not in said]
    if missing:
        problems.append(f"nobody took part in epochs {missing[:5]}")
    if loss > max(NEAR * alone, halfway):
        problems.append(
            f"the loss is {loss:.4f}; a single process comes to {alone:.4f}, and to {halfway:.4f} after half of the epochs"
        )
    return problems


def run(options: Options, show: Show, check: Callable[[], None], *, pace: float = PACE) -> Result:
    """Run the demo: ``options.steps`` epochs. Raises as :func:`inanet.demo.run.run` does."""
    started = time.monotonic()
    show.stage(
        f"starting {options.workers} ina-worker, 3 ina-switch ({options.system}), 1 ina-ps on 127.0.0.1"
    )
    sessions: list[Session] = []

    def begin(fabric: Fabric) -> None:
        sessions.append(Session(fabric, options.recipe, show, check))
        sessions[0].fetch()

    with Fabric(
        options.workers,
        0,
        impair=options.impair,
        seed=options.seed,
        system=options.system,
        memory=MEMORY[options.system],
        check=check,
        kernels=kernels_of(options.system),
        compiling=show.stage,
        beside=begin,
    ) as fabric:
        (session,) = sessions
        session.prepare()
        show.stage(f"training {options.steps} epochs")
        steps, final = _train(session, options.recipe, pace, show)
        (alone,) = _results(session, [_task(session, options.recipe, -1, pace)], lambda rank, line: None)
        stubborn = fabric.shutdown()
        stats = fabric.stats()
    newest = max(steps, key=lambda step: step.epoch)
    mine = final[newest.worker]
    problems = judge(steps, options.steps, mine["loss"], alone["loss"], alone["halfway"])
    if stubborn:
        problems.append(f"did not end when asked to and had to be killed: {', '.join(stubborn)}")
    return Result(
        options=options,
        steps=tuple(steps),
        loss=mine["loss"],
        accuracy=mine["accuracy"],
        alone_loss=alone["loss"],
        alone_accuracy=alone["accuracy"],
        traffic=traffic(stats),
        seconds=time.monotonic() - started,
        training_seconds=max(one["seconds"] for one in final),
        problems=tuple(problems),
    )


def _task(session: Session, recipe: Recipe, rank: int, pace: float) -> Task:
    socket = str(session.fabric.worker_socket(rank)) if rank >= 0 else ""
    return Task(recipe, rank, socket, session.digits, session.fabric.system, pace)


def _train(
    session: Session, recipe: Recipe, pace: float, show: Show
) -> tuple[list[Step], list[dict[str, Any]]]:
    """All workers' steps in the order in which they were reported, and what each worker came to."""
    steps: list[Step] = []

    def note(rank: int, line: dict[str, Any]) -> None:
        steps.append(Step(rank, line["epoch"], tuple(line["workers"]), line["awaited"], line["staleness"]))
        show.step(min(line["epoch"], recipe.steps), recipe.steps, line["loss"])

    tasks = [_task(session, recipe, rank, pace) for rank in range(recipe.parts)]
    return steps, _results(session, tasks, note)


def _results(
    session: Session, tasks: list[Task], note: Callable[[int, dict[str, Any]], None]
) -> list[dict[str, Any]]:
    processes = [
        session.spawn(f"rank{task.rank}", "inanet.demo.epochs_trainer", task.to_json()) for task in tasks
    ]
    found: dict[int, dict[str, Any]] = {}
    for index, line in session.lines(processes):
        if "weights" in line:
            found[index] = line
        else:
            note(tasks[index].rank, line)
    if len(found) < len(tasks):
        silent = [f"rank {task.rank}" for index, task in enumerate(tasks) if index not in found]
        raise DemoError(f"ended without a result: {', '.join(silent)}")
    return [found[index] for index in range(len(tasks))]


def to_dict(result: Result) -> dict[str, Any]:
    """The JSON object: the keys of every demo as far as they make sense, and who took part. Fractions are 0 to 1, times
    seconds, sizes bytes.
    """
    its, options = result.traffic, result.options
    epochs = [step for epoch, step in sorted(result.epochs.items()) if epoch <= options.steps]
    return {
        "schema": 1,
        "ok": not result.problems,
        "accuracy": result.accuracy,
        "baseline_accuracy": result.alone_accuracy,
        "loss": result.loss,
        "baseline_loss": result.alone_loss,
        "bytes_into_ps": its.bytes_into_ps,
        "bytes_without_ina": its.bytes_without_ina,
        "in_network_share": its.in_network_share,
        "retransmissions": its.retransmissions,
        # not promised: who is in an epoch depends on time
        "identical_weights": None,
        "seconds": result.seconds,
        "training_seconds": result.training_seconds,
        "epochs": options.steps,
        "participants": [list(step.workers) for step in epochs],
        "awaited": [step.awaited for step in epochs],
        "staleness": max((step.staleness for step in result.steps), default=0),
        "drops": its.drops,
        "sums_by_switch": its.sums_by_switch,
        "system": options.system,
        "workers": options.workers,
        "impair": options.impair,
        "seed": options.seed,
        "problems": list(result.problems),
    }


def table(result: Result) -> list[str]:
    """The result for people."""
    its = to_dict(result)
    many = [len(one) for one in its["participants"]]
    lines = [
        f"accuracy, held-out digits  {result.accuracy:.2%}  ({result.alone_accuracy:.2%} in a single process)",
        f"loss on them               {result.loss:.4f}  ({result.alone_loss:.4f} in a single process)",
        f"workers in an epoch        {sum(many) / len(many):.1f} of {result.options.workers} on average",
        f"most epochs missed         {its['staleness']}",
        f"in-network share           {result.traffic.in_network_share:.1%}",
        *(f"summed at {name}         {count}" for name, count in result.traffic.sums_by_switch.items()),
        f"seconds                    {result.seconds:.1f}, {result.training_seconds:.1f} of them training",
    ]
    return [*lines, *(f"FAILED: {problem}" for problem in result.problems)]
