"""All entries, and how one is run.

``ok`` of a run means that it ran and that running it again gave the same numbers; entries are deterministic, from seeds,
so the same means equal. Those that measure this machine run once. Whether claims hold is told by the claims.
"""

import difflib
import math
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from inanet.papers.entries import ENTRIES, Entry
from inanet.papers.outcome import Outcome
from inanet.service.exits import Exit, Failure

SCHEMA = 1


class UnknownEntry(Failure):
    """There is no entry of this name."""

    code = Exit.USAGE


def find(name: str) -> Entry:
    """The entry of a name. Raises :class:`UnknownEntry`, with one that is near."""
    if name not in ENTRIES:
        near = difflib.get_close_matches(name, ENTRIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownEntry(f"there is no entry {name!r};{hint} 'ina papers list' has all of them")
    return ENTRIES[name]


def _once(entry: Entry) -> Outcome:
    """One run of an entry."""
    return entry.function()()


def run(entry: Entry) -> tuple[dict[str, Any], Outcome]:
    """Run an entry twice and compare, or once if it measures; the report as one object for JSON, and the outcome for drawing."""
    function = entry.function()
    if entry.measured:
        outcome = function()
        return report(entry, outcome, True), outcome
    if entry.long:
        # a fresh interpreter: nothing of this process can make the second run like the first
        with ProcessPoolExecutor(1, get_context("spawn")) as other:
            second = other.submit(_once, entry)
            outcome = function()
            again = second.result()
    else:
        outcome, again = function(), function()
    same = report(entry, outcome, True) == report(entry, again, True)
    return report(entry, outcome, same), outcome


def report(entry: Entry, outcome: Outcome, ok: bool) -> dict[str, Any]:
    """The object that ``ina papers run --json`` prints."""
    return {
        "schema": SCHEMA,
        "ok": ok,
        "name": entry.name,
        "paper": entry.paper,
        "figure": entry.figure,
        "what": entry.what,
        "scale": entry.scale,
        "claims": [claim.as_dict() for claim in outcome.claims],
        "tables": [_finite(table.as_dict()) for table in outcome.tables],
        "notes": list(outcome.notes),
    }


def _finite(value: Any) -> Any:
    """``None`` for numbers that JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(its) for key, its in value.items()}
    if isinstance(value, list):
        return [_finite(its) for its in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
