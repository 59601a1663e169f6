"""Whether a daemon's own certificate is for what the daemon is about to be: it says so itself, before others turn it away,
or never call it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inanet.config.daemons import PROGRAMS, PsConfig
from inanet.config.file import Problem
from inanet.config.manager import ManagerConfig
from inanet.trust.certificates import STATUS, KeyFileError, WrongCertificate

if TYPE_CHECKING:
    from inanet.config.daemons import DaemonFile, Role
    from inanet.service.addresses import HostPort

#: What certificates call a daemon, where its program has another name.
_CALLED = {"agg": "aggregator"}


def check(role: Role, config: DaemonFile) -> None:
    """Raise :class:`~inanet.trust.certificates.WrongCertificate` if nobody would take the daemon for what it is, with the command
    that issues the right certificate, and :class:`~inanet.trust.certificates.KeyFileError` if nobody takes the certificate at
    all. Connections that are not TLS need none.
    """
    keys = config.control.tls_keys()
    where, coordinates = _meets(config)
    if keys is None or where is None or where.path:
        return
    name = config.node.name
    who = f"{PROGRAMS[role]} {name!r} does not start"
    try:
        certificate = keys.certified()
    except KeyFileError as error:
        raise KeyFileError(f"{who}: {error}") from None
    wrong = certificate.coordinates if coordinates else ""
    options = "--coordinator"
    if role != "manager":
        called = _CALLED.get(role, role)
        wrong = wrong or certificate.refusal(name, called)
        options = options if coordinates else f"--role {called},{STATUS}"
    if wrong:
        raise WrongCertificate(
            f"{who} with {keys.own}: {wrong}; 'ina keys issue DIRECTORY {name} {options}' makes the right one, where the "
            f"authority is, after 'ina keys revoke DIRECTORY {name}' if there is another of that name"
        )


def problems(role: Role, config: DaemonFile) -> list[Problem]:
    """The same for whoever only looks at the daemon's file."""
    try:
        check(role, config)
    except KeyFileError as error:
        return [Problem("control.key_file", str(error))]
    return []


def _meets(config: DaemonFile) -> tuple[HostPort | None, bool]:
    """Where the daemon meets the others, and whether it coordinates there."""
    if isinstance(config, ManagerConfig):
        return config.control.listen, True
    if isinstance(config, PsConfig) and config.control.coordinator is None:
        return config.control.listen, True
    return config.control.coordinator, False
