"""The demo from start to end: a fabric, a training process per worker, the audit, the outcome."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from inanet.demo.audit import Verdict
from inanet.demo.trainer import Task
from inanet.launch.counters import Traffic, traffic
from inanet.launch.fabric import Fabric
from inanet.launch.process import Process
from inanet.launch.reports import DemoError, Processes
from inanet.launch.topology import SCHEDULED
from inanet.proto.slots.systems import TREES
from inanet.service.kernels import DEMO
from inanet.training.descent import Recipe

AGGREGATORS = 2
#: Registers of each switch where the default would be more than there is to show: no switch has room for the gradient, so
#: that GOAT's scheduler has to share it out.
MEMORY = dict.fromkeys(SCHEDULED, "24 KiB")


def kernels_of(system: str) -> list[str]:
    """Sets of kernels to be compiled before a demo of a system starts, in parallel and with a count."""
    return [f"demo:{system}"] if system in DEMO else []


class Show(Protocol):
    """Live progress."""

    def stage(self, text: str) -> None:
        """Something new begins."""

    def step(self, step: int, steps: int, loss: float) -> None:
        """All workers have finished ``step`` (from 1); ``loss`` is the mean over their parts of the batch."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    workers: int = 4
    steps: int = 200
    seed: int = 1
    impair: float = 0.0
    system: str = TREES

    @property
    def recipe(self) -> Recipe:
        """The training run."""
        return Recipe(parts=self.workers, steps=self.steps, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. ``problems`` are sentences; without any the demo has succeeded."""

    options: Options
    verdict: Verdict
    traffic: Traffic
    identical_weights: bool
    steps_per_second: float
    seconds: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return not self.problems


def judge(verdict: Verdict, digests: list[str]) -> list[str]:
    """What is wrong with a training run: its workers' weights and the audit's findings. Empty if nothing
    is."""
    problems = []
    if len(set(digests)) > 1:
        short = ", ".join(f"rank {rank} {value[:12]}" for rank, value in enumerate(digests))
        problems.append(f"the workers' weights differ: {short}")
    if digests[0] != verdict.weights:
        problems.append(
            f"rank 0 has weights {digests[0][:12]}, its averaged gradients lead to {verdict.weights[:12]}"
        )
    if not verdict.steps_within_bound:
        problems.append(
            f"step {verdict.worst_step}, element {verdict.worst_element}: the averaged gradient is off by "
            f"{verdict.gradient_error:.3g}, the number format allows {verdict.gradient_bound:.3g}"
        )
    if not verdict.weights_within_bound:
        problems.append(
            f"the weights differ from the single-process run by up to {verdict.max_weight_difference:.3g}, "
            f"beyond the bound (at most {verdict.bound:.3g})"
        )
    return problems


def run(options: Options, show: Show, check: Callable[[], None]) -> Outcome:
    """Run the demo. ``check`` is called at least every :data:`GLANCE` seconds and may raise to give up.

    Raises :class:`DemoError` or :class:`inanet.launch.nodes.FabricError`; whatever happens, no process and no
    file is left.
    """
    started = time.monotonic()
    between = f"{AGGREGATORS} ina-agg"
    if options.system != TREES:
        between = f"{3 if options.system in SCHEDULED else 1} ina-switch ({options.system})"
    show.stage(f"starting {options.workers} ina-worker, {between}, 1 ina-ps on 127.0.0.1")

    sessions: list[Session] = []

    def begin(fabric: Fabric) -> None:
        sessions.append(Session(fabric, options.recipe, show, check))
        sessions[0].fetch()

    with Fabric(
        options.workers,
        AGGREGATORS,
        impair=options.impair,
        seed=options.seed,
        system=options.system,
        memory=MEMORY.get(options.system, ""),
        check=check,
        kernels=kernels_of(options.system),
        compiling=show.stage,
        beside=begin,
    ) as fabric:
        (session,) = sessions
        show.stage("reading scikit-learn's digits")
        session.prepare()
        show.stage(f"training {options.steps} steps")
        digests, training_seconds = session.train()
        show.stage("repeating the run in a single process and comparing")
        verdict, stubborn = session.audit()
        stats = fabric.stats()
        missing = [name for name in fabric.nodes if name not in stats]
    problems = judge(verdict, digests)
    if stubborn:
        problems.append(f"did not end when asked to and had to be killed: {', '.join(stubborn)}")
    if missing:
        problems.append(f"left no counters, so the figures lack theirs: {', '.join(missing)}")
    return Outcome(
        options=options,
        verdict=verdict,
        traffic=traffic(stats),
        identical_weights=len(set(digests)) == 1,
        steps_per_second=options.steps / training_seconds,
        seconds=time.monotonic() - started,
        problems=tuple(problems),
    )


class Session(Processes):
    """The processes of one run beside the daemons."""

    def __init__(self, fabric: Fabric, recipe: Recipe, show: Show, check: Callable[[], None]) -> None:
        super().__init__(fabric, check)
        self.recipe = recipe
        self.show = show
        self.digits = str(fabric.directory / "digits.npz")
        self._fetching: Process | None = None
        self.averages = str(fabric.directory / "averages.npy")

    def fetch(self) -> None:
        """Start to read the data set."""
        self._fetching = self.spawn("digits", "inanet.data.digits", self.digits)

    def prepare(self) -> None:
        """Have the data set in a file."""
        if self._fetching is None:
            self.fetch()
        assert self._fetching is not None
        for _ in self.lines([self._fetching]):
            raise DemoError("reading the digits printed something")

    def train(self) -> tuple[list[str], float]:
        """Train with one process per worker. Returns their weights' digests and the slowest one's seconds."""
        workers = self.recipe.parts
        tasks = [
            Task(
                recipe=self.recipe,
                rank=rank,
                socket=str(self.fabric.worker_socket(rank)),
                digits=self.digits,
                system=self.fabric.system,
                averages=self.averages if rank == 0 else None,
            )
            for rank in range(workers)
        ]
        trainers = [self.spawn(f"rank{task.rank}", "inanet.demo.trainer", task.to_json()) for task in tasks]
        latest: list[dict[str, Any] | None] = [None] * workers
        results: dict[int, dict[str, Any]] = {}
        for rank, line in self.lines(trainers):
            if "weights" in line:
                results[rank] = line
                continue
            latest[rank] = line
            known = [report for report in latest if report is not None]
            if len(known) == workers:
                done = min(report["step"] for report in known) + 1
                self.show.step(done, self.recipe.steps, sum(report["loss"] for report in known) / workers)
        silent = [f"rank {rank}" for rank in range(workers) if rank not in results]
        if silent:
            raise DemoError(f"ended without a result: {', '.join(silent)}")
        return [results[rank]["weights"] for rank in range(workers)], max(
            result["seconds"] for result in results.values()
        )

    def audit(self) -> tuple[Verdict, list[str]]:
        """Audit the run while the daemons end. Returns the verdict and the daemons that had to be killed."""
        recipe = json.dumps(self.recipe.to_dict())
        process = self.spawn("audit", "inanet.demo.audit", recipe, self.digits, self.averages)
        stubborn = self.fabric.shutdown()
        lines = [line for _, line in self.lines([process])]
        if len(lines) != 1:
            raise DemoError("the audit gave no verdict")
        return Verdict(**lines[0]), stubborn
