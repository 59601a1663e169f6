"""A timer of the kernel as a file descriptor: event loops watch it like a socket and learn of it in
microseconds.

Event loops count their own timers in milliseconds, at 1 Gbit/s the time of two super-frames.
"""

import ctypes
import os
import time
from typing import Protocol

_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC


class Timer(Protocol):
    """What a :class:`inanet.phy.pacing.Pacer` needs of a timer."""

    def fileno(self) -> int:
        """Descriptor that is readable from the moment the timer has fired until it is set or cleared."""
        ...

    def set(self, seconds: float) -> None:
        """Fire once, ``seconds`` from now; replaces what was set before."""
        ...

    def clear(self) -> None:
        """Do not fire, and be no longer readable."""
        ...

    def close(self) -> None:
        """Give up the descriptor; closing twice is fine."""
        ...


class _Spec(ctypes.Structure):
    """``struct itimerspec``: interval and first expiry, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


def _bind_libc() -> tuple["ctypes._NamedFuncPointer", "ctypes._NamedFuncPointer"]:
    libc = ctypes.CDLL(None, use_errno=True)
    create, settime = libc.timerfd_create, libc.timerfd_settime
    create.argtypes = [ctypes.c_int, ctypes.c_int]
    settime.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    create.restype = settime.restype = ctypes.c_int
    return create, settime


_create, _settime = _bind_libc()


class TimerFd:
    """``timerfd`` on the monotonic clock. Raises ``OSError`` when the process has no descriptor left."""

    def __init__(self) -> None:
        self._fd = int(_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC))
        if self._fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"making a timer: {os.strerror(code)}")
        self._spec = _Spec()

    def fileno(self) -> int:
        return self._fd

    def set(self, seconds: float) -> None:
        """Fire once, ``seconds`` from now (at once if that is not positive)."""
        # zero would stop the timer
        nanoseconds = max(1, round(seconds * 1e9))
        self._settime(*divmod(nanoseconds, 10**9))

    def clear(self) -> None:
        """Stop; setting a timer also takes back that it has fired, so nothing needs to be read."""
        self._settime(0, 0)

    def _settime(self, seconds: int, nanoseconds: int) -> None:
        self._spec.value_s, self._spec.value_ns = seconds, nanoseconds
        if _settime(self._fd, 0, ctypes.addressof(self._spec), None) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setting a timer: {os.strerror(code)}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
