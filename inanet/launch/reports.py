"""Training processes beside the daemons of a fabric, which report in lines of JSON."""

import json
import os
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Any

from inanet.launch.fabric import Fabric
from inanet.launch.nodes import GLANCE
from inanet.launch.patience import patient
from inanet.launch.process import Process, python, python_environment
from inanet.service.exits import Failure

#: Seconds without a line from any training process after which the run is given up, if the machine is not busy.
STALL = 60.0


class DemoError(Failure):
    """The demo could not be carried through; the message says which process failed and how its log ends."""


class Processes:
    """Of one fabric. ``check`` is called at least every :data:`~inanet.launch.nodes.GLANCE` seconds and may raise to give up."""

    def __init__(self, fabric: Fabric, check: Callable[[], None]) -> None:
        self.fabric = fabric
        self.check = check
        # One BLAS thread each: the machine's cores are shared by all, and the audit must repeat the workers'
        # arithmetic exactly, which no promise covers across thread counts.
        self.environment = python_environment() | dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
        )

    def spawn(self, name: str, module: str, *arguments: str) -> Process:
        """Start a module with its standard output on a pipe."""
        return self.fabric.spawn(name, python(module, *arguments), self.environment, pipe=True)

    def lines(self, processes: list[Process]) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index of the process, JSON object) for every line they print, until all have ended with status 0.

        Raises :class:`DemoError` when one ends otherwise or none has printed anything for :data:`STALL`
        seconds, and what ``check`` and the fabric raise.
        """
        buffers = [b""] * len(processes)
        heard = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for index, process in enumerate(processes):
                selector.register(process.output, selectors.EVENT_READ, index)
            while selector.get_map():
                self.check()
                self.fabric.require_alive()
                if time.monotonic() > heard + patient(STALL):
                    names = ", ".join(processes[key.data].name for key in selector.get_map().values())
                    raise DemoError(f"no word for {time.monotonic() - heard:.0f} s from {names}")
                for key, _ in selector.select(GLANCE):
                    chunk = os.read(key.fd, 1 << 16)
                    heard = time.monotonic()
                    *complete, buffers[key.data] = (buffers[key.data] + chunk).split(b"\n")
                    for line in complete:
                        yield key.data, json.loads(line)
                    if not chunk:
                        selector.unregister(key.fileobj)
                        _require_success(processes[key.data])


def _require_success(process: Process) -> None:
    """Wait for a process that has closed its output and raise :class:`DemoError` unless it succeeded."""
    status = process.wait(time.monotonic() + patient(STALL))
    process.release()
    if status != 0:
        raise DemoError(f"{process.name} failed with status {status}; its log ends with:\n{process.tail()}")
