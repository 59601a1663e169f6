"""16-bit floats: widening is exact, narrowing rounds once, to nearest even."""

from fractions import Fraction

import numpy as np
import pytest

from inanet.kernels.half import narrow16, widen16

PATTERNS = range(1 << 16)


def bf16_value(pattern: int) -> float:
    return float(np.uint32(pattern << 16).view(np.float32))


def test_every_f16_widens_exactly() -> None:
    expected = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    got = np.array([widen16(pattern, False) for pattern in PATTERNS], np.float32).view(np.uint32)
    nan = (expected & 0x7FFFFFFF) > 0x7F800000
    np.testing.assert_array_equal(got[~nan], expected[~nan])
    assert np.isnan(got[nan].view(np.float32)).all()


def test_every_bf16_widens_to_its_upper_half() -> None:
    finite = [pattern for pattern in PATTERNS if pattern & 0x7F80 != 0x7F80]
    got = np.array([widen16(pattern, True) for pattern in finite], np.float32).view(np.uint32)
    np.testing.assert_array_equal(got, np.array(finite, np.uint32) << 16)


def test_every_pattern_survives_a_round_trip() -> None:
    for brain, infinity in ((False, 0x7C00), (True, 0x7F80)):
        numbers = [pattern for pattern in PATTERNS if pattern & 0x7FFF <= infinity]
        assert [int(narrow16(widen16(pattern, brain), brain)) for pattern in numbers] == numbers


def f16_probes() -> np.ndarray:
    """Every half-way point between neighbouring f16 values, and the float64 values right beside it."""
    magnitudes = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ends = np.append(magnitudes[1:], 65536.0)
    middles = (magnitudes + ends) / 2
    probes = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf)])
    return np.concatenate([probes, -probes])


def test_f16_rounds_like_numpy() -> None:
    probes = f16_probes()
    with np.errstate(over="ignore"):
        expected = probes.astype(np.float16).view(np.uint16)
    got = np.array([narrow16(value, False) for value in probes.tolist()], np.uint16)
    np.testing.assert_array_equal(got, expected)


def test_bf16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(7)
    for pattern in [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, *rng.integers(0, 0x7F7F, 500).tolist()]:
        low = Fraction(bf16_value(pattern))
        high = Fraction(bf16_value(pattern + 1)) if pattern < 0x7F7F else Fraction(2**128)
        middle = float((low + high) / 2)
        even = pattern + (pattern & 1)
        assert narrow16(middle, True) == even
        assert narrow16(float(np.nextafter(middle, 0)), True) == pattern
        assert narrow16(float(np.nextafter(middle, np.inf)), True) == pattern + 1
        assert narrow16(-middle, True) == even | 0x8000


@pytest.mark.parametrize(("brain", "infinity", "nan"), [(False, 0x7C00, 0x7E00), (True, 0x7F80, 0x7FC0)])
def test_beyond_the_range(brain: bool, infinity: int, nan: int) -> None:
    assert narrow16(1e300, brain) == infinity
    assert narrow16(-1e300, brain) == infinity | 0x8000
    assert narrow16(float("inf"), brain) == infinity
    assert narrow16(float("-inf"), brain) == infinity | 0x8000
    assert narrow16(float("nan"), brain) == nan
    assert narrow16(1e-300, brain) == 0
    assert narrow16(-0.0, brain) == 0x8000
