"""Probe of this node's certificate: whether it is still good, and names this node."""

import datetime
from collections.abc import Iterator
from pathlib import Path

from inanet.cli.coordinators import Target
from inanet.cli.findings import Finding
from inanet.service.exits import Failure
from inanet.trust.certificates import COORDINATOR, NODE, ROLE

#: Days before its end that a certificate is spoken of.
SOON = 30


def certificate(asked: Target) -> Iterator[Finding]:
    """Whose certificate this machine's file names, what it may be, and until when; nothing without one, or without the
    ``tls`` extra, which reads it.
    """
    if asked.keys is None:
        return
    try:
        from inanet.trust import authority
    except ImportError:
        return
    try:
        issued = authority.show(Path(asked.keys.own))
    except (Failure, OSError) as error:
        yield Finding("certificate", "FAIL", str(error), "put the file there that 'ina keys issue' made")
        return
    owners = [name.removeprefix(NODE) for name in issued.names if name.startswith(NODE)]
    roles = [name.removeprefix(ROLE) for name in issued.names if name.startswith(ROLE)]
    roles += ["coordinator"] if COORDINATOR in issued.names else []
    left = issued.until - datetime.datetime.now(datetime.UTC)
    detail = f"of {', '.join(owners) or 'no node'}, to be {', '.join(roles) or 'nothing'}, until {issued.until:%Y-%m-%d}"
    name = asked.name or (owners or ["NAME"])[0]
    fix = f"'ina keys revoke DIRECTORY {name}' and 'ina keys issue DIRECTORY {name} --role ROLE', where the authority is"
    if left < datetime.timedelta(0):
        yield Finding("certificate", "FAIL", f"{detail}: it has expired", fix)
    elif asked.name and asked.name not in owners:
        yield Finding("certificate", "FAIL", f"{detail}: this node is {asked.name!r}", fix)
    elif not roles:
        yield Finding("certificate", "FAIL", f"{detail}: an older version issued it", fix)
    elif left < datetime.timedelta(days=SOON):
        yield Finding("certificate", "WARN", f"{detail}: {left.days} days", fix)
    else:
        yield Finding("certificate", "OK", detail)
