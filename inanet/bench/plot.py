"""A picture of the rows of ``ina bench compare``: one panel per table and topology, one bar per system.
Needs matplotlib (``bench`` extra)."""

import os
from typing import Any

from matplotlib.figure import Figure

#: Panels beside each other.
COLUMNS = 4


def panels(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by panel, titles in order; of each table the largest size."""
    largest: dict[str, int] = {}
    for row in rows:
        largest[row["table"]] = max(row["bytes"], largest.get(row["table"], 0))
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["bytes"] == largest[row["table"]]:
            title = f"{row['table']}, n = {row['n']}"
            if row.get("topology"):
                title += f"\n{row['topology']}"
            found.setdefault(title, []).append(row)
    return found


def draw(rows: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write a PNG file. Raises ``OSError`` if it cannot be written."""
    found = panels(rows)
    columns = max(1, min(len(found), COLUMNS))
    lines = -(-len(found) // columns) or 1
    figure = Figure(figsize=(4.2 * columns, 3.6 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis in list(axes)[len(found) :]:
        axis.remove()
    for axis, (title, panel) in zip(axes, found.items(), strict=False):
        names = [f"{row['system']} *" if row["short_of_cpu"] else row["system"] for row in panel]
        bars = axis.barh(names, [row["seconds"] * 1e3 for row in panel])
        axis.bar_label(bars, fmt="%.0f", padding=2)
        limits = {row["limit_seconds"] for row in panel if row["system"].startswith("xagg")} - {None}
        for limit in limits:
            axis.axvline(limit * 1e3, color="black", linestyle=":", label="bound of the plan")
            axis.legend()
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(title)
        axis.set_xlabel("ms of one core" if title.startswith("ingest") else "ms")
    figure.supxlabel("* short of processors", fontsize="small")
    figure.savefig(path, format="png", dpi=120)
