"""What all parts of a node share: its memory, what it holds of its jobs, its outbox, its clock and its counters.

:class:`~inanet.proto.tree.node.Node` is built up in layers, one idea each, every one calling only those below it: this one,
:mod:`~inanet.proto.tree.rounds` (their life), :mod:`~inanet.proto.tree.sending` (what leaves),
:mod:`~inanet.proto.tree.downlink` (what leaves for several children at once), :mod:`~inanet.proto.tree.hops` (what
neighbours say), :mod:`~inanet.proto.tree.upkeep` (what time brings), and on top the node with its plans and layouts.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent
from inanet.proto.tree.engine import Count, tables_of
from inanet.proto.tree.membership import Job, ShardState
from inanet.proto.tree.reliability import Link, Timing
from inanet.proto.tree.slots import (
    GROUP,
    ShardColumn,
    SlotMemory,
    State,
)
from inanet.proto.tree.xagg.control import Outbox
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.xagg import LOST_BODY_BYTES, Kind, is_newer

#: fragments a worker encodes at a time
CHUNK = 248


class Core:
    """``capacity`` is slot memory in fragments (1052 B each); ``timing`` holds all waiting times.

    ``random`` gives numbers in [0, 1), from a generator with a seed: neighbours that lack the same packet of a multicast
    then ask for it at different times (multicast results). Without it nothing is left to chance. ``memory`` is slot memory of
    that capacity that another data path works on as well.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        timing: Timing | None = None,
        random: Callable[[], float] | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        self.name = name
        self.timing = timing or Timing()
        self.memory = memory or SlotMemory(capacity)
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self.counts: NDArray[np.int64] = np.zeros(len(Count), np.int64)
        self._tables = tables_of(self.memory)
        self._jobs: dict[int, Job] = {}
        self._by_row: dict[int, ShardState] = {}
        #: shards with a round that is not over here, by row
        self._running: dict[int, ShardState] = {}
        self._events: list[NodeEvent] = []
        self._outbox = Outbox()
        self._reported: NDArray[np.int64] = np.zeros((CHUNK + 16, 4), np.int64)
        self._used: NDArray[np.int64] = np.zeros(1, np.int64)
        self._bits: NDArray[np.uint8] = np.zeros(LOST_BODY_BYTES, np.uint8)
        self._next_timer: float | None = None
        #: the latest time this node was told: it may be left in the middle of :meth:`transmit` for seconds
        self._told = 0.0
        #: something has happened since :meth:`transmit` last found nothing more to send
        self._stirred = False
        self._random = random
        self.rows_sent = 0
        #: results sent once for several children, and results sent again, to several or to one
        self.results_multicast = self.repairs_multicast = self.repairs_unicast = 0
        self._retransmissions = 0
        #: fragments of this host's own tensors, data and exponents, each counted once
        self.leaf_contributions = 0

    # ---------------------------------------------------------------- rounds of shards

    def _is_committed(self, state: ShardState) -> bool:
        return bool(self.memory.shards[state.row, ShardColumn.COMMITTED])

    def _is_running(self, state: ShardState, round_: int) -> bool:
        return state.round == round_ and not self._is_committed(state)

    @staticmethod
    def _is_ahead(state: ShardState, round_: int) -> bool:
        """Whether a round is later than any that a shard has seen."""
        return state.round is None or is_newer(round_, state.round)

    def _is_over(self, state: ShardState, round_: int) -> bool:
        """Whether a shard will never open this round (any more)."""
        return round_ in state.dead or not is_newer(
            round_, int(self.memory.shards[state.row, ShardColumn.ACTIVE])
        )

    # ---------------------------------------------------------------- saying

    def _say(
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
        plan = state.job.plan
        self._outbox.send(
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

    def _send_restarts(
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
                self._outbox.send_restart(
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

    def _drop(self, reason: Drop) -> None:
        """A packet that the kernel has passed is of no use after all."""
        self.drops[Drop.OK] -= 1
        self.drops[reason] += 1

    def events(self) -> list[NodeEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # ---------------------------------------------------------------- time

    def _wake(self, at: float) -> None:
        if self._next_timer is None or at < self._next_timer:
            self._next_timer = at

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        return self._next_timer

    # ---------------------------------------------------------------- figures

    @property
    def lacking(self) -> int:
        """Results that the round nearest to its end still lacks here; 0 if no tensor is on its way."""
        shards = self.memory.shards
        return min(
            (
                state.shard.count - int(shards[state.row, ShardColumn.DOWN_LOGGED])
                for state in self._running.values()
                if state.data
            ),
            default=0,
        )

    @property
    def groups(self) -> frozenset[int]:
        """Endpoints of the multicast groups that must be received for this node."""
        return frozenset(
            place.parent.group
            for job in self._jobs.values()
            for place in job.plan.placements
            if place.parent is not None and place.parent.group
        )

    @property
    def jobs(self) -> int:
        """Jobs this node takes part in."""
        return len(self._jobs)

    def sends(self, job_id: int) -> bool:
        """Whether this host has something of a job that its parents lack, begun or about to begin."""
        job = self._jobs.get(job_id)
        return job is not None and any(
            state.waiting or (state.collective is not None and state.up is not None and not state.up.done)
            for state in job.shards.values()
        )

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        contributions, completed = int(self.counts[Count.CONTRIBUTIONS]), int(self.counts[Count.COMPLETED])
        return {
            "contributions_in": contributions,
            "contributions_summed": contributions - int(self.counts[Count.FIRST]),
            "fragments_completed": completed,
            "results_in": int(self.counts[Count.RESULTS]),
            "corrupt_slots": int(self.counts[Count.CORRUPT_SLOTS]),
            "leaf_contributions": self.leaf_contributions,
            "rows_sent": self.rows_sent,
            "retransmissions": self._retransmissions,
            "results_multicast": self.results_multicast,
            "repairs_multicast": self.repairs_multicast,
            "repairs_unicast": self.repairs_unicast,
            "slots_free": self.memory.free_slots(),
            "slots_total": self.memory.capacity,
        }

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped since the start, by the label of every reason."""
        return {reason.label: int(self.drops[reason]) for reason in Drop if reason is not Drop.OK}
