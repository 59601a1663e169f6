"""A manager's fabric in virtual time: nodes register, jobs are planned with what they report, and planned anew."""

import errno
import os
from itertools import permutations
from pathlib import Path
from typing import ClassVar

import pytest

from inanet.coordinator.epochs import Epochs
from inanet.coordinator.events import NodeRegistered, PeerLost, PlanChosen, PlanRepeated
from inanet.coordinator.managed_fabric import ManagedFabric, Policy, topology_of
from inanet.coordinator.registry import Registry
from inanet.member.evaluation import Evaluation
from inanet.messages.control import (
    PROTOCOL,
    Follows,
    JobEnded,
    JobFailed,
    Leave,
    Performed,
    Plan,
    Pong,
    Reject,
    Stats,
    Waiting,
)
from inanet.messages.registration import Overview, Query, Register, Registered, Report
from inanet.planning.costs import Costs
from inanet.planning.topology import Topology
from inanet.service.exits import Failure
from tests.coordinator.nodes import JOB, TOKEN, Nodes, parents, spec, two_level

GIB = 1 << 30
SPEC = spec(elements=10_000)
WORKERS = ("w0", "w1", "w2", "w3")


class Managed(Nodes):
    """Nodes that register at a manager, on connections called ``name/r``."""

    def __init__(self, expect: tuple[str, ...] = (), **policy: object) -> None:
        def fabric(registry: Registry) -> ManagedFabric:
            return ManagedFabric(registry, Policy(**policy), Costs(), expect)  # type: ignore[arg-type]

        super().__init__(two_level(4, 2), fabric, evaluate=bool(policy.get("evaluate")))

    def register(self, *names: str, idle: float = 8.0, used: int = GIB, **card: object) -> None:
        """Register, and report."""
        for name in names:
            role = self.hello(name).role
            line = f"{name}/r"
            self.ids[line] = next(self._next_id)
            self.inbox[line] = []
            self.coordinator.connected(self.ids[line], self.now)
            fields: dict[str, object] = {"cores": 8, "memory": 16 * GIB, "link_bps": 10**10, **card}
            message = Register(protocol=PROTOCOL, name=name, role=role, token=TOKEN, **fields)  # type: ignore[arg-type]
            self.say(line, message)
            self.say(line, Report(idle_cores=idle, memory_used=used))

    def start(self) -> None:
        """Everybody registers and joins."""
        self.register("ps", "a0", "a1", *WORKERS)
        self.join("ps", "a0", "a1", *WORKERS)

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, PlanChosen)]


def overview(nodes: Nodes) -> Overview:
    nodes.ids["eye"] = next(nodes._next_id)
    nodes.inbox["eye"] = []
    nodes.coordinator.connected(nodes.ids["eye"], nodes.now)
    nodes.say("eye", Query(protocol=PROTOCOL, token=TOKEN))
    nodes.coordinator.disconnected(nodes.ids.pop("eye"), nodes.now)
    return nodes.last("eye", Overview)


def test_a_job_gets_xaggs_tree_of_those_who_are_there() -> None:
    nodes = Managed(kind="tree", rate=10**9)
    nodes.start()
    assert parents(nodes) == {"w0": "a0", "w1": "a0", "w2": "a1", "w3": "a1", "a0": "ps", "a1": "ps"}
    (reason,) = nodes.reasons
    assert reason.startswith("server tree, k = 2, unicast takes")


@pytest.mark.parametrize(
    ("report", "why"),
    [({"idle": 0.2}, "cores"), ({"used": 13 * GIB}, "memory")],
    ids=["a0 computes", "a0 is full"],
)
def test_servers_without_cores_or_memory_to_spare_are_left_out(report: dict[str, float], why: str) -> None:
    nodes = Managed(kind="tree")
    nodes.register("ps", "a1", *WORKERS)
    nodes.register("a0", **report)  # type: ignore[arg-type]
    nodes.join("ps", "a0", "a1", *WORKERS)
    assert "a0" not in nodes.plans, why
    assert parents(nodes)["w0"] == "a1"
    assert len(set(parents(nodes).values())) == 2


