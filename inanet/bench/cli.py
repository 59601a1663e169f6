"""``ina bench``: measurements of this machine."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from inanet.bench.measure import Limit
from inanet.launch.interrupts import Interrupts
from inanet.proto.slots.systems import TREES, tensor_systems
from inanet.service.exits import Exit

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")


def _say(text: str) -> None:
    """Progress, beside the results."""
    click.echo(f"# {text}", err=True)


def _show(result: dict[str, Any], as_json: bool, table: Callable[[dict[str, Any]], Iterable[str]]) -> None:
    """The object that a benchmark returned, or its ``table``; exit status 1 if something is wrong in it."""
    if as_json:
        click.echo(json.dumps(result))
    else:
        for line in table(result):
            click.echo(line)
    if not result["ok"]:
        raise SystemExit(1)


def _seconds(default: float) -> Callable[[Any], Any]:
    return click.option(
        "--seconds",
        default=default,
        show_default=True,
        type=click.FloatRange(1),
        help="Begin nothing further after this time.",
    )


@contextmanager
def _kept(seconds: float, as_json: bool) -> Iterator[tuple[Limit, Callable[[Iterable[str]], None]]]:
    """A time limit that heeds Ctrl-C, and what prints lines as they come, unless it is JSON that is wanted."""

    def show(lines: Iterable[str]) -> None:
        for line in () if as_json else lines:
            click.echo(line)
            sys.stdout.flush()

    with Interrupts() as interrupts:
        yield Limit(seconds, interrupts.check), show


def _end_of(limit: Limit) -> None:
    if limit.interrupted:
        raise SystemExit(Exit.INTERRUPTED)


@click.group()
def bench() -> None:
    """Measure kernels and collectives on this machine."""


@bench.command()
@click.option(
    "--size", default=97, show_default=True, type=click.IntRange(1, 1024), help="MiB of float32 values."
)
@click.option("--repetitions", "-n", default=5, show_default=True, type=click.IntRange(1, 100))
@_json
def kernels(size: int, repetitions: int, as_json: bool) -> None:
    """Time of every kernel per 256-element fragment, on one core, memcpy beside them."""
    from inanet.bench.kernels import Bench

    rows = Bench(size * 1024).rows(repetitions)
    if as_json:
        click.echo(json.dumps({"schema": 1, "ok": True, "mib": size, "rows": [asdict(row) for row in rows]}))
        return
    click.echo(f"# {size} MiB of float32, medians of {repetitions} interleaved repetitions, one core")
    click.echo("# kernel       ns/fragment   Gbit/s of payload")
    for row in rows:
        click.echo(f"  {row.kernel:<12} {row.ns_per_fragment:11.1f} {row.gbps:19.1f}")


@bench.command()
@click.option(
    "--workers", multiple=True, type=click.IntRange(1, 1023), help="Only these. [default: 40 to 1,000]"
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of places and roundings.")
@click.option("--repetitions", "-n", default=3, show_default=True, type=click.IntRange(1, 100))
@_json
def scheduler(workers: tuple[int, ...], seed: int, repetitions: int, as_json: bool) -> None:
    """GOAT's scheduler in fat-trees: seconds, cost, bound of the relaxation, overshoot of the rounding."""
    from inanet.bench.scheduler import GROWTH, run, sizes_for, table

    result = run(sizes_for(workers) if workers else GROWTH, seed, repetitions)
    _show(result, as_json, table)


