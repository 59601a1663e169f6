"""The service manager's notification protocol (sd_notify(3)): datagrams of ``KEY=value`` lines, no library
needed.
"""

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Tells the service manager how this process is doing; does nothing when there is none.

    Errors while sending are swallowed: a service manager that went away is no reason to stop serving.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """``environ`` is where NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are looked up (default: the
        process's).
        """
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        #: ``@`` stands for the NUL byte of an abstract socket
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_interval = _watchdog_interval(environ)

    @property
    def active(self) -> bool:
        """Whether anybody listens."""
        return bool(self._address)

    def send(self, **assignments: str | int) -> None:
        """One datagram with the assignments as lines, in order. Line breaks inside values become spaces."""
        if not self._address:
            return
        lines = (f"{key}={' '.join(str(value).splitlines())}" for key, value in assignments.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return

    def ready(self, status: str, **facts: str | int) -> None:
        """Start-up or a reload is complete. Facts travel as ``X_INANET_NAME=value``; systemd ignores them."""
        named = {f"X_INANET_{name.upper()}": value for name, value in facts.items()}
        self.send(READY=1, STATUS=status, **named)

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self.send(STATUS=text)

    def reloading(self) -> None:
        """A reload begins; :meth:`ready` ends it. ``Type=notify-reload`` insists on the time stamp."""
        self.send(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)

    def stopping(self, seconds: float) -> None:
        """A drain begins that may take ``seconds``."""
        self.send(STOPPING=1, EXTEND_TIMEOUT_USEC=int(seconds * 1e6))

    def starting(self, text: str, seconds: float) -> None:
        """Start-up goes on, with what ``text`` says, and may take ``seconds`` more."""
        self.send(STATUS=text, EXTEND_TIMEOUT_USEC=int(seconds * 1e6))

    def watchdog(self) -> None:
        """Proof of life, to be sent every :attr:`watchdog_interval` seconds."""
        self.send(WATCHDOG=1)


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Seconds between proofs of life: half of what is granted, ``None`` if the watchdog is off or for another
    process.
    """
    try:
        granted = int(environ["WATCHDOG_USEC"])
        meant = int(environ.get("WATCHDOG_PID", os.getpid()))
    except (KeyError, ValueError):
        return None
    return granted / 2e6 if granted > 0 and meant == os.getpid() else None
