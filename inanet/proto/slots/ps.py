"""What parameter servers of all systems have in common: a job, the table of its sums, and what a server does not need.

A PS is told of jobs by their plans (:mod:`inanet.proto.slots.root`). :class:`Fragments` is what the servers of ATP's family
and GOAT's have of a job: the ring of sums, and who may add to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart, NodeEvent
from inanet.proto.common.machine import Host
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.slots.leaves import Leaves, Sums, fold, make_leaves
from inanet.wire.drops import DROP_CODES, Drop

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PSJob:
    """A job at its PS. ``members`` maps the workers' addresses to their bits; ``switches`` are addresses that sums may come
    from as well (spilled ones); answers go to ``downlinks``: one switch, or every worker where there is none.

    ``window`` is the workers', ``slots`` how many slots the job may use at the switch; ``first`` the first fragment's number.
    ``key`` is the job's secret, for framings that have a use for it.
    """

    job: int
    members: Mapping[int, int]
    downlinks: Sequence[int]
    window: int
    slots: int
    switches: Sequence[int] = ()
    first: int = 0
    key: int = 0

    @property
    def full(self) -> int:
        """Bits of all workers."""
        full = 0
        for bits in self.members.values():
            full |= bits
        return full


class TensorServer:
    """What servers of jobs with tensors need not say: they only answer, know no tensors beforehand and keep nothing."""

    takes_raw = True
    keeps = False

    def settle(self, host: Host) -> None:
        """It is the same wherever it is."""

    def follow(self, plan: NodePlan, now: float) -> None:
        """Later versions change nothing."""

    def hold(self, job: int, layout: TensorLayout) -> None:
        """Tensors need no room of their own."""

    def kept(self, job: int) -> ModelPart | None:
        """Nothing."""
        return None

    # ---------- a machine that only answers: workers repeat themselves

    @property
    def lacking(self) -> int:
        """0: workers wait for every answer."""
        return 0

    @property
    def groups(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def timer(self) -> float | None:
        """Never: workers repeat themselves."""
        return None

    def on_timer(self, now: float) -> None:
        """Nothing waits here."""

    def events(self) -> list[NodeEvent]:
        """Nothing to report."""
        return []


def check_number(job: int, most: int, *, why: str = "") -> None:
    """Raise ``ValueError`` for a job number that a framing has no room for."""
    if not 1 <= job <= most:
        raise ValueError(f"job {job}: numbers are 1 to {most}{why}")


class Fragments:
    """The sums of a job's fragments, int32[places, width], and who may add to them (leaf bitmaps). ``completed`` is a server's
    count, int64[1], of fragments whose last contribution has come.
    """

    def __init__(self, job: PSJob, width: int, completed: Index) -> None:
        self.job = job
        self.full = job.full
        self.table: Leaves = make_leaves(1 << (2 * job.window - 1).bit_length(), width)
        #: one past the highest fragment that has come
        self.expected = job.first
        #: addresses that sums may come from, in order
        self._senders: NDArray[np.uint64] = np.array(sorted({*job.members, *job.switches}), np.uint64)
        self._completed = completed

    def allows(self, bitmap: NDArray[np.uint32], sources: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which packets come from a sender of the job, for workers of the job."""
        places = np.minimum(np.searchsorted(self._senders, sources), len(self._senders) - 1)
        allowed: NDArray[np.bool_] = self._senders[places] == sources
        allowed &= (bitmap != 0) & (bitmap & np.uint32(~self.full & 0xFFFFFFFF) == 0)
        return allowed

    def add(
        self, sums: Sums, arena: NDArray[np.uint8], drops: NDArray[np.int64], now: float
    ) -> tuple[NDArray[np.uint8], Index]:
        """Add packets; returns what became of each (:class:`~inanet.wire.drops.Drop`), which ``drops`` counts, and the places
        of fragments that are complete now, or were asked for again.
        """
        self.expected = max(self.expected, int(sums.number.max()))
        reason = np.zeros(len(sums.ats), np.uint8)
        places = np.zeros(len(sums.ats), np.int64)
        count = fold(self.table, sums, arena, np.uint32(self.full), now, reason, places, self._completed)
        drops += np.bincount(reason, minlength=DROP_CODES)
        return reason, places[:count]

    def complete(self, places: Index) -> NDArray[np.bool_]:
        """Which of these places have every worker's contribution."""
        whole: NDArray[np.bool_] = self.table.bitmap[places] == self.full
        return whole


def drops_by_label(drops: NDArray[np.int64]) -> dict[str, int]:
    """Packets dropped, by the label of every reason."""
    return {reason.label: int(drops[reason]) for reason in Drop if reason is not Drop.OK}
