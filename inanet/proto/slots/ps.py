"""What parameter servers of all systems have in common, and the one that sums what switches could not.

A PS is told of jobs by their plans (:mod:`inanet.proto.slots.root`). :class:`SumServer` is the PS of ATP's family and of GOAT:
it adds up what comes, and answers every fragment that all workers are in, again to those that ask again. A system adds what
its packets look like (:class:`Answering`).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.events import ModelPart, NodeEvent
from inanet.proto.common.machine import Host
from inanet.proto.common.plan import NodePlan, TensorLayout
from inanet.proto.slots.leaves import Leaves, Sums, fold, make_leaves
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop
from inanet.wire.serial import unwrapped

Index = NDArray[np.int64]
_NONE: Index = np.zeros(0, np.int64)


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
        return frozenset()

    def timer(self) -> float | None:
        """Never: workers repeat themselves."""
        return None

    def on_timer(self, now: float) -> None:
        """Nothing waits here."""

    def events(self) -> list[NodeEvent]:
        return []


def check_number(job: int, most: int, *, why: str = "") -> None:
    """Raise ``ValueError`` for a job number that a framing has no room for."""
    if not 1 <= job <= most:
        raise ValueError(f"job {job}: numbers are 1 to {most}{why}")


class Arrivals(NamedTuple):
    """Packets that a system's framing has nothing against, one entry each."""

    job: Index
    #: what travels of a fragment's number
    low: Index
    #: uint32: workers in it
    bitmap: NDArray[np.uint32]
    source: NDArray[np.uint64]
    #: byte of the arena at which the values begin
    ats: Index
    ecn: NDArray[np.uint8]
    col: NDArray[np.uint8]
    collided: NDArray[np.uint8]
    #: what the sum's entry remembers of its packet: ATP's slot, GOAT's sub-model and fragment
    slot: Index
    #: bool: sums and contributions, not answers
    upward: NDArray[np.bool_]
    #: bool: probes, which are echoed
    probe: NDArray[np.bool_]
    #: bool: contributions that no switch has summed
    direct: NDArray[np.bool_]
    #: workers that are to hear if the fragment is complete already
    asks: Index

    def part(self, which: NDArray[np.bool_]) -> "Arrivals":
        return self if which.all() else Arrivals._make(column[which] for column in self)


class Fragments:
    """A job at its PS: the sums of its fragments, int32[places, width], who may add to them (leaf bitmaps), and what is to be
    answered. ``completed`` is a server's count, int64[1], of fragments whose last contribution has come.
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
        #: places that are complete now, and places and bits of workers that ask for complete ones
        self._complete: list[Index] = []
        self._asked: list[tuple[Index, Index]] = []

    def allows(self, bitmap: NDArray[np.uint32], sources: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which packets come from a sender of the job, for workers of the job."""
        places = np.minimum(np.searchsorted(self._senders, sources), len(self._senders) - 1)
        allowed: NDArray[np.bool_] = self._senders[places] == sources
        allowed &= (bitmap != 0) & (bitmap & np.uint32(~self.full & 0xFFFFFFFF) == 0)
        return allowed

    def add(
        self, its: Arrivals, bits: int, arena: NDArray[np.uint8], drops: NDArray[np.int64], now: float
    ) -> NDArray[np.bool_]:
        """Add packets, of whose numbers ``bits`` travel; ``drops`` counts what became of them. Returns which were added."""
        number = unwrapped(its.low, self.expected, bits)
        # nobody is two windows ahead of what has come: this is older than the horizon, and would take a live fragment's place
        near = number <= self.expected + 2 * self.job.window
        if not near.all():
            drops[Drop.BAD_FRAGMENT] += int(np.count_nonzero(~near))
            its, number = its.part(near), number[near]
        added = np.zeros(len(near), np.bool_)
        if not len(number):
            return added
        self.expected = max(self.expected, int(number.max()))
        reason = np.zeros(len(number), np.uint8)
        places = np.zeros(len(number), np.int64)
        sums = Sums(its.ats, number, its.bitmap, its.ecn, its.col, its.collided, its.slot)
        fold(self.table, sums, arena, np.uint32(self.full), now, reason, places, self._completed)
        drops += np.bincount(reason, minlength=DROP_CODES)
        added[near] = reason == Drop.OK
        places = number % len(self.table.number)
        whole = (self.table.number[places] == number) & (self.table.bitmap[places] == self.full)
        self._complete.append(places[whole & (reason == Drop.OK)])
        again = whole & (reason == Drop.DUPLICATE) & (its.asks != 0)
        if again.any():
            self._asked.append((places[again], its.asks[again]))
        return added

    def to_answer(self) -> tuple[Index, Index, int]:
        """Places to answer, each once, in order; the workers that each is for; and how many of them are complete just now."""
        if not self._complete and not self._asked:
            return _NONE, _NONE, 0
        fresh = np.unique(np.concatenate([_NONE, *self._complete]))
        asked = np.concatenate([_NONE, *(places for places, _ in self._asked)])
        whom = np.concatenate([_NONE, *(bits for _, bits in self._asked)])
        self._complete, self._asked = [], []
        places, entry = np.unique(np.concatenate([fresh, asked]), return_inverse=True)
        bits = np.zeros(len(places), np.int64)
        np.bitwise_or.at(bits, entry[len(fresh) :], whom)
        bits[entry[: len(fresh)]] = self.full
        return places, bits & self.full, len(fresh)


