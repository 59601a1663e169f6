"""``ina top``: what a fabric does now, live."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from inanet.cli import figures
from inanet.cli.coordinators import Target, options, target
from inanet.control.exits import Failure
from inanet.control.standing import JobState, Overview

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
#: Columns where there is no terminal that has some: a node's line fits.
FILE_WIDTH = 120


@click.command()
@options
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(1), help="End after so many looks. Default: at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for every look.")
def top(as_json: bool, count: int | None, interval: float, timeout: float, **whom: Any) -> None:
    """Show trees, rates, losses, the share added up in the network, and slots, live. (ui extra)

    Asks the fabric's manager, or the PS that coordinates it. Rates and losses are since the look before.
    """
    asked = target(**whom)
    if as_json:
        for before, seen, seconds in looks(asked, interval, count, timeout):
            click.echo(json.dumps(plain(before, seen, seconds)))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        # one look after the other: nothing can be drawn over in a file
        console.width = max(console.width, FILE_WIDTH)
        for before, seen, seconds in looks(asked, interval, count, timeout):
            console.print(picture(asked.address, before, seen, seconds))
        return
    with Live(console=console, screen=count is None, auto_refresh=False) as live:
        try:
            for before, seen, seconds in looks(asked, interval, count, timeout):
                live.update(picture(asked.address, before, seen, seconds), refresh=True)
        except KeyboardInterrupt:
            return


def looks(
    asked: Target, interval: float, count: int | None, timeout: float
) -> Iterator[tuple[Overview | None, Overview, float]]:
    """(the look before, this look, seconds between them), one every ``interval`` seconds.

    Raises :class:`Failure` if the coordinator does not answer the first time; later it is waited for.
    """
    before: Overview | None = None
    at = 0.0
    made = 0
    while count is None or made < count:
        began = time.monotonic()
        try:
            seen = asked.ask(timeout)
        except Failure:
            if before is None:
                raise
            continue
        yield before, seen, began - at
        before, at = seen, began
        made += 1
        if count is None or made < count:
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def plain(before: Overview | None, seen: Overview, seconds: float) -> dict[str, object]:
    """A look as one JSON object."""
    return {
        "schema": SCHEMA,
        "ok": figures.healthy(seen),
        "epoch": seen.epoch,
        "missing": list(seen.missing),
        "in_network_share": figures.share(before, seen),
        "nodes": [asdict(row) for row in figures.rows(before, seen, seconds)],
        "jobs": [job.model_dump() for job in seen.jobs],
    }


def picture(address: str, before: Overview | None, seen: Overview, seconds: float) -> "RenderableType":
    """A look for a terminal."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    share = figures.part(figures.share(before, seen))
    head = Text(
        f"{address}  epoch {seen.epoch}  {len(seen.nodes)} nodes  {len(seen.jobs)} jobs  in the network: {share}"
    )
    parts: list[RenderableType] = [head]
    if seen.missing:
        parts.append(Text(f"missing: {', '.join(seen.missing)}", style="red"))
    role = Column("role", min_width=len("aggregator"), no_wrap=True)
    table = Table("node", role, "state", box=None, header_style="bold")
    for title in ("sends", "receives", "loss", "slots", "idle cores", "memory"):
        table.add_column(title, justify="right")
    for row in figures.rows(before, seen, seconds):
        idle = "-" if row.idle is None else f"{row.idle:.1f}/{row.cores}"
        table.add_row(
            row.name,
            row.role,
            Text(row.state, style="red" if row.state in ("late", "unregistered") else ""),
            figures.rate(row.send_bps),
            figures.rate(row.receive_bps),
            figures.part(row.loss),
            figures.part(row.slots),
            idle,
            figures.part(row.used),
        )
    parts.append(table)
    parts += [_job(job) for job in seen.jobs]
    return Group(*parts)


def _job(job: JobState) -> "RenderableType":
    from rich.text import Text
    from rich.tree import Tree

    count = sum(len(ranks) for ranks in job.ranks.values())
    title = f"job {job.name}: {job.state}, epoch {job.epoch}, {count} of {job.world} ranks"
    if job.state == "running":
        title += f", plan {job.version}, round {job.rounds}"
    shown = Tree(Text(title))
    if job.missing:
        shown.add(Text(f"missing: {', '.join(job.missing)}", style="red"))
    if job.absent:
        shown.add(Text(f"without: {', '.join(job.absent)}", style="yellow"))
    for root, parents in zip(job.roots, job.trees, strict=True):
        places = {root: shown.add(Text(root))}
        waiting = [root]
        for name in waiting:
            for child in sorted(child for child, parent in parents.items() if parent == name):
                places[child] = places[name].add(Text(child))
                waiting.append(child)
    return shown
