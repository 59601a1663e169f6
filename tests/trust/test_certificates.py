"""Who may be what: certificates at the door of a coordinator."""

from typing import get_args

import pytest

from inanet.messages.control import (
    PROTOCOL,
    Hello,
    Message,
    Overview,
    Query,
    Register,
    Registered,
    Reject,
    Welcome,
)
from inanet.messages.fields import NodeRole
from inanet.trust import authority
from inanet.trust.certificates import ROLES, Certified, certified
from tests.coordinator.guarded import Guarded
from tests.coordinator.nodes import TOKEN


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


def test_a_second_word_on_a_connection_changes_nothing() -> None:
    nodes = Guarded()
    nodes.start()
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
