"""Certificates of an authority are taken back: by the name of their node, or one by one, whenever they were issued.

They are looked for first, all that somebody names, and taken back when all are found: :func:`revoke`. What is written is the
list of :mod:`inanet.trust.revocation_list`, in the authority's directory. Needs the ``tls`` extra.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from inanet.messages.names import check_name
from inanet.trust.authority import (
    CERTIFICATE,
    ISSUED,
    REVOKED,
    AuthorityError,
    certificate_in,
    fingerprint,
    names,
    note,
    serial,
)
from inanet.trust.certificates import NODE
from inanet.trust.revocation_list import parse, plain

#: What a list says of a certificate that nobody knows.
UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Found:
    """Certificates of one owner, by their serial numbers, that can be taken back."""

    name: str
    serials: tuple[str, ...]


def by_name(directory: Path, name: str) -> Found:
    """Everything that was issued for a node.

    Raises :class:`~inanet.trust.authority.AuthorityError` if nothing is known to have been issued, and ``ValueError``
    for a name that no node can have.
    """
    certificate_in(directory / CERTIFICATE)
    check_name(name)
    numbers = [number for number, whose in _listed(directory / ISSUED).items() if whose == name]
    # one that was issued before there was a list of them is known by its file only
    numbers += [serial(one) for _, one in _kept(directory) if name in _nodes(one)]
    if not numbers:
        raise AuthorityError(
            f"{directory / ISSUED} has no certificate of {name!r}, and there is no file with one: nothing was issued under "
            "that name, or before there was this list; --certificate FILE, --serial HEX or --fingerprint HEX revoke a single "
            "one, the first two also if it is not on the list"
        )
    return Found(name, tuple(dict.fromkeys(numbers)))


def by_file(directory: Path, file: Path) -> Found:
    """The certificate in a file. Raises :class:`~inanet.trust.authority.AuthorityError` if it is none that this authority
    has issued.
    """
    authority, certificate = certificate_in(directory / CERTIFICATE), certificate_in(file)
    if certificate == authority:
        raise AuthorityError(
            f"{file} is the authority itself: instead, make another with 'ina keys init', and give it to all nodes"
        )
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise AuthorityError(f"{file} was not issued by {directory / CERTIFICATE}") from None
    name = next(iter(_nodes(certificate)), UNKNOWN)
    return Found(name, (serial(certificate),))


def by_serial(directory: Path, number: str) -> Found:
    """A serial number, in hexadecimal digits as openssl and 'ina keys show' print it, with colons or without; whether or not
    anybody knows whose it is. Raises ``ValueError`` if it is none.
    """
    authority = certificate_in(directory / CERTIFICATE)
    digits = plain(_digits(number))
    if digits == serial(authority):
        raise ValueError(f"{number} is the authority itself: instead, make another with 'ina keys init'")
    known = {serial(one): next(iter(_nodes(one)), UNKNOWN) for _, one in _kept(directory)}
    name = (known | _listed(directory / ISSUED)).get(digits, UNKNOWN)
    return Found(name, (digits,))


def by_fingerprint(directory: Path, wanted: str) -> Found:
    """A SHA-256 fingerprint of a certificate that is on the list of those issued, or in a file beside it.

    Raises ``ValueError`` if it is none, and :class:`~inanet.trust.authority.AuthorityError` if nothing there has it: what
    is revoked is a serial number (:mod:`inanet.trust.revocation_list` says why).
    """
    certificate_in(directory / CERTIFICATE)
    digits = _digits(wanted)
    if len(digits) != 64:
        raise ValueError(f"{wanted!r} has {len(digits)} hexadecimal digits, a SHA-256 fingerprint has 64")
    for _, certificate in _kept(directory):
        if fingerprint(certificate) == digits:
            return by_serial(directory, serial(certificate))
    for line in _lines(directory / ISSUED):
        if line.endswith(f"sha256 {digits}"):
            return by_serial(directory, line.split()[0])
    raise AuthorityError(
        f"nothing in {directory} has this fingerprint: give --certificate FILE or --serial HEX"
    )


def revoke(directory: Path, found: Found) -> int:
    """Put serial numbers on the list, and remove files that are of no use any more, so that others can be issued. Returns how
    many are new: 0 if all were there already. Raises :class:`~inanet.trust.authority.AuthorityError` if the list is none.
    """
    known = _listed(directory / REVOKED)
    fresh = [number for number in found.serials if number not in known]
    for number in fresh:
        note(directory / REVOKED, number, found.name)
    for file, certificate in list(_kept(directory)):
        if serial(certificate) in found.serials:
            file.unlink(missing_ok=True)
    return len(fresh)


def _digits(text: str) -> str:
    found = text.replace(":", "").removeprefix("0x").upper()
    if not re.fullmatch("[0-9A-F]+", found):
        raise ValueError(f"{text!r} is no number in hexadecimal digits")
    return found


def _nodes(certificate: x509.Certificate) -> tuple[str, ...]:
    return tuple(name.removeprefix(NODE) for name in names(certificate) if name.startswith(NODE))


def _kept(directory: Path) -> Iterator[tuple[Path, x509.Certificate]]:
    """Certificates of nodes whose files are still in the directory."""
    for file in sorted(directory.glob("*.pem")):
        if file.name != CERTIFICATE:
            # whatever else somebody keeps there
            with suppress(AuthorityError):
                yield file, certificate_in(file)


def _listed(file: Path) -> dict[str, str]:
    try:
        return parse("\n".join(_lines(file)))
    except ValueError as error:
        raise AuthorityError(f"{file}: {error}") from None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
