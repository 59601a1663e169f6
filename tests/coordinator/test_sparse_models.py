"""Models that servers keep, in virtual time: one job goes on where another has ended, however that was."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from inanet.messages.control import Gather, Kept, LayoutReady, Message
from inanet.proto.zebra.plan import Online, ZebraJob
from inanet.proto.zebra.store import Adagrad
from inanet.sparse.group import sparse_group

from .sparse_rack import KEYS, SPARSE, Fabric, gradients, train

CHOSEN = replace(SPARSE, shards=2, optimiser="adagrad", model="clicks")


def expected(pushes: int) -> list[bytes]:
    """What a group of one process has after every push."""
    rows = []
    with sparse_group(2, 2, width=2, optimiser=Adagrad(0.1)) as group:
        group.use_hot(KEYS[:100])
        for seed in range(pushes):
            group.push_all(gradients(2, seed))
            rows.append(group.jobs[0].pull(KEYS).tobytes())
    return rows


def begin(fabric: Fabric, job: str, sparse: Any = CHOSEN, world: int = 2) -> Any:
    """A job; its workers, unless it has failed, and the iteration that it begins after."""
    for rank in range(world):
        fabric.start_rank(rank, world, sparse=sparse, job=job)
    if fabric.members[f"{job}-0"].failed is not None:
        return [], -1
    facts = fabric.plan(f"{job}-0").switched
    assert isinstance(facts, ZebraJob)
    return fabric.workers(job, world), facts.begin


def end(fabric: Fabric, job: str) -> None:
    for rank in range(2):
        fabric.members[f"{job}-{rank}"].leave("done")
        fabric.talk()


def why(fabric: Fabric, job: str) -> str:
    failed = fabric.members[f"{job}-0"].failed
    return "" if failed is None else failed.message


def rack(servers: int = 2) -> Fabric:
    fabric = Fabric(servers, models=True)
    fabric.start_switch()
    return fabric


@pytest.mark.parametrize("often", [1, 2])
def test_a_job_goes_on_where_another_has_ended(often: int) -> None:
    fabric, rows = rack(), expected(6)
    fabric.sent = lambda message: often if isinstance(message, Kept) else 1
    for number, job in enumerate(("one", "two", "three")):
        workers, began = begin(fabric, job)
        assert began == 2 * number
        for seed in range(2 * number, 2 * number + 2):
            for found in train(fabric, workers, gradients(2, seed)):
                assert found.tobytes() == rows[seed]
        end(fabric, job)
    assert set(fabric.drawers[0].files) == {"clicks.0of2"}
    assert not any(drawer.opened for drawer in fabric.drawers.values())


def test_what_a_shard_has_is_said_again_until_it_is_heard() -> None:
    fabric = rack()
    lost: list[Message] = []

    def sent(message: Message) -> int:
        if isinstance(message, Kept) and len(lost) < 3:
            lost.append(message)
            return 0
        return 1

    fabric.sent = sent
    for rank in range(2):
        fabric.start_rank(rank, sparse=CHOSEN)
    assert fabric.places["clicks-0"].plan is None
    fabric.carry(lambda: fabric.places["clicks-0"].plan is not None)
    assert len(lost) == 3
    train(fabric, fabric.workers(), gradients(2, 0))


@pytest.mark.parametrize(("server", "who"), [(0, "parameter server 'ps0'"), (1, "ps 'ps1'")])
def test_a_server_that_does_not_say_what_it_has_is_waited_for_no_longer_than_for_an_answer(
    server: int, who: str
) -> None:
    fabric = rack()
    fabric.shards[server].kept = lambda job: None  # type: ignore[method-assign]
    for rank in range(2):
        fabric.start_rank(rank, sparse=CHOSEN)
    fabric.carry(lambda: why(fabric, "clicks") != "")
    assert fabric.now < 1.0
    assert f"{who} was lost: it did not say within 0.9 s what it has of model 'clicks'" in why(
        fabric, "clicks"
    )
    assert not any(drawer.opened for drawer in fabric.drawers.values())


def test_shards_that_were_killed_one_iteration_apart_begin_with_what_both_have() -> None:
    fabric, rows = rack(), expected(5)
    workers, _ = begin(fabric, "one")
    for seed in range(3):
        train(fabric, workers, gradients(2, seed))
    # nothing reaches shard 1 any more
    del fabric.machines[fabric.shards[1].endpoint]
    for worker, (keys, values) in zip(workers, gradients(2, 3), strict=True):
        worker.push(keys, values, fabric.now)
    fabric.carry(lambda: fabric.shards[0].stats()["sparse_iterations"] == 4)
    for number in range(2):
        fabric.lose(f"ps{number}")
    assert "was lost" in why(fabric, "one")
    for number in range(2):
        fabric.start_server(number)
    for _ in range(2):
        workers, began = begin(fabric, "two")
        assert began == 3
        # whoever begins writes down that it has: the other one may be killed before it has done so
        for rank in range(2):
            fabric.lose(f"two-{rank}")
    workers, began = begin(fabric, "three")
    assert began == 3
    for seed in (3, 4):
        assert train(fabric, workers, gradients(2, seed))[0].tobytes() == rows[seed]


def test_a_shard_that_had_begun_and_one_that_had_not_belong_together() -> None:
    fabric = rack()
    workers, _ = begin(fabric, "one")
    for seed in range(3):
        train(fabric, workers, gradients(2, seed))
    end(fabric, "one")
    before = fabric.drawers[1].files["clicks.1of2"]
    begin(fabric, "two")
    fabric.lose("two-0")
    # as if shard 1 had been killed before it could
    fabric.drawers[1].files["clicks.1of2"] = before
    workers, began = begin(fabric, "three")
    assert began == 3
    assert train(fabric, workers, gradients(2, 3))[0].tobytes() == expected(4)[3]


def test_parts_that_do_not_belong_together_are_refused_with_who_has_what() -> None:
    fabric = rack()
    workers, _ = begin(fabric, "one")
    for seed in range(3):
        train(fabric, workers, gradients(2, seed))
    end(fabric, "one")
    fabric.drawers[1].files.clear()
    begin(fabric, "two")
    assert (
        "model 'clicks' are of iterations that do not belong together: 3 at 'ps0' and 0 at 'ps1'; use"
        in why(fabric, "two")
    )
    # files are free again, and as they were
    assert begin(fabric, "other", replace(CHOSEN, model="other"))[1] == 0
    assert not fabric.drawers[0].opened - {"other.0of2"}


@pytest.mark.parametrize(
    ("gone", "shards", "says"),
    [
        ((1,), 1, "ps0: it has clicks.0of2, and is to begin clicks.0of1"),
        ((0,), 2, "ps1: it has clicks.1of2, and is to begin clicks.0of2"),
        ((1,), 2, "are of iterations that do not belong together: 3 at 'ps0' and 0 at 'ps2'"),
    ],
)
def test_other_servers_or_another_number_of_them_do_not_begin_a_model_anew(
    gone: tuple[int, ...], shards: int, says: str
) -> None:
    fabric, rows = rack(3), expected(4)
    workers, _ = begin(fabric, "one")
    for seed in range(3):
        train(fabric, workers, gradients(2, seed))
    end(fabric, "one")
    for number in gone:
        fabric.lose(f"ps{number}")
    begin(fabric, "two", replace(CHOSEN, shards=shards))
    assert says in why(fabric, "two")
    for number in gone:
        fabric.start_server(number)
    workers, began = begin(fabric, "three")
    assert began == 3
    assert train(fabric, workers, gradients(2, 3))[0].tobytes() == rows[3]


def test_parts_that_several_jobs_have_begun_are_not_one_model() -> None:
    fabric = rack(4)

    def trained(job: str, gone: tuple[int, ...], seeds: range) -> int:
        for number in gone:
            fabric.lose(f"ps{number}")
        workers, began = begin(fabric, job)
        for seed in seeds:
            train(fabric, workers, gradients(2, seed))
        if workers:
            end(fabric, job)
        for number in gone:
            fabric.start_server(number)
        return int(began)

    assert trained("one", (2, 3), range(2)) == 0
    assert trained("other", (0, 1), range(5, 7)) == 0
    # shard 0 of the one and shard 1 of the other
    assert trained("two", (1, 2), range(0)) == -1
    said = re.search(
        r"parts of model 'clicks' were not begun by the same job: (\w+) at 'ps0' and (\w+) at 'ps3'; use",
        why(fabric, "two"),
    )
    assert said is not None
    assert "0" != said[1] != said[2] != "0"
    # whose number stays the same
    assert trained("three", (2, 3), range(2, 3)) == 2
    assert trained("four", (2, 3), range(3, 4)) == 3
    assert trained("five", (0, 1), range(7, 8)) == 2


def test_a_model_without_an_iteration_that_all_have_is_new_whoever_began_it() -> None:
    fabric, rows = rack(), expected(2)
    workers, _ = begin(fabric, "one")
    train(fabric, workers, gradients(2, 5))
    end(fabric, "one")
    # one of them was killed before it had begun
    fabric.drawers[1].files.clear()
    workers, began = begin(fabric, "two")
    assert began == 0
    for seed in range(2):
        assert train(fabric, workers, gradients(2, seed))[0].tobytes() == rows[seed]
    end(fabric, "two")
    assert begin(fabric, "three")[1] == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "job 'two': ps0: clicks.0of2 is in use by another process"),
        ({"model": "wide"}, "job 'two': ps0: it is of model 'wide', shard 0 of 2 by hash, 1 values per key"),
    ],
)
def test_a_model_that_cannot_be_had_is_an_error_with_its_server(changes: dict[str, Any], says: str) -> None:
    fabric = rack()
    workers, _ = begin(fabric, "wide", replace(CHOSEN, width=1, model="wide"))
    end(fabric, "wide")
    workers, _ = begin(fabric, "one")
    begin(fabric, "two", replace(CHOSEN, **changes))
    assert says in why(fabric, "two")
    train(fabric, workers, gradients(2, 0))


def test_a_full_disk_ends_the_job_and_nothing_else() -> None:
    fabric, rows = rack(), expected(2)
    workers, _ = begin(fabric, "one")
    train(fabric, workers, gradients(2, 0))
    fabric.drawers[1].full = True
    for worker, (keys, values) in zip(workers, gradients(2, 1), strict=True):
        worker.push(keys, values, fabric.now)
    fabric.carry(lambda: why(fabric, "one") != "")
    assert why(fabric, "one") == "job 'one': ps1: cannot keep 'clicks': No space left on device"
    fabric.drawers[1].full = False
    workers, began = begin(fabric, "two")
    assert began == 1
    assert train(fabric, workers, gradients(2, 1))[0].tobytes() == rows[1]


@pytest.mark.parametrize("server", [0, 1])
def test_so_does_a_disk_that_is_full_when_others_become_hot(server: int) -> None:
    fabric, rows = rack(), expected(4)
    moving = replace(CHOSEN, hot=(), online=Online(after=3, memory=2400, step=5))
    begin(fabric, "other", replace(CHOSEN, model="other"))
    workers, _ = begin(fabric, "one", moving)

    def sent(message: Message) -> int:
        # between the end of the third iteration and what follows from it
        fabric.drawers[server].full |= isinstance(message, Gather)
        return 1

    fabric.sent = sent
    for seed in range(2):
        train(fabric, workers, gradients(2, seed))
    for worker, (keys, values) in zip(workers, gradients(2, 2), strict=True):
        worker.push(keys, values, fabric.now)
    fabric.carry(lambda: why(fabric, "one") != "")
    assert why(fabric, "one") == f"job 'one': ps{server}: cannot keep 'clicks': No space left on device"
    fabric.drawers[server].full = False
    assert train(fabric, fabric.workers("other"), gradients(2, 0))[0].tobytes() == rows[0]
    assert begin(fabric, "two")[1] == 3


def test_a_plan_that_was_on_its_way_to_a_shard_that_is_no_more_changes_nothing() -> None:
    fabric = rack()
    workers, _ = begin(fabric, "one", replace(CHOSEN, hot=(), online=Online(after=3, memory=2400, step=5)))
    waits: list[type[Message]] = [Gather, LayoutReady]
    said: list[Message] = []

    def sent(message: Message) -> int:
        if isinstance(message, LayoutReady):
            said.append(message)
        return 0 if type(message) in waits else 1

    fabric.sent = sent
    for seed in range(3):
        train(fabric, workers, gradients(2, seed))
    # shard 1 does not wait for what is decided after the third iteration
    fabric.drawers[1].full = True
    for worker, (keys, values) in zip(workers, gradients(2, 3), strict=True):
        worker.push(keys, values, fabric.now)
    fabric.carry(lambda: bool(said))
    waits.remove(Gather)
    (job,) = fabric.coordinator.jobs.values()
    fabric.carry(
        lambda: isinstance(job.plans.current.switched, ZebraJob) and job.plans.current.switched.decided == 3
    )
    fabric.coordinator.receive(fabric.number("ps1"), said[0], fabric.now)
    fabric.talk()
    assert why(fabric, "one") == "job 'one': ps1: cannot keep 'clicks': No space left on device"
    fabric.drawers[1].full = False
    assert begin(fabric, "two")[1] == 3


def test_servers_that_keep_models_are_waited_for() -> None:
    fabric = Fabric(2)
    fabric.start_switch()
    fabric.start_rank(0, sparse=CHOSEN)
    assert "2 more parameter servers that keep models (node.models), for 2 shards" in fabric.missing


@pytest.mark.parametrize("model", ["../x", "a/b", ".hidden", "", "x" * 65, "a b"])
def test_names_of_models_are_good_for_files(model: str) -> None:
    if model:
        with pytest.raises(ValueError, match="model: a name, for files"):
            replace(SPARSE, model=model)
    else:
        replace(SPARSE, model=model)


def test_another_job_has_other_ranks_and_other_hot_keys() -> None:
    fabric, rows = rack(), expected(1)
    workers, _ = begin(fabric, "one")
    assert train(fabric, workers, gradients(2, 0))[0].tobytes() == rows[0]
    end(fabric, "one")
    workers, began = begin(fabric, "two", replace(CHOSEN, hot=tuple(KEYS[50:150].tolist())), world=3)
    assert (len(workers), began) == (3, 1)
    nothing = (np.zeros(0, np.uint64), np.zeros((0, 2), np.float32))
    assert train(fabric, workers, [nothing] * 3)[0].tobytes() == rows[0]
    assert workers[0].hot.keys.tolist() == KEYS[50:150].tolist()
