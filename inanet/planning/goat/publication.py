"""A job's schedule as it is published: every tensor's sub-models, their nodes for each worker, and their addresses.

A tensor is scheduled when it is first seen, because its size is known then, and once: KRGS over the memory that is left, on
the tree of ways to the PS that the switches forward along. A sub-model's slots are its own from then on (published addresses).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inanet.planning.goat.computations import Works
from inanet.planning.goat.instance import Instance, from_graph
from inanet.planning.goat.krgs import Schedule, schedule
from inanet.planning.goat.relaxation import NoSolution
from inanet.planning.goat.submodels import FRAGMENT_VALUES, VALUE_BYTES, SubModel, partition
from inanet.planning.goat.topologies import empty_graph
from inanet.proto.common.plan import Scheduled, TensorSpec
from inanet.wire.goat import NO_SUBMODEL, WORDS

#: register bytes of a slot in the switch's program: values, checksum, and what is beside them
SLOT_BYTES = 4 * WORDS + 24
#: parts that a switch's memory is cut into: a layer that is larger than one of them is partitioned
SHARES = 8
#: seconds that the relaxation may take
SECONDS = 5.0
#: sub-models of one tensor at most
MOST_PARTS = 256
_FRAGMENT_BYTES = FRAGMENT_VALUES * VALUE_BYTES


class Memory:
    """Slots of the switches, and which job has which of them."""

    def __init__(self) -> None:
        self._taken: dict[str, list[tuple[int, int, int]]] = {}

    def hole(self, switch: str, slots: int) -> tuple[int, int]:
        """The first slot of the largest run of free ones among ``slots``, and its length."""
        best, at = (0, 0), 0
        for start, count, _ in [*sorted(self._taken.get(switch, [])), (slots, 0, 0)]:
            if start - at > best[1]:
                best = at, start - at
            at = max(at, start + count)
        return best

    def take(self, switch: str, start: int, count: int, job: int) -> None:
        """Give slots to a job."""
        self._taken.setdefault(switch, []).append((start, count, job))

    def keep(self, jobs: set[int]) -> None:
        """Take back what other jobs have had."""
        self._taken = {
            switch: [one for one in taken if one[2] in jobs] for switch, taken in self._taken.items()
        }


def share_of(slots: Sequence[int], fragments: int) -> int:
    """Fragments of a sub-model at most: a share of the smallest switch that has memory, and at most
    :data:`MOST_PARTS` parts.
    """
    least = min((count for count in slots if count), default=fragments)
    return max(1, least // SHARES, -(-fragments // MOST_PARTS))


class Publisher:
    """Schedules the tensors of job ``number``. ``parents`` is every node's neighbour towards the PS, ``ps`` that one's
    name; ``slots`` are those of each switch, ``memory`` says which are free. ``seed`` decides the rounding.
    """

    def __init__(
        self,
        number: int,
        parents: Mapping[str, str],
        ps: str,
        switches: Sequence[str],
        workers: Sequence[str],
        slots: Mapping[str, int],
        memory: Memory,
        seed: int = 0,
    ) -> None:
        self.number, self.ps = number, ps
        self.switches, self.workers = tuple(switches), tuple(workers)
        self._parents, self._slots, self._memory = dict(parents), dict(slots), memory
        self._seed = seed
        self._next = 0
        #: what was scheduled last, for whoever wants to see it
        self.last: Schedule | None = None

    def instance(self, submodels: Sequence[SubModel]) -> Instance:
        """GINA for these sub-models in the memory that is left."""
        graph = empty_graph()
        graph.add_node(self.ps, kind="server", memory=0)
        for name in self.workers:
            graph.add_node(name, kind="server", memory=0)
        for name in self.switches:
            _, free = self._memory.hole(name, self._slots.get(name, 0))
            graph.add_node(name, kind="switch", memory=free * SLOT_BYTES)
        graph.add_edges_from(self._parents.items())
        return from_graph(graph, self.ps, self.workers, submodels, slot_bytes=SLOT_BYTES)

    def publish(self, name: str, fragments: int) -> tuple[Scheduled, ...]:
        """Sub-models of a tensor of so many fragments; their slots are taken.

        Raises ``ValueError`` when the job has no numbers left for them, or no schedule is found in :data:`SECONDS`, and
        ``ImportError`` without the plan extra.
        """
        (found,) = self.publish_all([(name, fragments)])
        return found

    def publish_all(self, tensors: Sequence[tuple[str, int]]) -> list[tuple[Scheduled, ...]]:
        """:meth:`publish` several at once, which makes better use of memory where all of a model is known."""
        draft = Draft(self, tensors)
        draft.prepare()
        draft.solve()
        return draft.take()

    def pose(self, tensors: Sequence[tuple[str, int]]) -> tuple[list[int], list[SubModel], Instance | None]:
        """What there is to schedule: how many sub-models each tensor has, all of them, and GINA in the memory that is free.

        Raises ``ValueError`` when the job has no numbers left for them, ``ImportError`` without the plan extra.
        """
        free = [self._memory.hole(one, self._slots.get(one, 0))[1] for one in self.switches]
        most = share_of(free, sum(fragments for _, fragments in tensors)) * _FRAGMENT_BYTES
        parts = [
            partition([(name, count * _FRAGMENT_BYTES)], most) if count else () for name, count in tensors
        ]
        whole = [part for its in parts for part in its]
        if self._next + len(whole) >= NO_SUBMODEL:
            names = ", ".join(name for name, _ in tensors[:3])
            raise ValueError(
                f"tensor {names}: the job has {self._next} sub-models, {NO_SUBMODEL} can be numbered"
            )
        return [len(its) for its in parts], whole, self.instance(whole) if whole else None

    def scheduled(self, instance: Instance) -> Schedule:
        """KRGS. Touches nothing that belongs to the publisher; any thread may call it."""
        return schedule(instance, self._seed, seconds=SECONDS)

    def commit(self, planned: Schedule, parts: Sequence[SubModel]) -> list[Scheduled]:
        """Take slots: addresses for what was planned, one sub-model after the other in each switch's largest hole."""
        self.last = planned
        names = planned.instance.switches
        place = np.array([self.switches.index(name) for name in names], np.int64)
        # column -1 of the nodes is the PS
        node_of = np.concatenate([place + 1, [0]])
        at = {name: self._memory.hole(name, self._slots[name])[0] for name in names}
        found = []
        for g, part in enumerate(parts):
            bases = [-1] * len(self.switches)
            for s in np.flatnonzero(planned.opened[g]).tolist():
                bases[int(place[s])] = at[names[s]]
                self._memory.take(names[s], at[names[s]], part.fragments, self.number)
                at[names[s]] += part.fragments
            nodes = tuple(int(node_of[s]) for s in planned.nodes[g])
            first = part.start // _FRAGMENT_BYTES
            found.append(Scheduled(self._next + g, first, part.fragments, nodes, tuple(bases)))
        self._next += len(parts)
        return found


