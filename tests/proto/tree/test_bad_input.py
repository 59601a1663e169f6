"""Packets that are none of a node's business are counted under one reason and change nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inanet.proto.common.plan import ExponentMode, Retired
from inanet.testing.fabric import VirtualFabric, float_arrays
from inanet.wire.drops import Drop
from inanet.wire.xagg import Flag, Kind, Packet, body_bytes
from tests.proto.tree.rig import (
    JOB,
    KEY,
    PARENT,
    SHARD,
    TREE,
    Recorder,
    Rig,
    batch_of,
    child_at,
    integers,
    snapshot,
)
from tests.proto.tree.test_rounds import ONE_EACH, spec_of
from tests.proto.tree.test_rounds import TREE as TWO_LEVELS

C0, C1 = child_at(0), child_at(1)
STRANGER = 0x0A00_0063_0000


def middle_of_a_round(root: bool = False) -> Rig:
    """Round 5: fragment 0 has child 0, 1 was restarted as attempt 2, 2 was handed on, 3 has its result."""
    rig = Rig(root=root, retired=(Retired(4, 2),))
    values = integers(5)
    rig.feed(rig.data(0, 0, values[0]))
    rig.feed(
        rig.data(0, 2, values[2]),
        rig.data(1, 2, values[2]),
        rig.data(0, 3, values[3]),
        rig.data(1, 3, values[3]),
    )
    if not root:
        rig.feed(rig.restart(1, 130, 2))
        rig.feed((rig.packet(Kind.RESULT, host=0, gradient=3, values=values[3]), PARENT))
        rig.feed(
            (
                rig.packet(
                    Kind.CREDIT,
                    host=8,
                    gradient=2,
                    shard=0,
                    round=0,
                    flags=Flag.DOWN & 0,
                    values=np.array([TREE]),
                ),
                PARENT,
            )
        )
    rig.sent()
    return rig


def cut(data: bytes, size: int) -> bytes:
    return data[:size]


def flip(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


A = Kind.DATA
#: reason, source, kind, changed fields, change of bytes
CASES = [
    ("short", C0, A, {}, lambda d: b""),
    ("short", C0, A, {}, lambda d: d[:35]),
    ("short", C0, A, {}, lambda d: d[:36]),
    ("short", C0, A, {}, lambda d: d[:-4]),
    ("short", C0, Kind.LOST, {}, lambda d: d[:-1]),
    ("oversized", C0, A, {}, lambda d: d + b"\0"),
    ("oversized", C0, Kind.SENT, {}, lambda d: d + bytes(1100)),
    ("bad_magic", C0, A, {}, lambda d: flip(d, 0)),
    ("bad_magic", C0, A, {}, lambda d: b"\0" + d[1:]),
    ("bad_type", C0, A, {}, lambda d: d[:1] + b"\x00" + d[2:]),
    ("bad_type", C0, A, {}, lambda d: d[:1] + b"\x0c" + d[2:]),
    ("foreign_job", C0, A, {"job": 0}, None),
    ("foreign_job", C0, Kind.SENT, {"job": 65535}, None),
    ("bad_tag", C0, A, {"key": KEY ^ 1}, None),
    ("bad_tag", C0, Kind.READY, {"key": KEY ^ 1 << 63}, None),
    ("bad_tag", C0, A, {}, lambda d: flip(d, 8 * 8)),
    ("bad_checksum", C0, A, {"gradient": 4}, lambda d: flip(d, 24 * 8 + 77)),
    ("bad_checksum", C0, A, {"gradient": 4}, lambda d: flip(d, 8 * len(d) - 1)),
    ("bad_checksum", C0, Kind.LOST, {"flags": Flag.DOWN}, lambda d: flip(d, 30 * 8)),
    ("unknown_shard", C0, A, {"shard": 0}, None),
    ("unknown_shard", C0, A, {"shard": SHARD + 1}, None),
    ("unknown_shard", C0, A, {"shard": 4096}, None),
    ("unknown_shard", C0, A, {"shard": 65535}, None),
    *(
        ("unknown_shard", C0, kind, {"shard": 4095}, None)
        for kind in (Kind.SENT, Kind.LOST, Kind.DONE, Kind.READY)
    ),
    ("unknown_shard", PARENT, Kind.OPEN, {"shard": 0, "host": 8}, None),
    ("bad_fragment", C0, A, {"gradient": 5}, None),
    ("bad_fragment", C0, A, {"gradient": 2**32 - 1}, None),
    ("bad_fragment", PARENT, Kind.RESULT, {"gradient": 5, "host": 0}, None),
    ("bad_fragment", PARENT, Kind.RESTART, {"gradient": 2**31, "host": 0}, None),
    ("bad_fragment", C0, Kind.LOST, {"gradient": 1, "flags": Flag.DOWN}, None),
    ("bad_fragment", PARENT, Kind.LOST, {"gradient": 2**32 - 1, "host": 8}, None),
    *(("foreign_host", C0, A, {"host": host}, None) for host in (0, 2, 3, 16, 1 << 31, 0xFFFFFFFF)),
    ("foreign_host", C1, A, {}, None),
    ("foreign_host", STRANGER, A, {}, None),
    ("foreign_host", STRANGER, Kind.RESULT, {"host": 0}, None),
    ("foreign_host", C0, Kind.RESULT, {"host": 0}, None),
    ("foreign_host", C0, Kind.RESTART, {"host": 0, "attempt": 9}, None),
    ("foreign_host", C0, Kind.OPEN, {}, None),
    *(("foreign_host", STRANGER, kind, {}, None) for kind in (Kind.SENT, Kind.DONE, Kind.READY, Kind.OPEN)),
    *(("foreign_host", C0, kind, {"host": 3}, None) for kind in (Kind.SENT, Kind.READY)),
    *(("foreign_host", C0, kind, {"host": 0}, None) for kind in (Kind.SENT, Kind.READY)),
    *(
        ("foreign_host", C0, kind, {"host": 1 << 31, "flags": Flag.DOWN}, None)
        for kind in (Kind.LOST, Kind.DONE)
    ),
    # SENT about results comes from the parent, LOST and DONE about contributions too
    ("foreign_host", C0, Kind.SENT, {"flags": Flag.DOWN}, None),
    ("foreign_host", C0, Kind.DONE, {}, None),
    ("foreign_host", PARENT, Kind.SENT, {"host": 8}, None),
    ("foreign_host", PARENT, Kind.OPEN, {"host": 4}, None),
    ("stale_plan", C0, A, {"host": 4}, None),
    ("stale_plan", C0, Kind.SENT, {"host": 4}, None),
    ("stale_plan", C0, A, {"plan": 0}, None),
    ("stale_plan", C0, A, {"plan": 255}, None),
    ("future_plan", C0, A, {"plan": 6}, None),
    ("future_plan", C0, Kind.EXPONENT, {"plan": 100}, None),
    *(("stale_round", C0, A, {"round": r, "gradient": 4}, None) for r in (0, 4, 2**31 + 6, 2**32 - 1)),
    *(("not_open", C0, A, {"round": r, "gradient": 4}, None) for r in (6, 7, 2**31 + 4)),
    ("stale_round", PARENT, Kind.RESULT, {"round": 4, "host": 0, "gradient": 4}, None),
    ("not_open", PARENT, Kind.RESULT, {"round": 6, "host": 0, "gradient": 4}, None),
    ("bad_fragment", PARENT, Kind.RESTART, {"gradient": 0, "host": 0, "attempt": 3}, None),
    ("bad_fragment", PARENT, Kind.RESTART, {"word": 1, "gradient": 1, "host": 0, "attempt": 3}, None),
    ("stale_round", PARENT, Kind.RESTART, {"word": 1, "round": 4, "host": 0, "attempt": 1}, None),
    ("not_open", PARENT, Kind.RESTART, {"word": 1, "round": 6, "host": 0, "attempt": 1}, None),
    ("stale_round", C0, Kind.LOST, {"round": 4, "flags": Flag.DOWN}, None),
    ("not_open", C0, Kind.LOST, {"round": 6, "flags": Flag.DOWN}, None),
    ("stale_round", C0, Kind.DONE, {"round": 4, "flags": Flag.DOWN}, None),
    ("not_open", PARENT, Kind.DONE, {"round": 6, "host": 8}, None),
    ("not_open", C0, Kind.SENT, {"round": 6}, None),
    ("stale_round", PARENT, Kind.OPEN, {"round": 3, "host": 8}, None),
    ("stale_attempt", C0, A, {"gradient": 1}, None),
    ("stale_attempt", C0, A, {"gradient": 1, "attempt": 1}, None),
    ("stale_attempt", C0, A, {"gradient": 1, "attempt": 200}, None),
    ("stale_attempt", PARENT, Kind.RESULT, {"gradient": 1, "attempt": 1, "host": 0}, None),
    ("stale_attempt", PARENT, Kind.RESTART, {"word": 130 << 8, "attempt": 1, "host": 0}, None),
    ("stale_attempt", PARENT, Kind.RESTART, {"word": 130 << 8, "attempt": 2, "host": 0}, None),
    ("future_attempt", C0, A, {"gradient": 1, "attempt": 3}, None),
    ("future_attempt", C0, Kind.EXPONENT, {"gradient": 4, "attempt": 100}, None),
    ("duplicate", C0, A, {}, None),
    ("duplicate", C0, Kind.EXPONENT, {}, None),
    ("duplicate", C0, A, {"gradient": 2}, None),
    ("duplicate", PARENT, Kind.RESULT, {"gradient": 3, "host": 0}, None),
    ("duplicate", C0, Kind.RESULT, {"gradient": 3}, None),
    ("foreign_host", PARENT, Kind.CREDIT, {"host": 8, "word": TREE + 1}, None),
    ("foreign_host", PARENT, Kind.CREDIT, {"host": 8, "word": 2**31}, None),
    ("foreign_host", PARENT, Kind.CREDIT, {"host": 4, "word": TREE}, None),
    ("foreign_host", STRANGER, Kind.CREDIT, {"host": 8, "word": TREE}, None),
    ("foreign_host", C0, Kind.CREDIT, {"host": 0, "word": TREE, "flags": Flag.DOWN}, None),
    ("foreign_host", C0, Kind.CREDIT, {"host": 2, "word": TREE, "flags": Flag.DOWN}, None),
    ("stale_plan", PARENT, Kind.CREDIT, {"host": 8, "word": TREE, "gradient": 9, "plan": 4}, None),
    ("duplicate", PARENT, Kind.CREDIT, {"host": 8, "word": TREE, "gradient": 2}, None),
    ("duplicate", PARENT, Kind.CREDIT, {"host": 8, "word": TREE, "gradient": 2**31 + 2}, None),
    ("foreign_host", C0, Kind.PROBE, {"host": 0, "word": TREE, "flags": Flag.DOWN}, None),
    ("foreign_host", PARENT, Kind.PROBE, {"host": 8, "word": TREE, "flags": Flag.DOWN}, None),
    ("foreign_host", PARENT, Kind.PROBE, {"host": 0, "word": TREE + 1, "flags": Flag.DOWN}, None),
    ("foreign_host", C0, Kind.PROBE, {"host": 0, "word": TREE}, None),
    ("foreign_host", C1, Kind.PROBE, {"host": 1, "word": TREE}, None),
    ("duplicate", C0, Kind.PROBE, {"host": 1, "word": TREE}, None),
]


@pytest.mark.parametrize(
    ("reason", "source", "kind", "changes", "change"),
    CASES,
    ids=[f"{i}-{case[0]}-{case[2].name.lower()}" for i, case in enumerate(CASES)],
)
def test_one_reason_and_no_change(reason, source, kind, changes, change):
    rig = middle_of_a_round()
    changes = dict(changes)
    word = changes.pop("word", None)
    data = rig.packet(kind, values=None if word is None else np.array([word]), **changes)
    if change is not None:
        data = change(data)
    before, drops, taken = rig.snapshot(), rig.drops, rig.taken
    rig.feed((data, source))
    after = rig.drops
    assert {
        name: after[name] - drops.get(name, 0) for name in after if after[name] != drops.get(name, 0)
    } == {reason: 1}
    assert rig.taken == taken
    assert rig.snapshot() == before
    assert [sent for sent in rig.sent() if sent.kind is not Kind.CREDIT] == []


def test_a_batch_of_all_bad_packets_is_counted_packet_by_packet():
    rig = middle_of_a_round()
    batch, want = [], {}
    for reason, source, kind, changes, change in CASES:
        changes = dict(changes)
        word = changes.pop("word", None)
        data = rig.packet(kind, values=None if word is None else np.array([word]), **changes)
        batch.append((change(data) if change else data, source))
        want[reason] = want.get(reason, 0) + 1
    before, drops = rig.snapshot(), rig.drops
    rig.feed(*batch)
    assert {name: count - drops.get(name, 0) for name, count in rig.drops.items()} == want
    assert rig.snapshot() == before


def test_job_shard_and_round_numbers_may_be_zero_or_the_largest():
    for last, first in ((2**32 - 1, 0), (2**32 - 2, 2**32 - 1), (2**31 - 1, 2**31)):
        rig = Rig(root=True, last_round=last)
        values = integers(5)
        for round_ in (first, (first + 1) & 0xFFFFFFFF):
            rig.feed(*[rig.data(c, f, values[f], round=round_) for c in (0, 1) for f in range(5)])
            results = [s.packet for s in rig.sent() if s.kind is Kind.RESULT]
            assert len(results) == 10
            assert {packet.round for packet in results} == {round_}
            for c in (0, 1):
                done = rig.packet(Kind.DONE, host=1 << c, round=round_, flags=Flag.DOWN)
                rig.feed((done, child_at(c)))
            assert [type(event).__name__ for event in rig.node.events()] == ["RoundCommitted"]
        assert rig.drops == {}


def test_nothing_of_an_unknown_job_reaches_python():
    rig = Rig()
    rig.node.drop_job(JOB)
    rig.feed((rig.packet(Kind.SENT), C0), rig.data(0, 0, integers(1)[0]), (rig.packet(Kind.CREDIT), PARENT))
    assert rig.drops == {"foreign_job": 3}


fields = st.fixed_dictionaries(
    {
        "job": st.sampled_from([0, JOB, JOB, JOB, 65535]),
        "host": st.sampled_from([0, 1, 1, 2, 3, 4, 8, 8, 1 << 31, 0xFFFFFFFF]),
        "gradient": st.sampled_from([0, 1, 2, 3, 4, 5, 1023, 1024, 2**31, 2**32 - 1]),
        "round": st.sampled_from([0, 4, 5, 5, 5, 6, 7, 2**31 + 5, 2**32 - 1]),
        "shard": st.sampled_from([0, SHARD, SHARD, SHARD, 4, 4095, 4096, 65535]),
        "plan": st.sampled_from([0, 4, 5, 5, 6, 133, 255]),
        "attempt": st.sampled_from([0, 0, 1, 2, 3, 127, 128, 255]),
    }
)
forged = st.tuples(
    st.sampled_from(Kind),
    fields,
    st.sampled_from([Flag.NONE, Flag.GROUP_END, Flag.DOWN, Flag.GROUP_END | Flag.DOWN, Flag(12)]),
    st.sampled_from([C0, C0, C1, PARENT, PARENT, STRANGER, 2**64 - 1]),
    st.sampled_from([b"\0", b"\1\0\0\0", b"\xff", b"\2\0\0\0"]),
)


@settings(max_examples=100)
@given(st.booleans(), st.lists(forged, min_size=1, max_size=60))
def test_no_sequence_of_forged_packets_raises(root, packets):
    """Even with the job's key: every field from everybody. What is accepted may be nonsense, but is never an exception."""
    rig = middle_of_a_round(root)
    for kind, header, flags, source, body in packets:
        size = body_bytes(kind)
        data = Packet(kind, payload=(body * size)[:size], flags=flags, **header).encode(KEY)
        before = int(rig.node.drops.sum())
        rig.feed((data, source))
        assert int(rig.node.drops.sum()) == before + 1
        assert int(rig.node.drops.min()) >= 0
        rig.sent()
    rig.wait(2.0)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.binary(max_size=1100), st.sampled_from([C0, C1, PARENT])), max_size=20),
    st.integers(0, 3),
)
def test_no_bytes_raise(packets, slack):
    rig = middle_of_a_round()
    before = rig.snapshot()
    rig.node.receive(batch_of(packets, slack), rig.now)
    assert rig.snapshot() == before


