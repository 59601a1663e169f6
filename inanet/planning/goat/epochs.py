"""The PS of asynchronous training: epoch after epoch, who is waited for, what every node is told, what is learnt.

At the start of an epoch Algorithm 2 chooses K_t from the workers' last intervals. Who the K_t will be is estimated: workers whose
gradient waits already, in the order in which they came, then those with the least of their last interval to go. K_t^s, how
many of them send a sub-model to a node, is published to every node (Eq. (20), kept apart by sub-model).

Estimates can be wrong, and a node that waits for the wrong worker would hold everybody up. Workers say when they have sent a
gradient (one small message): when K_t have, and they are others than was estimated, their numbers are published instead. So
an epoch ends with the K_t-th gradient, as Eq. (19) has it, and no estimate can stop it. What has left a node by then counts,
too: each sub-model's mean is over as many gradients as it really has (actual counts).

A worker takes part in the epoch in which the last sub-model of its gradient counts; the model is sent to those who took part
and to nobody else.

Sans IO: messages in, messages out, ``now`` in seconds is an argument.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inanet.planning.goat.instance import F64, I64
from inanet.planning.goat.participants import Convergence, Epochs, choose, per_switch
from inanet.proto.slots.goat_async.gatherer import Gathered

#: Epochs for which a sum may be on its way.
HORIZON = 256
#: sigma^2 / epsilon as a share of the workers, where nothing is known of the task.
NOISE = 0.125
#: K of an epoch from the workers' last intervals; :func:`by_algorithm_two` makes one.
Choose = Callable[[F64], int]


def by_algorithm_two(epochs: Epochs, *, rounds: int | None = None, aggregation: float = 0.0) -> Choose:
    """Algorithm 2 as :class:`Server` asks for it."""
    return lambda intervals: (
        choose(intervals.tolist(), epochs, rounds=rounds, aggregation=aggregation).participants
    )


def for_any_workers(noise: float = NOISE) -> Choose:
    """Algorithm 2 for jobs of any size, whose sigma^2 / epsilon is this share of the workers: what decides about K in psi."""

    def choose_for(intervals: F64) -> int:
        workers = len(intervals)
        return by_algorithm_two(Convergence(1.0, noise * workers, 1.0, workers).epochs)(intervals)

    return choose_for


@dataclass(frozen=True, slots=True)
class Publication:
    """``needs`` int64[G, S + 1]: K_t^s of every sub-model and node, the PS last. The highest ``revision`` of an epoch counts."""

    epoch: int
    revision: int
    participants: int
    needs: I64


@dataclass(frozen=True, slots=True)
class Update:
    """An epoch is over. ``sums`` float64 of each sub-model and ``counts`` int64[G], how many gradients each is of;
    ``inside``: the workers that took part, who get the model now; ``staleness``: how many epochs ago each of them got the
    one before; ``length`` in seconds.
    """

    epoch: int
    sums: tuple[F64, ...]
    counts: I64
    inside: tuple[int, ...]
    staleness: tuple[int, ...]
    length: float


class Server:
    """``nodes`` int64[G, W]: the node each worker sends a sub-model to, ``switches`` for the PS, as a schedule has it.

    ``choose`` is asked for K_t from the second epoch on, the first waits for all: nothing is known of the workers then.
    """

    def __init__(self, nodes: I64, switches: int, choose: Choose) -> None:
        self.nodes, self.switches = nodes, switches
        submodels, workers = nodes.shape
        self.epoch = 0
        #: p_w: seconds from getting the model to having sent the gradient, the last time; NaN before
        self.history: F64 = np.full(workers, np.nan)
        self.participants = workers
        self._choose = choose
        self._began = 0.0
        self._given: F64 = np.zeros(workers)
        self._version: I64 = np.zeros(workers, np.int64)
        #: when the gradient of the model they have was sent; NaN: not yet
        self._sent: F64 = np.full(workers, np.nan)
        self._counted = np.zeros((submodels, workers), bool)
        self._expected: tuple[int, ...] = ()
        self._needs: I64 = np.zeros((submodels, switches + 1), np.int64)
        self._revision = 0
        self._got: list[Gathered] = []
        #: (sub-model, node, epoch) of sums that have come
        self._heard: set[tuple[int, int, int]] = set()

    # ---------- who is waited for

    def begin(self, now: float) -> Publication:
        """Begin the next epoch: what to publish."""
        self.epoch += 1
        self._revision = -1
        self._began = now
        self._heard = {key for key in self._heard if key[2] > self.epoch - HORIZON}
        if not np.isnan(self.history).all():
            # who has not delivered yet is taken to be as slow as the slowest that has
            seen = np.where(np.isnan(self.history), np.nanmax(self.history), self.history)
            self.participants = self._choose(seen)
            self._expected = self._estimate(seen, now)
        else:
            self._expected = tuple(range(len(self.history)))
        return self._publish(self._expected)

    def _estimate(self, seen: F64, now: float) -> tuple[int, ...]:
        """The K_t workers that are likely to be the first."""
        left = np.maximum(seen - (now - self._given), 0.0)
        waits = ~np.isnan(self._sent)
        order = np.lexsort((np.where(waits, self._sent, left), ~waits))
        return tuple(sorted(order[: self.participants].tolist()))

    def _publish(self, workers: tuple[int, ...]) -> Publication:
        participating = np.zeros(self._counted.shape[1], bool)
        participating[list(workers)] = True
        self._needs = per_switch(self.nodes, participating & ~self._counted, self.switches)
        self._revision += 1
        return Publication(self.epoch, self._revision, self.participants, self._needs.copy())

    def sent(self, worker: int, now: float) -> Publication | None:
        """A worker has sent its gradient, all of it. What to publish instead if the first are others than was estimated."""
        if not np.isnan(self._sent[worker]):
            return None
        self._sent[worker] = now
        self.history[worker] = now - self._given[worker]
        waiting = np.nonzero(~np.isnan(self._sent))[0]
        if len(waiting) != self.participants:
            return None
        first = tuple(sorted(waiting.tolist()))
        if first == self._expected:
            return None
        self._expected = first
        return self._publish(first)

    # ---------- what is learnt

    def receive(self, one: Gathered, now: float) -> Update | Publication | None:
        """A node's sum, the PS's own included; the update if it was the last. What has come already, and what is older than
        :data:`HORIZON` epochs, is ignored.

        A sum of an earlier epoch was on its way when a publication took its number back. It counts in this one, and is not
        to be waited for again: there are other numbers to publish.
        """
        key = (one.submodel, one.node, one.epoch)
        if not self.epoch - HORIZON < one.epoch <= self.epoch or key in self._heard:
            return None
        self._heard.add(key)
        self._got.append(one)
        self._counted[one.submodel, list(one.workers)] = True
        renewed = self._publish(self._expected) if one.epoch < self.epoch else None
        return self.close(now) or renewed

    def close(self, now: float) -> Update | None:
        """The update, if nothing that was published is missing. To be asked after a publication within an epoch as well: it
        may be that nothing more is waited for.
        """
        submodels, nodes = np.nonzero(self._needs)
        for g, node in zip(submodels.tolist(), nodes.tolist(), strict=True):
            if (g, node, self.epoch) not in self._heard:
                return None
        if not self._got:
            return None
        sums, counts = self._sum_up()
        inside = np.nonzero(self._counted.all(axis=0))[0]
        update = Update(
            self.epoch,
            sums,
            counts,
            tuple(inside.tolist()),
            tuple((self.epoch - 1 - self._version[inside]).tolist()),
            now - self._began,
        )
        self._give(inside, now)
        return update

    def _sum_up(self) -> tuple[tuple[F64, ...], I64]:
        counts = np.zeros(len(self.nodes), np.int64)
        sums: dict[int, F64] = {}
        for its in self._got:
            g = its.submodel
            sums[g] = sums.get(g, 0.0) + its.values.astype(np.float64)
            counts[g] += len(its.workers)
        self._got = []
        return tuple(sums.get(g, np.zeros(0)) for g in range(len(self.nodes))), counts

    def _give(self, workers: I64, now: float) -> None:
        """These workers get the model."""
        self._given[workers] = now
        self._version[workers] = self.epoch
        self._sent[workers] = np.nan
        self._counted[:, workers] = False
