"""Sparse jobs from the first Hello on, in virtual time: what ranks, switch and servers are told, and how jobs end."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inanet.config.file import validate
from inanet.config.sparse import FabricSparseConfig, OnlineSection
from inanet.messages.control import Gathered, Kept, LayoutReady
from inanet.proto.common.events import Tally
from inanet.proto.zebra import plan
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.shards import ShardServer
from inanet.proto.zebra.store import OPTIMISERS, Adagrad, Uniform
from inanet.sparse.group import sparse_group
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import endpoint
from inanet.wire.xagg import MAX_CHILDREN

from .sparse_rack import KEYS, SPARSE, Fabric, gradients, train

ROOT = Path(__file__).parents[2]


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


def test_nobody_else_can_end_a_job() -> None:
    fabric = Fabric(2)
    fabric.start_switch()
    for rank in range(2):
        fabric.start_rank(rank)
    number = fabric.plan("clicks-0").job
    for message in (
        LayoutReady(job=number, tensor=0, refused="there is no room"),
        Gathered(job=number, tally=Tally(1, 1, (7,), (1,))),
        Kept(job=number, iteration=5),
    ):
        fabric.coordinator.receive(fabric.number("ps1"), message, fabric.now)
    train(fabric, fabric.workers(), gradients(2, 1))
    fabric.coordinator.receive(
        fabric.number("ps0"), LayoutReady(job=number, tensor=0, refused="no room"), fabric.now
    )
    fabric.talk()
    failed = fabric.members["clicks-0"].failed
    assert failed is not None
    assert failed.message == "job 'clicks': no room"


def test_two_ranks_with_one_address_are_told_so() -> None:
    fabric = Fabric()
    fabric.start_switch()
    fabric.start_rank(0)
    other = fabric.start_rank(1, endpoint=endpoint("10.0.0.1", 4000))
    assert other.rejected is not None
    assert other.rejected.reason == (
        "host 'clicks-1' of job 'clicks' receives at 10.0.0.1:4000, as host 'clicks-0' does: others could not tell them apart; "
        "set node.listen of one of them to an address of its own"
    )
    fabric.start_rank(1)
    train(fabric, fabric.workers(), gradients(2, 1))


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_with_the_name_of_a_server_is_waited_for_under_another(first: bool) -> None:
    fabric = Fabric()
    if first:
        fabric.start_switch()
        switch = fabric.members.pop("s0")
    fabric.start_rank(0, name="s0")
    if first:
        fabric.members["s0"] = switch
    else:
        fabric.start_switch()
    fabric.start_rank(1)
    assert fabric.missing == (
        "joined 2 of 2, missing: a name for each: 's0' is a switch and a rank; change node.name of one"
    )


def test_two_servers_with_one_address_are_one() -> None:
    fabric = Fabric()
    fabric.start_switch()
    shards = fabric.shards[0]
    fabric.start_server(1, port=7000)
    fabric.shards[1], fabric.machines[shards.endpoint] = ShardServer(), shards
    fabric.start_rank(0, sparse=replace(SPARSE, shards=2))
    assert "1 more parameter server" in fabric.missing
    for rank in range(2):
        fabric.start_rank(rank, job="one")
    train(fabric, fabric.workers("one"), gradients(2, 1))


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
    fabric.program.serve = lambda facts, key, here: (_ for _ in ()).throw(ValueError("no ports left"))  # type: ignore[method-assign]
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
        replace(SPARSE, **changes)


def test_the_file_that_comes_with_it_shows_defaults() -> None:
    text = (ROOT / "configs" / "sparse.toml").read_text()
    given = validate(FabricSparseConfig, tomllib.loads(text), ROOT / "sparse.toml")
    # a line that is commented out has a key at its beginning, sentences have not; four show what has no default
    lines = re.findall(r"^# (\w+ = .*)$", text, re.MULTILINE)
    shown = [line for line in lines if line[:4] not in ("hot ", "name", "onli", "mode")]
    assert len(shown) == 10
    (online,) = (line for line in lines if line.startswith("online"))
    more = validate(
        FabricSparseConfig, tomllib.loads(text.replace(f"# {online}", online)), ROOT / "sparse.toml"
    )
    assert more.job.online == OnlineSection()
    assert Online(**dict(OnlineSection())) == Online()
    for line in shown:
        more = validate(
            FabricSparseConfig, tomllib.loads(text.replace(f"# {line}", line)), ROOT / "sparse.toml"
        )
        assert more == given, line


def test_decoder_and_shards_know_the_same_optimisers() -> None:
    assert set(plan.OPTIMISERS) == set(OPTIMISERS)


def test_packets_of_nobody_are_counted_and_dropped() -> None:
    shards = ShardServer()
    arena = np.zeros(64, np.uint8)
    offsets, lengths = np.array([0, 32], np.int64), np.array([32, 3], np.int64)
    shards.receive(PacketBatch(arena, offsets, lengths, np.ones(2, np.uint64)), 0.0)
    drops = {reason: count for reason, count in shards.drops_by_reason().items() if count}
    assert drops == {"foreign_job": 1, "short": 1}
