"""Maxima and minima: maps to signed integers that are ordered like the values, and back.

A float's bits ``b``, read as a signed integer, become ``b ^ ((b >> 31) & magnitude mask)``: ordered like the
number, with -0.0 just below 0.0 (IEEE 754-2019 ``maximum``). 16-bit floats are used as sign-extended 16-bit
integers; integers are their own key. A minimum is the maximum of complemented keys. A NaN is the key
:data:`NAN_KEY`, which is greater than any other key of a float, complemented or not, so that it wins both
folds.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inanet.kernels.checksum import row_checksum
from inanet.kernels.layout import CHECKSUM_WORD, HEADER_WORDS, PAYLOAD_WORDS

#: elements of up to 32 bits in a fragment
VALUES32 = PAYLOAD_WORDS
#: int64 elements in a fragment
VALUES64 = PAYLOAD_WORDS // 2
#: key of a NaN
NAN_KEY = 0x7FFFFFFF

Words = NDArray[np.int32] | NDArray[np.int16]


@njit(
    [
        "void(int32[::1], int64, int64, int32, int32, int32, int32[:, ::1], int64, boolean, boolean)",
        "void(int16[::1], int64, int64, int32, int32, int32, int32[:, ::1], int64, boolean, boolean)",
    ],
    cache=True,
    nogil=True,
)
def order32(
    values: Words,
    lo: int,
    hi: int,
    magnitude: int,
    refused: int,
    flip: int,
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """Write (``first``) or merge keys of fragments ``lo`` to ``hi - 1`` in rows ``row0`` on; ``last`` seals.

    ``magnitude`` masks a float's exponent and fraction (0 for integers); a magnitude above ``refused``
    becomes :data:`NAN_KEY`; ``flip`` is -1 for a minimum, else 0.
    """
    for i in range(hi - lo):
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        start = (lo + i) * VALUES32
        part = values[start : min(start + VALUES32, values.size)]
        for j in range(part.size):
            word = np.int32(part[j])
            key = word ^ ((word >> np.int32(31)) & magnitude) ^ flip
            if (word & magnitude) > refused:
                key = np.int32(NAN_KEY)
            payload[j] = key if first else max(payload[j], key)
        if first:
            payload[part.size :] = 0
        if last:
            row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


@njit(
    [
        "int64(int32[:, ::1], int64[::1], int64[::1], int32, int32, int32, int32[::1], int64[::1])",
        "int64(int32[:, ::1], int64[::1], int64[::1], int32, int32, int32, int16[::1], int64[::1])",
    ],
    cache=True,
    nogil=True,
)
def restore32(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    magnitude: int,
    nan: int,
    flip: int,
    out: Words,
    lowest: NDArray[np.int64],
) -> int:
    """Write fragment ``fragments[k]`` of ``out`` from the keys in row ``slots[k]``; return how many are NaN.

    NaNs get the bit pattern ``nan``, and ``lowest[0]`` is lowered to the smallest index of one. Integers
    (``magnitude`` 0) have no NaN.
    """
    found = 0
    for k in range(slots.size):
        payload = rows[slots[k], HEADER_WORDS:CHECKSUM_WORD]
        start = fragments[k] * VALUES32
        part = out[start : min(start + VALUES32, out.size)]
        bad = 0
        for j in range(part.size):
            key = payload[j] ^ flip
            word = key ^ ((key >> np.int32(31)) & magnitude)
            if magnitude != 0 and payload[j] == NAN_KEY:
                word = nan
                bad += 1
            part[j] = word
        if bad:
            found += bad
            for j in range(part.size):
                if payload[j] == NAN_KEY:
                    lowest[0] = min(lowest[0], start + j)
                    break
    return found


@njit("void(int64[::1], int64, int64, int64, int32[:, ::1], int64, boolean, boolean)", cache=True, nogil=True)
def order64(
    values: NDArray[np.int64],
    lo: int,
    hi: int,
    flip: int,
    rows: NDArray[np.int32],
    row0: int,
    first: bool,
    last: bool,
) -> None:
    """:func:`order32` for int64: a key is two payload words, the low one first."""
    for i in range(hi - lo):
        row = rows[row0 + i]
        payload = row[HEADER_WORDS:CHECKSUM_WORD]
        start = (lo + i) * VALUES64
        part = values[start : min(start + VALUES64, values.size)]
        for j in range(part.size):
            key = part[j] ^ flip
            if not first:
                key = max(key, (np.int64(payload[2 * j + 1]) << 32) | np.int64(np.uint32(payload[2 * j])))
            payload[2 * j] = np.int32(key)
            payload[2 * j + 1] = np.int32(key >> 32)
        if first:
            payload[2 * part.size :] = 0
        if last:
            row[CHECKSUM_WORD] = np.int32(row_checksum(row, HEADER_WORDS, PAYLOAD_WORDS))


@njit("void(int32[:, ::1], int64[::1], int64[::1], int64, int64[::1])", cache=True, nogil=True)
def restore64(
    rows: NDArray[np.int32],
    slots: NDArray[np.int64],
    fragments: NDArray[np.int64],
    flip: int,
    out: NDArray[np.int64],
) -> None:
    """:func:`restore32` for int64."""
    for k in range(slots.size):
        payload = rows[slots[k], HEADER_WORDS:CHECKSUM_WORD]
        start = fragments[k] * VALUES64
        part = out[start : min(start + VALUES64, out.size)]
        for j in range(part.size):
            part[j] = ((np.int64(payload[2 * j + 1]) << 32) | np.int64(np.uint32(payload[2 * j]))) ^ flip
