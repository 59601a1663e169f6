"""A coordinator that says to a member what a script tells it to, with a real node, in virtual time."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.member.member import Failed, Identity, Member
from inanet.messages.control import (
    Layout,
    Message,
    Plan,
    Welcome,
)
from inanet.phy.memory import MemoryDevice, MemoryNetwork
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import (
    Child,
    ExponentMode,
    Fold,
    NodePlan,
    Parent,
    Part,
    Placement,
    Shard,
    TensorLayout,
    TensorSpec,
)
from inanet.proto.tree.node import Node
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Pump

JOB = 5
KEY = 77
SPEC = TensorSpec("w", "i32", (300,), "sum", ExponentMode.NONE)
OTHER = TensorSpec("", "f32", (2, 100), "sum", ExponentMode.PROLOGUE)


def layout_of(spec: TensorSpec, tensor: int = 0) -> TensorLayout:
    form = make_format(spec, 2)
    shards = [Shard(2 * tensor, tensor, 0, Part.DATA, form.fold, 0, form.fragments)]
    if form.exponent_fragments:
        count = form.exponent_fragments
        shards.append(Shard(2 * tensor + 1, tensor, 0, Part.EXPONENTS, Fold.MAX8, 0, count))
    return TensorLayout(tensor, spec, tuple(shards))


class Script:
    """A worker host with rank 1 of 2, and a parameter server whose other child is played by the test."""

    def __init__(self, capacity: int = 64, role: str = "worker") -> None:
        self.clock = FakeClock()
        network = MemoryNetwork()
        self.devices: list[MemoryDevice] = [network.open() for _ in range(3)]
        self.root = Node("ps", 64)
        self.other = Node("other", 64)
        self.done: list[tuple[int, Failed | None]] = []
        self.progress: list[str] = []
        job = {"job": "train", "ranks": (1,), "world": 2} if role == "worker" else {}
        who = Identity("w1", role, "token", self.devices[1].endpoint, 100, **job)  # type: ignore[arg-type]
        self.member = Member(
            Node("w1", capacity),
            who,
            progress=self.progress.append,
        )
        self.member.connected()

    def hear(self, *messages: Message) -> list[Message]:
        """What the member says to these messages."""
        for message in messages:
            self.member.receive(message, self.clock.now)
        return self.said()

    def said(self) -> list[Message]:
        return self.member.outgoing()

    def plan(self, version: int = 1, job: int = JOB) -> Plan:
        up = Parent("ps", self.devices[0].endpoint, 2, 16)
        return Plan(plan=NodePlan(job, version, KEY, 2, (Placement(0, up),)))

    def join(self, *layouts: TensorLayout) -> list[Message]:
        """The whole way into the job, with tensors in it."""
        self.said()
        self.hear(Welcome(job=JOB, silence=10.0), self.plan())
        self._surroundings(layouts)
        return self.hear(*[Layout(job=JOB, layout=layout, last_round=0) for layout in layouts])

    def _surroundings(self, layouts: Sequence[TensorLayout]) -> None:
        ends = [device.endpoint for device in self.devices]
        children = (Child("w1", ends[1], 2, 1, 16), Child("other", ends[2], 1, 1, 16))
        self.root.apply(NodePlan(JOB, 1, KEY, 2, (Placement(0, None, children),)), self.clock.now)
        up = Parent("ps", ends[0], 1, 16)
        self.other.apply(NodePlan(JOB, 1, KEY, 2, (Placement(0, up),)), self.clock.now)
        for node in (self.root, self.other):
            for layout in layouts:
                node.add_layout(JOB, layout)

    def begin(self, round_: int, spec: TensorSpec = SPEC, value: int = 1) -> NDArray[np.int32]:
        array = np.full(spec.elements, value, np.int32 if spec.dtype == "i32" else np.float32)
        self.begin_with(round_, spec, array)
        return array

    def begin_with(self, round_: int, spec: TensorSpec, array: NDArray[Any]) -> None:
        self.member.begin(round_, spec, [array], self.clock.now, partial(self._done, round_))

    def _done(self, round_: int, error: Failed | None) -> None:
        self.done.append((round_, error))

    def run(self) -> None:
        """Carry packets until all is quiet, timers included."""
        nodes = dict(enumerate((self.root, self.member.node, self.other)))
        pump: Pump

        def step() -> bool:
            busy = pump.exchange()
            for node in nodes.values():
                events = node.events()
                if node is self.member.node:
                    for event in events:
                        self.member.on_event(event, self.clock.now)
            return busy

        pump = Pump(self.clock, nodes, dict(enumerate(self.devices)), step=step)
        # as long as timers follow each other within a second
        pump.settle(0.0)
        while (due := pump.timer()) is not None and due <= self.clock.now + 1.0:
            pump.advance(due)
            pump.settle(0.0)
