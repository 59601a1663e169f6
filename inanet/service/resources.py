"""What a machine has, and what of it is idle: cores, memory, and the interface that carries the data plane."""

import time
from collections.abc import Callable

import psutil

from inanet.messages.registration import Report
from inanet.service.addresses import is_loopback, owners

#: Bits per second in the unit in which the kernel gives an interface's speed.
_MBPS = 10**6
#: What the kernel says of interfaces without a speed of their own, as virtual ones.
_UNKNOWN_SPEEDS = frozenset({0, 65535})


class HostResources:
    """The machine this runs on, as far as it may be used: ``address`` is that of the data plane, ``rate`` what a
    configuration says of its link, bits per second.
    """

    def __init__(
        self, address: str = "", rate: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        affinity = len(psutil.Process().cpu_affinity() or ())
        self.cores = affinity or psutil.cpu_count() or 1
        self.memory = int(psutil.virtual_memory().total)
        self.interface = _interface(address)
        self.link_bps = rate or _speed(self.interface)
        self._clock = clock
        # the first call of psutil compares with nothing
        psutil.cpu_percent()
        self._carried = self._bytes()
        self._at = clock()

    def report(self) -> Report:
        """What is idle now; rates are those since the last call."""
        now = self._clock()
        sent, received = self._bytes()
        seconds = max(now - self._at, 1e-3)
        before, self._carried, self._at = self._carried, (sent, received), now
        busy = min(100.0, max(0.0, psutil.cpu_percent())) / 100
        memory = psutil.virtual_memory()
        return Report(
            idle_cores=round(self.cores * (1 - busy), 2),
            memory_used=max(0, int(memory.total - memory.available)),
            send_bps=max(0, int((sent - before[0]) * 8 / seconds)),
            receive_bps=max(0, int((received - before[1]) * 8 / seconds)),
        )

    def _bytes(self) -> tuple[int, int]:
        counters = psutil.net_io_counters(pernic=True, nowrap=False).get(self.interface)
        return (counters.bytes_sent, counters.bytes_recv) if counters else (0, 0)


def _interface(address: str) -> str:
    """The interface that has an address; empty if none has."""
    if not address or is_loopback(address):
        return ""
    return owners().get(address, "")


def _speed(interface: str) -> int:
    """Bits per second of an interface; 0 if the kernel does not know."""
    found = psutil.net_if_stats().get(interface) if interface else None
    return 0 if found is None or found.speed in _UNKNOWN_SPEEDS else found.speed * _MBPS
