"""Panels of an outcome as a picture."""

import math
import os

from inanet.papers.outcome import Panel


def draw(panels: tuple[Panel, ...], path: str | os.PathLike[str]) -> None:
    """Write a PNG file, panels side by side. Raises ``ImportError`` without matplotlib, ``OSError`` if it cannot be
    written and ``ValueError`` if there is nothing to draw.
    """
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("this entry has nothing to draw")
    figure = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, points in panel.series.items():
            seen = [(x, y) for x, y in points if math.isfinite(y)]
            axis.plot([x for x, _ in seen], [y for _, y in seen], marker="o", label=label)
        axis.set_title(panel.title)
        axis.set_xlabel(panel.x)
        axis.set_ylabel(panel.y)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(path, format="png", dpi=120)
