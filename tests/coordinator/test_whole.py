"""The coordinator with real members and real nodes, in virtual time: plans change under running rounds, bits do not."""

import itertools
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.coordinator.coordinator import Coordinator
from inanet.coordinator.settings import Settings
from inanet.member.member import Failed, Identity, Member
from inanet.messages.codec import decode, encode
from inanet.phy.device import Device
from inanet.phy.fault import FaultInjector
from inanet.phy.memory import MemoryNetwork
from inanet.planning.topology import Topology
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.tree.node import Node
from inanet.testing.clock import FakeClock
from inanet.testing.pump import Pump

TOKEN = "t"
DEEP = Topology(
    roots=("ps",),
    aggregators={"top": "ps", "a0": "top", "a1": "top"},
    workers={"w0": ("a0",), "w1": ("a0",), "w2": ("a1",), "w3": ("a1",)},
)
TREES = Topology(
    roots=("ps", "ps2"),
    aggregators={"a0": "ps", "b0": "ps2"},
    workers={"w0": ("a0", "b0"), "w1": ("a0", "b0"), "w2": ("ps", "b0")},
)


class Whole:
    """A fabric whose control plane is the real one; ``impair`` is the probability of each kind of fault per fragment."""

    #: fragments that a node's receive buffer holds
    budget = 512

    def __init__(self, topology: Topology, impair: float = 0.0, **settings: bool) -> None:
        self.topology = topology
        self.clock = FakeClock()
        self.network = MemoryNetwork()
        self.impair = impair
        self.devices: dict[str, Device] = {}
        self.members: dict[str, Member] = {}
        self.nodes: dict[str, Node] = {}
        self.ports: dict[str, int] = {}
        self.ids: dict[str, int] = {}
        self.results: dict[tuple[str, int], Failed | None] = {}
        self._next_id = itertools.count(1)
        self._keys = itertools.count(0xABCD_0000_0000_0001)
        self.settings = Settings(topology, TOKEN, **settings)
        self.coordinator = self._coordinator()
        self.pump = Pump(
            self.clock,
            self.nodes,
            self.devices,
            step=self.step,
            timers=lambda: [self.coordinator.timer()],
            wake=lambda now: self.coordinator.on_timer(now),
            figures=self.figures,
        )
        for name in [*topology.roots, *topology.aggregators, *topology.workers]:
            self.start(name)
        self.run(lambda: all(self.members[name].joined for name in topology.workers))

    def _coordinator(self) -> Coordinator:
        return Coordinator(self.settings, make_format, lambda: next(self._keys))

    def start(self, name: str) -> None:
        """A process with empty memory, at the address it had before."""
        device: Device = self.network.open(port=self.ports.get(name, 0))
        self.ports[name] = device.endpoint & 0xFFFF
        budget = self.budget
        if self.impair:
            p = self.impair
            device = FaultInjector(
                device, self.ports[name], self.clock, drop=p, duplicate=p, reorder=p, corrupt=p
            )
        self.devices[name] = device
        role = (
            "ps"
            if name in self.topology.roots
            else "worker"
            if name in self.topology.workers
            else "aggregator"
        )
        workers = sorted(self.topology.workers)
        who = Identity(name, role, TOKEN, device.endpoint, budget)
        if role == "worker":
            ranks = (workers.index(name),)
            who = Identity(name, role, TOKEN, device.endpoint, budget, "train", ranks, len(workers))

        self.nodes[name] = Node(name, 8192)
        self.members[name] = Member(self.nodes[name], who)
        self.connect(name)

    def connect(self, name: str) -> None:
        self.ids[name] = next(self._next_id)
        self.coordinator.connected(self.ids[name], self.clock.now)
        self.members[name].connected()

    def kill(self, name: str) -> None:
        """kill -9"""
        self.devices.pop(name).close()
        del self.members[name], self.nodes[name]
        self.coordinator.disconnected(self.ids.pop(name), self.clock.now)

    def crash(self) -> None:
        """kill -9 of the process with the coordinator and its parameter server, and its restart."""
        self.devices.pop("ps").close()
        del self.members["ps"], self.nodes["ps"]
        self.ids.clear()
        self.coordinator = self._coordinator()
        self.start("ps")
        for name in self.members:
            if name != "ps":
                self.connect(name)

    def step(self) -> bool:
        progress = self.pump.exchange()
        now = self.clock.now
        for name, member in list(self.members.items()):
            for event in member.node.events():
                member.on_event(event, now)
            for message in member.outgoing():
                progress = True
                self.coordinator.receive(self.ids[name], decode(encode(message)[4:]), now)
        names = {peer: name for name, peer in self.ids.items()}
        for peer, message in self.coordinator.outgoing():
            progress = True
            if peer in names:
                self.members[names[peer]].receive(decode(encode(message)[4:]), now)
        return progress

    def run(self, until: Callable[[], bool], seconds: float = 30.0) -> None:
        self.pump.run(until, seconds)

    def figures(self) -> dict[str, object]:
        return {
            name: {k: v for k, v in {**m.node.stats(), **m.node.drops_by_reason()}.items() if v}
            for name, m in self.members.items()
        }

    def wait(self, seconds: float) -> None:
        until = self.clock.now + seconds
        self.run(lambda: self.clock.now >= until, seconds + 10)

    def begin(self, round_: int, spec: TensorSpec, arrays: dict[str, NDArray[np.generic]]) -> None:
        for name, array in arrays.items():
            done = partial(self.results.__setitem__, (name, round_))
            self.members[name].begin(round_, spec, [array], self.clock.now, done)

    def done(self, round_: int) -> bool:
        return all((name, round_) in self.results for name in self.topology.workers)

    def version(self) -> int:
        (job,) = self.coordinator.jobs.values()
        return job.plans.current.version


