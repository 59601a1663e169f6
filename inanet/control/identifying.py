"""A sparse job whose hot keys change while it trains: gather what its machines have counted, decide, say so in a plan.

What is decided, and from which iteration on it counts, depends on no message (:mod:`inanet.proto.zebra.identifying`). So every
message may come twice, and what was lost is asked for, or said, again with the next ping.
"""

from dataclasses import replace
from typing import Any

from inanet.control.messages import Gather, Gathered
from inanet.control.renewing import Renewing
from inanet.proto.zebra.identifying import Identification
from inanet.proto.zebra.membership import hot_of


class Identifying(Renewing):
    """What :class:`~inanet.control.job.Job` is built on, beside its epochs. Other jobs have no ``identification``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: numbers of the shards, by name, and the switch
        self._shards: dict[str, int] = {}
        self._switch = ""
        self.identification: Identification | None = None
        facts = self.planner.switched
        if facts is None or facts.sparse is None:
            return
        for name in (*self.topology.roots, *self.topology.aggregators):
            offer = self.hellos[name].services.get(facts.system)
            if offer is not None and offer.endpoint in facts.servers:
                self._shards[name] = facts.servers.index(offer.endpoint)
            elif offer is not None and offer.endpoint == facts.switch:
                self._switch = name
        sparse, shards = facts.sparse, len(facts.servers)
        if sparse.online is not None:
            hot = hot_of(facts)
            self.identification = Identification(sparse.online, shards, sparse.width, sparse.shift, hot)

    def _gathered(self, name: str, message: Gathered) -> None:
        """A machine says what it has counted."""
        its = self.identification
        if its is None or (name not in self._shards and name != self._switch):
            return
        its.take(self._shards.get(name, len(self._shards)), message.tally)
        self._ask()
        while (changed := its.decide()) is not None:
            self._settle(its, changed)
            self._ask()

    def _ask(self) -> None:
        """Ask the switch, if all shards have counted."""
        its = self.identification
        if its is not None and its.asking:
            self._send(self._switch, Gather(job=self.number, iteration=its.asking))

    def _settle(self, its: Identification, changed: bool) -> None:
        """Say what has been decided."""
        facts = self.planner.switched
        assert facts is not None
        assert facts.sparse is not None
        if not changed:
            self.planner.switched = replace(facts, decided=its.decided)
            # shards repeat themselves until they hear it
            self._inform("", self._shards)
            return
        hot = tuple(its.hot.keys.tolist())
        stay = len({*hot} & {*facts.sparse.hot})
        self.planner.switched = replace(
            facts,
            sparse=replace(facts.sparse, hot=hot),
            hot_version=its.hot.version,
            decided=its.decided,
        )
        self._advance(
            f"{len(hot)} keys are hot from iteration {its.decided + 2} on, {stay} of them were before (distance of the lists "
            f"{its.distance:.2f})"
        )

    def follows(self, name: str, version: int, nonce: int) -> None:
        """See :class:`~inanet.control.versions.Versions`. A switch that has not answered is asked again."""
        super().follows(name, version, nonce)
        if name == self._switch:
            self._ask()
