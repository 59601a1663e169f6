"""Where lines of a log go. Whatever becomes of their reader, whoever logs goes on: it neither waits nor hears of an error.

A line that cannot be written now (the reader of a pipe does not read, a terminal is stopped) is kept, as long as there is room
for it. One that cannot be written at all (no reader, no space, no file) is counted; once lines get through again, the count is
told with the reason.
"""

import contextlib
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Callable
from typing import TextIO

#: Bytes of lines kept for a reader that is slow.
ROOM = 1 << 18
#: Bytes that a pipe takes at once if it takes any (PIPE_BUF).
_PIECE = 4096


class LogSink:
    """A structlog logger: its methods take a rendered line. ``recovered(lines, reason)`` is called when lines get through again
    after so many did not.
    """

    def __init__(self, stream: TextIO | None, recovered: Callable[[int, str], None]) -> None:
        self._stream = stream
        self._recovered = recovered
        self._fd = -1
        self._socket: socket.socket | None = None
        self._poll: select.poll | None = None
        #: lines that have still to be written, and how much that is
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        #: the first of them was written in part; the one before it was, and will not be completed
        self._begun = self._torn = False
        #: lines that were not written, in all and since one was, and why
        self.unwritten = 0
        self._untold = 0
        self._reason = ""
        if stream is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._fd = stream.fileno()
            mode = os.fstat(self._fd).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = socket.socket(fileno=os.dup(self._fd))
            elif not stat.S_ISREG(mode):
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLOUT)

    def write(self, line: str) -> None:
        """Write a line, or keep or count it."""
        if self._fd < 0:
            self._print(line)
            return
        data = line.encode(errors="backslashreplace") + b"\n"
        if self._waiting + len(data) > ROOM:
            self.fail("its reader does not read")
        else:
            self._lines.append(data)
            self._waiting += len(data)
        self.flush()

    debug = info = warning = error = critical = write

    def flush(self) -> None:
        """Write what has been kept, as far as that is taken now."""
        while self._lines:
            line = self._lines[0]
            try:
                taken = self._put(b"\n" + line if self._torn else line)
            except BlockingIOError:
                return
            except OSError as error:
                self._drop()
                # what follows one that was begun gets a line of its own
                self._torn = self._torn or self._begun
                self._begun = False
                self.fail(error.strerror or str(error))
                continue
            if self._torn and taken:
                self._torn, taken = False, taken - 1
            if taken < len(line):
                self._begun = self._begun or taken > 0
                self._lines[0] = line[taken:]
                self._waiting -= taken
                continue
            self._begun = False
            self._drop()
            if self._untold:
                lines, self._untold = self._untold, 0
                self._recovered(lines, self._reason)

    def close(self) -> None:
        """Close what this has opened; the stream stays. Idempotent."""
        if self._socket is not None:
            self._socket.close()

    def fail(self, reason: str) -> None:
        """A line is not written."""
        self.unwritten += 1
        self._untold += 1
        self._reason = reason

    def _drop(self) -> None:
        line = self._lines.popleft()
        self._waiting -= len(line)

    def _put(self, data: bytes) -> int:
        """Some of it, how much; raises ``BlockingIOError`` if nothing can be written now, another ``OSError`` if it cannot at all."""
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._poll is not None and not self._poll.poll(0):
            raise BlockingIOError
        return os.write(self._fd, data[:_PIECE] if self._poll is not None else data)

    def _print(self, line: str) -> None:
        """To a stream without a descriptor."""
        if self._stream is None:
            self.fail("there is no standard error")
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            self.fail(str(error))
            return
        if self._untold:
            lines, self._untold = self._untold, 0
            self._recovered(lines, self._reason)