# ---------------------------------------------------------------- replays


COUNT = 256 * 40 + 9


def clean(mode: ExponentMode, rounds: int = 3) -> list[bytes]:
    fabric = VirtualFabric(TWO_LEVELS, ONE_EACH)
    results = []
    for round_ in range(rounds):
        arrays = float_arrays(COUNT, 4, seed=round_)
        fabric.all_reduce(spec_of(COUNT, mode=mode), arrays)
        results.append(arrays[0].tobytes())
    return results


def recorded_fabric(**options) -> tuple[VirtualFabric, dict[str, Recorder]]:
    recorders: dict[str, Recorder] = {}

    def wrap(device, name, clock):
        recorders[name] = Recorder(device)
        return recorders[name]

    return VirtualFabric(TWO_LEVELS, ONE_EACH, wrap=wrap, window=32, **options), recorders


def halfway(fabric: VirtualFabric, number: int, act) -> None:
    """Run a round; ``act`` once its root has taken half of what it waits for."""
    base = fabric.nodes["ps"].stats()["contributions_in"]
    acted = False

    def until() -> bool:
        nonlocal acted
        if not acted and fabric.nodes["ps"].stats()["contributions_in"] >= base + COUNT // 256:
            acted = True
            act()
        return fabric.done(number)

    fabric.run(until)
    assert acted


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
def test_replays_of_the_round_before_and_of_this_one_change_nothing(mode):
    fabric, recorders = recorded_fabric()
    results = []
    old: dict[str, list[tuple[bytes, int]]] = {}

    def replay() -> None:
        for name, recorder in recorders.items():
            now = recorder.drain()
            for packets in (old.get(name, []), now, old.get(name, [])):
                if packets:
                    fabric.nodes[name].receive(batch_of(packets), fabric.clock.now)
            old[name] = old.get(name, []) + now

    for round_ in range(3):
        arrays = float_arrays(COUNT, 4, seed=round_)
        number = fabric.begin(spec_of(COUNT, mode=mode), arrays)
        halfway(fabric, number, replay)
        replay()
        fabric.settle()
        assert len({array.tobytes() for array in arrays.values()}) == 1
        results.append(arrays[0].tobytes())
    assert results == clean(mode)
    assert fabric.nodes["ps"].drops_by_reason()["stale_round"] > 0
    assert fabric.nodes["a0"].drops_by_reason()["duplicate"] > 0


