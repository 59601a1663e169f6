"""What ``ina doctor`` says about one aspect of a machine."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``fix`` is a command, or a line of configuration, that mends what ``detail`` describes; empty with
    ``OK``.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


Probe = Callable[[], Iterable[Finding]]


def examine(probes: Iterable[Probe]) -> Iterator[Finding]:
    """The findings of all probes. A probe that breaks becomes a warning: a doctor must not be the first to
    fall ill.
    """
    for probe in probes:
        try:
            yield from probe()
        except (OSError, ValueError) as error:
            yield Finding(
                probe.__name__, "WARN", f"could not be found out: {error}", "none known: please report it"
            )
