"""Jobs on a virtual star, and the bits that their rounds must give."""

from collections.abc import Callable, Sequence

import numpy as np

from inanet.proto.common.events import RoundDone
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, TensorSpec
from inanet.proto.slots.exponents import ExponentRoot
from inanet.proto.slots.tenants import Tenant
from inanet.proto.slots.worker import Membership, Worker
from inanet.testing.switched import SWITCH, Impairment, Star
from inanet.wire.endpoint import endpoint

KEY = 0x0123_4567_89AB_CDEF
ROOT = endpoint("10.0.0.250", 7000)
#: 5 % of the packets lost, 5 % twice, 5 % late by up to 200 us, on every hop
NOISE = Impairment(seed=11, drop=0.05, duplicate=0.05, late=0.05)


def worker_at(job: int, index: int) -> int:
    return endpoint(f"10.{job}.0.{index + 1}", 4000)


def ps_at(job: int) -> int:
    return endpoint(f"10.{job}.1.1", 5000)


def spec(
    elements: int, *, dtype: str = "f32", op: str = "sum", mode: ExponentMode = ExponentMode.PROLOGUE
) -> TensorSpec:
    factor = 1e6 if mode is ExponentMode.FIXED else 0.0
    return TensorSpec("t", dtype, (elements,), op, mode, factor)


def floats(elements: int, ranks: int, seed: int) -> list[np.ndarray]:
    """Normally distributed, of a size that changes from block to block."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(2.0 ** rng.integers(-20, 10, -(-elements // 256)), 256)[:elements]
    return [(rng.standard_normal(elements) * scale).astype(np.float32) for _ in range(ranks)]


class Job:
    """``workers`` workers on a star, made by ``make(membership)``, and what a single host would have computed."""

    def __init__(
        self, star: Star, job: int, workers: int, make: Callable[[Membership], Worker], *, ps: bool = False
    ) -> None:
        self.star, self.job = star, job
        self.addresses = [worker_at(job, i) for i in range(workers)]
        members = {address: 1 << i for i, address in enumerate(self.addresses)}
        root = star.machines.get(ROOT)
        if root is None:
            root = ExponentRoot()
            star.attach(ROOT, root)
        assert isinstance(root, ExponentRoot)
        root.add_job(job, KEY + job, members)
        star.group(job, self.addresses)
        self.members = members
        self.workers = [
            make(
                Membership(
                    job, i, workers, workers, SWITCH, ps_at(job) if ps else 0, root=ROOT, key=KEY + job
                )
            )
            for i in range(workers)
        ]
        for address, worker in zip(self.addresses, self.workers, strict=True):
            star.attach(address, worker)
        self._local: dict[int, LocalTensor] = {}
        self._round = 0
        self._begun: list[tuple[int, list[np.ndarray], list[np.ndarray]]] = []

    def tenant(self, **kwargs: int) -> Tenant:
        """The job as the switch knows it."""
        return Tenant(self.job, self.members, self.job, **kwargs)

    def add(self, tensor: int, what: TensorSpec) -> None:
        for worker in self.workers:
            worker.add_tensor(tensor, what)
        self.know(tensor, what)

    def know(self, tensor: int, what: TensorSpec) -> None:
        """What to compare a tensor's results with."""
        self._local[tensor] = LocalTensor(what, len(self.workers))

    def begin(self, tensor: int, arrays: Sequence[np.ndarray], only: Sequence[int] | None = None) -> None:
        """Begin a round at all workers, or at those with the indices ``only``."""
        self._round += 1
        mine = [array.copy() for array in arrays]
        expected = [array.copy() for array in arrays]
        assert self._local[tensor].reduce(expected) is None
        self._begun.append((self._round, mine, expected))
        for index, worker in enumerate(self.workers):
            if only is None or index in only:
                worker.begin(tensor, self._round, [mine[index]], self.star.now)

    def begin_bad(self, tensor: int, arrays: Sequence[np.ndarray]) -> None:
        """Begin a round that will be refused."""
        self._round += 1
        for worker, array in zip(self.workers, arrays, strict=True):
            worker.begin(tensor, self._round, [array], self.star.now)

    def begin_late(self, index: int, tensor: int = 0) -> None:
        """Have a worker begin the last round that others have begun already."""
        round_, arrays, _ = self._begun[-1]
        self.workers[index].begin(tensor, round_, [arrays[index]], self.star.now)

    def done(self) -> bool:
        """Whether every worker has finished every round."""
        finished = {
            (address, event.round)
            for address, event in self.star.log
            if isinstance(event, RoundDone) and event.job == self.job
        }
        return all((a, round_) in finished for a in self.addresses for round_, _, _ in self._begun)

    def check(self) -> None:
        """Every array of every round holds the bits of a single host."""
        for _, arrays, expected in self._begun:
            for array in arrays:
                np.testing.assert_array_equal(array.view(np.uint32), expected[0].view(np.uint32))

    def sum(self, name: str) -> int:
        return sum(worker.stats()[name] for worker in self.workers)
