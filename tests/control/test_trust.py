"""Who may be what, and what becomes of jobs when somebody may not any more: certificates at the door of a coordinator, and
the key of every job that one who was turned out knows.
"""

import random
from collections.abc import Iterator
from typing import get_args

import pytest

from inanet.control import authority
from inanet.control.events import JobOver, KeyChanged, MembershipChanged
from inanet.control.fields import NodeRole
from inanet.control.messages import (
    PROTOCOL,
    Held,
    Hello,
    Hold,
    JobFailed,
    Leave,
    Message,
    Overview,
    Plan,
    Query,
    Register,
    Registered,
    Reject,
    RoundFailed,
    Welcome,
)
from inanet.control.topology import Topology
from inanet.control.trees import Performance
from inanet.control.trust import ROLES, Certified, certified
from tests.control.nodes import FIRST_KEY, JOB, TOKEN, Nodes, consistent, parents, spec
from tests.control.test_elastic import judge
from tests.control.test_phases import PHASES, SPEC, Watched, reached
from tests.control.test_whole import DEEP, FLOATS, INTEGERS, TREES, Whole, all_reduce, arrays_for


class Guarded(Nodes):
    """Everybody has a certificate, with its own name as the serial number. ``revoked`` is the list."""

    def __init__(self, **settings: float) -> None:
        self.revoked: set[str] = set()
        self.serials: dict[str, str] = {}
        super().__init__(**settings)

    def connect(self, name: str, certificate: Certified) -> None:
        """A connection on which nothing was said yet."""
        self.ids[name], self.inbox[name] = next(self._next_id), []
        self.mute.discard(name)
        self.coordinator.connected(self.ids[name], self.now, certificate)

    def join(self, *names: str, **changes: object) -> None:
        for name in names:
            hello = self.hello(name, **changes)
            serial = self.serials.get(name, name)
            self.connect(name, Certified(frozenset([name]), frozenset([hello.role]), serial=serial))
            self.say(name, hello)

    def withdrawn(self, certificate: Certified | None) -> str:
        gone = certificate is not None and certificate.serial in self.revoked
        return f"the certificate of {certificate.serial} was revoked" if certificate and gone else ""

    def revoke(self, *serials: str) -> None:
        self.revoked |= {*serials}
        self.coordinator.recheck(self.withdrawn, self.now)
        self.pump()

    @property
    def keys(self) -> set[int]:
        """Of the plans that connected nodes follow."""
        return {plan.key for name, plan in self.plans.items() if name in self.ids}


@pytest.fixture
def nodes() -> Guarded:
    nodes = Guarded()
    nodes.start()
    return nodes


# ---------- the door


def answer(certificate: Certified, message: Message) -> Message:
    """What a coordinator says to the first message on a connection with this certificate."""
    nodes = Guarded()
    nodes.connect("x", certificate)
    nodes.say("x", message)
    return nodes.inbox["x"][0]


def of(name: str, *roles: str, **more: object) -> Certified:
    return Certified(frozenset([name]), frozenset(roles), **more)  # type: ignore[arg-type]


def register(name: str, role: str) -> Register:
    return Register(protocol=PROTOCOL, name=name, role=role, token=TOKEN)  # type: ignore[arg-type]


def query() -> Query:
    return Query(protocol=PROTOCOL, token=TOKEN)


def hello(name: str, **changes: object) -> Hello:
    return Guarded().hello(name, **changes)