def test_packets_of_an_older_epoch_change_nothing():
    """A whole recorded job, its control packets included, is played into a job of the same number with another key."""
    ghost, recorders = recorded_fabric(key=0xDEAD)
    for round_ in range(3):
        ghost.all_reduce(spec_of(COUNT), float_arrays(COUNT, 4, seed=50 + round_))
    ghost.settle()
    old = {name: recorder.drain() for name, recorder in recorders.items()}
    fabric = VirtualFabric(TWO_LEVELS, ONE_EACH, window=32)
    results = []

    def replay() -> None:
        for name, packets in old.items():
            before = snapshot(fabric.nodes[name])
            bad = fabric.nodes[name].drops_by_reason()["bad_tag"]
            fabric.nodes[name].receive(batch_of(packets), fabric.clock.now)
            assert fabric.nodes[name].drops_by_reason()["bad_tag"] == bad + len(packets)
            assert snapshot(fabric.nodes[name]) == before

    for round_ in range(3):
        arrays = float_arrays(COUNT, 4, seed=round_)
        number = fabric.begin(spec_of(COUNT), arrays)
        halfway(fabric, number, replay)
        results.append(arrays[0].tobytes())
    assert results == clean(ExponentMode.CARRIED)


def test_late_packets_of_a_layout_that_is_gone_have_no_shard():
    fabric, recorders = recorded_fabric()
    spec = spec_of(COUNT)
    fabric.all_reduce(spec, float_arrays(COUNT, 4))
    fabric.settle()
    layout = fabric.layouts.pop(spec)
    for node in fabric.nodes.values():
        node.drop_layout(fabric.job, layout.tensor)
    for name, recorder in recorders.items():
        node = fabric.nodes[name]
        before = node.drops.copy()
        packets = recorder.drain()
        node.receive(batch_of(packets), fabric.clock.now)
        gained = node.drops - before
        assert gained[Drop.UNKNOWN_SHARD] == sum(packet[1] & 15 != Kind.CREDIT for packet, _ in packets)
        assert gained[Drop.UNKNOWN_SHARD] + gained[Drop.DUPLICATE] == len(packets)
