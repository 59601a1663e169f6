"""Maxima and minima: maps to signed integers that are ordered like the values, and back.

A float's bits ``b``, read as a signed integer, become ``b ^ ((b >> 31) & magnitude mask)``: ordered like the
number, with -0.0 just below 0.0 (IEEE 754-2019 ``maximum``). 16-bit floats are used as sign-extended 16-bit
integers; integers are their own key. A minimum is the maximum of complemented keys. A NaN is the key
:data:`NAN_KEY`, which is greater than any other key of a float, complemented or not, so that it wins both
folds.
"""

import numpy as np
from numpy.typing import NDArray

from inanet.kernels.checksum import slot_checksum
from inanet.kernels.jit import njit
from inanet.kernels.layout import CHECK, HEAD, HEADER_WORDS, PAYLOAD_WORDS, WORDS

#: elements of up to 32 bits in a fragment
VALUES32 = PAYLOAD_WORDS
#: int64 elements in a fragment
VALUES64 = PAYLOAD_WORDS // 2
#: key of a NaN
NAN_KEY = 0x7FFFFFFF

_N64 = np.uint64(VALUES64)
_NEXT = np.uint64(1)

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
        row = np.uint64(row0 + i)
        start = np.uint64((lo + i) * VALUES32)
        count = min(WORDS, np.uint64(values.size) - start)
        for j in range(count):
            word = np.int32(values[start + j])
            key = word ^ ((word >> np.int32(31)) & magnitude) ^ flip
            if (word & magnitude) > refused:
                key = np.int32(NAN_KEY)
            rows[row, HEAD + j] = key if first else max(rows[row, HEAD + j], key)
        if first:
            for j in range(count, WORDS):
                rows[row, HEAD + j] = 0
        if last:
            rows[row, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))


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
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * VALUES32)
        bad = 0
        for j in range(min(WORDS, np.uint64(out.size) - start)):
            folded = rows[row, HEAD + j]
            key = folded ^ flip
            word = key ^ ((key >> np.int32(31)) & magnitude)
            if magnitude != 0 and folded == NAN_KEY:
                word = nan
                bad += 1
            out[start + j] = word
        if bad:
            found += bad
            j = 0
            while rows[slots[k], HEADER_WORDS + j] != NAN_KEY:
                j += 1
            lowest[0] = min(lowest[0], fragments[k] * VALUES32 + j)
    return found


@njit("int64(int32, int32)", cache=True, nogil=True)
def _join64(low: int, high: int) -> np.int64:
    return (np.int64(high) << 32) | np.int64(np.uint32(low))


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
        row = np.uint64(row0 + i)
        start = np.uint64((lo + i) * VALUES64)
        count = min(_N64, np.uint64(values.size) - start)
        for j in range(count):
            word = HEAD + j + j
            key = values[start + j] ^ flip
            if not first:
                key = max(key, _join64(rows[row, word], rows[row, word + _NEXT]))
            rows[row, word] = np.int32(key)
            rows[row, word + _NEXT] = np.int32(key >> 32)
        if first:
            for j in range(count + count, WORDS):
                rows[row, HEAD + j] = 0
        if last:
            rows[row, CHECK] = np.int32(slot_checksum(rows, row0 + i, HEADER_WORDS, PAYLOAD_WORDS))


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
        row = np.uint64(slots[k])
        start = np.uint64(fragments[k] * VALUES64)
        for j in range(min(_N64, np.uint64(out.size) - start)):
            word = HEAD + j + j
            out[start + j] = _join64(rows[row, word], rows[row, word + _NEXT]) ^ flip
