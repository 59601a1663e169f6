"""Control frames: one table for both directions at every split; whatever bytes come are taken or refused."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet.messages import control as m
from inanet.messages.codec import MAX_FRAME, ControlError, Decoder, decode, encode
from inanet.messages.registration import JobState, NodeState, Overview, Query, Register, Registered, Report
from inanet.proto.common.events import Tally
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

SPEC = TensorSpec("fc1.weight", "f32", (3, 4), "sum", ExponentMode.CARRIED)
PLAN = NodePlan(
    7,
    3,
    (1 << 64) - 1,
    4,
    (
        Placement(
            0,
            Parent("ps", 1 << 47, 1 << 31, 64),
            (Child("w0", 9000, 1, 1, 32), Child("w1", 9001, 2, 3, 32)),
            (Retired(4, 3),),
        ),
        Placement(1),
    ),
)
LAYOUT = TensorLayout(
    5,
    SPEC,
    (Shard(0, 5, 0, Part.DATA, Fold.SUM, 0, 12), Shard(1, 5, 1, Part.EXPONENTS, Fold.MAX8, 0, 1)),
)
HELLO = m.Hello(
    protocol=1,
    name="w0",
    role="worker",
    token="t",
    endpoint=5,
    rx_window=100,
    job="train",
    ranks=(0, 1),
    world=4,
    resume=(m.Resume(job=7, key=9, plan=PLAN, next_round=12, layouts=3, open=2),),
)
TABLE: list[m.Message] = [
    HELLO,
    m.Known(job=7, layout=LAYOUT),
    m.Begin(job=0, round=1, spec=SPEC),
    m.LayoutReady(job=7, tensor=5),
    m.LayoutReady(job=7, tensor=5, refused="out of slots"),
    m.Refuse(job=7, round=3, rank=2, tensor="fc1", index=17, reason="nonfinite", detail="nan"),
    m.Refuse(job=7, round=3, rank=2, tensor="fc1", index=None, reason="overflow"),
    m.Finished(job=7, round=(1 << 63) - 1),
    m.PeerSilent(job=7, name="a0", seconds=2.5),
    m.Held(job=7, nonce=1),
    m.Leave(reason="done"),
    m.RateReady(job=7, sequence=1, maximum=10**9),
    m.RateDone(job=7, sequence=2),
    m.RateLoss(job=7, sequence=3, sent=1000, lost=20),
    m.Kept(job=7, iteration=12, origin=99),
    m.Gathered(job=7, tally=Tally(20, 11, ((1 << 64) - 1, 3), (5, 1), 2)),
    m.Stats(counters={"drops": 3}),
    m.Performed(job=7, training=1.5, transmission=0.25),
    Register(protocol=2, name="s0", role="switch", token="t", cores=4, memory=1 << 34, link_bps=10**10),
    Report(idle_cores=2.5, memory_used=1 << 30, send_bps=10**9),
    Query(protocol=2, token="t", nonce=7),
    m.Ping(nonce=1),
    m.Continue(session="5ec0e7", heard=64),
    m.Continued(known=True, heard=3),
    m.Heard(count=64),
    m.Away(),
    m.Pong(nonce=1),
    m.Pong(nonce=2, plans=(m.Follows(job=7, key=1, version=3),)),
    m.Welcome(silence=10.0),
    m.Welcome(job=7, silence=10, deadline=3.5),
    m.Waiting(joined=2, expected=4, missing=("rank 2", "aggregator a0")),
    m.Reject(reason="no", retry_after=3.0),
    m.Plan(plan=PLAN, attach=(0, 1)),
    m.Layout(job=7, layout=LAYOUT, last_round=4),
    m.LayoutDrop(job=7, tensor=5),
    m.RateGrant(job=7, sequence=1, up=10**9, down=None),
    m.Hold(job=7, nonce=1, before=9),
    m.Judge(job=7, round=9, tensors=(1,)),
    m.Judged(job=7, round=9, complete=False),
    m.Gather(job=7, iteration=20),
    m.RoundFailed(job=7, round=3, error="timeout", message="too late", tensors=(5,), rank=2, missing=(3,)),
    m.JobFailed(job=None, error="worker_lost", message="gone", ranks=(1,)),
    m.JobEnded(job=7, reason="over"),
    m.Stop(reason="bye"),
    Registered(heartbeat=1.0, epoch=3),
    Overview(
        epoch=3,
        nodes=(NodeState(name="a0", role="aggregator", registered=True, serves=True, counters={"rx": 1}),),
        jobs=(JobState(name="train", state="running", ranks={"w0": (0,)}, trees=({"w0": "ps"},)),),
        missing=("a1",),
    ),
]


def test_the_table_has_every_kind() -> None:
    assert {type(message) for message in TABLE} == set(m.KINDS.values())


@pytest.mark.parametrize("message", TABLE, ids=lambda message: message.kind)
def test_round_trip_at_every_split(message: m.Message) -> None:
    frame = encode(message)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    for cut in range(len(frame) + 1):
        decoder = Decoder()
        assert [*decoder.feed(frame[:cut]), *decoder.feed(frame[cut:])] == [message]
        assert decoder.pending == 0


def test_frames_on_the_wire() -> None:
    assert encode(m.Ping(nonce=5)).hex() == "0000" + "0012" + "82a46b696e64a470696e67a56e6f6e636505"
    assert encode(m.Held(job=7, nonce=300)).hex() == (
        "00000019" + "83a46b696e64a468656c64a36a6f6207a56e6f6e6365cd012c"
    )


def test_many_frames_in_one_read_keep_their_order() -> None:
    decoder = Decoder()
    stream = b"".join(encode(message) for message in TABLE)
    assert decoder.feed(stream + b"\x00") == TABLE
    assert decoder.pending == 1


def altered(path: str, value: Any, message: m.Message = HELLO) -> bytes:
    """A message's map with one field replaced; a dotted path enters maps and arrays."""
    fields: Any = msgpack.unpackb(encode(message)[4:])
    at = fields
    *way, last = path.split(".")
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[last] = value
    body: bytes = msgpack.packb(fields)
    return body


