"""Floats to integers, straight into rows (R2).

With exponent ``E`` of a block and ``n`` contributing ranks an element becomes ``q = rint(x * 2**s)``, ``s =
157 - ceil(log2 n) - E``, clamped to ``limit = floor((2**31 - 1) / n)``: no sum of ``n`` such integers can
wrap.

``2**s`` reaches from 2**-112 to 2**157, beyond float32, so it is applied as two float32 factors. Both
products are exact unless the first underflows, and then ``x * 2**s`` is far below one half and rounds to 0
anyway.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.half import as_float32
from inanet.kernels.layout import BLOCK, CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS, POISON

Values = NDArray[np.float32] | NDArray[np.uint16]

#: largest float32 below 2**31: what leaves float for int32 is always representable
_INT32_EDGE = np.float32(2147483520.0)


@njit(
    [
        "void(float32[::1], boolean, int64, int64, uint8[::1], float32[:, ::1], float64, int64, uint8[::1],"
        " int32[:, ::1], int64, boolean, boolean)",
        "void(uint16[::1], boolean, int64, int64, uint8[::1], float32[:, ::1], float64, int64, uint8[::1],"
        " int32[:, ::1], int64, boolean, boolean)",
    ],
    cache=True,
    nogil=True,
)
def quantise(
    values: Values,
    brain: bool,
    lo: int,
    hi: int,
    exps: NDArray[np.uint8],
    scales: NDArray[np.float32],
    factor: float,
    limit: int,
    misfit: NDArray[np.uint8],
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """Quantise blocks ``lo`` to ``hi - 1`` of one rank's elements into rows ``row0`` onwards.

    ``values`` holds float32, or uint16 patterns of f16 (``brain`` False) or bf16 (``brain`` True). ``exps``
    holds one exponent per block of the tensor, ``scales[0, E] * scales[1, E]`` the scale of exponent ``E``. A
    ``factor`` other than 0 replaces the scale of exponent 0 (fixed mode). The ``first`` rank of a host writes
    the payload and pads a short block with zeros, later ranks add, the ``last`` one writes the checksum.

    A block with ``misfit[i] != 0`` is not quantised; its payload is that exponent, then zeros. A block of
    exponent 255 contributes zeros.
    """
    bound = np.int32(limit)
    for i in range(hi - lo):
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        exponent = exps[lo + i]
        start = (lo + i) * BLOCK
        part = values[start : min(start + BLOCK, values.size)]
        if misfit[i] != 0 or exponent == POISON:
            part = part[:0]
        count = part.size
        if first:
            for j in range(count, PAYLOAD_WORDS):
                payload[j] = 0
        if count == 0:
            payload[0] = misfit[i]
        elif exponent == 0 and factor != 0.0:
            for j in range(count):
                product = np.rint(np.float64(as_float32(part[j], brain)) * factor)
                q = np.int32(min(max(product, -np.float64(limit)), np.float64(limit)))
                payload[j] = q if first else payload[j] + q
        else:
            one, two = scales[0, exponent], scales[1, exponent]
            for j in range(count):
                scaled = np.rint(as_float32(part[j], brain) * one * two)
                whole = np.int32(min(max(scaled, -_INT32_EDGE), _INT32_EDGE))
                q = min(max(whole, -bound), bound)
                payload[j] = q if first else payload[j] + q
        if last:
            row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))
