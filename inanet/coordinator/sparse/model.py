"""The part of a sparse job whose model is kept by its servers: it begins with what all of them have.

Shards write down what an iteration has changed before anybody is told that it is finished, so they may have ended one iteration
apart: then the job begins with the earlier one. Workers get no plan before that is known.
"""

from collections.abc import Mapping
from dataclasses import replace

from inanet.coordinator.rounds import JobLost
from inanet.coordinator.sparse.hot_keys import PlanOwner, Servers
from inanet.messages.control import Kept
from inanet.messages.text import listing


class KeptModel:
    """The model of the job called ``job``."""

    def __init__(self, job: str, servers: Servers, plan: PlanOwner) -> None:
        self.name = plan.facts.sparse.model
        self._job = job
        self._servers = servers
        self._plan = plan
        #: by the shards' names
        self._parts: dict[str, Kept] = {}

    @property
    def awaited(self) -> frozenset[str]:
        """Servers that have not said what they have of the model."""
        return frozenset(self._servers.shards) - self._parts.keys()

    def kept(self, name: str, message: Kept) -> None:
        """A shard says what it has; with the last of them the job can begin. Raises :class:`~inanet.coordinator.rounds.JobLost` for
        parts that do not belong together.
        """
        facts = self._plan.facts
        if name not in self._servers.shards or facts.begin >= 0:
            return
        self._parts[name] = message
        if self.awaited:
            return
        iterations = {name: part.iteration for name, part in self._parts.items()}
        begin = min(iterations.values())
        if max(iterations.values()) > begin + 1:
            raise self._mixed("are of iterations that do not belong together", iterations)
        origins = {name: f"{part.origin:x}" for name, part in self._parts.items()}
        if begin and len(set(origins.values())) > 1:
            # without an iteration that all have, it is new
            raise self._mixed("were not begun by the same job", origins)
        how = f"that of iteration {begin}" if begin else "new"
        self._plan.publish(replace(facts, begin=begin), f"model {self.name!r} is {how}")

    def _mixed(self, how: str, parts: Mapping[str, int | str]) -> JobLost:
        """Parts of a model that are not of one: who has what."""
        listed = listing([f"{what} at {name!r}" for name, what in sorted(parts.items())])
        return JobLost(
            "unsupported",
            f"job {self._job!r}: the servers' parts of model {self.name!r} {how}: {listed}; use the servers that have trained it, "
            "under their names, or another name for the model",
        )
