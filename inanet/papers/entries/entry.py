"""What one figure or table is, and what runs it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from inanet.papers.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Entry:
    """One figure or table. ``target`` is ``module:function``, which takes nothing and returns an
    :class:`~inanet.papers.outcome.Outcome`.
    """

    name: str
    paper: str
    #: figure or table, as the paper numbers it
    figure: str
    #: what is run, in a line
    what: str
    #: how the run relates to the paper's
    scale: str
    target: str
    #: of this machine, not of a model: no two runs give the same numbers
    measured: bool = False
    #: takes so long that its two runs are made at the same time, in two processes
    long: bool = False

    def function(self) -> Callable[[], Outcome]:
        """Import what runs it. Raises ``ImportError`` if an optional package is missing."""
        module, _, name = self.target.partition(":")
        found: Callable[[], Outcome] = getattr(importlib.import_module(module), name)
        return found