def _bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Bytes, as this program writes them ('4 KiB') or as nccl-tests does ('4096', '4K', '4k')."""
    from inanet.units import parse_bytes

    plain = re.fullmatch(r"(\d+)([KMG]?)", value, re.ASCII | re.IGNORECASE)
    if plain:
        return int(plain[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[plain[2].upper()]
    try:
        return int(parse_bytes(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@bench.command()
@click.option("-b", "begin", default="4 MiB", show_default=True, callback=_bytes, help="Smallest size.")
@click.option("-e", "end", default="512 MiB", show_default=True, callback=_bytes, help="Largest size.")
@click.option(
    "-f", "factor", default=2, show_default=True, type=click.IntRange(2), help="Step between sizes."
)
@click.option("-n", "repetitions", default=9, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option(
    "--rounds", default=1000, show_default=True, type=click.IntRange(0), help="Rounds of a small tensor."
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(2, 8), help="Ranks.")
@_json
def growth(as_json: bool, **options: int) -> None:
    """What grows with bytes, and that nothing grows with rounds: time and memory; then the marks."""
    from inanet.bench.growth import Options, run, table

    if options["begin"] < 4:
        raise click.BadParameter("sizes begin at one value of 4 B", param_hint="-b")
    result = run(Options(**options))
    _show(result, as_json, table)


def _several_bytes(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    sizes = tuple(_bytes(context, parameter, value) for value in values)
    if min(sizes, default=4) < 4:
        raise click.BadParameter("a size below one value of 4 B cannot be compared")
    return sizes


@bench.command()
@click.option("-b", "begin", default="4 KiB", show_default=True, callback=_bytes, help="Smallest size.")
@click.option("-e", "end", default="64 MiB", show_default=True, callback=_bytes, help="Largest size.")
@click.option(
    "-f", "factor", default=4, show_default=True, type=click.IntRange(2), help="Step between sizes."
)
@click.option("-i", "step", default="0", callback=_bytes, help="Step between sizes in bytes, instead of -f.")
@click.option("-n", "repetitions", default=10, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option(
    "-w", "warmups", default=2, show_default=True, type=click.IntRange(0), help="Warm-ups, not counted."
)
@click.option("-c", "check", default=1, show_default=True, type=click.IntRange(0, 1), help="Check results.")
@click.option("--workers", default=4, show_default=True, type=click.IntRange(1, 16), help="Ranks.")
@click.option("--one-host", is_flag=True, help="All ranks at one agent: shared memory, no network.")
@click.option("--op", default="sum", show_default=True, type=click.Choice(("sum", "mean", "max", "min")))
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(("float32", "float16", "bfloat16", "int32", "int64")),
)
@click.option(
    "--mode", default="prologue", show_default=True, type=click.Choice(("carried", "prologue", "fixed"))
)
@click.option(
    "--system",
    default=TREES,
    show_default=True,
    type=click.Choice((TREES, *tensor_systems())),
    help="What sums.",
)
@_seconds(600)
@_json
def allreduce(as_json: bool, check: int, seconds: float, **wanted: object) -> None:
    """All-reduce through daemons on this machine, as nccl-tests measures it.

    Sizes are '4 KiB', '4 kB' or, as nccl-tests has them, 4096 or 4K: K, M and G, of any case, are powers of 1024. Rows are
    printed as they come. At the time limit, and on Ctrl-C, those that are there are kept.
    """
    from inanet.bench.allreduce import Options, Printer, run

    options = Options(check=bool(check), **wanted)  # type: ignore[arg-type]
    printer = Printer(options)
    with _kept(seconds, as_json) as (limit, show):
        show(printer.heading())
        result = run(options, lambda row: show(printer.row(row)), limit)
        _show(result, as_json, printer.ending)
    _end_of(limit)


@bench.command()
@click.option(
    "--table",
    "tables",
    multiple=True,
    type=click.Choice(("local", "star", "loss", "hetero")),
    help="Only these tables; local comes with ingest, the others need root. [default: all that can be had here]",
)
@click.option(
    "--system", "systems", multiple=True, help="Only these contestants. [default: all that are installed]"
)
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    help="Topologies of the star table. [default: 2, 4 and 8 hosts]",
)
@click.option("--workers", default=4, show_default=True, type=click.IntRange(2, 8), help="Ranks of local.")
@click.option(
    "--size",
    "sizes",
    multiple=True,
    callback=_several_bytes,
    help="Bytes per rank; may be repeated, tables of labs take the largest. [default: 4 KiB, 1 MiB, 97 MiB]",
)
@click.option("-n", "repetitions", default=5, show_default=True, type=click.IntRange(1), help="Repetitions.")
@_seconds(600)
@click.option(
    "--plot", type=click.Path(dir_okay=False, writable=True), help="Draw the rows into this PNG file."
)
@_json
def compare(
    plot: str | None, as_json: bool, sizes: tuple[int, ...], seconds: float, **wanted: object
) -> None:
    """Every peer and every system in one run, repetitions interleaved; then the marks, met or missed.

    Rows are printed as they come. At the time limit, and on Ctrl-C, those that are there are kept.
    """
    from inanet.bench.compare import Printer, Wanted, run

    if plot is not None:
        # found missing now, not after the run
        from inanet.bench.plot import draw
    printer = Printer()
    with _kept(seconds, as_json) as (limit, show):
        chosen = Wanted(say=_say, row=lambda row: show(printer.row(row)), limit=limit, **wanted)  # type: ignore[arg-type]
        show(printer.heading())
        result = run(replace(chosen, sizes=sizes) if sizes else chosen)
        if plot is not None:
            draw(result["rows"], plot)
        _show(result, as_json, printer.ending)
    _end_of(limit)


@bench.command()
@click.option("--topology", "topologies", multiple=True, help="Only these. [default: ring4, ring8]")
@click.option(
    "--size", default="8354688", callback=_bytes, help="Bytes per host. [default: 48 messages, 8 MB]"
)
@click.option("-n", "repetitions", default=3, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option(
    "--pcap",
    "capture",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Capture what the ring's first host sends and receives; with one topology.",
)
@_json
def netreduce(topologies: tuple[str, ...], as_json: bool, **wanted: object) -> None:
    """NetReduce and rings on the same links, RoCE packets on wires: time over the fastest ring's, share of line rate.

    Needs root.
    """
    from inanet.bench.netreduce import TOPOLOGIES, Wanted, run, table

    chosen = topologies or TOPOLOGIES
    if wanted["capture"] is not None and len(chosen) > 1:
        raise click.UsageError("--pcap takes the packets of one lab: say which with one --topology")
    if wanted["size"] < 4:  # type: ignore[operator]
        raise click.BadParameter("a size below one value of 4 B cannot be compared", param_hint="--size")
    _show(run(Wanted(chosen, say=_say, **wanted)), as_json, table)  # type: ignore[arg-type]


@bench.command()
@click.option(
    "--topology", "topologies", multiple=True, help="Only these. [default: nine, see docs/planning.md]"
)
@click.option("--size", default="97 MiB", show_default=True, callback=_bytes, help="Bytes per worker.")
@click.option("-n", "repetitions", default=5, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option(
    "--calibrate",
    is_flag=True,
    help="Measure this machine's costs first, and keep them; done in any case if there are none.",
)
@click.option("--negotiate", is_flag=True, help="Nodes of fabrics negotiate their rates.")
@_json
def plan(
    topologies: tuple[str, ...], size: int, repetitions: int, calibrate: bool, negotiate: bool, as_json: bool
) -> None:
    """What 'ina plan' chooses in labs: time predicted, measured, and Gloo's beside it. Needs root."""
    from inanet.bench.plan import TOPOLOGIES, run, table
    from inanet.planning.costs import load

    costs = load()
    if calibrate or not costs.measured:
        from inanet.bench.calibration import calibrate as measure

        costs = measure(_say)
    result = run(topologies or TOPOLOGIES, size, repetitions, costs, _say, negotiate)
    _show(result, as_json, table)


