"""GOAT's Fig. 11 and 12: synchronous training, K-SGD, and asynchronous training by Algorithm 2, as a timing model.

**The model.** A worker's gradient takes ``base`` seconds of computing and sending, the same for all, and a latency that
is drawn for each gradient: normal with deviation 0.2, redrawn until it lies in [0, 1] s (section VII-C). Synchronous epochs
wait for all. K-SGD and the asynchronous scheme wait for K; K-SGD discards the others, who begin anew; asynchronously they
go on, and what they send counts in a later epoch. K comes from Algorithm 2 with the intervals seen so far.

What the paper leaves open is swept: the mean of the latency, the share of the base in the epoch, and psi's only free
parameter that moves its minimum, sigma^2 / epsilon, which is the least number of gradients whose noise alone does not exceed
the target. The paper's synchronous epochs take 420.4 s / 200; the base is what is left of them when the mean of the
slowest worker's latency is taken off.

**The training** of Fig. 12 goes through the nodes of a schedule, in virtual time. The testbed's three switches (GOAT, Fig. 4) with memory for a part of the model, a schedule by KRGS, and on every node the sums
of :mod:`inanet.proto.slots.goat_async.gatherer`; the PS is :mod:`inanet.planning.goat.epochs`. Gradients travel as 32-bit integers and
are added as such. Time passes at the workers only, as in the model that the other schemes are run in: messages take none,
unless they are given some.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, Protocol

import numpy as np

from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.planning.goat.epochs import Choose, Publication, Server, Update, by_algorithm_two
from inanet.planning.goat.instance import SLOT_BYTES, from_graph
from inanet.planning.goat.krgs import Schedule, schedule
from inanet.planning.goat.participants import Convergence, Timeline, choose
from inanet.planning.goat.submodels import VALUE_BYTES, partition
from inanet.planning.goat.topologies import empty_graph
from inanet.proto.slots.goat_async.gatherer import Contribution, Gathered, Gatherer

#: A gradient's values times this are integers: 16 workers' fit 32 bits as long as each value is below 128.
FACTOR = 1 << 20
#: Fragments that s1, s2 and s3 have room for.
SLOTS = (1, 2, 1)


class Task(Protocol):
    """What is trained; gradients are float64[V]."""

    def begin(self, worker: int) -> None:
        """A worker gets the model."""

    def gradient(self, worker: int) -> Any:
        """What it sends then."""

    def apply(self, now: float, mean: Any) -> None:
        """A step."""


def plan_testbed(workers: int, values: int, seed: int = 1, slots: tuple[int, ...] = SLOTS) -> Schedule:
    """A model of ``values`` values, a sub-model per fragment, scheduled on Fig. 4's topology: the PS at one switch, the
    workers at two others below it.
    """
    graph = empty_graph()
    for name, count in zip(("s1", "s2", "s3"), slots, strict=True):
        graph.add_node(name, kind="switch", memory=count * SLOT_BYTES)
    graph.add_edges_from([("s1", "s2"), ("s1", "s3")])
    names = [f"w{rank}" for rank in range(workers)]
    graph.add_nodes_from(["ps", *names], kind="server", memory=0)
    graph.add_edge("ps", "s1")
    graph.add_edges_from((name, "s2" if rank < workers // 2 else "s3") for rank, name in enumerate(names))
    parts = partition([("weights", values * VALUE_BYTES)], SLOT_BYTES)
    return schedule(from_graph(graph, "ps", names, parts), seed)


@dataclass(frozen=True, slots=True)
class Log:
    """``updates`` of all epochs; ``publications`` in all, and how many of them put an estimate right."""

    updates: tuple[Update, ...]
    publications: int
    corrections: int

    @property
    def seconds(self) -> float:
        """All epochs."""
        return sum(update.length for update in self.updates)

    @property
    def gradients(self) -> int:
        """Gradients that counted whole."""
        return sum(len(update.inside) for update in self.updates)

    @property
    def staleness(self) -> int:
        """The greatest, in epochs."""
        return max((age for update in self.updates for age in update.staleness), default=0)


class Training:
    """``needed(worker)``: seconds that a worker's next gradient takes, asked whenever it gets the model; ``delay()``: of each
    message, by default none has any.
    """

    def __init__(
        self,
        planned: Schedule,
        task: Task,
        choose: Choose,
        needed: Callable[[int], float],
        delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        submodels = planned.instance.submodels
        switches = len(planned.instance.switches)
        self._task, self._needed, self._delay, self._nodes = task, needed, delay, planned.nodes
        self._bounds = [
            (its.start // VALUE_BYTES, (its.start + its.size) // VALUE_BYTES) for its in submodels
        ]
        self.server = Server(planned.nodes, switches, choose)
        self.gatherers = [
            Gatherer(
                node,
                {
                    g: high - low
                    for g, (low, high) in enumerate(self._bounds)
                    if node == switches or planned.opened[g, node]
                },
            )
            for node in range(switches + 1)
        ]
        self.now = 0.0
        #: (when, order, what)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._serial = [0] * planned.nodes.shape[1]
        self._updates: list[Update] = []
        self._publications = self._corrections = 0

    def run(self, epochs: int) -> Log:
        """Train for so many epochs. Raises ``RuntimeError`` if nothing happens any more before that."""
        for worker in range(len(self._serial)):
            self._give(worker)
        self._publish(self.server.begin(0.0))
        while len(self._updates) < epochs:
            if not self._due:
                raise RuntimeError(f"epoch {self.server.epoch} does not end: everybody waits for somebody")
            self.now, _, act = heapq.heappop(self._due)
            act()
        return Log(tuple(self._updates), self._publications, self._corrections)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (self.now + seconds, self._order, act))

    def _give(self, worker: int) -> None:
        """A worker has the model."""
        self._task.begin(worker)
        self._serial[worker] += 1
        self._after(self._needed(worker), partial(self._send, worker))

    def _send(self, worker: int) -> None:
        """A worker's gradient is there."""
        gradient = np.rint(self._task.gradient(worker) * FACTOR).astype(np.int32)
        for g, (low, high) in enumerate(self._bounds):
            one = Contribution(worker, self._serial[worker], g, gradient[low:high])
            node = self.gatherers[self._nodes[g, worker]]
            self._after(self._delay(), partial(self._contribute, node, one))
        self._after(self._delay(), partial(self._sent, worker))

    def _contribute(self, node: Gatherer, one: Contribution) -> None:
        self._forward(node.contribute(one))

    def _publish(self, published: Publication) -> None:
        self._publications += 1
        for node in self.gatherers:
            needs = dict(enumerate(published.needs[:, node.node].tolist()))
            self._after(self._delay(), partial(self._told, node, published.epoch, needs, published.revision))

    def _told(self, node: Gatherer, epoch: int, needs: dict[int, int], revision: int) -> None:
        self._forward(node.publish(epoch, needs, revision))

    def _forward(self, sums: Iterable[Gathered]) -> None:
        for one in sums:
            self._after(self._delay(), partial(self._receive, one))

    def _sent(self, worker: int) -> None:
        """The PS hears that a worker has sent its gradient."""
        self._correct(self.server.sent(worker, self.now))
        self._finish(self.server.close(self.now))

    def _receive(self, one: Gathered) -> None:
        """The PS hears from a node."""
        answer = self.server.receive(one, self.now)
        if isinstance(answer, Publication):
            self._correct(answer)
        else:
            self._finish(answer)

    def _correct(self, published: Publication | None) -> None:
        if published is not None:
            self._corrections += 1
            self._publish(published)

    def _finish(self, update: Update | None) -> None:
        """Scale each sub-model by the gradients it is of; those who took part begin anew."""
        if update is None:
            return
        counts = update.counts.tolist()
        means = [
            total if count else np.zeros(high - low)
            for total, count, (low, high) in zip(update.sums, counts, self._bounds, strict=True)
        ]
        scaled = [mean / max(1, count) for mean, count in zip(means, counts, strict=True)]
        self._task.apply(self.now, np.concatenate(scaled) / FACTOR)
        self._updates.append(update)
        for worker in update.inside:
            self._after(self._delay(), partial(self._give, worker))
        self._publish(self.server.begin(self.now))


