"""``ina kernels``: compile the kernels when the program is installed, so that no daemon has to when it starts."""

import json
import sys
import time

import click

from inanet.service import kernel_cache
from inanet.service import kernels as sets


@click.command()
@click.option(
    "--for",
    "wanted",
    multiple=True,
    metavar="SET",
    help=f"Only these: {', '.join(sets.MODULES)}, worker:SYSTEM, program:SYSTEM, server:SYSTEM. [default: all]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def kernels(wanted: tuple[str, ...], as_json: bool) -> None:
    """Compile the kernels that are missing, on all processors, and keep them.

    Run it after the installation, as the user who installed: kernels beside the program serve every user and daemon of this
    host. Without it daemons compile theirs at their first start, each user's for itself.
    """
    chosen = wanted or ("all",)
    for name in chosen:
        try:
            sets.modules(name)
        except KeyError:
            raise click.UsageError(f"there is no set of kernels {name!r}") from None
    began, counts = time.monotonic(), [0, 0]

    def tell(done: int, total: int) -> None:
        counts[:] = done, total
        shown = sys.stderr.isatty()
        # a file of what was said has ten lines, not hundreds
        if not shown and done != total and done * 10 // total == (done - 1) * 10 // total:
            return
        end = "\n" if done == total or not shown else "\r"
        click.echo(f"# compiling kernels: {done} / {total}{end}", err=True, nl=False)

    sets.prepare(chosen, tell)
    seconds = time.monotonic() - began
    places = [str(place) for place in kernel_cache.places() if kernel_cache.writable(place)]
    if as_json:
        found = {"schema": 1, "ok": True, "kernels": counts[1], "seconds": seconds, "place": places[0]}
        click.echo(json.dumps(found))
    elif counts[1]:
        click.echo(f"{counts[1]} kernels are in {places[0]}, after {seconds:.0f} s")
    else:
        click.echo("nothing to compile: the kernels are there")
