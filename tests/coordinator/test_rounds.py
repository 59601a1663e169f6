"""Rounds: all hosts want the same, all have room, it ends in time; or everybody is told the same."""

import pytest

from inanet.coordinator.events import JobOver, RoundLost
from inanet.coordinator.round_ledger import Host, RoundLedger
from inanet.messages.control import (
    Begin,
    Finished,
    JobEnded,
    JobFailed,
    Layout,
    LayoutDrop,
    LayoutReady,
    Plan,
    Refuse,
    RoundFailed,
)
from inanet.planning.topology import Topology
from inanet.proto.common.plan import ExponentMode, Fold, Part, TensorSpec
from tests.coordinator.nodes import JOB, Nodes, spec, two_level

EVERYBODY = ["ps", "a0", "a1", "w0", "w1", "w2", "w3"]
SPEC = spec()


@pytest.fixture
def nodes() -> Nodes:
    started = Nodes(round=60.0)
    started.start()
    started.clear()
    return started


def failure(nodes: Nodes, *names: str) -> RoundFailed:
    """The failure all these nodes were told of; those who begin later are told again."""
    first = nodes.got(names[0], RoundFailed)[0]
    for name in names:
        assert set(nodes.got(name, RoundFailed)) == {first}
    return first


def test_slots_come_first_then_the_workers_send(nodes: Nodes) -> None:
    nodes.mute |= {"a1"}
    nodes.begin(1, SPEC, ["w2"])
    layout = nodes.last("ps", Layout)
    assert nodes.got("a0", Layout) == nodes.got("a1", Layout) == [layout]
    assert layout.last_round == 0
    assert nodes.got("w2", Layout) == []
    nodes.say("a1", LayoutReady(job=JOB, tensor=layout.layout.tensor))
    for worker in nodes.workers:
        assert nodes.got(worker, Layout) == [layout]


def test_a_known_tensor_costs_nothing(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1)
    nodes.clear()
    for round_ in range(2, 50):
        nodes.begin(round_, SPEC)
        nodes.finish(round_)
    assert all(not inbox for inbox in nodes.inbox.values())
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 0


def test_rounds_may_overlap_and_finish_in_any_order(nodes: Nodes) -> None:
    for round_ in range(1, 6):
        nodes.begin(round_, spec(f"layer{round_ % 2}"), ["w0", "w1"])
    for round_ in range(1, 6):
        nodes.begin(round_, spec(f"layer{round_ % 2}"), ["w2", "w3"])
    for round_ in (3, 1, 5, 2, 4):
        nodes.finish(round_)
    job = nodes.coordinator.jobs[JOB]
    assert len(job.rounds.ledger) == 0
    assert job.rounds.ledger.quiet
    assert len(job.rounds.tensors.book) == 2
    assert all(not nodes.got(name, RoundFailed) for name in EVERYBODY)


def test_floats_get_data_and_exponent_shards(nodes: Nodes) -> None:
    nodes.begin(1, spec("big", 256 * 2500))
    shards = nodes.last("w0", Layout).layout.shards
    assert [(s.shard, s.tree, s.part, s.fold, s.first, s.count) for s in shards] == [
        (0, 0, Part.DATA, Fold.SUM, 0, 2500),
        (1, 0, Part.EXPONENTS, Fold.MAX8, 0, 79),
    ]


def test_shards_are_spread_over_trees() -> None:
    topology = Topology(
        roots=("p", "q"), aggregators={"a": "q"}, workers={"w0": ("p", "a"), "w1": ("p", "a")}
    )
    nodes = Nodes(topology)
    nodes.start()
    nodes.begin(1, spec("big", 256 * 2501))
    shards = nodes.last("w0", Layout).layout.shards
    assert [(s.tree, s.part, s.first, s.count) for s in shards] == [
        (0, Part.DATA, 0, 1250),
        (1, Part.DATA, 1250, 1251),
        (0, Part.EXPONENTS, 0, 39),
        (1, Part.EXPONENTS, 39, 40),
    ]
    nodes.begin(2, spec("small", 3, dtype="i32"))
    shards = nodes.last("w0", Layout).layout.shards
    assert [(s.shard, s.tree, s.count) for s in shards] == [(4, 1, 1)]
    # only the root that has a part of it will confirm it
    nodes.finish(1)
    for name in ("w0", "w1", "q"):
        nodes.say(name, Finished(job=JOB, round=2))
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