LAID = m.Layout(job=7, layout=LAYOUT, last_round=0)
PLANNED = m.Plan(plan=PLAN)
BEGUN = m.Begin(job=7, round=1, spec=SPEC)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x01", "a message is a map, not int"),
        (msgpack.packb({}), "unknown kind of message: 'None'"),
        (msgpack.packb({"kind": "nonsense"}), "unknown kind of message: 'nonsense'"),
        (msgpack.packb({"kind": ["hello"]}), "unknown kind"),
        (msgpack.packb({"kind": "ping"}), "ping: nonce: Field required"),
        (msgpack.packb({"kind": "ping", "nonce": 1, "more": 2}), "ping: more: Extra inputs"),
        (msgpack.packb({"kind": "ping", "nonce": True}), "ping: nonce: Input should be a valid integer"),
        (msgpack.packb({"kind": "ping", "nonce": 1.0}), "ping: nonce"),
        (msgpack.packb({"kind": "ping", "nonce": "1"}), "ping: nonce"),
        (msgpack.packb({"kind": "ping", "nonce": -1}), "ping: nonce"),
        (msgpack.packb({"kind": "ping", "nonce": 1 << 63}), "ping: nonce"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (msgpack.packb({"kind": "ping", "nonce": msgpack.ExtType(1, b"")}), "not msgpack|ping"),
        (msgpack.packb({"kind": "ping", "nonce": b"1"}), "not msgpack"),
        (msgpack.packb({"kind": "leave", "reason": "x" * 70_000}), "not msgpack within the limits"),
        (msgpack.packb({"kind": "leave", "reason": "x" * 9_000}), "leave: reason"),
        (msgpack.packb({"kind": "gather", "job": 7, "iteration": 0}), "gather: iteration"),
        (altered("role", "king"), "hello: role"),
        (altered("name", "two words"), "hello: name"),
        (altered("name", ""), "hello: name"),
        (altered("name", "w0\n"), "hello: name"),
        (altered("ranks", [0, "1"]), "hello: ranks"),
        (altered("ranks", [0, -1]), "hello: ranks"),
        (altered("ranks", {"0": 1}), "hello: ranks"),
        (altered("resume.0.key", 1.5), "hello: resume.0.key"),
        (altered("resume.0.plan.version", "3"), "hello: resume.0.plan"),
        (altered("resume.0.extra", 1), "hello: resume.0.extra"),
        (altered("spec.mode", True, BEGUN), "begin: spec: .*bool instead of ExponentMode"),
        (altered("spec.mode", 9, BEGUN), "begin: spec.mode"),
        (altered("spec.propagate", 0, BEGUN), "begin: spec: .*int instead of bool"),
        (altered("spec.shape", [3, "4"], BEGUN), "begin: spec: .*str instead of int"),
        (altered("spec.shape", 12, BEGUN), "begin: spec: .*instead of an array"),
        (altered("spec.shape", [-1], BEGUN), "begin: spec: .*extents"),
        (altered("spec.shape", [1] * 65, BEGUN), "begin: spec: .*dimensions"),
        (altered("spec.shape", [1 << 30, 1 << 30], BEGUN), "begin: spec: .*elements"),
        (altered("spec.dtype", "f64", BEGUN), "begin: spec: .*dtype 'f64' is not one of"),
        (altered("spec.op", "xor", BEGUN), "begin: spec: .*op 'xor'"),
        (altered("spec.factor", 2.0, BEGUN), "begin: spec: .*factor"),
        (altered("spec.more", 2.0, BEGUN), "begin: spec.more"),
        (altered("spec", [1], BEGUN), "begin: spec: .*instead of a map"),
        (altered("layout.shards.0.count", 0, LAID), "layout: layout: .*count is 0"),
        (altered("layout.shards.0.shard", 0xFFFF, LAID), "layout: layout: .*shard is 65535"),
        (altered("layout.shards.0.shard", 1, LAID), "layout: layout: .*two shards"),
        (altered("layout.shards.0.tensor", 6, LAID), "layout: layout: .*belongs to tensor 6"),
        (altered("layout.shards.0.part", 2, LAID), "layout: layout.shards.0.part"),
        (altered("plan.job", 1 << 16, PLANNED), "plan: plan: .*job is 65536"),
        (altered("plan.version", 0, PLANNED), "plan: plan: .*version is 0"),
        (altered("plan.key", -1, PLANNED), "plan: plan: .*key is -1"),
        (altered("plan.placements.0.children.0.bit", 3, PLANNED), "plan: plan: .*one-hot"),
        (altered("plan.placements.0.children.0.bit", 2, PLANNED), "plan: plan: .*twice"),
        (altered("plan.placements.0.children.0.since", 4, PLANNED), "plan: plan: .*since of 'w0' is 4"),
        (altered("plan.placements.0.children.0.window", 0, PLANNED), "plan: plan: .*window to 'w0' is 0"),
        (altered("plan.placements.0.parent.bit", 0, PLANNED), "plan: plan: .*own bit"),
        (altered("plan.placements.0.parent.endpoint", 1 << 48, PLANNED), "plan: plan: .*endpoint of 'ps'"),
        (altered("plan.placements.0.retired.0.mask", 1 << 32, PLANNED), "plan: plan: .*retired mask"),
        (altered("plan.placements.1.tree", 0, PLANNED), "plan: plan: .*two placements"),
        (altered("plan.placements.0.parent", 5, PLANNED), "plan: plan: .*instead of a map"),
    ],
)
def test_what_is_not_a_message_is_refused_with_its_field(body: bytes, complaint: str) -> None:
    with pytest.raises(ControlError, match=complaint):
        decode(body)


