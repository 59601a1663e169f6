"""A job's switches where several sum for it, and who schedules its tensors on them."""

from collections.abc import Callable, Collection, Mapping

from inanet.coordinator.settings import Settings
from inanet.coordinator.switches import Numbers, SwitchedFabric
from inanet.messages.control import Hello
from inanet.messages.services import Service
from inanet.messages.text import listing
from inanet.planning.extras import plan_extra
from inanet.planning.goat.computations import Works
from inanet.planning.goat.publication import Draft, Memory, Publish, Publisher
from inanet.planning.topology import Arrangement, Topology, TopologyError
from inanet.proto.common.formats import make_format
from inanet.proto.common.plan import MAX_WORKERS, TensorSpec
from inanet.proto.slots.goat.job import GoatJob, sites
from inanet.proto.slots.stream import words_of
from inanet.proto.slots.systems import EXPONENTS, SYSTEMS
from inanet.wire.goat import MAX_NODES, VALUES


def ways(links: Collection[tuple[str, str]], ps: str, switches: Collection[str]) -> dict[str, str]:
    """Every node's neighbour towards the PS, along shortest ways; only switches pass anything on.

    Of equally short ways the one over the neighbour that stands first in ``links`` is taken.
    """
    near: dict[str, list[str]] = {}
    for one, other in links:
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    parents: dict[str, str] = {}
    queue = [ps]
    for node in queue:
        for neighbour in near.get(node, []):
            if neighbour != ps and neighbour not in parents:
                parents[neighbour] = node
                if neighbour in switches:
                    queue.append(neighbour)
    return parents


def upwards(parents: Mapping[str, str], node: str) -> list[str]:
    """The nodes between one and the PS, nearest first, the PS last."""
    path = []
    while node in parents:
        node = parents[node]
        path.append(node)
    return path


