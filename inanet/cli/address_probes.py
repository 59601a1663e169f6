"""Probes of the addresses that this machine's files have chosen: can other machines reach them, and is it the right one."""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from inanet.cli import coordinators
from inanet.cli.findings import Finding
from inanet.config.daemons import AggConfig, DaemonFile, PsConfig, WorkerConfig, load
from inanet.config.file import ConfigError
from inanet.config.manager import ManagerConfig
from inanet.service import addresses
from inanet.service.addresses import AddressError, HostPort


def chosen() -> Iterator[Finding]:
    """For every daemon's file of this machine; nothing without one."""
    for file in coordinators.files():
        try:
            config = load(file, from_outside=True)
        except (ConfigError, OSError) as error:
            yield Finding(
                "chosen addresses",
                "FAIL",
                str(error).replace("\n", "; "),
                f"correct it; 'ina check {file}' reads it",
            )
            continue
        wrong = list(_of(file, config, addresses.interfaces()))
        yield from wrong or [Finding("chosen addresses", "OK", f"those in {file} can be reached")]


def _of(file: Path, config: DaemonFile, present: Mapping[str, str]) -> Iterator[Finding]:
    good = [name for name, owned in present.items() if addresses.suspicion(owned, present) is None]
    instead = good[0] if good else "INTERFACE"
    meeting: HostPort | None = None
    if isinstance(config, WorkerConfig | AggConfig):
        meeting = config.control.coordinator
    elif isinstance(config, PsConfig):
        meeting = config.control.coordinator or config.control.listen
    elif isinstance(config, ManagerConfig):
        meeting = config.control.listen
    if isinstance(config, ManagerConfig | PsConfig) and getattr(config.control, "coordinator", None) is None:
        yield from _listens(file, config.control.listen, present, instead)
    if isinstance(config, WorkerConfig | AggConfig | PsConfig) and meeting is not None and not meeting.local:
        yield from _receives(file, config.node.listen, meeting, present, instead)


def _edit(file: Path, section: str, value: str) -> str:
    """The command that changes ``listen`` in one section; others have a key of that name as well."""
    change = f'/^\\[{section}\\]/,/^\\[/ s/^listen = .*/listen = "{value}"/'
    return f"sudo sed -i '{change}' {file}   # and restart the daemon"


def _listens(file: Path, listen: HostPort, present: Mapping[str, str], instead: str) -> Iterator[Finding]:
    """The coordinator's own address; loopback is what the shipped file has, for a fabric on one machine."""
    if listen.local or listen.host == "0.0.0.0":
        return
    try:
        found = addresses.resolve(listen).address
    except AddressError as error:
        yield Finding("chosen addresses", "FAIL", f"{file}: control.listen: {error}", f"edit {file}")
        return
    owned = present.get(instead, "ADDRESS")
    if (why := addresses.suspicion(found, present)) is not None:
        detail = f"{file}: control.listen is {listen}, which {why}"
        yield Finding("chosen addresses", "WARN", detail, _edit(file, "control", f"{owned}:{listen.port}"))
    elif found not in addresses.owners():
        detail = f"{file}: control.listen is {listen}, no address of this machine"
        yield Finding("chosen addresses", "FAIL", detail, _edit(file, "control", f"{owned}:{listen.port}"))


def _receives(
    file: Path, listen: HostPort, meeting: HostPort, present: Mapping[str, str], instead: str
) -> Iterator[Finding]:
    """Where a node's data arrives, if its coordinator is on another machine, or may be."""
    try:
        own, there = addresses.resolve(listen).address, addresses.resolve(meeting).address
    except AddressError as error:
        yield Finding("chosen addresses", "FAIL", f"{file}: {error}", f"edit {file}")
        return
    detail = f"{file}: node.listen is {listen}"
    if addresses.is_loopback(own) and not addresses.is_loopback(there):
        detail += f", which no other machine can reach, and the coordinator is {meeting}"
        yield Finding("chosen addresses", "FAIL", detail, _edit(file, "node", instead))
        return
    if (why := addresses.suspicion(own, present)) is not None:
        yield Finding("chosen addresses", "WARN", f"{detail}, which {why}", _edit(file, "node", instead))
        return
    leaves = _leaving(there)
    owners = addresses.owners()
    if leaves and owners.get(leaves, leaves) != owners.get(own, own) and there not in owners:
        by = owners.get(leaves, leaves)
        detail += f", and packets to the coordinator at {meeting} leave by {by} ({leaves})"
        yield Finding("chosen addresses", "WARN", detail, _edit(file, "node", by))


def _leaving(there: str) -> str:
    """The address from which this machine would send there; empty without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])
