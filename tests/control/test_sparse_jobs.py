"""Sparse jobs from the first Hello on, in virtual time: what ranks, switch and servers are told, and how jobs end."""

import itertools
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inanet.client.sparse import sparse_group
from inanet.control import fields
from inanet.control.codec import decode, encode
from inanet.control.config_file import validate
from inanet.control.config_sparse import FabricSparseConfig
from inanet.control.coordinator import Coordinator
from inanet.control.costs import Costs
from inanet.control.fields import check_sparse
from inanet.control.managing import ManagedFabric, Policy
from inanet.control.member import Identity, Member
from inanet.control.registry import Registry
from inanet.control.services import EXPONENTS, Service
from inanet.control.settings import Settings
from inanet.proto.formats import make_format
from inanet.proto.node import Node
from inanet.proto.plan import NodePlan, Sparse
from inanet.proto.switched.exponents import ExponentRoot
from inanet.proto.switched.root import SwitchedRoot
from inanet.proto.zebra.serving import OPTIMISERS, TIMING, HotTables, Shards, hot_of, job_of
from inanet.proto.zebra.store import Adagrad, Uniform
from inanet.proto.zebra.worker import IterationDone, Pulled, ZebraWorker
from inanet.sparse.line import Place
from inanet.switch.endpoint import SwitchEndpoint
from inanet.switch.following import SwitchFollower, offer
from inanet.switch.programs import Job, admit, dismiss
from inanet.switch.registration import Registration
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import MAX_CHILDREN

ROOT = Path(__file__).parents[2]
TOKEN = "t"
SWITCH = endpoint("10.0.2.1", 7416)
KEYS = np.arange(0, 400, 2, dtype=np.uint64)
SPARSE = Sparse(width=2, hot=tuple(KEYS[:100].tolist()))


class Fabric:
    """A manager's coordinator, servers, a switch, ranks; whoever has joined has a machine at its address."""

    def __init__(self, servers: int = 1, budget: int = 1 << 20) -> None:
        registry = Registry()
        fabric = ManagedFabric(registry, Policy(), Costs(), ())
        settings = Settings(fabric, TOKEN, join=3.0, any_switch=True)
        keys = itertools.count(0xABCD_0000_0000_0001)
        self.coordinator = Coordinator(settings, make_format, lambda: next(keys), registry=registry)
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.places: dict[str, Place] = {}
        self.machines: dict[int, Any] = {}
        self.shards: list[Shards] = []
        self.missing = ""
        self._ids: dict[str, int] = {}
        for number in range(servers):
            self.start_server(number)
        self.program = HotTables(budget=budget)
        self.registration = Registration("zebra", self.program)

    def connect(self, member: Member, number: int) -> None:
        name = member.identity.name
        self.members[name], self._ids[name] = member, number
        self.coordinator.connected(number, self.now)
        member.connected()
        self.talk()

    def start_server(self, number: int) -> None:
        shards = Shards()
        shards.endpoint = endpoint("10.0.1.1", 7000 + number)
        self.shards.append(shards)
        self.machines[shards.endpoint] = shards
        services = {EXPONENTS: Service(endpoint=1), "zebra": Service(endpoint=shards.endpoint)}
        root = SwitchedRoot(Node(f"ps{number}", 64), ExponentRoot(), {"zebra": shards})
        where = endpoint("10.0.1.1", 6000 + number)
        who = Identity(f"ps{number}", "ps", TOKEN, where, 512, services=services)
        self.connect(Member(root, who), 100 + number)

    def start_switch(self, pairs: int = 9) -> None:
        has = offer(self.registration, None)
        service = Service(endpoint=SWITCH, slots=has.slots, own=has.own, values=pairs, relays=True)
        self.machines[SWITCH] = SwitchEndpoint(self.program, self.registration.groups)
        self.machines[SWITCH].groups = self.registration.groups
        follower = SwitchFollower(self, {"zebra": "zebra"})  # type: ignore[arg-type]
        who = Identity("s0", "switch", TOKEN, SWITCH, 512, services={"zebra": service})
        self.connect(Member(follower, who), 200)

    def serve(self, program: str, job: Job) -> None:
        admit(self.registration, job)

    def dismiss(self, program: str, job: Job, leave: Callable[[Any], None]) -> None:
        dismiss(self.registration, job)

    def start_rank(self, rank: int, world: int = 2, sparse: Sparse | None = SPARSE, **changes: Any) -> Member:
        place = Place()
        changes = {"job": "clicks", "ranks": (rank,), "world": world, "system": "zebra"} | changes
        name = f"{changes['job']}-{rank}"
        who = Identity(
            name, "worker", TOKEN, endpoint(f"10.0.0.{rank + 1}", 4000), 512, sparse=sparse, **changes
        )
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
            assert plan.switched is not None
            assert plan.switched.sparse is not None
            worker = ZebraWorker(job_of(plan.switched, plan.key), rank, TIMING, rank)
            hot = hot_of(plan.switched.sparse)
            if hot is not None:
                worker.prepare(hot)
                worker.start(hot.version)
            self.machines[plan.switched.workers[rank]] = worker
            found.append(worker)
        return found

    def talk(self) -> None:
        """Carry messages until nobody has anything to say, encoded as on a connection."""
        names = {number: name for name, number in self._ids.items()}
        for _ in range(50):
            moved = False
            for name, member in list(self.members.items()):
                for message in member.outgoing():
                    moved = True
                    self.coordinator.receive(self._ids[name], decode(encode(message)[4:]), self.now)
            for number, message in self.coordinator.outgoing():
                if number in names and names[number] in self.members:
                    moved = True
                    self.members[names[number]].receive(decode(encode(message)[4:]), self.now)
            if not moved:
                return
        raise AssertionError("they never stop talking")

    def lose(self, name: str) -> None:
        """kill -9"""
        self.coordinator.disconnected(self._ids.pop(name), self.now)
        self.members.pop(name)
        self.talk()

    def carry(self, until: Callable[[], bool]) -> None:
        """Deliver packets until a condition holds."""
        for _ in range(2000):
            self.now += 0.001
            for source, machine in self.machines.items():
                due = machine.timer()
                if due is not None and due <= self.now:
                    machine.on_timer(self.now)
                for sent in list(machine.transmit(self.now)):
                    count = len(sent.offsets)
                    lengths = np.full(count, sent.length, np.int64)
                    sources = np.full(count, source, np.uint64)
                    to = self.machines.get(sent.destination)
                    if to is not None and count:
                        arena = sent.arena.copy()
                        to.receive(PacketBatch(arena, sent.offsets.copy(), lengths, sources), self.now)
            if until():
                return
        raise AssertionError("it never came about")


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