def arrays_for(topology: Topology, seed: int, spec: TensorSpec) -> dict[str, NDArray[np.generic]]:
    generator = np.random.default_rng(seed)
    if spec.dtype == "i32":
        return {
            name: generator.integers(-1000, 1000, spec.shape, np.int32) for name in sorted(topology.workers)
        }
    return {
        name: generator.standard_normal(spec.shape).astype(np.float32) for name in sorted(topology.workers)
    }


INTEGERS = TensorSpec("i", "i32", (256 * 40,), "sum", ExponentMode.NONE)
FLOATS = TensorSpec("f", "f32", (256 * 80,), "sum", ExponentMode.CARRIED)


def all_reduce(
    whole: Whole, round_: int, spec: TensorSpec, meanwhile: Callable[[], None] = lambda: None
) -> dict[str, NDArray[np.generic]]:
    arrays = arrays_for(whole.topology, round_, spec)
    exact = np.sum(np.stack([a.astype(np.float64) for a in arrays.values()]), axis=0)
    whole.begin(round_, spec, arrays)
    meanwhile()
    whole.run(lambda: whole.done(round_))
    assert [whole.results[name, round_] for name in sorted(whole.topology.workers)] == [None] * len(arrays)
    first, *others = arrays.values()
    for other in others:
        assert first.tobytes() == other.tobytes()
    if spec.dtype == "i32":
        assert first.tolist() == exact.tolist()
    else:
        np.testing.assert_allclose(first.astype(np.float64), exact, atol=1e-5)
    return arrays


@pytest.mark.parametrize("topology", [DEEP, TREES], ids=["deep", "trees"])
@pytest.mark.parametrize("impair", [0.0, 0.05], ids=["clean", "impaired"])
def test_aggregators_die_in_a_round_and_come_back(topology: Topology, impair: float) -> None:
    whole = Whole(topology, impair)
    rounds = itertools.count(1)
    for spec in (INTEGERS, FLOATS):
        for _ in range(2):
            all_reduce(whole, next(rounds), spec)

    def lose(name: str) -> Callable[[], None]:
        def act() -> None:
            for _ in range(3):
                whole.step()
            whole.kill(name)

        return act

    victims = list(topology.aggregators)
    for victim, spec in zip(victims, itertools.cycle([INTEGERS, FLOATS]), strict=False):
        all_reduce(whole, next(rounds), spec, lose(victim))
    for victim in victims:
        before = whole.version()
        whole.start(victim)
        all_reduce(whole, next(rounds), INTEGERS)
        all_reduce(whole, next(rounds), FLOATS)
        whole.wait(31)
        assert whole.version() > before
    for _ in range(3):
        all_reduce(whole, next(rounds), INTEGERS)
        all_reduce(whole, next(rounds), FLOATS)
    (job,) = whole.coordinator.jobs.values()
    assert job.plans.absent == set()
    assert len(job.rounds.ledger) == 0


