"""What our framings protect their packets with: a keyed tag over the header, a linear checksum over the payload.

Plain arithmetic for decoders and tests; the compiled counterparts are :mod:`inanet.kernels.header` and
:mod:`inanet.kernels.checksum`.
"""

from typing import Literal

import numpy as np

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def header_tag(words: tuple[int, int, int, int, int], key: int) -> int:
    """Keyed 32-bit mix of a header's first five 32-bit words, in its own byte order, with the job's 64-bit key (header tag).

    Two rounds of a 64-bit multiply-xorshift per word and a final avalanche. It stops blind injection and finds damage;
    it is no protection against somebody who can read the traffic.
    """
    h = key & _MASK64
    for word in words:
        h = (h ^ word) * 0x9E3779B97F4A7C15 & _MASK64
        h ^= h >> 29
    h = h * 0xBF58476D1CE4E5B9 & _MASK64
    h ^= h >> 32
    return h & _MASK32


def checksum(payload: bytes, order: Literal["<", ">"]) -> int:
    """Linear checksum: sum of (2j + 1) * x_j mod 2^32 over the payload's 32-bit words in this byte order.

    The weights are odd, so a single flipped bit always changes it, and the checksum of a sum is the sum of checksums.
    """
    words = np.frombuffer(payload, f"{order}u4").astype(np.uint64)
    weights = 2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1)
    return int((words * weights).sum(dtype=np.uint64)) & _MASK32
