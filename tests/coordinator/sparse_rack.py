"""Sparse jobs in virtual time: a manager's coordinator, servers, a switch and ranks; everything but processes and sockets is real."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.managed_fabric import ManagedFabric, Policy
from inanet.coordinator.registry import Registry
from inanet.coordinator.settings import Settings
from inanet.member.member import Identity, Member
from inanet.messages.codec import decode, encode
from inanet.messages.control import Message
from inanet.messages.services import Service
from inanet.planning.costs import Costs
from inanet.proto.common.formats import make_format
from inanet.proto.common.machine import Host
from inanet.proto.common.plan import NodePlan, SwitchedJob
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.root import SwitchedRoot
from inanet.proto.slots.systems import EXPONENTS
from inanet.proto.tree.node import Node
from inanet.proto.zebra.job import hot_of, job_of
from inanet.proto.zebra.journal import BadState, Entry, part_of, records
from inanet.proto.zebra.plan import Sparse, ZebraJob
from inanet.proto.zebra.shards import ShardServer
from inanet.proto.zebra.stream import DAEMON_TIMING
from inanet.proto.zebra.switch import daemon_program
from inanet.proto.zebra.worker import IterationDone, Pulled, ZebraWorker
from inanet.sparse.member import PlanFollower
from inanet.switch.endpoint import SwitchEndpoint
from inanet.switch.follower import SwitchFollower
from inanet.switch.pipeline import Pipeline
from inanet.switch.programs import Registration, dismiss, serve
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import endpoint

TOKEN = "t"
SWITCH = endpoint("10.0.2.1", 7416)
KEYS = np.arange(0, 400, 2, dtype=np.uint64)
SPARSE = Sparse(width=2, hot=tuple(KEYS[:100].tolist()))


class Drawer:
    """A server's files, by name, each open once at a time. ``full``: nothing can be added."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.opened: set[str] = set()
        self.full = False

    def open(self, name: str) -> "File":
        if name in self.opened:
            raise BadState(f"{name} is in use by another process")
        self.opened.add(name)
        return File(self, name)

    def trained(self, model: str) -> list[str]:
        mine = ((name, data) for name, data in self.files.items() if name.startswith(f"{model}."))
        return [name for name, data in mine if part_of(entry for _, entry in records(data)).iteration]


class File:
    """One of them: see :class:`~inanet.proto.zebra.journal.Kept`."""

    def __init__(self, drawer: Drawer, name: str) -> None:
        self._drawer, self._name = drawer, name

    def entries(self) -> Iterator[Entry]:
        return (entry for _, entry in records(self._drawer.files.get(self._name, b"")))

    def append(self, record: bytes) -> bool:
        if self._drawer.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.rewrite(self._drawer.files.get(self._name, b"") + record)
        return False

    def rewrite(self, data: bytes) -> None:
        self._drawer.files[self._name] = data

    def close(self) -> None:
        self._drawer.opened.remove(self._name)