@pytest.mark.parametrize(
    ("certificate", "message", "text"),
    [
        (of("w0", "worker"), hello("w1"), "its certificate is that of w0, not of 'w1'"),
        (of("w0", "aggregator"), hello("w0"), "its certificate lets it be aggregator, not to be worker"),
        (
            of("a0", "worker"),
            hello("a0"),
            "its certificate lets it be worker, not to be aggregator; issue it with",
        ),
        (of("ps", "worker", "status"), hello("ps"), "lets it be status, worker, not to be ps"),
        (of("ps", "worker"), register("ps", "ps"), "'ina keys issue --role ps'"),
        (of("a0", "ps"), register("a0", "switch"), "lets it be ps, not to be switch"),
        # whoever may coordinate is no other node by that
        (of("m", coordinator=True), hello("ps"), "its certificate is that of m, not of 'ps'"),
        (of("ps", coordinator=True), hello("ps"), "names no role"),
        (
            of("w0"),
            hello("w0"),
            "its certificate names no role, as those that older versions issued, not to be worker",
        ),
        (of("w0", "worker", jobs=("test-*",)), hello("w0"), "is for the jobs test-*, not for 'train'"),
        # only * stands for anything: names of jobs may have the other signs
        (of("w0", "worker", jobs=("run?",)), hello("w0", job="run1"), "is for the jobs run?, not for 'run1'"),
        (of("w0", "worker", jobs=("run[1]",)), hello("w0", job="run1"), "not for 'run1'"),
        (of("w0", "worker", jobs=("[!x]*",)), hello("w0"), "not for 'train'"),
        # an aggregator has the keys of all jobs
        (of("a0", "aggregator", jobs=("train",)), hello("a0"), "and a node that is aggregator serves all"),
        (
            of("w0", "worker"),
            query(),
            "lets it be worker, not to look (status); 'ina keys issue --role status'",
        ),
        (of("w0"), query(), "the certificate of w0 names no role"),
        (Certified(), hello("w0"), "its certificate is that of no node"),
    ],
)
def test_a_certificate_is_for_a_name_a_role_and_jobs(
    certificate: Certified, message: Message, text: str
) -> None:
    rejected = answer(certificate, message)
    assert isinstance(rejected, Reject)
    assert text in rejected.reason
    assert rejected.retry_after is None


def test_what_a_certificate_is_for_is_let_in() -> None:
    assert isinstance(answer(of("w0", "worker", "ps"), hello("w0")), Welcome)
    assert isinstance(answer(of("w0", "worker", jobs=("t*", "x")), hello("w0")), Welcome)
    assert isinstance(answer(of("a0", "aggregator"), hello("a0")), Welcome)
    assert isinstance(answer(of("a0", "aggregator"), register("a0", "aggregator")), Registered)
    assert isinstance(answer(of("w0", "worker", jobs=("t*",)), register("w0", "worker")), Registered)
    assert isinstance(answer(of("op", "status"), query()), Overview)
    assert isinstance(answer(of("m", coordinator=True), query()), Overview)


