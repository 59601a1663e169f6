"""One-hot ids over plan versions: every node's view of a job's trees, such that nothing is ever counted
twice (re-parenting).

A *version* says for every parent which bit stands for which child. Between two versions a bit keeps its
child, or it retires: its child is gone, and what that child had already sent stands for the children that
replace it there. A bit that has retired is issued again only when the caller says that every round it may
have taken part in is over.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inanet.coordinator.receive_buffers import Destination
from inanet.messages.text import listing
from inanet.planning.topology import Tree
from inanet.proto.common.plan import (
    Child,
    NodePlan,
    Parent,
    Placement,
    Retired,
    SwitchedJob,
)
from inanet.wire.xagg import MAX_CHILDREN

if TYPE_CHECKING:
    from inanet.planning.goat.publication import Publish


class PlanError(ValueError):
    """No plan is possible; the text names the node that has no ids left."""


@dataclass(slots=True)
class Ids:
    """The ids one parent has given out in one tree: child to (bit, version that issued it), and retired
    bits.
    """

    live: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: retired bit to the live bits it stands for, and the version that retired it
    retired: dict[int, tuple[int, int]] = field(default_factory=dict)

    def forget_retired(self, version: int) -> None:
        """Free the bits that retired in ``version`` or before."""
        self.retired = {bit: (mask, at) for bit, (mask, at) in self.retired.items() if at > version}


class JobPlan:
    """Plan versions of one job.

    ``ancestors(tree, name)`` are the configured parents of a node, nearest first: children that turn up at
    a parent replace the one among them that is gone. ``ranks`` is *n* of the number format. ``group_of(tree, parent)`` is the
    endpoint of a multicast group for the results of a parent, or 0; without it all results go by unicast.
    ``probe``: by multicast only to children that have answered. ``switched`` goes to all nodes as it is; ``publish`` makes
    the sub-models of a tensor where several switches sum.
    """

    def __init__(
        self,
        job: int,
        key: int,
        ranks: int,
        ancestors: Callable[[int, str], Sequence[str]],
        *,
        group_of: Callable[[int, str], int] | None = None,
        probe: bool = False,
        switched: SwitchedJob | None = None,
        publish: "Publish | None" = None,
    ) -> None:
        self.job = job
        self.key = key
        self.ranks = ranks
        self.version = 0
        self.trees: tuple[Tree, ...] = ()
        self._ancestors = ancestors
        self._group_of = group_of
        self._probe = probe
        self.switched = switched
        self.publish = publish
        self._ids: dict[tuple[int, str], Ids] = {}

    def holders(self) -> tuple[str, ...]:
        """Aggregators and parameter servers in the plan, parents first."""
        workers = {child for tree in self.trees for child in tree.parents if child not in tree.children}
        return tuple(name for name in self.nodes() if name not in workers)

    def follow(self, ancestors: Callable[[int, str], Sequence[str]]) -> None:
        """The job has other trees from the next version on."""
        self._ancestors = ancestors

    def advance(self, trees: tuple[Tree, ...], *, settled: int = 0, quiet: bool = False) -> None:
        """Make the next version, with these trees.

        ``settled``: bits that retired in this version or earlier are free again. ``quiet``: no round is on
        its way anywhere, so children may move freely and nothing retires. Raises :class:`PlanError` and
        changes nothing if a parent has no bits left.
        """
        version = self.version + 1
        ids: dict[tuple[int, str], Ids] = {}
        for tree in trees:
            for parent, children in tree.children.items():
                before = self._ids.get((tree.tree, parent), Ids())
                ids[tree.tree, parent] = self._successor(
                    tree.tree, parent, before, children, version, settled, quiet
                )
        self.version, self.trees, self._ids = version, trees, ids

    def _successor(
        self,
        tree: int,
        parent: str,
        before: Ids,
        children: Collection[str],
        version: int,
        settled: int,
        quiet: bool,
    ) -> Ids:
        ids = Ids(dict(before.live), dict(before.retired))
        ids.forget_retired(version if quiet else settled)
        gone = {name: ids.live.pop(name)[0] for name in before.live if name not in children}
        taken = set(ids.retired) | {bit for bit, _ in ids.live.values()}
        if not quiet:
            taken |= set(gone.values())
        free = [1 << index for index in range(MAX_CHILDREN) if 1 << index not in taken]
        added = [name for name in sorted(children) if name not in ids.live]
        if len(added) > len(free):
            lost = len(taken) - len(ids.live)
            orphans = listing(repr(name) for name in added)
            raise PlanError(
                f"{parent!r} cannot take over {orphans}: {len(ids.live)} of its {MAX_CHILDREN} ids belong to "
                f"other children and {lost} to lost ones; put an aggregator between them"
            )
        for name, bit in zip(added, free, strict=False):
            ids.live[name] = (bit, version)
        if quiet:
            return ids
        for name, bit in gone.items():
            heirs = [ids.live[heir][0] for heir in added if name in self._ancestors(tree, heir)]
            mask = sum(heirs)
            # what stood for the lost child stands for its heirs now
            ids.retired = {
                old: (m & ~bit | mask if m & bit else m, at) for old, (m, at) in ids.retired.items()
            }
            ids.retired[bit] = (mask, version)
        return ids

    def adopt(self, plans: Mapping[str, NodePlan]) -> None:
        """Take over what nodes that outlived their coordinator follow; call :meth:`advance` afterwards.

        A parent's own view counts for its ids, since it is its slots that must not count twice. The version
        becomes the highest anybody has seen.
        """
        self.version = max(plan.version for plan in plans.values())
        for name, plan in plans.items():
            for place in plan.placements:
                if place.children:
                    self._ids[place.tree, name] = Ids(
                        {child.name: (child.bit, child.since) for child in place.children},
                        {retired.bit: (retired.mask, plan.version) for retired in place.retired},
                    )

    @property
    def retires(self) -> bool:
        """Whether the current version has retired bits that the one before had not."""
        return any(at == self.version for ids in self._ids.values() for _, at in ids.retired.values())

    def nodes(self) -> tuple[str, ...]:
        """All nodes of the current version, parents before their children."""
        seen: dict[str, None] = {}
        for tree in self.trees:
            seen.update(dict.fromkeys(tree.nodes))
        return tuple(seen)

    def links(self) -> dict[str, int]:
        """How many neighbours send to each node, over all trees."""
        count: dict[str, int] = {}
        for tree in self.trees:
            for child, parent in tree.parents.items():
                count[child] = count.get(child, 0) + 1
                count[parent] = count.get(parent, 0) + 1
        return count

    def view(self, name: str, destinations: Callable[[str], Destination]) -> NodePlan:
        """One node's view of the current version."""
        placements = []
        for tree in self.trees:
            parent = tree.parents.get(name)
            children = tree.children.get(name, ())
            if parent is None and name != tree.root:
                continue
            ids = self._ids.get((tree.tree, name), Ids())
            group = self._group(tree, name, destinations)
            placements.append(
                Placement(
                    tree.tree,
                    self._parent(tree, name, parent, destinations) if parent else None,
                    tuple(self._child(child, ids, destinations, group) for child in children),
                    tuple(Retired(bit, mask) for bit, (mask, _) in sorted(ids.retired.items())),
                    group,
                    group != 0 and self._probe,
                )
            )
        own = destinations(name).window
        return NodePlan(self.job, self.version, self.key, self.ranks, tuple(placements), own, self.switched)

    def _group(self, tree: Tree, parent: str, destinations: Callable[[str], Destination]) -> int:
        """The group for the results of a parent; 0 unless it and at least two of its children can multicast."""
        if self._group_of is None or not destinations(parent).listens:
            return 0
        able = sum(destinations(child).listens for child in tree.children.get(parent, ()))
        return self._group_of(tree.tree, parent) if able > 1 else 0

    def _parent(
        self, tree: Tree, name: str, parent: str, destinations: Callable[[str], Destination]
    ) -> Parent:
        destination = destinations(parent)
        group = self._group(tree, parent, destinations) if destinations(name).listens else 0
        bit, _ = self._ids[tree.tree, parent].live[name]
        return Parent(parent, destination.endpoint, bit, destination.window, group)

    @staticmethod
    def _child(name: str, ids: Ids, destinations: Callable[[str], Destination], group: int) -> Child:
        destination = destinations(name)
        bit, since = ids.live[name]
        return Child(
            name, destination.endpoint, bit, since, destination.window, group != 0 and destination.listens
        )
