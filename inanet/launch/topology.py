"""Which nodes a fabric on one machine has: a list of (name, parent), the root's parent being ``None``.

A node's role is in its name: ``worker0`` and so on run training processes, ``agg0`` aggregates, ``switch0`` is a
switch, ``ps`` is the root. A PS with a parent, ``ps1``, is one beside it, which keeps keys of sparse jobs as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from inanet.config import topology as config
from inanet.config.daemons import Role
from inanet.planning.topology import Topology
from inanet.proto.slots.systems import TREES

#: Systems that sum in several switches.
SCHEDULED = ("goat", "goat-async")
#: The roles, leaves first: the order in which a fabric is taken down.
ROLES: tuple[Role, ...] = ("worker", "agg", "switch", "ps")


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node of a fabric and the node it sends to."""

    name: str
    parent: str | None

    @property
    def role(self) -> Role:
        """One of :data:`ROLES`. Raises ``ValueError`` if the name has none."""
        for role in ROLES:
            if self.name.startswith(role):
                return role
        raise ValueError(f"node {self.name!r}: names start with {', '.join(ROLES)}")


def two_level(workers: int, aggregators: int) -> list[NodeSpec]:
    """Workers in equal runs under the aggregators, those under one PS; without aggregators all under the
    PS."""
    nodes = [NodeSpec("ps", None)]
    nodes += [NodeSpec(f"agg{index}", "ps") for index in range(aggregators)]
    for index in range(workers):
        parent = f"agg{index * aggregators // workers}" if aggregators else "ps"
        nodes.append(NodeSpec(f"worker{index}", parent))
    return nodes


def switched(workers: int) -> list[NodeSpec]:
    """Workers around one switch, and a PS."""
    return [
        NodeSpec("ps", None),
        NodeSpec("switch0", "ps"),
        *(NodeSpec(f"worker{index}", "ps") for index in range(workers)),
    ]


def keyed(servers: int) -> list[NodeSpec]:
    """A switch and so many PS; the ranks of sparse jobs are nodes by themselves."""
    beside = (NodeSpec(f"ps{index}", "ps") for index in range(1, servers))
    return [NodeSpec("ps", None), *beside, NodeSpec("switch0", "ps")]


def collaborative(workers: int) -> list[NodeSpec]:
    """GOAT's testbed: a switch with the PS, two more at that one, workers in two halves at these."""
    return [
        NodeSpec("ps", None),
        NodeSpec("switch0", "ps"),
        NodeSpec("switch1", "switch0"),
        NodeSpec("switch2", "switch0"),
        *(NodeSpec(f"worker{index}", f"switch{1 + index * 2 // workers}") for index in range(workers)),
    ]


def plugged(system: str, workers: int, aggregators: int) -> list[NodeSpec]:
    """The nodes of a fabric for a system."""
    if system == TREES:
        return two_level(workers, aggregators)
    return collaborative(workers) if system in SCHEDULED else switched(workers)


def section(nodes: Iterable[NodeSpec]) -> dict[str, Any]:
    """The ``[topology]`` section of the PS's configuration.

    Raises ``ValueError`` unless exactly one node, a PS, has no parent.
    """
    nodes = list(nodes)
    for node in nodes:
        if node.role != "ps" and node.parent is None:
            raise ValueError(f"node {node.name!r}: the PS, and nobody else, has no parent")
    first = [node.name for node in nodes if node.parent is None]
    if len(first) != 1:
        raise ValueError(f"{len(first)} PS; a fabric has one that coordinates")
    roots = first + [node.name for node in nodes if node.role == "ps" and node.parent is not None]
    switches = [n.name for n in nodes if n.role == "switch"]
    return {
        "roots": roots,
        "aggregators": [{"name": n.name, "parent": n.parent} for n in nodes if n.role == "agg"],
        # a tree's workers are below aggregators or the PS; what is plugged in where, the links say
        "workers": [
            {"name": n.name, "parent": roots[0] if n.parent in switches else n.parent}
            for n in nodes
            if n.role == "worker"
        ],
        "switches": switches,
        "links": [[n.name, n.parent] for n in nodes if n.parent is not None] if len(switches) > 1 else [],
    }


def topology(nodes: Iterable[NodeSpec]) -> Topology:
    """The nodes as the control plane sees them. Raises ``ValueError`` naming the nodes that do not fit."""
    plain = section(nodes)
    return config.Topology.model_validate(plain).fabric(plain["roots"][0])
