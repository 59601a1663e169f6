"""Widening and narrowing of 16-bit floats, as integer arithmetic that vectorises.

Kernels see f16 and bf16 as uint16 bit patterns. ``brain`` tells which: False is IEEE binary16 (f16), True is
bfloat16.
"""

import numpy as np

from inanet.kernels.jit import njit

_F16_INFINITY = 0x7C00
#: difference of the exponent biases of float32 and f16
_REBIAS = 112


@njit("float32(uint16, boolean)", cache=True, nogil=True)
def widen16(bits: int, brain: bool) -> np.float32:
    """The value of a 16-bit pattern as float32, exactly."""
    if brain:
        return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    sign = np.uint32((bits & 0x8000) << 16)
    magnitude = np.uint32(bits & 0x7FFF)
    # denormals go through an integer conversion: float arithmetic on them takes a microcode assist
    small = np.float32(np.float32(magnitude) * np.float32(2.0**-24)).view(np.uint32)
    rebias = np.uint32(2 * _REBIAS if magnitude >= _F16_INFINITY else _REBIAS)
    normal = np.uint32((magnitude << np.uint32(13)) + (rebias << np.uint32(23)))
    return np.uint32(sign | (small if magnitude < 0x400 else normal)).view(np.float32)


@njit("uint16(float64, boolean)", cache=True, nogil=True)
def narrow16(value: float, brain: bool) -> np.uint16:
    """The 16-bit pattern nearest to a float64, ties to even; overflow is infinity, NaN the canonical one.

    Adding and subtracting a power of two 2**52 times the target's last place rounds there, in one rounding.
    """
    bits = np.float64(value).view(np.uint64)
    sign = np.uint32(bits >> np.uint64(48)) & np.uint32(0x8000)
    lowest, digits = (1023 - 126, 7) if brain else (1023 - 14, 10)
    exponent = max(np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF)), np.int64(lowest))
    lever = np.uint64((exponent + 52 - digits) << 52).view(np.float64)
    rounded = np.float32((abs(value) + lever) - lever)
    pattern = rounded.view(np.uint32)
    if brain:
        magnitude = np.uint32(pattern >> np.uint32(16))
        infinity, quiet = np.uint32(0x7F80), np.uint32(0x7FC0)
    else:
        normal = np.uint32((pattern >> np.uint32(13)) - np.uint32(_REBIAS << 10))
        small = np.uint32(rounded * np.float32(2.0**24)) if rounded < np.float32(2.0**-14) else np.uint32(0)
        magnitude = small if rounded < np.float32(2.0**-14) else normal
        infinity, quiet = np.uint32(_F16_INFINITY), np.uint32(0x7E00)
        if rounded >= np.float32(65536.0):
            magnitude = infinity
    if value != value:
        return np.uint16(quiet)
    return np.uint16(sign | magnitude)
