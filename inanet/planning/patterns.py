"""How long all-reduce takes on machines with several ranks each, by pattern (NetReduce, appendix A), and which to choose.

All ranks of a machine share one link to the network. *Flat ring*: one ring over all ranks. *Tencent*: reduce to one rank of
each machine, ring over these, broadcast. *Parallel NetReduce*: reduce-scatter inside each machine, a ring of the i-th ranks for
the i-th piece, aggregated by switches, all-gather inside. *Parallel ring*: the same with ring all-reduce in the middle.
"""

from dataclasses import dataclass
from math import log2


@dataclass(frozen=True, slots=True)
class Cluster:
    """``ranks`` (P) on machines with ``each`` (n) ranks; ``inside`` and ``between`` are bytes per second within a machine and of
    its link; ``hop`` seconds (alpha) that each step of a ring takes. Raises ``ValueError`` for what cannot be.
    """

    ranks: int
    each: int
    inside: float
    between: float
    hop: float

    def __post_init__(self) -> None:
        if self.each < 1 or self.ranks < self.each or self.ranks % self.each:
            raise ValueError(f"{self.ranks} ranks do not fill machines of {self.each}")
        if min(self.inside, self.between) <= 0 or self.hop < 0:
            raise ValueError(f"rates are above 0 and a step does not take less than no time: {self}")

    @property
    def machines(self) -> int:
        """P / n."""
        return self.ranks // self.each


def ring(ranks: int, size: float, rate: float, hop: float) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) * hop + 2 * (ranks - 1) / ranks * size / rate


def flat_ring(cluster: Cluster, size: float) -> float:
    """Equation (1)."""
    return ring(cluster.ranks, size, cluster.between, cluster.hop)


def tencent(cluster: Cluster, size: float) -> float:
    """Equation (2), its last line: the first has an n too many in the time of the reduction. ``each`` is a power of two."""
    n, p = cluster.each, cluster.ranks
    steps = (n * n + 3 * n * log2(n) - 3 * n + 2 * p) / n
    slope = (4 * (n - 1) * p * cluster.between + 2 * (p - n) * n * cluster.inside) / (
        n * p * cluster.inside * cluster.between
    )
    return steps * cluster.hop + slope * size


def _scatter_and_gather(cluster: Cluster, size: float) -> float:
    n = cluster.each
    return 2 * ((n - 1) * cluster.hop + (n - 1) * size / (n * cluster.inside))


def parallel_netreduce(cluster: Cluster, size: float) -> float:
    """Equation (3)."""
    return _scatter_and_gather(cluster, size) + cluster.hop + size / cluster.between


def parallel_ring(cluster: Cluster, size: float) -> float:
    """Equation (3) with a ring all-reduce of the machines in the middle (section 3.4)."""
    return _scatter_and_gather(cluster, size) + ring(cluster.machines, size, cluster.between, cluster.hop)


def tencent_minus_parallel(cluster: Cluster, size: float) -> float:
    """Equation (4): seconds that parallel NetReduce saves over Tencent all-reduce."""
    n, p = cluster.each, cluster.ranks
    steps = 2 * p / n + 3 * log2(n) - n - 2
    slope = ((p - 2 * n) * n * cluster.inside + 2 * (n - 1) * p * cluster.between) / (
        n * p * cluster.inside * cluster.between
    )
    return steps * cluster.hop + slope * size


def flat_minus_parallel(cluster: Cluster, size: float) -> float:
    """Equation (5): seconds that parallel NetReduce saves over a flat ring."""
    n, p = cluster.each, cluster.ranks
    slope = ((p - 2) * n * cluster.inside - 2 * (n - 1) * p * cluster.between) / (
        n * p * cluster.inside * cluster.between
    )
    return (2 * p - 2 * n - 1) * cluster.hop + slope * size


def least_ratio(cluster: Cluster) -> float:
    """Equation (6): ``inside / between`` from which parallel NetReduce beats a flat ring for every size; P > n >= 2."""
    return 2 * cluster.ranks / (cluster.ranks - 2)


def surely_best(cluster: Cluster) -> bool:
    """The paper's sufficient conditions: P > 3n and (6)."""
    wide = cluster.ranks > 3 * cluster.each and cluster.each >= 2
    return wide and cluster.inside / cluster.between >= least_ratio(cluster)


def times(cluster: Cluster, size: float, *, switch: bool = True) -> dict[str, float]:
    """Seconds by pattern; that with NetReduce only if a ``switch`` aggregates, Tencent's only if ``each`` is a power of two."""
    made = {"flat-ring": flat_ring(cluster, size)}
    if not cluster.each & (cluster.each - 1):
        made["tencent"] = tencent(cluster, size)
    made["parallel-ring"] = parallel_ring(cluster, size)
    return made | ({"parallel-netreduce": parallel_netreduce(cluster, size)} if switch else {})


def recommend(cluster: Cluster, size: float, *, switch: bool = True) -> tuple[str, dict[str, float]]:
    """The fastest pattern, and the seconds of all."""
    made = times(cluster, size, switch=switch)
    return min(made, key=lambda name: made[name]), made
