"""A worker's host in a job on a switch, as a node: plans make it a worker of the job's system, rounds reach it in order.

The systems number fragments over all rounds of a job, so every host must begin the same rounds in the same order, while
layouts of new tensors may reach one host later than another. Rounds are therefore held back until all before them have been
begun, or have failed without anybody beginning them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import NodeEvent, PeerSilent, Refused, RoundDone
from inanet.proto.common.plan import NodePlan, TensorJob, TensorLayout
from inanet.proto.common.recovery import Timing
from inanet.proto.common.refusal import NoRoom
from inanet.proto.slots.systems import SYSTEMS
from inanet.proto.slots.worker import Membership, Worker
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop


class SwitchedHost:
    """One job. ``endpoint`` is where it sends from and receives: the job's own, by which the switch knows it (bound endpoints).
    ``options`` are what this host has to say about workers of a system, by the system's name.
    """

    def __init__(
        self, endpoint: int, timing: Timing, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        self.endpoint = endpoint
        self._timing = timing
        self._options = options or {}
        self._plan: NodePlan | None = None
        self._worker: Worker | None = None
        self._next = 1
        #: rounds that wait for earlier ones: tensor and arrays
        self._early: dict[int, tuple[int, Sequence[NDArray[Any]]]] = {}
        #: rounds that failed: before they were begun here, and after
        self._skipped: set[int] = set()
        self._failed: set[int] = set()
        self._strangers: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._past: dict[str, int] = {}

    # ---------------------------------------------------------------- plans

    def apply(self, plan: NodePlan, now: float, *, attach: Collection[int] = ()) -> None:
        """Become the job's worker; later versions have nothing that concerns it, but a plan that comes after the job was
        dropped does: its switches have changed, and everything is numbered anew.
        """
        job = plan.switched
        assert isinstance(job, TensorJob), "a plan without a switch"
        if self._worker is None:
            index = job.workers.index(self.endpoint)
            switch, results = job.way(index)
            member = Membership(
                job.number,
                index,
                len(job.workers),
                plan.ranks,
                switch,
                results,
                root=job.exponents,
                key=plan.key,
            )
            self._worker = SYSTEMS[job.system].make_worker(
                member, job, self._timing, **self._options.get(job.system, {})
            )
        self._plan = plan

    def add_layout(self, job_id: int, layout: TensorLayout, last_round: int = 0) -> None:
        """Know a tensor. Raises :class:`~inanet.proto.common.refusal.NoRoom` for numbers that framings have no room for."""
        assert self._worker is not None
        if layout.tensor > 0xFFFF:
            raise NoRoom("a job on a switch has 65536 tensors in its life")
        self._worker.add_tensor(layout.tensor, layout.spec)
        self._worker.schedule(layout.tensor, layout.scheduled)

    def drop_layout(self, job_id: int, tensor: int) -> None:
        if self._worker is not None:
            self._worker.drop_tensor(tensor)

    def drop_job(self, job_id: int) -> None:
        """Send nothing any more; figures stay."""
        self._past, self._strangers = {**self.stats(), "jobs": 0}, self._drops()
        self._worker = None
        self._early.clear()

    # ---------------------------------------------------------------- rounds

    def begin(
        self, job_id: int, tensor: int, round_: int, arrays: Sequence[NDArray[Any]], now: float
    ) -> None:
        """Begin a round, as soon as all before it have been begun."""
        if round_ >= self._next:
            self._early[round_] = tensor, arrays
            self._turn(now)

    def _turn(self, now: float) -> None:
        while self._worker is not None:
            if self._next in self._early:
                tensor, arrays = self._early.pop(self._next)
                self._worker.begin(tensor, self._next, arrays, now)
            elif self._next in self._skipped:
                self._skipped.discard(self._next)
            else:
                return
            self._next += 1

    def fail_round(self, job_id: int, round_: int, tensors: Sequence[int], now: float) -> None:
        """Give a round up. What has been begun takes its numbers to the end, as it does on all other hosts."""
        if round_ < self._next:
            self._failed.add(round_)
            if self._worker is not None:
                self._worker.give_up(round_)
        else:
            self._early.pop(round_, None)
            self._skipped.add(round_)
            self._turn(now)

    def holds_all(self, job_id: int, round_: int, tensors: Sequence[int]) -> bool:
        """A worker is no root."""
        return False

    # ---------------------------------------------------------------- packets and time

    @property
    def groups(self) -> frozenset[int]:
        """None: switches send to every worker by itself."""
        return frozenset()

    @property
    def lacking(self) -> int:
        """0: a switch's window is short, and waits for answers."""
        return 0

    def receive(self, batch: PacketBatch, now: float) -> None:
        if self._worker is None:
            self._strangers[Drop.FOREIGN_JOB] += len(batch)
        else:
            self._worker.receive(batch, now)

    def transmit(self, now: float) -> list[Transmission]:
        return [] if self._worker is None else self._worker.transmit(now)

    def timer(self) -> float | None:
        return None if self._worker is None else self._worker.timer()

    def on_timer(self, now: float) -> None:
        """Repeat and report what is late."""
        if self._worker is not None:
            self._worker.on_timer(now)

    def events(self) -> list[NodeEvent]:
        """What happened since the last call, under the coordinator's number of the job."""
        return [] if self._worker is None else [one for one in map(self._said, self._worker.events()) if one]

    def _said(self, event: NodeEvent) -> NodeEvent | None:
        assert self._plan is not None
        job = self._plan.job
        if isinstance(event, PeerSilent):
            (place,) = self._plan.placements
            return replace(event, job=job, name=place.parent.name if place.parent is not None else event.name)
        if isinstance(event, RoundDone | Refused) and event.round in self._failed:
            self._failed.discard(event.round)
            return None
        if isinstance(event, Refused) and event.local_rank < 0:
            # the host that has it will tell
            return None
        return replace(event, job=job)

    # ---------------------------------------------------------------- figures

    @property
    def jobs(self) -> int:
        """1, while it has its job."""
        return int(self._worker is not None)

    def stats(self) -> dict[str, int]:
        """The worker's counters; ``leaf_contributions`` are fragments, each counted once, ``leaf_bytes`` their packets'."""
        worker = self._worker
        if worker is None:
            return self._past
        stats = worker.stats()
        leaves = stats["rows_sent"] - stats["retransmissions"]
        return {
            **stats,
            "jobs": 1,
            "leaf_contributions": leaves,
            "leaf_bytes": leaves * worker.layout.frame_bytes,
            "gradient_sent": stats["rows_sent"] * 4 * worker.layout.width,
            "gradient_received": stats["results_in"] * 4 * worker.layout.width,
        }

    def _drops(self) -> NDArray[np.int64]:
        return self._strangers if self._worker is None else self._strangers + self._worker.drops

    def drops_by_reason(self) -> dict[str, int]:
        drops = self._drops()
        return {reason.label: int(drops[reason]) for reason in Drop if reason is not Drop.OK}
