"""The sparse API: ranks in threads and in one thread, over memory and sockets, with and without faults."""

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inanet.errors import FabricError, RoundTimeout
from inanet.proto.zebra.journal import BadState
from inanet.proto.zebra.plan import Online
from inanet.proto.zebra.store import Sgd
from inanet.proto.zebra.stream import Timing
from inanet.sparse.group import Phy, SparseGroup, sparse_group

KEYS = np.arange(0, 400, 2, dtype=np.uint64)


def gradients(ranks: int, seed: int) -> list[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(ranks):
        keys = np.sort(rng.choice(KEYS, 150, replace=False))
        out.append((keys, (rng.integers(-512, 512, (150, 2)) / 256).astype(np.float32)))
    return out


def total(pushed: list[tuple[NDArray[np.uint64], NDArray[np.float32]]]) -> NDArray[np.float32]:
    out = np.zeros((400, 2), np.float32)
    for keys, values in pushed:
        out[keys.astype(np.int64)] += values
    return out[KEYS.astype(np.int64)]


@pytest.mark.parametrize(("phy", "impair"), [("memory", 0.0), ("memory", 0.05), ("udp", 0.02)])
def test_pulled_is_what_was_pushed(phy: Phy, impair: float) -> None:
    with sparse_group(3, 2, width=2, phy=phy, impair=impair, seed=4) as group:
        group.use_hot(KEYS[:100])
        pushed = []
        for iteration in range(3):
            now = gradients(3, iteration)
            group.push_all(now)
            pushed += now
        for job in group.jobs:
            assert (job.pull(KEYS) == total(pushed)).all()
        assert 0.4 < group.in_network_share() < 0.6
        keys, values = group.model()
        assert (values == total(pushed)[np.isin(KEYS, keys)]).all()


@pytest.mark.parametrize("phy", ["memory", "udp"])
def test_a_thread_for_every_rank(phy: Phy) -> None:
    with sparse_group(3, 2, width=2, phy=phy) as group:
        group.use_hot(KEYS[:50])
        mine, found = gradients(3, 9), {}
        failed: list[BaseException] = []

        def rank(number: int) -> None:
            try:
                # again and again, so that threads wait side by side
                for _ in range(10):
                    found[number] = group.jobs[number].push_pull(*mine[number], KEYS)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not failed
        assert all((found[number] == 10 * total(mine)).all() for number in range(3))


def test_a_restarted_switch_loses_nothing() -> None:
    timing = Timing(first=0.01, least=0.005, ask=0.02)
    with sparse_group(2, 2, width=2, phy="udp", impair=0.02, seed=3, timing=timing) as group:
        group.use_hot(KEYS[:100])
        pushed = []
        for iteration in range(4):
            now = gradients(2, iteration)
            for job, (keys, values) in zip(group.jobs, now, strict=True):
                job.push(keys, values, wait=False)
            if iteration == 1:
                group.use_hot(KEYS[50:150])
            group.restart_switch()
            for job in group.jobs:
                job.wait()
            pushed += now
        assert (group.jobs[0].pull(KEYS) == total(pushed)).all()
        assert group.hot.version == group.workers[1].hot.version == 2
        assert group.program.life == 4
    with sparse_group(1, 1, switch=False) as group, pytest.raises(ValueError, match="no switch to restart"):
        group.restart_switch()


@pytest.mark.parametrize("phy", ["memory", "udp"])
def test_a_restarted_shard_loses_nothing_and_a_group_begins_where_one_ended(phy: Phy, tmp_path: Path) -> None:
    timing = Timing(first=0.01, least=0.005, ask=0.02)

    def group() -> SparseGroup:
        return sparse_group(2, 2, width=2, phy=phy, impair=0.02, seed=3, timing=timing, state=tmp_path)

    pushed = []
    for _ in range(2):
        with group() as its:
            its.use_hot(KEYS[:100])
            for iteration in range(4):
                now = gradients(2, iteration)
                for job, (keys, values) in zip(its.jobs, now, strict=True):
                    job.push(keys, values, wait=False)
                if iteration == 1:
                    its.use_hot(KEYS[50:150])
                its.restart_shard(iteration % 2)
                for job in its.jobs:
                    job.wait()
                pushed += now
            assert (its.jobs[0].pull(KEYS) == total(pushed)).all()
            assert its.workers[1].hot.version == 2
    # one of the shards has an iteration more when all processes die: it has no place in the model
    with sparse_group(1, 2, width=2, state=tmp_path / "one") as its:
        its.push_all([(KEYS, np.ones((200, 2)))])
        its.shards[1].receive = lambda batch, now: None  # type: ignore[method-assign]
        its.jobs[0].push(KEYS, np.ones((200, 2)), wait=False)
        with pytest.raises(RoundTimeout):
            its.jobs[0].wait(timeout=0.02)
        assert [shard.finished for shard in its.shards] == [2, 1]
    with sparse_group(1, 2, width=2, state=tmp_path / "one") as its:
        assert (its.jobs[0].pull(KEYS) == 1.0).all()
        with pytest.raises(BadState, match=r"shard0.state is in use by another process"):
            sparse_group(1, 2, width=2, phy="udp", state=tmp_path / "one")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        f"shard{number}.state{end}" for number in range(2) for end in ("", ".before")
    }
    with pytest.raises(BadState, match=r"2 values per key, Sum; this is .* 3 values per key"):
        sparse_group(1, 2, width=3, state=tmp_path / "one")
    # a file that is missing does not take the others' with it
    with sparse_group(1, 2, width=2, state=tmp_path / "one") as its:
        for _ in range(2):
            its.push_all([(KEYS, np.ones((200, 2)))])
    (tmp_path / "one" / "shard1.state").unlink()
    with pytest.raises(BadState, match="after iterations 2, 0, which do not belong together"):
        sparse_group(1, 2, width=2, state=tmp_path / "one")