@bench.command("torch")
@click.option(
    "--place",
    "places",
    multiple=True,
    type=click.Choice(("local", "lab")),
    help="Only there; lab needs root. [default: all that can be had here]",
)
@click.option("-n", "repetitions", default=5, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="Steps in each.")
@_json
def torch_(places: tuple[str, ...], repetitions: int, steps: int, as_json: bool) -> None:
    """DistributedDataParallel through the fabric and by Gloo: step times, losses, bits."""
    from inanet.bench.torch import run, table

    result = run(places, repetitions, steps, _say)
    _show(result, as_json, table)


@bench.command()
@click.option(
    "--place",
    "places",
    multiple=True,
    type=click.Choice(("shared memory", "xagg", "switchml", "a2tp", "netreduce")),
    help="Only there. [default: all]",
)
@_json
def numbers(places: tuple[str, ...], as_json: bool) -> None:
    """What number formats do to trainings, beside what rounding to float32 does: losses, final accuracy, bytes, bits."""
    from inanet.bench.numbers import run, table

    _show(run(places, _say), as_json, table)


@bench.command()
@click.option("-n", "repetitions", default=50, show_default=True, type=click.IntRange(1), help="Repetitions.")
@_json
def control(repetitions: int, as_json: bool) -> None:
    """Delays of rate negotiation and deployment, over the loopback and with 0.5 ms a link, the paper's beside them."""
    from inanet.bench.control import run, table
    from inanet.service import logs

    # the coordinator is in this process; what it has to say is of no interest here
    logs.configure("error", "plain")

    result = run(repetitions, _say)
    _show(result, as_json, table)


