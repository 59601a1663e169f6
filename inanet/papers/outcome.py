"""What an entry returns: tables, claims, and series to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inanet.bench.tables import Column, aligned
from inanet.papers.claims import Claim


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of equal length under ``columns``."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """With rows as objects."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
        }

    def lines(self) -> list[str]:
        """The table as text, numbers to the right; every line that is no data begins with '#'."""
        columns: dict[str, Column] = {head: (head, _text) for head in self.columns}
        return [
            f"# {self.title}",
            *aligned(columns, (dict(zip(columns, row, strict=True)) for row in self.rows)),
        ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "yes" if value is True else "no" if value is False else str(value)


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: ``series`` by label, each a list of (x, y); an x that is text makes bars."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[Any, float]]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything an entry found."""

    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    #: what one has to know to read the numbers
    notes: tuple[str, ...] = field(default=())


def joined(parts: Mapping[str, Outcome]) -> Outcome:
    """Parts of a figure as one; claims, tables and panels say which part they are of, notes that are the same come once."""
    return Outcome(
        tuple(replace(c, name=f"({part}) {c.name}") for part, its in parts.items() for c in its.claims),
        tuple(replace(t, title=f"({part}) {t.title}") for part, its in parts.items() for t in its.tables),
        tuple(replace(p, title=f"({part}) {p.title}") for part, its in parts.items() for p in its.panels),
        tuple(dict.fromkeys(note for its in parts.values() for note in its.notes)),
    )
