"""KRGS from end to end: relax, round, repair, polish; and the schedule as the controller publishes it.

Every stage is kept in the result: the fractional solution, the best rounding with the overshoot it had, and the cost
after each step. Addresses are published: a fragment of a sub-model lives at ``base + fragment`` on its switch, since
the paper's hash of <node, sub-model, fragment> would let 37 % of the fragments collide at load 1.

*Rounding* is the randomised one of Algorithm 1, with the probabilities of its last step made whole. It may exceed a switch's memory by the factor the paper bounds (4 under its assumption). A register file does not
stretch: sub-models leave an overfull switch, the cheapest to move first. The polish then only takes steps that lower
the cost and keep memory: nearest open node for every worker, close what does not pay, open where there is room.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from inanet.planning.goat import column_generation as columns
from inanet.planning.goat import relaxation
from inanet.planning.goat.instance import F64, I64, Bools, Instance
from inanet.planning.goat.relaxation import Relaxed, nearest

#: Bytes that a sum of float64 footprints may be off.
_SLACK = 1e-3


def distances_to_open(instance: Instance, opened: Bools) -> F64:
    """float64[G, C]: links from each class of workers to the nearest node that has the sub-model, PS included."""
    its = instance.classes
    far = np.where(opened[:, None, :], its.to_switch[None], np.inf).min(axis=2, initial=np.inf)
    return np.asarray(np.minimum(far, its.to_ps[None, :]), np.float64)


def repair(instance: Instance, opened: Bools) -> Bools:
    """A subset of ``opened`` that fits every register file: those that cost least per byte when closed go first."""
    opened = opened.copy()
    for s in range(len(instance.switches)):
        while instance.load(opened)[s] > instance.memory[s] + _SLACK:
            (held,) = np.nonzero(opened[:, s])
            penalty = _closing(instance, opened, held, s) / instance.footprints[held]
            opened[held[int(penalty.argmin())], s] = False
    return opened


def _closing(instance: Instance, opened: Bools, held: np.ndarray, s: int) -> F64:
    """Byte-links that closing switch ``s`` adds, for each sub-model of ``held``; negative: it saves."""
    now = opened[held]
    then = now.copy()
    then[:, s] = False
    further = distances_to_open(instance, then) - distances_to_open(instance, now)
    return np.asarray(
        instance.sizes[held] * (further @ instance.classes.count - instance.down[s]), np.float64
    )


def _opening(instance: Instance, opened: Bools, rows: np.ndarray) -> F64:
    """Byte-links saved by opening each switch, float64[len(rows), S]."""
    its = instance.classes
    current = distances_to_open(instance, opened[rows])
    saved = np.maximum(current[:, :, None] - its.to_switch[None], 0.0)
    gain = np.einsum("c,gcs->gs", its.count, saved) - instance.down[None, :]
    return np.asarray(instance.sizes[rows, None] * gain, np.float64)


def polish(instance: Instance, opened: Bools) -> Bools:
    """Close what does not pay for its sum to the PS, then open the most useful per byte while there is room."""
    opened = opened.copy()
    if not len(instance.switches):
        return opened
    for s in range(len(instance.switches)):
        (held,) = np.nonzero(opened[:, s])
        if len(held):
            opened[held[_closing(instance, opened, held, s) < 0], s] = False
    room = instance.memory - instance.load(opened)
    gain = _opening(instance, opened, np.arange(len(instance.sizes)))
    while True:
        useful = (gain > 0) & ~opened & (instance.footprints[:, None] <= room[None, :] + _SLACK)
        if not useful.any():
            return opened
        worth = np.where(useful, gain / instance.footprints[:, None], -np.inf)
        g, s = divmod(int(worth.argmax()), worth.shape[1])
        opened[g, s] = True
        room[s] -= instance.footprints[g]
        gain[g] = _opening(instance, opened, np.array([g]))[0]


#: A solver's 0.9999999 is a one.
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Rounded:
    """``opened`` bool[G, S], ``nodes`` int64[G, W] (S: the PS), ``required`` int64[G]: k(g), and the knapsacks of every
    sub-model: ``knapsack`` int64[G, S], -1 where x is 0.
    """

    opened: Bools
    nodes: I64
    required: I64
    knapsack: I64


def required_switches(x: F64) -> I64:
    """k(g) = floor(sum_s x), int64[G]. 0: everything of this sub-model goes to the PS."""
    return np.asarray(np.floor(x.sum(axis=1) + TOLERANCE), np.int64)


def knapsacks(x: F64, count: int) -> I64:
    """Spread the entries of one x float64[S] over ``count`` knapsacks so that the fullest holds as little as possible.

    Largest first into the emptiest: at most 4/3 of the optimum, and every knapsack of a sum of at least ``count``
    holds more than 1/2 (Lemma 3), which is what the paper's bound needs. Returns int64[S]; -1 for entries of 0.
    """
    where = np.full(len(x), -1, np.int64)
    if count == 0:
        return where
    held = np.zeros(count)
    for entry in np.argsort(-x, kind="stable").tolist():
        if x[entry] <= TOLERANCE:
            break
        emptiest = int(held.argmin())
        where[entry] = emptiest
        held[emptiest] += x[entry]
    return where


def choice(y: F64, x: F64, opened: Bools) -> F64:
    """Probabilities of one sub-model's nodes for each class of workers, float64[C, S + 1], the PS last.

    y / x for the switches that were opened. Their sum may exceed 1 (x = .6 .6 .4 .4, y = .6 .4 0 0 leaves the PS
    -0.67): then the PS has none and the others are scaled down (rounded probabilities).
    """
    share = np.where(opened[None, :], y / np.where(x > TOLERANCE, x, 1.0)[None, :], 0.0)
    total = share.sum(axis=1, keepdims=True)
    share = share / np.maximum(total, 1.0)
    rest = np.clip(1.0 - share.sum(axis=1, keepdims=True), 0.0, 1.0)
    return np.concatenate([share, rest], axis=1)


def round_once(instance: Instance, relaxed: Relaxed, rng: np.random.Generator) -> Rounded:
    """One run of steps 2 and 3 of Algorithm 1. Memory may be exceeded; nothing is repaired here."""
    submodels, switches = relaxed.x.shape
    required = required_switches(relaxed.x)
    opened = np.zeros((submodels, switches), bool)
    sacks = np.full((submodels, switches), -1, np.int64)
    nodes = np.full((submodels, len(instance.workers)), switches, np.int64)
    for g in range(submodels):
        x = relaxed.x[g]
        sacks[g] = knapsacks(x, int(required[g]))
        for sack in range(int(required[g])):
            (inside,) = np.nonzero(sacks[g] == sack)
            opened[g, rng.choice(inside, p=x[inside] / x[inside].sum())] = True
        if not opened[g].any():
            continue
        ends = choice(relaxed.y[g], x, opened[g]).cumsum(axis=1)[instance.classes.index]
        draw = rng.random(len(instance.workers))
        nodes[g] = np.minimum((draw[:, None] >= ends).sum(axis=1), switches)
    # a switch that no worker chose sends no sum
    used = np.zeros((submodels, switches + 1), bool)
    used[np.arange(submodels)[:, None], nodes] = True
    return Rounded(opened & used[:, :switches], nodes, required, sacks)


Method = Literal["auto", "plain", "columns"]

#: Variables up to which ``auto`` solves the plain program: it takes a second or so there, and seven times as many take
#: a minute.
PLAIN_VARIABLES = 30_000


class DoesNotFit(ValueError):
    """A schedule that some register file cannot hold; the message names the switch."""


@dataclass(frozen=True)
class Schedule:
    """Which switches hold which sub-model, and where every worker sends it.

    ``opened`` bool[G, S]; ``nodes`` int64[G, W], S for the PS; ``cost`` byte-links. ``rounded_cost`` and ``overshoot``
    (largest load over memory) are the best rounding's before its repair, ``repaired_cost`` after it; ``seconds`` by
    stage.
    """

    instance: Instance
    relaxed: Relaxed
    rounded: Rounded
    opened: Bools
    nodes: I64
    cost: float
    rounded_cost: float
    repaired_cost: float
    overshoot: float
    seconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Cost over the bound that no schedule can go below."""
        return self.cost / self.relaxed.bound

    def sources(self) -> I64:
        """int64[G, S + 1]: how many workers send each sub-model to each node, the PS last."""
        count = len(self.instance.switches) + 1
        return np.stack([np.bincount(row, minlength=count) for row in self.nodes]).astype(np.int64)

    def ps_bytes(self) -> tuple[float, float]:
        """Bytes that reach the PS in one round: all, and those that nothing has aggregated."""
        direct = float(self.instance.sizes @ self.sources()[:, -1])
        return direct + float(self.instance.sizes @ self.opened.sum(axis=1)), direct

    def bases(self) -> dict[tuple[str, int], int]:
        """First slot of every sub-model on every switch that holds it, by (switch, sub-model's index).

        Raises :class:`DoesNotFit` if a register file is too small, which a repaired schedule never is.
        """
        addresses: dict[tuple[str, int], int] = {}
        for s, name in enumerate(self.instance.switches):
            slots = int(self.instance.memory[s]) // self.instance.slot_bytes
            used = 0
            for g in np.nonzero(self.opened[:, s])[0].tolist():
                addresses[name, g] = used
                used += self.instance.submodels[g].fragments
            if used > slots:
                raise DoesNotFit(f"switch {name!r} has {slots} slots; its sub-models need {used}")
        return addresses

    def explain(self) -> list[str]:
        """Lines for people: cost of every stage, then what each switch holds and for how many workers."""
        direct = self.instance.without_aggregation()
        total, alone = self.ps_bytes()
        lines = [
            f"{len(self.instance.submodels)} sub-models, {self.instance.total / 1e6:.1f} MB; "
            f"{len(self.instance.workers)} workers; {len(self.instance.switches)} programmable switches",
            f"to the PS without aggregation   {direct / 1e9:10.4f} GB-links",
            f"bound of the relaxation         {self.relaxed.bound / 1e9:10.4f} GB-links ({self.relaxed.method})",
            f"rounded                         {self.rounded_cost / 1e9:10.4f} GB-links, "
            f"memory up to {self.overshoot:.3f} of what there is",
            f"repaired                        {self.repaired_cost / 1e9:10.4f} GB-links",
            f"polished                        {self.cost / 1e9:10.4f} GB-links, {self.ratio:.4f} of the bound",
            f"bytes at the PS                 {total / 1e9:10.4f} GB, of which not aggregated {alone / 1e9:.4f} GB",
        ]
        load, sources = self.instance.load(self.opened), self.sources()
        for s, name in enumerate(self.instance.switches):
            held = np.nonzero(self.opened[:, s])[0]
            what = ", ".join(f"{self.instance.submodels[g].name} x{sources[g, s]}" for g in held.tolist())
            lines.append(f"{name}: {load[s] / self.instance.memory[s]:.1%} of memory: {what or 'nothing'}")
        return lines


