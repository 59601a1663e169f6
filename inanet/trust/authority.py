"""The authority of a fabric: makes its own certificate, and those of nodes, with the names of :mod:`inanet.trust.certificates`.

Needs the ``tls`` extra; daemons do not: they only read what is made here.
"""

import datetime
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from inanet.messages.names import check_name
from inanet.service.exits import Failure
from inanet.trust.certificates import COORDINATOR, JOB, NODE, ROLE, ROLES, STATUS

#: Files of an authority: its certificate, which every node gets, and its key, which stays where it is.
CERTIFICATE, KEY = "ca.pem", "ca.key"
#: What was issued, and what of it is no longer good, one line for each: :mod:`inanet.trust.revocation_list`.
ISSUED, REVOKED = "issued.txt", "revoked.txt"
#: Clocks of machines differ by less.
_SKEW = datetime.timedelta(hours=1)


class AuthorityError(Failure):
    """An authority that is not there, is there already, or cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What a certificate is for, and until when; ``serial`` and the SHA-256 ``fingerprint`` in hexadecimal digits."""

    names: tuple[str, ...]
    until: datetime.datetime
    serial: str
    fingerprint: str


def initialise(directory: Path, days: int) -> tuple[Path, Path]:
    """Make an authority in ``directory``; returns the files of its certificate and of its key.

    Raises :class:`AuthorityError` if there is one already, whose nodes would be refused from then on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "inanet fabric")])
    certificate = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(directory / KEY, _private(key), 0o600)
    _write(directory / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(directory / REVOKED, b"", 0o644)
    return directory / CERTIFICATE, directory / KEY


def issue(
    directory: Path,
    name: str,
    *,
    roles: Collection[str],
    coordinator: bool = False,
    jobs: Sequence[str] = (),
    days: int,
) -> Path:
    """Make certificate and key, in one file, for a node that may be all of ``roles``, of
    :data:`~inanet.trust.certificates.ROLES`. Raises :class:`AuthorityError`, and ``ValueError`` for a name that no node can
    have, a role that there is not, and for ``jobs`` of a node that would serve every job.
    """
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"{role!r} is no role; allowed: {', '.join(ROLES)}")
    if not roles and not coordinator:
        raise ValueError(f"a certificate without a role is of no use; allowed: {', '.join(ROLES)}")
    if jobs and (coordinator or not {*roles} <= {"worker", STATUS}):
        raise ValueError(
            "jobs are for workers: a coordinator, and a node that is anything else, serves every job; issue two certificates"
        )
    check_name(name)
    authority, key = _load(directory)
    own = ec.generate_private_key(ec.SECP256R1())
    identities = [
        f"{NODE}{name}",
        *(f"{ROLE}{role}" for role in ROLES if role in roles),
        *([COORDINATOR] if coordinator else []),
        *(f"{JOB}{job}" for job in jobs),
    ]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if coordinator else [])]
    certificate = (
        _builder(subject, authority.subject, own.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text) for text in identities]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = directory / f"{name}.pem"
    _write(file, certificate.public_bytes(serialization.Encoding.PEM) + _private(own), 0o600)
    note(directory / ISSUED, serial(certificate), name, f"sha256 {fingerprint(certificate)}")
    return file


def note(file: Path, serial: str, name: str, remark: str = "") -> None:
    """Add a line to a list of certificates: :mod:`inanet.trust.revocation_list`."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "a") as target:
        target.write(f"{serial} {name}{f'  # {remark}' if remark else ''}\n")


def show(file: Path) -> Issued:
    """What the certificate in a file is for. Raises :class:`AuthorityError`."""
    found = certificate_in(file)
    return Issued(names(found), found.not_valid_after_utc, serial(found), fingerprint(found))


def names(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names in a certificate: :mod:`inanet.trust.certificates`."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return ()
    return tuple(found.value.get_values_for_type(x509.UniformResourceIdentifier))


def serial(certificate: x509.Certificate) -> str:
    """Its serial number, hexadecimal, as lists have it."""
    return f"{certificate.serial_number:X}"


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of all of it, hexadecimal: what ``openssl x509 -fingerprint -sha256`` prints, without colons."""
    return certificate.fingerprint(hashes.SHA256()).hex().upper()


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        # never readable by others, not even for a moment; what is there stays
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise AuthorityError(f"{path} exists already: move it away if it is not needed any more") from None
    with os.fdopen(handle, "wb") as target:
        target.write(data)


def certificate_in(file: Path) -> x509.Certificate:
    """The certificate in a PEM file, the first if there are several. Raises :class:`AuthorityError`."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise AuthorityError(f"{file} holds no certificate") from None
    except FileNotFoundError:
        hint = f": 'ina keys init {file.parent}' makes an authority" if file.name == CERTIFICATE else ""
        raise AuthorityError(f"there is no {file}{hint}") from None


def _load(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = certificate_in(directory / CERTIFICATE)
    try:
        key = serialization.load_pem_private_key((directory / KEY).read_bytes(), None)
    except FileNotFoundError:
        raise AuthorityError(
            f"there is no {directory / KEY}: certificates are issued where 'ina keys init' was run"
        ) from None
    except (ValueError, TypeError):
        raise AuthorityError(f"{directory / KEY} holds no private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AuthorityError(f"{directory / KEY} holds a key that was not made by 'ina keys init'")
    return certificate, key
