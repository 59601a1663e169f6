"""Memory shared with the agent: segments that are reused, and arrays that live in them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inanet.control.session import Segment

_PAGE = 4096
#: segments kept for later rounds beyond those in use
_KEPT = 16


def rounded(size: int) -> int:
    """Size class of a request: whole pages, at most an eighth more than asked for, so that sizes repeat."""
    pages = max(1, -(-size // _PAGE))
    step = 1 << max(0, pages.bit_length() - 4)
    return -(-pages // step) * step * _PAGE


class Block:
    """A segment the agent knows as ``number``; ``base`` is the address of its first byte."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.bytes: NDArray[np.uint8] = np.frombuffer(segment.memory, np.uint8)
        self.base = self.bytes.ctypes.data

    @property
    def size(self) -> int:
        """Bytes."""
        return self.segment.size

    def offset_of(self, array: NDArray[Any]) -> int | None:
        """Where a contiguous array lies in this block; None if it does not."""
        start = array.ctypes.data - self.base
        return start if 0 <= start and start + array.nbytes <= self.size else None


class Pool:
    """Free blocks by size class; keeps a few, so that memory does not grow with the number of rounds."""

    def __init__(self) -> None:
        self._free: list[Block] = []

    def take(self, size: int) -> Block | None:
        """A free block of the right size class, most recently used first."""
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index].size == size:
                return self._free.pop(index)
        return None

    def give(self, block: Block) -> Block | None:
        """Keep a block; returns the oldest one if there are too many."""
        self._free.append(block)
        return self._free.pop(0) if len(self._free) > _KEPT else None
