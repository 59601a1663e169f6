"""KRGS' randomized rounding (Algorithm 1), with the probabilities of its last step made whole."""

from dataclasses import dataclass

import numpy as np

from inanet.planning.goat.instance import F64, I64, Bools, Instance
from inanet.planning.goat.relaxation import Relaxed

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
