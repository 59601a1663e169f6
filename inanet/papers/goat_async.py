"""GOAT's Fig. 11 and 12: synchronous training, K-SGD, and asynchronous training by Algorithm 2, as a timing model.

**The model.** A worker's gradient takes ``base`` seconds of computing and sending, the same for all, and a latency that
is drawn for each gradient: normal with deviation 0.2, redrawn until it lies in [0, 1] s (section VII-C). Synchronous epochs
wait for all. K-SGD and the asynchronous scheme wait for K; K-SGD discards the others, who begin anew; asynchronously they
go on, and what they send counts in a later epoch. K comes from Algorithm 2 with the intervals seen so far.

What the paper leaves open is swept: the mean of the latency, the share of the base in the epoch, and psi's only free
parameter that moves its minimum, sigma^2 / epsilon, which is the least number of gradients whose noise alone does not exceed
the target. The paper's synchronous epochs take 420.4 s / 200; the base is what is left of them when the mean of the
slowest worker's latency is taken off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from inanet.papers.claims import Claim
from inanet.papers.goat_nodes import Log, Task, Training, plan_testbed
from inanet.papers.goat_task import BATCH, Regression
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.goat.epochs import by_algorithm_two
from inanet.planning.goat.participants import Convergence, Timeline, choose

Scheme = Literal["GOAT", "K-SGD", "GOAT-Async"]
SCHEMES: tuple[Scheme, ...] = ("GOAT", "K-SGD", "GOAT-Async")
EPOCHS = 200
WORKERS = (4, 8, 12, 16)
#: sigma^2 / epsilon that claims are judged under, as shares of the workers: the paper gives neither number.
NOISES = (0.0625, 0.125, 0.25)
#: Seconds of a synchronous epoch in Fig. 12(a).
SYNCHRONOUS_EPOCH = 420.4 / 200
DEVIATION = 0.2


@dataclass(frozen=True, slots=True)
class Model:
    """``mean`` of the latency in seconds; ``noise`` sigma^2 / epsilon, as a share of the workers; ``base`` seconds, or
    ``None`` for what is left of the paper's epoch.
    """

    mean: float = 0.5
    noise: float = 0.25
    base: float | None = None


def latencies(mean: float, count: int, rng: np.random.Generator) -> Any:
    """``count`` latencies in seconds, float64."""
    drawn = rng.normal(mean, DEVIATION, count)
    while (bad := (drawn < 0) | (drawn > 1)).any():
        drawn[bad] = rng.normal(mean, DEVIATION, int(bad.sum()))
    return drawn


def base_of(model: Model) -> float:
    """Seconds of an epoch that are not latency."""
    if model.base is not None:
        return model.base
    rng = np.random.default_rng(0)
    slowest = latencies(model.mean, 16 * 4000, rng).reshape(-1, 16).max(axis=1).mean()
    return float(SYNCHRONOUS_EPOCH - slowest)


@dataclass(frozen=True, slots=True)
class Run:
    """``seconds`` of the epochs, ``gradients`` that counted, mean ``participants``, ``discarded`` gradients, greatest
    ``staleness`` in epochs.
    """

    seconds: float
    gradients: int
    participants: float
    discarded: int
    staleness: int

    @property
    def images(self) -> float:
        """Samples per second whose gradients counted."""
        return self.gradients * BATCH / self.seconds


#: Told of every epoch, with the workers whose gradients count.
Step = Callable[[float, tuple[int, ...]], None]


def train(
    scheme: Scheme,
    workers: int,
    model: Model,
    seed: int,
    *,
    begin: Callable[[int], None] | None = None,
    step: Step | None = None,
    epochs: int = EPOCHS,
) -> Run:
    """Run one scheme. ``begin(worker)`` is told whenever a worker gets the model, ``step(now, workers)`` of epochs."""
    rng = np.random.default_rng(seed)
    base = base_of(model)
    task = Convergence(1.0, model.noise * workers, 1.0, workers)
    timeline = Timeline(workers, discard=scheme == "K-SGD")

    def needed(worker: int) -> float:
        if begin is not None:
            begin(worker)
        return base + float(latencies(model.mean, 1, rng)[0])

    gradients, total, discarded, staleness = 0, 0, 0, 0
    for _ in range(epochs):
        known = timeline.history
        count = workers
        if scheme != "GOAT" and not np.isnan(known).all():
            # a worker that has not delivered yet is taken to be as slow as the slowest that has
            seen = np.where(np.isnan(known), np.nanmax(known), known)
            count = choose(seen.tolist(), task.epochs).participants
        epoch = timeline.advance(count, needed)
        gradients += len(epoch.inside)
        total += count
        discarded += len(epoch.discarded)
        staleness = max(staleness, *epoch.staleness)
        if step is not None:
            step(timeline.now, epoch.inside)
    return Run(timeline.now, gradients, total / epochs, discarded, staleness)


def _sweep(workers: int = 16) -> Table:
    rows = []
    for mean, noise, base in product((0.25, 0.5), NOISES, (None, 0.25)):
        model = Model(mean, noise, base)
        runs = [train(scheme, workers, model, seed=1) for scheme in SCHEMES]
        rows.append(
            (
                mean,
                noise,
                base_of(model),
                runs[1].participants,
                runs[2].participants,
                runs[0].seconds / runs[2].seconds,
                runs[1].seconds / runs[2].seconds,
                runs[2].images / runs[0].images,
                runs[2].images / runs[1].images,
            )
        )
    columns = (
        "mean latency",
        "noise",
        "base",
        "K of K-SGD",
        "K of async",
        "time: sync/async",
        "K-SGD/async",
        "images: async/sync",
        "async/K-SGD",
    )
    return Table(f"models, {workers} workers, {EPOCHS} epochs", columns, tuple(rows))


_NOTES = (
    "Waiting for K of n cannot count more gradients per second than n / (base + mean latency); synchronous epochs count "
    "n / (base + latency of the slowest).",
)


_NODES = (
    "Fig. 12's GOAT-Async is trained through the testbed's three switches, which sum integers and wait for K_t^s "
    "gradients as published, and a PS; the others, and Fig. 11, by the times alone, which are the same.",
)


def _words(noise: float, run: Run) -> str:
    return f"sigma^2 / epsilon = {noise:g} n, mean K {run.participants:.1f}"


def throughput() -> Outcome:
    """Fig. 11: images per second against workers."""
    models = {noise: Model(noise=noise) for noise in NOISES}
    runs = {
        (scheme, n, noise): train(scheme, n, model, seed=1)
        for scheme in SCHEMES
        for n in WORKERS
        for noise, model in models.items()
    }
    rows = tuple(
        (noise, n, *(runs[scheme, n, noise].images for scheme in SCHEMES))
        for noise in NOISES
        for n in WORKERS
    )
    claims = []
    for noise, model in models.items():
        sync, ksgd, mine = (runs[scheme, 16, noise] for scheme in SCHEMES)
        most = 100 * ((16 * BATCH / (base_of(model) + model.mean)) / sync.images - 1)
        claims += [
            Claim(
                f"images per second of GOAT-Async above GOAT's, per cent ({_words(noise, mine)})",
                49.7,
                100 * (mine.images / sync.images - 1),
                ">=",
                reason=f"with these latencies no scheme can count more than {most:.1f} per cent more gradients per "
                "second.",
            ),
            Claim(
                f"images per second of GOAT-Async above K-SGD's, per cent ({_words(noise, mine)})",
                14.7,
                100 * (mine.images / ksgd.images - 1),
                ">=",
                reason=""
                if mine.images / ksgd.images >= 1.147
                else "with K near n there is next to nothing to discard.",
            ),
        ]
    panel = Panel(
        f"sigma^2 / epsilon = {NOISES[1]:g} n",
        "workers",
        "images per second",
        {scheme: [(n, runs[scheme, n, NOISES[1]].images) for n in WORKERS] for scheme in SCHEMES},
    )
    table = Table("images per second", ("noise", "workers", *SCHEMES), rows)
    return Outcome(tuple(claims), (table, _sweep()), (panel,), _NOTES)


def through_nodes(noise: float, task: Task, workers: int, seed: int, *, epochs: int = EPOCHS) -> Log:
    """GOAT-Async as :func:`train` runs it, through switches that are told K_t^s, and a PS."""
    model, rng = Model(noise=noise), np.random.default_rng(seed)
    base = base_of(model)
    choose = by_algorithm_two(Convergence(1.0, noise * workers, 1.0, workers).epochs)
    planned = plan_testbed(workers, Regression.FEATURES * Regression.CLASSES)
    training = Training(planned, task, choose, lambda worker: base + float(latencies(model.mean, 1, rng)[0]))
    return training.run(epochs)


@dataclass(frozen=True, slots=True)
class _Trained:
    """Runs and loss curves of all schemes; ``log`` is what the PS did asynchronously."""

    runs: dict[Scheme, Run]
    curves: dict[str, list[tuple[float, float]]]
    log: Log


def _trained(noise: float, workers: int = 16) -> _Trained:
    runs: dict[Scheme, Run] = {}
    curves: dict[str, list[tuple[float, float]]] = {}
    for scheme in SCHEMES[:2]:
        task = Regression(workers)
        runs[scheme] = train(scheme, workers, Model(noise=noise), seed=1, begin=task.begin, step=task.step)
        curves[scheme] = task.losses
    task = Regression(workers)
    log = through_nodes(noise, task, workers, seed=1)
    runs["GOAT-Async"] = Run(log.seconds, log.gradients, log.gradients / EPOCHS, 0, log.staleness)
    curves["GOAT-Async"] = task.losses
    return _Trained(runs, curves, log)


#: How much above synchronous training's final loss still counts as its neighbourhood.
NEAR = 1.05


#: Seconds of the paper's schemes over GOAT-Async's (Fig. 12).
FASTER: dict[Scheme, float] = {"GOAT": 2.02, "K-SGD": 1.56}


def _finish_claims(
    noise: float, runs: dict[Scheme, Run], final: dict[Scheme, float], reached: dict[Scheme, float]
) -> list[Claim]:
    """Seconds of all epochs and seconds to the neighbourhood of the same loss, over GOAT-Async's; and its final loss."""
    mine = runs["GOAT-Async"]
    words = _words(noise, mine)
    times = {
        "200 epochs": {scheme: its.seconds for scheme, its in runs.items()},
        f"to {NEAR:g} times synchronous training's loss": reached,
    }
    claims = []
    for (what, seconds), (scheme, paper) in product(times.items(), FASTER.items()):
        ours = seconds[scheme] / seconds["GOAT-Async"]
        late = "epochs that wait for nearly all are nearly as long as synchronous ones."
        claims.append(
            Claim(
                f"{what}: {scheme}'s time over GOAT-Async's ({words})",
                paper,
                ours,
                ">=",
                reason="" if ours >= paper else late,
            )
        )
    ours = final["GOAT-Async"] / final["GOAT"]
    claims.append(
        Claim(f"final loss of GOAT-Async over GOAT's ({words})", 1.0, ours, "<=", tolerance=NEAR - 1)
    )
    return claims


