"""ATP at a worker: fragments hashed to shared slots, one window that halves when congestion is seen anywhere.

The worker's part of A2TP and ESA is this one with another frame, another pace and what they put into the byte at offset 10
(:class:`Marking`).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.bigendian import gather
from inanet.proto.common.recovery import Timing
from inanet.proto.slots.atp.heads import Heads, read_heads, write_heads, write_tails
from inanet.proto.slots.atp.job import AtpJob
from inanet.proto.slots.atp.slots import SlotTable
from inanet.proto.slots.source import Source, Tensor
from inanet.proto.slots.window import TIMING, Index, Window
from inanet.proto.slots.worker import Answers, Framing, Layout, Mask, Membership, Pace, Worker
from inanet.wire.atp import FRAME, MAX_JOB, SEQUENCE_BITS, VALUES, Flag
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop

# as plain numbers, because members of an enumeration are slow to look up and slow for numpy to understand
_ACK, _ECN, _COLLISION, _RESEND = int(Flag.ACK), int(Flag.ECN), int(Flag.COLLISION), int(Flag.RESEND)
_KIND = _ACK | _RESEND | int(Flag.OVERFLOW)


class AtpPace:
    """One window: halved when any answer of the last window has seen congestion, else one fragment more."""

    def __init__(self, initial: int, largest: int) -> None:
        self._size = float(min(initial, largest))
        self._largest = largest
        self._congested = False
        self._finish = 0

    @property
    def window(self) -> int:
        return int(self._size)

    def uses_slots(self, numbers: Index) -> Mask:
        """All of them."""
        return np.ones(len(numbers), np.bool_)

    def answered(self, numbers: Index, ecn: Mask, col: Mask, base: int, now: float) -> None:
        """Change the window once it has been answered as a whole."""
        self._congested |= bool(ecn.any())
        if base < self._finish:
            return
        self._size = max(1.0, self._size / 2) if self._congested else min(self._largest, self._size + 1)
        self._congested = False
        self._finish = base + self.window


class Marking:
    """What a system of ATP's family has in its frames beside ATP's fields; ATP itself has nothing."""

    frame_type: np.dtype[Any] = FRAME

    def add(self, tensor: Tensor, priority: int) -> None:
        """A tensor is known. Raises ``ValueError`` for a priority that frames have no room for."""

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, slots: Mask, streams: Iterable[Source]
    ) -> None:
        """Mark frames, uint8[n, frame_bytes]; ``slots``: those that may use the switch's slots."""

    def collided(self, heads: Heads) -> Mask:
        """Which answers say that their slot was wanted by others."""
        return np.zeros(len(heads.job), np.bool_)

    def other(self, heads: Heads, drops: NDArray[np.int64], now: float) -> None:
        """Packets of the job that are no answers."""
        drops[Drop.BAD_TYPE] += len(heads.job)

    def own(self, now: float, busy: bool) -> NDArray[np.uint8] | None:
        """What there is to send beside contributions, uint8[n, frame_bytes]."""
        return None


class AtpFraming(Framing):
    """Fragments are hashed to ``slots`` slots; that and the window are the same for all workers and the PS."""

    def __init__(self, member: Membership, window: int, slots: int, marking: Marking) -> None:
        if not 1 <= member.job <= MAX_JOB:
            raise ValueError(
                f"job {member.job}: numbers are 1 to {MAX_JOB}, 0 is 'free' to public switch programs"
            )
        self.frame_type = marking.frame_type
        fields = self.frame_type.fields
        assert fields is not None
        super().__init__(member, Layout(VALUES, self.frame_type.itemsize, fields["values"][1], SEQUENCE_BITS))
        self.marking = marking
        self._table = SlotTable(member.job, window, slots)
        self._slots = slots

    def add(self, tensor: Tensor, priority: int) -> None:
        self.marking.add(tensor, priority)

    def own(self, now: float, busy: bool) -> NDArray[np.uint8] | None:
        return self.marking.own(now, busy)

    def _instead(self, batch: PacketBatch, offsets: Index, flags: NDArray[np.uint8]) -> Index:
        """The slots that answers name, in the field that is the tensor's length otherwise."""
        instead = np.full(len(offsets), -1, np.int64)
        moved = np.flatnonzero(flags & _COLLISION)
        if len(moved):
            named = np.empty((len(moved), 4), np.uint8)
            gather(batch.arena, offsets[moved] + self.layout.frame_bytes - 4, named)
            instead[moved] = named.view(">u4")[:, 0]
        return instead

    def read(self, batch: PacketBatch, index: Index, drops: NDArray[np.int64], now: float) -> Answers:
        offsets = batch.offsets[index]
        heads = read_heads(batch.arena, offsets, self.layout.values_at)
        mine = heads.job == self.member.job
        answers = heads.flags & _KIND == _ACK
        good = mine & answers
        if not good.all():
            drops[Drop.FOREIGN_JOB] += int(np.count_nonzero(~mine))
            others = mine & ~answers
            if others.any():
                self.marking.other(heads.part(others), drops, now)
            heads, offsets = heads.part(good), offsets[good]
        return Answers(
            low=heads.low,
            ats=offsets + self.layout.values_at,
            ecn=heads.flags & _ECN != 0,
            col=self.marking.collided(heads),
            instead=self._instead(batch, offsets, heads.flags),
        )

    def learn(self, numbers: Index, instead: Index) -> None:
        """Slots that the PS has chosen after a collision."""
        # a slot that there is not would be refused by the switch, fragment after fragment
        moved = (instead >= 0) & (instead < self._slots)
        if moved.any():
            self._table.use(numbers[moved], instead[moved])

    def write(
        self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask, streams: Iterable[Source]
    ) -> None:
        flags = np.zeros(len(numbers), np.uint8)
        flags[:again] = _RESEND
        member, head = self.member, self.layout.values_at
        places = self._table.of(numbers)
        write_heads(frames, numbers, places, flags, member.bit, member.workers, member.job, head)
        for stream in streams:
            if stream.first is None:
                break
            write_tails(frames, numbers, stream.first, stream.tensor.tensor, stream.tensor.spec.elements)
        self.marking.write(frames, numbers, slots, streams)


def make_worker(
    member: Membership, window: int, slots: int, marking: Marking, pace: Pace, timing: Timing
) -> Worker:
    """A worker of a system of the family: ``window`` fragments at most in flight, hashed to ``slots`` slots."""
    return Worker(AtpFraming(member, window, slots, marking), Window(window, timing, member.first), pace)


def atp_worker(
    member: Membership, window: int, slots: int, *, initial: int = 50, timing: Timing = TIMING
) -> Worker:
    """ATP's; ``initial`` fragments may be in flight at first."""
    return make_worker(member, window, slots, Marking(), AtpPace(initial, window), timing)


def join(member: Membership, job: AtpJob, timing: Timing) -> Worker:
    """The worker of a job as its plan describes it."""
    return atp_worker(member, job.window, job.slots, initial=job.window, timing=timing)
