"""Seeded jobs to schedule."""

from inanet.bench.scheduler import GROWTH, Size, instance, small
from inanet.planning.goat.instance import Instance

__all__ = ["paper_fat_tree", "small"]


def paper_fat_tree(seed: int = 1, workers: int = 40) -> Instance:
    """16 programmable switches of 80, AlexNet's layers cut to at most 4 MB."""
    return instance(Size(GROWTH[0].ports, GROWTH[0].servers_per_edge, workers), seed)
