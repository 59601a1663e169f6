"""What the kernel program may send: where parents and groups are, how much their links take, and what comes behind it."""

from collections.abc import Iterator, Mapping

import numpy as np

from inanet.proto.tree.engine import Tables
from inanet.proto.tree.flow import BURST
from inanet.proto.tree.membership import Job, Tree
from inanet.proto.tree.slots import ShardColumn, TreeColumn
from inanet.proto.tree.xagg import slotwork
from inanet.xdp.memory import HOP, Held, SharedMemory
from inanet.xdp.road import Road


class Routes:
    """For the trees of ``jobs``, by row. ``tables`` are those of the node's slots."""

    def __init__(self, memory: SharedMemory, tables: Tables, jobs: Mapping[int, Job]) -> None:
        #: ways to parents
        self.roads: dict[int, Road] = {}
        self._memory = memory
        self._tables = tables
        self._jobs = jobs
        self._routes = memory.tables["routes"][0]
        self._hops = memory.object.map("hops")
        #: packets to the parent that have been put on the account of the link
        self._accounted: dict[int, int] = {}
        #: packets to the group that are on the accounts of those who hear it
        self._broadcast: dict[int, int] = {}

    def trees(self) -> Iterator[Tree]:
        """Those of all jobs."""
        for job in self._jobs.values():
            yield from job.trees.values()

    def is_known(self, row: int) -> bool:
        """Whether the program knows the parent's link-layer address."""
        return bool(self._routes[row]["parent_ifindex"])

    def begin(self, row: int) -> None:
        """A tree has come; the row may have been another tree's."""
        self._routes[row]["up_sent"] = self._routes[row]["down_sent"] = 0
        self._accounted[row] = self._broadcast[row] = 0

    def hold_ends(self) -> None:
        """What user space has completed just now goes before the ends of groups."""
        for tree in self.trees():
            self._routes[tree.row]["ends_held"] = Held.HELD_UP | Held.HELD_DOWN

    def follow(self) -> None:
        """Tell the program where parents are, how often to report progress, and what retired ids stand for."""
        for tree in self.trees():
            route = self._routes[tree.row]
            route["stands_for"] = self._stands_for(tree)
            windows = [tree.job.plan.window or min(link.window, 64) for link in tree.links() if link.bit]
            step = max(1, min(windows, default=64) // 4)
            route["credit_mask"] = (1 << (step.bit_length() - 1)) - 1
            found = None
            if tree.up is not None:
                found = self._hops.get(tree.up.endpoint.to_bytes(8, "little"), HOP.itemsize)
            if found is None:
                route["parent_ifindex"] = 0
            else:
                hop = np.frombuffer(found, HOP)[0]
                route["parent_mac"] = hop["mac"]
                route["parent_ifindex"] = hop["ifindex"]

    def _stands_for(self, tree: Tree) -> list[int]:
        """For each id what it stands for if it has retired, to the end of the chain (re-parenting)."""
        retired = int(self._memory.trees[tree.row, TreeColumn.RETIRED])
        closed = []
        for index in range(32):
            found, todo = 0, [index] if retired >> index & 1 else []
            while todo:
                mask = int(self._memory.mask[tree.row, todo.pop()]) & ~found
                found |= mask
                todo += [other for other in range(32) if mask & retired & 1 << other]
            closed.append(found)
        return closed

    def settle(self, now: float) -> None:
        """Put what the program has sent on its link's account, and let it send as much as is left there."""
        for tree in self.trees():
            route = self._routes[tree.row]
            self._settle_group(tree, now)
            sent = int(route["up_sent"])
            link = tree.up
            if link is None:
                continue
            road = self.roads.get(tree.row)
            if road is None or road.link is not link:
                road = self.roads[tree.row] = Road(link, sent)
            road.settle(sent - self._accounted.get(tree.row, sent), now)
            self._accounted[tree.row] = sent
            road.look(sent)
            behind = self._is_parent_behind(tree)
            down = self._is_group_behind(tree)
            route["ends_held"] = (Held.HELD_UP if behind else 0) | (Held.HELD_DOWN if down else 0)
            route["up_limit"] = road.limit(sent, half=behind)

    def _settle_group(self, tree: Tree, now: float) -> None:
        """As much as every child's link takes may go to the group without user space, if all children hear it."""
        route, group = self._routes[tree.row], tree.multicast
        sent = int(route["down_sent"])
        fresh = sent - self._broadcast.get(tree.row, sent)
        self._broadcast[tree.row] = sent
        road = self.roads.get(tree.row)
        proven = road is not None and road.arrives is True
        room = 0
        if group is not None:
            for link in group.grouped if fresh else ():
                link.sent(fresh, now)
            group.link.packets += fresh
            if proven and group.grouped and len(group.grouped) == len(tree.down):
                room = max(0, min(link.room - len(link.resend) for link in group.grouped))
                if self._is_group_behind(tree):
                    room //= 2
                route["group"] = group.link.endpoint
        route["down_limit"] = sent + room

    def _is_group_behind(self, tree: Tree) -> bool:
        """As :meth:`_is_parent_behind`, for results to the group."""
        offsets = np.empty(BURST, np.int64)
        for state in tree.lineup() if tree.multicast is not None else ():
            cursor, logged = state.group_cursor, int(self._memory.shards[state.row, ShardColumn.DOWN_LOGGED])
            while cursor < logged:
                stop = min(cursor + BURST, logged)
                if slotwork.logged_rows(self._tables, state.row, cursor, stop, False, offsets):
                    return True
                cursor = stop
        return False

    def _is_parent_behind(self, tree: Tree) -> bool:
        """Whether user space still has something to send to the parent: the end of a group must not overtake it, or the
        parent would ask for what it has not got yet (emission groups).
        """
        offsets = np.empty(BURST, np.int64)
        for state in tree.lineup():
            sender = state.up
            if sender is None:
                continue
            logged = int(self._memory.shards[state.row, ShardColumn.UP_LOGGED])
            while sender.cursor < logged:
                stop = min(sender.cursor + BURST, logged)
                if slotwork.logged_rows(self._tables, state.row, sender.cursor, stop, True, offsets):
                    return True
                sender.cursor = stop
                sender.sent_due = None
        return False

    @property
    def unheard(self) -> bool:
        """Whether some parent did not get what the program sent: user space sends to it."""
        return any(road.arrives is False for road in self.roads.values())

    def try_again(self) -> None:
        """The program has moved to another mode: what did not arrive may do so now."""
        for road in self.roads.values():
            road.release()
        self.roads.clear()
