"""64-bit keys to row numbers: an open-addressing table that grows, probed by a kernel for a whole batch of keys."""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inanet.wire.batch import I64, U64

#: A table is enlarged when more than this share of it is taken.
_LOAD = 0.5
_LEAST = 64


@njit(
    "int64(uint64[::1], int64[::1], uint64[::1], int64[::1], int64, boolean)",
    cache=True,
    nogil=True,
    _nrt=False,
)
def _locate(names: Any, places: Any, keys: Any, rows: Any, next_row: int, insert: bool) -> Any:
    """Rows of ``keys`` in the table ``names`` and ``places`` (-1: free; a power of two entries), -1 for unknown ones.

    With ``insert`` an unknown key takes ``next_row``, which is counted up; returned is the next one.
    """
    mask = np.uint64(names.size - 1)
    for i in range(keys.size):
        key = keys[i]
        # finaliser of splitmix64: neighbours in the key space must not crowd in the table
        h = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        h = (h ^ (h >> np.uint64(31))) & mask
        while places[h] >= 0 and names[h] != key:
            h = (h + np.uint64(1)) & mask
        if places[h] < 0 and insert:
            names[h] = key
            places[h] = next_row
            next_row += 1
        rows[i] = places[h]
    return next_row


class KeyIndex:
    """Numbers keys from 0 on, in the order in which they were first added."""

    def __init__(self, keys: U64 | None = None) -> None:
        self._size = 0
        self._names: U64 = np.zeros(_LEAST, np.uint64)
        self._places: I64 = np.full(_LEAST, -1, np.int64)
        if keys is not None:
            self.add(keys)

    def __len__(self) -> int:
        return self._size

    def find(self, keys: NDArray[np.uint64]) -> I64:
        """int64[n]: rows of ``keys`` (uint64[n]), -1 for those that were never added."""
        rows: I64 = np.empty(len(keys), np.int64)
        _locate(self._names, self._places, np.ascontiguousarray(keys, np.uint64), rows, 0, False)
        return rows

    def add(self, keys: NDArray[np.uint64]) -> I64:
        """Rows of ``keys``, new ones numbered on."""
        self._reserve(self._size + len(keys))
        rows: I64 = np.empty(len(keys), np.int64)
        wanted = np.ascontiguousarray(keys, np.uint64)
        self._size = int(_locate(self._names, self._places, wanted, rows, self._size, True))
        return rows

    def keys(self) -> U64:
        """uint64[n]: all keys by row."""
        taken = self._places >= 0
        out: U64 = np.empty(self._size, np.uint64)
        out[self._places[taken]] = self._names[taken]
        return out

    def _reserve(self, count: int) -> None:
        size = len(self._names)
        if count <= size * _LOAD:
            return
        while count > size * _LOAD:
            size *= 2
        known = self.keys()
        self._names, self._places = np.zeros(size, np.uint64), np.full(size, -1, np.int64)
        rows: I64 = np.empty(len(known), np.int64)
        _locate(self._names, self._places, known, rows, 0, True)