class GoatFabric(SwitchedFabric):
    """The switches on the ways of the workers take part. All that are configured have to have been there once; from then
    on jobs use those that are there. A job that loses one, or could have one more, is scheduled anew (:meth:`rearrange`). ``links`` in
    the settings say who is plugged in where; without them everything is at the first switch, the other switches included.
    """

    def __init__(
        self,
        system: str,
        settings: Settings,
        nodes: Callable[[], Mapping[str, Hello]],
        numbers: Numbers,
        numbers_taken: Callable[[], Collection[int]],
        works: Works | None = None,
    ) -> None:
        super().__init__(system, settings, nodes, numbers)
        self._memory = Memory()
        self._taken = numbers_taken
        self._works = works or Works()
        #: switches that have run the system at some time
        self._met: set[str] = set()

    def _service(self, node: str, name: str) -> Service | None:
        """Of switches those that send everything in their own name, as they do over UDP: the next one knows its neighbours."""
        found = super()._service(node, name)
        passes_names_on = found is not None and node in self.switches and not found.relays
        return None if passes_names_on and name == self.system else found

    def _usable(self, avoided: Collection[str] = ()) -> tuple[str, ...]:
        """Switches that run the system now, in order of preference."""
        return tuple(
            name
            for name in self.switches
            if name not in avoided and self._service(name, self.system) is not None
        )

    def _parents(
        self, ps: str, workers: Collection[str], switches: tuple[str, ...], needed: Collection[str] = ()
    ) -> dict[str, str]:
        """Everybody's neighbour towards the PS over these switches; those without a way are left out.

        Raises :class:`TopologyError` for workers, and ``needed`` switches, without one.
        """
        if not switches:
            raise TopologyError([f"no switch runs {self.system}"])
        links = self._settings.links
        if not links:
            others = tuple(name for name in self.switches if name != self.switches[0])
            links = tuple((self.switches[0], name) for name in (ps, *others, *workers))
        parents = ways(links, ps, switches)
        lost = [name for name in (*needed, *workers) if name not in parents]
        problems = [f"topology.links: {name!r} has no way to the PS {ps!r} over switches" for name in lost]
        first = [name for name in parents.values() if name == ps]
        strays = [name for name in parents if parents[name] == ps and name not in switches]
        problems += [
            f"topology.links: {name!r} is at the PS itself; it belongs to a switch" for name in strays
        ]
        if len(first) > 1 and not strays:
            problems.append(f"topology.links: {len(first)} switches are at the PS {ps!r}; one may be")
        if len(switches) >= MAX_NODES:
            problems.append(f"{len(switches)} switches; at most {MAX_NODES - 1} can be numbered")
        if problems:
            raise TopologyError(problems)
        return parents

    def fits(self, workers: Collection[str]) -> None:
        super().fits(workers)
        if len(workers) > MAX_WORKERS:
            raise TopologyError([f"{len(workers)} hosts; bitmaps have room for {MAX_WORKERS}"])
        try:
            plan_extra("scipy.optimize", "the GOAT scheduler")
            plan_extra("networkx", "a topology for the GOAT scheduler")
        except ImportError as error:
            raise TopologyError([str(error)]) from error
        root = self._root()
        if root is not None and self.switches:
            self._parents(root, workers, self.switches, needed=self.switches)

    def awaited(self, workers: Collection[str], connected: Collection[str]) -> tuple[str, ...]:
        usable, root = self._usable(), self._root()
        self._met |= set(usable)
        missing = [name for name in self.switches if name not in self._met]
        words = [f"switches that run {self.system} over UDP: {listing(missing)}"] if missing else []
        if not self.switches:
            words.append(f"a switch that runs {self.system} (none is connected)")
        if root is None:
            words.append("a parameter server that serves jobs on switches")
        elif usable and not words and not self._leads(root, workers, usable):
            gone = [name for name in self.switches if name not in usable]
            words.append(f"switches on the ways of workers: {listing(gone)}")
        if not self._numbers.left:
            words.append("one of 255 jobs on switches to end")
        return tuple(words)

    def _leads(self, root: str, workers: Collection[str], switches: tuple[str, ...]) -> bool:
        """Whether all workers have a way over these switches."""
        try:
            self._parents(root, workers, switches)
        except TopologyError:
            return False
        return True

    def arrange(self, workers: Mapping[str, Hello], connected: Collection[str]) -> Arrangement:
        return self._arrange(workers, self._usable())

    def rearrange(
        self,
        workers: Mapping[str, Hello],
        number: int,
        avoided: Collection[str],
        current: Topology | None = None,
    ) -> Arrangement | None:
        """What running job ``number`` gets instead of what it has, which is free with that; None if it cannot go on, or would
        only get the ``current`` trees again. Without ``avoided`` switches, and over all others that are there by now.
        """
        root, usable = self._root(), self._usable(avoided)
        if root is None or not self._numbers.left or not self._leads(root, workers, usable):
            return None
        if self._tree(root, sorted(workers), usable) == current:
            return None
        self._memory.keep(set(self._taken()) - {number})
        return self._arrange(workers, usable)

    def _tree(self, root: str, workers: list[str], usable: tuple[str, ...]) -> Topology:
        """The ways of the workers over these switches. Raises :class:`TopologyError` as :meth:`_parents` does."""
        parents = self._parents(root, workers, usable)
        # plans are for the nodes of the tree: a switch that no worker is behind would not hear of the job
        above = {name for worker in workers for name in upwards(parents, worker)}
        return Topology(
            roots=(root,),
            aggregators={name: parents[name] for name in usable if name in above},
            workers={name: (parents[name],) for name in workers},
            whole=True,
        )

    def _arrange(self, workers: Mapping[str, Hello], usable: tuple[str, ...]) -> Arrangement:
        root = self._root()
        assert root is not None
        names = sorted(workers)
        topology = self._tree(root, names, usable)
        switches = tuple(topology.aggregators)
        parents = {**topology.aggregators, **{name: its[0] for name, its in topology.workers.items()}}
        offers = {name: self._offer(name) for name in switches}
        server, exponents = self._service(root, self.system), self._service(root, EXPONENTS)
        assert server is not None
        assert exponents is not None
        endpoints = {name: its.endpoint for name, its in offers.items()}
        endpoints |= {root: server.endpoint, **{name: workers[name].endpoint for name in names}}
        found, entries = sites(parents, switches, names, endpoints)
        window = min(self._settings.switch_window, *(workers[name].rx_window for name in names))
        (first,) = (name for name in switches if parents[name] == root)
        job = SYSTEMS[self.system].load_job()
        assert issubclass(job, GoatJob)
        facts = job(
            system=self.system,
            number=self._numbers.next(),
            workers=tuple(workers[name].endpoint for name in names),
            switch=endpoints[first],
            ps=server.endpoint,
            results=endpoints[first],
            exponents=exponents.endpoint,
            window=window,
            sites=found,
            entries=entries,
        )
        publish = self._publish(
            facts.number, parents, root, switches, names, {n: s.slots for n, s in offers.items()}
        )
        return Arrangement(topology, f"{self.system} over {listing(switches)}", facts, publish)

    def _offer(self, name: str) -> Service:
        service = self._service(name, self.system)
        assert service is not None
        return service

    def _publish(
        self,
        number: int,
        parents: Mapping[str, str],
        root: str,
        switches: tuple[str, ...],
        workers: list[str],
        slots: Mapping[str, int],
    ) -> Publish:
        self._memory.keep(set(self._taken()))
        publisher = Publisher(number, parents, root, switches, workers, slots, self._memory, seed=number)

        def draft(spec: TensorSpec, ranks: int) -> Draft:
            return Draft(publisher, [(spec.name, -(-words_of(make_format(spec, ranks)) // VALUES))])

        return Publish(draft, self._works)