class Answering:
    """A system's packets at its PS. ``width`` values are summed of a fragment, of whose number ``sequence_bits`` travel."""

    def __init__(self, width: int, frame_bytes: int, sequence_bits: int) -> None:
        self.width, self.frame_bytes, self.sequence_bits = width, frame_bytes, sequence_bits

    @abstractmethod
    def job_of(self, plan: NodePlan) -> PSJob:
        """The job of a plan."""

    @abstractmethod
    def add(self, job: PSJob) -> None:
        """A job is served. Raises ``ValueError`` for a number that the framing has no room for."""

    def remove(self, job: int) -> None:
        """A job is served no longer."""

    @abstractmethod
    def read(self, batch: PacketBatch, drops: NDArray[np.int64]) -> Arrivals:
        """Packets of the framing; the others are counted in ``drops``."""

    def echo(self, its: Fragments, probes: Arrivals) -> None:
        """Workers probe the way to the PS."""

    def summed(self, its: Fragments, now: float) -> None:
        """Something has been added."""

    @abstractmethod
    def answers(
        self, its: Fragments, places: Index, bits: Index, drops: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Frames, uint8[n, frame_bytes], with the sums of these places, for these workers."""

    def own(self, its: Fragments) -> list[NDArray[np.uint8]]:
        """What there is to say beside answers, uint8[n, frame_bytes] each."""
        return []

    def timer(self) -> float | None:
        """When :meth:`on_timer` has something to do. Never: workers repeat themselves."""
        return None

    def on_timer(self, now: float) -> None:
        """Something is due."""

    @abstractmethod
    def stats(self, stats: dict[str, int]) -> dict[str, int]:
        """Which of the server's counters the system has, and its own."""


class SumServer(TensorServer):
    """Any number of jobs. A machine of its own with an address of its own."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.jobs: dict[int, Fragments] = {}
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._completed: Index = np.zeros(1, np.int64)
        self._answered = self._repeated = self._added = self._direct = 0

    def add_job(self, job: PSJob) -> None:
        """Serve a job; sums come from its ``switches`` as well, and answers go to its ``downlinks``.

        Raises ``ValueError`` for a number that the framing has no room for.
        """
        self.answering.add(job)
        self.jobs[job.job] = Fragments(job, self.answering.width, self._completed)

    def serve(self, plan: NodePlan) -> None:
        self.add_job(self.answering.job_of(plan))

    def remove_job(self, job: int) -> None:
        """Forget a job; its packets are foreign from now on."""
        self.jobs.pop(job, None)
        self.answering.remove(job)

    # ---------------------------------------------------------------- in

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take sums, contributions and probes."""
        arrivals = self.answering.read(batch, self.drops)
        for number in np.unique(arrivals.job).tolist():
            self._take(number, arrivals.part(arrivals.job == number), batch.arena, now)

    def _take(self, number: int, arrivals: Arrivals, arena: NDArray[np.uint8], now: float) -> None:
        its = self.jobs.get(number)
        if its is None:
            self.drops[Drop.FOREIGN_JOB] += len(arrivals.job)
            return
        good = its.allows(arrivals.bitmap, arrivals.source)
        self.drops[Drop.BAD_TYPE] += int(np.count_nonzero(~arrivals.upward))
        self.drops[Drop.FOREIGN_HOST] += int(np.count_nonzero(arrivals.upward & ~good))
        arrivals = arrivals.part(good & arrivals.upward)
        if arrivals.probe.any():
            self.answering.echo(its, arrivals.part(arrivals.probe))
            arrivals = arrivals.part(~arrivals.probe)
        if not len(arrivals.job):
            return
        added = its.add(arrivals, self.answering.sequence_bits, arena, self.drops, now)
        if added.any():
            self._added += int(np.count_nonzero(added))
            self._direct += int(np.count_nonzero(added & arrivals.direct))
            self.answering.summed(its, now)

    # ---------------------------------------------------------------- out

    def transmit(self, now: float) -> list[Transmission]:
        """Answers, and what the system has to say beside them."""
        out = []
        for its in self.jobs.values():
            places, bits, fresh = its.to_answer()
            said = self.answering.own(its)
            if len(places):
                said.insert(0, self.answering.answers(its, places, bits, self.drops))
                self._answered += fresh
                self._repeated += len(places) - fresh
            for frames in said:
                offsets = np.arange(len(frames), dtype=np.int64) * self.answering.frame_bytes
                out += [
                    Transmission(to, frames.reshape(-1), offsets, self.answering.frame_bytes)
                    for to in its.job.downlinks
                    if len(offsets)
                ]
        return out

    # ---------------------------------------------------------------- time and figures

    def timer(self) -> float | None:
        return self.answering.timer()

    def on_timer(self, now: float) -> None:
        self.answering.on_timer(now)

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name; ``direct`` are contributions that no switch has summed."""
        return self.answering.stats(
            {
                "packets_added": self._added,
                # under the name that it has at nodes of trees
                "contributions_in": self._added,
                "direct": self._direct,
                "fragments_completed": int(self._completed[0]),
                "answers": self._answered,
                "answers_again": self._repeated,
            }
        )

    def drops_by_reason(self) -> dict[str, int]:
        return drops_by_label(self.drops)


def drops_by_label(drops: NDArray[np.int64]) -> dict[str, int]:
    """Packets dropped, by the label of every reason."""
    return {reason.label: int(drops[reason]) for reason in Drop if reason is not Drop.OK}
