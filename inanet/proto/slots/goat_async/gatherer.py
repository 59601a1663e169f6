"""Sums of asynchronous training (GOAT, section V): a node waits for a number of gradients, not for a set of workers.

In epoch t a node sends on what it has of a sub-model once K_t^s gradients are in, whoever they are of. What comes later
stays in the slots and counts in a later epoch: memory is the sub-model's own (published addresses), so nothing has to make
room. More than K_t^s may be in when a smaller number is published: all of it leaves, and the sum says how many it is of,
because whoever takes the mean has to scale by that.

The PS is a node like the others, for the sub-models that no switch has. Messages may come twice and in any order: a gradient
has its worker's serial number and is added once, a node sends a sub-model at most once in an epoch. Not bit-identical from run
to run, as the synchronous mode is: who is in depends on time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
_TOP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's gradient of one sub-model: ``values`` int32[V], ``serial`` the number of the worker's gradient, 1 first."""

    worker: int
    serial: int
    submodel: int
    values: I32


@dataclass(frozen=True, slots=True)
class Gathered:
    """A node's sum of a sub-model in an epoch: ``values`` int32[V] over ``workers``."""

    node: int
    epoch: int
    submodel: int
    workers: frozenset[int]
    values: I32


class Overflow(ValueError):
    """A sum that 32 bits cannot hold; the message names node, sub-model and worker."""


@dataclass(slots=True)
class _Held:
    values: I32
    #: worker to serial of what is in the sum
    inside: dict[int, int]
    #: gradients that are waited for, and the epoch in which it was last sent
    need: int = 0
    sent: int = 0


class Gatherer:
    """Node ``node``: ``sizes`` are the values of each sub-model that it sums."""

    def __init__(self, node: int, sizes: Mapping[int, int]) -> None:
        self.node = node
        self.epoch = self._revision = 0
        #: gradients that came again, or of sub-models that are not summed here
        self.dropped = 0
        self._held = {g: _Held(np.zeros(size, np.int32), {}) for g, size in sizes.items()}
        self._last: dict[tuple[int, int], int] = {}

    @property
    def waiting(self) -> dict[int, frozenset[int]]:
        """Workers whose gradients are in and have not been sent on, by sub-model."""
        return {g: frozenset(held.inside) for g, held in self._held.items() if held.inside}

    def publish(self, epoch: int, needs: Mapping[int, int], revision: int = 0) -> list[Gathered]:
        """K_t^s of every sub-model from now on (0, or none: nothing of it leaves in this epoch); what that completes.

        Numbers are published anew within an epoch under a higher ``revision``. What is older than what is known, or
        the same, is ignored.
        """
        if (epoch, revision) <= (self.epoch, self._revision):
            return []
        self.epoch, self._revision = epoch, revision
        for g, held in self._held.items():
            held.need = needs.get(g, 0)
        return [sum_ for g in self._held if (sum_ := self._complete(g)) is not None]

    def contribute(self, one: Contribution) -> list[Gathered]:
        """Add a gradient; what that completes. Raises :class:`Overflow`, ``ValueError`` for values of another length."""
        held = self._held.get(one.submodel)
        if held is None or one.serial <= self._last.get((one.submodel, one.worker), 0):
            self.dropped += 1
            return []
        if one.values.shape != held.values.shape:
            raise ValueError(
                f"sub-model {one.submodel} has {held.values.size} values, worker {one.worker} sent {one.values.size}"
            )
        total = held.values.astype(np.int64) + one.values
        if total.size and int(np.abs(total).max()) > _TOP:
            raise Overflow(
                f"node {self.node}: sub-model {one.submodel} does not fit 32 bits with worker {one.worker}: a smaller "
                "factor is needed"
            )
        held.values = total.astype(np.int32)
        held.inside[one.worker] = self._last[one.submodel, one.worker] = one.serial
        done = self._complete(one.submodel)
        return [] if done is None else [done]

    def _complete(self, submodel: int) -> Gathered | None:
        held = self._held[submodel]
        if not held.need or held.sent == self.epoch or len(held.inside) < held.need:
            return None
        held.sent = self.epoch
        done = Gathered(self.node, self.epoch, submodel, frozenset(held.inside), held.values)
        held.values, held.inside = np.zeros_like(held.values), {}
        return done
