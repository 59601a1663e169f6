"""One child process: started so that it cannot outlive its parent, ended by its own handle, never by name."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

#: Lines of a failed process's log worth showing.
TAIL_LINES = 20

_LAUNCH = Path(__file__).with_name("launch.py")


def script(path: Path, *arguments: str) -> list[str]:
    """Command line that runs a standard-library-only script of this package in an interpreter of its own."""
    return [sys.executable, "-I", "-S", str(path), *arguments]


class Process:
    """A running child with a log file of its own.

    It runs in a process group of its own, so that Ctrl-C on the terminal reaches only the parent, which
    then ends its children in order. ``expected_to_run`` turns false once somebody here asked it to end.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        pipe: bool = False,
    ) -> None:
        """Start ``command`` (absolute path first). Its stderr, and its stdout unless ``pipe``, are appended
        to ``log``."""
        self.name = name
        self.log = log
        self.expected_to_run = True
        with log.open("ab") as sink:
            self._popen = subprocess.Popen(
                script(_LAUNCH, str(os.getpid()), *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else sink,
                stderr=sink,
                env=dict(environment),
                cwd=log.parent,
                process_group=0,
            )
        self._handle = os.pidfd_open(self._popen.pid)

    @property
    def pid(self) -> int:
        """The process id; meaningful while it runs."""
        return self._popen.pid

    @property
    def output(self) -> IO[bytes]:
        """Read end of its standard output, if it was started with ``pipe``."""
        if self._popen.stdout is None:
            raise ValueError(f"{self.name} was started without a pipe")
        return self._popen.stdout

    def poll(self) -> int | None:
        """Its exit status as ``subprocess`` gives it (negative: the signal that ended it), ``None`` while
        it runs."""
        status = self._popen.poll()
        if status is not None and self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        return status

    def _signal(self, number: signal.Signals) -> None:
        self.expected_to_run = False
        self._popen.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end; it may take its time (:meth:`wait`)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would (``kill -9``) and wait until it has."""
        self._signal(signal.SIGKILL)
        self._popen.wait()
        self.poll()

    def wait(self, deadline: float) -> int | None:
        """Exit status, or ``None`` if it still runs at ``deadline`` (``time.monotonic``)."""
        if self.poll() is None:
            ended = select.poll()
            ended.register(self._handle, select.POLLIN)
            ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return self.poll()

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-TAIL_LINES:])

    def release(self) -> None:
        """Close its pipe, if any; the process must have ended."""
        if self._popen.stdout is not None:
            self._popen.stdout.close()


def end_all(processes: Iterable[Process], patience: float) -> list[str]:
    """SIGTERM to all, SIGKILL after ``patience`` seconds to those that still run; returns the names of the
    latter."""
    processes = list(processes)
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + patience
    stubborn = [process for process in running if process.wait(deadline) is None]
    for process in stubborn:
        process.kill()
    for process in processes:
        process.release()
    return [process.name for process in stubborn]
