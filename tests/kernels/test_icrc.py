"""The kernel's CRC, in both of its ways, against zlib's. Whole packets are checked in tests/wire/test_roce.py."""

from zlib import crc32

import numpy as np
import pytest

from inanet.kernels.icrc import AVAILABLE, advance, advance_fast

ONES = 0xFFFFFFFF


@pytest.mark.parametrize("way", [advance, advance_fast], ids=["tables", "folding" if AVAILABLE else "none"])
@pytest.mark.parametrize("start", [0, 1, 3, 8])
def test_every_length_from_every_state(way: object, start: int) -> None:
    rng = np.random.default_rng(start)
    arena = rng.integers(0, 256, 5000, dtype=np.uint8)
    for length in (*range(0, 260, 4), 1024, 1028, 1040, 4096):
        state = int(rng.integers(0, 1 << 32))
        expected = crc32(arena[start : start + length].tobytes(), state ^ ONES) ^ ONES
        assert way(state, arena, start, start + length) == expected, length  # type: ignore[operator]


def test_what_lies_around_does_not_count() -> None:
    arena = np.zeros(400, np.uint8)
    before = advance_fast(1, arena, 100, 300)
    arena[:100] = arena[300:] = 255
    assert advance_fast(1, arena, 100, 300) == before
    for at in (100, 163, 164, 299):
        arena[at] ^= 1
        assert advance_fast(1, arena, 100, 300) != before
        arena[at] ^= 1