@pytest.mark.parametrize("servers", [1, 2])
def test_daemons_in_any_order_give_the_bits_of_a_group(servers: int) -> None:
    fabric = Fabric(servers)
    sparse = replace(SPARSE, shards=servers, optimiser="adagrad", initial=0.01)
    fabric.start_rank(1, sparse=sparse)
    fabric.start_rank(0, sparse=sparse)
    assert fabric.places["clicks-0"].plan is None
    fabric.start_switch()
    workers = fabric.workers()
    with sparse_group(2, servers, width=2, optimiser=Adagrad(0.1), initial=Uniform(0.01)) as group:
        group.use_hot(KEYS[:100])
        for seed in range(3):
            pushes = gradients(2, seed)
            group.push_all(pushes)
            expected = group.jobs[0].pull(KEYS)
            for rows in train(fabric, workers, pushes):
                np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
    # the hot ones went through the switch, in packets that need no more passes than it allows
    assert fabric.program.stats()["contributions"] > 200
    assert workers[0].job.hot_pairs == 9


def test_a_job_that_is_over_leaves_nothing_behind() -> None:
    fabric = Fabric()
    fabric.start_switch()
    for job in ("one", "other"):
        for rank in range(2):
            fabric.start_rank(rank, job=job)
    numbers = {fabric.plan(f"{job}-0").switched.number for job in ("one", "other")}  # type: ignore[union-attr]
    assert len(numbers) == 2
    assert len(fabric.registration.groups) == 2
    train(fabric, fabric.workers("other"), gradients(2, 1))
    for name in ("other-0", "other-1"):
        fabric.members[name].leave("done")
        fabric.talk()
    assert [job.name for job in fabric.coordinator.jobs.values()] == ["one"]
    for name in ("one-0", "one-1"):
        fabric.members[name].leave("done")
        fabric.talk()
    assert not fabric.coordinator.jobs
    assert not fabric.registration.groups
    assert not fabric.registration.uplinks
    # figures stay, jobs do not
    assert fabric.shards[0].stats()["sparse_iterations"] == 1
    assert fabric.shards[0].stats()["sparse_jobs"] == 0


@pytest.mark.parametrize(
    ("lost", "cause", "says"),
    [
        ("clicks-1", "worker_lost", "rank 1 (host clicks-1) was lost"),
        ("ps0", "root_lost", "parameter server 'ps0' was lost"),
        ("ps1", "aggregator_lost", "ps 'ps1' was lost"),
        ("s0", "aggregator_lost", "switch 's0' was lost"),
    ],
)
def test_whoever_is_lost_ends_the_job_with_a_name(lost: str, cause: str, says: str) -> None:
    fabric = Fabric(2)
    fabric.start_switch()
    for rank in range(2):
        fabric.start_rank(rank, sparse=replace(SPARSE, shards=2))
    fabric.workers()
    fabric.lose(lost)
    failed = fabric.members["clicks-0"].failed
    assert failed is not None
    assert failed.cause == cause
    assert says in failed.message
    assert failed.missing == ((1,) if lost == "clicks-1" else ())
    assert not fabric.coordinator.jobs
    assert lost == "s0" or not fabric.registration.groups


