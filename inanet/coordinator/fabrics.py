"""What carries the jobs of which system: the trees of the topology, or switches with a program of that system."""

from collections.abc import Mapping

from inanet.coordinator.goat.fabric import GoatFabric
from inanet.coordinator.job import Job
from inanet.coordinator.peers import Peers
from inanet.coordinator.settings import Settings
from inanet.coordinator.sparse.fabric import SparseFabric
from inanet.coordinator.switches import Numbers, SwitchedFabric
from inanet.planning.goat.computations import Works
from inanet.planning.topology import Fabric
from inanet.proto.common.plan import SwitchedJob
from inanet.proto.slots.systems import SYSTEMS, FabricKind
from inanet.proto.zebra.plan import ZebraJob


class Fabrics:
    """One for each system, over the nodes among ``peers``; numbers that jobs have at switches are taken by ``jobs``."""

    def __init__(self, settings: Settings, peers: Peers, jobs: Mapping[int, Job]) -> None:
        #: where schedules are computed
        self.works = Works()
        self._trees: Fabric = settings.topology
        self._jobs = jobs
        nodes, taken = peers.nodes, self._taken
        numbers = Numbers(taken)

        def fabric(system: str) -> Fabric:
            match SYSTEMS[system].fabric:
                case FabricKind.SCHEDULED:
                    return GoatFabric(system, settings, nodes, numbers, taken, self.works)
                case FabricKind.SHARDED:
                    return SparseFabric(system, settings, nodes, numbers, self._sparse)
                case FabricKind.ONE_SWITCH:
                    return SwitchedFabric(system, settings, nodes, numbers)

        self._switched = {system: fabric(system) for system in SYSTEMS}

    def of(self, system: str) -> Fabric:
        """The fabric of jobs that have chosen a system."""
        return self._switched.get(system, self._trees)

    def scheduled(self, system: str) -> GoatFabric | None:
        """The fabric of a system, if it can schedule a running job anew."""
        found = self._switched[system]
        return found if isinstance(found, GoatFabric) else None

    def _facts(self) -> list[SwitchedJob]:
        return [
            job.plans.current.switched
            for job in self._jobs.values()
            if job.plans.current.switched is not None
        ]

    def _taken(self) -> set[int]:
        return {facts.number for facts in self._facts()}

    def _sparse(self) -> list[ZebraJob]:
        return [job for job in self._facts() if isinstance(job, ZebraJob)]