class Draft:
    """Tensors on their way to addresses, as a piece of :class:`~inanet.planning.goat.computations.Works`: name and fragments each."""

    def __init__(self, publisher: Publisher, tensors: Sequence[tuple[str, int]]) -> None:
        self._publisher, self._tensors = publisher, tuple(tensors)
        self._counts: list[int] = []
        self._parts: list[SubModel] = []
        self._instance: Instance | None = None
        self._planned: Schedule | None = None
        self._error: Exception | None = None

    def prepare(self) -> None:
        """Look at the memory that is free."""
        try:
            self._counts, self._parts, self._instance = self._publisher.pose(self._tensors)
        except (ValueError, ImportError) as error:
            self._error = error

    def solve(self) -> None:
        """Compute the schedule, which can take :data:`SECONDS` and more."""
        if self._error is not None or self._instance is None:
            return
        names = ", ".join(name for name, _ in self._tensors[:3])
        try:
            self._planned = self._publisher.scheduled(self._instance)
        except NoSolution as error:
            self._error = ValueError(f"tensor {names} cannot be scheduled over the switches: {error}")
        except (ArithmeticError, ImportError, MemoryError, RuntimeError, ValueError) as error:
            self._error = ValueError(f"tensor {names}: the scheduler failed: {type(error).__name__}: {error}")

    def take(self) -> list[tuple[Scheduled, ...]]:
        """Each tensor's sub-models, whose slots are taken. Raises what has gone wrong."""
        if self._error is not None:
            raise self._error
        if self._instance is None:
            return [() for _ in self._tensors]
        if self._planned is None:
            raise ValueError("the scheduler failed; the coordinator's log has the details")
        found = iter(self._publisher.commit(self._planned, self._parts))
        return [tuple(next(found) for _ in range(count)) for count in self._counts]


@dataclass(frozen=True, slots=True)
class Publish:
    """What a job has its tensors scheduled with: ``draft(spec, ranks)``, and where that is computed."""

    draft: Callable[[TensorSpec, int], Draft]
    works: Works