def test_jobs_wait_until_a_switch_has_room_for_their_hot_keys() -> None:
    # 128 slots of two words, what is known of 100 keys, and the ledger
    fabric = Fabric(budget=3000)
    fabric.start_switch()
    for rank in range(2):
        fabric.start_rank(rank, job="one")
    for rank in range(2):
        fabric.start_rank(rank, job="other")
    assert fabric.places["other-0"].plan is None
    assert "100 hot keys need 1952 B of registers, s0 has 1040 of 2992 B" in fabric.missing
    for rank in range(2):
        fabric.members[f"one-{rank}"].leave("done")
        fabric.talk()
    # nobody has come since
    train(fabric, fabric.workers("other"), gradients(2, 1))


def test_what_is_missing_is_said() -> None:
    fabric = Fabric(1)
    fabric.start_rank(0, sparse=replace(SPARSE, shards=3))
    assert "missing: rank 1, a switch that runs zebra over UDP (none is connected)" in fabric.missing
    assert (
        "2 more parameter servers that keep keys (node.transport udp or packet), for 3 shards"
        in fabric.missing
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sparse": replace(SPARSE, rate=0.5)}, "other rate (0.1 and 0.5)"),
        ({"sparse": replace(SPARSE, hot=(1,))}, "other hot keys (100 and 1)"),
        ({"sparse": None}, "ranks join the one by inanet.join_sparse"),
        ({"system": "switchml"}, "ranks join the one by inanet.join_sparse"),
        ({"ranks": (1, 2), "world": 3}, "brings 2 ranks"),
        ({"ranks": (0,)}, "rank 0 of job 'clicks' is on host"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_a_reason(changes: dict[str, Any], says: str) -> None:
    fabric = Fabric()
    fabric.start_rank(0)
    member = fabric.start_rank(1, **changes)
    assert member.rejected is not None
    assert says in member.rejected.reason


def test_a_job_of_more_ranks_than_a_plan_has_room_for_is_refused_with_the_first() -> None:
    member = Fabric().start_rank(0, world=MAX_CHILDREN + 1)
    assert member.rejected is not None
    assert f"has {MAX_CHILDREN + 1} ranks, and a sparse job has at most" in member.rejected.reason


def test_a_switch_that_cannot_serve_a_plan_ends_the_job_with_its_reason() -> None:
    fabric = Fabric()
    fabric.start_switch()
    fabric.program.serve = lambda facts, key: (_ for _ in ()).throw(ValueError("no ports left"))  # type: ignore[method-assign]
    for rank in range(2):
        fabric.start_rank(rank)
    failed = fabric.members["clicks-0"].failed
    assert failed is not None
    assert (failed.cause, failed.message) == ("memory", "job 'clicks': s0: no ports left")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hot": (1, 1)}, "hot twice"),
        ({"hot": (1 << 64,)}, "64 bits"),
        ({"width": 0}, "width is 0"),
        ({"optimiser": "adam"}, "'adam' is not one of sum, sgd, adagrad, ftrl"),
        ({"sharding": "none"}, "'none' is not one of hash, range"),
        ({"rate": float("nan")}, "rate"),
        ({"initial": -1.0}, "initial"),
        ({"shards": 17}, "shards is 17"),
    ],
)
def test_what_makes_no_sense_gets_past_no_decoder(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_sparse(replace(SPARSE, **changes))


def test_the_file_that_comes_with_it_shows_defaults() -> None:
    text = (ROOT / "configs" / "sparse.toml").read_text()
    given = validate(FabricSparseConfig, tomllib.loads(text), ROOT / "sparse.toml")
    # a line that is commented out has a key at its beginning, sentences have not; two show what has no default
    shown = [
        line for line in re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE) if line[:4] not in ("hot ", "name")
    ]
    assert len(shown) == 9
    for line in shown:
        more = validate(
            FabricSparseConfig, tomllib.loads(text.replace(f"# {line}", line)), ROOT / "sparse.toml"
        )
        assert more == given, line


def test_decoder_and_shards_know_the_same_optimisers() -> None:
    assert set(fields.OPTIMISERS) == set(OPTIMISERS)


def test_packets_of_nobody_are_counted_and_dropped() -> None:
    shards = Shards()
    arena = np.zeros(64, np.uint8)
    offsets, lengths = np.array([0, 32], np.int64), np.array([32, 3], np.int64)
    shards.receive(PacketBatch(arena, offsets, lengths, np.ones(2, np.uint64)), 0.0)
    drops = {reason: count for reason, count in shards.drops_by_reason().items() if count}
    assert drops == {"foreign_job": 1, "short": 1}
