"""Which slot a fragment is hashed to, and dynamic re-hashing after collisions.

Fragment *s* uses entry ``s mod entries`` of a table that all workers and the PS hold. The table starts as a hash of job and
entry, as in the public program: CRC-32 of (job, entry, salt), the salt raised until the slot is not in the table yet. When
a fragment has collided, the PS chooses the entry's next slot and its answer says so. There are as many entries as fragments
in flight at most, so whoever uses an entry again has the answer to its last use: tables never differ where it matters.
"""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

#: slots that are tried before an entry keeps, or shares, one
MOST_SALTS = 64


class SlotTable:
    """Slots, 0 to ``slots - 1``, of ``entries`` entries."""

    def __init__(self, job: int, entries: int, slots: int) -> None:
        if not 1 <= slots <= 65536 or entries < 1:
            raise ValueError(f"job {job}: {entries} fragments in flight on {slots} slots (1 to 65536)")
        self._job, self._count = job, slots
        self._salt = [0] * entries
        self._uses: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._table: NDArray[np.int64] = np.zeros(entries, np.int64)
        for entry in range(entries):
            self._table[entry] = slot = self._pick(entry)
            self._uses[slot] += 1

    def _pick(self, entry: int) -> int:
        slot = 0
        for _ in range(MOST_SALTS):
            packed = struct.pack("<HHH", self._job, entry & 0xFFFF, self._salt[entry] & 0xFFFF)
            slot = zlib.crc32(packed) % self._count
            self._salt[entry] += 1
            if not self._uses[slot]:
                break
        return slot

    def of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of fragments."""
        slots: NDArray[np.int64] = self._table[numbers % len(self._table)]
        return slots

    def again(self, number: int) -> int:
        """Choose another slot for the entry of a fragment, and use it from now on; -1 if none is free of this job."""
        entry = number % len(self._table)
        slot = self._pick(entry)
        if self._uses[slot]:
            return -1
        self.use(np.array([number]), np.array([slot]))
        return slot

    def use(self, numbers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Use other slots for the entries of these fragments."""
        entries = numbers % len(self._table)
        np.subtract.at(self._uses, self._table[entries], 1)
        self._table[entries] = slots
        np.add.at(self._uses, slots, 1)
