"""Nodes that talk to a coordinator in virtual time, every message through the codec."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.events import ControlEvent
from inanet.coordinator.registry import Registry
from inanet.coordinator.settings import Settings
from inanet.messages.codec import decode, encode
from inanet.messages.control import (
    PROTOCOL,
    Begin,
    Finished,
    Frozen,
    Held,
    Hello,
    Hold,
    JobEnded,
    Known,
    Layout,
    LayoutReady,
    Message,
    Ping,
    Plan,
    Pong,
    Reject,
    Resume,
)
from inanet.planning.topology import Fabric, Topology
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import ExponentMode, NodePlan, TensorLayout, TensorSpec
from inanet.wire.endpoint import endpoint

M = TypeVar("M", bound=Frozen)
TOKEN = "open sesame"
FIRST_KEY = 0x1234_5678_9ABC_0007
#: job number that follows from the first key
JOB = 7


def spec(name: str = "w", elements: int = 1000, op: str = "sum", dtype: str = "f32") -> TensorSpec:
    """A tensor all ranks could agree on."""
    floats = dtype.startswith(("f", "b")) and op in ("sum", "mean")
    return TensorSpec(name, dtype, (elements,), op, ExponentMode.PROLOGUE if floats else ExponentMode.NONE)


def two_level(workers: int = 4, aggregators: int = 2) -> Topology:
    """``w0..`` in turn under ``a0..`` under ``ps``; without aggregators under the PS."""
    parents = [f"a{index}" for index in range(aggregators)] or ["ps"]
    return Topology(
        roots=("ps",),
        aggregators={name: "ps" for name in parents if name != "ps"},
        workers={f"w{index}": (parents[index % len(parents)],) for index in range(workers)},
    )


class Nodes:
    """A coordinator and the nodes around it. ``inbox[name]`` has what each node was sent.

    Nodes answer pings, holds and layouts by themselves; those in ``mute`` answer nothing, those in ``deaf`` no
    layouts. ``refuses`` gives the reason an aggregator has no room for a tensor.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        fabric: Callable[[Registry], Fabric] | None = None,
        **settings: float,
    ) -> None:
        """``fabric`` arranges jobs instead of ``topology``, which then only says who plays which part here."""
        self.topology = topology or two_level()
        self._fabric = fabric or (lambda registry: self.topology)
        self._settings = settings
        self.now = 100.0
        self.ids: dict[str, int] = {}
        self.inbox: dict[str, list[Message]] = {}
        self.events: list[ControlEvent] = []
        self.mute: set[str] = set()
        self.deaf: set[str] = set()
        self.refuses: Callable[[str, Layout], str] = lambda name, layout: ""
        self.layouts: dict[str, dict[int, TensorLayout]] = {}
        self.plans: dict[str, NodePlan] = {}
        self._next_id = itertools.count(1)
        self._keys = itertools.count(FIRST_KEY)
        self.restart()

    def restart(self) -> None:
        """A new coordinator; all connections are gone."""
        self.registry = Registry()
        fabric = self._fabric(self.registry)
        self.settings = Settings(fabric, TOKEN, **self._settings)  # type: ignore[arg-type]
        self.coordinator = Coordinator(
            self.settings, make_format, lambda: next(self._keys), registry=self.registry
        )
        self.ids.clear()

    def hello(self, name: str, /, **changes: object) -> Hello:
        """What a node of the topology says first."""
        role = (
            "ps"
            if name in self.topology.roots
            else "worker"
            if name in self.topology.workers
            else "aggregator"
        )
        number = [*self.topology.roots, *self.topology.aggregators, *self.topology.workers].index(name)
        fields: dict[str, object] = {
            "protocol": PROTOCOL,
            "name": name,
            "role": role,
            "token": TOKEN,
            "endpoint": endpoint("127.0.0.1", 9000 + number),
            "rx_window": 1200,
        }
        if role == "worker":
            ranks = (sorted(self.topology.workers).index(name),)
            fields |= {"job": "train", "ranks": ranks, "world": len(self.topology.workers)}
        return Hello(**(fields | changes))  # type: ignore[arg-type]

    def join(self, *names: str, **changes: object) -> None:
        """Connect nodes and say Hello."""
        for name in names:
            self.ids[name] = next(self._next_id)
            self.inbox[name] = []
            self.mute.discard(name)
            self.coordinator.connected(self.ids[name], self.now)
            self.say(name, self.hello(name, **changes))

    def say(self, name: str, *messages: Message) -> None:
        """Messages of a node, which stops when it is rejected."""
        for message in messages:
            if name not in self.ids:
                return
            self.coordinator.receive(self.ids[name], message, self.now)
            self.pump()

    def kill(self, name: str) -> None:
        """A process dies; the kernel closes its connection."""
        self.plans.pop(name, None)
        self.layouts.pop(name, None)
        self.coordinator.disconnected(self.ids.pop(name), self.now)
        self.pump()

    def pump(self) -> None:
        """Deliver everything, until nobody has anything to say."""
        while out := self.coordinator.outgoing():
            names = {peer: name for name, peer in self.ids.items()}
            for peer, message in out:
                assert decode(encode(message)[4:]) == message
                if peer in names:
                    self.inbox[names[peer]].append(message)
                    self._note(names[peer], message)
            for peer, message in out:
                if peer in names and names[peer] in self.ids and names[peer] not in self.mute:
                    self._answer(names[peer], message)
        self.events += self.coordinator.events()

    def _note(self, name: str, message: Message) -> None:
        if isinstance(message, Plan):
            self.plans[name] = message.plan
        elif isinstance(message, Layout):
            self.layouts.setdefault(name, {})[message.layout.tensor] = message.layout
        elif isinstance(message, JobEnded):
            self.plans.pop(name, None)
            self.layouts.pop(name, None)

    def _answer(self, name: str, message: Message) -> None:
        answer: Message | None = None
        if isinstance(message, Ping):
            answer = Pong(nonce=message.nonce)
        elif isinstance(message, Hold):
            answer = Held(job=message.job, nonce=message.nonce)
        elif isinstance(message, Layout) and not {name} & (self.deaf | self.topology.workers.keys()):
            refused = self.refuses(name, message)
            answer = LayoutReady(job=message.job, tensor=message.layout.tensor, refused=refused)
        elif isinstance(message, Reject):
            del self.ids[name]
        if answer is not None:
            self.coordinator.receive(self.ids[name], answer, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass, timer by timer."""
        until = self.now + seconds
        while (due := self.coordinator.timer()) is not None and due <= until:
            self.now = max(self.now, due)
            self.coordinator.on_timer(self.now)
            self.pump()
        self.now = until

    def start(self) -> None:
        """Everybody joins."""
        self.join(*self.topology.roots, *self.topology.aggregators, *self.topology.workers)

    @property
    def workers(self) -> list[str]:
        """Connected worker hosts."""
        return [name for name in self.topology.workers if name in self.ids]

    def begin(self, round_: int, wanted: TensorSpec, names: Sequence[str] | None = None) -> None:
        """Worker hosts begin a round."""
        for name in self.workers if names is None else names:
            self.say(name, Begin(job=JOB, round=round_, spec=wanted))

    def finish(self, round_: int, names: Sequence[str] | None = None) -> None:
        """Worker hosts have the result; by default all, and then the parameter servers confirm."""
        for name in [*self.workers, *self.topology.roots] if names is None else names:
            self.say(name, Finished(job=JOB, round=round_))

    def got(self, name: str, kind: type[M]) -> list[M]:
        """Messages of one kind a node was sent."""
        return [message for message in self.inbox[name] if isinstance(message, kind)]

    def last(self, name: str, kind: type[M]) -> M:
        """The last one of them."""
        return self.got(name, kind)[-1]

    def clear(self) -> None:
        """Empty all inboxes."""
        for inbox in self.inbox.values():
            inbox.clear()
        self.events.clear()

    def resume(self, name: str, next_round: int, opened: Sequence[tuple[int, TensorSpec]] = ()) -> None:
        """A node comes back to a restarted coordinator with the plan and the layouts it was sent."""
        plan = self.plans[name]
        held = self.layouts.get(name, {})
        resume = Resume(
            job=plan.job,
            key=plan.key,
            plan=plan,
            next_round=next_round,
            layouts=len(held),
            open=len(opened),
        )
        self.join(name, resume=(resume,))
        for layout in list(held.values()):
            self.say(name, Known(job=plan.job, layout=layout))
        for round_, wanted in opened:
            self.say(name, Begin(job=plan.job, round=round_, spec=wanted))


def parents(nodes: Nodes) -> dict[str, str]:
    """The parent of every connected node in the plan it was sent last; of the last tree it is in."""
    found = {}
    for name, plan in nodes.plans.items():
        for place in plan.placements:
            if place.parent is not None and name in nodes.ids:
                found[name] = place.parent.name
    return found


def versions(nodes: Nodes) -> set[int]:
    """Versions of the plans that connected nodes were sent last."""
    return {plan.version for name, plan in nodes.plans.items() if name in nodes.ids}


def consistent(nodes: Nodes) -> None:
    """Every node's view fits its neighbours'."""
    for name, plan in nodes.plans.items():
        if name not in nodes.ids:
            continue
        for place in plan.placements:
            for child in place.children:
                below = next(p for p in nodes.plans[child.name].placements if p.tree == place.tree)
                assert below.parent is not None
                assert (below.parent.name, below.parent.bit) == (name, child.bit)