def test_an_empty_tensor_has_a_shard_all_the_same(nodes: Nodes) -> None:
    """No host is done with it before all others have begun."""
    nodes.begin(1, spec("nothing", 0))
    data = [shard for shard in nodes.last("w0", Layout).layout.shards if shard.part is Part.DATA]
    assert [shard.count for shard in data] == [1]
    nodes.finish(1)
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


# ---------- mismatches


def changed(**changes: object) -> TensorSpec:
    fields = {name: getattr(SPEC, name) for name in SPEC.__slots__} | changes
    return TensorSpec(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (changed(name="v"), "name is 'w' on ranks 0-2 but 'v' on rank 3"),
        (changed(shape=(10, 100)), "shape is (1000,) on ranks 0-2 but (10, 100) on rank 3"),
        (changed(dtype="bf16"), "dtype is 'f32' on ranks 0-2 but 'bf16' on rank 3"),
        (changed(op="mean"), "op is 'sum' on ranks 0-2 but 'mean' on rank 3"),
        (changed(mode=ExponentMode.CARRIED), "mode is 'prologue' on ranks 0-2 but 'carried' on rank 3"),
        (changed(propagate=True), "propagate is False on ranks 0-2 but True on rank 3"),
        (
            changed(shape=(9,), op="mean"),
            "shape is (1000,) on ranks 0-2 but (9,) on rank 3 and "
            "op is 'sum' on ranks 0-2 but 'mean' on rank 3",
        ),
    ],
)
def test_a_mismatch_shows_both_values_to_everybody(nodes: Nodes, other: TensorSpec, sentence: str) -> None:
    nodes.begin(1, SPEC, ["w0", "w1", "w2"])
    nodes.begin(1, other, ["w3"])
    failed = failure(nodes, *EVERYBODY)
    assert failed.error == "mismatch"
    assert failed.message == (
        f"job 'train', round 1: ranks do not agree: {sentence}; "
        "all ranks must reduce the same tensors in the same order"
    )
    assert failed.rank == 3
    assert failed.tensors == (0,)
    assert RoundLost(JOB, "train", 1, "mismatch", failed.message) in nodes.events


def test_a_host_that_begins_a_failed_round_later_is_told_again(nodes: Nodes) -> None:
    nodes.begin(1, SPEC, ["w0"])
    nodes.begin(1, changed(name="v"), ["w1"])
    failed = failure(nodes, *EVERYBODY)
    nodes.clear()
    nodes.begin(1, SPEC, ["w2"])
    assert nodes.inbox["w2"] == [failed]
    nodes.begin(1, SPEC, ["w3"])
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 0
    assert [name for name in EVERYBODY if nodes.inbox[name]] == ["w2", "w3"]


def test_after_a_failure_the_job_goes_on(nodes: Nodes) -> None:
    nodes.begin(1, SPEC, ["w0", "w1", "w2"])
    nodes.begin(1, changed(name="v"), ["w3"])
    nodes.clear()
    nodes.begin(2, SPEC)
    nodes.finish(2)
    assert all(not inbox for inbox in nodes.inbox.values())
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


# ---------- refusals


