"""Taking a lab down, whatever is left of it. Standard library only, also a script.

``python -I -S remains.py DIRECTORY NAMESPACE...`` waits for the end of its standard input, whose other end
the owner of a lab holds, and so for the owner's orderly end or its death, even of SIGKILL. Then it takes the
lab down: after an orderly end nothing is left to do.

The links of a lab begin and end in its namespaces, and a namespace ends with its name and its last process:
so ending the processes inside and removing the names removes everything.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

#: Where named network namespaces are, for iproute2 as well.
DIRECTORY = Path("/run/netns")
#: Seconds between SIGTERM and SIGKILL.
GRACE = 5.0

_MNT_DETACH = 2


def identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """What tells one namespace from another; ``None`` if there is nothing or we may not look."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def inhabitants(namespaces: Collection[str]) -> list[int]:
    """Process ids in the namespaces named, other than this process's own."""
    wanted = {identity(DIRECTORY / name) for name in namespaces} - {None}
    numbers = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if wanted else []
    return [
        number for number in numbers if number != os.getpid() and identity(f"/proc/{number}/ns/net") in wanted
    ]


def end(namespaces: Collection[str], grace: float = GRACE) -> None:
    """End every process in the namespaces: SIGTERM, then SIGKILL after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    asked: dict[int, int] = {}
    try:
        # again and again: a process may have started others since the last look
        while numbers := inhabitants(namespaces):
            late = time.monotonic() >= deadline
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    if number not in asked:
                        asked[number] = os.pidfd_open(number)
                        signal.pidfd_send_signal(asked[number], signal.SIGTERM)
                    if late:
                        signal.pidfd_send_signal(asked[number], signal.SIGKILL)
            # zombies have left their namespaces already, so nobody waits for a parent that does not
            poll = select.poll()
            for number in numbers:
                if number in asked:
                    poll.register(asked[number], select.POLLIN)
            poll.poll(100)
    finally:
        for handle in asked.values():
            os.close(handle)


def remove(namespaces: Collection[str]) -> None:
    """Remove the names; those that are not there, or half there, are fine too. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in namespaces:
        path = DIRECTORY / name
        # a name whose mount never came to be is an ordinary file, and the call fails
        while libc.umount2(os.fsencode(path), _MNT_DETACH) == 0:
            pass
        path.unlink(missing_ok=True)


def dismantle(namespaces: Collection[str], grace: float = GRACE) -> None:
    """End what runs in the namespaces and remove them. Raises ``OSError``."""
    end(namespaces, grace)
    remove(namespaces)


def main() -> None:
    """Wait for the owner's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    dismantle(sys.argv[2:])
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
