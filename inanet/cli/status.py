"""``ina status``: nodes, jobs and trees of a fabric, or the metrics of a single daemon, once."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from inanet.cli import figures
from inanet.cli.coordinators import options, target
from inanet.cli.scraping import scrape
from inanet.messages.registration import JobState, Overview
from inanet.service.exits import Exit, Failure
from inanet.units import show_count

SCHEMA = 1


@click.command()
@options
@click.option("--metrics", metavar="HOST:PORT", help="Instead: a single daemon, by its [metrics] listen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def status(
    context: click.Context, /, as_json: bool, metrics: str | None, timeout: float, **whom: Any
) -> None:
    """Show nodes, jobs and trees of a fabric. Asks its manager, or the PS that coordinates it.

    Exit code 1 if an expected node is missing, one is late or a job waits for somebody, and if nobody answers.
    """
    try:
        if metrics is not None:
            _one_daemon(metrics, timeout, as_json)
            return
        asked = target(**whom)
        seen = asked.ask(timeout)
    except (Failure, OSError) as error:
        if not as_json:
            raise
        click.echo(json.dumps({"schema": SCHEMA, "ok": False, "error": str(error)}))
        context.exit(error.code if isinstance(error, Failure) else Exit.FAILED)
    ok = figures.healthy(seen)
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "ok": ok, "address": asked.address, **_plain(seen)}))
    else:
        for line in lines(seen):
            click.echo(line)
    context.exit(Exit.OK if ok else Exit.FAILED)


def _plain(seen: Overview) -> dict[str, Any]:
    found = seen.model_dump(exclude={"kind"})
    found["in_network_share"] = figures.share(None, seen)
    return found


def lines(seen: Overview) -> Iterator[str]:
    """An overview as text."""
    yield f"epoch {seen.epoch}, {show_count(len(seen.nodes), 'node')}, {show_count(len(seen.jobs), 'job')}"
    if seen.missing:
        yield f"missing: {', '.join(seen.missing)}"
    for reason in seen.refused:
        yield f"refused: {reason}"
    rows = figures.rows(None, seen, 1.0)
    if rows:
        cells = [
            (
                row.name,
                row.role,
                row.state,
                "-" if row.idle is None else f"{row.idle:.1f} of {row.cores}",
                figures.part(row.used),
                figures.part(row.slots),
            )
            for row in rows
        ]
        yield from figures.table(("node", "role", "state", "idle cores", "memory", "slots"), cells, left=3)
    for job in seen.jobs:
        yield from _job(job)


def _job(job: JobState) -> Iterator[str]:
    yield f"job {job.name}: {job.state}, epoch {job.epoch}, {figures.ranks(job)}"
    if job.state == "running":
        yield f"  plan version {job.version}, round {job.rounds}"
    if job.missing:
        yield f"  missing: {', '.join(job.missing)}"
    if job.absent:
        yield f"  without: {', '.join(job.absent)}"
    for root, parents in zip(job.roots, job.trees, strict=True):
        for depth, name in walk(root, parents):
            yield f"  {'  ' * depth}{name}"
        if lost := astray(root, parents):
            yield f"  not under {root}: {', '.join(lost)}"


def walk(root: str, parents: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """(depth, name) of all nodes of a tree, parents before their children, each once: what comes from elsewhere need not be
    a tree.
    """
    children: dict[str, list[str]] = {}
    for name in sorted(parents):
        if name != root:
            children.setdefault(parents[name], []).append(name)
    waiting = [(0, root)]
    while waiting:
        depth, name = waiting.pop()
        yield depth, name
        # a node has one parent and the root none, so nobody is come upon twice
        waiting += [(depth + 1, child) for child in reversed(children.get(name, []))]


def astray(root: str, parents: Mapping[str, str]) -> list[str]:
    """Nodes from which no way leads to the root."""
    return sorted({*parents} - {name for _, name in walk(root, parents)})


def _one_daemon(where: str, seconds: float, as_json: bool) -> None:
    found = scrape(where, seconds)
    if as_json:
        metrics = [asdict(value) for value in found.values]
        click.echo(json.dumps({"schema": SCHEMA, "ok": True, "address": found.url, "metrics": metrics}))
        return
    # what has not happened is of no interest here: --json and the endpoint itself have it
    shown = [one for one in found.values if one.value and not one.name.endswith("_bucket")]
    cells = [
        (
            figures.quantity(one.name, one.value),
            one.name,
            " ".join(f"{key}={value}" for key, value in one.labels.items()),
        )
        for one in shown
    ]
    for line in figures.table(("value", "metric", "labels"), cells, left=3, right_first=True):
        click.echo(line)
