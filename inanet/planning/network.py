"""The network as a planner sees it: hosts on switches, trunks between these, rates of every direction.

Rates are bits per second; infinity means that nothing limits it. Links are full duplex, so every direction is a
resource of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

#: One direction of a link: ("up", host), ("down", host) or ("trunk", from switch, to switch).
Link: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Port:
    """A host's link to its switch."""

    switch: str
    sends: float
    receives: float


@dataclass(frozen=True, slots=True)
class Network:
    """``trunks`` maps pairs of switches to rates. ``flooding``: multicast reaches every port of the segment, as on a
    switch that does not snoop. ``routed``: multicast does not leave its switch.
    """

    ports: Mapping[str, Port]
    trunks: Mapping[tuple[str, str], float]
    flooding: bool = False
    routed: bool = False

    def limits(self) -> dict[Link, float]:
        """The rate of every direction of every link."""
        found: dict[Link, float] = {}
        for name, port in self.ports.items():
            found["up", name] = port.sends
            found["down", name] = port.receives
        for (first, second), rate in self.trunks.items():
            found["trunk", first, second] = found["trunk", second, first] = rate
        return found

    def path(self, source: str, target: str, flow: int = 0) -> tuple[Link, ...]:
        """Links from a host to another, none to itself. ``flow`` chooses among equally short ways, as a hash would.

        Raises ``KeyError`` for unknown hosts and for switches that nothing joins.
        """
        if source == target:
            return ()
        here, there = self.ports[source].switch, self.ports[target].switch
        return (("up", source), *self._trunks(here, there, flow), ("down", target))

    def spread(self, source: str, targets: Iterable[str]) -> tuple[Link, ...]:
        """Links that carry a multicast packet from a host to others, each once."""
        reached = [name for name in self.ports if name != source] if self.flooding else targets
        links = dict.fromkeys(link for target in reached for link in self.path(source, target))
        return tuple(links)

    def reaches(self, source: str, targets: Iterable[str]) -> bool:
        """Whether multicast can reach all of them."""
        here = self.ports[source].switch
        return not self.routed or all(self.ports[target].switch == here for target in targets)

    def _trunks(self, here: str, there: str, flow: int) -> list[Link]:
        # by name, not in the order of a file: the same network has the same ways
        near: dict[str, list[str]] = {}
        for first, second in sorted({pair for ends in self.trunks for pair in (ends, ends[::-1])}):
            near.setdefault(first, []).append(second)
        distance = {there: 0}
        queue = [there]
        for switch in queue:
            for other in near.get(switch, ()):
                if other not in distance:
                    distance[other] = distance[switch] + 1
                    queue.append(other)
        links: list[Link] = []
        while here != there:
            closer = [other for other in near.get(here, ()) if distance.get(other, -1) == distance[here] - 1]
            onward = closer[flow % len(closer)]
            links.append(("trunk", here, onward))
            here = onward
        return links