def test_every_role_of_a_node_can_be_issued() -> None:
    assert {*get_args(NodeRole)} < {*ROLES}
    with pytest.raises(
        ValueError, match="'manager' is no role; allowed: worker, aggregator, ps, switch, status"
    ):
        authority.issue(None, "w0", roles=("manager",), days=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a role is of no use"):
        authority.issue(None, "w0", roles=(), days=1)  # type: ignore[arg-type]
    for roles, coordinator in ((("worker", "aggregator"), False), (("worker",), True)):
        with pytest.raises(ValueError, match="jobs are for workers"):
            authority.issue(None, "w0", roles=roles, coordinator=coordinator, jobs=("x",), days=1)  # type: ignore[arg-type]


def test_names_in_a_certificate_are_what_is_in_front_and_nothing_else() -> None:
    names = (
        "inanet:node:w0",
        "inanet:role:worker",
        "inanet:role:",
        "INANET:coordinator",
        "x:inanet:coordinator",
    )
    found = certified({"subjectAltName": [("URI", n) for n in names] + [("DNS", "inanet:coordinator")]})
    assert found == Certified(frozenset(["w0"]), frozenset(["worker", ""]))
    assert certified(None) == Certified()


def test_a_second_word_on_a_connection_changes_nothing(nodes: Guarded) -> None:
    """Replayed or not: who somebody is stands from the first message on."""
    nodes.connect("x", of("x", "worker", "aggregator"))
    nodes.say("x", register("x", "worker"))
    nodes.say("x", register("x", "aggregator"))
    assert "uses this connection already" in nodes.last("x", Reject).reason
    nodes.connect("y", of("w0", "worker"))
    nodes.say("y", nodes.hello("w0"))
    # the first one is asked whether it is alive, and stays
    assert nodes.last("y", Reject).retry_after is not None
    assert "w0" in nodes.ids


# ---------- somebody is turned out


def test_a_revoked_aggregator_is_gone_and_its_key_with_it(nodes: Guarded) -> None:
    nodes.begin(1, spec())
    nodes.finish(1)
    nodes.clear()
    nodes.revoke("a0")
    assert "the certificate of a0 was revoked" in nodes.last("a0", Reject).reason
    assert nodes.got("a0", Plan) == []
    assert nodes.keys == {FIRST_KEY + 1}
    assert "a0" not in parents(nodes).values()
    assert "a0" not in nodes.plans["ps"].placements[0].children[0].name
    consistent(nodes)
    (changed,) = [event for event in nodes.events if isinstance(event, KeyChanged)]
    assert (changed.epoch, changed.reason) == (2, "the certificate of a0 was revoked")
    assert not any(isinstance(event, MembershipChanged | JobOver) for event in nodes.events)
    # once, however often the list is looked at
    nodes.revoke()
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.begin(2, spec())
    nodes.finish(2)
    assert [nodes.got(name, RoundFailed) for name in nodes.workers] == [[]] * 4


def test_what_is_under_way_ends_first_and_nothing_else_begins(nodes: Guarded) -> None:
    nodes.begin(1, spec(), ["w0", "w1"])
    nodes.clear()
    nodes.mute.add("w0")
    nodes.revoke("a0")
    assert nodes.keys == {FIRST_KEY}
    hold = nodes.last("w2", Hold)
    assert hold.before == 2
    # w0 had gone on before it heard of that: the others catch up
    nodes.begin(2, spec("v"), ["w0"])
    nodes.mute.discard("w0")
    nodes.say("w0", Held(job=JOB, nonce=hold.nonce))
    assert nodes.last("w2", Hold) == Hold(job=JOB, nonce=hold.nonce, before=3)
    # longer than aggregators that come back are waited for
    nodes.wait(nodes.settings.hold * 3)
    assert len(nodes.got("w2", Hold)) == 2
    nodes.begin(1, spec(), ["w2", "w3"])
    nodes.finish(1)
    nodes.begin(2, spec("v"), ["w1", "w2", "w3"])
    nodes.finish(2, nodes.workers)
    assert nodes.keys == {FIRST_KEY}
    nodes.finish(2, ["ps"])
    assert nodes.keys == {FIRST_KEY + 1}
    assert [nodes.got(name, RoundFailed) for name in nodes.workers] == [[]] * 4


def test_who_has_gone_before_it_is_revoked_knows_the_key_too(nodes: Guarded) -> None:
    nodes.kill("a1")
    assert nodes.keys == {FIRST_KEY}
    nodes.revoke("a1")
    assert nodes.keys == {FIRST_KEY + 1}
    # what it knew is of no use any more, so neither is its coming again
    nodes.serials["a1"] = "another"
    nodes.join("a1")
    assert nodes.plans["a1"].key == FIRST_KEY + 1
    consistent(nodes)
    nodes.revoke("a1")
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.revoke("another")
    assert nodes.keys == {FIRST_KEY + 2}


def test_who_waits_to_come_back_does_so_under_the_new_key(nodes: Guarded) -> None:
    nodes.kill("a1")
    nodes.begin(1, spec(), ["w0"])
    nodes.join("a1")
    nodes.revoke("a0")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    nodes.wait(nodes.settings.hold * 11)
    assert parents(nodes) == {"w0": "ps", "w2": "ps", "w1": "a1", "w3": "a1", "a1": "ps"}
    assert nodes.keys == {FIRST_KEY + 1}


def test_what_is_known_of_the_workers_and_wanted_for_them_stays(nodes: Guarded) -> None:
    (job,) = nodes.coordinator.jobs.values()
    assert job.performed(Performance("w0", 1.0, 1.0)) == ()
    nodes.begin(1, spec(), ["w0"])
    wanted = Topology(roots=("ps",), aggregators={"a1": "ps"}, workers=dict.fromkeys(nodes.workers, ("a1",)))
    job.rearrange(wanted, {}, nodes.now)
    nodes.revoke("a0")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    assert [job.performed(Performance(name, 1.0, 1.0)) != () for name in ("w1", "w2", "w3")] == [
        False,
        False,
        True,
    ]
    nodes.wait(nodes.settings.hold * 11)
    assert parents(nodes) == {**dict.fromkeys(nodes.workers, "a1"), "a1": "ps"}


def test_a_revoked_parameter_server_comes_back_with_another_certificate(nodes: Guarded) -> None:
    nodes.begin(1, spec(), ["w0"])
    nodes.revoke("ps")
    assert nodes.keys == {FIRST_KEY}, "nobody can end the round without it"
    nodes.serials["ps"] = "another"
    nodes.join("ps")
    nodes.begin(1, spec(), ["w1", "w2", "w3"])
    nodes.finish(1)
    assert nodes.keys == {FIRST_KEY + 1}
    assert nodes.plans["ps"].key == FIRST_KEY + 1


def test_without_one_the_job_ends_with_the_reason(nodes: Guarded) -> None:
    nodes.revoke("ps")
    nodes.wait(nodes.settings.resume + 1)
    failed = nodes.last("w0", JobFailed)
    assert failed.error == "root_lost"
    assert "it was refused: the certificate of ps was revoked" in failed.message


def test_a_revoked_worker_ends_its_job_with_the_reason(nodes: Guarded) -> None:
    nodes.begin(1, spec())
    nodes.revoke("w3")
    nodes.wait(nodes.settings.grace + 1)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.ranks) == ("worker_lost", (3,))
    assert "the certificate of w3 was revoked" in failed.message
    assert nodes.got("w3", JobFailed) == []


