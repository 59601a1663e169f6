"""Run a command that the kernel ends when its parent ends. A script: ``python -I -S launch.py PARENT
COMMAND...``

It asks for SIGTERM on the parent's death and then becomes the command, so the command needs to know nothing
of it and shows up under its own name. Done in a program rather than between fork and exec, where a parent
with threads must not run Python. The kernel means the *thread* that started the child: start children from
a thread that lives as long as they may.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """``PARENT`` is the process id of the parent, ``COMMAND`` an absolute path and its arguments."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        # the parent ended before the request was made: nobody would ever end this process
        sys.exit(f"the process that started {sys.argv[2]} has ended")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
