"""Quantities as people write them in configuration files: ``"64 MiB"``, ``"1 Gbit/s"``, ``"200 ms"``.

Parsing is exact (rational arithmetic), and what :func:`show_bytes`, :func:`show_rate` and
:func:`show_duration` print parses to the same value again. Units are case-sensitive because case carries
meaning: ``MB`` is not ``Mb``.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*(\D.*)?", re.ASCII)

BYTE_UNITS: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        "KiB": 1 << 10,
        "MiB": 1 << 20,
        "GiB": 1 << 30,
        "TiB": 1 << 40,
        "kB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
)
RATE_UNITS: Mapping[str, int] = MappingProxyType(
    {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
)
DURATION_UNITS: Mapping[str, Fraction] = MappingProxyType(
    {
        "ns": Fraction(1, 10**9),
        "us": Fraction(1, 10**6),
        "ms": Fraction(1, 10**3),
        "s": Fraction(1),
        "min": Fraction(60),
        "h": Fraction(3600),
    }
)


def _split(text: object, units: Mapping[str, int] | Mapping[str, Fraction], example: str) -> Fraction:
    """The quantity in base units. Raises ``ValueError`` saying what is wrong; what is allowed."""
    allowed = f"a number and one of {', '.join(units)}, e.g. {example!r}"
    if not isinstance(text, str):
        raise ValueError(f"{text!r} has no unit; allowed: {allowed}")
    match = _NUMBER.fullmatch(text.strip())
    if match is None and _NUMBER.fullmatch(text.strip().removeprefix("-")):
        raise ValueError(f"{text!r} is negative; allowed: {allowed}")
    if match is None:
        raise ValueError(f"{text!r} is not a quantity; allowed: {allowed}")
    number, unit = match.groups()
    if unit is None:
        raise ValueError(f"{text!r} has no unit; allowed: {allowed}")
    if unit not in units:
        near = [known for known in units if known.lower() == unit.lower()]
        hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
        raise ValueError(f"{text!r} has the unknown unit {unit!r}{hint}; allowed: {allowed}")
    return Fraction(Decimal(number)) * units[unit]


def _whole(quantity: Fraction, text: object, base: str) -> int:
    if quantity.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of {base}; allowed: a multiple of 1 {base}")
    return int(quantity)


def parse_bytes(text: object) -> int:
    """Bytes in ``"64 MiB"`` (powers of 1024), ``"64 MB"`` (of 1000) or a plain integer. Raises
    ``ValueError``.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text} is negative; allowed: 0 or more bytes")
        return text
    return _whole(_split(text, BYTE_UNITS, "64 MiB"), text, "B")


def parse_rate(text: object) -> int:
    """Bits per second in ``"1 Gbit/s"``; the unit is required, bytes per second are refused. Raises
    ``ValueError``.
    """
    return _whole(_split(text, RATE_UNITS, "1 Gbit/s"), text, "bit/s")


def parse_duration(text: object) -> float:
    """Seconds in ``"200 ms"``; the unit is required. Raises ``ValueError``."""
    return float(_split(text, DURATION_UNITS, "200 ms"))


def show_bytes(count: int) -> str:
    """The count in the largest binary unit that divides it: ``"64 MiB"``, ``"1000 B"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % BYTE_UNITS[unit] == 0:
            return f"{count // BYTE_UNITS[unit]} {unit}"
    return f"{count} B"


def show_rate(bits_per_second: int) -> str:
    """The rate in the largest unit that divides it: ``"1 Gbit/s"``."""
    for unit in reversed(tuple(RATE_UNITS)):
        if bits_per_second and bits_per_second % RATE_UNITS[unit] == 0:
            return f"{bits_per_second // RATE_UNITS[unit]} {unit}"
    return f"{bits_per_second} bit/s"


def show_duration(seconds: float) -> str:
    """The duration in seconds or the largest smaller unit that makes it whole: ``"5 s"``, ``"200 ms"``."""
    exact = Fraction(Decimal(repr(seconds)))
    for unit in ("s", "ms", "us", "ns"):
        count = exact / DURATION_UNITS[unit]
        if count.denominator == 1:
            return f"{int(count)} {unit}"
    return f"{Decimal(repr(seconds)):f} s"


def show_count(number: int, noun: str) -> str:
    """The number of things: ``"1 tensor"``, ``"12,000 tensors"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
