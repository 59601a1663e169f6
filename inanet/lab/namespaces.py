"""Network namespaces with names, as ``ip netns`` has them, made so that a kill at any point leaves nothing
that :mod:`inanet.lab.remains` cannot remove.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from inanet.lab import remains
from inanet.lab.layout import PREFIX
from inanet.launch.child import enter
from inanet.service.exits import Exit, Failure

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MS_REC = 16384
_MS_SHARED = 1 << 20


class Unprivileged(Failure):
    """This process may not make network namespaces; the message says what to do instead."""

    code = Exit.PERMISSION


def path(name: str) -> Path:
    """Where the namespace ``name`` is."""
    return remains.DIRECTORY / name


def labs() -> dict[str, list[str]]:
    """Names of all labs' namespaces, whole or half built, by lab."""
    found: dict[str, list[str]] = {}
    try:
        names = sorted(os.listdir(remains.DIRECTORY))
    except FileNotFoundError:
        return found
    for name in names:
        prefix, _, rest = name.partition(".")
        lab, dot, _ = rest.partition(".")
        if prefix == PREFIX and dot:
            found.setdefault(lab, []).append(name)
    return found


def exists(name: str) -> bool:
    """Whether this is a namespace and not a file that an interrupted run left for one."""
    here, own = remains.identity(path(name)), remains.identity("/proc/self/ns/net")
    return here is not None and own is not None and here[0] == own[0]


def create(name: str) -> None:
    """Make a namespace, unless there is one of this name. Raises ``OSError``."""
    if exists(name):
        return
    _prepare()
    remains.remove([name])
    # The thread, not the process, moves into the new namespace, and the name keeps it when the thread ends.
    # Nothing is forked that could go on after this process was killed.
    in_thread(lambda: _make(path(name)))


def inside(name: str, work: Callable[[], T]) -> T:
    """Call ``work`` in a thread that has moved into the namespace; sockets it opens stay there."""

    def body() -> T:
        enter(path(name))
        return work()

    return in_thread(body)


def require_privileges() -> None:
    """Raise :class:`Unprivileged` unless this process may make network namespaces."""
    try:
        in_thread(lambda: _call("unshare", _CLONE_NEWNET))
    except OSError as error:
        raise Unprivileged(
            f"a lab is made of network namespaces, and making one was refused ({error.strerror}): run it as "
            "root ('sudo ina lab ...'; a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN). Without root, "
            "'ina demo' runs the same daemons over 127.0.0.1"
        ) from None


def in_thread(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread of its own and return or raise what it does."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="lab-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _make(place: Path) -> None:
    os.close(os.open(place, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
    _call("unshare", _CLONE_NEWNET)
    _call("mount", b"/proc/thread-self/ns/net", os.fsencode(place), b"none", _MS_BIND, None)


def _prepare() -> None:
    """Have the directory as iproute2 makes it: a mount of its own that other mount namespaces see."""
    place = os.fsencode(remains.DIRECTORY)
    os.makedirs(place, mode=0o755, exist_ok=True)
    try:
        _call("mount", b"", place, b"none", _MS_SHARED | _MS_REC, None)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _call("mount", place, place, b"none", _MS_BIND | _MS_REC, None)
        _call("mount", b"", place, b"none", _MS_SHARED | _MS_REC, None)


def _call(name: str, *arguments: object) -> None:
    """A function of libc that sets errno. Raises ``OSError`` naming it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
