"""XAgg's nodes in a simulated network: the plans and rounds of the in-memory fabric, on links with rates.

>>> fabric = SimulatedFabric({"ps": None, "w0": "ps", "w1": "ps"}, ranks={"w0": [0], "w1": [1]}, link=LinkSpec(rate=1e9))
>>> seconds = fabric.all_reduce(spec, {0: a, 1: b})
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from numpy.typing import NDArray

from inanet.proto.common.plan import TensorSpec
from inanet.proto.common.recovery import Timing
from inanet.sim.link import LinkSpec
from inanet.sim.network import Network
from inanet.testing.fabric import VirtualFabric


class SimulatedFabric:
    """``parents`` and ``ranks`` as for :class:`~inanet.testing.fabric.VirtualFabric`, all nodes around one switch.

    ``link`` joins a node to the switch, ``links`` has other ones by name, each in both directions; ``down`` is what the
    switch sends to a node over, by default the same. ``network`` and ``switch`` put the nodes somewhere else: a network
    that is built already and the switch that each node is plugged into.
    """

    def __init__(
        self,
        parents: Mapping[str, str | None],
        ranks: Mapping[str, Sequence[int]],
        *,
        link: LinkSpec,
        links: Mapping[str, LinkSpec] | None = None,
        down: LinkSpec | None = None,
        network: Network | None = None,
        switch: Mapping[str, str] | None = None,
        capacity: int = 8192,
        window: int = 512,
        timing: Timing | None = None,
        downlink: Literal["unicast", "multicast", "auto"] = "unicast",
        seed: int = 0,
    ) -> None:
        self.plans = VirtualFabric(
            parents, ranks, capacity=capacity, window=window, timing=timing, downlink=downlink
        )
        self.network = network or Network(seed)
        # both keep the same time
        self.network.clock = self.plans.clock
        self.network.log = self.plans.log
        if switch is None:
            self.network.add_switch("switch")
        for name in self.plans.nodes:
            self.network.add_host(name, self.plans.devices[name].endpoint, self.plans.nodes[name])
            spec = (links or {}).get(name, link)
            where = "switch" if switch is None else switch[name]
            self.network.connect(name, where, _unbounded(spec), down or spec)
            for group in self.plans.nodes[name].groups:
                self.network.join(group, name)

    def begin(
        self, spec: TensorSpec, arrays: Mapping[int, NDArray[Any]], workers: Sequence[str] | None = None
    ) -> int:
        """Start a round at some workers (default: all) at this instant; returns its number."""
        round_ = self.plans.begin(spec, arrays, workers)
        self.network.wake(*(self.plans.ranks if workers is None else workers))
        return round_

    def all_reduce(
        self, spec: TensorSpec, arrays: Mapping[int, NDArray[Any]], *, deadline: float = 60.0
    ) -> float:
        """One round from begin to done on every worker; returns its virtual seconds, the arrays hold the result."""
        began = self.network.now
        round_ = self.begin(spec, arrays)
        self.network.run(lambda: self.plans.done(round_), deadline=deadline)
        return self.network.now - began


def _unbounded(spec: LinkSpec) -> LinkSpec:
    """A host's own queue does not drop: its sender waits. It does not mark either."""
    return LinkSpec(spec.rate, spec.delay, None, None, spec.loss, spec.overhead, spec.grain)
