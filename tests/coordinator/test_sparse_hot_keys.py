"""Hot keys that change while a sparse job trains in a fabric, in virtual time: the bits of a group of one process."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from inanet.coordinator.events import PlanChanged, PlanRepeated
from inanet.messages.control import Gather, Gathered, Message, Plan
from inanet.messages.fields import check_tally
from inanet.proto.common.events import Tally
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.store import Adagrad, Uniform
from inanet.sparse.group import sparse_group

from .sparse_rack import KEYS, SPARSE, Fabric, train

ONLINE = Online(after=3, threshold=0.1, fading=0.5, memory=2400, step=5)
ITERATIONS = 11
#: of the last three iterations, then of the three before
MOVES = [0, 0, 0, 0, 0, 40, 40, 40, 80, 80, 80]


def pushes(ranks: int, iteration: int) -> list[Any]:
    """Keys that are hot move on; gradients are no multiples of what integers of a switch count in."""
    rng = np.random.default_rng(iteration)
    heat = 1 / (1 + (np.arange(len(KEYS)) - MOVES[iteration % len(MOVES)]) % len(KEYS))
    chosen = [np.sort(rng.choice(KEYS, 50, replace=False, p=heat / heat.sum())) for _ in range(ranks)]
    return [(keys, rng.standard_normal((50, 2)).astype(np.float32)) for keys in chosen]


@cache
def expected(servers: int, hot: int) -> tuple[list[bytes], list[list[int]]]:
    """What a group of one process has after every iteration, and its hot keys."""
    rows, sets = [], []
    how: dict[str, Any] = {"width": 2, "optimiser": Adagrad(0.1), "initial": Uniform(0.01), "online": ONLINE}
    with sparse_group(2, servers, **how) as group:
        if hot:
            group.use_hot(KEYS[:hot])
        for iteration in range(ITERATIONS):
            group.push_all(pushes(2, iteration))
            rows.append(group.jobs[0].pull(KEYS).tobytes())
            sets.append(group.workers[0].hot.keys.tolist())
    return rows, sets


def fabric_of(servers: int, hot: int = 0) -> Fabric:
    fabric = Fabric(servers)
    fabric.start_switch()
    chosen = {"optimiser": "adagrad", "initial": 0.01, "hot": SPARSE.hot[:hot], "online": ONLINE}
    for rank in range(2):
        fabric.start_rank(rank, sparse=replace(SPARSE, shards=servers, **chosen))
    return fabric


def check(fabric: Fabric, servers: int, hot: int = 0) -> list[Any]:
    """Train, and compare every bit; what the coordinator told on the way."""
    workers, told = fabric.workers(), []
    rows, sets = expected(servers, hot)
    for iteration in range(ITERATIONS):
        for found in train(fabric, workers, pushes(2, iteration)):
            assert found.tobytes() == rows[iteration], iteration
        assert [worker.hot.keys.tolist() for worker in workers] == [sets[iteration]] * 2
        told += fabric.coordinator.events()
    return told


@pytest.mark.parametrize(("servers", "hot"), [(1, 0), (3, 20)])
def test_a_fabric_changes_its_hot_keys_with_the_bits_of_a_group(servers: int, hot: int) -> None:
    fabric = fabric_of(servers, hot)
    told = check(fabric, servers, hot)
    sets = expected(servers, hot)[1]
    assert len({tuple(keys) for keys in sets}) == 4
    assert [len(keys) for keys in sets[:4]] == [hot] * 4
    reasons = [event.reason for event in told if isinstance(event, PlanChanged)]
    assert any("keys are hot from iteration 5 on, " in reason for reason in reasons)
    assert fabric.program.stats()["contributions"] > 100
    # what has been decided on is not said again, also where nothing has changed
    assert not any(view.unheard for member in fabric.members.values() for view in member._jobs.views.values())


@pytest.mark.parametrize("seed", range(3))
def test_no_bit_depends_on_lost_packets(seed: int) -> None:
    fabric = fabric_of(2)
    rng = np.random.default_rng(seed)
    fabric.lost = lambda: rng.random() < 0.05
    check(fabric, 2)


@pytest.mark.parametrize("kind", [Gathered, Gather, Plan])
def test_messages_that_come_twice_or_not_at_all_change_no_bit(kind: type[Message]) -> None:
    fabric = fabric_of(2)
    fates, often = cycle((0, 2, 0, 0, 2)), {0: 0, 2: 0}

    def sent(message: Message) -> int:
        if not isinstance(message, kind):
            return 1
        fate = next(fates)
        often[fate] += 1
        return fate

    fabric.sent = sent
    told = check(fabric, 2)
    assert often[0] > 1 < often[2]
    assert kind is not Plan or any(isinstance(event, PlanRepeated) for event in told)


@pytest.mark.parametrize("kind", [Gathered, Gather, Plan])
def test_a_switch_that_is_lost_while_others_become_hot_ends_the_job_with_its_name(
    kind: type[Message],
) -> None:
    fabric = fabric_of(2)
    workers = fabric.workers()
    # what comes of the third iteration's counts is on its way, and does not arrive
    fabric.sent = lambda message: 0 if isinstance(message, kind) else 1
    for iteration in range(3):
        train(fabric, workers, pushes(2, iteration))
    for worker, (keys, values) in zip(workers, pushes(2, 3), strict=True):
        worker.push(keys, values, fabric.now)
    steps: Iterator[int] = iter(range(100))
    fabric.carry(lambda: next(steps) == 50)
    assert [worker.done for worker in workers] == [3, 3]
    fabric.lose("s0")
    failed = fabric.members["clicks-0"].failed
    assert failed is not None
    assert (failed.cause, "switch 's0' was lost" in failed.message) == ("aggregator_lost", True)
    assert not fabric.coordinator.jobs


def test_a_hot_set_that_a_switch_has_no_room_for_ends_the_job_with_its_reason() -> None:
    fabric = fabric_of(1)
    workers = fabric.workers()
    fabric.program.follow = lambda facts: (_ for _ in ()).throw(ValueError("a bank is broken"))  # type: ignore[method-assign]
    for iteration in range(2):
        train(fabric, workers, pushes(2, iteration))
    for worker, (keys, values) in zip(workers, pushes(2, 2), strict=True):
        worker.push(keys, values, fabric.now)
    fabric.carry(lambda: fabric.members["clicks-0"].failed is not None)
    failed = fabric.members["clicks-0"].failed
    assert failed is not None
    assert (failed.cause, failed.message) == ("memory", "job 'clicks': s0: a bank is broken")


def test_registers_are_set_aside_for_as_many_keys_as_can_become_hot() -> None:
    fabric = Fabric(budget=4096)
    fabric.start_switch()
    for rank in range(2):
        fabric.start_rank(rank, sparse=replace(SPARSE, hot=(), online=Online(memory=6400)))
    assert fabric.places["clicks-0"].plan is not None
    fabric = Fabric(budget=4096)
    fabric.start_switch()
    for rank in range(2):
        fabric.start_rank(rank, sparse=replace(SPARSE, hot=(), online=Online(memory=16000)))
    assert "500 hot keys need" in fabric.missing


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"after": 0}, "after is 0"),
        ({"threshold": 1.0}, "threshold"),
        ({"fading": float("nan")}, "fading"),
        ({"c": 1.0}, "c: between"),
        ({"memory": 1 << 22}, "hot keys in 0.25 of 4194304 B is 131072"),
        ({"memory": 7}, "hot keys in 0.25 of 7 B is 0"),
        ({"step": 0}, "step is 0"),
    ],
)
def test_what_makes_no_sense_gets_past_no_decoder(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(SPARSE, online=replace(ONLINE, **changes))


@pytest.mark.parametrize(
    ("tally", "says"),
    [
        (Tally(0, 1), "iteration is 0"),
        (Tally(3, 5), "first is 5"),
        (Tally(3, 1, (1,), ()), "as many counts"),
        (Tally(3, 1, (1 << 64,), (1,)), "64 bits"),
        (Tally(3, 1, (1,), (0,)), "counts"),
        (Tally(3, 1, (1, 2, 1), (1, 1, 1)), "a key is there twice"),
        (Tally(3, 1, others=-1), "others"),
        (Tally(3, 1, (1, 2), (1 << 47, 1 << 47), 1), "all counts is 281474976710657"),
    ],
)
def test_no_tally_that_makes_no_sense_does_either(tally: Tally, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_tally(tally)
