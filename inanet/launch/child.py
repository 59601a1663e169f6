"""Run a command that the kernel ends when its parent ends, in a network namespace if one is named. Standard library only.

``python -I -S child.py PARENT NAMESPACE COMMAND...`` (``-``: the parent's namespace) asks for SIGTERM on the parent's death,
moves into the network namespace (that alone: ``ip netns exec`` also changes mounts and so hides /sys/fs/bpf), and becomes the
command, which needs to know nothing of it and shows up under its own name. Done in a program rather than between fork and exec,
where a parent with threads must not run Python. The kernel means the *thread* that started the child: start children from a
thread that lives as long as they may.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
#: stands for the parent's own namespace
HERE = "-"


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
    if namespace != HERE:
        enter(namespace)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        # what shells say and return
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
