"""``ina plan``: what plans there are for a network, what each costs, which is the cheapest and why."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import click

from inanet.planning.advice import INSIDE, Advice, advise
from inanet.planning.costs import Costs
from inanet.planning.plans import Plan
from inanet.planning.prices import Choice, Price, choose
from inanet.units import parse_bytes, parse_duration, parse_rate, show_bytes
from inanet.wire.xagg import PAYLOAD_BYTES

#: Of what ``--json`` prints.
SCHEMA = 1
#: Candidates shown without ``--explain``.
SHOWN = 5


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        size = parse_bytes(int(value) if value.isdecimal() else value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if value.isdecimal() and 0 < size < PAYLOAD_BYTES:
        raise click.BadParameter(
            f"{value} bytes are less than a packet carries ({PAYLOAD_BYTES}): '{value} MiB' perhaps, or '{value} B'?"
        )
    if not size:
        raise click.BadParameter("a tensor of 0 bytes has nothing to plan for")
    return size


def _seconds(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _rate(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Bytes per second."""
    try:
        rate = parse_rate(value) / 8
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if not rate > 0:
        raise click.BadParameter("nothing moves at a rate of 0")
    return rate


@click.command()
@click.argument("topology", metavar="TOPOLOGY")
@click.option("--size", callback=_size, help="Bytes of a tensor, e.g. '97 MiB'.")
@click.option("--compute", callback=_seconds, help="A step without communication, e.g. '300 ms'.")
@click.option(
    "-k", "ks", multiple=True, type=click.IntRange(2, 32), help="Fan-in of server trees. [default: 2 to 5]"
)
@click.option(
    "--ranks-per-host",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="For the pattern: training processes on every worker's host.",
)
@click.option(
    "--inside",
    default=f"{round(INSIDE * 8e-9)} Gbit/s",
    show_default=True,
    callback=_rate,
    help="For the pattern: rate between the ranks of a host.",
)
@click.option("--explain", is_flag=True, help="All candidates, each with what it is bound by.")
@click.option(
    "--config",
    "as_config",
    is_flag=True,
    help="Print only the sections for the PS's configuration; exit code 1, with a comment, if the choice is ring.",
)
@click.option("--calibrate", is_flag=True, help="Measure this machine first, and keep that. Takes a minute.")
@click.option("--lab", is_flag=True, help="All hosts share this machine's processors, as in 'ina lab'.")
@click.option(
    "--scheduler",
    type=click.Choice(("trees", "krgs")),
    default="trees",
    show_default=True,
    help="krgs: GOAT's schedule over switches that can sum, instead of trees of servers.",
)
@click.option(
    "--layers",
    help="krgs: a model's layers instead of --size: alexnet, sizes '4 MB,100 kB', module:name of a model.",
)
@click.option(
    "--programmable",
    multiple=True,
    help="krgs: switches that can sum. [default: all, of a generated network a fifth]",
)
@click.option(
    "--registers", default="64 MB", show_default=True, callback=_size, help="krgs: memory of each of them."
)
@click.option(
    "--spare-ps",
    default=0.0,
    type=click.FloatRange(0.0, 100.0),
    help="krgs: links that workers may go out of their way rather than send to the PS what is not aggregated.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="krgs: of the rounding.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    context: click.Context,
    topology: str,
    size: int | None,
    compute: float | None,
    ks: tuple[int, ...],
    ranks_per_host: int,
    inside: float,
    explain: bool,
    as_config: bool,
    calibrate: bool,
    lab: bool,
    scheduler: str,
    layers: str | None,
    programmable: tuple[str, ...],
    registers: int,
    spare_ps: float,
    seed: int,
    as_json: bool,
) -> None:
    """Price every plan for all-reducing a tensor of SIZE bytes on TOPOLOGY, and choose.

    TOPOLOGY is a name that 'ina lab list' shows, the path of a TOML file, or workers and servers on one switch like
    '8x10Gbit/s+1x100Gbit/s'. If a ring is as good, the choice is ring, and no daemon is needed.

    The pattern is how ranks on the same host share the work: a flat ring, Tencent all-reduce, parallel rings, or NetReduce's
    parallel rings through a switch that sums.
    """
    from inanet.lab.library import topology as read
    from inanet.lab.network import fleet, shorthand
    from inanet.planning.costs import load

    if scheduler == "krgs":
        from inanet.cli import krgs

        if (size is None) == (layers is None):
            raise click.UsageError("one of --size and --layers says what is scheduled")
        model = [("tensor", size)] if size is not None else krgs.layers(layers or "")
        made = krgs.plan_krgs(
            krgs.job_of(topology, seed, read), model, registers, seed, programmable, spare_ps
        )
        if as_json:
            click.echo(json.dumps(krgs.report(topology, made, explain)))
        else:
            click.echo("\n".join(krgs.lines(made, explain)))
        return
    if size is None or layers is not None:
        raise click.UsageError("Missing option '--size' (--layers is for --scheduler krgs)")
    if calibrate:
        from inanet.bench.calibration import calibrate as measure

        costs = measure(lambda text: click.echo(f"# {text}", err=True))
    else:
        costs = load()
    try:
        hosts = shorthand(topology)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="TOPOLOGY") from None
    if hosts is None:
        hosts = fleet(read(topology), size)
    if lab:
        hosts = replace(hosts, shared_cores=os.cpu_count())
    if not hosts.workers:
        raise click.UsageError(f"{topology!r} has no worker to plan for")
    choice = choose(hosts, size, costs, compute=compute, ks=ks or range(2, 6))
    advice = advise(hosts, size, costs, each=ranks_per_host, inside=inside)
    if as_json:
        click.echo(json.dumps({**report(topology, size, costs, choice), "pattern": pattern(advice)}))
    elif as_config:
        if not choice.helps:
            click.echo("# use ring: it needs no fabric (for example torch's gloo or nccl backend)")
            context.exit(1)
        click.echo("\n".join(config_lines(choice.chosen.plan)))
    else:
        servers = ", ".join(server.name for server in hosts.servers) or "none"
        click.echo(
            f"# {topology}: {len(hosts.workers)} workers, servers: {servers}; {show_bytes(size)} per host"
        )
        click.echo("\n".join((*table(choice, costs, explain), *(advice.lines() if advice else ()))))


