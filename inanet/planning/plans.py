"""A plan as data: shards, a tree for each, who sums where, how results go down; and what daemons make of it.

A tensor is split evenly over the trees. A node is a process: worker agents bear their host's name, an aggregator beside
a worker on the same host has one of its own (:func:`beside`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from inanet.planning.topology import Topology, Tree

#: What kind of plan it is. ``ring`` needs no aggregator: it is what collective libraries do without us.
Kind: TypeAlias = Literal[
    "ring", "ps", "configured", "sharded", "colocated", "mixed", "tree", "racks", "sharded-tree"
]
Downlink: TypeAlias = Literal["unicast", "multicast"]


def beside(host: str) -> str:
    """Name of the aggregator on a worker's host."""
    return f"{host}-agg"


@dataclass(frozen=True, slots=True)
class Plan:
    """``trees`` is empty for a ring. ``hosts`` maps nodes to the host they run on, if it has another name."""

    kind: Kind
    name: str
    trees: tuple[Tree, ...] = ()
    downlink: Downlink = "unicast"
    hosts: Mapping[str, str] = field(default_factory=dict)

    def host(self, node: str) -> str:
        """Where a node runs."""
        return self.hosts.get(node, node)

    @property
    def servers(self) -> tuple[str, ...]:
        """Nodes that sum, roots first."""
        roots = tuple(tree.root for tree in self.trees)
        return (*roots, *sorted({name for tree in self.trees for name in tree.children} - set(roots)))

    def topology(self) -> Topology:
        """The fabric of this plan. Raises ``ValueError`` for a ring, which has none."""
        if not self.trees:
            raise ValueError(f"plan {self.name!r} needs no fabric: use the collectives that you have")
        workers = sorted(
            {child for tree in self.trees for child in tree.parents if child not in tree.children}
        )
        return Topology(
            roots=tuple(tree.root for tree in self.trees),
            aggregators={
                name: parent
                for tree in self.trees
                for name, parent in tree.parents.items()
                if name in tree.children
            },
            workers={name: tuple(tree.parents[name] for tree in self.trees) for name in workers},
        )

    def config(self) -> dict[str, dict[str, Any]]:
        """Sections of the coordinator's configuration that make daemons follow this plan."""
        fabric = self.topology()
        return {
            "control": {"downlink": self.downlink},
            "topology": {
                "roots": list(fabric.roots),
                "aggregators": [{"name": n, "parent": parent} for n, parent in fabric.aggregators.items()],
                "workers": [{"name": n, "parent": list(parents)} for n, parents in fabric.workers.items()],
            },
        }


def star(index: int, root: str, workers: Sequence[str]) -> Tree:
    """All workers send to the root."""
    return Tree(index, root, dict.fromkeys(workers, root), {root: tuple(sorted(workers))})


def tree_of(index: int, root: str, parents: Mapping[str, str]) -> Tree:
    """A tree from its parents."""
    children: dict[str, list[str]] = {root: []}
    for name in sorted(parents):
        children.setdefault(parents[name], []).append(name)
    return Tree(index, root, dict(parents), {name: tuple(below) for name, below in children.items()})
