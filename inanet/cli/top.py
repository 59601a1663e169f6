"""``ina top``: what a fabric does now, live."""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from inanet.cli import figures
from inanet.cli.coordinators import options, target
from inanet.cli.scraping import Scraped, pulse, scrape
from inanet.cli.status import astray, walk
from inanet.messages.registration import JobState, Overview
from inanet.service.exits import Failure
from inanet.units import show_count

if TYPE_CHECKING:
    from rich.console import RenderableType

L = TypeVar("L")

SCHEMA = 1
#: Columns where there is no terminal that has some: a node's line fits.
FILE_WIDTH = 120
#: Below so many columns only what matters most is shown.
NARROW = 72
#: From so many on roles are written out.
WIDE = 100


@click.command()
@options
@click.option("--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds.")
@click.option("--count", type=click.IntRange(1), help="End after so many looks. Default: at Ctrl-C.")
@click.option("--metrics", metavar="HOST:PORT", help="Instead: a single daemon, by its [metrics] listen.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for every look.")
def top(
    as_json: bool, count: int | None, interval: float, timeout: float, metrics: str | None, **whom: Any
) -> None:
    """Show trees, rates, losses, the share added up in the network, and slots, live. (ui extra)

    Asks the fabric's manager, or the PS that coordinates it. Rates and losses are since the look before, the share is that
    of the last ten. q ends it, h shows the other keys.
    """
    source: _Source[Any]
    view = View()
    if metrics is not None:
        source = _Source(lambda: scrape(metrics, timeout), one_plain, one_picture)
    else:
        asked = target(**whom)
        shares = figures.Shares()
        source = _Source(
            lambda: asked.ask(timeout),
            lambda before, seen, seconds: plain(before, seen, seconds, shares.look(seen)),
            lambda before, seen, seconds: picture(
                asked.address,
                before,
                seen,
                seconds,
                shares.look(seen),
                view,
                columns(),
            ),
        )
    if as_json:
        for look in looks(source.ask, interval, count):
            click.echo(json.dumps(source.plain(*look)))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not console.is_terminal:
        # one look after the other: nothing can be drawn over in a file
        console.width = max(console.width, FILE_WIDTH)
        for look in looks(source.ask, interval, count):
            console.print(source.picture(*look))
        return
    from inanet.cli.keyboard import Keyboard

    with Keyboard() as keyboard, Live(console=console, screen=count is None, auto_refresh=False) as live:
        seen: list[tuple[Any, Any, float]] = []

        def wait(seconds: float) -> None:
            """Until the next look; keys act at once."""
            for key in keyboard.keys(seconds):
                if view.press(key):
                    live.update(_framed(source.picture(*seen[-1]), view, console.width), refresh=True)

        try:
            for look in looks(source.ask, interval, count, wait):
                seen[:] = [look]
                live.update(_framed(source.picture(*look), view, console.width), refresh=True)
        except Quit:
            return


def columns() -> int:
    """Of the terminal, or of a file."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else FILE_WIDTH


class Quit(Exception):
    """Somebody has pressed q."""


#: Keys that sort the nodes, with the column they go by.
SORTS = {"n": "name", "s": "sends", "r": "receives", "l": "loss", "m": "memory"}
_HELP = (
    "q  quit",
    *(f"{key}  sort nodes by {column}" for key, column in SORTS.items()),
    "h  this help",
    "sends, receives: gradients in bit/s; loss: fragments sent again; idle: processors idle of all",
)


@dataclass(slots=True)
class View:
    """What the keys have chosen: the order of nodes, and whether help is shown."""

    sort: str = "name"
    help: bool = False

    def press(self, key: str) -> bool:
        """Act on a key; returns whether it meant anything. Raises :class:`Quit`."""
        if key == "q":
            raise Quit
        if key in ("h", "?"):
            self.help = not self.help
        elif key in SORTS:
            self.sort = SORTS[key]
        else:
            return False
        return True

    def order(self, rows: Sequence[figures.Row]) -> list[figures.Row]:
        """By name, or the largest first; nodes of which nothing is known last."""
        values: dict[str, Callable[[figures.Row], float | None]] = {
            "sends": lambda row: row.send_bps,
            "receives": lambda row: row.receive_bps,
            "loss": lambda row: row.loss,
            "memory": lambda row: row.used,
        }
        value = values.get(self.sort)
        if value is None:
            return sorted(rows, key=lambda row: row.name)
        return sorted(rows, key=lambda row: -1.0 if (found := value(row)) is None else found, reverse=True)


def _framed(picture: "RenderableType", view: View, width: int) -> "RenderableType":
    """A picture with its footer, below the help if that is wanted."""
    from rich.console import Group
    from rich.text import Text

    sorts = " ".join(f"{key} {column}" for key, column in SORTS.items())
    footer = f"q quit  h help  sort: {sorts}" if width >= NARROW else "q quit  h help  n s r l m sort"
    above = [Text(line) for line in _HELP] if view.help else []
    return Group(*above, picture, Text(footer, style="reverse", no_wrap=True, overflow="crop"))


@dataclass(frozen=True, slots=True)
class _Source(Generic[L]):
    """Whom to look at, and what its looks are shown as."""

    ask: Callable[[], L]
    plain: Callable[[L | None, L, float], dict[str, object]]
    picture: Callable[[L | None, L, float], "RenderableType"]


def looks(
    ask: Callable[[], L], interval: float, count: int | None, wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[L | None, L, float]]:
    """(the look before, this look, seconds between them), one every ``interval`` seconds.

    Raises :class:`Failure` if nobody answers the first time; later it is waited for.
    """
    before: L | None = None
    at = 0.0
    made = 0
    while count is None or made < count:
        began = time.monotonic()
        try:
            seen = ask()
        except Failure:
            if before is None:
                raise
            # a refusal comes at once
            wait(interval)
            continue
        yield before, seen, began - at
        before, at = seen, began
        made += 1
        if count is None or made < count:
            wait(max(0.0, interval - (time.monotonic() - began)))


def one_plain(before: Scraped | None, now: Scraped, seconds: float) -> dict[str, object]:
    """A look at a single daemon as one JSON object."""
    return {"schema": SCHEMA, "ok": True, "address": now.url, **asdict(pulse(before, now, seconds))}


def one_picture(before: Scraped | None, now: Scraped, seconds: float) -> "RenderableType":
    """The same for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    seen = pulse(before, now, seconds)
    table = Table("role", box=None, header_style="bold")
    for title in ("jobs", "sends", "receives", "sums/s", "loss", "slots"):
        table.add_column(title, justify="right")
    table.add_row(
        seen.role or "-",
        str(seen.jobs),
        figures.rate(seen.send_bps),
        figures.rate(seen.receive_bps),
        "-" if seen.summed is None else f"{seen.summed:.0f}",
        figures.part(seen.loss),
        figures.part(seen.slots),
    )
    dropped = ", ".join(f"{count} {reason}" for reason, count in seen.dropped.items())
    return Group(Text(now.url), table, *([Text(f"dropped: {dropped}", style="yellow")] if dropped else []))


