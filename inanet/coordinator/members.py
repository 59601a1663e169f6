"""Who may come in: the same protocol, the right token, a certificate for the name and the role that are used; and, for workers,
whether they fit the other members of their job.
"""

import hmac
from collections.abc import Collection
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from inanet.coordinator.round_ledger import Host
from inanet.messages.control import PROTOCOL, Hello
from inanet.messages.registration import Query, Register
from inanet.messages.text import show_ranks
from inanet.planning.topology import Fabric, TopologyError
from inanet.proto.slots.systems import TREES
from inanet.trust.certificates import STATUS, Certified
from inanet.wire.endpoint import show


class Rejection(Exception):
    """A Hello that cannot be accepted; ``retry_after`` seconds later it might be."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


def check_entry(message: Hello | Register | Query, token: str, certificate: Certified | None) -> None:
    """Raise :class:`~inanet.coordinator.members.Rejection` unless whoever says this may come in.

    ``certificate``: what the connection's certificate says; None for connections without TLS, which are for Unix
    sockets, loopback, and networks where the token is enough.
    """
    who = "whoever asks" if isinstance(message, Query) else repr(message.name)
    if message.protocol != PROTOCOL:
        raise Rejection(
            f"{who} speaks control protocol {message.protocol}, this coordinator {PROTOCOL}: "
            "install the same version of inanet on both"
        )
    if not hmac.compare_digest(message.token.encode(), token.encode()):
        raise Rejection(f"{who} has another token than this coordinator; use the same on all nodes")
    if certificate is None:
        return
    if isinstance(message, Query):
        if refusal := certificate.looks:
            raise Rejection(f"{refusal}; 'ina keys issue --role {STATUS}' makes one that does")
        return
    job = message.job if isinstance(message, Hello) else ""
    if refusal := certificate.refusal(message.name, message.role, job):
        raise Rejection(
            f"{message.role} {message.name!r} is refused: {refusal}; issue it with "
            f"'ina keys issue --role {message.role}'"
        )


def check_endpoint(hello: Hello) -> None:
    """Everybody else will send where this node says: it must be an address that one host can have."""
    address = IPv4Address(hello.endpoint >> 16)
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        raise Rejection(
            f"{hello.role} {hello.name!r} receives at {address}, which is no address of a host; set its [node] listen"
        )


def check_ranks(hello: Hello) -> None:
    """Raise :class:`Rejection` if a worker's ranks are not distinct ranks of its world."""
    if not hello.job:
        raise Rejection(f"host {hello.name!r} does not say which job it belongs to")
    if not hello.ranks:
        raise Rejection(f"host {hello.name!r} brings no rank")
    if len(set(hello.ranks)) != len(hello.ranks):
        raise Rejection(f"host {hello.name!r} names a rank twice: {hello.ranks}")
    beyond = [rank for rank in hello.ranks if rank >= hello.world]
    if beyond:
        world = f"has {hello.world} ranks (0 to {hello.world - 1})"
        raise Rejection(f"host {hello.name!r} brings {show_ranks(beyond)}, but job {hello.job!r} {world}")


@dataclass(slots=True)
class Members:
    """Worker hosts that mean to be one job, by host name."""

    job: str
    hellos: dict[str, Hello] = field(default_factory=dict)
    #: ranks that a job which resumes still had; None: all of its world
    left: int | None = None

    def admit(self, hello: Hello, fabric: Fabric) -> None:
        """Take a host in. Raises :class:`Rejection` if it does not fit the ones already there."""
        check_ranks(hello)
        if hello.name in self.hellos:
            raise Rejection(
                f"a host called {hello.name!r} has joined job {self.job!r} already; give each its own name"
            )
        for other in self.hellos.values():
            if other.world != hello.world:
                counts = f"{hello.world} ranks on host {hello.name!r} but {other.world} on {other.name!r}"
                raise Rejection(f"job {self.job!r} was started for {counts}; give all the same number")
            if other.system != hello.system:
                raise Rejection(
                    f"job {self.job!r} was started with system {hello.system} on host {hello.name!r} but {other.system} "
                    f"on {other.name!r}; choose the same on all"
                )
            if hello.system != TREES and other.endpoint == hello.endpoint:
                raise Rejection(
                    f"host {hello.name!r} of job {self.job!r} receives at {show(hello.endpoint)}, as host {other.name!r} does: "
                    "others could not tell them apart; set node.listen of one of them to an address of its own"
                )
            shared = set(other.ranks) & set(hello.ranks)
            if shared:
                raise Rejection(
                    f"{show_ranks(shared)} of job {self.job!r} is on host {other.name!r} already; "
                    f"host {hello.name!r} needs ranks of its own"
                )
        try:
            fabric.fits([*self.hellos, hello.name])
        except TopologyError as error:
            raise Rejection(f"host {hello.name!r} cannot join job {self.job!r}: {error}") from None
        self.hellos[hello.name] = hello

    @property
    def world(self) -> int:
        """Ranks of the job, 0 if nobody has joined."""
        return next((hello.world for hello in self.hellos.values()), 0)

    @property
    def ranks(self) -> int:
        """Ranks that contribute (*n* of the number format)."""
        return self.world if self.left is None else self.left

    @property
    def system(self) -> str:
        """What the job has chosen."""
        return next((hello.system for hello in self.hellos.values()), TREES)

    @property
    def joined(self) -> set[int]:
        """Ranks that are here."""
        return {rank for hello in self.hellos.values() for rank in hello.ranks}

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that are not."""
        if len(self.joined) == self.left:
            # an elastic job had gone on without the others
            return ()
        return tuple(sorted(set(range(self.world)) - self.joined))

    def missing(self, fabric: Fabric, connected: Collection[str]) -> tuple[str, ...]:
        """What the job waits for, in words: ranks, aggregators, parameter servers."""
        words = [show_ranks(self.missing_ranks)] if self.missing_ranks else []
        return (*words, *fabric.awaited(self.hellos, connected))

    def hosts(self) -> dict[str, Host]:
        """The hosts, by name."""
        return {name: Host(name, tuple(sorted(h.ranks))) for name, h in sorted(self.hellos.items())}
