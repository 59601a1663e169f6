"""``ina trace``: what the ranks of a torch job recorded, in one file, and how much of it backward hid."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from inanet.service.exits import Failure

#: begin and end, microseconds
Span = tuple[float, float]


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write all ranks into this Chrome trace (chrome://tracing, ui.perfetto.dev).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def trace(directory: Path, output: Path | None, as_json: bool) -> None:
    """Merge the traces in DIRECTORY, which INA_TRACE or hook(trace=...) named, and show the overlap.

    A bucket is on its way from being handed to the agent until its result is back; it is hidden as far as
    backward was still computing. "After first bucket" is the part of backward from its first ready bucket on: what comes
    before cannot hide anything.
    """
    events = merged(directory)
    if output is not None:
        output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    rows = overlap(events)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": True, "ranks": rows}))
        return
    click.echo("# rank  steps  buckets  after first bucket ms  on the way ms  hidden")
    for row in rows:
        click.echo(
            f"  {row['rank']:4d} {row['steps']:6d} {row['buckets']:8d} {row['backward_seconds'] * 1e3:22.2f} "
            f"{row['communication_seconds'] * 1e3:14.2f} {row['hidden']:7.1%}"
        )


def merged(directory: Path) -> list[dict[str, Any]]:
    """Events of all files in a directory. Raises :class:`Failure` for one that is no trace, or if there is
    none."""
    events: list[dict[str, Any]] = []
    files = sorted(directory.glob("*.json"))
    for file in files:
        try:
            events += json.loads(file.read_text())["traceEvents"]
        except (ValueError, KeyError, TypeError) as error:
            raise Failure(f"{file} is no trace: {type(error).__name__}: {error}") from None
    if not files:
        raise Failure(f"{directory} has no traces; they are written when the ranks of a job end")
    return events


def overlap(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank, per step: seconds of backward from the first ready bucket on, seconds in which any bucket was
    on its way, and the share of the latter that the former hid."""
    rows = []
    for rank in sorted({event["pid"] for event in events}):
        mine = [event for event in events if event["pid"] == rank]
        backward = [(e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X"]
        ends = {event["id"]: event["ts"] for event in mine if event["ph"] == "e"}
        begun = [event for event in mine if event["ph"] == "b" and event["id"] in ends]
        busy = _union([(event["args"]["sent"], ends[event["id"]]) for event in begun])
        steps = len({event["args"]["step"] for event in begun})
        total = sum(end - start for start, end in busy)
        hidden = sum(_common(span, backward) for span in busy)
        rows.append(
            {
                "rank": rank,
                "steps": steps,
                "buckets": len(begun),
                "backward_seconds": sum(end - start for start, end in backward) / 1e6 / max(1, len(backward)),
                "communication_seconds": total / 1e6 / max(1, steps),
                "hidden": hidden / total if total else 0.0,
            }
        )
    return rows


def _union(spans: list[Span]) -> list[Span]:
    """Disjoint spans that cover the same time, in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _common(span: Span, others: list[Span]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
