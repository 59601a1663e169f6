"""Which pattern the planner recommends where hosts have several ranks, with a switch that sums and without one.

Patterns are those of NetReduce (:mod:`inanet.planning.patterns`); the network is the planner's. All ranks of a host share its
link; the slowest link of all counts, as every pattern loads all alike. A step takes what the planner reckons for one of a ring.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inanet.planning.candidates import Fleet
from inanet.planning.costs import Costs
from inanet.planning.patterns import Cluster, least_ratio, recommend, surely_best
from inanet.units import show_rate

#: bytes per second between the ranks of a host if nobody says: PCIe 4.0 with 16 lanes
INSIDE = 32e9


@dataclass(frozen=True, slots=True)
class Advice:
    """``seconds`` of an all-reduce by pattern; ``pattern`` is the fastest of all, ``plain`` of those that need no switch."""

    cluster: Cluster
    seconds: Mapping[str, float]
    pattern: str
    plain: str

    @property
    def surely(self) -> bool:
        """Whether NetReduce's sufficient conditions hold: its parallel pattern is the fastest for tensors of any size."""
        return surely_best(self.cluster)

    def lines(self) -> list[str]:
        """In words."""
        cluster = self.cluster
        ranks = f"{cluster.each} rank{'s' if cluster.each > 1 else ''} a host"
        within = f", {show_rate(round(cluster.inside * 8))} within it" if cluster.each > 1 else ""
        lines = [
            f"pattern for {ranks}{within}: {self._said(self.pattern)} if a switch sums,"
            f" {self._said(self.plain)} if none does"
        ]
        if cluster.each > 1:
            lines.append(f"with a switch, {self._conditions()}")
        return lines

    def _said(self, name: str) -> str:
        return f"{name} ({self.seconds[name]:.4f} s)"

    def _conditions(self) -> str:
        cluster = self.cluster
        if cluster.ranks <= 3 * cluster.each:
            return f"other sizes may have other patterns: NetReduce's conditions ask for more than 3 hosts, not {cluster.machines}"
        least, found = least_ratio(cluster), cluster.inside / cluster.between
        if self.surely:
            return f"that holds for every size: {found:.1f} times the link's rate within a host, {least:.2f} suffice"
        return (
            f"other sizes may have other patterns: {found:.1f} times the link's rate within a host, where {least:.2f} would"
            " do for every size"
        )


def advise(
    fleet: Fleet, size: float, costs: Costs, *, each: int = 1, inside: float = INSIDE
) -> Advice | None:
    """The pattern for tensors of ``size`` bytes per rank, ``each`` ranks a host with ``inside`` bytes per second between them.

    ``None`` if there is one rank alone, or no link of a worker has a rate. Raises ``ValueError`` for rates that are none.
    """
    ports = [fleet.network.ports[name] for name in fleet.workers]
    slowest = min((min(port.sends, port.receives) for port in ports), default=math.inf)
    ranks = each * len(fleet.workers)
    if ranks < 2 or len(fleet.workers) < 2 or not math.isfinite(slowest):
        return None
    cluster = Cluster(ranks, each, inside, slowest / 8, costs.step_s)
    pattern, seconds = recommend(cluster, size)
    plain, _ = recommend(cluster, size, switch=False)
    return Advice(cluster, seconds, pattern, plain)
