"""What carries the jobs of which system: the trees of the topology, or switches with a program of that system."""

from collections.abc import Mapping

from inanet.coordinator.goat.fabric import GoatFabric
from inanet.coordinator.goat.rounds import SYSTEM
from inanet.coordinator.job import Job
from inanet.coordinator.peers import Peers
from inanet.coordinator.settings import Settings
from inanet.coordinator.sparse.fabric import SparseFabric
from inanet.coordinator.switches import Numbers, SwitchedFabric
from inanet.planning.goat.computations import Works
from inanet.planning.topology import Fabric
from inanet.proto.common.plan import Switched
from inanet.proto.slots.systems import SPARSE, SYSTEMS


class Fabrics:
    """One for each system, over the nodes among ``peers``; numbers that jobs have at switches are taken by ``jobs``."""

    def __init__(self, settings: Settings, peers: Peers, jobs: Mapping[int, Job]) -> None:
        #: where schedules are computed
        self.works = Works()
        self._trees: Fabric = settings.topology
        self._jobs = jobs
        nodes, taken = peers.nodes, self._taken
        numbers = Numbers(taken)
        #: of jobs whose parts a controller schedules over several switches
        self.scheduled = GoatFabric("goat", settings, nodes, numbers, taken, self.works)
        self._switched: dict[str, Fabric] = {
            **{system: SwitchedFabric(system, settings, nodes, numbers) for system in SYSTEMS},
            "goat": self.scheduled,
            SYSTEM: GoatFabric(SYSTEM, settings, nodes, numbers, taken, self.works),
            **{system: SparseFabric(system, settings, nodes, numbers, self._sparse) for system in SPARSE},
        }

    def of(self, system: str) -> Fabric:
        """The fabric of jobs that have chosen a system."""
        return self._switched.get(system, self._trees)

    def _facts(self) -> list[Switched]:
        return [
            job.plans.current.switched
            for job in self._jobs.values()
            if job.plans.current.switched is not None
        ]

    def _taken(self) -> set[int]:
        return {facts.number for facts in self._facts()}

    def _sparse(self) -> list[Switched]:
        return [facts for facts in self._facts() if facts.sparse is not None]
