"""The trees of a job whose coordinator was lost, put together from what its members still follow (coordinator restart)."""

from collections.abc import Collection, Mapping

from inanet.planning.topology import Topology
from inanet.proto.common.plan import NodePlan


def topology_of(
    plans: Mapping[str, NodePlan], workers: Collection[str], roots: Collection[str]
) -> Topology | None:
    """The trees that the ``plans`` of members, by name, are views of.

    A member knows its parent and its children, so one that has not come back is known by its neighbours. ``roots``:
    parameter servers of the fabric, for trees of which nobody above is back. None if the plans do not tell, or do not
    fit together yet.
    """
    parents: dict[int, dict[str, str]] = {}
    tops: dict[int, str] = {}
    for name, plan in plans.items():
        for place in plan.placements:
            tree = parents.setdefault(place.tree, {})
            if place.parent is None:
                tops[place.tree] = name
            else:
                tree[name] = place.parent.name
            tree.update((child.name, name) for child in place.children if child.name not in tree)
    found: dict[str, str] = {}
    chosen: list[str] = []
    for index in sorted(parents):
        tree = parents[index]
        above = sorted({parent for parent in tree.values() if parent not in tree})
        top = tops.get(index) or next((name for name in above if name in roots), None)
        if top is None and len(above) == 1:
            top = above[0]
        if top is None:
            return None
        # whoever stood between, and is not back: its own parent is known to nobody
        tree.update(dict.fromkeys((name for name in above if name != top), top))
        chosen.append(top)
        inner = {parent for parent in tree.values() if parent != top}
        found.update((name, tree[name]) for name in inner)
    hosts = {name: tuple(parents[index].get(name, "") for index in sorted(parents)) for name in workers}
    if not chosen or any("" in above for above in hosts.values()):
        return None
    try:
        return Topology(roots=tuple(chosen), aggregators=found, workers=hosts)
    except ValueError:
        return None
