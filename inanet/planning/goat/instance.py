"""One instance of GINA: sub-models, switches with memory, workers, and the distances between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inanet.planning.goat.submodels import FRAGMENT_VALUES, VALUE_BYTES, SubModel
from inanet.planning.goat.topologies import distances

if TYPE_CHECKING:
    from inanet.planning.goat.topologies import Graph

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Register bytes of one slot: the values of a fragment. What a real register file spends beside them (bitmap,
#: counter) is passed as ``slot_bytes``.
SLOT_BYTES = FRAGMENT_VALUES * VALUE_BYTES


@dataclass(frozen=True, slots=True)
class Classes:
    """Workers that are equally far from everything, merged: no schedule can gain by telling them apart.

    ``index`` int64[W]: the class of each worker; ``count`` float64[C]: workers per class; ``to_switch`` float64[C, S]
    and ``to_ps`` float64[C]: links.
    """

    index: I64
    count: F64
    to_switch: F64
    to_ps: F64


@dataclass(frozen=True)
class Instance:
    """G sub-models, W workers, S programmable switches, one PS.

    ``sizes`` float64[G] bytes each worker sends, ``footprints`` float64[G] register bytes a sub-model takes, ``memory``
    float64[S] register bytes; ``to_switch`` float64[W, S], ``to_ps`` float64[W] and ``down`` float64[S] are the links
    from worker to switch, worker to PS and switch to PS.
    """

    submodels: tuple[SubModel, ...]
    switches: tuple[str, ...]
    workers: tuple[str, ...]
    ps: str
    memory: F64
    to_switch: F64
    to_ps: F64
    down: F64
    slot_bytes: int = SLOT_BYTES
    sizes: F64 = field(init=False)
    footprints: F64 = field(init=False)

    def __post_init__(self) -> None:
        sizes = np.array([part.size for part in self.submodels], np.float64)
        slots = np.array([part.fragments for part in self.submodels], np.float64)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "footprints", slots * self.slot_bytes)

    @cached_property
    def classes(self) -> Classes:
        """Workers merged by their distances."""
        rows = np.column_stack([self.to_switch, self.to_ps])
        unique, index, count = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        return Classes(
            index.reshape(-1).astype(np.int64), count.astype(np.float64), unique[:, :-1], unique[:, -1]
        )

    @property
    def total(self) -> float:
        """Bytes of the whole gradient."""
        return float(self.sizes.sum())

    def without_aggregation(self) -> float:
        """Byte-links when every worker sends everything to the PS."""
        return float(self.total * self.to_ps.sum())

    def per_submodel(self, opened: Bools, nodes: I64) -> F64:
        """Byte-links of each sub-model, float64[G].

        ``opened`` bool[G, S]; ``nodes`` int64[G, W], the switch each worker sends to, S for the PS.
        """
        everywhere = np.column_stack([self.to_switch, self.to_ps])
        sent = everywhere[np.arange(len(self.workers)), nodes].sum(axis=1)
        return np.asarray(self.sizes * (sent + opened @ self.down), np.float64)

    def cost(self, opened: Bools, nodes: I64) -> float:
        """GINA's objective in byte-links: what workers send to their nodes, and one sum from each switch to the PS."""
        return float(self.per_submodel(opened, nodes).sum())

    def load(self, opened: Bools) -> F64:
        """Register bytes taken on each switch, float64[S]."""
        return np.asarray(self.footprints @ opened, np.float64)


def from_graph(
    graph: "Graph",
    ps: str,
    workers: Sequence[str],
    submodels: Sequence[SubModel],
    *,
    slot_bytes: int = SLOT_BYTES,
) -> Instance:
    """The instance of a job in a topology.

    Raises ``ValueError``, naming the node, if a worker cannot reach the PS, and if there is nothing to schedule.
    """
    if not workers or not submodels:
        raise ValueError(
            f"{len(workers)} workers and {len(submodels)} sub-models: there is nothing to schedule"
        )
    from_ps = distances(graph, ps)
    lost = [name for name in workers if name not in from_ps]
    if lost:
        raise ValueError(f"worker {lost[0]!r} has no path to the PS {ps!r}")
    # a switch that cannot be reached from the PS is of no use to anybody
    switches = [name for name, memory in graph.nodes(data="memory") if memory and name in from_ps]
    rows = {name: distances(graph, name) for name in switches}
    return Instance(
        tuple(submodels),
        tuple(switches),
        tuple(workers),
        ps,
        np.array([graph.nodes[name]["memory"] for name in switches], np.float64),
        np.array([[rows[s][w] for s in switches] for w in workers], np.float64).reshape(len(workers), -1),
        np.array([from_ps[name] for name in workers], np.float64),
        np.array([from_ps[name] for name in switches], np.float64),
        slot_bytes,
    )