def test_start_order_does_not_matter_and_expected_nodes_are_waited_for() -> None:
    for order in list(permutations(("a0", "ps", "w0")))[::2]:
        nodes = Managed(expect=("a0", "ps", *WORKERS), kind="tree")
        nodes.join(*WORKERS)
        nodes.register("w1", "w2", "w3")
        for name in order[:-1]:
            nodes.register(name)
        nodes.wait(4)
        assert nodes.last("w0", Waiting).missing[0] == f"node {order[-1]}"
        nodes.register(order[-1])
        nodes.join("ps")
        assert "w0" not in nodes.plans
        nodes.join("a0")
        assert "w0" in nodes.plans
        assert "a0" in nodes.plans


def test_without_a_parameter_server_a_job_waits() -> None:
    nodes = Managed()
    nodes.register("a0", *WORKERS)
    nodes.join("a0", *WORKERS)
    assert nodes.last("w3", Waiting).missing == ("a parameter server",)
    nodes.register("ps")
    nodes.join("ps")
    assert nodes.plans["w0"].version == 1


def untold(nodes: Managed) -> list[tuple[str, bool, str]]:
    """(name, left, reason) of the losses to be told so far."""
    losses = [event for event in nodes.events if isinstance(event, PeerLost) and not event.told]
    nodes.events.clear()
    return [(event.name, event.left, event.reason) for event in losses]


@pytest.mark.parametrize("lines", [("a0", "a0/r"), ("a0/r", "a0")])
def test_a_node_with_two_connections_is_lost_once(lines: tuple[str, str]) -> None:
    nodes = Managed()
    nodes.register("a0")
    nodes.join("a0")
    for line in lines:
        nodes.kill(line)
    assert untold(nodes) == [("a0", False, "its connection closed")]
    # and in order, too
    nodes.register("a0")
    nodes.join("a0")
    for line in lines:
        nodes.say(line, Leave(reason="enough"))
    assert untold(nodes) == [("a0", True, "it left: enough")]
    assert "a0" not in nodes.coordinator.registry


def test_who_is_heard_of_after_a_loss_can_be_lost_again() -> None:
    nodes = Managed()
    nodes.start()
    nodes.kill("a0")
    nodes.say("a0/r", Report(idle_cores=8.0, memory_used=GIB))
    assert [name for name, _, _ in untold(nodes)] == ["a0"]
    nodes.kill("a0/r")
    # a worker that has left its job is still there
    for name in WORKERS:
        nodes.say(name, Leave())
    nodes.kill("w0/r")
    assert untold(nodes) == [
        ("a0", False, "its connection closed"),
        *((name, True, "it left") for name in WORKERS),
        ("w0", False, "its connection closed"),
    ]


def test_a_name_has_one_role_and_one_registration() -> None:
    nodes = Managed()
    nodes.register("a0")
    first = nodes.ids["a0/r"]
    nodes.register("a0")
    assert nodes.last("a0/r", Reject).retry_after == nodes.settings.probe
    nodes.mute.add("a0/r")
    nodes.ids["a0/r"] = first
    nodes.wait(nodes.settings.probe + 1)
    assert any(isinstance(e, PeerLost) and e.peer == first for e in nodes.events), "the first one was dead"
    nodes.mute.clear()
    nodes.register("a0")
    assert nodes.last("a0/r", Registered).heartbeat == 1.0
    nodes.register("w0")
    nodes.join("w0", role="aggregator", job="", ranks=(), world=0)
    assert "has registered as worker" in nodes.last("w0", Reject).reason
    assert [e.known for e in nodes.events if isinstance(e, NodeRegistered)] == [1, 1, 2]


def test_what_has_no_place_on_such_a_connection_is_refused() -> None:
    nodes = Managed()
    nodes.register("a0")
    nodes.say("a0/r", Pong(nonce=1), Stats(counters={"rows_sent": 1}))
    assert "a0/r" in nodes.ids
    nodes.say("a0/r", Performed(job=1, training=1.0, transmission=1.0))
    assert "no place on a connection for registration" in nodes.last("a0/r", Reject).reason


