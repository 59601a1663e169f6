"""Data centre networks as graphs, with servers, switches and the switches that can aggregate.

Nodes carry ``kind`` ("server" or "switch") and ``memory`` (bytes of register file, 0: an ordinary switch). Every
edge is one link; distances are numbers of links, as in GOAT's section IV-A.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from inanet.planning.extras import plan_extra

if TYPE_CHECKING:
    import networkx

    Graph: TypeAlias = networkx.Graph[str]

#: Register memory of one programmable switch, bytes: Intel Tofino 2's 64 MB (GOAT, section VII-D).
SWITCH_MEMORY = 64_000_000
#: Share of switches that are programmable in the paper's simulations.
PROGRAMMABLE_SHARE = 0.2


class _Trunk(Protocol):
    @property
    def between(self) -> tuple[str, str]: ...


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Host(_Named, Protocol):
    @property
    def switch(self) -> str: ...


class LabTopology(Protocol):
    """What :func:`from_lab` needs of a topology file's model."""

    @property
    def switch(self) -> Sequence[_Named]:
        """All switches."""
        ...

    def hosts(self) -> Iterable[_Host]:
        """All hosts, with the switch each is plugged into."""
        ...

    def trunks(self) -> Iterable[_Trunk]:
        """All links between switches."""
        ...


def empty_graph() -> "Graph":
    """A graph to put nodes with ``kind`` and ``memory`` into. Raises ``ImportError`` without networkx."""
    networkx = plan_extra("networkx", "a topology for the GOAT scheduler")
    graph: Graph = networkx.Graph()
    return graph


def _add(graph: "Graph", kind: str, names: Iterable[str]) -> list[str]:
    added = list(names)
    graph.add_nodes_from(added, kind=kind, memory=0)
    return added


def leaf_spine(spines: int = 10, leaves: int = 10, servers: int = 50) -> "Graph":
    """Every leaf linked to every spine, servers spread evenly over leaves; the defaults are the paper's 20 switches
    and 50 servers.

    Raises ``ValueError`` unless all numbers are positive.
    """
    if min(spines, leaves, servers) < 1:
        raise ValueError(
            f"a leaf-spine of {spines} spines, {leaves} leaves, {servers} servers; all must be at least 1"
        )
    graph = empty_graph()
    tops = _add(graph, "switch", (f"spine{index}" for index in range(spines)))
    bottoms = _add(graph, "switch", (f"leaf{index}" for index in range(leaves)))
    graph.add_edges_from((top, bottom) for top in tops for bottom in bottoms)
    for index, server in enumerate(_add(graph, "server", (f"h{index}" for index in range(servers)))):
        graph.add_edge(server, bottoms[index % leaves])
    return graph


def fat_tree(ports: int = 8, servers_per_edge: int = 6) -> "Graph":
    """A fat-tree of ``ports`` pods. A k = 8 fat-tree has 4 servers per edge switch; the paper's has 6: 80 switches,
    192 servers.

    Raises ``ValueError`` for an odd number of ports.
    """
    if ports < 2 or ports % 2 or servers_per_edge < 1:
        raise ValueError(
            f"a fat-tree of {ports}-port switches and {servers_per_edge} servers per edge; ports must be even, servers "
            "at least 1"
        )
    graph, half = empty_graph(), ports // 2
    cores = _add(graph, "switch", (f"core{index}" for index in range(half * half)))
    count = 0
    for pod in range(ports):
        upper = _add(graph, "switch", (f"agg{pod}.{index}" for index in range(half)))
        lower = _add(graph, "switch", (f"edge{pod}.{index}" for index in range(half)))
        graph.add_edges_from((up, low) for up in upper for low in lower)
        for index, up in enumerate(upper):
            graph.add_edges_from((up, core) for core in cores[index * half : (index + 1) * half])
        for low in lower:
            servers = _add(graph, "server", (f"h{count + index}" for index in range(servers_per_edge)))
            graph.add_edges_from((low, server) for server in servers)
            count += servers_per_edge
    return graph


def from_lab(topology: LabTopology) -> "Graph":
    """The graph of a topology file (:class:`inanet.lab.model.Topology`); all switches are ordinary ones at first."""
    graph = empty_graph()
    _add(graph, "switch", (switch.name for switch in topology.switch))
    for host in topology.hosts():
        _add(graph, "server", [host.name])
        graph.add_edge(host.name, host.switch)
    graph.add_edges_from(trunk.between for trunk in topology.trunks())
    return graph


def nodes_of(graph: "Graph", kind: str) -> list[str]:
    """Nodes of a kind, in the order in which they were added."""
    return [name for name, its in graph.nodes(data="kind") if its == kind]


def make_programmable(
    graph: "Graph",
    seed: int,
    *,
    share: float = PROGRAMMABLE_SHARE,
    memory: int = SWITCH_MEMORY,
    switches: Sequence[str] | None = None,
) -> list[str]:
    """Give ``memory`` bytes to ``switches``, or to a random ``share`` of all (at least one); returns their names.

    Raises ``ValueError`` for names that are no switches.
    """
    every = nodes_of(graph, "switch")
    if switches is None:
        count = min(len(every), max(1, round(share * len(every))))
        picked = np.random.default_rng(seed).choice(len(every), count, replace=False)
        switches = [every[index] for index in sorted(picked.tolist())]
    unknown = sorted(set(switches) - set(every))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such switch in this topology")
    for name in switches:
        graph.nodes[name]["memory"] = memory
    return list(switches)


def place(graph: "Graph", workers: int, seed: int) -> tuple[str, tuple[str, ...]]:
    """A PS and ``workers`` workers on servers of their own, drawn without replacement.

    Raises ``ValueError`` if there are too few servers.
    """
    servers = nodes_of(graph, "server")
    if workers + 1 > len(servers):
        raise ValueError(
            f"{workers} workers and a PS need {workers + 1} servers; the topology has {len(servers)}"
        )
    picked = np.random.default_rng(seed).choice(len(servers), workers + 1, replace=False).tolist()
    return servers[picked[0]], tuple(servers[index] for index in sorted(picked[1:]))


def distances(graph: "Graph", source: str) -> dict[str, int]:
    """Links on a shortest path from ``source`` to every node that can be reached."""
    networkx = plan_extra("networkx", "distances for the GOAT scheduler")
    found: dict[str, int] = dict(networkx.single_source_shortest_path_length(graph, source))
    return found
