"""Block exponents (number format) and what follows from them.

The exponent of a block is the largest biased float32 exponent field in it, but 1 for float32 denormals: 0 is for
zeros alone. It is 255 when the block holds a NaN or an infinity. 16-bit elements count as the float32 they widen to.
Whatever the exponent ``E``, every element satisfies ``|x| < 2**(E - 126)``.

Elements come as bit patterns: uint32 for float32, uint16 for f16 (``brain`` False) and bf16 (``brain`` True).
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.half import widen16
from inanet.kernels.jit import njit
from inanet.kernels.lanes import LANES, raise_peaks8
from inanet.kernels.layout import BLOCK

Bits = NDArray[np.uint32] | NDArray[np.uint16]

#: blocks looked at together
_AT_ONCE = 64


@njit(
    ["uint32(uint32[::1], int64, int64)", "uint32(uint16[::1], int64, int64)"],
    cache=True,
    nogil=True,
    inline="always",
)
def peak_bits(bits: Bits, start: int, stop: int) -> np.uint32:
    """Bit pattern of the largest magnitude in ``bits[start:stop]``.

    Magnitudes of IEEE numbers are ordered like their bit patterns, so the search is one integer maximum.
    """
    peak, first = np.uint32(0), np.uint64(start)
    mask = np.uint32((1 << (8 * bits.itemsize - 1)) - 1)
    for k in range(np.uint64(stop - start)):
        peak = max(peak, np.uint32(np.uint32(bits[first + k]) & mask))
    return peak


@njit(
    ["void(uint32[::1], int64, int64, uint32[::1])", "void(uint16[::1], int64, int64, uint32[::1])"],
    cache=True,
    nogil=True,
    _nrt=False,
)
def raise_peaks(bits: Bits, width: int, blocks: int, peaks: NDArray[np.uint32]) -> None:
    """Raise ``peaks[i]`` to the pattern of the largest magnitude of block ``i``; blocks have ``width`` elements, the last may be short."""
    block = 0
    if width == LANES:
        whole = bits.size // (LANES * LANES)
        for k in range(np.uint64(whole)):
            raise_peaks8(bits, k * np.uint64(LANES * LANES), peaks, k * np.uint64(LANES))
        block = whole * LANES
    while block < blocks:
        start = min(block * width, bits.size)
        peaks[block] = max(peaks[block], peak_bits(bits, start, min(start + width, bits.size)))
        block += 1


@njit("uint8(uint32)", cache=True, nogil=True, inline="always")
def exponent_of(peak: np.uint32) -> np.uint8:
    """Exponent of a block, by the float32 bits of its largest magnitude."""
    return np.uint8(max(peak >> np.uint32(23), np.uint32(peak != 0)))


@njit(
    [
        "void(uint32[::1], boolean, int64, int64, int64, uint8[::1])",
        "void(uint16[::1], boolean, int64, int64, int64, uint8[::1])",
    ],
    cache=True,
    nogil=True,
)
def block_exponents(bits: Bits, brain: bool, width: int, lo: int, hi: int, out: NDArray[np.uint8]) -> None:
    """Raise ``out[i]`` to the exponent of block ``lo + i``, up to block ``hi - 1``; start from zeros.

    A block has ``width`` elements. Those behind the tensor's end are zeros.
    """
    peaks = np.empty(_AT_ONCE, np.uint32)
    for first in range(lo, hi, _AT_ONCE):
        count = min(hi - first, _AT_ONCE)
        peaks[:] = 0
        raise_peaks(bits[first * width : (first + count) * width], width, count, peaks)
        part = out[first - lo : first - lo + count]
        for k in range(np.uint64(count)):
            peak = peaks[k]
            if bits.itemsize == 2:
                peak = np.float32(widen16(np.uint16(peak), brain)).view(np.uint32)
            part[k] = max(part[k], exponent_of(peak))


@njit(["int64(uint32[::1], boolean)", "int64(uint16[::1], boolean)"], cache=True, nogil=True)
def first_nonfinite(bits: Bits, brain: bool) -> int:
    """Index of the first NaN or infinity, -1 if there is none."""
    infinity = 0x7F800000
    if bits.itemsize == 2:
        infinity = 0x7F80 if brain else 0x7C00
    for start in range(0, bits.size, BLOCK):
        stop = min(start + BLOCK, bits.size)
        if peak_bits(bits, start, stop) >= infinity:
            for k in range(start, stop):
                if peak_bits(bits, k, k + 1) >= infinity:
                    return k
    return -1
