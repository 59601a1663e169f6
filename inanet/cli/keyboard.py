"""Single keys of a terminal, without waiting for the end of a line."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Self


class Keyboard:
    """Keys of standard input while the ``with`` block lasts; there are none if it is no terminal. Ctrl-C interrupts as ever."""

    def __init__(self) -> None:
        self._before: list[object] | None = None

    def __enter__(self) -> Self:
        if sys.stdin is not None and sys.stdin.isatty():
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def keys(self, seconds: float) -> Iterator[str]:
        """Each key as it is pressed, until so many seconds are over."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._before is None:
                time.sleep(left)
            elif select.select([sys.stdin], [], [], left)[0]:
                # not by the stream, which would keep keys that select does not see then
                yield from os.read(sys.stdin.fileno(), 64).decode(errors="ignore")
