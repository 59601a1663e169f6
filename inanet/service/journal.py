"""The journal of systemd as a reader of what this process writes to stderr."""

import os
from collections.abc import Mapping
from typing import TextIO

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
