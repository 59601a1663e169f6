"""Which packets of an iteration have arrived, from whom, and whether that is all (iteration ledger).

Completion cannot be told key by key, since workers lack keys. So every source numbers its packets and ends with an END that
says how many there were; an iteration is complete when every source's END and all numbers before it are in.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.wire.batch import I64, U8
from inanet.wire.drops import Drop

FRESH, SEEN, BEYOND = int(Drop.OK), int(Drop.DUPLICATE), int(Drop.BAD_FRAGMENT)
#: packets that a source may have in an iteration
MOST = 1 << 22


@njit(
    "int64(uint8[:, ::1], int64[::1], int64[::1], int64, int64, boolean)",
    cache=True,
    nogil=True,
    _nrt=False,
    inline="always",
)
def note(seen: Any, received: Any, expected: Any, source: int, sequence: int, end: bool) -> Any:
    """Enter one packet; gives the reason to drop it, :data:`FRESH` if it is new."""
    if sequence >= seen.shape[1] or (expected[source] >= 0 and sequence > expected[source]):
        return BEYOND
    if seen[source, sequence]:
        return SEEN
    seen[source, sequence] = 1
    if end:
        expected[source] = sequence
    else:
        received[source] += 1
    return FRESH


@njit(
    "void(uint8[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1], uint8[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def _note_all(
    seen: Any, received: Any, expected: Any, sources: Any, sequences: Any, ends: Any, how: Any
) -> None:
    for i in range(sources.size):
        how[i] = note(seen, received, expected, sources[i], sequences[i], ends[i] != 0)


class Ledger:
    """For ``sources`` sources. ``room`` sequence numbers have a place at first; it grows unless ``fixed``, as the one of a
    switch is.
    """

    def __init__(self, sources: int, room: int = 256, *, fixed: bool = False) -> None:
        self.seen: U8 = np.zeros((sources, room), np.uint8)
        #: packets that have come, and how many there are (-1: no END yet), int64[sources]
        self.received: I64 = np.zeros(sources, np.int64)
        self.expected: I64 = np.full(sources, -1, np.int64)
        self._fixed = fixed

    def clear(self) -> None:
        self.seen[:] = 0
        self.received[:] = 0
        self.expected[:] = -1

    @property
    def complete(self) -> bool:
        """Whether everything of every source is in."""
        return bool((self.received == self.expected).all())

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return bool(self.received.any() or (self.expected >= 0).any())

    def heard(self, source: int) -> bool:
        """Whether anything has come from a source."""
        return bool(self.received[source] or self.expected[source] >= 0)

    def missing(self) -> list[int]:
        """Sources of which something is missing."""
        return [int(source) for source in np.flatnonzero(self.received != self.expected)]

    def enter(self, sources: I64, sequences: I64, ends: NDArray[np.bool_]) -> U8:
        """Enter packets, int64[n] each; gives the reason to drop each, :data:`FRESH` for new ones, uint8[n]."""
        most = int(sequences.max(initial=0))
        if not self._fixed and most >= self.seen.shape[1] and most < MOST:
            grown: U8 = np.zeros((len(self.seen), max(2 * self.seen.shape[1], most + 1)), np.uint8)
            grown[:, : self.seen.shape[1]] = self.seen
            self.seen = grown
        how: U8 = np.zeros(len(sources), np.uint8)
        _note_all(
            self.seen,
            self.received,
            self.expected,
            np.ascontiguousarray(sources),
            np.ascontiguousarray(sequences),
            ends.astype(np.uint8),
            how,
        )
        return how
