"""Peers that know the token may say anything: the coordinator never raises, what it says can be sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.coordinator.members import Members, Rejection
from inanet.messages import control as m
from inanet.messages.text import clip, listing, show_ranks
from inanet.planning.topology import Topology
from inanet.proto.common.plan import TensorLayout, TensorSpec
from tests.coordinator.nodes import FIRST_KEY, JOB, Nodes, spec
from tests.messages.test_codec import PLAN, TABLE

NUMBERS = st.sampled_from([0, 1, 2, 3, JOB, 255, 0xFFFF, (1 << 48) - 1, (1 << 62), (1 << 63) - 1])
SPECS = st.sampled_from([spec(), spec("v"), spec("x", 7, dtype="i32"), spec("e", 0)])


@st.composite
def anything(draw: st.DrawFn, nodes: Nodes) -> m.Message:
    """A message with all numbers drawn from those that hurt; often about the job that runs."""
    message = draw(st.sampled_from(TABLE))
    changes: dict[str, object] = {}
    for name, info in type(message).model_fields.items():
        if name == "job" and info.annotation is not str and draw(st.integers(0, 3)):
            changes[name] = JOB
        elif info.annotation is int or name in ("round", "index", "before"):
            changes[name] = draw(NUMBERS)
        elif info.annotation is TensorSpec:
            changes[name] = draw(SPECS)
        elif info.annotation is TensorLayout:
            changes[name] = TensorLayout(draw(NUMBERS), draw(SPECS), ())
    if isinstance(message, m.Hello):
        who = draw(st.sampled_from([*nodes.topology.workers, *nodes.topology.aggregators, "ps"]))
        resume = m.Resume(
            job=draw(st.sampled_from([JOB, 3])),
            key=draw(st.sampled_from([FIRST_KEY, 5])),
            plan=draw(st.sampled_from([PLAN, *nodes.plans.values()])),
            next_round=draw(NUMBERS),
            layouts=draw(st.integers(0, 1)),
            open=draw(st.integers(0, 1)),
        )
        return nodes.hello(who, resume=draw(st.sampled_from([(), (resume,)])))
    # model_validate and not model_copy: what the codec would refuse is not tried
    try:
        return type(message).model_validate({**dict(message), **changes})
    except ValueError:
        return message


@settings(max_examples=150)
@given(st.data())
def test_no_message_brings_the_coordinator_down(data: st.DataObject) -> None:
    nodes = Nodes()
    nodes.start()
    if data.draw(st.booleans()):
        nodes.begin(1, spec(), ["w0", "w1"])
    if data.draw(st.booleans()):
        nodes.restart()
        nodes.join("ps")
    for index in range(data.draw(st.integers(1, 25))):
        peers = sorted(nodes.ids)
        if not peers or data.draw(st.integers(0, 4)) == 0:
            name = f"x{index}"
            nodes.ids[name], nodes.inbox[name] = 1000 + index, []
            nodes.coordinator.connected(1000 + index, nodes.now)
        else:
            name = data.draw(st.sampled_from(peers))
        nodes.say(name, data.draw(anything(nodes)))
        if data.draw(st.integers(0, 4)) == 0:
            nodes.wait(data.draw(st.sampled_from([1.0, 20.0])))
    nodes.wait(200)
    # nothing was raised on the way, and whoever asks is still answered
    nodes.ids["late"], nodes.inbox["late"] = 5000, []
    nodes.coordinator.connected(5000, nodes.now)
    nodes.say("late", nodes.hello("w0"))
    assert nodes.inbox["late"]


def test_numbers_no_job_can_have_reached_are_refused() -> None:
    nodes = Nodes()
    nodes.start()
    plan = nodes.plans["w0"]
    nodes.restart()
    nodes.join("w0", resume=(m.Resume(job=JOB, key=FIRST_KEY, plan=plan, next_round=1 << 60),))
    assert f"no job has come to round {1 << 60}" in nodes.last("w0", m.Reject).reason


def test_a_world_full_of_gaps_still_fits_a_message() -> None:
    members = Members("train")
    hello = Nodes().hello("w0", ranks=tuple(range(0, 65536, 2)), world=65536)
    members.admit(hello, Topology(roots=("ps",), workers={"w0": ("ps",)}))
    words = members.missing(Topology(roots=("ps",), workers={"w0": ("ps",)}), {"ps"})
    assert words[0].startswith("ranks 1, 3, 5, ")
    assert words[0].endswith(" and 32736 more")
    m.Waiting(joined=1, expected=65536, missing=words)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        ((3, 3), "rank 3"),
        ((0, 1), "ranks 0 and 1"),
        ((2, 1, 0), "ranks 0-2"),
        ((0, 1, 2, 5, 7, 8), "ranks 0-2, 5, 7 and 8"),
    ],
)
def test_ranks_are_written_for_people(ranks: tuple[int, ...], text: str) -> None:
    assert show_ranks(ranks) == text


def test_lists_and_long_texts() -> None:
    assert listing([]) == ""
    assert listing(["a"]) == "a"
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert clip("x" * 8000) == "x" * 8000
    assert clip("x" * 8001) == "x" * 8000 + " ..."
    m.Reject(reason=clip("x" * 100_000))


def test_a_worker_says_which_job_it_means() -> None:
    with pytest.raises(Rejection, match="does not say which job"):
        Members("").admit(Nodes().hello("w0", job=""), Topology(roots=("ps",), workers={"w0": ("ps",)}))
