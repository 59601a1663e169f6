"""The door of a coordinator: the same protocol, the right token, a certificate for the name and the role that are used."""

import hmac
from ipaddress import IPv4Address

from inanet.coordinator.members import Refused
from inanet.messages.control import PROTOCOL, Hello
from inanet.messages.registration import Query, Register
from inanet.trust.certificates import STATUS, Certified


def check_entry(message: Hello | Register | Query, token: str, certificate: Certified | None) -> None:
    """Raise :class:`~inanet.coordinator.members.Refused` unless whoever says this may come in.

    ``certificate``: what the connection's certificate says; None for connections without TLS, which are for Unix
    sockets, loopback, and networks where the token is enough.
    """
    who = "whoever asks" if isinstance(message, Query) else repr(message.name)
    if message.protocol != PROTOCOL:
        raise Refused(
            f"{who} speaks control protocol {message.protocol}, this coordinator {PROTOCOL}: "
            "install the same version of inanet on both"
        )
    if not hmac.compare_digest(message.token.encode(), token.encode()):
        raise Refused(f"{who} has another token than this coordinator; use the same on all nodes")
    if certificate is None:
        return
    if isinstance(message, Query):
        if refusal := certificate.looks:
            raise Refused(f"{refusal}; 'ina keys issue --role {STATUS}' makes one that does")
        return
    job = message.job if isinstance(message, Hello) else ""
    if refusal := certificate.refusal(message.name, message.role, job):
        raise Refused(
            f"{message.role} {message.name!r} is refused: {refusal}; issue it with "
            f"'ina keys issue --role {message.role}'"
        )


def check_endpoint(hello: Hello) -> None:
    """Everybody else will send where this node says: it must be an address that one host can have."""
    address = IPv4Address(hello.endpoint >> 16)
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        raise Refused(
            f"{hello.role} {hello.name!r} receives at {address}, which is no address of a host; set its [node] listen"
        )