@bench.command()
@click.option(
    "--only", default="", help="Only rows whose program and port contain this, e.g. 'a2tp' or 'udp'."
)
@click.option(
    "--seconds",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0.01, 60),
    help="Measured for each row.",
)
@_json
def switch(only: str, seconds: float, as_json: bool) -> None:
    """Gradient through every program of the emulated switch, on one core; ports of frames need root."""
    from inanet.bench.switch import run, table

    result = run(seconds, only, _say)
    _show(result, as_json, table)


@bench.command()
@click.option(
    "--size", default=97, show_default=True, type=click.IntRange(1, 1024), help="MiB of values per child."
)
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(0.01), help="Per path.")
@click.option("--samples", default=2000, show_default=True, type=click.IntRange(2), help="Of the latency.")
@click.option("--repetitions", "-n", default=3, show_default=True, type=click.IntRange(1, 100))
@_json
def xdp(as_json: bool, size: int, seconds: float, samples: int, repetitions: int) -> None:
    """The aggregator in the kernel: alone, over a virtual cable, beside user space and TCP. Needs root."""
    from inanet.bench.xdp import run
    from inanet.bench.xdp_report import show

    click.echo(show(run(size, seconds, samples, repetitions), as_json))


@bench.command()
@click.option(
    "--data",
    multiple=True,
    help="OA, SE (drawn after the paper's models), corpus, or a libsvm or CSV file. [default: OA, SE, corpus]",
)
@click.option(
    "--workers", multiple=True, type=click.IntRange(1, 128), help="Of the rack. [default: 8 and 32]"
)
@click.option("--shards", default=1, show_default=True, type=click.IntRange(1, 16), help="PS shards.")
@click.option("--rate", default=1.0, show_default=True, type=click.FloatRange(0.001), help="Gbit/s of links.")
@click.option(
    "--samples", default=64, show_default=True, type=click.IntRange(1), help="Of real data in a batch."
)
@click.option(
    "--iterations", default=3, show_default=True, type=click.IntRange(2), help="The first warms up."
)
@click.option(
    "--live", default=8, show_default=True, type=click.IntRange(0, 16), help="Workers live; 0: none."
)
@click.option(
    "--live-rate", default=4.0, show_default=True, type=click.FloatRange(0.1), help="Mbit/s of their links."
)
@click.option("--repetitions", "-n", default=2, show_default=True, type=click.IntRange(1), help="Of those.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def sparse(
    as_json: bool,
    data: tuple[str, ...],
    workers: tuple[int, ...],
    rate: float,
    live_rate: float,
    **options: Any,
) -> None:
    """Keys summed per second: Zebra, a PS alone, SwitchML sending whole models."""
    from inanet.bench.sparse import Options, run, table

    wanted = Options(rate=rate * 1e9, live_rate=live_rate * 1e6, **options)
    wanted = replace(wanted, data=data or wanted.data, workers=workers or wanted.workers)
    result = run(wanted, lambda text: click.echo(f"# {text}", err=True))
    if as_json:
        click.echo(json.dumps(result))
    else:
        for line in table(result):
            click.echo(line)
    if not result["ok"]:
        raise SystemExit(1)