def test_or_is_left_out_of_an_elastic_one_with_one_new_key() -> None:
    nodes = Guarded(elastic=True)
    nodes.start()
    nodes.begin(1, spec())
    nodes.revoke("w3", "a1")
    judge(nodes, 1, complete=False)
    assert nodes.keys == {FIRST_KEY + 1}
    assert nodes.plans["w0"].ranks == 3
    nodes.revoke()
    assert nodes.keys == {FIRST_KEY + 1}


def test_who_is_turned_out_of_a_job_that_forms_has_never_known_its_key() -> None:
    nodes = Guarded()
    nodes.join("ps", "a0", "a1", "w0", "w1", "w2")
    nodes.revoke("w2")
    assert nodes.got("w2", Plan) == []
    assert not any(hasattr(message, "key") for message in nodes.inbox["w2"])
    nodes.serials["w2"] = "another"
    nodes.join("w2", "w3")
    assert nodes.keys == {FIRST_KEY}


def test_whom_an_earlier_coordinator_has_told_nobody_knows(nodes: Guarded) -> None:
    """Revoked while there was none, and never seen again."""
    nodes.restart()
    nodes.revoked.add("a1")
    for name in ("ps", "a0", "w0", "w1", "w2", "w3"):
        nodes.resume(name, 1)
    nodes.wait(nodes.settings.resume)
    assert nodes.keys == {FIRST_KEY}
    nodes.revoke()
    (key,) = nodes.keys
    assert key != FIRST_KEY
    nodes.revoke()
    assert nodes.keys == {key}


def test_connections_without_certificates_are_none_of_this() -> None:
    nodes = Nodes()
    nodes.start()
    nodes.coordinator.recheck(lambda certificate: "revoked" if certificate else "", nodes.now)
    nodes.pump()
    assert {plan.key for plan in nodes.plans.values()} == {FIRST_KEY}


def test_one_that_says_nothing_is_turned_out_too(nodes: Guarded) -> None:
    nodes.connect("silent", of("x", "worker", serial="silent"))
    nodes.revoke("silent")
    assert isinstance(nodes.inbox["silent"][-1], Reject)


def test_a_worker_that_has_left_a_job_about_to_end_does_not_keep_it_from_ending(nodes: Guarded) -> None:
    nodes.say("w3", Leave())
    nodes.revoke("w3")
    assert nodes.keys == {FIRST_KEY}
    for name in ("w0", "w1", "w2"):
        nodes.say(name, Leave())
    assert [event.error for event in nodes.events if isinstance(event, JobOver)] == [None]


def test_a_job_about_to_end_gets_no_other_key_and_makes_no_sums_without_who_has_left(nodes: Guarded) -> None:
    """Its hosts hold for the other key already when one of them leaves."""
    nodes.mute.add("w0")
    nodes.revoke("a0")
    hold = nodes.last("w0", Hold)
    nodes.say("w3", Leave())
    nodes.mute.discard("w0")
    nodes.say("w0", Held(job=JOB, nonce=hold.nonce))
    assert nodes.keys == {FIRST_KEY}
    assert not any(isinstance(event, MembershipChanged | KeyChanged) for event in nodes.events)
    # nobody holds any more
    nodes.revoke()
    nodes.begin(1, spec(), ["w0", "w1", "w2"])
    for name in ("w0", "w1", "w2"):
        assert nodes.last(name, RoundFailed).error == "worker_lost"
        assert isinstance([one for one in nodes.inbox[name] if isinstance(one, Plan | Hold)][-1], Plan)
        nodes.say(name, Leave())
    assert [event.error for event in nodes.events if isinstance(event, JobOver)] == [None]


# ---------- with real nodes, in virtual time