@pytest.mark.parametrize("impair", [0.0, 0.05], ids=["clean", "impaired"])
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 12])
def test_the_coordinator_dies_in_a_round_and_the_round_completes(steps: int, impair: float) -> None:
    whole = Whole(DEEP, impair)
    all_reduce(whole, 1, INTEGERS)
    all_reduce(whole, 2, FLOATS)

    def crash() -> None:
        for _ in range(steps):
            whole.step()
        whole.crash()

    all_reduce(whole, 3, INTEGERS, crash)
    all_reduce(whole, 4, FLOATS, crash)
    all_reduce(whole, 5, TensorSpec("new", "f32", (700,), "sum", ExponentMode.PROLOGUE))
    assert whole.version() == 3


def test_a_nan_fails_the_round_for_all_and_the_next_one_works() -> None:
    whole = Whole(DEEP)
    arrays = arrays_for(DEEP, 1, FLOATS)
    arrays["w2"][17] = np.nan  # type: ignore[call-overload]
    whole.begin(1, FLOATS, arrays)
    whole.run(lambda: whole.done(1))
    (failed,) = {whole.results[name, 1] for name in DEEP.workers}
    assert failed is not None
    assert (failed.cause, failed.rank) == ("nonfinite", 2)
    assert "rank 2 (host w2) has nan at element 17 of tensor 'f'" in failed.message
    all_reduce(whole, 2, FLOATS)
    all_reduce(whole, 3, INTEGERS)


def test_a_mismatch_fails_the_round_for_all_and_the_next_one_works() -> None:
    whole = Whole(DEEP)
    all_reduce(whole, 1, INTEGERS)
    arrays = arrays_for(DEEP, 2, INTEGERS)
    whole.begin(2, INTEGERS, {name: array for name, array in arrays.items() if name != "w1"})
    whole.begin(2, FLOATS, {"w1": arrays_for(DEEP, 2, FLOATS)["w1"]})
    whole.run(lambda: whole.done(2))
    (failed,) = {whole.results[name, 2] for name in DEEP.workers}
    assert failed is not None
    assert failed.cause == "mismatch"
    all_reduce(whole, 3, INTEGERS)
    all_reduce(whole, 4, FLOATS)


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_step(seed: int) -> None:
    """Seeded: in every round, after some steps, aggregators die, come back, or the coordinator dies."""
    chance = random.Random(seed)
    topology = chance.choice([DEEP, TREES])
    whole = Whole(topology, chance.choice([0.0, 0.03, 0.08]))

    def meanwhile() -> None:
        for _ in range(chance.randrange(15)):
            whole.step()
        alive = [name for name in topology.aggregators if name in whole.members]
        dead = [name for name in topology.aggregators if name not in whole.members]
        event = chance.choice(["nothing", "one dies", "two die", "crash", "return"])
        if event in ("one dies", "two die"):
            for name in chance.sample(alive, min(len(alive), 1 + (event == "two die"))):
                whole.kill(name)
        elif event == "crash":
            whole.crash()
        elif event == "return" and dead:
            whole.start(chance.choice(dead))

    for round_ in range(1, 7):
        arrays = all_reduce(whole, round_, chance.choice([INTEGERS, FLOATS]), meanwhile)
        assert len({array.tobytes() for array in arrays.values()}) == 1
        if chance.random() < 0.3:
            whole.wait(31)
