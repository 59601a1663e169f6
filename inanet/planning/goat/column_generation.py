"""The relaxation by column generation, for instances on which the plain program grows too fast.

All sub-models face the same distances: the program of one is the others' times its size. So the G blocks of the plain
program share one polytope P of placements (x, y) per byte, and its optimum is a mixture of P's corners (Dantzig-Wolfe):

    minimise sum_A l_A c(A)   subject to   sum_A l_A = 1,   M sum_A l_A x_A(s) <= B(s) for every switch,

with M the register bytes of the whole gradient. The master program has one row per switch; new corners come from a
program over one byte (classes x switches variables instead of sub-models x classes x switches). The gradient is then laid
along the mixture: a sub-model that lies within one corner takes it whole, one on a border takes both parts. The result
is a fractional schedule like the plain program's, with at most one more torn sub-model than there are corners.

Each round proves a bound, so that an early stop says what it may have lost. The bound is exact when register bytes are
proportional to bytes sent; else M is taken with the least register bytes per byte sent, which keeps it a bound.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.planning.extras import plan_extra
from inanet.planning.goat.instance import F64, Instance
from inanet.planning.goat.relaxation import NoSolution, Relaxed, constraints, objective, unpack


@dataclass(frozen=True, slots=True)
class Corner:
    """One way to place a byte: ``x`` float64[S], ``y`` float64[C, S], ``cost`` links (negative: below the PS's)."""

    x: F64
    y: F64
    cost: float


class _Pricing:
    """The cheapest corner at given prices of register memory."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        matrix, right, self.pairs = constraints(instance, 1, np.zeros(1))
        rows = len(right) - len(instance.switches)
        self.matrix, self.right = matrix[:rows], right[:rows]
        self.costs = objective(instance, np.ones(1), self.pairs)
        self._optimize = plan_extra("scipy.optimize", "the GOAT scheduler")

    def cost(self, x: F64, y: F64) -> float:
        """Links of a corner, relative to the PS."""
        sent = y[self.pairs.classes, self.pairs.switches] @ self.pairs.gain
        return float(sent + x @ self.instance.down)

    def greedy(self, prices: F64) -> Corner:
        """Open what saves most while it saves anything: fast, and often the cheapest."""
        its, count = self.instance.classes, len(self.instance.switches)
        current, opened = its.to_ps.copy(), np.zeros(count, bool)
        price = self.instance.down + prices
        while True:
            gain = its.count @ np.maximum(current[:, None] - its.to_switch, 0.0) - price
            gain[opened] = -np.inf
            best = int(gain.argmax())
            if gain[best] <= 1e-9:
                break
            opened[best] = True
            current = np.minimum(current, its.to_switch[:, best])
        y = np.zeros(its.to_switch.shape)
        if opened.any():
            far = np.where(opened[None, :], its.to_switch, np.inf)
            chosen = far.argmin(axis=1)
            nearer = far.min(axis=1) < its.to_ps
            y[np.nonzero(nearer)[0], chosen[nearer]] = 1.0
        x = y.max(axis=0, initial=0.0)
        return Corner(x, y, self.cost(x, y))

    def exact(self, prices: F64) -> Corner:
        """By the program over one byte. Raises :class:`~inanet.planning.goat.relaxation.NoSolution`."""
        costs = self.costs.copy()
        costs[: len(prices)] += prices
        found = self._optimize.linprog(
            costs, A_ub=self.matrix, b_ub=self.right, bounds=(0.0, 1.0), method="highs-ds"
        )
        if found.status != 0:
            raise NoSolution(f"pricing a corner failed: {found.message}")
        x, y = unpack(self.instance, 1, self.pairs, np.asarray(found.x))
        return Corner(x[0], y[0], self.cost(x[0], y[0]))


def _master(optimize: Any, corners: list[Corner], room: F64) -> tuple[F64, float, float, F64]:
    """Shares of the corners, their cost, the dual of sum = 1, and prices of memory float64[S], not negative."""
    x = np.array([corner.x for corner in corners]).T
    cost = np.array([corner.cost for corner in corners])
    found = optimize.linprog(
        cost, A_ub=x, b_ub=room, A_eq=np.ones((1, len(corners))), b_eq=[1.0], method="highs-ds"
    )
    if found.status != 0:
        raise NoSolution(f"the master program of {len(corners)} corners failed: {found.message}")
    prices = np.maximum(-np.asarray(found.ineqlin.marginals), 0.0)
    return np.asarray(found.x), float(found.fun), float(found.eqlin.marginals[0]), prices


def solve(instance: Instance, *, gap: float = 1e-6, rounds: int = 2000, seconds: float = 60.0) -> Relaxed:
    """The relaxation, to a relative ``gap`` of its bound or until ``rounds`` or ``seconds`` have passed.

    Raises :class:`~inanet.planning.goat.relaxation.NoSolution`, and ``ImportError`` without scipy.
    """
    optimize = plan_extra("scipy.optimize", "the GOAT scheduler")
    began = time.perf_counter()
    pricing = _Pricing(instance)
    count = len(instance.switches)
    per_byte = instance.footprints / instance.sizes
    room = instance.memory / (instance.total * float(per_byte.min()))
    corners = [pricing.greedy(np.full(count, np.inf))]
    bound = -np.inf
    base = float(instance.classes.to_ps @ instance.classes.count)
    by_heuristic = True
    while True:
        shares, value, level, prices = _master(optimize, corners, room)
        corner = pricing.greedy(prices) if by_heuristic else pricing.exact(prices)
        reduced = corner.cost + float(corner.x @ prices) - level
        if by_heuristic and reduced > -1e-7 * base:
            by_heuristic = False
            continue
        if not by_heuristic:
            bound = max(bound, value + min(reduced, 0.0))
        done = value - bound <= gap * (base + value) or len(corners) >= rounds
        if done or time.perf_counter() - began > seconds:
            break
        corners.append(corner)
        by_heuristic = True
    if bound == -np.inf:
        last = pricing.exact(prices)
        bound = value + min(last.cost + float(last.x @ prices) - level, 0.0)
    x, y = _lay_out(instance, corners, shares)
    return Relaxed(
        x,
        y,
        instance.total * (base + value),
        instance.total * (base + bound),
        "columns",
        len(pricing.costs),
        time.perf_counter() - began,
    )


def _lay_out(instance: Instance, corners: list[Corner], shares: F64) -> tuple[F64, F64]:
    """Lay the sub-models, one after the other, along the corners' shares; ``x`` float64[G, S], ``y`` float64[G, C, S]."""
    used = np.nonzero(shares > 1e-12)[0]
    ends = np.cumsum(shares[used]) / shares[used].sum()
    starts = ends - shares[used] / shares[used].sum()
    high = np.cumsum(instance.sizes) / instance.total
    low = high - instance.sizes / instance.total
    overlap = np.minimum(high[:, None], ends[None, :]) - np.maximum(low[:, None], starts[None, :])
    part = np.maximum(overlap, 0.0)
    part /= part.sum(axis=1, keepdims=True)
    x = part @ np.array([corners[index].x for index in used])
    y = np.einsum("ga,acs->gcs", part, np.array([corners[index].y for index in used]))
    return np.clip(x, 0.0, 1.0), np.minimum(y, x[:, None, :])