#: Samples of one gradient (GOAT, section VII-B).
BATCH = 64


class Regression:
    """A softmax regression on a seeded mixture of Gaussians; every worker has its own share of the samples."""

    CLASSES, FEATURES, SAMPLES = 10, 32, 1024

    def __init__(self, workers: int, rate: float = 0.5) -> None:
        rng = np.random.default_rng(7)
        centres = rng.standard_normal((self.CLASSES, self.FEATURES))
        self.labels = rng.integers(self.CLASSES, size=self.SAMPLES)
        self.samples = centres[self.labels] + 1.5 * rng.standard_normal((self.SAMPLES, self.FEATURES))
        self.weights = np.zeros((self.FEATURES, self.CLASSES))
        self.rate = rate
        self.shares = np.array_split(np.arange(self.SAMPLES), workers)
        self._rng = np.random.default_rng(8)
        #: the gradient each worker is about to send, from the weights it was given
        self._pending: dict[int, Any] = {}
        self.losses: list[tuple[float, float]] = []

    def _chances(self, samples: Any) -> Any:
        scores = samples @ self.weights
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return scores / scores.sum(axis=1, keepdims=True)

    def begin(self, worker: int) -> None:
        """A worker gets the weights and draws its batch."""
        rows = self._rng.choice(self.shares[worker], BATCH)
        error = self._chances(self.samples[rows])
        error[np.arange(BATCH), self.labels[rows]] -= 1.0
        self._pending[worker] = (self.samples[rows].T @ error / BATCH).ravel()

    def gradient(self, worker: int) -> Any:
        """What a worker sends, float64[FEATURES * CLASSES]."""
        return self._pending[worker]

    def step(self, now: float, workers: tuple[int, ...]) -> None:
        """Take the mean of these workers' gradients."""
        self.apply(now, np.mean([self._pending[worker] for worker in workers], axis=0))

    def apply(self, now: float, mean: Any) -> None:
        """One step along a mean gradient."""
        self.weights -= self.rate * mean.reshape(self.weights.shape)
        self.losses.append((now, self.loss()))

    def loss(self) -> float:
        """Mean cross entropy over all samples."""
        chances = self._chances(self.samples)[np.arange(self.SAMPLES), self.labels]
        return float(-np.log(chances).mean())


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