def pattern(advice: Advice | None) -> dict[str, Any] | None:
    """The recommended pattern for ``--json``; ``null`` if one host is alone, or links have no rates."""
    if advice is None:
        return None
    return {
        "ranks_per_host": advice.cluster.each,
        "chosen": advice.pattern,
        "without_switch": advice.plain,
        "seconds": dict(advice.seconds),
        "every_size": advice.surely,
    }


def report(topology: str, size: int, costs: Costs, choice: Choice) -> dict[str, Any]:
    """What ``--json`` prints. Times in seconds; ``config``: sections for the PS, ``null`` for a ring."""
    chosen = choice.chosen.plan
    return {
        "schema": SCHEMA,
        "ok": True,
        "topology": topology,
        "bytes": size,
        "costs": asdict(costs),
        "plans": [_row(price) for price in choice.prices],
        "chosen": chosen.name,
        "helps": choice.helps,
        "seconds": choice.chosen.seconds,
        "ring_seconds": choice.ring.seconds,
        "mode": choice.chosen.mode or None,
        "reasons": list(choice.reasons),
        "config": chosen.config() if chosen.trees else None,
        "hosts": {node: chosen.host(node) for node in chosen.servers},
    }


def _row(price: Price) -> dict[str, Any]:
    return {
        "plan": price.plan.name,
        "kind": price.plan.kind,
        "shards": max(1, len(price.plan.trees)),
        "downlink": price.plan.downlink if price.plan.trees else None,
        "seconds": price.seconds,
        "links_seconds": price.links,
        "processors_seconds": price.processors,
        "latency_seconds": price.latency,
        "bound": price.bound,
        "mode": price.mode or None,
    }


def table(choice: Choice, costs: Costs, explain: bool) -> Iterator[str]:
    """Candidates, cheapest first, with the ring in any case; the choice in words."""
    source = "measured on this machine" if costs.measured else "not of this machine: --calibrate measures it"
    yield f"# costs of nodes: {source}"
    yield "#  seconds  vs ring  plan"
    shown = choice.prices if explain else choice.prices[:SHOWN]
    for price in choice.prices:
        if price in shown or price in (choice.ring, choice.chosen):
            mark = ">" if price is choice.chosen else " "
            ratio = price.seconds / choice.ring.seconds if choice.ring.seconds else 1.0
            line = f"{mark} {price.seconds:8.4f} {ratio:8.2f}  {price.plan.name}"
            yield f"{line}: {price.bound}" if explain else line
    hidden = len(choice.prices) - len(shown)
    if hidden > 0:
        yield f"# {hidden} dearer ones: --explain shows all"
    yield from choice.reasons


def config_lines(plan: Plan) -> Iterator[str]:
    """TOML for the file of the PS, which is the first root, and where the other nodes run."""
    sections = plan.config()
    yield f"# {plan.name}: for ina-ps on {plan.host(plan.trees[0].root)}, named {plan.trees[0].root}; others run ina-agg"
    for node in plan.servers:
        if plan.host(node) != node:
            yield f"# {node} runs on {plan.host(node)}, beside its ina-worker"
    yield "[control]"
    yield f"downlink = {json.dumps(sections['control']['downlink'])}"
    yield ""
    yield "[topology]"
    yield f"roots = {json.dumps(sections['topology']['roots'])}"
    for key in ("aggregators", "workers"):
        yield f"{key} = ["
        for node in sections["topology"][key]:
            yield f"    {{ name = {json.dumps(node['name'])}, parent = {json.dumps(node['parent'])} }},"
        yield "]"
