"""``ina zebra``: what a data set would have a switch sum."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from inanet.service.exits import Exit, Failure
from inanet.units import parse_bytes

SCHEMA = 1
#: between two words of progress
_SECONDS = 0.5


@click.group()
def zebra() -> None:
    """Sparse training with hot parameters summed in the network."""


def _memory(context: click.Context, parameter: click.Parameter, value: str) -> int:
    try:
        return int(parse_bytes(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@zebra.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.argument("name")
@click.option(
    "--state",
    type=click.Path(dir_okay=False),
    help="Keep the shard's part of the model in this file, and go on from it.",
)
@click.option("--anew", is_flag=True, help="Begin a job of new processes, with the model in the state file.")
@click.option(
    "--iteration",
    type=click.IntRange(0),
    help="Begin with the model of this iteration: the last, or the one before.",
)
def serve(file: str, name: str, **how: Any) -> None:
    """Be the switch or a PS shard (NAME: switch, shard0, shard1, ...) of the sparse job in FILE, until a signal ends it.

    A shard with --state may be killed and started again at any time, and the job loses nothing.
    """
    from inanet.launch.interrupts import Interrupted, Interrupts
    from inanet.sparse.job_file import SparseFile
    from inanet.sparse.job_file import serve as run

    try:
        with Interrupts() as interrupts:
            run(SparseFile(file), name, click.echo, interrupts.check, **how)
    except Interrupted:
        return
    except Failure as error:
        click.echo(f"ina zebra serve: {error}", err=True)
        sys.exit(error.code)
    except (ValueError, OSError) as error:
        click.echo(f"ina zebra serve: {error}", err=True)
        sys.exit(Exit.USAGE)


@zebra.command()
@click.argument("dataset")
@click.option("-p", type=float, help="Share of updates to sum in the network. [default: the stop rule]")
@click.option("-c", default=0.05, show_default=True, type=float, help="Share of the switch's memory to use.")
@click.option("--memory", default="20 MiB", show_default=True, callback=_memory, help="Memory of the switch.")
@click.option(
    "--width", default=1, show_default=True, type=click.IntRange(1, 255), help="Values of a parameter."
)
@click.option("--sample", "rate", type=float, help="Find them in this share of the samples, e.g. 0.04.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of the sample.")
@click.option("--batch", default=64, show_default=True, type=click.IntRange(1), help="Samples of an update.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the keys here, hottest first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def hot(dataset: str, output: str | None, as_json: bool, **options: Any) -> None:
    """Hot parameters of DATASET: how many, and what share of updates they have. DATASET is a libsvm file or a click log in
    columns, perhaps compressed, or one of 'corpus', 'corpus+tests', 'corpus+packages' and 'interactions', which need no file.

    With --sample they are found in a part of the data, as the paper's offline method does, and compared with those of all.
    """
    result, keys = identify(dataset, **options)
    if output is not None:
        np.savetxt(output, keys, fmt="%d")
    if as_json:
        click.echo(json.dumps(result))
        return
    for line in text(result):
        click.echo(line)


def _progress() -> Callable[[int, int], None]:
    """Says on a terminal how much of a file is read."""
    last = 0.0

    def show(done: int, size: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and (now := time.monotonic()) > last + _SECONDS:
            last = now
            click.echo(f"\rreading: {done / max(size, 1):.0%}\r", err=True, nl=False)

    return show


def identify(
    dataset: str,
    *,
    p: float | None = None,
    c: float = 0.05,
    memory: int = 20 << 20,
    width: int = 1,
    rate: float | None = None,
    seed: int = 1,
    batch: int = 64,
) -> tuple[dict[str, Any], Any]:
    """What ``--json`` prints, and the hot keys, hottest first. Raises click's errors for numbers out of range, and
    :class:`~inanet.data.clicks.BadData`.
    """
    from inanet.data.datasets import blocks
    from inanet.data.update_counts import count_updates
    from inanet.proto.zebra.hot import choose, kendall_tau, precision

    try:
        updates = count_updates(blocks(dataset, _progress()), batch, seed, rate)
        ranked = updates.all
        choice = choose(ranked, p=p, c=c, memory=memory, width=width)
        keys = ranked.top(choice.k).keys
        sampled: dict[str, Any] | None = None
        if updates.sampled is not None:
            seen = updates.sampled
            found = seen.top(choose(seen, p=p, c=c, memory=memory, width=width).k).keys
            sampled = {
                "rate": rate,
                "k": len(found),
                "precision": precision(keys, found),
                "kendall_tau": kendall_tau(keys, found),
                "share": float(ranked.counts[np.isin(ranked.keys, found)].sum() / max(ranked.total, 1)),
            }
            keys = found
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    result = {
        "schema": SCHEMA,
        "ok": True,
        "dataset": dataset,
        "samples": updates.samples,
        "parameters": len(ranked.keys),
        "updates": ranked.total,
        "k": choice.k,
        "share": choice.share,
        "bytes": choice.bytes,
        "limit": choice.limit,
        "reached": choice.reached,
        "reason": choice.reason,
        "sample": sampled,
    }
    return result, keys


def text(result: dict[str, Any]) -> list[str]:
    """The result in sentences."""
    out = [
        f"# {result['dataset']}: {result['samples']} samples, {result['parameters']} parameters, "
        f"{result['updates']} updates",
        f"hot: {result['k']} parameters, {result['share']:.1%} of the updates, {result['bytes']} B of registers",
        f"# {'' if result['reached'] else 'NOT REACHED: '}{result['reason']}",
    ]
    if result["sample"] is not None:
        its = result["sample"]
        out.append(
            f"from {its['rate']:.1%} of the updates: {its['k']} parameters, {its['share']:.1%} of all updates, precision "
            f"{its['precision']:.1%}, Kendall tau {its['kendall_tau']:.2f}"
        )
    return out
