"""Sparse jobs (Zebra) in a fabric: every rank is a node by itself, a switch sums hot keys, PSs are the shards.

Such a job has no tensors and no rounds. It is whole or it is over, as all jobs on switches: one that loses a rank, the switch or
a shard has lost gradients, or a part of the model, that nobody else has.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from inanet.coordinator.members import Members, Rejection
from inanet.coordinator.settings import Settings
from inanet.coordinator.switches import Numbers, SwitchedFabric
from inanet.messages.control import Hello
from inanet.messages.services import Service
from inanet.messages.text import listing
from inanet.planning.topology import Arrangement, Topology, TopologyError
from inanet.proto.slots.systems import SYSTEMS, sparse_systems
from inanet.proto.zebra.job import UNIT, register_bytes
from inanet.proto.zebra.plan import Sparse, ZebraJob
from inanet.wire.xagg import MAX_CHILDREN


def check_sparse(hello: Hello, members: Members) -> None:
    """Raise :class:`~inanet.coordinator.members.Rejection` for a rank that does not say what its sparse job is, or not what the other
    ranks say.
    """
    sparse = hello.system in SYSTEMS and not SYSTEMS[hello.system].has_tensors
    if sparse is not (hello.sparse is not None):
        raise Rejection(
            f"{hello.name!r} of job {hello.job!r} has system {hello.system}: jobs that push and pull keys have "
            f"{listing(sparse_systems())}, all others have tensors; ranks join the one by inanet.join_sparse, the other by inanet.connect"
        )
    if hello.sparse is None:
        return
    if len(hello.ranks) != 1:
        raise Rejection(
            f"{hello.name!r} brings {len(hello.ranks)} ranks; each of a sparse job joins by itself"
        )
    if hello.world > MAX_CHILDREN:
        # now, and not when so many have come that one too many is among them
        raise Rejection(
            f"job {hello.job!r} has {hello.world} ranks, and a sparse job has at most {MAX_CHILDREN}"
        )
    for other in members.hellos.values():
        if other.sparse is not None and other.sparse != hello.sparse:
            raise Rejection(
                f"job {hello.job!r} was started with other {_difference(hello.sparse, other.sparse)} on {other.name!r} than on "
                f"{hello.name!r}; give all ranks the same file"
            )


def _difference(one: Sparse, other: Sparse) -> str:
    """The first field in which two differ, with its values where these are short."""
    name = next(name for name in one.__dataclass_fields__ if getattr(one, name) != getattr(other, name))
    if name == "hot":
        return f"hot keys ({len(other.hot)} and {len(one.hot)})"
    return f"{name} ({getattr(other, name)} and {getattr(one, name)})"


class SparseFabric(SwitchedFabric):
    """``running()`` are the sparse jobs that have started, for what they have of a switch's registers."""

    def __init__(
        self,
        system: str,
        settings: Settings,
        nodes: Callable[[], Mapping[str, Hello]],
        numbers: Numbers,
        running: Callable[[], Collection[ZebraJob]],
    ) -> None:
        super().__init__(system, settings, nodes, numbers)
        self._running = running

    def refusal(self, role: str, name: str) -> str:
        """See :class:`~inanet.planning.topology.Fabric`: ranks are no nodes of any tree."""
        return "" if role == "worker" else super().refusal(role, name)

    def fits(self, workers: Collection[str]) -> None:
        if not (self._settings.switches or self._settings.any_switch):
            raise TopologyError([f"{self.system} needs a switch and there is none under topology.switches"])
        if len(workers) > MAX_CHILDREN:
            raise TopologyError([f"{len(workers)} ranks, and a plan has room for {MAX_CHILDREN}"])

    def _clash(self, workers: Collection[str]) -> str:
        """Two that have one name, which a plan tells nobody apart by: ranks do not register. Empty if there are none."""
        nodes = self._nodes()
        name = min(nodes.keys() & set(workers), default="")
        return f"{name!r} is a {nodes[name].role} and a rank; change node.name of one" if name else ""

    # ---------- what there is

    def _free(self, service: Service) -> int:
        """Bytes of registers that no job has."""
        taken = [job for job in self._running() if job.switch == service.endpoint]
        return UNIT * (service.slots - sum(job.pieces for job in taken))

    def _able(self, sparse: Sparse, ranks: int) -> str | None:
        """The first switch that has room for as many hot keys as there can be. What it sends to everybody has its own address only over UDP."""
        needed = UNIT * pieces(sparse, ranks)
        for name in self.switches:
            service = self._service(name, self.system)
            if service is not None and service.relays and self._free(service) >= needed:
                return name
        return None

    def _servers(self, sparse: Sparse) -> tuple[str, ...]:
        """Parameter servers that can be shards, the coordinator's own first; in the order of their names if they keep a model, so
        that each gets its part again.
        """
        servers: dict[int, str] = {}
        for name, hello in sorted(self._nodes().items()) if sparse.model else self._nodes().items():
            service = self._service(name, self.system)
            if hello.role != "switch" and service is not None and (service.keeps or not sparse.model):
                # whoever names another's address gets nothing
                servers.setdefault(service.endpoint, name)
        return tuple(servers.values())

    def awaited(self, workers: Collection[str], connected: Collection[str]) -> tuple[str, ...]:
        """See :class:`~inanet.planning.topology.Fabric`; ``workers`` are Hellos by name."""
        sparse, ranks = _chosen(workers)
        if sparse is None:
            return ()
        words = [f"a name for each: {clash}"] if (clash := self._clash(workers)) else []
        if self._able(sparse, ranks) is None:
            words.append(self._no_switch(sparse, ranks))
        servers = self._servers(sparse)
        if len(servers) < sparse.shards:
            more = sparse.shards - len(servers)
            what = "models (node.models)" if sparse.model else "keys (node.transport udp or packet)"
            words.append(
                f"{more} more parameter server{'s' * (more > 1)} that keep{'s' * (more == 1)} {what}, "
                f"for {sparse.shards} shard{'s' * (sparse.shards > 1)}"
            )
        if not self._numbers.left:
            words.append("one of 255 jobs on switches to end")
        return tuple(words)

    def _no_switch(self, sparse: Sparse, ranks: int) -> str:
        """Why no switch will do, in words."""
        there = {name: self._service(name, self.system) for name in self.switches}
        rooms = [
            f"{name} has {self._free(one)} of {UNIT * one.slots} B"
            for name, one in there.items()
            if one is not None and one.relays
        ]
        if not rooms:
            return (
                f"a switch that runs {self.system} over UDP ({listing(self.switches) or 'none is connected'})"
            )
        need = f"{most(sparse)} hot keys need {UNIT * pieces(sparse, ranks)} B of registers"
        return f"room in a switch: {need}, {listing(rooms)}"

    # ---------- what a job gets

    def arrange(self, workers: Mapping[str, Hello], connected: Collection[str]) -> Arrangement:
        sparse, ranks = _chosen(workers)
        assert sparse is not None
        switch = self._able(sparse, ranks)
        assert switch is not None
        servers = self._servers(sparse)[: sparse.shards]
        # servers in a row above the switch: whoever is lost, all are told
        above = dict(zip(servers[1:], servers, strict=False))
        topology = Topology(
            roots=(servers[0],),
            aggregators={**above, switch: servers[-1]},
            workers=dict.fromkeys(workers, (switch,)),
            whole=True,
        )
        offer = self._service(switch, self.system)
        assert offer is not None
        places = [found for name in servers if (found := self._service(name, self.system)) is not None]
        pairs = min(sparse.hot_pairs, offer.values) if offer.values else sparse.hot_pairs
        facts = ZebraJob(
            system=self.system,
            number=self._numbers.next(),
            workers=tuple(one.endpoint for one in sorted(workers.values(), key=lambda one: one.ranks)),
            switch=offer.endpoint,
            sparse=replace(sparse, hot_pairs=pairs),
            servers=tuple(place.endpoint for place in places),
            pieces=pieces(sparse, ranks),
            hot_version=1 if sparse.hot else 0,
        )
        reason = f"{self.system} on switch {switch!r}, {listing(map(repr, servers))} as shards"
        return Arrangement(topology, reason, facts)


def pieces(sparse: Sparse, ranks: int) -> int:
    """Pieces of :data:`UNIT` bytes of registers that a job takes."""
    count = most(sparse)
    # laid out by heat: so many slots of every register
    slots = sparse.registers * -(-count // sparse.registers)
    return max(1, -(-register_bytes(ranks, sparse.width, count, slots) // UNIT))


def most(sparse: Sparse) -> int:
    """Most keys that can be hot as long as the job runs."""
    return max(len(sparse.hot), 0 if sparse.online is None else sparse.online.most(sparse.width))


def _chosen(workers: Collection[str]) -> tuple[Sparse | None, int]:
    """What the ranks have chosen, and how many there will be."""
    hellos = list(workers.values()) if isinstance(workers, Mapping) else []
    return next(((one.sparse, one.world) for one in hellos if one.sparse is not None), (None, 0))
