"""SwitchML's own exponents: one batch ahead of the data, the same result everywhere, within the bound."""

import numpy as np
import pytest

from inanet.proto.common.events import Refused, RoundDone
from inanet.proto.common.plan import ExponentMode
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.testing.switched import Star
from inanet.wire.switchml import decode
from tests.proto.slots.jobs import NOISE, Job, floats, spec


def job_of(workers: int, pool: int, values: int = 64) -> Job:
    star = Star(SwitchMLProgram(values=values), NOISE)
    job = Job(star, 1, workers, lambda m: switchml_worker(m, pool, values=values, packetwise=True))
    star.program.add_job(job.tenant(slots=pool))
    return job


def reduce(job: Job, round_: int, arrays: list[np.ndarray]) -> list[np.ndarray]:
    mine = [array.copy() for array in arrays]
    for worker, array in zip(job.workers, mine, strict=True):
        worker.begin(0, round_, [array], job.star.now)
    done = len(job.star.log) + len(mine)
    job.star.run(lambda: len(job.star.log) == done)
    return mine


@pytest.mark.parametrize(
    ("workers", "pool", "elements"), [(4, 8, 5_000), (3, 8, 100), (2, 1, 200), (1, 4, 64)]
)
def test_results_are_the_same_everywhere_and_within_the_bound(workers, pool, elements):
    job = job_of(workers, pool)
    job.add(0, spec(elements))
    for round_ in (1, 2):
        arrays = floats(elements, workers, round_)
        got = reduce(job, round_, arrays)
        for array in got[1:]:
            np.testing.assert_array_equal(array, got[0])
        exact = np.sum(np.array(arrays, np.float64), axis=0)
        limit = (2**31 - 1) // workers
        for start in range(0, elements, 64):
            part = slice(start, start + 64)
            peak = max(float(np.abs(array[part]).max()) for array in arrays)
            scale = 2.0 ** np.ceil(np.log2(peak)) / limit
            bound = workers / 2 * scale + np.abs(exact[part]) * 2.0**-24
            assert (np.abs(got[0][part] - exact[part]) <= bound).all()
    fragments = -(-elements // 64)
    assert job.workers[0].window.next == 2 * (fragments + min(pool, fragments))


def test_the_first_batch_carries_exponents_alone():
    job = job_of(2, 4)
    job.add(0, spec(64 * 6))
    array = np.repeat(2.0 ** np.arange(6), 64).astype(np.float32)
    job.workers[0].begin(0, 1, [array], 0.0)
    (sent,) = job.workers[0].transmit(0.0)
    packets = [decode(sent.packet(index)) for index in range(len(sent))]
    assert [packet.exponents for packet in packets] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert all(set(packet.values) == {0} for packet in packets)


def test_largest_values_of_all_workers_do_not_wrap():
    job = job_of(4, 4)
    job.add(0, spec(64, op="mean"))
    got = reduce(job, 1, [np.full(64, sign * 2.0**20, np.float32) for sign in (1, 1, 1, 1)])
    np.testing.assert_allclose(got[0], 2.0**20, rtol=2.0**-24)


def test_zeros_and_the_smallest_numbers():
    job = job_of(2, 4)
    job.add(0, spec(128))
    arrays = [np.zeros(128, np.float32) for _ in range(2)]
    arrays[1][100] = 2.0**-149
    got = reduce(job, 1, arrays)
    assert got[0][:64].tolist() == [0.0] * 64
    assert abs(float(got[0][100]) - 2.0**-149) <= 2.0**-149


@pytest.mark.parametrize("value", [np.nan, -np.inf, 3.0e38])
def test_what_has_no_exponent_is_refused_by_all(value):
    job = job_of(3, 4)
    job.add(0, spec(1_000))
    arrays = floats(1_000, 3, 1)
    arrays[2][777] = value
    reduce(job, 1, arrays)
    events = [event for _, event in job.star.log]
    assert all(isinstance(event, Refused) for event in events)
    assert sorted((event.local_rank, event.index) for event in events) == [(-1, 768), (-1, 768), (0, 777)]
    reduce(job, 2, floats(1_000, 3, 2))
    assert isinstance(job.star.log[-1][1], RoundDone)


def test_integers_are_as_exact_as_ever_and_other_floats_are_refused():
    job = job_of(2, 4)
    job.add(0, spec(300, dtype="i32", mode=ExponentMode.NONE))
    got = reduce(job, 1, [np.arange(300, dtype=np.int32), np.full(300, -7, np.int32)])
    np.testing.assert_array_equal(got[0], np.arange(300) - 7)
    job.add(1, spec(300, dtype="f16"))
    with pytest.raises(ValueError, match="f32 arrays of 300"):
        job.workers[0].begin(1, 2, [np.zeros(300, np.float16)], 0.0)
