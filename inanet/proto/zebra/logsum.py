"""Sums of floats where there are only integer adders and tables (section III-E; NetFC, ICNP 2021).

A number is kept as its sign and the logarithm of its magnitude, a fixed-point integer. With a >= b > 0

    log2(a + b) = log2 a + log2(1 + 2^-d),   log2(a - b) = log2 a + log2(1 - 2^-d),   d = log2 a - log2 b,

so a sum takes a comparison, a subtraction, a look-up and an addition. A float's logarithm is its exponent plus a look-up by
the upper bits of its fraction; the way back is a look-up by the fraction of the logarithm. What is lost: half a step of
the fixed point per look-up, and where numbers of opposite sign nearly cancel, what the step means against the larger of
them. :data:`TABLE_BYTES` is what the tables take; tests and docs/zebra.md have the accuracy.

A slot's word, int32: 0 for zero; else the logarithm in steps of 2^-:data:`FRACTION`, offset so that it is positive, times
two, plus the sign. Denormals count as zero, as they do in most hardware.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from inanet.kernels.jit import njit

#: fractional bits of a logarithm
FRACTION = 13
#: upper bits of a float's fraction that its logarithm is looked up by
MANTISSA = 13
#: largest difference of logarithms that matters: beyond it the smaller number is below half a step
REACH = (FRACTION + 2) << FRACTION

_STEPS = 1 << FRACTION
#: added to logarithms so that the smallest float's is positive
_BIAS = 256 << FRACTION
_ZERO = np.int32(0)


class Tables(NamedTuple):
    """``log`` uint16[2^MANTISSA], ``power`` uint32[2^FRACTION] (fractions of floats), ``plus`` and ``minus`` int32[REACH]."""

    log: Any
    power: Any
    plus: Any
    minus: Any


def _build() -> Tables:
    fraction = (np.arange(1 << MANTISSA) + 0.5) / (1 << MANTISSA)
    log = np.minimum(np.rint(np.log2(1 + fraction) * _STEPS), _STEPS - 1).astype(np.uint16)
    power = np.minimum(np.rint((np.exp2(np.arange(_STEPS) / _STEPS) - 1) * (1 << 23)), (1 << 23) - 1)
    d = np.arange(REACH) / _STEPS
    plus = np.rint(np.log2(1 + np.exp2(-d)) * _STEPS).astype(np.int32)
    d[0] = 0.5 / _STEPS
    minus = np.rint(np.log2(-np.expm1(-d * np.log(2))) * _STEPS).astype(np.int32)
    return Tables(log, power.astype(np.uint32), plus, minus)


TABLES = _build()
#: entries of two bytes, but for the powers' four
TABLE_BYTES = 2 * len(TABLES.log) + 4 * len(TABLES.power) + 2 * len(TABLES.plus) + 2 * len(TABLES.minus)
TABLE: Any = types.NamedTuple(
    (types.uint16[::1], types.uint32[::1], types.int32[::1], types.int32[::1]), Tables
)
_INLINE = {"cache": True, "nogil": True, "_nrt": False, "inline": "always"}
_LOG_BITS = np.uint32(23 - MANTISSA)
_LOG_MASK = np.uint32((1 << MANTISSA) - 1)


@njit(types.int32(TABLE, types.uint32), **_INLINE)
def to_log(t: Any, bits: int) -> Any:
    """The word of a finite float32's bits."""
    exponent = np.int32((bits >> np.uint32(23)) & np.uint32(0xFF))
    if exponent == 0:
        return np.int32(0)
    whole = (exponent << np.int32(FRACTION)) + np.int32(t.log[(bits >> _LOG_BITS) & _LOG_MASK])
    return np.int32(((whole + np.int32(_BIAS)) << np.int32(1)) | np.int32(bits >> np.uint32(31)))


@njit(types.int32(TABLE, types.int32, types.int32), **_INLINE)
def add_logs(t: Any, a: int, b: int) -> Any:
    """The word of a sum."""
    if a == 0 or b == 0:
        return a | b
    if a < b:
        a, b = b, a
    d = (a >> np.int32(1)) - (b >> np.int32(1))
    if d >= REACH:
        return a
    if (a ^ b) & np.int32(1) == 0:
        return np.int32(a + (t.plus[d] << np.int32(1)))
    if d == 0:
        return np.int32(0)
    return np.int32(a + (t.minus[d] << np.int32(1)))


@njit(types.uint32(TABLE, types.int32), **_INLINE)
def from_log(t: Any, word: int) -> Any:
    """The float32's bits of a word; beyond float32's range infinity or zero."""
    if word == 0:
        return np.uint32(0)
    sign = np.uint32(word & np.int32(1)) << np.uint32(31)
    value = (word >> np.int32(1)) - np.int32(_BIAS)
    exponent = value >> np.int32(FRACTION)
    if exponent >= 255:
        return sign | np.uint32(0x7F800000)
    if exponent < 1:
        return sign
    fraction = t.power[np.uint32(value & np.int32(_STEPS - 1))]
    return sign | (np.uint32(exponent) << np.uint32(23)) | fraction


@njit(types.void(TABLE, types.int32[::1], types.uint32[::1]), cache=True, nogil=True, _nrt=False)
def _floats(t: Any, words: Any, out: Any) -> None:
    for i in range(words.size):
        out[i] = from_log(t, words[i])


def floats_of(words: NDArray[np.int32]) -> NDArray[np.uint32]:
    """Bits of the float32s of slots' words, in the same shape."""
    out = np.zeros(words.size, np.uint32)
    _floats(TABLES, np.ascontiguousarray(words).reshape(-1), out)
    return out.reshape(words.shape)


@njit(types.void(TABLE, types.uint32[:, ::1], types.uint32[::1]), cache=True, nogil=True, _nrt=False)
def sum_rows(t: Any, rows: Any, out: Any) -> None:
    """``out[j]``: bits of the sum of ``rows[i, j]`` over i, as a switch would have it; for measuring."""
    for j in range(rows.shape[1]):
        word = _ZERO
        for i in range(rows.shape[0]):
            word = add_logs(t, word, to_log(t, rows[i, j]))
        out[j] = from_log(t, word)
