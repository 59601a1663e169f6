"""A small but real switch program: adds up vectors, one slot each, and tells everybody.

Packet, little-endian: slot u16, worker u8, round u8, then values i32. A full slot goes to the group; a duplicate of a full
one is answered to its sender; slots that the switch does not have are left to the PS; a slot nobody has touched for ``age``
seconds goes to the PS as it is.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from inanet.proto.common.program import Action, Verdicts
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.drops import Drop

HEADER = struct.Struct("<HBB")
GROUP = 7


def packet(slot: int, worker: int, round: int, values: NDArray[np.int32]) -> bytes:
    """A contribution."""
    return HEADER.pack(slot, worker, round) + values.astype("<i4").tobytes()


class Adder:
    """``workers`` endpoints by number; partial sums go to ``ps``."""

    def __init__(
        self,
        workers: list[int],
        ps: int = 0,
        *,
        slots: int = 64,
        values: int = 16,
        age: float = 10.0,
        passes: int = 1,
        name: str = "adder",
    ) -> None:
        self.name = name
        self.workers, self.ps, self.age, self.passes = workers, ps, age, passes
        self.sums = np.zeros((slots, values), np.int32)
        self.bitmap = np.zeros(slots, np.int64)
        self.round = np.full(slots, -1)
        self.touched = np.zeros(slots)
        self.congested: list[int] = []
        self._spilled: list[Transmission] = []

    def process(
        self, batch: PacketBatch, congested: NDArray[np.uint8], verdicts: Verdicts, now: float
    ) -> None:
        self.congested += congested.tolist()
        full = (1 << len(self.workers)) - 1
        for i in range(len(batch)):
            raw = batch.arena[batch.offsets[i] :][: batch.lengths[i]]
            verdicts.action[i] = Action.DROP
            verdicts.passes[i] = self.passes
            if len(raw) != HEADER.size + 4 * self.sums.shape[1]:
                verdicts.reason[i] = Drop.SHORT
                continue
            slot, worker, number = HEADER.unpack(raw[: HEADER.size].tobytes())
            values = raw[HEADER.size :].view("<i4")
            if worker >= len(self.workers) or self.workers[worker] != batch.sources[i]:
                verdicts.reason[i] = Drop.FOREIGN_HOST
            elif slot >= len(self.sums):
                verdicts.action[i] = Action.PASS
            elif self.round[slot] == number and self.bitmap[slot] >> worker & 1:
                if self.bitmap[slot] == full:
                    values[:] = self.sums[slot]
                    verdicts.action[i] = Action.REPLY
                else:
                    verdicts.reason[i] = Drop.DUPLICATE
            else:
                if self.round[slot] != number:
                    self.round[slot], self.bitmap[slot], self.sums[slot] = number, 0, 0
                self.bitmap[slot] |= 1 << worker
                self.sums[slot] += values
                self.touched[slot] = now
                if self.bitmap[slot] == full:
                    values[:] = self.sums[slot]
                    verdicts.action[i], verdicts.target[i] = Action.GROUP, GROUP

    def spilled(self) -> list[Transmission]:
        out, self._spilled = self._spilled, []
        return out

    def _partial(self) -> NDArray[np.int64]:
        full = (1 << len(self.workers)) - 1
        return np.flatnonzero((self.bitmap > 0) & (self.bitmap < full))

    def timer(self) -> float | None:
        partial = self._partial()
        return float(self.touched[partial].min() + self.age) if len(partial) else None

    def on_timer(self, now: float) -> None:
        for slot in self._partial().tolist():
            if self.touched[slot] + self.age <= now:
                arena = np.frombuffer(packet(slot, 255, self.round[slot], self.sums[slot]), np.uint8).copy()
                self._spilled.append(Transmission(self.ps, arena, np.zeros(1, np.int64), len(arena)))
                self.bitmap[slot], self.round[slot] = 0, -1

    def register_bytes(self) -> int:
        return self.sums.nbytes + self.bitmap.nbytes

    def stats(self) -> dict[str, int]:
        return {"occupied_1": len(self._partial())}
