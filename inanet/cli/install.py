"""``ina install`` and ``ina uninstall``: daemons as services of a host, in one command."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from inanet.cli.installation import CONFIG, Answers, Installation, InstallError, Step, installed, removal
from inanet.config.daemons import PROGRAMS, Role
from inanet.service.exits import Failure

ROLE = click.Choice(list(PROGRAMS))
PREFIX = click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    metavar="DIRECTORY",
    help="Lay files below this directory, an image's root; nothing is started.",
)
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would be done, and do nothing.")


def _take(steps: Sequence[Step], dry_run: bool) -> None:
    """Take the steps that are left, each shown first."""
    left = [step for step in steps if not step.done()]
    for step in left:
        click.echo(f"{'would ' if dry_run else ''}{step.show()}")
        if not dry_run:
            step.take()
    if not left:
        click.echo("nothing to do: everything is as it shall be")


@click.command()
@click.argument("roles", metavar="ROLE...", nargs=-1, required=True, type=ROLE)
@click.option("--name", help="The node's name, unique in its fabric. Default: the host's.")
@click.option(
    "--listen", metavar="ADDRESS", help="Address or interface at which other nodes reach this host."
)
@click.option("--coordinator", metavar="HOST[:PORT]", help="Where ina-ps or ina-manager runs.")
@click.option(
    "--worker", "workers", multiple=True, metavar="NAME[:PARENT]", help="For ps: a worker of the fabric."
)
@click.option(
    "--aggregator",
    "aggregators",
    multiple=True,
    metavar="NAME[:PARENT]",
    help="For ps: an aggregator of the fabric.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIRECTORY",
    help="Certificates from 'ina keys': takes ca.pem and NAME.pem.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="The fabric's secret, beside certificates or instead.",
)
@click.option("--insecure", is_flag=True, help="With --token-file: connections without TLS.")
@click.option("--no-start", is_flag=True, help="Enable the services for the next boot only.")
@click.option("--no-kernels", is_flag=True, help="Leave the kernels to the daemons' first start.")
@PREFIX
@DRY_RUN
def install(
    roles: tuple[Role, ...],
    name: str | None,
    listen: str | None,
    coordinator: str | None,
    workers: tuple[str, ...],
    aggregators: tuple[str, ...],
    keys: Path | None,
    token_file: Path | None,
    insecure: bool,
    no_start: bool,
    no_kernels: bool,
    prefix: Path,
    dry_run: bool,
) -> None:
    """Make daemons of this host's ROLEs (worker, agg, ps, switch, manager) services of systemd.

    Writes /etc/inanet/ROLE.toml, or your answers into the file that is there; the unit; certificates, if given; compiles the
    kernels once for all units; then enables and starts. Says each step. What is done already is left alone, so it may be
    repeated. If something would keep a service from running, it says so and changes nothing.
    """
    answers = Answers(name, listen, coordinator, aggregators, workers, keys, token_file, insecure)
    installation = Installation(tuple(dict.fromkeys(roles)), answers, prefix.absolute())
    steps = installation.steps(start=not no_start, kernels=not no_kernels)
    if dry_run:
        _take(steps, dry_run=True)
    if installation.refusals:
        raise InstallError(installation.refusals)
    if not dry_run:
        try:
            _take(steps, dry_run=False)
        except Failure as error:
            raise Failure(f"{error}{_journal(roles)}") from None


def _journal(roles: Sequence[Role]) -> str:
    """The last warnings of services that did not start."""
    units = [f"--unit={PROGRAMS[role]}.service" for role in roles]
    command = ["journalctl", "--no-pager", "--output=cat", "--lines=5", "--priority=warning", *units]
    try:
        said = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""
    return f"\n{said}" if said else ""


@click.command()
@click.argument("roles", metavar="[ROLE]...", nargs=-1, type=ROLE)
@click.option("--purge", is_flag=True, help="Also configuration, certificates, caches and state.")
@PREFIX
@DRY_RUN
def uninstall(roles: tuple[Role, ...], purge: bool, prefix: Path, dry_run: bool) -> None:
    """Stop and remove the services of these ROLEs, by default of all. Files in /etc/inanet stay unless --purge is given."""
    root = prefix.absolute()
    chosen = roles or (tuple(PROGRAMS) if purge else tuple(installed(root)))
    steps = removal(chosen, root, purge=purge)
    _take(steps, dry_run)
    kept = sorted(file.name for file in (root / CONFIG).glob("*"))
    if kept and not purge and not dry_run:
        click.echo(f"kept in {root / CONFIG}: {', '.join(kept)}")
