"""The last one out: removes a fabric's processes and directory when their owner cannot. A script, standard
library only.

``python -I -S guardian.py DIRECTORY`` reads process ids from standard input, one a line, and waits for its
end. The owner holds the other end of the pipe, so the end comes when the owner closes it or dies, even of
SIGKILL. Then every process that still runs is asked to end, killed if it does not within the grace period,
and the directory is removed. After an orderly stop there is nothing left to do and this takes no time.
"""

import contextlib
import os
import select
import shutil
import signal
import sys
import time

#: Seconds between SIGTERM and SIGKILL.
GRACE = 5.0


def collect() -> list[int]:
    """A pidfd for every process named on standard input; unlike numbers, they cannot come to mean somebody
    else."""
    handles = []
    for line in sys.stdin:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(int(line)))
    return handles


def end(handles: list[int]) -> None:
    """SIGTERM, then SIGKILL after :data:`GRACE`, to those that still run; returns when none does."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
        deadline = None if patience is None else time.monotonic() + patience
        while handles:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended, _, _ = select.select(handles, [], [], left)
            if not ended:
                break
            handles = [handle for handle in handles if handle not in ended]


def main() -> None:
    """Wait for the owner, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end(collect())
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