def test_the_overview_shows_nodes_jobs_and_who_is_missing() -> None:
    nodes = Managed(kind="tree")
    nodes.start()
    nodes.say("a1/r", Stats(counters={"rows_sent": 12, "nobody_asked": 3}))
    nodes.begin(1, SPEC)
    nodes.now += 2.5
    seen = overview(nodes)
    a1 = next(node for node in seen.nodes if node.name == "a1")
    assert (a1.role, a1.registered, a1.serves, a1.age, a1.counters) == (
        "aggregator",
        True,
        True,
        2.5,
        {"rows_sent": 12},
    )
    (job,) = seen.jobs
    assert (job.name, job.state, job.epoch, job.version, job.rounds, job.world) == (
        "train",
        "running",
        1,
        1,
        1,
        4,
    )
    assert job.trees == (parents(nodes),)
    assert job.ranks["w3"] == (3,)
    nodes.kill("a1/r")
    assert [node.registered for node in overview(nodes).nodes if node.name == "a1"] == [False]


def test_a_member_with_an_old_version_is_told_again() -> None:
    nodes = Nodes()
    nodes.start()
    key = nodes.plans["w0"].key
    nodes.kill("a0")
    assert nodes.plans["w0"].version == 2
    nodes.clear()
    old = (Follows(job=JOB, key=key, version=1),)
    # it had not had the plan yet when it answered an earlier ping
    nodes.say("w0", Pong(nonce=0, plans=old))
    assert not nodes.got("w0", Plan)
    nodes.say("w0", Pong(nonce=1, plans=old))
    (again,) = nodes.got("w0", Plan)
    assert (again.plan.version, again.attach) == (2, (0,)), "as it was told the first time"
    nodes.say("w0", Pong(nonce=0, plans=old))
    nodes.say("w0", Pong(nonce=9, plans=(Follows(job=JOB, key=key ^ 1, version=1),)))
    assert len(nodes.got("w0", Plan)) == 1, "a ping before that, and another run"
    (event,) = [event for event in nodes.events if isinstance(event, PlanRepeated)]
    assert (event.node, event.held, event.version) == ("w0", 1, 2)


class TestEvaluation:
    """The first step goes to the PS, and then the tree is built."""

    TIMES: ClassVar = {"w0": (3.0, 1.0), "w1": (1.0, 1.0), "w2": (3.0, 1.1), "w3": (1.0, 1.2)}

    def evaluated(self, **changes: object) -> Managed:
        nodes = Managed(**{"kind": "tree", "evaluate": True, **changes})
        nodes.start()
        assert set(parents(nodes).values()) == {"ps"}
        nodes.begin(1, SPEC)
        nodes.finish(1)
        return nodes

    def report(self, nodes: Managed, scale: float = 1.0) -> None:
        for name, (training, sending) in self.TIMES.items():
            nodes.say(name, Performed(job=JOB, training=training, transmission=scale * sending))

    def test_like_workers_share_a_parent(self) -> None:
        nodes = self.evaluated()
        before = nodes.plans["w0"].version
        self.report(nodes)
        nodes.wait(1)
        assert nodes.plans["w0"].version == before + 1
        assert parents(nodes) == {"w1": "a0", "w3": "a0", "w0": "a1", "w2": "a1", "a0": "ps", "a1": "ps"}
        text = nodes.reasons[-1]
        assert text.startswith("XAgg's tree, k = 2 of a0, a1 under ps; communication is 35.0% of a step")
        assert "w1 1.000 + 1.000 s, w3 1.000 + 1.200 s, w0" in text
        # the new servers have slots before any worker sends to them
        assert set(nodes.layouts["a0"]) == {0}
        nodes.begin(2, SPEC)
        nodes.finish(2)
        nodes.kill("a1")
        assert parents(nodes)["w0"] == "ps"
        assert not nodes.got("w0", JobFailed)

    def test_rounds_on_their_way_are_finished_first(self) -> None:
        nodes = self.evaluated()
        nodes.begin(2, SPEC)
        self.report(nodes)
        assert set(parents(nodes).values()) == {"ps"}
        nodes.finish(2)
        nodes.wait(40)
        assert parents(nodes)["w1"] == "a0"

    def test_a_server_that_dies_before_is_not_waited_for(self) -> None:
        nodes = self.evaluated()
        nodes.begin(2, SPEC)
        self.report(nodes)
        nodes.kill("a0")
        nodes.finish(2)
        nodes.wait(40)
        assert set(parents(nodes).values()) == {"ps"}
        nodes.begin(3, SPEC)
        nodes.finish(3)
        assert not nodes.got("w0", JobFailed)

    def test_below_ten_percent_of_communication_nothing_changes(self) -> None:
        nodes = self.evaluated()
        version = nodes.plans["w0"].version
        self.report(nodes, scale=0.1)
        nodes.wait(40)
        assert nodes.plans["w0"].version == version
        assert nodes.reasons[-1] == (
            "communication is 5.1% of a step, less than 10%: aggregation cannot make steps noticeably shorter, the trees "
            "stay as they are"
        )

    def test_auto_prices_and_keeps_what_is_as_cheap(self) -> None:
        nodes = self.evaluated(kind="auto")
        self.report(nodes)
        nodes.wait(40)
        assert "takes" in nodes.reasons[-1]
        assert nodes.plans["w0"].placements[0].tree == 0

    def test_servers_that_leave_the_tree_are_dismissed(self) -> None:
        nodes = self.evaluated()
        self.report(nodes)
        nodes.wait(1)
        job = nodes.coordinator.jobs[JOB]
        star = Topology(roots=("ps",), workers=dict.fromkeys(WORKERS, ("ps",)))
        job.rearrange(star, {}, nodes.now)
        nodes.coordinator.on_timer(nodes.now)
        nodes.wait(40)
        assert set(parents(nodes).values()) == {"ps"}
        assert "its place in the tree was given up" in nodes.last("a0", JobEnded).reason


