"""``ina keys``: certificates for control connections over TLS."""

from pathlib import Path

import click

from inanet.control.exits import Exit

DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
#: Days for which what is made is valid, if nothing else is said: a lab's lifetime.
DAYS = 3650


@click.group()
def keys() -> None:
    """Certificates for control connections over TLS, so that nodes are known by name.

    'init' makes an authority, once, on a machine you trust; 'issue' a certificate for every node. A node gets ca.pem
    and its own file, as control.ca_file and control.key_file; ca.key stays where it is. 'revoke' takes them back.
    """


@keys.command()
@DIRECTORY
@click.option("--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long it is valid.")
def init(directory: Path, days: int) -> None:
    """Make the authority of a fabric in DIRECTORY: ca.pem and ca.key."""
    from inanet.control.authority import initialise

    certificate, key = initialise(directory, days)
    click.echo(f"{certificate}  for every node")
    click.echo(f"{key}  for nobody: it makes certificates")


@keys.command()
@DIRECTORY
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--coordinator", is_flag=True, help="They may coordinate: for ina-manager, or a PS that does.")
@click.option(
    "--job",
    "jobs",
    multiple=True,
    metavar="PATTERN",
    help="Only jobs like this; may be repeated. Default: all.",
)
@click.option(
    "--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long they are valid."
)
@click.pass_context
def issue(
    context: click.Context,
    directory: Path,
    names: tuple[str, ...],
    coordinator: bool,
    jobs: tuple[str, ...],
    days: int,
) -> None:
    """Make DIRECTORY/NAME.pem, certificate and key of a node, for every NAME."""
    from inanet.control import authority

    for name in names:
        try:
            file = authority.issue(directory, name, coordinator=coordinator, jobs=jobs, days=days)
        except ValueError as error:
            click.echo(str(error), err=True)
            context.exit(Exit.USAGE)
        click.echo(file)


@keys.command()
@DIRECTORY
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.pass_context
def revoke(context: click.Context, directory: Path, names: tuple[str, ...]) -> None:
    """Take back the certificates of every NAME: whoever has them is turned away, and turned out where connected.

    The list is DIRECTORY/revoked.txt. Copy it to where control.revoked_file of the coordinator, and of other nodes, says;
    it is read again within seconds. New certificates can then be issued under the same names.
    """
    from inanet.control import authority

    for name in names:
        try:
            fresh = authority.revoke(directory, name)
        except ValueError as error:
            click.echo(str(error), err=True)
            context.exit(Exit.USAGE)
        click.echo(f"{name}: {f'{fresh} revoked' if fresh else 'was revoked before'}")
    click.echo(f"{directory / authority.REVOKED}  for the coordinator and all nodes, as control.revoked_file")


@keys.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def show(file: Path) -> None:
    """Say what the certificate in FILE is for, and until when."""
    from inanet.control import authority

    issued = authority.show(file)
    for name in issued.names or ("nothing: it is an authority's",):
        click.echo(name)
    click.echo(f"until {issued.until:%Y-%m-%d}")