def test_a_shard_that_is_lost_is_an_error_of_every_rank() -> None:
    with sparse_group(2, 2) as group:
        group.push_all([(KEYS, np.ones(200))] * 2)
        group.restart_shard(0)
        group.jobs[0].push(KEYS, np.ones(200), wait=False)
        for job in group.jobs:
            with pytest.raises(
                FabricError, match=r"round [12].*shard 0 .* knows the model of iteration 0 only"
            ):
                job.pull(KEYS)
        with pytest.raises(FabricError, match="lost"):
            group.jobs[1].push(KEYS, np.ones(200))


def test_keys_have_all_of_64_bits_and_a_push_may_be_empty() -> None:
    with sparse_group(1, 1) as group:
        group.push_all([([2**64 - 1, 2**62], [1.0, 2.0])])
        assert group.jobs[0].pull([2**64 - 1, 2**62]).ravel().tolist() == [1.0, 2.0]
        group.push_all([([], [])])


def test_hot_sets_that_nobody_has_used_yet_survive_a_restart_of_the_switch() -> None:
    timing = Timing(first=0.01, least=0.005, ask=0.02)
    with sparse_group(2, 1, timing=timing) as group:
        for iteration in range(3):
            if iteration == 1:
                hot = KEYS[:10].copy()
                for _ in range(3):
                    # whoever gives keys may use the array again
                    group.use_hot(hot)
                hot[:] = 0
                group.restart_switch()
            else:
                group.use_hot(KEYS[:20])
            group.push_all([(KEYS, np.ones(200))] * 2)
        assert (group.jobs[0].pull(KEYS) == 6.0).all()


def test_an_optimiser_and_its_first_values() -> None:
    with sparse_group(
        2, 1, optimiser=Sgd(0.5), initial=lambda keys, width: np.ones((len(keys), width), np.float32)
    ) as group:
        group.use_hot([3])
        for _ in range(2):
            group.push_all([([3, 4], [1.0, 2.0]), ([3], [1.0])])
        assert group.jobs[1].pull([4, 3, 5, 3]).ravel().tolist() == [-1.0, -1.0, 1.0, -1.0]


