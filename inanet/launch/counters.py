"""What the daemons counted, and what it says about the fabric.

A daemon started with ``INA_STATS_FILE`` in its environment writes its counters there, one JSON object, when
it ends in good order.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

#: Environment variable with the path of the file.
STATS_VARIABLE = "INA_STATS_FILE"


@dataclass(slots=True)
class Counters:
    """Counters of one daemon, or sums of several; bytes are payload of UDP, packets are fragments' worth."""

    rx_bytes: int = 0
    rx_packets: int = 0
    tx_bytes: int = 0
    tx_packets: int = 0
    contributions_in: int = 0
    """contributions accepted from children, each once"""
    contributions_summed: int = 0
    """contributions added to a slot that already held one"""
    leaf_contributions: int = 0
    """fragments of this host's own tensors, each counted when first sent"""
    leaf_bytes: int = 0
    """bytes of the packets that those were first sent in"""
    sums: int = 0
    """fragments that got their last contribution at a switch"""
    collisions: int = 0
    """packets that found another fragment in their slot at a switch"""
    retransmissions: int = 0
    results_multicast: int = 0
    """results that left once for a group of children"""
    drops: dict[str, int] = field(default_factory=dict)
    """packets dropped by reason (:class:`inanet.wire.drops.Drop`)"""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Counters from a daemon's file; keys this class does not know are left out, missing ones are 0."""
        values = json.loads(text)
        for name, counter in (("collisions", "collisions"), ("sums", "completed")):
            values[name] = sum(one.get(counter, 0) for one in values.get("programs", {}).values())
        numbers = {name: int(values.get(name, 0)) for name in cls.__slots__ if name != "drops"}
        drops = {str(reason): int(count) for reason, count in values.get("drops", {}).items() if count}
        return cls(**numbers, drops=drops)

    def add(self, other: "Counters") -> None:
        """Add another daemon's counters to these."""
        for name in self.__slots__:
            if name != "drops":
                setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.drops.items():
            self.drops[reason] = self.drops.get(reason, 0) + count


def total(counters: Iterable[Counters]) -> Counters:
    """The sum of several daemons' counters."""
    result = Counters()
    for one in counters:
        result.add(one)
    return result


@dataclass(frozen=True, slots=True)
class Traffic:
    """The fabric's traffic, from the counters of its nodes."""

    bytes_into_ps: int
    """everything the PS received on its data port, control packets and repetitions included"""
    bytes_without_ina: int
    """the workers' contributions alone, sent once each: the least a PS without aggregation would have
    received"""
    in_network_share: float
    """fraction of the workers' contributions that no longer reached the PS as such, having been summed on
    the way"""
    retransmissions: int
    drops: dict[str, int]
    slot_collisions: int | None = None
    """packets that found another fragment in their slot at a switch; ``None`` without one"""
    sums_by_switch: dict[str, int] = field(default_factory=dict)
    """fragments that each switch has summed, where there are several"""


def traffic(stats: Mapping[str, Counters]) -> Traffic:
    """Traffic of a fabric from ``{node name: counters}``, names as in :mod:`inanet.launch.topology`."""
    workers = total(counters for name, counters in stats.items() if name.startswith("worker"))
    ps = total(counters for name, counters in stats.items() if name.startswith("ps"))
    everybody = total(stats.values())
    contributions = workers.leaf_contributions
    switches = {name: counters.sums for name, counters in sorted(stats.items()) if name.startswith("switch")}
    return Traffic(
        bytes_into_ps=ps.rx_bytes,
        bytes_without_ina=workers.leaf_bytes,
        in_network_share=1 - ps.contributions_in / contributions if contributions else 0.0,
        retransmissions=everybody.retransmissions,
        drops=dict(sorted(everybody.drops.items())),
        slot_collisions=everybody.collisions if switches else None,
        sums_by_switch=switches if len(switches) > 1 else {},
    )
