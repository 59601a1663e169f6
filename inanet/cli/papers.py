"""``ina papers``: figures and tables of the papers, run here."""

import json
import sys
from typing import Any

import click

from inanet.papers import entries, registry
from inanet.service.exits import Exit


@click.group()
def papers() -> None:
    """Figures and tables of the papers: their numbers, ours, and which claims hold."""


@papers.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_entries(as_json: bool) -> None:
    """All entries."""
    if as_json:
        keys = ("name", "paper", "figure", "what", "scale")
        rows = [{key: getattr(entry, key) for key in keys} for entry in entries.ENTRIES.values()]
        click.echo(json.dumps({"schema": 1, "ok": True, "entries": rows}))
        return
    width = max(len(name) for name in entries.ENTRIES)
    for entry in entries.ENTRIES.values():
        click.echo(f"{entry.name:{width}}  {entry.figure:<8} {entry.what}")


@papers.command("run")
@click.argument("name")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True), help="Draw it into this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.pass_context
def run_entry(context: click.Context, name: str, plot: str | None, as_json: bool) -> None:
    """Run one entry, twice; exit code 1 if the two runs differ. Claims that do not hold are part of the result."""
    from inanet.service import logs

    # coordinators of some entries are in this process; what they have to say is no part of the report
    logs.configure("error", "plain", stream=sys.__stderr__)
    entry = registry.find(name)
    if plot is not None:
        # found missing now, not after the run
        from inanet.papers.plot import draw
    report, outcome = registry.run(entry)
    if plot is not None:
        draw(outcome.panels, plot)
    if as_json:
        click.echo(json.dumps(report))
    else:
        for table in outcome.tables:
            click.echo("\n".join([*table.lines(), ""]))
        click.echo("\n".join(_verdict(report)))
    context.exit(Exit.OK if report["ok"] else Exit.FAILED)


def _verdict(report: dict[str, Any]) -> list[str]:
    lines = [f"# {report['paper']}, {report['figure']}: {report['what']}", f"# scale: {report['scale']}"]
    lines += [f"# {note}" for note in report["notes"]]
    for claim in report["claims"]:
        ours = "not finite" if claim["ours"] is None else f"{claim['ours']:.4g}"
        word = "holds" if claim["holds"] else "DOES NOT HOLD"
        slack = f" within {claim['tolerance']:.0%}" if claim["tolerance"] else ""
        lines.append(f"  {word}: {claim['name']}: {ours} {claim['relation']} {claim['paper']:.4g}{slack}")
        if claim["reason"]:
            lines.append(f"      {claim['reason']}")
    if not report["ok"]:
        lines.append("# two runs differed: the numbers above are not reproducible")
    return lines
