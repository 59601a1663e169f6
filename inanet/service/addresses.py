"""Addresses in configuration files, and what they turn out to be on this machine.

A host may be written as IPv4 address, host name or network interface. Parsing opens nothing (so ``--check``
does not); :func:`resolve` asks the system and says how it came to its answer, because an address chosen by
mistake (a loopback entry in /etc/hosts, a VPN) otherwise shows only as a job that never starts.
"""

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inanet.phy import interface
from inanet.service.exits import Failure

#: Longest path the kernel takes for a Unix socket.
SOCKET_PATH_BYTES = 107

#: Characters of names of hosts, and of interfaces, which may have others than DNS.
_NAME = re.compile(r"[A-Za-z0-9._@-]+", re.ASCII)
_LONGEST_NAME, _LONGEST_LABEL = 253, 63
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+", re.ASCII)
_SHARED_SPACE = ipaddress.IPv4Network("100.64.0.0/10")
#: Interface types (/sys/class/net/*/type) of tunnels and point-to-point links: ARPHRD_PPP, ARPHRD_NONE,
#: TUNNEL, IPGRE.
_TUNNEL_TYPES = frozenset({512, 65534, 768, 778})


class AddressError(Failure):
    """An address that does not exist here or cannot be used; the message says what to write instead."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """``host:port``, or the path of a Unix socket (``unix:/run/ina.sock``; the host is empty then)."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether the text alone says that nothing but this machine is meant."""
        return (
            bool(self.path) or self.host == "lo" or self.host.lower() == "localhost" or is_loopback(self.host)
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """An IPv4 address of this machine or another, and where it came from, for the log."""

    address: str
    port: int
    origin: str


def parse_host_port(text: object, *, default_port: int | None = None, unix: bool = False) -> HostPort:
    """``"10.0.0.1:7400"``, ``"eth0"``, ``"node7:0"`` or, if ``unix``, ``"unix:/path"``.

    Without ``default_port`` the port must be given. Raises ``ValueError`` saying what is wrong; what is
    allowed.
    """
    forms = "an IPv4 address, host name or interface" + (
        ", :port may follow" if default_port is not None else " with :port"
    )
    allowed = f"allowed: {forms}" + (", or unix:/path" if unix else "")
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a string; {allowed}")
    if text.startswith("unix:"):
        if not unix:
            raise ValueError(f"{text!r}: a Unix socket cannot be used here; {allowed}")
        return HostPort("", 0, check_socket_path(text.removeprefix("unix:")))
    host, colon, port_text = text.rpartition(":")
    if not colon:
        host, port_text = text, ""
    if ":" in host:
        raise ValueError(f"{text!r} looks like IPv6, which is not supported; {allowed}")
    if colon and not (port_text.isascii() and port_text.isdigit() and int(port_text) <= 0xFFFF):
        raise ValueError(f"{text!r}: the port {port_text!r} is not a number from 0 to 65535; {allowed}")
    if not colon and default_port is None:
        raise ValueError(f"{text!r} has no port; {allowed}")
    try:
        host = host_name(host)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; {allowed}") from None
    if _DIGITS_AND_DOTS.fullmatch(host) and not _is_ipv4(host):
        raise ValueError(f"{text!r}: {host!r} is not an IPv4 address; {allowed}")
    return HostPort(host, int(port_text) if colon else default_port or 0)


def host_name(text: str) -> str:
    """A name as DNS takes it: a dot at its end is the root's and is left out, other scripts than ASCII become their IDNA form.
    Case matters to interfaces only, and is kept. Raises ``ValueError`` naming what cannot be in a name.
    """
    name = text.removesuffix(".")
    if not name.isascii():
        try:
            name = name.encode("idna").decode("ascii")
        except UnicodeError as error:
            raise ValueError(f"{text!r} is not a host: {error.__cause__ or error}") from None
    match = _NAME.match(name)
    if match is None or match.end() < len(name):
        odd = name[match.end() if match else 0 :][:1]
        why = f"{odd!r} cannot be in its name" if odd else "it is empty"
        raise ValueError(f"{text!r} is not a host: {why}")
    if not (name[0].isalnum() and name[-1].isalnum()):
        odd = name[-1] if name[0].isalnum() else name[0]
        raise ValueError(f"{text!r} is not a host: its name cannot begin or end with {odd!r}")
    labels = name.split(".")
    if len(name) > _LONGEST_NAME or any(not 0 < len(label) <= _LONGEST_LABEL for label in labels):
        raise ValueError(
            f"{text!r} is not a host: a name has up to {_LONGEST_NAME} characters, in parts of 1 to {_LONGEST_LABEL}"
        )
    return name


def check_socket_path(path: str) -> str:
    """The path, if a Unix socket can be bound to it. Raises ``ValueError``."""
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path; allowed: /path/of/the.sock")
    if len(path.encode()) > SOCKET_PATH_BYTES:
        raise ValueError(
            f"{path!r} is {len(path.encode())} bytes long; allowed: {SOCKET_PATH_BYTES}, the kernel's limit"
        )
    return path


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether this is an IPv4 address of 127.0.0.0/8; names are not looked up."""
    return _is_ipv4(address) and ipaddress.IPv4Address(address).is_loopback


def owners() -> dict[str, str]:
    """The interface of every IPv4 address of this machine, by address; an interface may have several."""
    return interface.owners()


def interfaces() -> dict[str, str]:
    """The first IPv4 address of every interface of this machine that has one, by name."""
    found: dict[str, str] = {}
    for address, name in owners().items():
        found.setdefault(name, address)
    return found


def resolve(wanted: HostPort) -> Resolved:
    """The IPv4 address that ``wanted`` means, looked for among addresses, interfaces and host names in this
    order.

    Raises :class:`AddressError` naming what was tried and which interfaces there are. Host names may take as
    long as the system's resolver does: call it from a thread while an event loop runs.
    """
    if _is_ipv4(wanted.host):
        return Resolved(wanted.host, wanted.port, "address")
    present = interfaces()
    if wanted.host in present:
        return Resolved(present[wanted.host], wanted.port, f"interface {wanted.host}")
    try:
        answers = socket.getaddrinfo(wanted.host, None, socket.AF_INET, socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError) as error:
        listed = ", ".join(f"{name} ({address})" for name, address in present.items()) or "none"
        raise AddressError(
            f"{wanted.host!r} is neither an interface of this machine with an IPv4 address ({listed}) nor a "
            f"host name that resolves to one ({error}): give an IPv4 address or one of these interfaces"
        ) from None
    return Resolved(str(answers[0][4][0]), wanted.port, f"host name {wanted.host}")


def suspicion(address: str, present: Mapping[str, str] | None = None) -> str | None:
    """Why other machines may be unable to reach this address of ours; ``None`` if nothing says so."""
    if is_loopback(address):
        return "is a loopback address, which no other machine can reach"
    known = owners() if present is None else {owned: name for name, owned in present.items()}
    interface = known.get(address) or owners().get(address, "")
    if _is_tunnel(interface):
        return f"belongs to {interface}, a tunnel or VPN"
    if ipaddress.IPv4Address(address) in _SHARED_SPACE:
        return "lies in 100.64.0.0/10, which VPNs and carriers use"
    if ipaddress.IPv4Address(address).is_link_local:
        return "is link-local: the interface got no address from its network"
    return None


def _is_tunnel(interface: str) -> bool:
    try:
        return int(Path("/sys/class/net", interface, "type").read_text()) in _TUNNEL_TYPES
    except (OSError, ValueError):
        return False


def only_here(listen: HostPort) -> str:
    """Why other machines do not reach a service that listens where ``listen`` says, although its text does not say so; empty if
    they may. Debian's /etc/hosts has the host's own name at 127.0.1.1.
    """
    if listen.local:
        return ""
    try:
        met = resolve(listen)
    except AddressError:
        return ""
    if not is_loopback(met.address):
        return ""
    return (
        f"{listen.host} is {met.address} on this host (see /etc/hosts), so no other host reaches {listen}: write an address, "
        "as 'ip -4 -brief address' shows them"
    )


def refuse_loopback_early(node: str, advertised: str, coordinator: HostPort) -> None:
    """The same before there is a connection. Nothing is said of a coordinator whose name does not resolve: after a boot that
    may come, and whoever connects tries until then.
    """
    if coordinator.local or not is_loopback(advertised):
        return
    try:
        met = resolve(coordinator)
    except AddressError:
        return
    refuse_loopback(node, advertised, met.address)


def refuse_loopback(node: str, advertised: str, coordinator: str) -> None:
    """Raise :class:`AddressError` if ``node`` would tell a coordinator on another machine a loopback address.

    Both are IPv4 addresses; ``coordinator`` is the one the control connection leads to.
    """
    if is_loopback(advertised) and not is_loopback(coordinator):
        raise AddressError(
            f"{node} would advertise {advertised} to the coordinator at {coordinator}, but that is a "
            "loopback address, which no other machine can reach: set node.listen to this machine's address "
            "or interface towards the others"
        )
