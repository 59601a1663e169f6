"""GINA as a sparse linear program, and as the exact program for instances small enough.

Minimise  sum_g b(g) (sum_w sum_{s in S+PS} y D_w(s) + sum_s x D_s(PS))
subject to  sum_s y = 1,  y <= x,  sum_g x f(g) <= B(s),  0 <= x, y <= 1.

Eq. (1) of the paper prints y >= x; with it nothing would tie a worker to a switch that holds the sub-model. Maximising
its Eq. (3) instead is not equivalent: it forgets the detour that a worker takes to the switch.

Two exact reductions keep the program small. Workers with equal distances are one class (:class:`Classes`). The PS needs
no variables: y(PS) = 1 - sum of the others, so every y(s) is worth its distance *less than the PS's*, and a switch that
is not nearer than the PS is never used by that class.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from inanet.planning.extras import plan_extra
from inanet.planning.goat.instance import F64, I64, Instance


class NoSolution(RuntimeError):
    """The solver gave up; the message has its reason."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A fractional schedule.

    ``x`` float64[G, S] and ``y`` float64[G, C, S] (classes of workers; the PS has what is missing to 1), ``value`` its
    byte-links, ``bound`` byte-links that no schedule can go below, ``method`` how it was found, ``seconds`` how long that
    took.
    """

    x: F64
    y: F64
    value: float
    bound: float
    method: str
    variables: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The (class, switch) pairs worth having: int64[P] each, and ``gain`` float64[P], links saved per byte, negative."""

    classes: I64
    switches: I64
    gain: F64


def _pairs(instance: Instance) -> _Pairs:
    its = instance.classes
    gain = its.to_switch - its.to_ps[:, None]
    classes, switches = np.nonzero(gain < 0)
    return _Pairs(
        classes, switches, np.asarray(its.count[classes] * gain[classes, switches], dtype=np.float64)
    )


def constraints(instance: Instance, submodels: int, footprints: F64) -> tuple[Any, F64, _Pairs]:
    """``A, b`` of ``A v <= b`` with v = x[g, s] row by row, then y[g, pair] row by row.

    Rows: y - x <= 0 for every (g, pair); sum over switches of y <= 1 for every (g, class); memory for every switch.
    """
    sparse = plan_extra("scipy.sparse", "the GOAT scheduler")
    pairs, count = _pairs(instance), len(instance.switches)
    classes, p = len(instance.classes.count), len(pairs.gain)
    ones = np.ones(p)
    each = sparse.identity(submodels, format="csr")
    opened = sparse.csr_matrix((-ones, (np.arange(p), pairs.switches)), (p, count))
    chosen = sparse.csr_matrix((ones, (pairs.classes, np.arange(p))), (classes, p))
    memory = sparse.kron(sparse.csr_matrix(footprints[None, :]), sparse.identity(count), format="csr")
    matrix = sparse.bmat(
        [
            [sparse.kron(each, opened), sparse.identity(submodels * p)],
            [None, sparse.kron(each, chosen)],
            [memory, None],
        ],
        format="csr",
    )
    right = np.concatenate([np.zeros(submodels * p), np.ones(submodels * classes), instance.memory])
    return matrix, right, pairs


def objective(instance: Instance, sizes: F64, pairs: _Pairs) -> F64:
    """Byte-links of every variable, relative to sending everything to the PS."""
    return np.concatenate(
        [(sizes[:, None] * instance.down[None, :]).ravel(), (sizes[:, None] * pairs.gain[None, :]).ravel()]
    )


def unpack(instance: Instance, submodels: int, pairs: _Pairs, values: F64) -> tuple[F64, F64]:
    """``x`` float64[G, S] and ``y`` float64[G, C, S] from a vector of variables."""
    count = len(instance.switches)
    x = np.clip(values[: submodels * count].reshape(submodels, count), 0.0, 1.0)
    y = np.zeros((submodels, len(instance.classes.count), count))
    y[:, pairs.classes, pairs.switches] = np.clip(
        values[submodels * count :].reshape(submodels, -1), 0.0, 1.0
    )
    return x, np.minimum(y, x[:, None, :])


def solve(instance: Instance, *, time_limit: float | None = None) -> Relaxed:
    """The relaxation over all sub-models, by HiGHS' dual simplex: a vertex, whose x are mostly whole numbers.

    Raises :class:`NoSolution`, for one past ``time_limit`` (seconds) as well, and ``ImportError`` without scipy.
    """
    optimize = plan_extra("scipy.optimize", "the GOAT scheduler")
    began = time.perf_counter()
    submodels = len(instance.sizes)
    matrix, right, pairs = constraints(instance, submodels, instance.footprints)
    costs = objective(instance, instance.sizes, pairs)
    # bytes and links of very different sizes are bad for the solver's tolerances
    scale = instance.total / submodels
    options = {} if time_limit is None else {"time_limit": time_limit}
    found = optimize.linprog(
        costs / scale, A_ub=matrix, b_ub=right, bounds=(0.0, 1.0), method="highs-ds", options=options
    )
    if found.status != 0:
        raise NoSolution(f"the relaxation of {len(costs)} variables was not solved: {found.message}")
    x, y = unpack(instance, submodels, pairs, np.asarray(found.x))
    value = instance.without_aggregation() + float(found.fun) * scale
    return Relaxed(x, y, value, value, "plain", len(costs), time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Exact:
    """An optimal schedule: ``opened`` bool[G, S], ``nodes`` int64[G, W] (S: the PS), ``cost`` byte-links, ``gap`` the
    solver's relative gap.
    """

    opened: Any
    nodes: I64
    cost: float
    gap: float


def solve_exactly(instance: Instance, *, time_limit: float = 60.0, gap: float = 1e-6) -> Exact:
    """The yardstick: whole numbers for x. Given whole x, memory says nothing about y, and whole y are optimal.

    Raises :class:`NoSolution` when ``time_limit`` (seconds) passes first, and ``ImportError`` without scipy.
    """
    optimize = plan_extra("scipy.optimize", "the exact GOAT scheduler")
    submodels, count = len(instance.sizes), len(instance.switches)
    matrix, right, pairs = constraints(instance, submodels, instance.footprints)
    costs = objective(instance, instance.sizes, pairs)
    scale = instance.total / submodels
    whole = np.zeros(len(costs))
    whole[: submodels * count] = 1
    found = optimize.milp(
        costs / scale,
        constraints=optimize.LinearConstraint(matrix, -np.inf, right),
        bounds=optimize.Bounds(0.0, 1.0),
        integrality=whole,
        options={"time_limit": time_limit, "mip_rel_gap": gap},
    )
    if found.status != 0:
        raise NoSolution(f"the exact program of {len(costs)} variables was not solved: {found.message}")
    opened = np.asarray(found.x)[: submodels * count].reshape(submodels, count) > 0.5
    nodes = nearest(instance, opened)
    return Exact(opened, nodes, instance.cost(opened, nodes), float(found.mip_gap))


def nearest(instance: Instance, opened: Any) -> I64:
    """int64[G, W]: the nearest node that has a worker's sub-model, S for the PS. The PS loses ties: an equally near switch
    costs the network the same and spares the PS a packet.
    """
    far = np.where(opened[:, None, :], instance.to_switch[None], np.inf)
    ps = np.broadcast_to(instance.to_ps[None, :, None], (*far.shape[:2], 1))
    return np.asarray(np.concatenate([far, ps], axis=2).argmin(axis=2), np.int64)