def relax(instance: Instance, method: Method = "auto", *, seconds: float = 60.0) -> Relaxed:
    """The fractional schedule. ``auto``: the plain program up to :data:`PLAIN_VARIABLES`, else column generation.

    Raises :class:`~inanet.planning.goat.relaxation.NoSolution` and ``ImportError``.
    """
    if method == "auto":
        its = instance.classes
        pairs = int((its.to_switch < its.to_ps[:, None]).sum())
        size = len(instance.sizes) * (pairs + len(instance.switches))
        method = "plain" if size <= PLAIN_VARIABLES else "columns"
    if method == "plain":
        return relaxation.solve(instance, time_limit=seconds)
    return columns.solve(instance, seconds=seconds)


def schedule(
    instance: Instance,
    seed: int,
    *,
    method: Method = "auto",
    roundings: int = 4,
    spare: float = 0.0,
    seconds: float = 60.0,
) -> Schedule:
    """The best of ``roundings`` seeded roundings of one relaxation, each repaired and polished.

    GINA minimises bytes times links: a worker that is nearer to the PS than to a switch sends to the PS, however busy that is.
    With ``spare`` the PS counts as so many links further away from workers, for the decisions and not for the costs;
    the bound stays GINA's. The relaxation may take ``seconds``.

    Raises ``ValueError`` for fewer than one rounding, otherwise as :func:`relax` does. A network without programmable
    switches gets a schedule that sends everything to the PS.
    """
    if roundings < 1:
        raise ValueError(f"{roundings} roundings; at least one is needed")
    relaxed = relax(instance, method, seconds=seconds) if instance.switches else _nothing(instance)
    if spare and instance.switches:
        weighed = replace(instance, to_ps=instance.to_ps + spare)
        return _spared(
            instance, schedule(weighed, seed, method=method, roundings=roundings, seconds=seconds), relaxed
        )
    began = time.perf_counter()
    rng = np.random.default_rng(seed)
    best: Schedule | None = None
    for _ in range(roundings):
        made = _finish(instance, relaxed, round_once(instance, relaxed, rng))
        if best is None or made.cost < best.cost:
            best = made
    assert best is not None
    spent = {"relax": relaxed.seconds, "round": time.perf_counter() - began}
    return Schedule(**{**vars(best), "seconds": spent})


