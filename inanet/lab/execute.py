"""Become a command inside a network namespace. A script: ``python -I -S execute.py PARENT NAMESPACE COMMAND...``

``NAMESPACE`` is a path, or ``-`` to stay. The command is killed when its parent ends, so nothing outlives a killed
``ina lab run``. Its own program rather than code between fork and exec, which must not be Python in a parent that may
have threads; only the standard library, so that it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def main() -> None:
    """``PARENT`` is the starter's process id; ``COMMAND`` is looked up in ``PATH``."""
    parent, namespace, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(parent):
        # it ended before the request was made: nobody would ever end this process
        sys.exit(f"the process that started {command[0]} has ended")
    if namespace != "-":
        handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            sys.exit(f"cannot enter {namespace}: {os.strerror(code)}")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
