"""Quantities with units: exact both ways."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inanet import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "64 MiB", 64 << 20),
        (units.parse_bytes, "64MB", 64_000_000),
        (units.parse_bytes, "1.5 KiB", 1536),
        (units.parse_bytes, 4096, 4096),
        (units.parse_rate, "1 Gbit/s", 10**9),
        (units.parse_rate, "2.5 Gbit/s", 2_500_000_000),
        (units.parse_duration, "5 s", 5.0),
        (units.parse_duration, " 200 ms ", 0.2),
        (units.parse_duration, "0.3 us", 3e-7),
        (units.parse_duration, "2 min", 120.0),
    ],
)
def test_values(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (units.parse_bytes, "64 mb", r"unknown unit 'mb' \(did you mean 'MB'\?\); allowed: .*e.g. '64 MiB'"),
        (units.parse_bytes, "64", "has no unit"),
        (units.parse_bytes, "0.3 B", "not a whole number of B"),
        (units.parse_bytes, -1, "negative"),
        (units.parse_bytes, True, "has no unit"),
        (units.parse_bytes, "-1 B", "'-1 B' is negative; allowed: a number and one of B"),
        (units.parse_duration, "-1 s", "'-1 s' is negative"),
        (units.parse_bytes, "--1 B", "not a quantity"),
        (units.parse_bytes, "1e3 B", "unknown unit 'e3 B'"),
        (units.parse_bytes, "٣ B", "not a quantity"),
        (units.parse_rate, 1000, "1000 has no unit"),
        (units.parse_rate, "1 Gbps", "unknown unit 'Gbps'"),
        (units.parse_rate, "1 gbit/s", "did you mean 'Gbit/s'"),
        (units.parse_duration, 5, "5 has no unit"),
        (units.parse_duration, "", "not a quantity"),
        (units.parse_duration, "5 S", "did you mean 's'"),
    ],
)
def test_refusals(parse: Callable[[object], float], text: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text)


@given(st.integers(0, 1 << 60))
def test_bytes_and_rates_are_shown_exactly(count: int) -> None:
    assert units.parse_bytes(units.show_bytes(count)) == count
    assert units.parse_rate(units.show_rate(count)) == count


@given(st.floats(0, 1e9))
def test_durations_are_shown_exactly(seconds: float) -> None:
    assert units.parse_duration(units.show_duration(seconds)) == seconds


def test_the_largest_fitting_unit_is_shown() -> None:
    assert [units.show_bytes(n) for n in (0, 1000, 1024, 64 << 20)] == ["0 B", "1000 B", "1 KiB", "64 MiB"]
    assert [units.show_rate(n) for n in (0, 999, 10**9)] == ["0 bit/s", "999 bit/s", "1 Gbit/s"]
    assert [units.show_duration(n) for n in (5.0, 0.2, 2e-3, 1e-9)] == ["5 s", "200 ms", "2 ms", "1 ns"]


def test_counts_have_their_plural() -> None:
    assert [units.show_count(n, "tensor") for n in (0, 1, 12_000)] == [
        "0 tensors",
        "1 tensor",
        "12,000 tensors",
    ]
