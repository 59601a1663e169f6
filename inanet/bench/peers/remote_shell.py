"""What ``mpirun`` calls instead of ssh: run a command on a host of a lab. Standard library only.

``python -I -S remote_shell.py NAMESPACE DIRECTORY HOST COMMAND...``: ``NAMESPACE`` is the network namespace's name
with ``{host}`` in place of the host. Hosts of a lab share one machine, but MPI tells hosts apart by their names and
puts sockets of its own in a temporary directory: so the command also gets a host name (a UTS namespace) and, in
``DIRECTORY``, a temporary directory of its own. ssh joins its arguments and gives them to a shell, and so does this.
"""

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUTS = 0x04000000


def main() -> None:
    """Become the command. Raises ``OSError`` without root or without such a namespace."""
    namespace, directory, host, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace.format(host=host)}", os.O_RDONLY | os.O_CLOEXEC)
    name = host.encode()
    failed = (
        libc.setns(handle, _CLONE_NEWNET) != 0
        or libc.unshare(_CLONE_NEWUTS) != 0
        or libc.sethostname(name, len(name)) != 0
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot move to host {host}: {os.strerror(code)}")
    os.environ["TMPDIR"] = os.path.join(directory, f"tmp-{host}")
    os.makedirs(os.environ["TMPDIR"], exist_ok=True)
    os.execvp("sh", ["sh", "-c", " ".join(command)])


if __name__ == "__main__":
    main()
