"""A node's jobs, trees and shards: the Python side of the tables in :mod:`inanet.proto.tree.slots`."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from inanet.proto.common.plan import Child, NodePlan, Parent, Part, Placement, Shard
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.collective import Collective, TensorState
from inanet.proto.tree.multicast import Multicast
from inanet.proto.tree.reliability import Link, Receiver, Sender
from inanet.proto.tree.slots import (
    GROUP_LINK,
    LINKS,
    UP_LINK,
    LeafColumn,
    ShardColumn,
    SlotMemory,
    TreeColumn,
)
from inanet.wire.serial import is_newer

#: how many plan versions back an id or a link may date: versions travel modulo 256 and compare within half of that
_HORIZON = 100


@dataclass(slots=True)
class Tree:
    """This node's place in one tree of one job, and its links there."""

    job: "Job"
    tree: int
    row: int
    memory: SlotMemory
    up: Link | None = None
    #: by child index (position of the one-hot bit)
    down: dict[int, Link] = field(default_factory=dict)
    #: the group through which children get results; None: by unicast
    multicast: Multicast | None = None
    #: endpoint of the group through which the parent may send results; 0: none
    hears: int = 0
    _lineup: "list[ShardState] | None" = None
    timing: Timing = field(default_factory=Timing)
    #: numbers in [0, 1) for the back-off of requests for results that many may lack (multicast results)
    random: Callable[[], float] | None = None

    def place(self, placement: Placement, *, fresh: bool) -> bool:
        """Apply a placement: tables, new links, links that went. Returns whether the parent has changed.

        ``fresh`` replaces the link to the parent even if it looks the same: its other end has started again.
        """
        memory = self.memory
        t = memory.trees[self.row]
        version = self.job.plan.version
        parent = placement.parent
        moved = False
        if parent is None:
            if self.up is not None:
                self.up.drop()
            self.up = None
        else:
            same = self.up is not None and (self.up.endpoint, self.up.bit) == (parent.endpoint, parent.bit)
            if self.up is None or not same or fresh:
                moved = self.up is not None
                self.up = self._link(parent, version, UP_LINK, self.up)
            if not same:
                memory.taken[self.row, 32] = 0
            self.up.window = parent.window
            self.up.grants(self.job.plan.window)
            self.up.since = max(self.up.since, version - _HORIZON)
        t[TreeColumn.IS_ROOT] = parent is None
        t[TreeColumn.BIT] = parent.bit if parent else 0
        t[TreeColumn.PARENT_ENDPOINT] = parent.endpoint if parent else -1
        live = 0
        for child in placement.children:
            index = child.bit.bit_length() - 1
            live |= child.bit
            memory.since[self.row, index] = max(child.since, version - _HORIZON) & 0xFF
            memory.child_endpoint[self.row, index] = child.endpoint
            known = self.down.get(index)
            if known is None or known.endpoint != child.endpoint:
                known = self.down[index] = self._link(child, version, index, known)
                memory.taken[self.row, index] = 0
            known.window = child.window
            known.grants(self.job.plan.window)
            known.since = max(known.since, version - _HORIZON)
        for index in [index for index in self.down if not live >> index & 1]:
            self.down.pop(index).drop()
        self.hears = parent.group if parent else 0
        self._place_group(placement)
        t[TreeColumn.LIVE] = live
        t[TreeColumn.RETIRED] = 0
        for retired in placement.retired:
            t[TreeColumn.RETIRED] |= retired.bit
            memory.mask[self.row, retired.bit.bit_length() - 1] = retired.mask
        return moved

    def _link(self, neighbour: Parent | Child, version: int, index: int, before: Link | None) -> Link:
        """A link in the table, in place of the one ``before``."""
        if before is not None:
            before.drop()
        return Link(
            neighbour.name,
            neighbour.endpoint,
            neighbour.bit,
            neighbour.window,
            plausible=self.timing.retransmit,
            since=version,
            memory=self.memory,
            row=self.row * LINKS + index,
        )

    def _place_group(self, placement: Placement) -> None:
        group = self.multicast
        if group is not None and group.link.endpoint != placement.group:
            group.dissolve()
            group.link.drop()
            group = None
        if group is None and placement.group:
            where = self.row * LINKS + GROUP_LINK
            group = Multicast(Link("group", placement.group, 0, 0, memory=self.memory, row=where))
        self.multicast = group
        if group is not None:
            joining = [child.bit.bit_length() - 1 for child in placement.children if child.joins]
            group.follow({index: self.down[index] for index in joining}, trusted=not placement.probe)

    def links(self) -> list[Link]:
        """All links, that of the parent first, then that of the group."""
        many = [self.multicast.link] if self.multicast else []
        return ([self.up] if self.up else []) + many + list(self.down.values())

    def lineup(self) -> "list[ShardState]":
        """Shards with a round on its way, in the order in which they are sent: oldest round first, exponents first."""
        if self._lineup is None:
            mine = [state for state in self.job.shards.values() if state.tree is self and state.sending]
            self._lineup = sorted(mine, key=lambda state: (state.round or 0, state.data))
            rows = [state.row for state in self._lineup]
            self.memory.first_row[self.row] = rows[0] if rows else -1
            self.memory.next_row[rows] = [*rows[1:], -1][: len(rows)]
        return self._lineup

    def changed(self) -> None:
        """A round has begun or ended, or a shard has come or gone."""
        self._lineup = None
        self.memory.first_row[self.row] = -1

    def again_down(self, row: int, fragment: int) -> None:
        """Queue one result for another transmission to all children."""
        if self.multicast is not None and self.multicast.grouped:
            self.multicast.link.again(row, fragment)
        for link in self.down.values():
            if not link.grouped:
                link.again(row, fragment)

    def forget(self, row: int) -> None:
        """Drop what is queued for one shard: its round is over."""
        for link in self.links():
            link.forget(row)
        if self.multicast is not None:
            self.multicast.forget(row)

    def receiver(self, count: int) -> Receiver:
        """For the results of one shard's round."""
        return Receiver(count, self.timing, self.random if self.hears else None)


