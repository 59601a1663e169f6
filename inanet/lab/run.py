"""A command on every rank of a lab, with its output as it comes."""

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from inanet.lab.fabric import Daemons, Rank, rank_environment, ranks
from inanet.lab.session import Lab
from inanet.launch.nodes import GLANCE

#: Seconds that the other ranks have to end by themselves after one has failed. A rank that waits for a lost
#: one hears of it in less, and then its own message is worth having.
FAILURE_PATIENCE = 15.0
_CHUNK = 1 << 16

#: Shows a line of output: the label of who wrote it, and the line without its end.
Show = Callable[[str, str], None]


def exit_status(returncode: int) -> int:
    """What a shell would report: 128 and the signal's number for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode


def label(rank: Rank) -> str:
    """How output of a rank is marked: its number, and its host."""
    return f"{rank.rank}@{rank.host}"


def run(
    lab: Lab,
    daemons: Daemons | None,
    command: Sequence[str],
    show: Show,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Run ``command`` once per rank, on its host, until all have ended; the greatest exit status of all.

    Output, standard and error alike, goes to ``show`` line by line. After a failure the others have
    :data:`FAILURE_PATIENCE` seconds. ``check`` is called every :data:`inanet.launch.nodes.GLANCE` seconds or
    more often and may raise to give up; processes then end with the lab. Raises
    :class:`inanet.launch.nodes.FabricError` when a daemon ends meanwhile.
    """
    children: dict[str, subprocess.Popen[Any]] = {}
    for rank in ranks(lab.topology):
        environment = daemons.environment(rank) if daemons else rank_environment(lab, rank)
        children[label(rank)] = lab.spawn(
            rank.host, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    with selectors.DefaultSelector() as selector:
        for name, child in children.items():
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            selector.register(child.stdout, selectors.EVENT_READ, _Lines(name, child.stdout, show))
        _attend(children, selector, daemons, check)
    return max((exit_status(child.returncode) for child in children.values()), default=0)


def _attend(
    children: dict[str, subprocess.Popen[Any]],
    selector: selectors.BaseSelector,
    daemons: Daemons | None,
    check: Callable[[], None],
) -> None:
    """Pass output on until all children have ended."""
    deadline: float | None = None
    while any(child.poll() is None for child in children.values()):
        check()
        _read(selector, GLANCE)
        if daemons is not None:
            daemons.require_alive()
        if deadline is None and any(child.poll() for child in children.values()):
            deadline = time.monotonic() + FAILURE_PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            for child in children.values():
                if child.poll() is None:
                    child.terminate()
            deadline = time.monotonic() + FAILURE_PATIENCE
    # what they wrote last; a grandchild that keeps the pipe open is not waited for
    while _read(selector, 0):
        pass
    for key in selector.get_map().values():
        key.data.finish()


def _read(selector: selectors.BaseSelector, patience: float) -> bool:
    """Take what there is to read; whether there was anything."""
    if not selector.get_map():
        time.sleep(patience)
        return False
    ready = selector.select(patience)
    for key, _ in ready:
        if not key.data.read():
            selector.unregister(key.fileobj)
    return bool(ready)


class _Lines:
    """Cuts the output of a process into lines."""

    def __init__(self, name: str, stream: IO[bytes], show: Show) -> None:
        self._name = name
        self._stream = stream
        self._show = show
        self._rest = b""

    def read(self) -> bool:
        """Show the lines that have arrived; false at the end of the output."""
        try:
            chunk = os.read(self._stream.fileno(), _CHUNK)
        except BlockingIOError:
            return True
        if not chunk:
            self.finish()
            return False
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._show(self._name, line.decode(errors="replace"))
        return True

    def finish(self) -> None:
        """Show a last line without an end."""
        if self._rest:
            self._show(self._name, self._rest.decode(errors="replace"))
        self._rest = b""
