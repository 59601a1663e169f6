"""Signals that ask this process to end, noticed where it is safe to act on them."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

#: Ctrl-C, a service manager's or a user's kill, a closed terminal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The user wants this to end. Not an ``Exception``, as with ``KeyboardInterrupt``: it is nobody's
    error."""


class Interrupts:
    """Takes the signals while its ``with`` block lasts; :meth:`check` raises once one has come.

    A handler that raised would strike between starting a process and noting it down, or in the middle of the
    clean-up. Repeated signals change nothing: the clean-up is on its way and has deadlines of its own.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def check(self) -> None:
        """Raise :class:`Interrupted` if one of the signals has come."""
        if self.received is not None:
            raise Interrupted(signal.Signals(self.received).name)
