"""``ina keys``: certificates for control connections over TLS."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from inanet.service.exits import Exit
from inanet.trust.certificates import COORDINATOR, ROLE, ROLES, STATUS

if TYPE_CHECKING:
    from inanet.trust.revocation import Found

DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
#: Days for which what is made is valid, if nothing else is said: a lab's lifetime.
DAYS = 3650


@click.group()
def keys() -> None:
    """Certificates for control connections over TLS, so that nodes are known by name, and are what they may be.

    'init' makes an authority, once, on a machine you trust; 'issue' a certificate for every node. A node gets ca.pem
    and its own file, as control.ca_file and control.key_file; ca.key stays where it is. 'revoke' takes them back.
    """


@keys.command()
@DIRECTORY
@click.option("--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long it is valid.")
def init(directory: Path, days: int) -> None:
    """Make the authority of a fabric in DIRECTORY: ca.pem and ca.key."""
    from inanet.trust.authority import initialise

    certificate, key = initialise(directory, days)
    click.echo(f"{certificate}  for every node")
    click.echo(f"{key}  for nobody: it makes certificates")


def _roles(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Roles of all options, several in one if there are commas between them."""
    found = tuple(dict.fromkeys(role.strip() for text in given for role in text.split(",")))
    for role in found:
        if role not in ROLES:
            raise click.BadParameter(f"{role!r} is none of {', '.join(ROLES)}")
    return found


@keys.command()
@DIRECTORY
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE[,ROLE]",
    callback=_roles,
    help=f"What they may be: {', '.join(ROLES)}. {STATUS!r} is to ask the coordinator what there is, as 'ina status' and "
    f"'ina doctor' do. Default: worker,{STATUS}; with --coordinator: ps,{STATUS}.",
)
@click.option("--coordinator", is_flag=True, help="They may coordinate: for ina-manager, or a PS that does.")
@click.option(
    "--job",
    "jobs",
    multiple=True,
    metavar="PATTERN",
    help="Only jobs like this, for workers; may be repeated. Default: all.",
)
@click.option(
    "--days", type=click.IntRange(1), default=DAYS, show_default=True, help="How long they are valid."
)
@click.pass_context
def issue(
    context: click.Context,
    directory: Path,
    names: tuple[str, ...],
    roles: tuple[str, ...],
    coordinator: bool,
    jobs: tuple[str, ...],
    days: int,
) -> None:
    """Make DIRECTORY/NAME.pem, certificate and key of a node, for every NAME."""
    from inanet.trust import authority

    if not roles:
        # a coordinator decides what everybody does: that it may be the PS beside it as well takes nothing from anybody
        roles = ("worker" if not coordinator else "ps", STATUS)
        if jobs and not coordinator:
            # a guest does not see the others' jobs
            roles = ("worker",)
    for name in names:
        try:
            file = authority.issue(
                directory, name, roles=roles, coordinator=coordinator, jobs=jobs, days=days
            )
        except ValueError as error:
            click.echo(f"ina: {error}", err=True)
            context.exit(Exit.USAGE)
        click.echo(file)


@keys.command()
@DIRECTORY
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--certificate",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The certificate in this file.",
)
@click.option(
    "--serial", "serials", multiple=True, metavar="HEX", help="The certificate with this serial number."
)
@click.option(
    "--fingerprint",
    "fingerprints",
    multiple=True,
    metavar="HEX",
    help="The one with this SHA-256 fingerprint.",
)
@click.pass_context
def revoke(
    context: click.Context,
    directory: Path,
    names: tuple[str, ...],
    files: tuple[Path, ...],
    serials: tuple[str, ...],
    fingerprints: tuple[str, ...],
) -> None:
    """Take back the certificates of every NAME, or single ones: whoever has them is turned away, and turned out where
    connected. If one of them cannot be, none is.

    The list is DIRECTORY/revoked.txt. Copy it to where control.revoked_file of the coordinator, and of other nodes, says;
    it is read again within seconds. New certificates can then be issued under the same names.
    """
    from inanet.trust import authority
    from inanet.trust import revocation as revoking

    searches: list[Callable[[], Found]] = [
        *(partial(revoking.by_name, directory, name) for name in names),
        *(partial(revoking.by_file, directory, file) for file in files),
        *(partial(revoking.by_serial, directory, number) for number in serials),
        *(partial(revoking.by_fingerprint, directory, digits) for digits in fingerprints),
    ]
    if not searches:
        raise click.UsageError("whose? Give a NAME, --certificate, --serial or --fingerprint")
    try:
        # all of them before any is revoked: a slip of the pen must not leave half of it done
        found = [search() for search in searches]
    except ValueError as error:
        click.echo(f"ina: {error}", err=True)
        context.exit(Exit.USAGE)
    for one in found:
        count = revoking.revoke(directory, one)
        click.echo(f"{one.name}: {f'{count} revoked' if count else 'was revoked before'}")
    click.echo(f"{directory / authority.REVOKED}  for the coordinator and all nodes, as control.revoked_file")


@keys.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def show(file: Path) -> None:
    """Say what the certificate in FILE is for, and until when."""
    from inanet.trust import authority

    issued = authority.show(file)
    for name in issued.names or ("nothing: it is an authority's",):
        click.echo(name)
    if issued.names and not any(name == COORDINATOR or name.startswith(ROLE) for name in issued.names):
        click.echo("no role, as older versions issued it: it is refused; 'ina keys issue' makes another")
    click.echo(f"until {issued.until:%Y-%m-%d}")
    click.echo(f"serial {issued.serial}")
    click.echo(f"sha256 fingerprint {issued.fingerprint}")
