"""Jobs whose sums are made in a switch: which switch, under which number, with how many slots.

Such a job's tree is the switch below the parameter server and all workers below the switch. It is whole or it is over: a
switch that is lost takes sums along that nobody else has.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from inanet.coordinator.layouts import FormatFacts
from inanet.coordinator.settings import FormatOf, Settings
from inanet.messages.control import Hello
from inanet.messages.services import Service
from inanet.messages.text import listing
from inanet.planning.topology import Arrangement, Topology, TopologyError
from inanet.proto.common.plan import MAX_WORKERS, Fold, NodePlan, TensorJob, TensorSpec, Terms
from inanet.proto.slots.systems import EXPONENTS, SYSTEMS

#: numbers of jobs in framings
_NUMBERS = range(1, 256)
#: tensors of a job in all its life, because framings number them with 16 bits
MOST_TENSORS = 1 << 16


class Numbers:
    """Numbers of jobs in framings. One that was used comes again after all others, when nothing under it is on its way."""

    def __init__(self, taken: Callable[[], Collection[int]]) -> None:
        self._taken = taken
        self._last = 0

    @property
    def left(self) -> bool:
        """Whether there is one that no job has."""
        return len(self._taken()) < len(_NUMBERS)

    def next(self) -> int:
        """A number that no job has; there must be one :attr:`left`."""
        taken = self._taken()
        while True:
            self._last = self._last % len(_NUMBERS) + 1
            if self._last not in taken:
                return self._last


def refusal(settings: Settings, name: str) -> str:
    """Why a switch of this name cannot take part; empty if it can."""
    if settings.any_switch or name in settings.switches:
        return ""
    return f"switch {name!r} is not in the topology; it has {listing(settings.switches) or 'none'}"


class SwitchedFabric:
    """The :class:`~inanet.planning.topology.Fabric` of jobs that have chosen ``system``. ``nodes()`` are the switches and
    servers that are connected.
    """

    def __init__(
        self, system: str, settings: Settings, nodes: Callable[[], Mapping[str, Hello]], numbers: Numbers
    ) -> None:
        self.system = system
        self._settings = settings
        self._nodes = nodes
        self._numbers = numbers

    @property
    def switches(self) -> tuple[str, ...]:
        """Switches that jobs may use, in order of preference: those of the configuration, others as far as they are there."""
        known = self._settings.switches
        if not self._settings.any_switch:
            return known
        there = (name for name, hello in self._nodes().items() if hello.role == "switch")
        return (*known, *sorted(name for name in there if name not in known))

    def refusal(self, role: str, name: str) -> str:
        return refusal(self._settings, name) if role == "switch" else ""

    def fits(self, workers: Collection[str]) -> None:
        if not (self._settings.switches or self._settings.any_switch):
            raise TopologyError([f"{self.system} needs a switch and there is none under topology.switches"])
        if len(workers) > MAX_WORKERS:
            raise TopologyError(
                [f"{len(workers)} hosts, and framings of switches have room for {MAX_WORKERS}"]
            )

    def _service(self, node: str, name: str) -> Service | None:
        hello = self._nodes().get(node)
        return None if hello is None else hello.services.get(name)

    def _switch(self) -> str | None:
        """The first switch that runs the system."""
        return next((s for s in self.switches if self._service(s, self.system) is not None), None)

    def _root(self) -> str | None:
        """A parameter server for it."""
        needs = SYSTEMS[self.system].services(self.system)
        servers = [name for name, hello in self._nodes().items() if hello.role != "switch"]
        return next((s for s in servers if all(self._service(s, need) is not None for need in needs)), None)

    def awaited(self, workers: Collection[str], connected: Collection[str]) -> tuple[str, ...]:
        words = []
        if self._switch() is None:
            there = [name for name in self.switches if name in connected]
            names = listing(there or self._settings.switches) or "none is connected"
            words.append(f"a switch that runs {self.system} ({names}{' does not' if there else ''})")
        if self._root() is None:
            words.append("a parameter server that serves jobs on switches")
        if not self._numbers.left:
            words.append(f"one of {len(_NUMBERS)} jobs on switches to end")
        return tuple(words)

    def arrange(self, workers: Mapping[str, Hello], connected: Collection[str]) -> Arrangement:
        switch, root = self._switch(), self._root()
        assert switch is not None
        assert root is not None
        topology = Topology(
            roots=(root,), aggregators={switch: root}, workers=dict.fromkeys(workers, (switch,)), whole=True
        )
        offer, server = self._service(switch, self.system), self._service(root, self.system)
        exponents = self._service(root, EXPONENTS)
        assert offer is not None
        assert exponents is not None
        hellos = [workers[name] for name in sorted(workers)]
        # answers to a whole window may reach a worker at once
        window = min(self._settings.switch_window, *(hello.rx_window for hello in hellos))
        job = SYSTEMS[self.system].load_job()
        assert issubclass(job, TensorJob)
        terms = Terms(
            results=offer.endpoint if server is None or offer.relays else server.endpoint,
            ps=0 if server is None else server.endpoint,
            exponents=exponents.endpoint,
            window=window,
            slots=min(offer.slots, window) if offer.own else offer.slots,
            own=offer.own,
            quota=offer.quota,
            values=offer.values,
            rings=min(offer.rings, *(max(1, len(hello.ranks)) for hello in hellos)),
        )
        workers_at = tuple(hello.endpoint for hello in hellos)
        facts = job.on(self.system, self._numbers.next(), workers_at, offer.endpoint, terms)
        rings = f" in {terms.rings} rings" if terms.rings > 1 else ""
        return Arrangement(topology, f"{self.system} on switch {switch!r}{rings}", facts)

    def recall(self, plans: Mapping[str, NodePlan], workers: Collection[str]) -> Topology | None:
        """See :class:`~inanet.planning.topology.Fabric`. Nobody resumes such a job."""
        return None


@dataclass(frozen=True, slots=True)
class _Nowhere:
    """Facts about a format whose tensors have no slots of their own."""

    fragments: int = 0
    exponent_fragments: int = 0
    fold: Fold = Fold.SUM


def sums_only(format_of: FormatOf) -> FormatOf:
    """Facts for jobs on switches: no slots of a tensor's own, and ``ValueError`` for what switches do not do."""

    def facts(spec: TensorSpec, ranks: int) -> FormatFacts:
        if format_of(spec, ranks).fold is not Fold.SUM:
            raise ValueError(
                f"tensor {spec.name!r}: switches add, {spec.op} of {spec.dtype} needs an aggregator that compares"
                " (system xagg)"
            )
        return _Nowhere()

    return facts
