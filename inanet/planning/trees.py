"""XAgg's aggregation trees (section V): who is like whom, which servers can sum, and the k-ary tree over them.

Pure functions. Bandwidths are bits per second, sizes bytes, times seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inanet.wire.xagg import MAX_CHILDREN

#: A server's memory in use, the model included, stays below this share, so that there is room for new tasks.
MEMORY_SHARE = 0.8
#: What one core sums and forwards by the paper's own measurement (section VI-B, rounded down from 13.03 Gbit/s);
#: callers with a measurement of their machine pass that.
CORE_BPS = 10e9
#: Below this share of communication in a step no plan can help (section V).
WORTHWHILE = 0.10
#: Fan-ins that the paper chooses from.
FAN_INS = range(2, 6)


class TreeError(ValueError):
    """No tree with these servers; the text says what to add."""


@dataclass(frozen=True, slots=True)
class Performance:
    """A worker in the first round, which everybody sends to the PS directly."""

    name: str
    #: t1, seconds until its gradient was there
    training: float
    #: t2, seconds until the gradient was sent
    transmission: float

    @property
    def total(self) -> float:
        """t = t1 + t2."""
        return self.training + self.transmission


@dataclass(frozen=True, slots=True)
class Server:
    """What a server that could sum has to spare."""

    name: str
    #: idle bandwidth
    bandwidth: float
    #: idle cores
    cores: int
    memory: int
    used: int = 0

    @property
    def free(self) -> int:
        """Bytes of memory not in use."""
        return self.memory - self.used


@dataclass(frozen=True, slots=True)
class KTree:
    """A tree over workers and servers; ``servers`` are those that it uses, best first."""

    root: str
    #: of every worker and every server in use
    parents: Mapping[str, str]
    servers: tuple[str, ...]

    def children(self, name: str) -> tuple[str, ...]:
        """Who sends to a node."""
        return tuple(child for child, parent in self.parents.items() if parent == name)


def by_performance(workers: Iterable[Performance]) -> tuple[str, ...]:
    """Names, the fastest first: neighbours in this order get the same parent. Equal ones stand by name."""
    return tuple(w.name for w in sorted(workers, key=lambda worker: (worker.total, worker.name)))


def communication_share(workers: Sequence[Performance]) -> float:
    """Share of communication in a step, 0 to 1, over all workers; 0 without any."""
    total = sum(worker.total for worker in workers)
    return sum(worker.transmission for worker in workers) / total if total > 0 else 0.0


def worthwhile(share: float, threshold: float = WORTHWHILE) -> bool:
    """The 10 % rule: whether a step spends enough on communication for aggregation to shorten it."""
    return share >= threshold


def candidates(servers: Iterable[Server], model: int, core_bps: float = CORE_BPS) -> tuple[Server, ...]:
    """Servers with room for ``model`` bytes and cores for their bandwidth, best first.

    The two criteria of section V: memory in use and model take at most 80 % of the memory, and ``core_bps`` times the
    idle cores cover the idle bandwidth. Sorted by {bandwidth, CPU, memory}, the name last so that the order is always
    the same.
    """
    able = [
        server
        for server in servers
        if server.used + model <= MEMORY_SHARE * server.memory
        and 0 < server.bandwidth <= core_bps * server.cores
    ]
    return tuple(sorted(able, key=lambda s: (-s.bandwidth, -s.cores, -s.free, s.name)))


def height(k: int, workers: int) -> int:
    """Levels of a k-ary tree from the root to the workers: the h of Eq. (2), k^(h-2) < w <= k^(h-1).

    It is ceil(1 + log_k w), in integers. Raises ``ValueError`` unless k and ``workers`` are at least 2.
    """
    if k < 2 or workers < 2:
        raise ValueError(f"k = {k} and {workers} workers; Eq. (2) needs 2 or more of each")
    h = 2
    while k ** (h - 1) < workers:
        h += 1
    return h


def needed(k: int, workers: int) -> int:
    """Servers that a full k-ary tree uses between the workers and the root, those with one child left out."""
    count = 0
    nodes = workers
    for _ in range(height(k, workers) - 2):
        groups, rest = divmod(nodes, k)
        count += groups + (rest > 1)
        nodes = groups + (rest > 0)
    return count


def choose_k(workers: int, servers: int, ks: Sequence[int] = FAN_INS) -> int:
    """The smallest k for which there are servers enough, since B / k is what a node of the tree carries.

    The greatest of ``ks`` if they are too few for all.
    """
    return next((k for k in sorted(ks) if needed(k, workers) <= servers), max(ks))


def fan_in(bandwidth: float, reference: float) -> int:
    """Children of a server: ceil(B_i / b - 1/2), b being the reference rate."""
    # -(x // 1) of the negative is the ceiling
    return -int(-(bandwidth / reference - 0.5) // 1)


def build(root: str, workers: Sequence[str], servers: Sequence[Server], k: int) -> KTree:
    """The aggregation tree of section V, from the workers upwards.

    ``workers`` in the order of :func:`by_performance`, ``servers`` in that of :func:`candidates`. The first server of
    a layer gets k children, which makes B_1 / k the layer's reference rate; the others get what they can take at that
    rate. Servers with one child are removed, and the best of all take the places that are left. Where servers run out,
    children go to the root. Raises :class:`TreeError` if the root cannot have so many.
    """
    if k < 2:
        raise ValueError(f"k = {k}; a node that sums has two children at least")
    parents: dict[str, str] = {}
    layer = list(workers)
    left = list(servers)
    levels = height(k, len(workers)) - 2 if len(workers) > 1 else 0
    for _ in range(levels):
        if len(layer) <= k or not left:
            break
        layer = _layer(layer, left, k, parents)
    parents |= dict.fromkeys(layer, root)
    parents, kept = _without_idlers(parents, [server.name for server in servers])
    used = tuple(server.name for server in servers[: len(kept)])
    names = dict(zip(kept, used, strict=True))
    parents = {names.get(child, child): names.get(parent, parent) for child, parent in parents.items()}
    crowd = sum(parent == root for parent in parents.values())
    if crowd > MAX_CHILDREN:
        raise TreeError(
            f"{root!r} would have {crowd} children with k = {k}, at most {MAX_CHILDREN} are possible: the tree needs "
            f"{needed(k, len(workers))} servers and there are {len(servers)}"
        )
    return KTree(root, parents, used)


def _layer(nodes: list[str], left: list[Server], k: int, parents: dict[str, str]) -> list[str]:
    """Give ``nodes`` parents out of ``left``, which shrinks; the next layer: those parents, and who got none."""
    reference = left[0].bandwidth / k
    above: list[str] = []
    start = 0
    while start < len(nodes) and left:
        count = min(k, fan_in(left[0].bandwidth, reference))
        if count < 1:
            # sorted by bandwidth: nor can any later one
            break
        server = left.pop(0)
        group = nodes[start : start + count]
        parents |= dict.fromkeys(group, server.name)
        above.append(server.name)
        start += count
    return above + nodes[start:]


def _without_idlers(parents: dict[str, str], order: list[str]) -> tuple[dict[str, str], list[str]]:
    """Join the child of every server that has only one to that server's parent; the servers that remain, in order."""
    for server in order:
        below = [child for child, parent in parents.items() if parent == server]
        if len(below) == 1:
            parents[below[0]] = parents.pop(server)
    return parents, [server for server in order if server in parents]
