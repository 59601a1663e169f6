"""What an entry returns: tables, claims, and series to draw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
        cells = [[_text(value) for value in row] for row in self.rows]
        heads = list(self.columns)
        widths = [max(len(text) for text in column) for column in zip(heads, *cells, strict=True)]
        lines = [
            f"# {self.title}",
            "# " + "  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)),
        ]
        for row in cells:
            lines.append("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
        return lines


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
