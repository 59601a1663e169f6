"""Block exponents (number format) and what follows from them.

The exponent of a block is the largest biased float32 exponent field in it, but 1 for float32 denormals: 0 is for
zeros alone. It is 255 when the block holds a NaN or an infinity. 16-bit elements count as the float32 they widen to.
Whatever the exponent ``E``, every element satisfies ``|x| < 2**(E - 126)``.

Elements come as bit patterns: uint32 for float32, uint16 for f16 (``brain`` False) and bf16 (``brain`` True).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload
from numpy.typing import NDArray

from inanet.kernels.half import widen16
from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK

Bits = NDArray[np.uint32] | NDArray[np.uint16]

_NONFINITE = 0x7F800000


def peak_bits(bits: Any, brain: Any, start: Any, stop: Any) -> np.uint32:
    """float32 bit pattern of the largest magnitude in ``bits[start:stop]``. Only inside kernels.

    Magnitudes of IEEE numbers are ordered like their bit patterns, so the search is one integer maximum.
    """
    raise NotImplementedError("peak_bits is only meant for compiled code")


# numba wants the annotations of an overload and of its implementations to be the same
@overload(peak_bits)
def _peak_bits(bits: Any, brain: Any, start: Any, stop: Any) -> Callable[..., np.uint32]:
    return _peak32 if bits.dtype == types.uint32 else _peak16


def _peak32(bits: Any, brain: Any, start: Any, stop: Any) -> np.uint32:
    part = bits[start:stop]
    peak = np.uint32(0)
    for j in range(part.size):
        peak = max(peak, np.uint32(part[j] & np.uint32(0x7FFFFFFF)))
    return peak


def _peak16(bits: Any, brain: Any, start: Any, stop: Any) -> np.uint32:
    part = bits[start:stop]
    peak = np.uint16(0)
    for j in range(part.size):
        peak = max(peak, np.uint16(part[j] & np.uint16(0x7FFF)))
    return np.float32(widen16(peak, brain)).view(np.uint32)


@njit("uint8(uint32)", cache=True, nogil=True, inline="always")
def exponent_of(peak: np.uint32) -> np.uint8:
    """Exponent of a block, by the float32 bits of its largest magnitude."""
    return np.uint8(max(peak >> np.uint32(23), np.uint32(peak != 0)))


@njit(
    [
        "void(uint32[::1], boolean, int64, int64, uint8[::1])",
        "void(uint16[::1], boolean, int64, int64, uint8[::1])",
    ],
    cache=True,
    nogil=True,
)
def block_exponents(bits: Bits, brain: bool, lo: int, hi: int, out: NDArray[np.uint8]) -> None:
    """Raise ``out[i]`` to the exponent of block ``lo + i``, up to block ``hi - 1``; start from zeros."""
    for i in range(hi - lo):
        start = (lo + i) * BLOCK
        peak = peak_bits(bits, brain, start, min(start + BLOCK, bits.size))
        out[i] = max(out[i], exponent_of(peak))


@njit(["int64(uint32[::1], boolean)", "int64(uint16[::1], boolean)"], cache=True, nogil=True)
def first_nonfinite(bits: Bits, brain: bool) -> int:
    """Index of the first NaN or infinity, -1 if there is none."""
    for start in range(0, bits.size, BLOCK):
        stop = min(start + BLOCK, bits.size)
        if peak_bits(bits, brain, start, stop) >= _NONFINITE:
            for k in range(start, stop):
                if peak_bits(bits, brain, k, k + 1) >= _NONFINITE:
                    return k
    return -1
