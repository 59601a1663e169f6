"""What a fabric does to gradients, in one process: the number format written down once more, independently
and exactly.

Integers of any size, ``fractions`` where it matters: slow, obvious, and sharing no code with the package.
"""

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def exponent(values: F32) -> int:
    """An e >= -125 with |x| < 2^e for all values, from the bits of the largest; -126 for zeros."""
    field = int((values.view(np.uint32) >> 23 & 0xFF).max())
    return max(field, int(values.any())) - 126


def headroom(n: int) -> int:
    """ceil(log2 n)."""
    bits = 0
    while 1 << bits < n:
        bits += 1
    return bits


class EmulatedFabric:
    """Averages contributions block by block, with exponents by prologue for blocks of 8, or carried over for blocks of 256.

    A carried one lies two bits above the last contributions, or one below the last exponent if that is more, but at most
    six bits above them; it serves contributions that it is not below of, nor more than eight bits above.
    """

    def __init__(self, carried: bool) -> None:
        self.carried = carried
        self.last: dict[int, int] = {}

    def average(self, parts: F32) -> F32:
        """The mean of float32[n, count] as float32[count]."""
        n, count = parts.shape
        result = np.empty(count, np.float32)
        width = 256 if self.carried else 8
        for first in range(0, count, width):
            block = parts[:, first : first + width]
            need = e = exponent(np.ascontiguousarray(block).ravel())
            last = self.last.get(first, -200)
            if self.carried and (need == -126 <= last or need <= last <= need + 8):
                e = last
            shift = 31 - headroom(n) - e
            integers = np.rint(np.ldexp(block.astype(np.float64), shift)).astype(np.int64)
            limit = (2**31 - 1) // n
            sums = np.clip(integers, -limit, limit).sum(axis=0)
            assert np.abs(sums).max() < 2**31
            self.last[first] = max(need + 2, min(e - 1, need + 6)) if need > -126 else max(e - 1, -126)
            result[first : first + width] = [
                np.float32(float(Fraction(int(total)) * Fraction(2) ** -shift / n)) for total in sums
            ]
        return result