class Fabric:
    """Whoever has joined has a machine at its address. ``lost`` says of a packet whether it is, and ``sent`` how often a message
    arrives. Servers keep ``models``, if they are to, in ``drawers``.
    """

    def __init__(self, servers: int = 1, budget: int = 1 << 20, *, models: bool = False) -> None:
        self.drawers = {number: Drawer() for number in range(servers)} if models else {}
        self.lost: Callable[[], bool] = lambda: False
        self.sent: Callable[[Message], int] = lambda _: 1
        registry = Registry()
        fabric = ManagedFabric(registry, Policy(), Costs(), ())
        settings = Settings(fabric, TOKEN, join=3.0, silence=0.9, any_switch=True)
        keys = itertools.count(0xABCD_0000_0000_0001)
        self.coordinator = Coordinator(settings, make_format, lambda: next(keys), registry=registry)
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.places: dict[str, PlanFollower] = {}
        self.machines: dict[int, Any] = {}
        self.shards: dict[int, ShardServer] = {}
        self.missing = ""
        self._ids: dict[str, int] = {}
        for number in range(servers):
            self.start_server(number)
        self.program = daemon_program(budget=budget)
        self.registration = Registration("zebra", self.program)
        self.pipeline = Pipeline([self.registration])

    def connect(self, member: Member, number: int) -> None:
        name = member.identity.name
        self.members[name], self._ids[name] = member, number
        self.coordinator.connected(number, self.now)
        member.connected()
        self.talk()

    def start_server(self, number: int, port: int | None = None) -> None:
        shards = ShardServer()
        drawer = self.drawers.get(number)
        if drawer is not None:
            drawer.opened.clear()
        shards.settle(Host(endpoint("10.0.1.1", 7000 + number if port is None else port), drawer))
        self.shards[number] = shards
        self.machines[shards.endpoint] = shards
        keys = Service(endpoint=shards.endpoint, keeps=drawer is not None)
        services = {EXPONENTS: Service(endpoint=1), "zebra": keys}
        root = SwitchedRoot(Node(f"ps{number}", 64), {EXPONENTS: ExponentRoot(), "zebra": shards})
        where = endpoint("10.0.1.1", 6000 + number)
        who = Identity(f"ps{number}", "ps", TOKEN, where, 512, services=services)
        self.connect(Member(root, who), 100 + len(self._ids))

    def start_switch(self, pairs: int = 9) -> None:
        has = self.registration.program.offer(None, 9)
        service = Service(endpoint=SWITCH, slots=has.slots, own=has.own, values=pairs, relays=True)
        self.machines[SWITCH] = SwitchEndpoint(self.program, self.registration.groups)
        self.machines[SWITCH].groups = self.registration.groups
        follower = SwitchFollower(self, {"zebra": "zebra"})  # type: ignore[arg-type]
        who = Identity("s0", "switch", TOKEN, SWITCH, 512, services={"zebra": service})
        self.connect(Member(follower, who), 200 + len(self._ids))

    def serve(self, program: str, job: SwitchedJob, key: int) -> None:
        serve(self.registration, job, key, SWITCH)

    def dismiss(self, program: str, job: int, leave: Callable[[Any], None]) -> None:
        dismiss(self.registration, job)

    def start_rank(self, rank: int, world: int = 2, sparse: Sparse | None = SPARSE, **changes: Any) -> Member:
        place = PlanFollower(lambda facts: self.machines[facts.workers[rank]].prepare(hot_of(facts)))
        changes = {"job": "clicks", "ranks": (rank,), "world": world, "system": "zebra"} | changes
        name = changes.pop("name", f"{changes['job']}-{rank}")
        where = changes.pop("endpoint", endpoint(f"10.0.0.{rank + 1}", 4000))
        who = Identity(name, "worker", TOKEN, where, 512, sparse=sparse, **changes)
        self.places[name] = place
        member = Member(place, who, progress=lambda text: setattr(self, "missing", text))
        self.connect(member, 300 + len(self._ids))
        return member

    def plan(self, name: str) -> NodePlan:
        plan = self.places[name].plan
        assert plan is not None
        return plan

    def workers(self, job: str = "clicks", world: int = 2) -> list[ZebraWorker]:
        """The ranks' machines, as their plans have them."""
        found = []
        for rank in range(world):
            plan = self.plan(f"{job}-{rank}")
            assert isinstance(plan.switched, ZebraJob)
            worker = ZebraWorker(job_of(plan.switched, plan.key), rank, DAEMON_TIMING, rank)
            if plan.switched.hot_version:
                worker.prepare(hot_of(plan.switched))
                worker.start(plan.switched.hot_version)
            self.machines[plan.switched.workers[rank]] = worker
            found.append(worker)
        return found

    def talk(self) -> None:
        """Carry messages until nobody has anything to say, encoded as on a connection."""
        names = {number: name for name, number in self._ids.items()}
        for _ in range(50):
            moved = False
            for name, member in list(self.members.items()):
                for message in self._arriving(member.outgoing()):
                    moved = True
                    self.coordinator.receive(self._ids[name], message, self.now)
            for number, said in self.coordinator.outgoing():
                if number in names and names[number] in self.members:
                    for message in self._arriving([said]):
                        moved = True
                        self.members[names[number]].receive(message, self.now)
            if not moved:
                return
        raise AssertionError("they never stop talking")

    def _arriving(self, messages: Sequence[Message]) -> list[Message]:
        return [decode(encode(one)[4:]) for one in messages for _ in range(self.sent(one))]

    def number(self, name: str) -> int:
        """A member's connection, as the coordinator knows it."""
        return self._ids[name]

    def lose(self, name: str) -> None:
        """kill -9"""
        self.coordinator.disconnected(self._ids.pop(name), self.now)
        self.members.pop(name)
        self.talk()

    def carry(self, until: Callable[[], bool]) -> None:
        """Deliver packets until a condition holds."""
        for _ in range(4000):
            self.now += 0.001
            self._control()
            for source, machine in self.machines.items():
                due = machine.timer()
                if due is not None and due <= self.now:
                    machine.on_timer(self.now)
                for sent in list(machine.transmit(self.now)):
                    count = len(sent.offsets)
                    lengths = np.full(count, sent.length, np.int64)
                    sources = np.full(count, source, np.uint64)
                    there = np.array([not self.lost() for _ in range(count)], np.bool_)
                    to = self.machines.get(sent.destination)
                    if to is not None and there.any():
                        arena = sent.arena.copy()
                        batch = PacketBatch(arena, sent.offsets[there], lengths[there], sources[there])
                        to.receive(batch, self.now)
            if until():
                return
        raise AssertionError("it never came about")

    def _control(self) -> None:
        """What shards have to say, and what it is time for."""
        for number, shards in self.shards.items():
            member = self.members.get(f"ps{number}")
            for event in shards.events():
                if member is not None and member.serves(event.job):
                    member.on_event(event, self.now)
        due = self.coordinator.timer()
        if due is not None and due <= self.now:
            self.coordinator.on_timer(self.now)
        self.talk()


def train(fabric: Fabric, workers: list[ZebraWorker], pushes: list[Any]) -> list[np.ndarray[Any, Any]]:
    """One push of each rank, then what each pulls of all keys."""
    events: list[list[Any]] = [[] for _ in workers]
    for worker, (keys, values) in zip(workers, pushes, strict=True):
        worker.push(keys, values, fabric.now)
    tickets = [worker.pull(KEYS, fabric.now) for worker in workers]

    def done() -> bool:
        for mine, worker in zip(events, workers, strict=True):
            mine.extend(worker.events())
        return all(any(isinstance(event, Pulled) for event in mine) for mine in events)

    fabric.carry(done)
    assert all(any(isinstance(event, IterationDone) for event in mine) for mine in events)
    rows: Mapping[int, Any] = {}
    out = []
    for mine, ticket in zip(events, tickets, strict=True):
        rows = {event.ticket: event.values for event in mine if isinstance(event, Pulled)}
        out.append(rows[ticket])
    return out


def gradients(ranks: int, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    chosen = [np.sort(rng.choice(KEYS, 150, replace=False)) for _ in range(ranks)]
    return [(keys, rng.standard_normal((150, 2)).astype(np.float32)) for keys in chosen]
