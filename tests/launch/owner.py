"""A program that owns a fabric of stand-ins and waits to be ended. A script: ``owner.py [BEHAVIOUR]``.

With a behaviour it runs the ``ina demo`` command on such stand-ins instead. Prints one JSON object when it
waits: the fabric's directory and the process ids of its children and of the guardian.
"""

import functools
import json
import signal
import sys
import tempfile
from pathlib import Path

from inanet.demo import cli, run
from inanet.launch.fabric import Fabric

STANDIN = Path(__file__).with_name("standin.py")


def command(behaviour, node, config):
    return [
        sys.executable,
        "-I",
        "-S",
        str(STANDIN),
        str(config),
        *([behaviour] if node.role == "agg" else []),
    ]


def announce(fabric):
    pids = [process.pid for process in fabric.processes.values()] + [fabric._guardian.pid]
    print(json.dumps({"directory": str(fabric.directory), "pids": pids}), flush=True)


def own():
    with Fabric(2, 1, command=functools.partial(command, "")) as fabric:
        announce(fabric)
        signal.pause()


class Announcing(Fabric):
    """Announces once every process has been started, while some are not ready yet."""

    def __init__(self, *arguments, check, **options):
        def announce_once():
            if len(self.processes) == len(self.nodes) and not self.announced:
                self.announced = True
                announce(self)
            check()

        self.announced = False
        super().__init__(*arguments, check=announce_once, **options)


if __name__ == "__main__":
    tempfile.tempdir = sys.argv[1]
    if len(sys.argv) > 2:
        run.Fabric = functools.partial(Announcing, command=functools.partial(command, sys.argv[2]))
        cli.demo(["--workers", "2", *sys.argv[3:]])
    else:
        own()
