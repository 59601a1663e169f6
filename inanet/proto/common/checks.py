"""Ranges of what comes from another process: plain checks whose error names the field."""

from collections.abc import Iterable


def need(condition: bool, sentence: str) -> None:
    """Raise ``ValueError`` with this sentence unless the condition holds."""
    if not condition:
        raise ValueError(sentence)


def in_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ``ValueError`` naming the field unless its value is between ``low`` and ``high``."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, allowed are {low} to {high}")


def are_endpoints(values: Iterable[int]) -> None:
    """Raise ``ValueError`` unless all of these are endpoints (:mod:`inanet.wire.endpoint`)."""
    for value in values:
        in_range("endpoint", value, 0, (1 << 48) - 1)
