"""Who may send to whom, from configuration: roots, aggregators and workers, each with its parent.

A fabric has one tree per root (a parameter server); a tensor is split over the trees. An aggregator stands
in one tree, a worker has one parent in every tree. What a job uses is that fabric reduced to the workers
that take part, and to the aggregators that are there: the children of an absent one belong to the nearest
ancestor that is present.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from inanet.messages.fields import MAX_TREES, Name
from inanet.messages.text import listing
from inanet.planning.trees import Performance
from inanet.proto.common.plan import NodePlan, SwitchedJob
from inanet.wire.xagg import MAX_CHILDREN

if TYPE_CHECKING:
    from inanet.messages.control import Hello
    from inanet.planning.goat.publication import Publish


class TopologyError(ValueError):
    """A fabric that cannot work; ``problems`` has one sentence for each thing that is wrong."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree of a job: ``parents`` of all nodes but the root, ``children`` (sorted) of all nodes but the
    workers.
    """

    tree: int
    root: str
    parents: Mapping[str, str]
    children: Mapping[str, tuple[str, ...]]

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, parents before their children."""
        order = [self.root]
        for name in order:
            order.extend(self.children.get(name, ()))
        return tuple(order)


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Parents = Annotated[
    tuple[Name, ...], BeforeValidator(_one_or_many), Field(min_length=1, max_length=MAX_TREES)
]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a job gets: its trees' nodes, and a sentence that says why, empty where there was no choice."""

    topology: "Topology"
    reason: str = ""
    #: for jobs whose sums are made in a switch
    switched: SwitchedJob | None = None
    #: for those that are made in several
    publish: "Publish | None" = None


class Fabric(Protocol):
    """Who may take part in jobs of a system, and which trees a job gets. ``workers``: by name, what each said of itself."""

    def refusal(self, role: str, name: str) -> str:
        """Why a node of this role and name cannot take part; empty if it can."""

    def fits(self, workers: Collection[str]) -> None:
        """Raise :class:`TopologyError` if these hosts cannot be one job."""

    def awaited(self, workers: Mapping[str, "Hello"], connected: Collection[str]) -> tuple[str, ...]:
        """What a job of these hosts has to wait for beside its ranks, in words, if these servers are there."""

    def arrange(self, workers: Mapping[str, "Hello"], connected: Collection[str]) -> Arrangement:
        """The trees for a job of these hosts, once nothing is awaited."""

    def recall(self, plans: Mapping[str, NodePlan], workers: Collection[str]) -> "Topology | None":
        """The trees of a job that outlived its coordinator, from what its members hold; None: not known yet."""


class TreeFabric(Fabric, Protocol):
    """The fabric of jobs that are summed in trees: a :class:`Topology`, the same for all jobs, or a planner."""

    def improve(
        self, topology: "Topology", workers: Sequence[Performance], size: int, connected: Collection[str]
    ) -> Arrangement:
        """The trees for a job that has ``topology``, with the same root, now that it is known how its workers fare and
        that its tensors take ``size`` bytes."""

    def renew(
        self, topology: "Topology", workers: Collection[str], connected: Collection[str]
    ) -> Arrangement | None:
        """Other trees for a running job that has ``topology``, now that a server has come; None to leave it."""

    def busy(self, name: str) -> str:
        """Why a server should be left out of running jobs, as of the report that has just come; empty if it need not."""


