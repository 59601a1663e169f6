"""The journal of systemd as a reader of what this process says."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from structlog.typing import EventDict

#: sd-daemon(3) priorities by level.
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def is_journal(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether the journal reads ``stream``: JOURNAL_STREAM names its device and inode.

    The variable alone proves nothing: it is inherited by processes whose stderr has been redirected since.
    """
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    if stream is None:
        return False
    try:
        status = os.fstat(stream.fileno())
        return (int(device), int(inode)) == (status.st_dev, status.st_ino)
    except (OSError, ValueError):
        return False


def prioritised(text: str, level: str) -> str:
    """The text with a priority before each of its lines: the journal takes every line as an entry of its own."""
    return "\n".join(f"<{PRIORITIES[level]}>{line}" for line in text.splitlines())


#: Where journald takes entries with fields (systemd's journal native protocol).
SOCKET = "/run/systemd/journal/socket"
#: Keys that the unit already says, or that have a field of their own.
_KNOWN = frozenset({"level", "event", "role", "node", "reason", "exception"})


class JournalEntries:
    """structlog's last processor where the journal reads: each event is an entry with its keys as fields (``journalctl JOB=train``) and
    a MESSAGE for people. What the journal does not take so is left to the processor after this one.
    """

    def __init__(self, address: str = SOCKET, identifier: str = "") -> None:
        self._address = address
        self._identifier = identifier or Path(sys.argv[0]).name

    def __call__(self, logger: Any, method: str, event: "EventDict") -> "EventDict":
        """structlog's processor interface."""
        from structlog import DropEvent

        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto(encode_entry(event, self._identifier), self._address)
        except OSError:
            return event
        raise DropEvent


def encode_entry(event: Mapping[str, Any], identifier: str) -> bytes:
    """An event in the journal's native protocol: ``KEY=value`` lines, or the key, the length in 8 bytes (little-endian) and the
    value where that has several lines.
    """
    fields = {
        "MESSAGE": message(event),
        "PRIORITY": PRIORITIES.get(str(event.get("level")), 6),
        "SYSLOG_IDENTIFIER": identifier,
        **{_field(key): value for key, value in event.items() if key != "level"},
    }
    parts = []
    for name, value in fields.items():
        data = str(value).encode(errors="backslashreplace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)


def message(event: Mapping[str, Any]) -> str:
    """An event for people: what happened, why, and in parentheses to whom and what else."""
    text = str(event.get("event", ""))
    if event.get("reason"):
        text = f"{text}: {event['reason']}"
    facts = ", ".join(f"{key} {value}" for key, value in event.items() if key not in _KNOWN)
    if facts:
        text = f"{text} ({facts})"
    return f"{text}\n{event['exception']}" if event.get("exception") else text


def _field(key: str) -> str:
    """A key as the name of a field: capitals, digits and underscores, 64 at most, the first a letter."""
    name = re.sub(r"[^A-Z0-9_]", "_", key.upper()).lstrip("_0123456789")
    return name[:64] or "FIELD"
