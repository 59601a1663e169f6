"""The authority of a fabric: makes its own certificate, and those of nodes, with the names of :mod:`inanet.control.trust`.

Needs the ``tls`` extra; daemons do not: they only read what is made here.
"""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from inanet.control.config_fields import check_name
from inanet.control.exits import Failure
from inanet.control.revocation import parse
from inanet.control.trust import COORDINATOR, JOB, NODE

#: Files of an authority: its certificate, which every node gets, and its key, which stays where it is.
CERTIFICATE, KEY = "ca.pem", "ca.key"
#: What was issued, and what of it is no longer good, one line for each: :mod:`inanet.control.revocation`.
ISSUED, REVOKED = "issued.txt", "revoked.txt"
#: Clocks of machines differ by less.
_SKEW = datetime.timedelta(hours=1)


class AuthorityError(Failure):
    """An authority that is not there, is there already, or cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What a certificate is for, and until when."""

    names: tuple[str, ...]
    until: datetime.datetime


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


def issue(directory: Path, name: str, *, coordinator: bool, jobs: Sequence[str], days: int) -> Path:
    """Make certificate and key, in one file, for a node. Raises :class:`AuthorityError`, and ``ValueError`` for a name
    that no node can have.
    """
    check_name(name)
    authority, key = _load(directory)
    own = ec.generate_private_key(ec.SECP256R1())
    names = [f"{NODE}{name}", *([COORDINATOR] if coordinator else []), *(f"{JOB}{job}" for job in jobs)]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if coordinator else [])]
    certificate = (
        _builder(subject, authority.subject, own.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text) for text in names]),
            critical=False,
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = directory / f"{name}.pem"
    _write(file, certificate.public_bytes(serialization.Encoding.PEM) + _private(own), 0o600)
    _note(directory / ISSUED, name, [certificate.serial_number])
    return file


def revoke(directory: Path, name: str) -> int:
    """Put every certificate that was issued for a node on the list of those that are no longer good, and remove its file,
    so that another can be issued. Returns how many were added: 0 if all were there already.

    Raises :class:`AuthorityError` if none was ever issued.
    """
    _certificate(directory / CERTIFICATE)
    check_name(name)
    issued = [serial for serial, whose in _listed(directory / ISSUED).items() if whose == name]
    if not issued:
        raise AuthorityError(
            f"{directory / ISSUED} has no certificate of {name!r}: nothing was issued under that name"
        )
    known = _listed(directory / REVOKED)
    fresh = [int(serial, 16) for serial in issued if serial not in known]
    _note(directory / REVOKED, name, fresh)
    (directory / f"{name}.pem").unlink(missing_ok=True)
    return len(fresh)


def _listed(file: Path) -> dict[str, str]:
    try:
        return parse(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise AuthorityError(f"{file}: {error}") from None


def _note(file: Path, name: str, serials: Sequence[int]) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "a") as target:
        target.writelines(f"{serial:X} {name}\n" for serial in serials)


def show(file: Path) -> Issued:
    """What the certificate in a file is for. Raises :class:`AuthorityError`."""
    certificate = _certificate(file)
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = tuple(found.value.get_values_for_type(x509.UniformResourceIdentifier))
    except x509.ExtensionNotFound:
        names = ()
    return Issued(names, certificate.not_valid_after_utc)


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


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError:
        raise AuthorityError(f"{file} holds no certificate") from None
    except FileNotFoundError:
        raise AuthorityError(
            f"there is no {file}: 'ina keys init {file.parent}' makes an authority"
        ) from None


def _load(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = _certificate(directory / CERTIFICATE)
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
