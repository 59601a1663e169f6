"""A daemon of nothing but the chassis, run as a process by the tests: its node's name tells what it does."""

import asyncio
import os
import sys
import threading
from typing import Any

from daemons._chassis import command
from inanet.service.exits import Failure
from inanet.service.metrics import Sample


async def serve(config: Any, context: Any) -> None:
    """Be ready, then behave as the name says once asked to stop."""
    name = config.node.name
    context.stats = lambda: {"rx_packets": 7, "drops": {"short": 1}}
    context.measure(lambda: [Sample("inanet_packets_dropped", 3, ("short",))])
    context.health = lambda: name != "stuck"
    if name in FAILURES:
        raise FAILURES[name]
    if name == "callback":
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    context.ready("toy", loop=type(asyncio.get_running_loop()).__module__, metrics=context.metrics_port or 0)
    await context.stopping.wait()
    context.status(f"draining, {context.remaining > 0}")
    if name == "endless":
        await asyncio.Event().wait()
    if name == "frozen":
        # the loop never runs again: only the last resort ends this
        threading.Event().wait()


FAILURES: dict[str, Exception] = {
    "failure": Failure("the coordinator at 127.0.0.1:1 does not answer: start ina-ps"),
    "permission": PermissionError(1, os.strerror(1), "raw socket"),
    "missing": ModuleNotFoundError("No module named 'pyroute2'", name="pyroute2"),
    "bug": ZeroDivisionError("division by zero"),
    "system": OSError(98, os.strerror(98), "127.0.0.1:7400"),
}

main = command("agg", serve, "A toy.")

if __name__ == "__main__":
    assert "numba" not in sys.modules
    main()
