"""Certificates that are no longer good: a list that ``ina keys revoke`` writes and that all who check certificates re-read.

One line for each, ``SERIAL NAME``, the serial number in hexadecimal digits; ``#`` begins a remark. Serial numbers and not
fingerprints: a signature by an elliptic curve can be written in two ways, so whoever has a certificate can make another of
it, with the same number and another fingerprint. The list is no secret and needs no signature: who can write where a node's
list is can replace its authority's certificate as well.
"""

import os
import re
from pathlib import Path
from typing import Any

_LINE = re.compile(r"([0-9A-Fa-f]+)(?:\s+(\S+))?")


def parse(text: str) -> dict[str, str]:
    """Names by serial number (upper case, no leading zeros). Raises ``ValueError`` with the first line that is none."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ValueError(
                f"line {number} is {line.strip()!r}; allowed: SERIAL NAME, as 'ina keys revoke' writes"
            )
        found[plain(match[1])] = match[2] or "?"
    return found


def plain(serial: str) -> str:
    """A serial number as it is compared: :mod:`ssl` writes leading zeros, others do not."""
    return serial.upper().lstrip("0") or "0"


def _log() -> Any:
    """Not imported above: configurations are read by programs that log nothing."""
    import structlog

    return structlog.get_logger("inanet.revocation")


class Revocations:
    """The list in a file, read again whenever that has changed. Raises ``OSError`` and ``ValueError`` if it cannot be
    read at first; later, what was known before stands, and the log says so.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen = self._mark()
        #: the state of the file that was complained of last
        self._told: tuple[int, ...] = ()
        self._names = parse(self._path.read_text("utf-8"))

    def _mark(self) -> tuple[int, ...]:
        found = os.stat(self._path)
        # the change time as well: whose file it is, and who may read it, is no modification
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def holds(self, serial: str) -> bool:
        """Whether the certificate with this serial number has been revoked, as of now. One stat(2) if nothing changed; what
        could not be read is tried again every time.
        """
        try:
            mark = self._mark()
            if mark != self._seen:
                names = parse(self._path.read_text("utf-8"))
                for known in names.keys() - self._names.keys():
                    _log().info("certificate revoked", node=names[known], serial=known)
                self._seen, self._names = mark, names
        except (OSError, ValueError) as error:
            self._complain(str(error))
        return plain(serial) in self._names

    def _complain(self, why: str) -> None:
        """Once for each state of the file: a list that is gone for an hour is no reason for a thousand lines."""
        try:
            mark = self._mark()
        except OSError:
            mark = (0,)
        if mark != self._told:
            self._told = mark
            _log().error("list of revoked certificates cannot be read, the last one stands", reason=why)
