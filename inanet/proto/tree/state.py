"""What the parts of a node share: its slots, what it holds of its jobs, its outbox, its clock and its counters.

:class:`~inanet.proto.tree.node.Node` is made of parts that each know one thing: :class:`~inanet.proto.tree.rounds.Rounds`
their life, :class:`~inanet.proto.tree.links.Links` what leaves, :class:`~inanet.proto.tree.multicast.Groups` what leaves for
several children at once, :class:`~inanet.proto.tree.control.Control` what neighbours say and what time brings. Each is given
this state and the parts that it calls; none is called back.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, Refused
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.collective import Collective
from inanet.proto.tree.membership import Job, ShardState, Tree
from inanet.proto.tree.reliability import Link
from inanet.proto.tree.slot_engine import SlotEngine
from inanet.proto.tree.slots import GROUP, State
from inanet.proto.tree.xagg.control import Outbox
from inanet.wire.drops import Drop
from inanet.wire.xagg import Kind


class NodeState:
    """``timing`` holds all waiting times.

    ``random`` gives numbers in [0, 1), from a generator with a seed: neighbours that lack the same packet of a multicast
    then ask for it at different times (multicast results). Without it nothing is left to chance.
    """

    def __init__(
        self, name: str, slots: SlotEngine, timing: Timing, random: Callable[[], float] | None
    ) -> None:
        self.name = name
        self.slots = slots
        self.memory = slots.memory
        self.timing = timing
        self.random = random
        self.jobs: dict[int, Job] = {}
        #: shards by row, and those with a round that is not over here
        self.by_row: dict[int, ShardState] = {}
        self.running: dict[int, ShardState] = {}
        self.events: list[NodeEvent] = []
        self.outbox = Outbox()
        self.next_timer: float | None = None
        #: when credit is due that is owed; infinity: none is
        self.credit_due = math.inf
        #: changes of plans so far: links may be others
        self.plans = 0
        #: the latest time this node was told: a driver may be in the middle of sending for seconds
        self.now = 0.0
        #: something has happened since nothing more was found to send
        self.dirty = False
        #: counters since the start: rows sent; results sent once for several children; results sent again, to several or to
        #: one; all that was sent again; fragments of this host's own tensors, data and exponents, each counted once
        self.rows_sent = 0
        self.results_multicast = self.repairs_multicast = self.repairs_unicast = 0
        self.retransmissions = 0
        self.leaf_contributions = 0
        slots.bind(self.jobs, self.by_row)

    def trees(self) -> Iterator[Tree]:
        """Those of all jobs."""
        for job in self.jobs.values():
            yield from job.trees.values()

    def wake(self, at: float) -> None:
        """Have the timer called at ``at`` or before."""
        if self.next_timer is None or at < self.next_timer:
            self.next_timer = at

    def drop(self, reason: Drop) -> None:
        """A packet that the kernel has passed is of no use after all."""
        self.slots.drops[Drop.OK] -= 1
        self.slots.drops[reason] += 1

    def refuse(self, job: Job, collective: Collective) -> None:
        """This host holds what is not to be summed."""
        rank, index = collective.where_refused()
        self.events.append(Refused(job.job, collective.round, collective.state.layout.tensor, rank, index))

    def send(
        self,
        state: ShardState,
        link: Link,
        kind: Kind,
        *,
        down: bool,
        round_: int | None = None,
        gradient: int = 0,
        word0: int = 0,
        bits: NDArray[np.uint8] | None = None,
    ) -> None:
        """Queue a control packet about a shard's round, by default the one that is running."""
        plan = state.job.plan
        self.outbox.send(
            link.endpoint,
            kind,
            job=plan.job,
            key=plan.key,
            version=plan.version,
            host=link.bit,
            gradient=gradient,
            round_=(state.round or 0) if round_ is None else round_,
            shard=state.shard.shard,
            down=down,
            word0=word0,
            bits=bits,
        )

    def send_restarts(
        self, state: ShardState, link: Link, group: int, now: float, wanted: NDArray[np.bool_] | None = None
    ) -> None:
        """Tell a child which fragments of a group have begun again, those before included; ``wanted``: of these only.

        One packet for each attempt that there is, which is one but for repeated damage.
        """
        memory, plan = self.memory, state.job.plan
        first = state.slot0 + group * GROUP
        slots = slice(first, min(first + GROUP, state.slot0 + state.shard.count))
        attempts, announced = memory.attempt[slots], memory.announced[slots]
        begun = (attempts != 0) & (memory.round[slots] == state.round) & (memory.state[slots] != State.RESULT)
        if wanted is not None:
            begun &= wanted
        if not begun.any():
            return
        link.restarted[state.row, group] = now
        for attempt in np.unique(attempts[begun]).tolist():
            for same in (False, True):
                chosen = begun & (attempts == attempt) & ((announced == 0) == same)
                if not chosen.any():
                    continue
                body = np.zeros(GROUP, np.uint8)
                body[: len(chosen)][chosen] = 1 if same else announced[chosen]
                self.outbox.send_restart(
                    link.endpoint,
                    job=plan.job,
                    key=plan.key,
                    version=plan.version,
                    group=group,
                    round_=state.round or 0,
                    shard=state.shard.shard,
                    attempt=attempt,
                    same=same,
                    body=body,
                )
