"""Entering a network namespace.

Only the network namespace is entered. ``ip netns exec`` also mounts a fresh ``/sys``, which hides ``/sys/fs/bpf``.
"""

import ctypes
import os
from pathlib import Path

DIRECTORY = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
# os.setns exists since Python 3.12 only
_libc = ctypes.CDLL(None, use_errno=True)


def enter(name: str) -> None:
    """Move the calling thread into a named namespace: sockets it opens from now on belong there.

    Raises ``OSError`` naming the namespace: it does not exist, or the caller lacks CAP_SYS_ADMIN.
    """
    path = DIRECTORY / name
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(handle, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"entering the network namespace: {os.strerror(code)}", str(path))
    finally:
        os.close(handle)


def mounted(name: str) -> bool:
    """Whether the name really leads to a namespace; a crash between two steps of its creation leaves a plain file."""
    try:
        return (DIRECTORY / name).stat().st_dev == Path("/proc/self/ns/net").stat().st_dev
    except FileNotFoundError:
        return False


def named(prefix: str) -> list[str]:
    """Names in use that start with ``prefix``, sorted; half-made ones included."""
    if not DIRECTORY.is_dir():
        return []
    return sorted(entry.name for entry in DIRECTORY.iterdir() if entry.name.startswith(prefix))
