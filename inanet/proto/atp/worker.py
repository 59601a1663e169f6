"""ATP at a worker: fragments hashed to shared slots, one window that halves when congestion is seen anywhere.

The worker's part of A2TP and ESA is this one with another frame, another pace and what they put into the byte at offset 10.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.atp.slots import SlotTable
from inanet.proto.switched.window import Index, Timing
from inanet.proto.switched.worker import Answers, Layout, Mask, Membership, Pace, Worker
from inanet.wire.atp import FRAME, JOB_MASK, MAX_JOB, SECOND_HALF, SEQUENCE_BITS, VALUES, Flag
from inanet.wire.batch import PacketBatch
from inanet.wire.drops import Drop

_COL = 0x01


class AtpPace:
    """One window: halved when any answer of the last window has seen congestion, else one fragment more."""

    def __init__(self, initial: int, largest: int) -> None:
        self._size = float(min(initial, largest))
        self._largest = largest
        self._congested = False
        self._finish = 0

    @property
    def window(self) -> int:
        """Fragments that may be unanswered."""
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


class AtpWorker(Worker):
    """``window`` fragments at most in flight, hashed to ``slots`` slots; both the same for all workers and the PS."""

    frame_type = FRAME

    def __init__(
        self,
        member: Membership,
        window: int,
        slots: int,
        *,
        initial: int = 50,
        pace: Pace | None = None,
        timing: Timing | None = None,
    ) -> None:
        if not 1 <= member.job <= MAX_JOB:
            raise ValueError(
                f"job {member.job}: numbers are 1 to {MAX_JOB}, 0 is 'free' to public switch programs"
            )
        fields = self.frame_type.fields
        assert fields is not None
        layout = Layout(VALUES, self.frame_type.itemsize, fields["values"][1], SEQUENCE_BITS)
        super().__init__(member, layout, window, pace or AtpPace(initial, window), timing)
        self._table = SlotTable(member.job, window, slots)

    def _heads(self, batch: PacketBatch, index: Index) -> NDArray[np.void]:
        """Headers, and trailers behind them, of these packets; values are left out."""
        frames = np.zeros(len(index), self.frame_type)
        view = frames.view(np.uint8).reshape(len(index), self.layout.frame_bytes)
        head, tail = self.layout.values_at, self.layout.values_at + 4 * VALUES
        for columns in (np.arange(head), np.arange(tail, self.layout.frame_bytes)):
            view[:, columns] = batch.arena[batch.offsets[index][:, None] + columns]
        return frames

    def _read(self, batch: PacketBatch, index: Index, now: float) -> Answers:
        index = self._sized(batch, index)
        frames = self._heads(batch, index)
        mine = frames["app"] & JOB_MASK == self.member.job
        answers = frames["flags"] & (Flag.ACK | Flag.RESEND | Flag.OVERFLOW) == Flag.ACK
        others = mine & ~answers
        self.drops[Drop.FOREIGN_JOB] += int(np.count_nonzero(~mine))
        if others.any():
            self._other(frames[others], now)
        good = mine & answers
        frames = frames[good]
        flags = frames["flags"]
        moved = flags & Flag.COLLISION != 0
        return Answers(
            low=frames["seq"].astype(np.int64) | (frames["app"].astype(np.int64) >> 8) << 16,
            ats=batch.offsets[index[good]] + self.layout.values_at,
            ecn=flags & Flag.ECN != 0,
            col=self._col(frames),
            instead=np.where(moved, frames["length"].astype(np.int64), -1),
        )

    def _col(self, frames: NDArray[np.void]) -> Mask:
        """Which answers say that their slot was wanted by others."""
        return np.zeros(len(frames), np.bool_)

    def _other(self, frames: NDArray[np.void], now: float) -> None:
        """Packets of the job that are no answers."""
        self.drops[Drop.BAD_TYPE] += len(frames)

    def _learn(self, numbers: Index, answers: Answers, new: Mask) -> None:
        instead = answers.instead[new]
        moved = instead >= 0
        if moved.any():
            self._table.use(numbers[moved], instead[moved])

    def _dress(self, frames: NDArray[np.uint8], numbers: Index, again: int, slots: Mask) -> None:
        view = frames.view(self.frame_type)[:, 0]
        view["bitmap"] = self.member.bit
        view["fan_in"] = self.member.workers
        view["flags"][:again] = Flag.RESEND
        view["app"] = self.member.job | (numbers >> 16 & 0xFF) << 8
        view["seq"] = numbers & 0xFFFF
        places = self._table.of(numbers)
        view["agtr"] = places
        view["agtr2"] = (places + SECOND_HALF) & 0xFFFF
        for stream in self._streams:
            if stream.first is None:
                break
            mine = numbers >= stream.first
            view["key"][mine] = stream.tensor.tensor
            view["length"][mine] = stream.tensor.spec.elements
