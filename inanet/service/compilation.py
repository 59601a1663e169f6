"""Hearing that kernels are compiled, which takes minutes the first time, so that nobody takes a start for stuck."""

import time
from collections.abc import Callable
from typing import Any

#: seconds between two reports: more would fill the socket of a service manager that is busy
PACE = 1.0


def listen(tell: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Call ``tell(number)`` when numba begins to compile a function (not when it loads one from the cache), on the thread
    that does: for the first, and then every :data:`PACE` seconds at most. Returns what ends this; call it once or more.
    """
    # imported here because daemons without a data plane need no numba
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        number = 0
        told = float("-inf")

        def on_start(self, event: Any) -> None:
            self.number += 1
            now = clock()
            if now >= self.told + PACE:
                self.told = now
                tell(self.number)

        def on_end(self, event: Any) -> None:
            pass

    listener = Listener()
    event.register("numba:compile", listener)
    listening = [listener]

    def end() -> None:
        while listening:
            event.unregister("numba:compile", listening.pop())

    return end
