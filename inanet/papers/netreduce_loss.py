"""NetReduce's Fig. 12: the loss of a training run under NetReduce beside that under ring all-reduce.

The classifier of ``ina demo`` learns scikit-learn's handwritten digits, once for every way of summing: from the same weights,
over the same batches, data-parallel on four hosts. Gradients go through queue pairs, and under NetReduce through the switch's
program, packet by packet in virtual time; nothing but the order and the rounding of sums differs.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from inanet.data.digits import Digits, fetch
from inanet.papers.claims import Claim
from inanet.papers.outcome import Outcome, Panel, Table
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.netreduce.ring import Member, Mode
from inanet.service.exits import Exit, Failure, extra
from inanet.testing.netreduce import RingFabric
from inanet.training import classifier as model
from inanet.training.descent import Descent, Recipe, batches

HOSTS, STEPS, SEED = 4, 200, 1
#: per cent; the paper: usually below 0.2, for ResNet50 occasionally 1.5
USUAL, OCCASIONAL = 0.2, 1.5
#: steps that a row of the table stands for
_EVERY = 20
#: name: mode of the ring, and whether floats are summed as float32 as the paper's FPGA did, or under block exponents
_WAYS: dict[str, tuple[Mode, bool]] = {
    "ring": ("ring", True),
    "netreduce": ("switch", True),
    "netreduce-int32": ("switch", False),
}


class DataMissing(Failure):
    """The digits come with scikit-learn."""

    code = Exit.MISSING


@cache
def _digits() -> Digits:
    try:
        return fetch()
    except ImportError:
        raise DataMissing(f"scikit-learn, whose digits it trains on, is missing: {extra('demo')}") from None


def train(way: str, steps: int = STEPS, seed: int = SEED) -> tuple[NDArray[np.float64], float]:
    """The loss of every step's batch before the step, and the accuracy on held-out images after the last.

    Raises :class:`DataMissing`, and ``ArithmeticError`` if two hosts end with different weights.
    """
    mode, raw = _WAYS[way]
    digits, recipe = _digits(), Recipe(HOSTS, steps, seed)
    fabric = RingFabric(HOSTS, serving=mode != "ring")
    workers = fabric.add_ring([Member(1, 1, rank, HOSTS, HOSTS, mode=mode) for rank in range(HOSTS)], raw=raw)
    hosts = [Descent(recipe) for _ in range(HOSTS)]
    count = len(hosts[0].weights)
    spec = TensorSpec("gradient", "f32", (count,), "mean", ExponentMode.PROLOGUE)
    losses = np.zeros(steps)
    for step, parts in enumerate(batches(recipe, len(digits.images))):
        found = [
            model.gradient(host.weights, recipe.units, digits.images[part], digits.labels[part])
            for host, part in zip(hosts, parts, strict=True)
        ]
        fabric.all_reduce(workers, spec, [gradient for _, gradient in found], step + 1)
        for host, (_, gradient) in zip(hosts, found, strict=True):
            host.step(gradient)
        losses[step] = np.mean([loss for loss, _ in found])
    weights = hosts[0].weights
    if any((host.weights != weights).any() for host in hosts):
        raise ArithmeticError(f"{way}: hosts have different weights after {steps} steps")
    accuracy, _ = model.score(weights, recipe.units, digits.held_out_images, digits.held_out_labels)
    return losses, accuracy


def differences(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fig. 12's metric for every step, in per cent."""
    found: NDArray[np.float64] = 100 * np.abs(ours - theirs) / theirs
    return found


def fig12(steps: int = STEPS) -> Outcome:
    """Difference of losses between NetReduce and ring all-reduce, as a share of the ring's."""
    runs = {way: train(way, steps) for way in _WAYS}
    base, _ = runs["ring"]
    claims = [Claim("loss of the ring's last step, of its first", 0.1, float(base[-1] / base[0]), "<=")]
    apart = {}
    for way in ("netreduce", "netreduce-int32"):
        apart[way] = differences(runs[way][0], base)
        most = float(apart[way].max())
        claims.append(Claim(f"{way}: largest difference of losses, per cent", USUAL, most, "<="))
    recognised = ", ".join(f"{way} {accuracy:.2%}" for way, (_, accuracy) in runs.items())
    return Outcome(
        tuple(claims),
        (_table(base, apart),),
        (
            Panel(
                "difference of losses",
                "step",
                "per cent",
                {way: list(enumerate(its.tolist())) for way, its in apart.items()},
            ),
        ),
        (
            f"{HOSTS} hosts, {steps} steps of 128 images, {model.parameters(256):,} parameters;"
            f" held-out images recognised: {recognised}. The paper trains CNNs on ImageNet: usually below {USUAL} %, ResNet50"
            f" occasionally {OCCASIONAL} %.",
            "netreduce sums float32 as the paper's FPGA, in the order of ranks; the ring in the order in which chunks go round;"
            " netreduce-int32 under block exponents, which every system here gives the same bits for.",
        ),
    )


def _table(base: NDArray[np.float64], apart: dict[str, NDArray[np.float64]]) -> Table:
    rows: Sequence[tuple[float, ...]] = [
        (low, float(base[low]), *(float(its[low : low + _EVERY].max()) for its in apart.values()))
        for low in range(0, len(base), _EVERY)
    ]
    columns = ("step", "ring's loss", *(f"{way}: most in {_EVERY} steps, per cent" for way in apart))
    return Table("loss", columns, tuple(rows))
