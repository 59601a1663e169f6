"""How long to wait for processes on a machine that others use too.

Deadlines are made for processes that have a processor when they want one. Where several want the same, everything takes as
many times longer: a compile of 20 s takes five minutes at a load of 30 on two processors, and nothing is wrong.
"""

import os

#: how many times longer at most: every wait ends
MOST = 16.0


def patient(seconds: float) -> float:
    """``seconds``, times the runnable processes for each processor there is, of the last minute, but :data:`MOST` at most."""
    return seconds * min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), MOST)


#: seconds a daemon may take to start, and to compile its next kernels
START_PATIENCE = 180.0
#: seconds it may take in all while it compiles: minutes on an idle machine
COMPILE_PATIENCE = 600.0


class Start:
    """The wait for daemons that start. Whoever says that it compiles kernels (``EXTEND_TIMEOUT_USEC`` of ``sd_notify``) gets
    :data:`START_PATIENCE` anew, up to :data:`COMPILE_PATIENCE` in all. Times are those of ``time.monotonic``."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._heard = since
        #: how far it is, as it said
        self.compiling = ""

    def is_ready(self, message: bytes, now: float) -> bool:
        """Whether a daemon's message says that it has started; others may extend the wait."""
        lines = message.splitlines()
        if any(line.startswith(b"EXTEND_TIMEOUT_USEC=") for line in lines):
            self._heard = now
            said = next((line[7:] for line in lines if line.startswith(b"STATUS=")), b"compiling kernels")
            self.compiling = said.decode(errors="replace")
        return b"READY=1" in lines

    def overdue(self, now: float) -> str:
        """After how many seconds the wait is over, and what to do, as text; empty while it is not."""
        end = min(self._heard + patient(START_PATIENCE), self._since + patient(COMPILE_PATIENCE))
        if now <= end:
            return ""
        advice = "; kernels were still being compiled; what is done is kept: run it again"
        return f"{end - self._since:.0f} s{advice if self.compiling else ''}"
