"""Memory shared with the agent: arrays that users ask for, and staging for arrays that live elsewhere."""

import mmap
import threading
import weakref
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.messages import segments

_PAGE = mmap.PAGESIZE
#: free staging pieces kept for later rounds; more are in use only while as many collectives are on their way
_KEPT = 64
#: a free piece serves requests down to its size divided by this, or any request if it is small
_WASTE = 4
_SMALL = 1 << 20


def rounded(size: int) -> int:
    """Bytes to allocate for a request: whole pages, at most an eighth too many, so that sizes repeat."""
    pages = max(1, -(-size // _PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * _PAGE


@dataclass(frozen=True, slots=True)
class Piece:
    """Shared memory that the agent knows as ``number``, freed with its last array. ``root``: uint8[size]."""

    number: int
    root: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.root.size

    def view(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array at the beginning of the piece."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return self.root[:size].view(dtype).reshape(shape)


class Memory:
    """All memory that one job shares with its agent. Threads may use it at the same time.

    Pieces die with their last reference, in whatever thread and at whatever moment that happens; their
    numbers are only noted then (:meth:`dead`), because nothing may be sent or locked inside of a garbage
    collection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 1
        self._free: list[Piece] = []
        #: address ranges of arrays handed out, sorted: first byte, byte after the last, number
        self._ranges: list[tuple[int, int, int]] = []
        self._buried: deque[int] = deque()
        self._dead: list[int] = []
        #: pieces that exist
        self.alive = 0

    def create(self, size: int, *, findable: bool) -> tuple[Piece, int]:
        """A new piece of at least ``size`` bytes, and its descriptor, which the caller closes.

        ``findable`` pieces are recognised by :meth:`find`. Raises ``OSError`` if the system has no memory
        left.
        """
        fd, mapping = segments.create(rounded(size))
        # views of an array refer to the one they come from: it dies, and is noted, before it is unmapped
        root = np.frombuffer(mapping, np.uint8)
        with self._lock:
            number = self._next
            self._next += 1
            self.alive += 1
            if findable:
                self._forget_buried()
                first = root.ctypes.data
                self._ranges.insert(bisect_right(self._ranges, (first,)), (first, first + root.size, number))
        weakref.finalize(root, self._buried.append, number).atexit = False
        return Piece(number, root), fd

    def find(self, array: NDArray[Any]) -> tuple[int, int] | None:
        """The number of the piece that a C-contiguous array lies in, if any, and its offset in bytes."""
        first = array.__array_interface__["data"][0]
        with self._lock:
            self._forget_buried()
            index = bisect_right(self._ranges, (first, 1 << 64)) - 1
            if index < 0:
                return None
            start, end, number = self._ranges[index]
        return (number, first - start) if first + array.nbytes <= end else None

    def _forget_buried(self) -> None:
        gone = set()
        while self._buried:
            gone.add(self._buried.popleft())
        if gone:
            # their addresses may belong to any other array by now
            self._ranges = [entry for entry in self._ranges if entry[2] not in gone]
            self._dead += gone

    def take(self, size: int) -> Piece | None:
        """The smallest free piece that is large enough without being much too large, if any."""
        limit = max(rounded(size) * _WASTE, _SMALL)
        with self._lock:
            fitting = [piece for piece in self._free if size <= piece.size <= limit]
            if not fitting:
                return None
            best = min(fitting, key=lambda piece: piece.size)
            self._free = [piece for piece in self._free if piece is not best]
            return best

    def give(self, piece: Piece) -> None:
        """Keep a piece for later; if there are too many, the one longest unused goes."""
        with self._lock:
            self._free.append(piece)
            if len(self._free) > _KEPT:
                del self._free[0]

    def dead(self) -> list[int]:
        """Numbers of pieces that died since the last call: the agent may unmap them."""
        if not self._buried and not self._dead:
            return []
        with self._lock:
            self._forget_buried()
            numbers, self._dead = self._dead, []
            self.alive -= len(numbers)
        return numbers