def test_nan_names_rank_tensor_and_index(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    refuse = Refuse(job=JOB, round=1, rank=2, tensor="w", index=17, reason="nonfinite", detail="nan")
    nodes.say("w2", refuse)
    failed = failure(nodes, *EVERYBODY)
    assert (failed.error, failed.rank) == ("nonfinite", 2)
    assert failed.message == (
        "job 'train', round 1 (tensor 'w', f32 (1000,), sum): rank 2 (host w2) has nan at element 17 of "
        "tensor 'w'; pass nan='propagate' to let it through"
    )
    nodes.say("w3", Refuse(job=JOB, round=1, rank=3, tensor="w", index=1, reason="nonfinite"))
    failure(nodes, *EVERYBODY)  # the first refusal is the one


def test_a_refusal_may_come_before_the_begin(nodes: Nodes) -> None:
    nodes.begin(1, SPEC, ["w0", "w1"])
    nodes.say(
        "w2", Refuse(job=JOB, round=1, rank=2, tensor="w", index=None, reason="overflow", detail="2147483647")
    )
    failed = failure(nodes, *EVERYBODY)
    assert (failed.error, failed.rank) == ("overflow", 2)
    assert "rank 2 (host w2) holds values of tensor 'w' whose sum may not fit (2147483647)" in failed.message
    nodes.clear()
    nodes.begin(1, SPEC, ["w2", "w3"])
    assert nodes.got("w2", RoundFailed) == []
    assert nodes.got("w3", RoundFailed) == [failed]
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 0


def test_who_refuses_a_round_that_has_failed_is_told_and_nobody_waits_for_it(nodes: Nodes) -> None:
    for rank, name in enumerate(("w0", "w1", "w2", "w3")):
        nodes.clear()
        text = f"dtypes differ on {name}"
        nodes.say(
            name, Refuse(job=JOB, round=1, rank=rank, tensor="w", index=None, reason="mismatch", detail=text)
        )
        assert "dtypes differ on w0" in nodes.last(name, RoundFailed).message
    assert len(nodes.coordinator.jobs[JOB].rounds.ledger) == 0


@pytest.mark.parametrize("rank", [0, 3])
def test_nobody_refuses_for_another_host(nodes: Nodes, rank: int) -> None:
    nodes.begin(1, SPEC)
    nodes.say("w2", Refuse(job=JOB, round=1, rank=rank, tensor="w", index=0, reason="nonfinite"))
    assert nodes.got("w0", RoundFailed) == []


# ---------- room


def test_an_aggregator_without_room_fails_the_round_and_is_named(nodes: Nodes) -> None:
    nodes.refuses = lambda name, layout: "4 slots needed, 3 free" if name == "a1" else ""
    nodes.begin(1, SPEC)
    failed = failure(nodes, *EVERYBODY)
    assert failed.error == "memory"
    assert "(tensor 'w', f32 (1000,), sum): 'a1' has no room for it: 4 slots needed, 3 free" in failed.message
    assert [nodes.got(name, LayoutDrop)[0].tensor for name in ("ps", "a0", "a1")] == [0, 0, 0]
    nodes.refuses = lambda name, layout: ""
    nodes.clear()
    nodes.begin(2, SPEC)
    assert nodes.last("w0", Layout).layout.tensor == 1
    assert nodes.last("w0", Layout).last_round == 1
    assert nodes.got("w0", RoundFailed) == []


def test_a_format_that_does_not_exist_is_told_to_all(nodes: Nodes) -> None:
    nodes.begin(1, TensorSpec("w", "i32", (4,), "mean", ExponentMode.NONE))
    failed = failure(nodes, *EVERYBODY)
    assert failed.error == "unsupported"
    assert "mean of i32 is not supported" in failed.message


def test_the_least_recently_begun_tensor_makes_way() -> None:
    nodes = Nodes(most_tensors=3)  # type: ignore[arg-type]
    nodes.start()
    nodes.clear()
    for round_, name in enumerate("abcad", 1):
        nodes.begin(round_, spec(name))
        nodes.finish(round_)
    for name in EVERYBODY:
        assert [drop.tensor for drop in nodes.got(name, LayoutDrop)] == [1]  # b
    nodes.clear()
    nodes.begin(6, spec("b"))
    laid = nodes.last("w0", Layout)
    assert (laid.layout.tensor, laid.last_round) == (4, 5)
    shards = {s.shard for t in nodes.coordinator.jobs[JOB].rounds.tensors.book for s in t.layout.shards}
    assert len(shards) == 6


def test_tensors_in_use_do_not_make_way() -> None:
    nodes = Nodes(most_tensors=2)  # type: ignore[arg-type]
    nodes.start()
    nodes.clear()
    for round_, name in enumerate("abc", 1):
        nodes.begin(round_, spec(name))
    failed = failure(nodes, *EVERYBODY)
    assert (failed.round, failed.error) == (3, "memory")
    assert "more than 2 different tensors" in failed.message


# ---------- time


def test_a_timeout_names_the_ranks_that_did_not_begin(nodes: Nodes) -> None:
    nodes.begin(1, SPEC, ["w0", "w3"])
    nodes.wait(59)
    assert nodes.got("w0", RoundFailed) == []
    nodes.wait(1.5)
    failed = failure(nodes, *EVERYBODY)
    assert (failed.error, failed.missing) == ("timeout", (1, 2))
    assert failed.message == (
        "job 'train', round 1 (tensor 'w', f32 (1000,), sum): not complete after 60 s: ranks 1 and 2 did not "
        "begin it; do all ranks call the same collectives?"
    )


def test_a_timeout_names_the_aggregator_that_made_no_slots(nodes: Nodes) -> None:
    nodes.refuses = lambda name, layout: ""
    nodes.deaf.add("a1")
    nodes.begin(1, SPEC)
    nodes.wait(61)
    failed = failure(nodes, *EVERYBODY)
    assert (failed.error, failed.missing) == ("timeout", ())
    assert "no answer from 'a1', asked to make slots" in failed.message


def test_a_timeout_names_the_ranks_without_the_result(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.wait(61)
    failed = failure(nodes, *EVERYBODY)
    assert failed.missing == (0, 1, 2, 3)
    assert "all ranks have begun, but ranks 0-3 did not get the whole result" in failed.message


def test_a_round_one_host_has_is_late_not_failed_and_then_fails_the_job(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w0"])
    nodes.wait(100)
    assert nodes.got("w1", RoundFailed) == []
    nodes.finish(1, ["w1", "w2"])
    nodes.wait(21)
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.round, failed.ranks) == ("timeout", 1, (3,))
    assert "round 1: not complete after 120 s: all ranks have begun, but rank 3 did not get" in failed.message
    for name in ("ps", "a0", "a1"):
        assert nodes.last(name, JobEnded).reason == failed.message
    assert JobOver(JOB, "train", "timeout", failed.message) in nodes.events


def test_late_is_not_too_late(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.finish(1, ["w0"])
    nodes.wait(100)
    nodes.finish(1)
    nodes.wait(100)
    assert nodes.got("w0", JobFailed) == []
    assert nodes.got("w0", RoundFailed) == []


def test_a_result_that_crosses_a_failure_ends_the_job(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.wait(61)
    nodes.finish(1, ["w2"])  # was on its way when the round was given up
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.ranks) == ("timeout", (2,))
    assert "rank 2 had the result already, so the ranks differ now" in failed.message


def test_every_round_has_its_own_deadline(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.wait(40)
    nodes.begin(2, spec("v"))
    nodes.finish(1)
    nodes.wait(40)
    assert nodes.got("w0", RoundFailed) == []
    nodes.wait(21)
    assert failure(nodes, *EVERYBODY).round == 2


# ---------- what hosts must not do


def test_rounds_are_not_skipped(nodes: Nodes) -> None:
    nodes.begin(3, SPEC, ["w1"])
    failed = nodes.last("w0", JobFailed)
    assert (failed.error, failed.ranks) == ("protocol", (1,))
    assert failed.message == "job 'train': host w1 (rank 1) began round 3, its next one is 1"


def test_nobody_runs_away() -> None:
    nodes = Nodes(most_ahead=8)  # type: ignore[arg-type]
    nodes.start()
    for round_ in range(1, 9):
        nodes.begin(round_, SPEC, ["w0", "w1", "w2"])
    assert nodes.got("w0", JobFailed) == []
    nodes.begin(9, SPEC, ["w0"])
    assert "rank 0 began round 9, 8 ahead of rank 3" in nodes.last("w3", JobFailed).message


def test_what_comes_twice_or_from_nowhere_changes_nothing(nodes: Nodes) -> None:
    nodes.begin(1, SPEC)
    nodes.clear()
    nodes.begin(1, changed(name="v"), ["w0"])
    nodes.say("w0", Finished(job=JOB, round=99), Begin(job=JOB + 1, round=5, spec=SPEC))
    nodes.say("a0", Finished(job=JOB, round=1), Begin(job=JOB, round=1, spec=changed(name="v")))
    nodes.say("a0", LayoutReady(job=JOB, tensor=99), LayoutReady(job=JOB, tensor=0, refused="late"))
    nodes.say("w0", LayoutReady(job=JOB, tensor=0))
    nodes.say("ps", Finished(job=JOB, round=7), Finished(job=3, round=7))
    assert all(not inbox for inbox in nodes.inbox.values())
    nodes.finish(1)
    assert nodes.coordinator.jobs[JOB].rounds.ledger.quiet


def test_nothing_grows_with_the_number_of_rounds() -> None:
    nodes = Nodes(two_level(2, 0))
    nodes.start()
    job = nodes.coordinator.jobs[JOB]
    for round_ in range(1, 401):
        nodes.begin(round_, spec(f"layer{round_ % 5}"))
        nodes.finish(round_)
    ledger = job.rounds.ledger
    assert (len(ledger), ledger._settling, ledger._confirmed_early) == (0, {}, {})
    assert (len(job.rounds.tensors.book), job.outbox, job.log) == (5, [], [])


def test_roots_that_confirm_nothing_cost_a_bounded_amount() -> None:
    ledger = RoundLedger({"w0": Host("w0", (0,))})
    for number in range(1, 5000):
        round_ = ledger.enter("w0", number, 0.0, 60.0)
        assert round_ is not None
        round_.roots = frozenset({"ps"})
        ledger.finish("w0", number)
    assert len(ledger._settling) == 4096
    assert not ledger.quiet


def test_plan_is_sent_once_at_the_start(nodes: Nodes) -> None:
    assert all(nodes.got(name, Plan) == [] for name in EVERYBODY)