def time_to_loss() -> Outcome:
    """Fig. 12: seconds of 200 epochs with 16 workers, and of reaching synchronous training's final loss."""
    rows, claims, panels, published = [], [], [], []
    for noise in NOISES:
        trained = _trained(noise)
        runs, curves, log = trained.runs, trained.curves, trained.log
        published.append((noise, EPOCHS, log.publications, log.corrections))
        final = {scheme: float(np.mean([loss for _, loss in curves[scheme][-20:]])) for scheme in SCHEMES}
        near = final["GOAT"] * NEAR
        reached = {
            scheme: next((now for now, loss in curves[scheme] if loss <= near), float("inf"))
            for scheme in SCHEMES
        }
        for scheme in SCHEMES:
            its = runs[scheme]
            figures = (
                its.seconds,
                its.participants,
                its.discarded,
                its.staleness,
                final[scheme],
                reached[scheme],
            )
            rows.append((noise, scheme, *figures))
        claims += _finish_claims(noise, runs, final, reached)
        words = _words(noise, runs["GOAT-Async"])
        panels.append(Panel(f"softmax regression, {words}", "seconds", "loss", curves))
    columns = (
        "noise",
        "scheme",
        "seconds",
        "mean K",
        "discarded",
        "staleness",
        "final loss",
        "s to 1.05 x sync's",
    )
    return Outcome(
        tuple(claims),
        (
            Table("200 epochs, 16 workers", columns, tuple(rows)),
            Table(
                "K_t^s as the PS published it",
                ("noise", "epochs", "publications", "put right"),
                tuple(published),
            ),
            _sweep(),
        ),
        tuple(panels),
        (*_NOTES, *_NODES),
    )
