"""The part of a sparse job that finds hot keys while it trains: gather what its machines have counted, decide, publish a plan.

What is decided, and from which iteration on it counts, depends on no message (:mod:`inanet.proto.zebra.hot`). So every
message may come twice, and what was lost is asked for, or said, again with the next ping.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from inanet.messages.control import Gather, Gathered, Hello, Message
from inanet.proto.zebra.hot import Identification
from inanet.proto.zebra.job import hot_of
from inanet.proto.zebra.plan import ZebraJob


@dataclass(frozen=True, slots=True)
class Servers:
    """The machines of a sparse job: the numbers of its ``shards`` by the names of their servers, and the name of its ``switch``."""

    shards: Mapping[str, int]
    switch: str

    @classmethod
    def of(cls, facts: ZebraJob, names: Collection[str], hellos: Mapping[str, Hello]) -> "Servers":
        """Those among the nodes ``names`` whose services ``facts`` names."""
        services = {name: hellos[name].services.get(facts.system) for name in names}
        ends = {name: service.endpoint for name, service in services.items() if service is not None}
        shards = {name: facts.servers.index(end) for name, end in ends.items() if end in facts.servers}
        switches = [name for name, end in ends.items() if name not in shards and end == facts.switch]
        return cls(shards, switches[0] if switches else "")


class PlanOwner(Protocol):
    """The job, as its parts know it."""

    @property
    def facts(self) -> ZebraJob:
        """What the current plan says."""
        ...

    def publish(self, facts: ZebraJob, reason: str, only: Collection[str] | None = None) -> None:
        """Make and send the next version of the plan; ``only`` to these nodes, without an event, if it concerns nobody else."""
        ...


class HotKeys:
    """``send(name, message)`` sends a message to a member of job ``number``."""

    def __init__(
        self, number: int, servers: Servers, plan: PlanOwner, send: Callable[[str, Message], None]
    ) -> None:
        facts = plan.facts
        sparse = facts.sparse
        assert sparse.online is not None
        self.identification = Identification(
            sparse.online, len(facts.servers), sparse.width, sparse.shift, hot_of(facts)
        )
        self._number = number
        self._servers = servers
        self._plan = plan
        self._send = send

    def gathered(self, name: str, message: Gathered) -> None:
        """A machine says what it has counted."""
        shards, identification = self._servers.shards, self.identification
        if name not in shards and name != self._servers.switch:
            return
        identification.take(shards.get(name, len(shards)), message.tally)
        self._ask()
        while (changed := identification.decide()) is not None:
            self._settle(changed)
            self._ask()

    def answered(self, name: str) -> None:
        """A member has answered a ping: the switch is asked again for what it has not said."""
        if name == self._servers.switch:
            self._ask()

    def _ask(self) -> None:
        """Ask the switch, if all shards have counted."""
        if iteration := self.identification.asking:
            self._send(self._servers.switch, Gather(job=self._number, iteration=iteration))

    def _settle(self, changed: bool) -> None:
        """Publish what has been decided."""
        facts, identification = self._plan.facts, self.identification
        decided = identification.decided
        if not changed:
            # shards repeat themselves until they hear it
            self._plan.publish(replace(facts, decided=decided), "", self._servers.shards)
            return
        sparse = facts.sparse
        hot = tuple(identification.hot.keys.tolist())
        stay = len({*hot} & {*sparse.hot})
        version = identification.hot.version
        self._plan.publish(
            replace(facts, sparse=replace(sparse, hot=hot), hot_version=version, decided=decided),
            f"{len(hot)} keys are hot from iteration {decided + 2} on, {stay} of them were before (distance of the lists "
            f"{identification.distance:.2f})",
        )