def _spared(instance: Instance, made: Schedule, relaxed: Relaxed) -> Schedule:
    """A schedule for other distances to the PS, with its costs in the real ones and ``relaxed``'s bound."""
    fits = repair(instance, made.rounded.opened)
    its, x, y = instance.classes, made.relaxed.x, made.relaxed.y
    links = its.count[:, None] * (its.to_switch - its.to_ps[:, None])
    value = float(instance.sizes @ ((y * links).sum(axis=(1, 2)) + x @ instance.down))
    return replace(
        made,
        instance=instance,
        relaxed=replace(made.relaxed, value=instance.without_aggregation() + value, bound=relaxed.bound),
        cost=instance.cost(made.opened, made.nodes),
        rounded_cost=instance.cost(made.rounded.opened, made.rounded.nodes),
        repaired_cost=instance.cost(fits, nearest(instance, fits)),
        seconds={**made.seconds, "bound": relaxed.seconds},
    )


def _nothing(instance: Instance) -> Relaxed:
    cost = instance.without_aggregation()
    groups = len(instance.classes.count)
    return Relaxed(
        np.zeros((len(instance.sizes), 0)),
        np.zeros((len(instance.sizes), groups, 0)),
        cost,
        cost,
        "none",
        0,
        0.0,
    )


def _finish(instance: Instance, relaxed: Relaxed, rounded: Rounded) -> Schedule:
    load = instance.load(rounded.opened)
    overshoot = float((load / instance.memory).max(initial=0.0))
    fits = repair(instance, rounded.opened)
    opened = polish(instance, fits)
    nodes = nearest(instance, opened)
    # a switch that no worker is nearest to would send an empty sum
    used = np.zeros((len(opened), len(instance.switches) + 1), bool)
    used[np.arange(len(opened))[:, None], nodes] = True
    opened = opened & used[:, :-1]
    return Schedule(
        instance,
        relaxed,
        rounded,
        opened,
        nodes,
        instance.cost(opened, nodes),
        instance.cost(rounded.opened, rounded.nodes),
        instance.cost(fits, nearest(instance, fits)),
        overshoot,
        {},
    )
