"""Serial-number arithmetic (RFC 1982): numbers that go on for ever, of which only the low bits travel.

The compiled comparisons are in :mod:`inanet.kernels.header`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_newer(a: int, b: int, bits: int = 32) -> bool:
    """Whether ``a`` comes after ``b`` in a space of ``bits`` bits."""
    half = 1 << (bits - 1)
    return a != b and ((a - b) & ((1 << bits) - 1)) < half


def ahead_of(low: NDArray[Any], near: int, bits: int = 32) -> NDArray[np.int64]:
    """How far numbers, of which the low ``bits`` are given, are ahead of ``near``, int64[n]: -2^(bits-1) to 2^(bits-1) - 1."""
    half = np.int64(1 << (bits - 1))
    distance: NDArray[np.int64] = (low.astype(np.int64) - near + half & 2 * half - 1) - half
    return distance


def unwrapped(low: NDArray[Any], near: int, bits: int = 32) -> NDArray[np.int64]:
    """The whole numbers nearest to ``near`` whose low ``bits`` are given, int64[n]."""
    return near + ahead_of(low, near, bits)
