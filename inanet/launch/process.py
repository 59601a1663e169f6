"""Child processes: started so that they cannot outlive their parent, ended by their own handle, never by name."""

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from inanet.launch.child import HERE
from inanet.service.addresses import SOCKET_PATH_BYTES

#: Lines of a failed process's log worth showing.
TAIL_LINES = 20
#: Room for the longest file name in a runtime directory.
LONGEST_NAME = 24

_CHILD = Path(__file__).with_name("child.py")


def script(path: Path, *arguments: str) -> list[str]:
    """Command line that runs a standard-library-only script of this package in an interpreter of its own."""
    return [sys.executable, "-I", "-S", str(path), *arguments]


def python(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this installation, whatever is on PATH or in the current
    directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """Environment for :func:`python`: children import the very packages this process imports, installed or
    not."""
    found = importlib.util.find_spec("inanet")
    assert found is not None
    assert found.origin is not None
    home = str(Path(found.origin).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([home, *([inherited] if inherited else [])])}


def runtime_directory(prefix: str = "inanet-demo-") -> Path:
    """A new private directory whose path is short enough for Unix sockets inside it."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) + len(f"/{prefix}12345678/") + LONGEST_NAME > SOCKET_PATH_BYTES:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def watch(guardian: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a guardian: a script that clears up when its standard input ends, be it that this process closes it or dies."""
    return subprocess.Popen(
        script(guardian, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )


def tail(log: Path) -> str:
    """The last :data:`TAIL_LINES` lines of a log; empty if it cannot be read."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-TAIL_LINES:])


def child(
    command: Sequence[str], environment: Mapping[str, str], *, namespace: str = HERE, **options: Any
) -> subprocess.Popen[Any]:
    """``subprocess.Popen`` of a command that ends with the thread that calls this, and to which Ctrl-C on the terminal is not sent.

    ``namespace`` is the path of a network namespace. ``options`` are Popen's; standard input is empty unless given. A command that
    does not exist ends with status 127, as in a shell.
    """
    options = {"stdin": subprocess.DEVNULL, "process_group": 0, **options}
    return subprocess.Popen(
        script(_CHILD, str(os.getpid()), namespace, *command), env=dict(environment), **options
    )


def end(process: subprocess.Popen[Any], grace: float = 10.0, *, ask: bool = True) -> None:
    """Close a process's standard input and, unless it ends by that (``ask`` false), send SIGTERM; SIGKILL after ``grace`` seconds.
    Closes its other pipes."""
    if process.stdin is not None:
        # what was never read goes with a process that has ended
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    if ask and process.poll() is None:
        process.terminate()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


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
        namespace: str = HERE,
    ) -> None:
        """Start ``command`` in a ``namespace``. Its stderr, and its stdout unless ``pipe``, are appended to ``log``."""
        self.name = name
        self.log = log
        self.expected_to_run = True
        with log.open("ab") as sink:
            self._popen = child(
                command,
                environment,
                namespace=namespace,
                stdout=subprocess.PIPE if pipe else sink,
                stderr=sink,
                cwd=log.parent,
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
        return tail(self.log)

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
