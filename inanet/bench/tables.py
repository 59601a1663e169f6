"""Tables for people: cells under their heads, every line that is no data begins with '#'."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

#: how a column comes from a row: its key, a format (text is to the left) or a function that makes text of a value, and what
#: numbers are multiplied with; a format alone if the key is the head
Column = str | tuple[str, str | Callable[[Any], str]] | tuple[str, str, float]


def star(value: object) -> str:
    """Processes were short of processors."""
    return "*" if value else ""


def _cell(row: Mapping[str, Any], head: str, column: Column) -> str:
    key, form, *factor = (head, column) if isinstance(column, str) else column
    value = row.get(key)
    if callable(form):
        return form(value)
    return "-" if value is None else format(value * factor[0] if factor else value, form)


def aligned(columns: Mapping[str, Column], rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The lines of a table; ``columns`` by their heads. What a row does not have, or has as ``None``, is '-'."""
    lines = [list(columns), *([_cell(row, *column) for column in columns.items()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    signs = ["<" if column == "" or column[1:2] == ("",) else ">" for column in columns.values()]
    for number, cells in enumerate(lines):
        text = "  ".join(f"{c:{s}{w}}" for c, s, w in zip(cells, signs, widths, strict=True))
        yield f"{' ' if number else '#'} {text}".rstrip()
