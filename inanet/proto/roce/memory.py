"""Memory that peers may write to: regions, their keys, and the protection domain they belong to."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.jit import njit
from inanet.proto.roce.verbs import Access
from inanet.wire.batch import I64, U8

#: columns of the table that kernels check requests against
KEY, BASE, LENGTH, ACCESS = range(4)
_FIRST_KEY = 0x100


@njit("void(uint8[::1], uint8[::1], int64, int64[:, ::1], int64)", cache=True, nogil=True, _nrt=False)
def place(arena: U8, target: U8, region: int, placements: I64, count: int) -> None:
    """Copy payloads to a region: rows (region, offset in it, offset in ``arena``, bytes) that name ``region``."""
    for i in range(count):
        if placements[i, 0] != region:
            continue
        to, at = np.uint64(placements[i, 1]), np.uint64(placements[i, 2])
        for j in range(np.uint64(placements[i, 3])):
            target[to + j] = arena[at + j]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """A registered buffer: 1-D, uint8, contiguous, writable. Peers address its first byte as ``base``."""

    buffer: U8
    key: int
    base: int
    row: int


class ProtectionDomain:
    """Registers memory regions. Queue pairs serve requests to the regions of their domain only."""

    def __init__(self) -> None:
        #: int64[regions, 4]: remote key, base, bytes, access; a row of key -1 is no longer registered
        self.table: I64 = np.zeros((0, 4), np.int64)
        self._regions: list[MemoryRegion | None] = []

    def register(
        self, buffer: NDArray[np.generic], *, base: int = 0, access: Access = Access.REMOTE_WRITE
    ) -> MemoryRegion:
        """Register the bytes of a contiguous writable array. Raises ``ValueError`` for any other."""
        if not buffer.flags.c_contiguous or not buffer.flags.writeable:
            raise ValueError("only contiguous writable arrays can be registered")
        region = MemoryRegion(
            buffer.reshape(-1).view(np.uint8), _FIRST_KEY + len(self._regions), base, len(self._regions)
        )
        row = np.array([[region.key, base, len(region.buffer), access]], np.int64)
        self.table = np.concatenate([self.table, row])
        self._regions.append(region)
        return region

    def deregister(self, region: MemoryRegion) -> None:
        """Requests to the region are refused from now on. Raises ``ValueError`` if it is not registered."""
        if region.row >= len(self._regions) or self._regions[region.row] is not region:
            raise ValueError(f"region with key {region.key:#x} is not registered here")
        self._regions[region.row] = None
        self.table[region.row, KEY] = -1

    def key_of(self, row: int) -> int:
        """Remote key by row of the table; 0 past its end, where requests of no bytes go."""
        return int(self.table[row, KEY]) if row < len(self.table) else 0

    def place(self, arena: U8, placements: I64, count: int) -> None:
        """Carry out the first ``count`` placements (:func:`place`)."""
        for row in np.unique(placements[:count, 0]).tolist():
            region = self._regions[row]
            if region is not None:
                place(arena, region.buffer, row, placements, count)
