"""Max-min fair sharing of links among the flows of aggregation trees: XAgg's Iq. (1), over all jobs and both
directions (shared rates).

A *flow* is what one node sends to a neighbour, or to a multicast group, in one tree of one job. It uses resources: the
egress of its sender, the ingress of whoever receives it. What a node forwards is made of what its children send, so it
is no faster than the slowest of them; and by the second line of Iq. (1) the slowest child need not, and may not, send
faster than its parent can pass on.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
#: A resource counts as full from here on: sums of floats are not exact.
_FULL = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class Flow:
    """What a flow needs. Rates are in bits per second, or any other unit that the limits have as well."""

    #: resources that carry it
    uses: tuple[Hashable, ...]
    #: its own limit
    ceiling: float = math.inf
    #: flows that it is made of: it is no faster than the slowest of them
    follows: tuple[Hashable, ...] = ()
    #: and the slowest of them is no faster than it, because that would be of no use
    holds: bool = False


def share(flows: Mapping[Key, Flow], limits: Mapping[Hashable, float]) -> dict[Key, float]:
    """The max-min fair rates: no flow can have more without taking from one that has no more than it.

    All rates rise together (progressive filling, Bertsekas and Gallager, Data Networks, section 6.5.2). A flow stops at
    its ceiling, where a resource is full, or where it follows one that has stopped; where a flow that holds stops, the
    slowest of those it follows stops with it, and the capacity is others'. Resources without a limit never fill; a
    flow that nothing limits gets infinity. Raises ``KeyError`` if a flow follows one that is not there.
    """
    followers: dict[Key, list[Key]] = {key: [] for key in flows}
    for key, flow in flows.items():
        for source in flow.follows:
            followers[source].append(key)  # type: ignore[index]
    #: who still rises, by resource; dictionaries, since the order of sets would differ from run to run
    users: dict[Hashable, dict[Key, None]] = {}
    for key, flow in flows.items():
        for resource in flow.uses:
            if resource in limits:
                users.setdefault(resource, {})[key] = None
    free = {resource: limits[resource] for resource in users}
    limited = sorted(
        (key for key in flows if math.isfinite(flows[key].ceiling)), key=lambda k: flows[k].ceiling
    )
    limited.reverse()
    rates: dict[Key, float] = {}
    while len(rates) < len(flows):
        while limited and limited[-1] in rates:
            limited.pop()
        levels = {resource: free[resource] / len(risers) for resource, risers in users.items() if risers}
        level = min(levels.values(), default=math.inf)
        if limited:
            level = min(level, flows[limited[-1]].ceiling)
        level = max(0.0, level)
        stopped = [key for resource, at in levels.items() if at * _FULL <= level for key in users[resource]]
        while limited and flows[limited[-1]].ceiling <= level:
            stopped.append(limited.pop())
        if math.isinf(level):
            stopped = [key for key in flows if key not in rates]
        for key in _with_relatives([key for key in stopped if key not in rates], flows, followers, rates):
            rates[key] = level
            for resource in flows[key].uses:
                if resource in users and key in users[resource]:
                    del users[resource][key]
                    free[resource] -= level
    return rates


def _with_relatives(
    stopped: Collection[Key],
    flows: Mapping[Key, Flow],
    followers: Mapping[Key, list[Key]],
    rates: Mapping[Key, float],
) -> list[Key]:
    """Flows that stop now: ``stopped``, those made of them, and the slowest sources of those that hold."""
    found: dict[Key, None] = {}

    def follow(keys: Collection[Key]) -> None:
        queue = [key for key in keys if key not in found]
        for key in queue:
            found[key] = None
            queue += [other for other in followers[key] if other not in rates and other not in found]

    follow(stopped)
    # one at a time: a source that stops may stop others with it, and then those need no more
    queue = [key for key in found if flows[key].holds]
    for key in queue:
        if not any(source in rates or source in found for source in flows[key].follows):
            before = len(found)
            # any of them would do; the one that could do least loses least
            follow([min(flows[key].follows, key=lambda s: (flows[s].ceiling, repr(s)))])  # type: ignore[index,list-item]
            queue += [other for other in list(found)[before:] if flows[other].holds]
    return list(found)
