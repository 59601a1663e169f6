"""Zebra's demo through daemons: PSs that keep keys, a switch, and a rank in every training process."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inanet.config.file import validate, write_toml
from inanet.config.sparse import FabricSparseConfig
from inanet.data.clicks import Samples
from inanet.demo.run import kernels_of
from inanet.demo.sparse_trainer import Task, save
from inanet.launch.fabric import Fabric
from inanet.launch.reports import DemoError, Processes
from inanet.launch.topology import keyed
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.store import Adagrad, Ftrl, Uniform
from inanet.training.sparse import Step, Trained
from inanet.training.sparse_models import Model
from inanet.wire.batch import U64

SYSTEM = "zebra"


@dataclass(frozen=True, slots=True)
class Training:
    """What ranks do: train ``model`` with ``batches`` of ``size`` samples, one after the other to each of ``ranks``; ``held_out``
    is what they are judged by. ``hot`` keys are known before, or found while they train, ``online``; gradients of these are in
    steps of 2^-``shift``. ``shards`` keep the keys. On every hop packets are lost, repeated, reordered and damaged with
    probability ``impair`` each, from ``seed``.
    """

    model: Model
    batches: Samples
    size: int
    held_out: Samples
    ranks: int
    shards: int
    hot: U64 | None
    online: Online | None
    shift: int
    impair: float
    seed: int


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it: the model and its steps, the counters of ``ranks``, and of daemons by name. ``hot`` parameters are in use
    at the end.
    """

    trained: Trained
    ranks: list[dict[str, int]]
    daemons: dict[str, dict[str, Any]]
    hot: int


def train(
    training: Training, tell: Callable[[Step], None], say: Callable[[str], None], check: Callable[[], None]
) -> Told:
    """Start daemons, train, end them. ``tell`` hears of every step when all ranks have taken it, ``say`` what is being done.
    ``check`` is called ten times a second and may raise.

    Raises :class:`~inanet.launch.reports.DemoError` and :class:`~inanet.launch.nodes.FabricError`; whatever happens, no process and
    no file is left.
    """
    say(f"starting {training.shards} ina-ps and 1 ina-switch ({SYSTEM}) on 127.0.0.1")
    with Fabric(
        topology=[(node.name, node.parent) for node in keyed(training.shards)],
        impair=training.impair,
        seed=training.seed,
        system=SYSTEM,
        check=check,
        kernels=kernels_of(SYSTEM),
        compiling=say,
    ) as fabric:
        directory = fabric.directory
        save(directory / "data.npz", batches=training.batches, held_out=training.held_out)
        _job_file(training, directory)
        say(f"training with {training.ranks} processes")
        steps, ends = _ranks(training, Processes(fabric, check), directory, tell)
        with np.load(directory / "model.npz") as found:
            keys, values = found["keys"], found["values"]
        stubborn = fabric.shutdown()
        daemons = fabric.figures()
        silent = [name for name in fabric.nodes if name not in daemons]
        if stubborn or silent:
            raise DemoError(f"did not end in good order: {', '.join(sorted({*stubborn, *silent}))}")
    first = ends[0]
    seconds = max(end["seconds"] for end in ends)
    trained = Trained(tuple(steps), first["loss"], first["auc"], seconds, keys, values)
    return Told(trained, [end["stats"] for end in ends], daemons, first["hot_parameters"])


def _job_file(training: Training, directory: Path) -> None:
    """The job as its ranks read it."""
    model, optimiser, initial = training.model, training.model.optimiser, training.model.initial
    its: dict[str, Any] = {
        "name": "demo",
        "world": training.ranks,
        "shards": training.shards,
        "width": model.width,
        "shift": training.shift,
        "initial": initial.bound if isinstance(initial, Uniform) else 0.0,
    }
    if isinstance(optimiser, Ftrl):
        its |= {"optimiser": "ftrl", "rate": optimiser.alpha, "beta": optimiser.beta}
    else:
        assert isinstance(optimiser, Adagrad)
        its |= {"optimiser": "adagrad", "rate": optimiser.rate}
    if training.hot is not None:
        np.savetxt(directory / "hot.txt", training.hot, fmt="%d")
        its["hot"] = str(directory / "hot.txt")
    if training.online is not None:
        its["online"] = asdict(training.online)
    faults = dict.fromkeys(("drop", "duplicate", "reorder", "corrupt"), training.impair)
    sections = {
        "job": its,
        "control": {"coordinator": f"unix:{directory / 'control.sock'}"},
        "impair": {"seed": training.seed, **faults},
    }
    file = directory / "job.toml"
    file.write_text(write_toml(validate(FabricSparseConfig, sections, file)))


def _ranks(
    training: Training, processes: Processes, directory: Path, tell: Callable[[Step], None]
) -> tuple[list[Step], list[dict[str, Any]]]:
    """Steps of all ranks together, and what each said at its end."""
    tasks = [
        Task(
            rank=rank,
            ranks=training.ranks,
            job=str(directory / "job.toml"),
            data=str(directory / "data.npz"),
            model=training.model.name,
            size=training.size,
            result=str(directory / "model.npz"),
        )
        for rank in range(training.ranks)
    ]
    started = [
        processes.spawn(f"rank{task.rank}", "inanet.demo.sparse_trainer", task.to_json()) for task in tasks
    ]
    steps: list[Step] = []
    taken: dict[int, list[Step]] = {}
    ends: dict[int, dict[str, Any]] = {}
    for rank, line in processes.lines(started):
        if "stats" in line:
            ends[rank] = line
            continue
        step = Step(**line)
        taken.setdefault(step.number, []).append(step)
        if len(taken[step.number]) == training.ranks:
            steps.append(_together(taken.pop(step.number)))
            tell(steps[-1])
    silent = [f"rank {rank}" for rank in range(training.ranks) if rank not in ends]
    if silent:
        raise DemoError(f"ended without a result: {', '.join(silent)}")
    return steps, [ends[rank] for rank in range(training.ranks)]


def _together(steps: list[Step]) -> Step:
    """One step of several ranks."""
    return Step(
        steps[0].number,
        sum(step.loss for step in steps) / len(steps),
        sum(step.hot for step in steps),
        sum(step.cold for step in steps),
        steps[0].changed,
    )
