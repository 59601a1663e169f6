"""Block exponents (number format) and what follows from them.

The exponent of a block is the largest biased float32 exponent field in it: 0 for zeros and float32
denormals, 255 when it holds a NaN or an infinity. 16-bit elements count as the float32 they widen to.
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
from inanet.kernels.layout import BLOCK, POISON

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
        out[i] = max(out[i], np.uint8(peak >> np.uint32(23)))


@njit(
    "void(uint16[::1], boolean, int64, int64, uint8[::1], uint32[::1], uint8[::1])",
    cache=True,
    nogil=True,
)
def block_misfits(
    bits: NDArray[np.uint16],
    brain: bool,
    lo: int,
    hi: int,
    exps: NDArray[np.uint8],
    largest: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> None:
    """Raise ``out[i]`` to the exponent of block ``lo + i`` if the block does not fit ``exps[lo + i]``.

    ``largest[E]`` is the largest float32 magnitude, as bits, that exponent ``E`` admits.
    """
    for i in range(hi - lo):
        start = (lo + i) * BLOCK
        peak = peak_bits(bits, brain, start, min(start + BLOCK, bits.size))
        if peak > largest[exps[lo + i]]:
            out[i] = max(out[i], np.uint8(peak >> np.uint32(23)))


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


#: bits that the next round's block exponent lies above the last result's, at least and at most
HEADROOM = 2
MOST_HEADROOM = 6


@njit("uint8(int32[::1], uint8, int64)", cache=True, nogil=True, _nrt=False, inline="always")
def carried_exponent(sums: NDArray[np.int32], exponent: int, shift: int) -> Any:
    """The exponent that a block uses in the next round (carried exponents), at most 254.

    It is that of the largest sum plus :data:`HEADROOM` bits, or one less than this round's if that is more, but never
    more than :data:`MOST_HEADROOM` bits above the largest sum. Gradients of single ranks exceed their sum now and
    then; with one bit of headroom and no memory, 7.1 % of the blocks of a small network on digits had to be restarted
    in a round, with this rule 3.0 %, most of the rest being blocks that were all zero the round before.

    ``sums`` are the ``R * 2**-s`` of the block under ``exponent``. ``shift`` is ``ceil(log2 n) - 30``, which makes
    ``floor(log2 |R|) + exponent + shift`` the exponent field of the sum. All-zero and poisoned blocks give 0.
    """
    peak = np.int32(0)
    for j in range(sums.size):
        peak = max(peak, np.int32(abs(sums[j])))
    if peak == 0 or exponent == POISON:
        return np.uint8(0)
    field = np.int64(exponent) + shift
    while peak > 1:
        peak >>= 1
        field += 1
    decayed = min(np.int64(exponent) - 1, field + MOST_HEADROOM)
    field = max(field + HEADROOM, decayed)
    return np.uint8(min(max(field, np.int64(0)), np.int64(POISON - 1)))
