"""Asynchronous training through the nodes of a schedule, in virtual time: what GOAT's Fig. 12 trains with.

The testbed's three switches (GOAT, Fig. 4) with memory for a part of the model, a schedule by KRGS, and on every node the sums
of :mod:`inanet.proto.slots.goat_async.gatherer`; the PS is :mod:`inanet.planning.goat.epochs`. Gradients travel as 32-bit integers and
are added as such. Time passes at the workers only, as in the model that the other schemes are run in: messages take none,
unless they are given some.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from inanet.planning.goat.epochs import Choose, Publication, Server, Update
from inanet.planning.goat.instance import SLOT_BYTES, from_graph
from inanet.planning.goat.krgs import Schedule, schedule
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