@dataclass(slots=True)
class ShardState:
    """One shard at this node, and the state of the round its slots belong to."""

    shard: Shard
    job: "Job"
    tree: Tree
    row: int
    slot0: int
    #: round whose state is kept here, None before the first one
    round: int | None = None
    up: Sender | None = None
    down: dict[int, Sender] = field(default_factory=dict)
    from_children: dict[int, Receiver] = field(default_factory=dict)
    from_parent: Receiver | None = None
    #: the whole subtree below has the results and the parent has been told (or, at a root, has committed)
    confirmed: bool = False
    #: this host's part in the round; kernels see its row of ``leaves``
    collective: Collective | None = None
    #: rounds waiting for the slots to be opened for them, and when to ask the parent again
    waiting: deque[Collective] = field(default_factory=deque)
    ready_due: float | None = None
    ready_interval: float = 0.0
    #: last round that is over here, and whether it failed
    over: int = 0
    over_failed: bool = False
    #: failed rounds that a late packet might still open here
    dead: set[int] = field(default_factory=set)

    def start(self, round_: int, timing: Timing) -> None:
        """Fresh senders and receivers for a round."""
        self.round = round_
        self.tree.changed()
        self.confirmed = False
        self.leave()
        self.stop_sending()
        self.group_cursor = 0
        self.up = self.sender(UP_LINK) if self.tree.up else None
        self.from_parent = self.tree.receiver(self.shard.count) if self.tree.up else None
        self.down = {index: self.sender(index) for index in self.tree.down}
        self.from_children = {index: Receiver(self.shard.count, timing) for index in self.tree.down}
        self.tree.forget(self.row)

    def take_part(self, collective: Collective) -> None:
        """This host has a part in the round that has just begun."""
        self.collective = collective
        collective.place(self.shard, self.tree.memory.leaves[self.row])

    def leave(self) -> None:
        """It has none any more: nothing is read from its arrays or written to them."""
        self.collective = None
        self.tree.memory.leaves[self.row] = 0

    def sender(self, index: int, cursor: int = 0, attach_due: float | None = None) -> Sender:
        """For one link of the tree, from a position of the log on."""
        link = self.tree.up if index == UP_LINK else self.tree.down[index]
        assert link is not None
        return Sender(link, cursor, attach_due, cursors=self.tree.memory.cursors, row=self.row, index=index)

    def stop_sending(self) -> None:
        """The round is over, or another one begins: nothing leaves on any link."""
        self.up = None
        self.down = {}
        self.tree.memory.cursors[self.row] = -1

    @property
    def group_cursor(self) -> int:
        """Results sent by multicast so far, as a position in the emission log."""
        return int(self.tree.memory.cursors[self.row, GROUP_LINK])

    @group_cursor.setter
    def group_cursor(self, value: int) -> None:
        self.tree.memory.cursors[self.row, GROUP_LINK] = value

    @property
    def encoded(self) -> int:
        """Fragments of the collective that have been encoded so far."""
        return int(self.tree.memory.leaves[self.row, LeafColumn.ENCODED])

    @encoded.setter
    def encoded(self, value: int) -> None:
        self.tree.memory.leaves[self.row, LeafColumn.ENCODED] = value

    @property
    def decoded(self) -> int:
        """Results that have been decoded so far, as a position in their log."""
        return int(self.tree.memory.leaves[self.row, LeafColumn.DECODED])

    @decoded.setter
    def decoded(self, value: int) -> None:
        self.tree.memory.leaves[self.row, LeafColumn.DECODED] = value

    @property
    def up_logged(self) -> int:
        """Entries of the emission log towards the parent."""
        return int(self.tree.memory.shards[self.row, ShardColumn.UP_LOGGED])

    @property
    def down_logged(self) -> int:
        """Results that are here, entries of the emission log towards the children."""
        return int(self.tree.memory.shards[self.row, ShardColumn.DOWN_LOGGED])

    @property
    def committed(self) -> bool:
        """Whether a later round may take the slots."""
        return bool(self.tree.memory.shards[self.row, ShardColumn.COMMITTED])

    @property
    def active(self) -> int:
        """The round that the slots belong to."""
        return int(self.tree.memory.shards[self.row, ShardColumn.ACTIVE])

    def is_running(self, round_: int) -> bool:
        """Whether this round is on its way here."""
        return self.round == round_ and not self.committed

    def is_ahead(self, round_: int) -> bool:
        """Whether a round is later than any that the shard has seen."""
        return self.round is None or is_newer(round_, self.round)

    def is_over(self, round_: int) -> bool:
        """Whether the shard will never open this round (any more)."""
        return round_ in self.dead or not is_newer(round_, self.active)

    @property
    def sending(self) -> bool:
        """Whether a round is on its way that has neighbours to be sent to."""
        return self.round is not None and (self.up is not None or bool(self.down))

    @property
    def data(self) -> bool:
        """Whether the shard holds values rather than exponents."""
        return self.shard.part is Part.DATA


@dataclass(slots=True)
class Job:
    """One job at this node."""

    job: int
    row: int
    plan: NodePlan
    trees: dict[int, Tree] = field(default_factory=dict)
    tensors: dict[int, TensorState] = field(default_factory=dict)
    shards: dict[int, ShardState] = field(default_factory=dict)
    collectives: dict[int, Collective] = field(default_factory=dict)
    _by_tensor: dict[int, list[ShardState]] = field(default_factory=dict)

    def add(self, tensor: int, states: list[ShardState]) -> None:
        """Take in this node's shards of one tensor."""
        self._by_tensor[tensor] = states
        self.shards.update((state.shard.shard, state) for state in states)
        for state in states:
            state.tree.changed()

    def remove(self, tensor: int) -> list[ShardState]:
        """Forget a tensor's shards; returns them."""
        states = self._by_tensor.pop(tensor, [])
        for state in states:
            del self.shards[state.shard.shard]
            state.tree.changed()
        return states

    def shards_of(self, tensor: int) -> list[ShardState]:
        """This node's shards of one tensor."""
        return self._by_tensor.get(tensor, [])
