"""The Unix socket on which an agent waits for training processes: who may have it, and who may come in."""

import asyncio
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from inanet.agent.session import failed_frame
from inanet.errors import FabricError, InaError, JoinRefused

#: seconds without accepting when not even a descriptor to refuse with is left
_PAUSE_SECONDS = 0.1
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")
#: asm-generic/socket.h, and groups that a process may be in before its kernel does not tell here
_SO_PEERGROUPS = 59
_MOST_GROUPS = 256
_log: Any = structlog.get_logger("inanet.local")


class Listener:
    """Calls ``accepted(connection, pid)`` with a non-blocking socket for every process that may come in.

    Those are processes of this process's own user, of ``users`` and of members of ``groups`` (numeric ids): the kernel
    vouches for them (SO_PEERCRED, SO_PEERGROUPS), whatever the file mode lets in. With neither (None) a mode that lets others write
    lets them in. The others are told why not.
    """

    def __init__(
        self,
        path: Path,
        mode: int,
        users: Collection[int],
        accepted: Callable[[socket.socket, int], None],
        groups: Collection[int] | None = None,
    ) -> None:
        self.path = path
        self._mode = mode
        self._users = {os.geteuid(), *users}
        self._groups = frozenset(groups or ())
        self._by_mode = not users and groups is None and mode & 0o022 != 0
        self._accepted = accepted
        self._socket: socket.socket | None = None
        self._inode = (0, 0)
        #: given up for a moment when no descriptor is left, so that a process can be told
        self._spare: int | None = None

    def open(self) -> None:
        """Listen. Replaces the socket of a dead process.

        Raises ``OSError`` if a live process has it, if the path is something else than a socket, and as
        ``bind`` does; ``PermissionError`` names the directory and what to do.
        """
        try:
            self._open()
        except PermissionError as error:
            advice = (
                f"{error.strerror}: cannot make {self.path.name} there; set local.socket to a path in a directory you may "
                'write to, such as "$XDG_RUNTIME_DIR/inanet/worker.sock"'
            )
            raise PermissionError(error.errno, advice, str(self.path.parent)) from error

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # two agents that find the same stale socket must not replace each other's new one
            fcntl.flock(directory, fcntl.LOCK_EX)
            _remove_stale(self.path)
            self._socket = _listen(self.path, self._mode)
        finally:
            os.close(directory)
        self._inode = _inode(self.path)
        self._spare = _spare()
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and remove the socket, unless another one has taken its place. Idempotent."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        with suppress(FileNotFoundError):
            if _inode(self.path) == self._inode:
                self.path.unlink()
        self._socket.close()
        self._socket = None
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            else:
                _log.warning("cannot accept a training process", reason=error.strerror)
            return
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(credentials)
        if uid in self._users or self._by_mode or self._groups & {gid, *_groups_of(connection)}:
            self._accepted(connection, pid)
            return
        _log.warning("refused a training process", pid=pid, uid=uid)
        text = (
            f"user id {uid} may not use this agent; add it to local.allow_users in its configuration, or to a group of "
            "local.allow_groups"
        )
        _refuse(connection, JoinRefused(text))

    def _turn_away(self) -> None:
        """No descriptor is left. A connection left in the queue would wake this loop for ever, unanswered."""
        assert self._socket is not None
        _log.error("no file descriptors left for training processes")
        if self._spare is not None:
            os.close(self._spare)
        try:
            connection, _ = self._socket.accept()
        except OSError:
            # somebody else took the one that was freed
            self._pause()
        else:
            text = "the worker agent of this host has no file descriptors left; raise its limit (LimitNOFILE)"
            _refuse(connection, FabricError(text))
        self._spare = _spare()

    def _pause(self) -> None:
        listener = self._socket
        assert listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())

        def resume() -> None:
            if self._socket is listener:
                loop.add_reader(listener.fileno(), self._accept)

        loop.call_later(_PAUSE_SECONDS, resume)


def _groups_of(connection: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the process at the other end, as the kernel knows them."""
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(found) // 4}I", found)


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(
                errno.EEXIST, "it exists and is no socket; remove it, or choose another path", str(path)
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            # its queue is full, so somebody listens
            pass
    raise OSError(
        errno.EADDRINUSE, "a running process listens there; give every ina-worker its own socket", str(path)
    )


def _listen(path: Path, mode: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # the file is made with the socket's mode, less the umask: never does it let in more than asked for
        os.fchmod(server.fileno(), mode)
        server.bind(str(path))
        path.chmod(mode)
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _spare() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _refuse(connection: socket.socket, error: InaError) -> None:
    with connection, suppress(OSError):
        connection.send(failed_frame(error))
