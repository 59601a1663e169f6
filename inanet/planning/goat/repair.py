"""From a rounded schedule to one that the register files really hold, and to one that has no obvious waste.

Rounding may exceed a switch's memory by the factor the paper bounds (4 under its assumption). A register file does not
stretch: sub-models leave an overfull switch, the cheapest to move first. The polish then only takes steps that lower
the cost and keep memory: nearest open node for every worker, close what does not pay, open where there is room.
"""

import numpy as np

from inanet.planning.goat.instance import F64, Bools, Instance

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