class TestDynamic:
    """Running jobs follow their fabric."""

    def started(self) -> Managed:
        nodes = Managed(kind="tree", dynamic=True)
        nodes.register("ps", "a0", *WORKERS)
        nodes.join("ps", "a0", *WORKERS)
        nodes.begin(1, SPEC)
        return nodes

    def test_an_aggregator_that_comes_is_taken_in_between_rounds(self) -> None:
        nodes = self.started()
        assert set(parents(nodes).values()) == {"a0", "ps"}
        nodes.register("a1")
        nodes.join("a1")
        assert "a1" not in nodes.plans
        nodes.finish(1)
        nodes.wait(40)
        assert parents(nodes) == {"w0": "a0", "w1": "a0", "w2": "a1", "w3": "a1", "a0": "ps", "a1": "ps"}
        assert set(nodes.layouts["a1"]) == {0}
        nodes.begin(2, SPEC)
        nodes.finish(2)
        assert not nodes.got("w0", JobFailed)

    def test_not_unless_it_is_asked_for(self) -> None:
        nodes = Managed(kind="tree")
        nodes.register("ps", "a0", *WORKERS)
        nodes.join("ps", "a0", *WORKERS)
        nodes.register("a1")
        nodes.join("a1")
        nodes.say("a0/r", *[Report(idle_cores=0.0, memory_used=0)] * 9)
        nodes.wait(40)
        assert nodes.plans["w0"].version == 1

    @pytest.mark.parametrize(
        ("load", "why"),
        [
            (Report(idle_cores=0.5, memory_used=GIB), "0.5 of its 8 cores are idle"),
            (Report(idle_cores=8, memory_used=14 * GIB), "88% of its memory is in use"),
        ],
        ids=["cores", "memory"],
    )
    def test_one_that_is_busy_is_left_out_in_the_middle_of_a_round_until_it_is_idle(
        self, load: Report, why: str
    ) -> None:
        nodes = self.started()
        nodes.say("a0/r", load, load)
        nodes.say("a0/r", Report(idle_cores=8, memory_used=GIB))
        nodes.say("a0/r", load, load)
        assert parents(nodes)["w0"] == "a0", "a moment is no burst"
        nodes.say("a0/r", load)
        assert set(parents(nodes).values()) == {"ps"}
        assert nodes.last("w0", Plan).attach == (0,), "and sends everything again"
        assert why in nodes.last("a0", JobEnded).reason
        nodes.finish(1)
        nodes.say("a0/r", *[Report(idle_cores=8, memory_used=GIB)] * 3)
        nodes.wait(40)
        assert parents(nodes)["w0"] == "a0"
        assert not nodes.got("w0", JobFailed)