class Topology(BaseModel):
    """The fabric as configured.

    ``roots``: names of parameter servers. ``aggregators``: name to parent. ``workers``: name to parent, or
    parents, one in each tree. ``whole``: no tree goes on without one of its aggregators. Validation finds all problems at once: names used twice, parents that do not
    exist or are workers, circles, workers that miss a tree or have two parents in one.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    roots: Parents
    aggregators: dict[Name, Name] = {}
    workers: dict[Name, Parents] = {}
    whole: bool = False

    @model_validator(mode="after")
    def _sound(self) -> "Topology":
        problems = [*self._names(), *self._aggregator_parents()]
        # which tree a parent is in only makes sense once every parent exists and leads to a root
        problems += self._worker_parents(complete=not problems)
        if problems:
            raise TopologyError(problems)
        return self

    def _names(self) -> list[str]:
        roles: dict[str, str] = {}
        problems = []
        every = [("root", name) for name in self.roots]
        every += [("aggregator", name) for name in self.aggregators]
        every += [("worker", name) for name in self.workers]
        for role, name in every:
            if name in roles:
                problems.append(f"{name!r} is a {roles[name]} and a {role}; names are used once")
            roles[name] = role
        return problems

    def _aggregator_parents(self) -> list[str]:
        problems = []
        for name, parent in self.aggregators.items():
            if parent in self.workers:
                problems.append(f"aggregator {name!r} has parent {parent!r}, which is a worker")
            elif parent not in self.aggregators and parent not in self.roots:
                problems.append(f"aggregator {name!r} has parent {parent!r}, which does not exist")
        reported: set[str] = set()
        for name in self.aggregators:
            path = [name]
            while path[-1] in self.aggregators and self.aggregators[path[-1]] not in path:
                path.append(self.aggregators[path[-1]])
            if path[-1] in self.aggregators and not reported & set(path):
                reported |= set(path)
                circle = path[path.index(self.aggregators[path[-1]]) :]
                problems.append(f"aggregators {' -> '.join([*circle, circle[0]])} form a circle")
        return problems

    def _worker_parents(self, complete: bool) -> list[str]:
        problems = []
        for name, parents in self.workers.items():
            unknown = [p for p in parents if p not in self.aggregators and p not in self.roots]
            for parent in unknown:
                what = "is a worker" if parent in self.workers else "does not exist"
                problems.append(f"worker {name!r} has parent {parent!r}, which {what}")
            if unknown or not complete:
                continue
            roots = [self.root_of(parent) for parent in parents]
            for root in self.roots:
                if roots.count(root) != 1:
                    count = "no parent" if root not in roots else f"{roots.count(root)} parents"
                    problems.append(f"worker {name!r} has {count} in the tree of {root!r}, it needs one")
        return problems

    def root_of(self, name: str) -> str:
        """The root above an aggregator (or the root itself)."""
        while name in self.aggregators:
            name = self.aggregators[name]
        return name

    def ancestors(self, tree: int, name: str) -> tuple[str, ...]:
        """Configured parents of a node in a tree, nearest first, the root last."""
        path = []
        if name in self.workers:
            name = next(p for p in self.workers[name] if self.root_of(p) == self.roots[tree])
            path.append(name)
        while name in self.aggregators:
            name = self.aggregators[name]
            path.append(name)
        return tuple(path)

    def trees(self, workers: Collection[str], absent: Collection[str] = ()) -> tuple[Tree, ...]:
        """The trees for the workers that take part, one per root, without aggregators that have nobody below.

        Children of ``absent`` aggregators move to the nearest ancestor present. Raises
        :class:`TopologyError` for workers the fabric does not have and for nodes with more than 32
        children, naming them.
        """
        unknown = sorted(set(workers) - self.workers.keys())
        problems = [f"worker {name!r} is not in the topology; add it with its parent" for name in unknown]
        if self.whole and absent:
            problems.append(f"its sums cannot be made without {listing(sorted(absent))}")
        trees = []
        for index, root in enumerate(self.roots):
            parents: dict[str, str] = {}
            for worker in sorted(set(workers) - set(unknown)):
                below = worker
                for name in self.ancestors(index, worker):
                    if name not in absent:
                        parents[below] = name
                        below = name
            children: dict[str, list[str]] = {}
            for name in sorted(parents):
                children.setdefault(parents[name], []).append(name)
            for parent, names in sorted(children.items()):
                if len(names) > MAX_CHILDREN:
                    problems.append(
                        f"{parent!r} would have {len(names)} children, at most {MAX_CHILDREN} are possible: "
                        f"put an aggregator between it and {names[-1]!r}"
                    )
            trees.append(Tree(index, root, parents, {name: tuple(c) for name, c in children.items()}))
        if problems:
            raise TopologyError(problems)
        return tuple(trees)

    # ---------- as a Fabric

    def refusal(self, role: str, name: str) -> str:
        """See :class:`Fabric`. Further roots may be aggregators, too: one of them is beside the coordinator."""
        known: Collection[str] = self.roots
        if role == "worker":
            known = self.workers
        elif role == "aggregator":
            known = {*self.aggregators, *self.roots}
        if name in known:
            return ""
        names = listing(sorted(known)[:20]) or "none"
        return f"{role} {name!r} is not in the topology; that role has {names}"

    def fits(self, workers: Collection[str]) -> None:
        self.trees(workers)

    def awaited(self, workers: Collection[str], connected: Collection[str]) -> tuple[str, ...]:
        return tuple(
            f"{'parameter server' if name in self.roots else 'aggregator'} {name}"
            for name in self.needed(workers)
            if name not in connected
        )

    def arrange(self, workers: Collection[str], connected: Collection[str]) -> Arrangement:
        return Arrangement(self)

    def improve(
        self, topology: "Topology", workers: Sequence[Performance], size: int, connected: Collection[str]
    ) -> Arrangement:
        return Arrangement(topology)

    def renew(
        self, topology: "Topology", workers: Collection[str], connected: Collection[str]
    ) -> Arrangement | None:
        return None

    def busy(self, name: str) -> str:
        return ""

    def recall(self, plans: Mapping[str, NodePlan], workers: Collection[str]) -> "Topology":
        return self

    def needed(self, workers: Collection[str]) -> tuple[str, ...]:
        """Roots and aggregators on the way from these workers, sorted by name; unknown workers count for
        nothing.
        """
        known = [name for name in workers if name in self.workers]
        above = {a for w in known for tree in range(len(self.roots)) for a in self.ancestors(tree, w)}
        return tuple(sorted(above | set(self.roots)))


def split(count: int, trees: int) -> tuple[tuple[int, int], ...]:
    """``(first, count)`` of each tree's contiguous part of ``count`` fragments; sizes differ by one at
    most.
    """
    bounds = [count * index // trees for index in range(trees + 1)]
    return tuple((low, high - low) for low, high in pairwise(bounds))
