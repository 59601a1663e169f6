"""The stream to the worker agent: frames out, messages in, every wait with a deadline."""

import os
import select
import socket
import time
from typing import Any

from inanet.messages.session import SessionError, Unpacker

#: seconds in which the agent must take a frame; it never stops reading for long
SEND_SECONDS = 30.0
_READ_BYTES = 1 << 16


class Connection:
    """A Unix stream socket. One thread may send while another receives, but no two may do the same.

    All methods raise ``OSError`` with a sentence when the agent cannot be reached any more.
    """

    def __init__(self, path: os.PathLike[str], seconds: float) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(max(seconds, 1e-3))
            self._socket.connect(os.fspath(path))
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._unpacker = Unpacker()
        #: descriptors that came with messages and that nobody has taken yet
        self._fds: list[int] = []
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)

    def send(self, frame: bytes, fd: int | None = None, seconds: float = SEND_SECONDS) -> None:
        """Send one frame, and a descriptor with it, within ``seconds``.

        After an exception half a frame may have been sent: the connection is of no use then.
        """
        deadline = time.monotonic() + seconds
        fds = [] if fd is None else [fd]
        rest = memoryview(frame)
        while rest:
            try:
                if fds:
                    sent = socket.send_fds(self._socket, [rest], fds, socket.MSG_NOSIGNAL)
                    fds = []
                else:
                    sent = self._socket.send(rest, socket.MSG_NOSIGNAL)
                rest = rest[sent:]
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0 or not self._writable.poll(left * 1000):
                    raise TimeoutError(f"the agent has not read anything for {seconds:g} s") from None

    def receive(self, seconds: float) -> list[dict[str, Any]]:
        """Messages that are here or arrive within ``seconds``; empty if none did, or only a part of one."""
        if seconds > 0 and not self._readable.poll(seconds * 1000):
            return []
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        self._fds += fds
        if not data:
            raise ConnectionError("it closed the connection")
        try:
            return self._unpacker.feed(data)
        except SessionError as error:
            raise ConnectionError(f"it does not speak this version's language: {error}") from None

    def take_fd(self) -> int | None:
        """The descriptor that came with a message, which the caller closes."""
        return self._fds.pop(0) if self._fds else None

    def shut(self) -> None:
        """Wake whoever sends or receives; nothing can be sent or received any more."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # the agent was faster
            return

    def close(self) -> None:
        """Close the socket; nobody may be sending or receiving."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._socket.close()
