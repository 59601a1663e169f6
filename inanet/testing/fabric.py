"""A whole fabric in one process and in virtual time: real machines, in-memory network, no clock, no sockets.

>>> fabric = VirtualFabric({"ps": None, "agg0": "ps", "w0": "agg0", "w1": "agg0"}, ranks={"w0": [0], "w1": [1]})
>>> fabric.all_reduce(spec, {0: a, 1: b})      # arrays are overwritten with the result

Every node is an :class:`inanet.proto.tree.node.Node` on a :class:`inanet.phy.memory.MemoryDevice`; impairments come from the
same decorators that daemons use. Time stands still while packets are on their way and then jumps to the next timer, so
a test that waits for half a second of retransmissions takes microseconds.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from inanet.phy.device import Device, GroupReceiver
from inanet.phy.memory import MemoryNetwork
from inanet.proto.common.events import NodeEvent, PeerSilent, Refused, RoundDone
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Retired,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.node import Node
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Pump
from inanet.wire.endpoint import endpoint

Wrap = Callable[[Device, str, FakeClock], Device]


class VirtualFabric:
    """``parents`` maps every node to its parent, the root to None; ``ranks`` maps workers to their global ranks.

    ``wrap(device, name, clock)`` may put decorators around a node's device. ``window``, in fragments, is what each
    neighbour may have in flight towards a node; ``windows`` has other values by name. ``queue`` is how many packets a
    device holds. With a ``downlink`` other than ``unicast`` every node with two children or more has a multicast group.
    """

    def __init__(
        self,
        parents: Mapping[str, str | None],
        ranks: Mapping[str, Sequence[int]],
        *,
        capacity: int = 8192,
        window: int = 512,
        windows: Mapping[str, int] | None = None,
        queue: int = 65536,
        timing: Timing | None = None,
        wrap: Wrap | None = None,
        key: int = 0x1234_5678_9ABC_DEF0,
        job: int = 0,
        downlink: Literal["unicast", "multicast", "auto"] = "unicast",
    ) -> None:
        self.clock = FakeClock()
        self.network = MemoryNetwork()
        self.parents = dict(parents)
        self.ranks = {name: tuple(numbers) for name, numbers in ranks.items()}
        self.timing = timing or Timing()
        self.window = window
        self.windows = dict(windows or {})
        self.queue = queue
        self.capacity = capacity
        self.key = key
        self.job = job
        self.downlink = downlink
        self.version = 1
        self._wrap = wrap
        self.devices: dict[str, Device] = {}
        self.nodes: dict[str, Node] = {}
        self._pump = Pump(self.clock, self.nodes, self.devices, step=self.step, figures=self.figures)
        self._groups: dict[str, int] = {}
        self._joined: dict[str, frozenset[int]] = {}
        self.log: list[tuple[str, NodeEvent]] = []
        #: names of those that have reported each round done, as far as the log has been read, and the last event read
        self._finished: dict[int, set[str]] = {}
        self._read = 0
        self._last: tuple[str, NodeEvent] | None = None
        self.layouts: dict[TensorSpec, TensorLayout] = {}
        self.retired: dict[str, list[Retired]] = {}
        self.since: dict[str, int] = {}
        self.bits: dict[str, int] = {}
        self._next_bit: dict[str, int] = {}
        self.next_round = 1
        self._next_shard = 0
        for name in parents:
            self.start(name)
        for name, parent in self.parents.items():
            if parent is not None:
                self._issue(name, parent)
        self.publish()

    # ------------------------------------------------------------ membership

    def start(self, name: str) -> None:
        """Start (or restart, with empty memory) a node at its address."""
        old = self.devices.pop(name, None)
        port = 0
        if old is not None:
            port = old.endpoint & 0xFFFF
            old.close()
        device: Device = self.network.open(port=port, queue_packets=self.queue)
        if self._wrap is not None:
            device = self._wrap(device, name, self.clock)
        self.devices[name] = device
        self.nodes[name] = Node(name, self.capacity, self.timing, random.Random(name).random)
        self._joined[name] = frozenset()

    def kill(self, name: str) -> None:
        """Stop a node for good; what it holds and what is queued for it is gone."""
        self.devices.pop(name).close()
        del self.nodes[name]

    def _issue(self, name: str, parent: str) -> None:
        self.bits[name] = 1 << self._next_bit.setdefault(parent, 0)
        self._next_bit[parent] += 1
        self.since[name] = self.version

    def granted(self, name: str) -> int:
        """Fragments that each neighbour may have in flight towards a node."""
        return self.windows.get(name, self.window)

    def plan_of(self, name: str) -> NodePlan:
        """The node's view of the current plan version."""
        parent = self.parents[name]
        up = None
        if parent is not None:
            up = Parent(
                parent,
                self.devices[parent].endpoint,
                self.bits[name],
                self.granted(parent),
                self.group_of(parent),
            )
        group = self.group_of(name)
        children = tuple(
            Child(
                child,
                self.devices[child].endpoint,
                self.bits[child],
                self.since[child],
                self.granted(child),
                group != 0,
            )
            for child in sorted(self.parents)
            if self.parents[child] == name
        )
        placement = Placement(
            0, up, children, tuple(self.retired.get(name, ())), group, self.downlink == "auto"
        )
        total = sum(len(numbers) for numbers in self.ranks.values())
        return NodePlan(self.job, self.version, self.key, total, (placement,), self.granted(name))

    def group_of(self, name: str) -> int:
        """The multicast group of a node's children, 0 if it has none."""
        children = sum(parent == name for parent in self.parents.values())
        if self.downlink == "unicast" or children < 2:
            return 0
        number = self._groups.setdefault(name, len(self._groups) + 1)
        return endpoint(f"239.192.0.{number}", 7401)

    def publish(self, *, attach: Sequence[str] = ()) -> None:
        """Give the current plan to all nodes, and have their devices join and leave groups as it says."""
        for name, node in self.nodes.items():
            node.apply(self.plan_of(name), self.clock.now, attach=[0] if name in attach else [])
            self._follow_groups(name)

    def _follow_groups(self, name: str) -> None:
        device, wanted = self.devices[name], self.nodes[name].groups
        joined = self._joined.get(name, frozenset())
        if wanted != joined:
            assert isinstance(device, GroupReceiver)
            for group in joined - wanted:
                device.leave(group)
            for group in wanted - joined:
                device.join(group)
            self._joined[name] = wanted

    def lose_aggregator(self, name: str) -> None:
        """Kill an inner node in the middle of whatever it does; its children move to its parent (re-parenting)."""
        parent = self.parents[name]
        assert parent is not None, "a root has no parent to take its children"
        self.kill(name)
        self.version += 1
        orphans = [child for child, its in self.parents.items() if its == name]
        del self.parents[name]
        for child in orphans:
            self.parents[child] = parent
            self._issue(child, parent)
        mask = 0
        for child in orphans:
            mask |= self.bits[child]
        self.retired.setdefault(parent, []).append(Retired(self.bits[name], mask))
        self.publish(attach=orphans)

    def restart_root(self, name: str) -> None:
        """Kill the root and start it with empty memory at the same address (root restart)."""
        self.start(name)
        self.version += 1
        self.since = dict.fromkeys(self.since, self.version)
        self.nodes[name].apply(self.plan_of(name), self.clock.now)
        for layout in self.layouts.values():
            self.nodes[name].add_layout(self.job, layout)
        self.publish(attach=[child for child in self.parents if self.parents[child] is not None])

    # ------------------------------------------------------------ rounds

    def layout(self, spec: TensorSpec) -> TensorLayout:
        """Lay a tensor out on all nodes, once."""
        known = self.layouts.get(spec)
        if known is not None:
            return known
        form = make_format(spec, sum(len(numbers) for numbers in self.ranks.values()))
        tensor = len(self.layouts)
        shards = [Shard(self._next_shard, tensor, 0, Part.DATA, form.fold, 0, form.fragments)]
        if form.uses_exponents and spec.mode is not ExponentMode.FIXED:
            count = form.exponent_fragments
            shards.append(Shard(self._next_shard + 1, tensor, 0, Part.EXPONENTS, Fold.MAX8, 0, count))
        self._next_shard += len(shards)
        layout = TensorLayout(tensor, spec, tuple(shards))
        self.layouts[spec] = layout
        for node in self.nodes.values():
            node.add_layout(self.job, layout)
        return layout

    def begin(
        self, spec: TensorSpec, arrays: Mapping[int, NDArray[Any]], workers: Sequence[str] | None = None
    ) -> int:
        """Start a round at some workers (default: all); ``arrays`` by rank. Returns its number."""
        layout = self.layout(spec)
        round_ = self.next_round
        if workers is None:
            workers = list(self.ranks)
            self.next_round += 1
        for worker in workers:
            mine = [arrays[rank].reshape(-1) for rank in self.ranks[worker]]
            self.nodes[worker].begin(self.job, layout.tensor, round_, mine, self.clock.now)
        return round_

    def all_reduce(
        self, spec: TensorSpec, arrays: Mapping[int, NDArray[Any]], *, deadline: float = 60.0
    ) -> Mapping[int, NDArray[Any]]:
        """One round from begin to done on every worker; returns the arrays it has overwritten."""
        round_ = self.begin(spec, arrays)
        self.run(lambda: self.done(round_), deadline=deadline)
        return arrays

    def done(self, round_: int) -> bool:
        """Whether all workers that are alive have reported a round done."""
        log = self.log
        if self._read and (len(log) < self._read or log[self._read - 1] is not self._last):
            # somebody has cleared it
            self._read = 0
            self._finished.clear()
        for name, event in log[self._read :]:
            if isinstance(event, RoundDone):
                self._finished.setdefault(event.round, set()).add(name)
        if log:
            self._read, self._last = len(log), log[-1]
        finished = self._finished.get(round_, set())
        return finished >= {name for name in self.ranks if name in self.nodes}

    def refusals(self) -> list[Refused]:
        """All refusals so far."""
        return [event for _, event in self.log if isinstance(event, Refused)]

    def silent(self) -> list[PeerSilent]:
        """All reports of silent peers so far."""
        return [event for _, event in self.log if isinstance(event, PeerSilent)]

    # ------------------------------------------------------------ time

    def step(self) -> bool:
        """Deliver and send what can be delivered and sent at this instant; False if there was nothing."""
        progress = self._pump.exchange()
        for name, node in self.nodes.items():
            events = node.events()
            progress = progress or bool(events)
            self.log.extend((name, event) for event in events)
        return progress

    def run(self, until: Callable[[], bool], *, deadline: float = 60.0) -> None:
        """Run until a condition holds. Raises :class:`~inanet.testing.pump.Stuck` after ``deadline`` seconds of virtual time."""
        self._pump.run(until, deadline)

    def settle(self, seconds: float = 5.0) -> None:
        """Let everything come to rest: confirmations, commits, late duplicates."""
        self._pump.settle(seconds)

    def figures(self) -> dict[str, dict[str, int]]:
        """Counters of every node that are not zero; drops by reason as ``drop_<reason>``."""
        return {
            name: {k: v for k, v in node.stats().items() if v}
            | {f"drop_{k}": v for k, v in node.drops_by_reason().items() if v}
            for name, node in self.nodes.items()
        }


def float_arrays(count: int, ranks: int, seed: int = 0) -> dict[int, NDArray[np.float32]]:
    """Normally distributed float32 arrays, one per rank, from one seed."""
    generator = np.random.default_rng(seed)
    return {rank: generator.standard_normal(count).astype(np.float32) for rank in range(ranks)}