def plain(before: Overview | None, seen: Overview, seconds: float, share: float | None) -> dict[str, object]:
    """A look as one JSON object."""
    return {
        "schema": SCHEMA,
        "ok": figures.healthy(seen),
        "epoch": seen.epoch,
        "missing": list(seen.missing),
        "in_network_share": share,
        "nodes": [asdict(row) for row in figures.rows(before, seen, seconds)],
        "jobs": [job.model_dump() for job in seen.jobs],
    }


def picture(
    address: str,
    before: Overview | None,
    seen: Overview,
    seconds: float,
    share: float | None,
    view: View | None = None,
    width: int = FILE_WIDTH,
) -> "RenderableType":
    """A look for a terminal of so many columns: one line for each node, with less in it where there is less room."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(
        f"{address}  epoch {seen.epoch}  {show_count(len(seen.nodes), 'node')}  {show_count(len(seen.jobs), 'job')}  "
        f"in the network: {figures.part(share)}"
    )
    parts: list[RenderableType] = [head]
    if seen.missing:
        parts.append(Text(f"missing: {', '.join(seen.missing)}", style="red"))
    narrow = width < NARROW
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(
        "node", no_wrap=True, overflow="ellipsis", max_width=14 if narrow else max(16, width - 62)
    )
    for title in () if narrow else ("role",):
        table.add_column(title, no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("sends", "receives", "loss", *(() if narrow else ("slots", "idle", "memory"))):
        table.add_column(title, justify="right", no_wrap=True)
    for row in (view or View()).order(figures.rows(before, seen, seconds)):
        idle = "-" if row.idle is None else f"{row.idle:.0f}/{row.cores}"
        style = "red" if row.state in ("late", "unregistered") else ""
        cells: list[RenderableType] = [row.name]
        if not narrow:
            cells.append("agg" if row.role == "aggregator" and width < WIDE else row.role)
        cells += [
            Text({"unregistered": "gone", "registered": "here"}.get(row.state, row.state), style=style),
            figures.short_rate(row.send_bps),
            figures.short_rate(row.receive_bps),
            figures.part(row.loss),
        ]
        if not narrow:
            cells += [figures.part(row.slots), idle, figures.part(row.used)]
        table.add_row(*cells)
    parts.append(table)
    parts += [_job(job) for job in seen.jobs]
    return Group(*parts)


def _job(job: JobState) -> "RenderableType":
    from rich.text import Text
    from rich.tree import Tree

    title = f"job {job.name}: {job.state}, epoch {job.epoch}, {figures.ranks(job)}"
    if job.state == "running":
        title += f", plan {job.version}, round {job.rounds}"
    shown = Tree(Text(title))
    if job.missing:
        shown.add(Text(f"missing: {', '.join(job.missing)}", style="red"))
    if job.absent:
        shown.add(Text(f"without: {', '.join(job.absent)}", style="yellow"))
    for root, parents in zip(job.roots, job.trees, strict=True):
        above = [shown]
        for depth, name in walk(root, parents):
            del above[depth + 1 :]
            above.append(above[depth].add(Text(name)))
        if lost := astray(root, parents):
            shown.add(Text(f"not under {root}: {', '.join(lost)}", style="red"))
    return shown
