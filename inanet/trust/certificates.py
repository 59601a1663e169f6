"""Who may be what, by certificate: control connections over TLS, both ends known by the names in their certificates.

A certificate of the fabric's own authority (``ina keys init``) has URIs as its subject's alternative names:

======================== ===============================================================================
``inanet:node:NAME``     the node of this name
``inanet:role:ROLE``     what it may be: one of :data:`ROLES`; without any, nothing
``inanet:coordinator``   may be connected to as a coordinator: a manager, or the PS of a fabric without one
``inanet:job:PATTERN``   the jobs that a node may join (``*`` stands for anything); without any, every job
======================== ===============================================================================

Host names and addresses are not looked at: nodes are known by name wherever they run.
"""

import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from inanet.service.exits import Exit, Failure
from inanet.trust.revocation_list import Revocations

#: Seconds that a handshake may take.
HANDSHAKE_SECONDS = 10.0
#: How names in certificates start.
NODE, ROLE, COORDINATOR, JOB = "inanet:node:", "inanet:role:", "inanet:coordinator", "inanet:job:"
#: Who asks for an overview, and is no node by that.
STATUS = "status"
#: What a certificate may let its owner be.
ROLES = ("worker", "aggregator", "ps", "switch", STATUS)


class KeyFileError(Failure):
    """A file with keys that cannot be used; the message names it and says what to do."""


class WrongCertificate(KeyFileError):
    """Keys that are in order, and a certificate that is for something else than what they are used for."""

    code = Exit.USAGE


@dataclass(frozen=True, slots=True)
class Certified:
    """What a peer's certificate says it is."""

    nodes: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    jobs: tuple[str, ...] = ()
    coordinator: bool = False
    #: hexadecimal
    serial: str = ""

    @property
    def owner(self) -> str:
        """Whose it is, for people."""
        return ", ".join(sorted(self.nodes)) or "no node"

    def refusal(self, name: str, role: str, job: str = "") -> str:
        """Why the peer cannot be node ``name`` in ``role``, and a worker of ``job``; empty if it can."""
        if name not in self.nodes:
            return f"its certificate is that of {self.owner}, not of {name!r}"
        if role not in self.roles:
            return f"its certificate {self._may}, not to be {role}"
        if self.jobs and role != "worker":
            return f"its certificate is for the jobs {', '.join(self.jobs)}, and a node that is {role} serves all"
        if job and self.jobs and not any(_is_like(job, pattern) for pattern in self.jobs):
            return f"its certificate is for the jobs {', '.join(self.jobs)}, not for {job!r}"
        return ""

    @property
    def looks(self) -> str:
        """Why the peer cannot have an overview; empty if it can. Whoever may coordinate sees everything anyway."""
        if self.coordinator or STATUS in self.roles:
            return ""
        return f"the certificate of {self.owner} {self._may}, not to look ({STATUS})"

    @property
    def coordinates(self) -> str:
        """Why whoever has it cannot be called as a coordinator; empty if it can."""
        return "" if self.coordinator else f"the certificate of {self.owner} {self._may}, not to coordinate"

    @property
    def _may(self) -> str:
        if not self.roles:
            return "names no role, as those that older versions issued"
        return f"lets it be {', '.join(sorted(self.roles))}"


def _is_like(job: str, pattern: str) -> bool:
    """Whether a pattern is for a job. Names of jobs may have ``?`` and ``[`` in them, which stand for themselves."""
    return fnmatchcase(job, re.sub(r"[?[]", r"[\g<0>]", pattern))


def certified(certificate: Mapping[str, Any] | None) -> Certified:
    """What a certificate says, as :meth:`ssl.SSLSocket.getpeercert` gives it; nothing without one."""
    names = [str(value) for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]

    def those(prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    return Certified(
        nodes=frozenset(those(NODE)),
        roles=frozenset(those(ROLE)),
        jobs=tuple(those(JOB)),
        coordinator=COORDINATOR in names,
        serial=str((certificate or {}).get("serialNumber", "")),
    )


@dataclass(frozen=True, slots=True)
class Keys:
    """A node's files: the authority's certificate, and its own certificate with the private key (PEM); ``revoked`` lists
    certificates that are no longer good.
    """

    authority: str
    own: str
    revoked: Revocations | None = None

    def withdrawn(self, certificate: Certified | None) -> str:
        """Why a peer's certificate is no longer good, by the list as it is now; empty if it is."""
        if certificate is None or self.revoked is None or not self.revoked.holds(certificate.serial):
            return ""
        return f"the certificate of {certificate.owner} was revoked: 'ina keys issue' makes another"

    def certified(self) -> Certified:
        """What the node's own certificate says, as others will read it. Raises :class:`KeyFileError`, also if nobody will take
        it: another authority's, or one that has expired.
        """
        server, client = self._context(ssl.PROTOCOL_TLS_SERVER), self.client()
        # a certificate is read by whom it is shown to, so this one is shown to oneself; it need not be a coordinator's
        client.verify_mode = ssl.CERT_NONE
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        shows, sees = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
        try:
            for end in (shows, sees, shows, sees):
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            return certified(sees.getpeercert())
        except ssl.SSLError as error:
            what = getattr(error, "verify_message", "") or error.reason or error
            raise KeyFileError(
                f"nobody who has {self.authority} takes the certificate in {self.own}: {what}; "
                "'ina keys issue' makes another"
            ) from None

    def server(self) -> ssl.SSLContext:
        """For a coordinator: TLS 1.3 only, and clients must have a certificate. Raises :class:`KeyFileError`, and
        :class:`WrongCertificate` if its own is not that of a coordinator: nobody would call it.
        """
        if refusal := self.certified().coordinates:
            raise WrongCertificate(
                f"{self.own} is not that of a coordinator: {refusal}; "
                "'ina keys issue --coordinator' makes one, where the authority is"
            )
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # whoever comes again shows its certificate again: one that has expired meanwhile would pass with a ticket
        context.num_tickets = 0
        return context

    def client(self) -> ssl.SSLContext:
        """For a node. Raises :class:`KeyFileError`."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # who it is stands in the certificate, whatever address it has
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        for path, load in (
            (self.authority, context.load_verify_locations),
            (self.own, context.load_cert_chain),
        ):
            try:
                load(path)
            except ssl.SSLError as error:
                what = error.reason or str(error)
                raise KeyFileError(
                    f"{path} holds no usable keys ({what}): make them with 'ina keys'"
                ) from None
            except OSError as error:
                raise KeyFileError(f"cannot read {path}: {error.strerror}: make it with 'ina keys'") from None
        return context
