"""``ina lab``: networks of namespaces on this machine, and commands that run in them."""

import contextlib
import json
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import click

from inanet import units
from inanet.lab import build, library, namespaces
from inanet.lab.fabric import Daemons, ranks
from inanet.lab.layout import addresses, namespace, switch_addresses
from inanet.lab.model import Topology, check_lab_name
from inanet.lab.run import run as run_command
from inanet.lab.session import Lab
from inanet.launch.interrupts import Interrupted, Interrupts
from inanet.service.exits import Exit, Failure

#: Of what ``--json`` prints.
SCHEMA = 1


def _lab_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        return check_lab_name(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_name = click.option("--name", callback=_lab_name, help="Name of the lab. Default: the topology's.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def lab() -> None:
    """Networks of namespaces on this machine: hosts, switches, and links with rates.

    TOPOLOGY is a name that 'ina lab list' shows, or the path of a TOML file. Needs root, except 'list'.
    """


@lab.command("list")
@_json
def list_(as_json: bool) -> None:
    """Show the topologies that there are, and the labs that are up."""
    known = {name: library.topology(name) for name in library.known()}
    labs = namespaces.labs()
    if as_json:
        entries = [
            {"name": name, "summary": one.summary, "hosts": len(one.hosts()), "ranks": len(ranks(one))}
            for name, one in known.items()
        ]
        click.echo(json.dumps({"schema": SCHEMA, "ok": True, "topologies": entries, "labs": sorted(labs)}))
        return
    width = max(map(len, known), default=0)
    for name, one in known.items():
        click.echo(f"{name:{width}}  {one.summary}")
    for name, members in labs.items():
        click.echo(f"up: {name} ({len(members)} namespaces; remove it with 'ina lab down {name}')")


@lab.command()
@click.argument("topology")
@_name
@_json
def up(topology: str, name: str | None, as_json: bool) -> None:
    """Have the lab of TOPOLOGY up, complete and as its file says, whatever of it there is already."""
    chosen = library.topology(topology)
    name = name or chosen.name
    incomplete = f"lab {name} may be incomplete: 'ina lab up' completes it, 'ina lab down {name}' removes it"
    with _interruptible(incomplete) as interrupts:
        build.build(chosen, name, interrupts.check)
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "ok": True, "lab": name, "hosts": _hosts(chosen, name)}))
        return
    for host in _hosts(chosen, name):
        click.echo(
            f"{host['name']:12} {host['role']:10} {host['address']:15} {_rates(host):12} {host['namespace']}"
        )
    for switch in switch_addresses(chosen):
        click.echo(
            f"# nothing passes {switch} until this runs: ip netns exec {namespace(name, switch)} ina-switch --config FILE"
        )
    first = chosen.hosts()[0].name
    click.echo(
        f"# enter a host: ip netns exec {namespace(name, first)} COMMAND   remove: ina lab down {name}"
    )


@lab.command()
@click.argument("topology", required=False)
@_name
@click.option("--all", "every", is_flag=True, help="All labs, also those that a killed 'run' left.")
@_json
def down(topology: str | None, name: str | None, every: bool, as_json: bool) -> None:
    """Remove the lab of TOPOLOGY (or the lab of that name), with every process that runs in it."""
    if every == (topology is not None or name is not None):
        raise click.UsageError("give a topology or the name of a lab, or --all")
    there = namespaces.labs()
    if every:
        wanted = list(there)
    elif name is not None or topology in there:
        wanted = [name or str(topology)]
    elif library.named(str(topology)):
        wanted = [library.topology(str(topology)).name]
    else:
        raise Failure(f"no lab {topology} is up ('ina lab list' shows those that are)")
    removed = {one: build.remove(one) for one in wanted}
    if as_json:
        click.echo(json.dumps({"schema": SCHEMA, "ok": True, "removed": removed}))
        return
    for one, members in removed.items():
        click.echo(f"{one}: {len(members)} namespaces removed" if members else f"{one}: was not up")


@lab.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("topology")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--name", callback=_lab_name, help="Name of the lab. Default: one that no other lab has.")
@click.option("--network-only", is_flag=True, help="Start no daemons: the network and the command alone.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Replace a key in the configuration of all daemons; VALUE as in TOML.",
)
def run(
    topology: str, command: tuple[str, ...], name: str | None, network_only: bool, settings: tuple[str, ...]
) -> None:
    """Build a lab, start its daemons, run COMMAND once per rank on its host, and remove everything.

    Switches of kind 'ina' belong to the network: they run with --network-only, too.

    Options stand before TOPOLOGY; a '--' may stand before COMMAND. COMMAND finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and INA_SOCKET in
    its environment. Its output is shown line by line behind RANK@HOST. Exit status: the greatest of all.
    """
    if command[0] == "--":
        command = command[1:]
    if not command:
        raise click.UsageError("Missing argument 'COMMAND...'.")
    overrides = _overrides(settings)
    if name is not None and name in namespaces.labs():
        raise click.UsageError(f"there is a lab {name!r} already; remove it with 'ina lab down {name}'")
    ended = "every process of the lab was ended and the lab removed"
    with _interruptible(ended) as interrupts, contextlib.ExitStack() as stack:
        chosen = stack.enter_context(Lab(topology, name, interrupts.check))
        if switch_addresses(chosen.topology):
            click.echo(f"# lab {chosen.name} is up; starting its ina-switches", err=True)
            # brings arrays along, which most commands of this file do without
            from inanet.lab.switches import switches

            stack.enter_context(switches(chosen, check=interrupts.check))
        daemons = None
        if not network_only:
            click.echo(f"# lab {chosen.name} is up; starting its daemons", err=True)
            daemons = stack.enter_context(Daemons(chosen, overrides, interrupts.check))
        interrupts.check()
        status = run_command(chosen, daemons, command, _show, interrupts.check)
    sys.exit(status)


def _show(label: str, line: str) -> None:
    click.echo(f"[{label}] {line}")


def _overrides(settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Sections of keys from ``section.key=value``. Raises ``click.UsageError``."""
    overrides: dict[str, dict[str, Any]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and section and name):
            raise click.UsageError(f"--set {setting}: write it like --set 'node.memory=\"2 GiB\"'")
        keys = overrides.setdefault(section, {})
        try:
            keys[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            # quotes that the shell has taken away
            keys[name] = value
    return overrides


def _hosts(topology: Topology, name: str) -> list[dict[str, Any]]:
    places = addresses(topology)
    return [
        {
            "name": host.name,
            "role": host.role,
            "address": places[host.name],
            "rate_bps": host.link.sends,
            "down_bps": host.link.receives,
            "namespace": namespace(name, host.name),
        }
        for host in topology.hosts()
    ]


def _rates(host: dict[str, Any]) -> str:
    """The rate of a host's link, or both if its directions differ."""
    shown = [
        units.show_rate(rate) if rate else "not limited" for rate in (host["rate_bps"], host["down_bps"])
    ]
    return shown[0] if shown[0] == shown[1] else f"up {shown[0]}, down {shown[1]}"


@contextlib.contextmanager
def _interruptible(consequence: str) -> Iterator[Interrupts]:
    """Signals that ask to end are acted on where it is safe; says what came of it and exits."""
    try:
        with Interrupts() as interrupts:
            yield interrupts
    except Interrupted as signal_name:
        click.echo(f"{signal_name}: {consequence}", err=True)
        sys.exit(Exit.INTERRUPTED)