class Revoking(Watched):
    """Aggregators have certificates."""

    def connect(self, name: str) -> None:
        super().connect(name)
        peer = self.coordinator._peers.get(self.ids[name])
        assert peer is not None
        peer.certificate = Certified(frozenset([name]), frozenset(ROLES), serial=name)

    def revoke(self, name: str) -> None:
        """Its member hears of it; its node goes on sending as before."""
        self.coordinator.recheck(lambda one: "revoked" if one and one.serial == name else "", self.clock.now)

    @property
    def keys(self) -> Iterator[int]:
        return (view.plan.key for member in self.members.values() for view in member._jobs.values())


def two_rounds(phase: str = "", revoked: str = "") -> tuple[Revoking, list[set[bytes]], set[int]]:
    """The fabric, the bits of two rounds on all hosts, and the job's keys when somebody was revoked in the first one."""
    whole = Revoking(DEEP)
    arrays = arrays_for(DEEP, 1, SPEC)
    whole.begin_watched(1, arrays)
    if phase:
        reached(whole, phase)
    before = {*whole.keys}
    if revoked:
        whole.revoke(revoked)
    whole.run(lambda: whole.done(1))
    whole.wait(0.5)
    later = arrays_for(DEEP, 2, SPEC)
    whole.begin(2, SPEC, later)
    whole.run(lambda: whole.done(2))
    assert {whole.results[name, round_] for name in DEEP.workers for round_ in (1, 2)} == {None}
    return whole, [{array.tobytes() for array in its.values()} for its in (arrays, later)], before


@pytest.fixture(scope="module")
def undisturbed() -> list[set[bytes]]:
    _, bits, _ = two_rounds()
    assert [len(one) for one in bits] == [1, 1]
    return bits


@pytest.mark.parametrize("name", ["a0", "top"])
@pytest.mark.parametrize("phase", PHASES)
def test_no_bit_depends_on_an_aggregator_that_is_revoked(
    phase: str, name: str, undisturbed: list[set[bytes]]
) -> None:
    whole, bits, before = two_rounds(phase, name)
    assert bits == undisturbed
    (job,) = whole.coordinator.jobs.values()
    # it still has what it had, and nothing else
    (held,) = {view.plan.key for view in whole.members[name]._jobs.values()}
    assert before == {held} != {job.planner.key}


class Renewed(Whole):
    """Every process has a certificate of its own. ``revoked`` are serial numbers."""

    def __init__(self, topology: Topology, impair: float) -> None:
        self.revoked: set[str] = set()
        self.serials: dict[str, str] = {}
        super().__init__(topology, impair)

    def connect(self, name: str) -> None:
        super().connect(name)
        self.serials[name] = f"{name}-{self.ids[name]}"
        peer = self.coordinator._peers.get(self.ids[name])
        assert peer is not None
        peer.certificate = Certified(frozenset([name]), frozenset(ROLES), serial=self.serials[name])

    def withdrawn(self, certificate: Certified | None) -> str:
        return "revoked" if certificate is not None and certificate.serial in self.revoked else ""

    def act(self, name: str, chance: random.Random) -> None:
        """Kill it, revoke it, or first the one and then the other; some moments later it is there again."""
        steps = chance.randrange(12)
        how = chance.choice(["killed", "revoked", "both"])
        for _ in range(steps):
            self.step()
        if how != "killed":
            self.revoked.add(self.serials[name])
        if how != "both":
            self.coordinator.recheck(self.withdrawn, self.clock.now)
            for _ in range(steps):
                self.step()
        self.kill(name)
        self.coordinator.recheck(self.withdrawn, self.clock.now)
        for _ in range(chance.randrange(6)):
            self.step()
        self.start(name)


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_revoked_when_no_bit_is_lost_and_no_key_is_kept(seed: int) -> None:
    chance = random.Random(seed)
    topology = DEEP if seed % 2 else TREES
    whole = Renewed(topology, chance.choice([0.0, 0.03]))
    (first,) = {job.planner.key for job in whole.coordinator.jobs.values()}
    for round_ in range(1, 7):
        victim = chance.choice([*topology.aggregators, *topology.roots])
        all_reduce(
            whole, round_, FLOATS if round_ % 2 else INTEGERS, lambda victim=victim: whole.act(victim, chance)
        )  # type: ignore[misc]
    (job,) = whole.coordinator.jobs.values()
    whole.run(lambda: not any(map(whole.withdrawn, whole.coordinator._keyholders.of(job.planner.key))))
    whole.wait(60.0)
    assert job.absent == set()
    followed = {
        (name, view.plan.key) for name, member in whole.members.items() for view in member._jobs.values()
    }
    assert followed == {(name, job.planner.key) for name in whole.members}
    assert job.planner.key != first, "somebody who knew it was revoked"
