"""The paper's testbed in small: three switches, one with the PS, the others with four workers each."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from inanet.planning.goat.publication import Memory, Publisher
from inanet.proto.common.formats import make_format
from inanet.proto.common.local import LocalTensor
from inanet.proto.common.plan import ExponentMode, Scheduled, TensorSpec
from inanet.proto.slots.stream import words_of
from inanet.sim.burst import Burst
from inanet.sim.collaborative import Collaborative, Tree
from inanet.sim.link import Link, LinkSpec

WORKERS = tuple(f"w{index}" for index in range(8))
PARENTS = {
    "s1": "ps",
    "s2": "s1",
    "s3": "s1",
    **{name: "s2" if index < 4 else "s3" for index, name in enumerate(WORKERS)},
}
TESTBED = Tree(PARENTS, "ps", ("s1", "s2", "s3"), WORKERS)
LINK = LinkSpec(rate=1e9, delay=5e-6, grain=16)


def spec(elements: int, *, dtype: str = "f32", mode: ExponentMode = ExponentMode.PROLOGUE) -> TensorSpec:
    return TensorSpec("t", dtype, (elements,), "sum", mode, 1e6 if mode is ExponentMode.FIXED else 0.0)


def fragments_of(what: TensorSpec, ranks: int = len(WORKERS)) -> int:
    return -(-words_of(make_format(what, ranks)) // 64)


def floats(elements: int, ranks: int, seed: int) -> list[np.ndarray]:
    """Normally distributed, of a size that changes from block to block."""
    rng = np.random.default_rng(seed)
    scale = np.repeat(2.0 ** rng.integers(-20, 10, -(-elements // 256)), 256)[:elements]
    return [(rng.standard_normal(elements) * scale).astype(np.float32) for _ in range(ranks)]


def scheduled(what: TensorSpec, slots: dict[str, int], tree: Tree = TESTBED) -> tuple[Scheduled, ...]:
    """What the controller would publish."""
    made = Publisher(1, tree.parents, tree.ps, tree.switches, tree.workers, slots, Memory(), seed=1)
    return made.publish("t", fragments_of(what, len(tree.workers)))


class Round:
    """One round's arrays, and the bits that a single host would have."""

    def __init__(self, reference: LocalTensor, arrays: list[np.ndarray]) -> None:
        self.arrays = [array.copy() for array in arrays]
        self.expected = [array.copy() for array in arrays]
        assert reference.reduce(self.expected) is None

    def check(self) -> None:
        for array in self.arrays:
            np.testing.assert_array_equal(array.view(np.uint32), self.expected[0].view(np.uint32))


def lab(slots: dict[str, int], *, window: int = 256) -> Collaborative:
    return Collaborative(TESTBED, "goat", slots=slots, window=window, link=LINK)


class BadLink:
    """A link that loses, repeats and delays packets, 5 % each."""

    def __init__(self, link: Link, seed: int, share: float = 0.05, delay: float = 300e-6) -> None:
        self._link, self._share, self._delay = link, share, delay
        self._random = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def carry(self, burst: Burst, now: float) -> Iterator[tuple[float, Burst]]:
        for at, piece in self._link.carry(burst, now):
            lost, twice, late, much = self._random.random((4, len(piece)))
            for k in np.flatnonzero(lost >= self._share).tolist():
                one = piece.part(slice(k, k + 1))
                when = at + (self._delay * float(much[k]) if late[k] < self._share else 0.0)
                yield when, one
                if twice[k] < self._share:
                    yield when, one.part(slice(0, 1))


def impair(its: Collaborative, kind: type[BadLink] = BadLink) -> Collaborative:
    """Make every link bad in both directions."""
    nodes = {**its.network.hosts, **its.network.switches}
    shared: dict[int, Any] = {}
    ends = [(node, way) for node in nodes.values() for way in node.links]
    for seed, (near, way) in enumerate(ends):
        link = near.links[way]
        near.links[way] = shared.setdefault(id(link), kind(link, seed))
    return its
