"""Rates, sizes and durations as people write them, for pydantic models.

Rates are decimal bits per second (``"1gbit"``), as network equipment counts. Sizes are bytes and say which kind of
kilo they mean: ``kB``/``MB`` are powers of 1000, ``KiB``/``MiB`` powers of 1024 (``tc`` calls the latter ``kb``).
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import BeforeValidator

_RATE = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SIZE = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]+)")


def _parse(text: str, units: Mapping[str, float], example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not a number with a unit out of {', '.join(units)}; write it like {example!r}")
    return float(match[1]) * units[match[2].lower()]


def parse_rate(text: str) -> int:
    """Bits per second of ``"1gbit"``. Raises ``ValueError``."""
    return round(_parse(text, _RATE, "1gbit"))


def parse_size(text: str) -> int:
    """Bytes of ``"160KiB"``; a bare number counts bytes. Raises ``ValueError``."""
    return int(text) if text.strip().isdigit() else round(_parse(text, _SIZE, "160KiB"))


def parse_time(text: str) -> float:
    """Seconds of ``"20ms"``. Raises ``ValueError``."""
    return _parse(text, _TIME, "20ms")


def show_rate(bits_per_second: float) -> str:
    """``"1gbit"``, ``"62.5mbit"``: the shortest exact form with at most three decimals."""
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_second >= _RATE[unit]:
            return f"{bits_per_second / _RATE[unit]:.3f}".rstrip("0").rstrip(".") + unit
    return f"{bits_per_second:.0f}bit"


def show_size(size: int) -> str:
    """``"97MiB"``, ``"4KiB"``, ``"140000B"``: binary units where they are exact."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and size % _SIZE[unit.lower()] == 0:
            return f"{size // _SIZE[unit.lower()]}{unit}"
    return f"{size}B"


def _from_text(parse: Callable[[str], float]) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


#: Bits per second; text with a unit, or an integer.
Rate = Annotated[int, _from_text(parse_rate)]
#: Bytes; text with a unit, or an integer.
Size = Annotated[int, _from_text(parse_size)]
#: Seconds; text with a unit, or a number.
Duration = Annotated[float, _from_text(parse_time)]
