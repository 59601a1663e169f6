"""What is pulled is what was pushed, whatever is hot, lost, repeated and late."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inanet.proto.zebra.job import fixed
from inanet.testing.switched import Impairment

from .rig import Rig, random_gradients, spread, summed

BAD = {"drop": 0.05, "duplicate": 0.05, "late": 0.05}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**20),
    workers=st.integers(1, 4),
    shards=st.integers(1, 3),
    width=st.sampled_from([1, 3]),
    sharding=st.sampled_from(["hash", "range"]),
    impaired=st.booleans(),
)
def test_sums_of_random_key_sets(
    seed: int, workers: int, shards: int, width: int, sharding: str, impaired: bool
) -> None:
    rng = np.random.default_rng(seed)
    how = Impairment(seed, **BAD) if impaired else None
    rig = Rig(workers, shards, how, width=width, sharding=sharding)
    hot = spread(rng.permutation(40)[: int(rng.integers(0, 30))].astype(np.uint64))
    rig.start(fixed(1, hot))
    pushed = []
    for iteration in range(3):
        gradients = random_gradients(rng, workers, 60, 50, width)
        rig.push(gradients)
        pushed += gradients
        if iteration == 0:
            # another set, from the iteration after next on
            rig.prepare(fixed(2, spread(rng.permutation(60)[:20].astype(np.uint64))))
    assert {worker.hot.version for worker in rig.workers} == {2}
    keys = spread(np.arange(70, dtype=np.uint64))
    total = summed(pushed, width)
    wanted = np.array([total.get(key, np.zeros(width)) for key in keys.tolist()])
    for found in rig.pull(keys):
        assert (found == wanted).all()


def test_a_model_is_bit_identical_under_loss() -> None:
    """Gradients that no integer and no order would sum exactly, three iterations, 5 % of everything bad."""

    def run(impairment: Impairment | None) -> list[bytes]:
        rng, seen = np.random.default_rng(5), []
        rig = Rig(4, 2, impairment)
        rig.start(fixed(1, spread(np.arange(20, dtype=np.uint64))))
        for _ in range(3):
            gradients = []
            for keys, _ in random_gradients(rng, 4, 80, 80):
                values = rng.standard_normal((len(keys), 1))
                # what is left when these cancel depends on the order, in float64 as well
                large = rng.random(len(keys)) < 0.5
                values[large] = np.where(rng.random((large.sum(), 1)) < 0.5, 1e18, -1e18)
                gradients.append((keys, values.astype(np.float32)))
            rig.push(gradients)
            seen += [part.tobytes() for shard in rig.shards for part in shard.store.items()]
        if impairment is not None:
            assert sum(worker.stats()["repeated"] for worker in rig.workers)
        return seen

    clean = run(None)
    for seed in range(3):
        assert run(Impairment(seed, **BAD)) == clean


def test_workers_without_gradients_for_a_key_or_at_all() -> None:
    rig = Rig(3, 2)
    rig.start(fixed(1, np.arange(5, dtype=np.uint64)))
    nothing = (np.zeros(0, np.uint64), np.zeros((0, 1), np.float32))
    rig.push([(np.array([1, 9], np.uint64), np.ones((2, 1), np.float32)), nothing, nothing])
    rig.push([nothing] * 3)
    assert rig.pull(np.array([1, 9, 2], np.uint64))[2].ravel().tolist() == [1.0, 1.0, 0.0]
    assert rig.program.stats()["sums"] == 1
    assert rig.program.stats()["occupied_3"] == 0


def test_without_a_switch_everything_is_cold() -> None:
    rig = Rig(2, 2, Impairment(1, **BAD), switch=False)
    rng = np.random.default_rng(2)
    gradients = random_gradients(rng, 2, 40, 40)
    rig.push(gradients)
    total = summed(gradients)
    keys = np.array(sorted(total), np.uint64)
    assert rig.pull(keys)[0].ravel().tolist() == [total[key][0] for key in keys.tolist()]
    assert rig.workers[0].stats()["hot_pairs"] == 0


def test_gradients_too_large_for_the_switch_go_to_the_ps() -> None:
    rig = Rig(2, 1)
    rig.start(fixed(1, np.array([4], np.uint64), shift=20))
    large = np.array([[3e9]], np.float32)
    rig.push([(np.array([4], np.uint64), large), (np.array([4], np.uint64), np.ones((1, 1), np.float32))])
    assert rig.workers[0].stats()["misfits"] == 1
    assert rig.pull(np.array([4], np.uint64))[1][0, 0] == np.float32(3e9 + 1)


def test_float_sums_in_the_switch_are_near() -> None:
    rig = Rig(4, 2, floats=True)
    rig.start(fixed(1, np.arange(50, dtype=np.uint64)))
    rng = np.random.default_rng(0)
    keys = np.arange(60, dtype=np.uint64)
    gradients = [(keys, rng.standard_normal((60, 1)).astype(np.float32)) for _ in range(4)]
    rig.push(gradients)
    exact = sum(values.astype(np.float64) for _, values in gradients)
    size = sum(np.abs(values).astype(np.float64) for _, values in gradients)
    found = rig.pull(keys)[0]
    assert (np.abs(found - exact) < 1e-3 * size).all()
    assert (found[:50] != exact[:50].astype(np.float32)).any()


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([1, 1], [1.0, 2.0], "may come once"),
        ([1, 2], [1.0], "do not go with"),
        ([1, 2], [1.0, float("nan")], "key 2 is not finite"),
    ],
)
def test_a_push_that_makes_no_sense_is_refused(keys: list[int], values: list[float], message: str) -> None:
    rig = Rig(1, 1)
    with pytest.raises(ValueError, match=f"rank 0, iteration 1: .*{message}"):
        rig.workers[0].push(np.array(keys, np.uint64), np.array(values, np.float32), 0.0)
