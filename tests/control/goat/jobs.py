"""Small seeded jobs to schedule."""

import numpy as np

from inanet.control.goat.instance import Instance, from_graph
from inanet.control.goat.submodels import alexnet, layers_of, partition
from inanet.control.goat.topologies import fat_tree, leaf_spine, make_programmable, place


def small(seed: int) -> Instance:
    """Few enough sub-models and switches that the exact program is solved at once; memory is scarce."""
    rng = np.random.default_rng(seed)
    graph = leaf_spine(2, 3, 15) if seed % 2 else fat_tree(4, 2)
    make_programmable(graph, seed, share=0.2, memory=int(rng.integers(1_000_000, 3_000_000)))
    ps, workers = place(graph, int(rng.integers(5, 10)), seed)
    sizes = [int(units) * 256 for units in rng.integers(500, 8_000, 8)]
    return from_graph(graph, ps, workers, partition(layers_of(sizes), 2_000_000))


def paper_fat_tree(seed: int = 1, workers: int = 40) -> Instance:
    """16 programmable switches of 80, AlexNet's layers cut to at most 4 MB."""
    graph = fat_tree()
    make_programmable(graph, seed)
    ps, names = place(graph, workers, seed)
    return from_graph(graph, ps, names, partition(alexnet(), 4_000_000))
