"""Floats to integers, straight into rows (number format).

With exponent ``E`` of a block and ``n`` contributing ranks an element becomes ``q = rint(x * scale[E])``,
clamped to ``limit = floor((2**31 - 1) / n)``: no sum of ``n`` such integers can wrap. Scales are powers of
two from 2**-112 to 2**157, beyond float32; the product is taken in float64, where it is exact, and so is the
clamp. Where float32 gives the same (``fast[E]`` is not 0), half as much is to be computed.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import slot_checksum
from inanet.kernels.half import widen16
from inanet.kernels.jit import njit
from inanet.kernels.layout import BLOCK, CHECK, HEAD, HEADER_WORDS, PAYLOAD_WORDS, POISON, WORDS


@njit("float32(int64)", cache=True, nogil=True, inline="always")
def largest_float32(limit: int) -> np.float32:
    """Largest float32 not beyond ``limit``, which is positive."""
    nearest = np.float32(limit)
    # half a unit in the last place or more off it, whatever its mantissa
    return nearest if nearest <= np.float64(limit) else np.float32(nearest * np.float32(1 - 2**-24))


@njit(
    "void(uint16[::1], boolean, int64, int64, uint8[::1], float64[::1], float32[::1], int64, uint8[::1],"
    " int32[:, ::1], int64, boolean, boolean)",
    cache=True,
    nogil=True,
)
def quantise(
    values: NDArray[np.uint16],
    brain: bool,
    lo: int,
    hi: int,
    exps: NDArray[np.uint8],
    scale: NDArray[np.float64],
    fast: NDArray[np.float32],
    limit: int,
    misfit: NDArray[np.uint8],
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """Quantise blocks ``lo`` to ``hi - 1`` of one rank's elements into rows ``row0`` onwards.

    ``values`` holds patterns of f16 (``brain`` False) or bf16 (``brain`` True); float32 has a kernel that takes all
    ranks at once (:func:`inanet.kernels.together.quantise_together`). ``exps`` holds one exponent per block of the tensor. The ``first`` rank of a host clears the payload, each adds to
    it, the ``last`` one writes the checksum; what a short last block leaves over stays 0.

    A block with ``misfit[i] != 0`` is not quantised; its payload is that exponent, then zeros. A block of
    exponent 255 contributes zeros.
    """
    bound, bound32 = np.float64(limit), largest_float32(limit)
    for i in range(hi - lo):
        row = np.uint64(row0 + i)
        if first:
            for j in range(WORDS):
                rows[row, HEAD + j] = 0
        exponent = exps[lo + i]
        if misfit[i] != 0:
            rows[row, HEAD] = misfit[i]
        elif exponent != POISON:
            start = np.uint64((lo + i) * BLOCK)
            count = min(WORDS, np.uint64(values.size) - start)
            factor, quick = scale[exponent], fast[exponent]
            if quick != 0:
                for j in range(count):
                    r = np.rint(np.float32(widen16(values[start + j], brain) * quick))
                    r = r if r < bound32 else bound32
                    r = r if r > -bound32 else -bound32
                    rows[row, HEAD + j] += np.int32(r)
                count = np.uint64(0)
            for j in range(count):
                # comparisons, because the NaN rules of min and max cost time; a NaN becomes a bound
                q = np.rint(np.float64(widen16(values[start + j], brain)) * factor)
                q = q if q < bound else bound
                q = q if q > -bound else -bound
                rows[row, HEAD + j] += np.int32(q)
        if last:
            rows[row, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))