def test_an_evaluation_adds_up_a_step_of_several_tensors() -> None:
    sending = [False]
    watched = Evaluation(7, lambda: sending[0], started=10.0)
    assert watched.begun(spec("a"), 12.0) is None
    sending[0] = True
    watched.look(12.0)
    sending[0] = False
    watched.look(13.5)
    assert watched.begun(spec("b"), 14.0) is None
    sending[0] = True
    watched.look(14.0)
    sending[0] = False
    watched.look(14.25)
    # waiting for the others after that is no part of how this one fares
    found = watched.begun(spec("a"), 20.0)
    assert found == Performed(job=7, training=2.5, transmission=1.75)


class TestRestart:
    """A manager that comes back knows the trees from those who follow them."""

    def crashed(self) -> Managed:
        nodes = Managed(kind="tree")
        nodes.start()
        nodes.begin(1, SPEC)
        nodes.restart()
        return nodes

    def test_a_job_goes_on_in_the_trees_it_had(self) -> None:
        nodes = self.crashed()
        names = ("ps", "a0", "a1", *WORKERS)
        # now another tree would be chosen for a new job
        nodes.register("ps", *WORKERS)
        nodes.register("a0", "a1", idle=0.0)
        for name in names:
            nodes.resume(name, 2, [(1, SPEC)] if name in WORKERS else [])
        tree = {"w0": "a0", "w1": "a0", "w2": "a1", "w3": "a1", "a0": "ps", "a1": "ps"}
        assert parents(nodes) == tree
        assert nodes.plans["w0"].version == 2

    def test_an_aggregator_that_stays_away_is_left_out(self) -> None:
        nodes = self.crashed()
        nodes.register("ps", *WORKERS)
        for name in ("ps", "a0", *WORKERS):
            nodes.resume(name, 2, [(1, SPEC)] if name in WORKERS else [])
        nodes.wait(nodes.settings.resume + 1)
        assert parents(nodes) == {"w0": "a0", "w1": "a0", "w2": "ps", "w3": "ps", "a0": "ps"}


def test_trees_are_put_together_from_neighbours() -> None:
    nodes = Managed(kind="tree")
    nodes.start()
    plans = dict(nodes.plans)
    whole = topology_of(plans, WORKERS, ("ps",))
    assert whole is not None
    assert whole.aggregators == {"a0": "ps", "a1": "ps"}
    for gone in ("ps", "a0", "a1"):
        rest = {name: plan for name, plan in plans.items() if name != gone}
        assert topology_of(rest, WORKERS, ("ps",)) == whole
    assert topology_of({"w0": plans["w0"]}, WORKERS, ("ps",)) is None
    assert topology_of({}, WORKERS, ("ps",)) is None


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EFBIG]
)
@pytest.mark.parametrize("where", ["open", "fsync", "replace"])
def test_jobs_start_where_their_numbers_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    told: list[str] = []
    epochs = Epochs(str(tmp_path / "epoch"), told.append)
    assert epochs.next() == 1

    def fail(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os if where == "fsync" else Path, where, fail)
        assert [epochs.next(), epochs.next()] == [2, 3]
    assert told == [f"{tmp_path / 'epoch'}: {os.strerror(number)}"] * 2
    assert epochs.next() == 4
    assert Epochs(str(tmp_path / "epoch")).last == 4
    assert len(list(tmp_path.iterdir())) == 1


def test_epochs_grow_over_restarts(tmp_path: Path) -> None:
    file = tmp_path / "epoch.json"
    assert [Epochs(None).next(), Epochs(None).next()] == [1, 1]
    first = Epochs(str(file))
    assert [first.next(), first.next()] == [1, 2]
    assert Epochs(str(file)).next() == 3
    file.write_text("{}")
    with pytest.raises(Failure, match="holds no epoch"):
        Epochs(str(file))
