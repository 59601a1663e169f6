"""Run a command in a network namespace, ended by the kernel when its parent ends. Standard library only.

``python -I -S enter.py PARENT NAMESPACE COMMAND...`` asks for SIGTERM on the death of the parent, moves into
the network namespace (that alone: ``ip netns exec`` also changes mounts and so hides /sys/fs/bpf), and becomes
the command. Done in a program rather than between fork and exec, where a parent with threads must not run
Python. The kernel means the *thread* that started the child: start children from one that lives as long.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def enter(namespace: str | os.PathLike[str]) -> None:
    """Move the calling thread into the network namespace at this path. Raises ``OSError``."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(namespace))
    finally:
        os.close(handle)


def main() -> None:
    """``PARENT`` is the parent's process id, ``NAMESPACE`` a path; the command is looked up in PATH."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    parent, namespace, *command = sys.argv[1:]
    if os.getppid() != int(parent):
        # the parent ended before the request was made: nobody would ever end this process
        sys.exit(f"the process that started {command[0]} has ended")
    enter(namespace)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # what shells say and return
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
