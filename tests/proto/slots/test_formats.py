"""Every number format that a switch can sum, several ranks on a host, NaN that is let through: the bits of one host."""

from collections.abc import Sequence

import numpy as np
import pytest

from inanet.proto.common.events import RoundDone
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.switchml.program import SwitchMLProgram
from inanet.proto.slots.switchml.worker import switchml_worker
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.worker import Membership
from inanet.testing.switched import SWITCH, Star
from tests.proto.slots.jobs import KEY, NOISE, ROOT, worker_at
from tests.proto.slots.judge import single

ELEMENTS = 3_000


class Hosts:
    """Two workers with two local ranks each."""

    def __init__(self, spec: TensorSpec) -> None:
        self.star = Star(SwitchMLProgram(values=64), NOISE)
        members = {worker_at(1, index): 1 << index for index in range(2)}
        root = ExponentRoot()
        root.add_job(1, KEY, members)
        self.star.attach(ROOT, root)
        self.star.group(1, list(members))
        self.star.program.add_job(Tenant(1, members, 1, slots=8))
        self.workers = [
            switchml_worker(Membership(1, index, 2, 4, SWITCH, root=ROOT, key=KEY), 8, values=64)
            for index in range(2)
        ]
        for address, worker in zip(members, self.workers, strict=True):
            self.star.attach(address, worker)
            worker.add_tensor(0, spec)
        self.local = LocalTensor(spec, 4)
        self.round = 0

    def reduce(self, arrays: Sequence[np.ndarray]) -> set[bytes]:
        """One round, here and on one host; the bits of all ranks of both."""
        self.round += 1
        mine, expected = [array.copy() for array in arrays], [array.copy() for array in arrays]
        assert self.local.reduce(expected) is None
        for index, worker in enumerate(self.workers):
            worker.begin(0, self.round, mine[2 * index : 2 * index + 2], self.star.now)
        self.star.run(lambda: len(self.star.log) == 2 * self.round)
        assert all(isinstance(event, RoundDone) for _, event in self.star.log)
        return {array.tobytes() for array in (*mine, *expected)}


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED, ExponentMode.FIXED])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_floats(dtype, mode):
    spec = TensorSpec("t", dtype, (ELEMENTS,), "mean", mode, 1e4 if mode is ExponentMode.FIXED else 0.0)
    hosts = Hosts(spec)
    rng = np.random.default_rng(3)
    for round_ in range(3):
        arrays = [(rng.standard_normal(ELEMENTS) * 8.0**round_).astype(np.float32) for _ in range(4)]
        if dtype == "f16":
            arrays = [array.astype(np.float16) for array in arrays]
        elif dtype == "bf16":
            arrays = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in arrays]
        assert len(hosts.reduce(arrays)) == 1


@pytest.mark.parametrize("mode", [ExponentMode.PROLOGUE, ExponentMode.CARRIED])
def test_nan_and_infinity_that_are_let_through(mode):
    hosts = Hosts(TensorSpec("t", "f32", (ELEMENTS,), "sum", mode, propagate=True))
    rng = np.random.default_rng(4)
    for round_ in range(3):
        arrays = [rng.standard_normal(ELEMENTS).astype(np.float32) for _ in range(4)]
        arrays[round_][700 * round_] = np.nan
        arrays[3][2_999] = np.inf
        assert len(hosts.reduce(arrays)) == 1


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_integers(dtype):
    hosts = Hosts(TensorSpec("t", dtype, (ELEMENTS,), "sum", ExponentMode.NONE))
    rng = np.random.default_rng(5)
    low, high = {"i32": (-(2**29), 2**29), "i64": (-(2**61), 2**61)}[dtype]
    arrays = [rng.integers(low, high, ELEMENTS).astype(f"i{4 if dtype == 'i32' else 8}") for _ in range(4)]
    assert len(hosts.reduce(arrays)) == 1


def test_an_exact_sum_that_does_not_fit_is_reported():
    job = single(2, 8, 8)
    for worker in job.workers:
        worker.add_tensor(0, TensorSpec("t", "i32", (200,), "sum", ExponentMode.NONE))
    job.workers[0].begin(0, 1, [np.full(200, 2**31 - 1, np.int32)], 0.0)
    job.workers[1].begin(0, 1, [np.arange(200, dtype=np.int32)], 0.0)
    job.star.run(lambda: len(job.star.log) == 2)
    assert [event.overflow for _, event in job.star.log] == [1, 1]


@pytest.mark.parametrize(
    "array",
    [np.zeros(199, np.float32), np.zeros(200, np.float64), np.zeros((200, 2), np.float32)[:, 0]],
    ids=["short", "dtype", "strided"],
)
def test_arrays_that_do_not_suit_are_refused_at_once(array):
    worker = switchml_worker(Membership(1, 0, 1, 1, SWITCH, root=ROOT, key=KEY), 8)
    worker.add_tensor(0, TensorSpec("t", "f32", (200,), "sum", ExponentMode.PROLOGUE))
    with pytest.raises(ValueError, match="contiguous 1-D float32 array of 200"):
        worker.begin(0, 1, [array], 0.0)
    assert worker.timer() is None
