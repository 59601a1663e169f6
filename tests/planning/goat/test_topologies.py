"""Networks and sub-models that go into the scheduler."""

import sys

import numpy as np
import pytest

from inanet.lab.library import topology
from inanet.planning.goat.instance import from_graph
from inanet.planning.goat.submodels import SubModel, alexnet, layers_of, partition
from inanet.planning.goat.topologies import (
    distances,
    fat_tree,
    from_lab,
    leaf_spine,
    make_programmable,
    nodes_of,
    place,
)
from inanet.service.exits import Exit, explain


def test_the_papers_two_networks_have_their_sizes() -> None:
    graph = leaf_spine()
    assert (len(nodes_of(graph, "switch")), len(nodes_of(graph, "server"))) == (20, 50)
    graph = fat_tree()
    assert (len(nodes_of(graph, "switch")), len(nodes_of(graph, "server"))) == (80, 192)
    assert len(nodes_of(fat_tree(8, 4), "server")) == 128


def test_distances_are_links_of_shortest_paths() -> None:
    graph = fat_tree()
    found = distances(graph, "h0")
    assert (found["edge0.0"], found["h1"], found["h6"], found["h191"]) == (1, 2, 4, 6)
    assert max(found.values()) == 6
    graph = leaf_spine(2, 3, 6)
    assert (distances(graph, "h0")["h3"], distances(graph, "h0")["h1"]) == (2, 4)


def test_a_fifth_of_the_switches_is_programmable_and_the_seed_says_which() -> None:
    graph = fat_tree()
    chosen = make_programmable(graph, 7)
    assert len(chosen) == 16
    assert chosen == make_programmable(fat_tree(), 7) != make_programmable(fat_tree(), 8)
    assert sum(memory for _, memory in graph.nodes(data="memory")) == 16 * 64_000_000
    with pytest.raises(ValueError, match="spine9: no such switch"):
        make_programmable(graph, 0, switches=["core0", "spine9"])


def test_topology_files_become_graphs() -> None:
    model = topology("goat-testbed")
    graph = from_lab(model)
    make_programmable(graph, 0, switches=["s1", "s2", "s3"], memory=20_000_000)
    workers = [host.name for host in model.workers()]
    instance = from_graph(graph, "ps", workers, partition([("a", 4096)], 4096))
    assert instance.to_ps.tolist() == [3.0] * 8
    assert instance.down.tolist() == [1.0, 2.0, 2.0]
    assert len(instance.classes.count) == 2


def test_places_are_distinct_servers() -> None:
    graph = leaf_spine(2, 2, 6)
    ps, workers = place(graph, 5, 3)
    assert sorted([ps, *workers]) == nodes_of(graph, "server")
    with pytest.raises(ValueError, match="7 servers; the topology has 6"):
        place(graph, 6, 3)


def test_unreachable_workers_are_named() -> None:
    graph = leaf_spine(1, 2, 4)
    graph.remove_edge("h3", "leaf1")
    with pytest.raises(ValueError, match="'h3' has no path to the PS 'h0'"):
        from_graph(graph, "h0", ["h1", "h3"], [SubModel("a", 0, 256)])


class _Tensor:
    def __init__(self, values: int) -> None:
        self.values = values

    def numel(self) -> int:
        return self.values


class _Model:
    def parameters(self) -> list[_Tensor]:
        return [_Tensor(10), _Tensor(1000)]


class _NamedModel(_Model):
    def named_parameters(self) -> list[tuple[str, _Tensor]]:
        return [("w", _Tensor(10)), ("b", _Tensor(1000))]


def test_sub_models_come_from_models_and_from_sizes() -> None:
    assert layers_of(_Model()) == [("p0", 40), ("p1", 4000)]
    assert layers_of(_NamedModel()) == [("w", 40), ("b", 4000)]
    assert layers_of([64, 128]) == [("layer0", 64), ("layer1", 128)]
    for bad in ([0], [3], [True], [4.0]):
        with pytest.raises(ValueError, match="positive multiples of 4"):
            layers_of(bad)
    with pytest.raises(TypeError, match="int is neither"):
        layers_of(4)


@pytest.mark.parametrize("at_most", [256, 1000, 4096, 10**9])
def test_parts_cover_every_byte_once_and_keep_to_the_limit(at_most: int) -> None:
    layers = [("a", 10_000), ("b", 4), ("c", 256), ("d", 257 * 4)]
    parts = partition(layers, at_most)
    assert all(part.size <= at_most for part in parts)
    ends = np.cumsum([part.size for part in parts])
    assert [part.start for part in parts] == [0, *ends[:-1].tolist()]
    assert ends[-1] == sum(size for _, size in layers)
    # a layer's parts hold as many fragments as the layer: none belongs to two
    for name, size in layers:
        mine = [part for part in parts if part.name.partition("[")[0] == name]
        assert sum(part.fragments for part in mine) == -(-size // 256)
    with pytest.raises(ValueError, match="a fragment has 256 B"):
        partition(layers, 255)


def test_alexnet_is_cut_to_four_megabytes() -> None:
    parts = partition(alexnet(), 4_000_000)
    assert sum(part.size for part in parts) == 61_100_840 * 4
    assert max(part.size for part in parts) <= 4_000_000


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ImportError, match=r"pip install 'inanet\[plan\]'") as caught:
        leaf_spine()
    assert explain(caught.value) == (
        Exit.MISSING,
        f"networkx is not installed: {sys.executable} -m pip install 'inanet[plan]'",
    )