def test_who_is_waited_for_is_said() -> None:
    with sparse_group(2, 1) as group:
        with pytest.raises(RoundTimeout, match=r"rank 0, round 1.*other ranks have not pushed") as caught:
            group.jobs[0].push([1], [1.0], timeout=0.05)
        assert caught.value.ranks == (1,)
        group.jobs[1].push([1], [1.0])
        assert group.jobs[0].pull([1])[0, 0] == 2.0
    # the shard says so to whoever asks whether it still has what was pushed; without a switch nobody else could
    with sparse_group(3, 1, switch=False, timing=Timing(first=0.01, least=0.005, ask=0.005)) as group:
        with pytest.raises(
            RoundTimeout, match="shard 0 has not finished the iteration: it waits for rank 1 and 1 more"
        ):
            group.jobs[0].push([1], [1.0], timeout=0.1)
        with pytest.raises(RoundTimeout) as caught:
            group.jobs[0].pull([1], timeout=0.01)
        assert caught.value.ranks == (1,)
        for job in group.jobs[1:]:
            job.push([1], [1.0], wait=False)
        assert group.jobs[0].pull([1])[0, 0] == 3.0
        assert (group.jobs[0]._values, group.jobs[0]._given_up) == ({}, set())


def run_shifting(group: SparseGroup) -> list[int]:
    changed = []
    for iteration in range(12):
        # what is hot moves after half the time
        keys = np.arange(20, dtype=np.uint64) + (0 if iteration < 6 else 1000)
        version = group.hot.version
        group.push_all([(keys, np.ones(20)), (keys, np.ones(20))])
        if group.hot.version != version:
            changed.append(iteration)
    return changed


def test_online_identification_follows_what_is_hot() -> None:
    with sparse_group(2, 2, online=Online(after=3, threshold=0.2, step=10)) as group:
        assert run_shifting(group) == [2, 8]
        assert set(group.hot.keys.tolist()) == set(range(1000, 1020))
        assert group.workers[0].hot.version == 2
        found = group.jobs[0].pull(np.r_[0:20, 1000:1020])
        assert (found == 12.0).all()


def test_a_group_that_looks_for_hot_keys_outlives_its_machines(tmp_path: Path) -> None:
    keys = np.arange(20, dtype=np.uint64)
    with sparse_group(2, 2, online=Online(after=2, threshold=0.2, step=10), state=tmp_path) as group:
        group.use_hot(keys[10:])
        for iteration in range(8):
            group.push_all([(keys, np.ones(20)), (keys, np.ones(20))])
            if iteration in (1, 4):
                group.restart_shard(0)
            elif iteration == 3:
                group.restart_switch()
        with pytest.raises(ValueError, match="finds its hot keys by itself"):
            group.use_hot([1])
        assert group.identification is not None
        assert group.identification.decided == 8
        assert set(group.hot.keys.tolist()) == set(range(20))
        assert (group.jobs[0].pull(keys) == 16.0).all()


def test_hot_keys_need_a_switch_that_holds_them() -> None:
    with sparse_group(1, 1, switch=False) as group, pytest.raises(ValueError, match="no switch"):
        group.use_hot([1])
    with pytest.raises(ValueError, match="nothing can be hot without a switch"):
        sparse_group(1, 1, switch=False, online=Online())
    with pytest.raises(ValueError, match=r"65536 hot parameters need .* make the hot set smaller"):
        sparse_group(1, 1, budget=1000, online=Online())
    with (
        sparse_group(1, 1, budget=1000) as group,
        pytest.raises(ValueError, match="make the hot set smaller"),
    ):
        group.use_hot(np.arange(1000))


def test_a_group_that_cannot_be_leaves_nothing_open() -> None:
    with pytest.raises(ValueError, match="needs 1 to 65535 workers"):
        sparse_group(0, 1, phy="udp")


def test_an_exponent_for_every_key_keeps_small_gradients() -> None:
    keys, size = [1, 2], np.array([1e6, 1e-6], np.float32)
    for magnitudes, wrong in ((size, False), (None, True)):
        with sparse_group(2, 1) as group:
            group.use_hot(keys, magnitudes=magnitudes)
            group.push_all([(keys, size * 0.3), (keys, size * 0.4)])
            found = group.jobs[0].pull(keys)[:, 0]
            assert group.in_network_share() == (1.0 if magnitudes is not None else 0.5)
            assert (abs(found[1] / 0.7e-6 - 1) > 1e-3) is np.bool_(wrong)
            assert found[0] == pytest.approx(0.7e6, rel=1e-6)