def test_an_announced_giant_is_refused_before_it_is_read() -> None:
    decoder = Decoder()
    with pytest.raises(ControlError, match="frame of 1048577 B announced"):
        decoder.feed((MAX_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(ControlError, match="announced"):
        decoder.feed(encode(m.Ping(nonce=1)))
    assert decoder.pending == 0


def test_a_message_that_needs_more_than_a_frame_cannot_be_sent() -> None:
    counters = {f"{index:04d}{'x' * 250}": index for index in range(4096)}
    with pytest.raises(ControlError, match="Stats takes"):
        encode(m.Stats(counters=counters))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)


def taken_or_refused(stream: bytes) -> bool:
    """Whether what was taken is what it would be sent as; any other error than a refusal is raised."""
    decoder = Decoder()
    try:
        messages = decoder.feed(stream)
    except ControlError:
        return True
    return all(decode(encode(message)[4:]) == message for message in messages)


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(stream: bytes) -> None:
    assert taken_or_refused(stream)
    assert taken_or_refused(len(stream).to_bytes(4, "big") + stream)


@given(st.dictionaries(st.sampled_from(["kind", "job", "round", "spec", "nonce", "plan", "key"]), VALUES))
def test_any_map_is_taken_or_refused(fields: dict[str, Any]) -> None:
    body = msgpack.packb(fields)
    assert taken_or_refused(len(body).to_bytes(4, "big") + body)


@given(
    st.sampled_from(TABLE),
    st.data(),
)
def test_any_field_may_hold_anything(message: m.Message, data: st.DataObject) -> None:
    fields: Any = msgpack.unpackb(encode(message)[4:], strict_map_key=False)
    at = fields
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(VALUES)
    body = msgpack.packb(fields)
    assert taken_or_refused(len(body).to_bytes(4, "big") + body)


@given(st.sampled_from(TABLE), st.data())
def test_flipped_bits_are_taken_or_refused(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert taken_or_refused(bytes(frame))
