"""Decorator that puts a link of a rate between a device and its network, where no queueing discipline can be had.

Packets leave one after the other, each taking its bytes over the rate, and arrive so. Both directions have a queue; what
does not fit is lost and counted, as at a port. Nothing is ever refused to the sender: a host that needs to be held back by
its own link uses :class:`~inanet.phy.pacing.Pacer`.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from inanet.phy.device import Device, check_transmission
from inanet.phy.gather import join, select
from inanet.phy.pacing import OVERHEAD
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import PacketBatch, Transmission

#: bytes that either direction's queue holds
QUEUE = 64 << 20


class _Lane:
    """When packets have passed a link of ``rate`` bits per second, in order."""

    def __init__(self, rate: float, queue: int, overhead: int) -> None:
        self._seconds_per_byte = 8 / rate
        self._queue = queue
        self._overhead = overhead
        self._free = float("-inf")

    def admit(self, lengths: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Times at which packets of these lengths are through, for as many from the first on as there is room for."""
        wire = np.cumsum(lengths + self._overhead)
        begin = max(now, self._free)
        backlog = (begin - now) / self._seconds_per_byte
        room = int(np.searchsorted(backlog + wire, self._queue, side="right"))
        times = np.asarray(begin + wire[:room] * self._seconds_per_byte, np.float64)
        if room:
            self._free = float(times[-1])
        return times


class AccessLink(Wrapper):
    """``rate`` bits per second each way, ``queue`` bytes each way, ``overhead`` bytes of headers per packet; ``clock`` gives
    seconds. Raises ``ValueError`` for a rate or queue that is not positive.
    """

    def __init__(
        self,
        device: Device,
        rate: float,
        clock: Callable[[], float],
        *,
        queue: int = QUEUE,
        overhead: int = OVERHEAD,
    ) -> None:
        super().__init__(device)
        if rate <= 0 or queue <= 0:
            raise ValueError(f"a link has a rate and a queue, not {rate} bit/s and {queue} B")
        self._clock = clock
        self._in, self._out = _Lane(rate, queue, overhead), _Lane(rate, queue, overhead)
        self._arriving: deque[tuple[NDArray[np.float64], PacketBatch]] = deque()
        self._leaving: deque[tuple[NDArray[np.float64], Transmission]] = deque()
        self._lost = {"access_lost_in": 0, "access_lost_out": 0}

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Queue copies of all packets. Raises ``OSError`` and ``ValueError`` as the wrapped device does."""
        check_transmission(transmission)
        now = self._clock()
        offsets = transmission.offsets[start:]
        if not len(offsets):
            return 0
        times = self._out.admit(np.full(len(offsets), transmission.length, np.int64), now)
        self._lost["access_lost_out"] += len(offsets) - len(times)
        if len(times):
            windows = np.lib.stride_tricks.sliding_window_view(transmission.arena, transmission.length)
            rows = windows[offsets[: len(times)]].reshape(-1)
            places = np.arange(len(times), dtype=np.int64) * transmission.length
            self._leaving.append(
                (times, Transmission(transmission.destination, rows, places, transmission.length))
            )
        self._emit(now)
        return len(offsets)

    def receive(self) -> PacketBatch | None:
        """What has passed the link by now."""
        now = self._clock()
        self._emit(now)
        while (batch := self._device.receive()) is not None:
            self._take(batch, now)
        return self._due(now)

    def flush(self, now: float) -> PacketBatch | None:
        """What has passed, and what the wrapped device releases, once it has."""
        self._emit(now)
        held = self._device.flush(now)
        if held is not None:
            self._take(held, now)
        return self._due(now)

    def _take(self, batch: PacketBatch, now: float) -> None:
        times = self._in.admit(batch.lengths, now)
        self._lost["access_lost_in"] += len(batch) - len(times)
        if len(times):
            kept = select(batch, np.arange(len(times)))
            self._arriving.append((times, join([kept])))

    def _due(self, now: float) -> PacketBatch | None:
        parts = []
        while self._arriving:
            times, batch = self._arriving[0]
            through = int(np.searchsorted(times, now, side="right"))
            if not through:
                break
            parts.append(select(batch, np.arange(through)))
            if through < len(times):
                left = select(batch, np.arange(through, len(times)))
                self._arriving[0] = times[through:], left
                break
            self._arriving.popleft()
        return join(parts) if parts else None

    def _emit(self, now: float) -> None:
        while self._leaving:
            times, transmission = self._leaving[0]
            through = int(np.searchsorted(times, now, side="right"))
            if not through:
                return
            part = Transmission(
                transmission.destination,
                transmission.arena,
                transmission.offsets[:through],
                transmission.length,
            )
            taken = self._device.send(part)
            if taken < len(times):
                transmission.offsets = transmission.offsets[taken:]
                self._leaving[0] = times[taken:], transmission
                return
            self._leaving.popleft()

    def timer(self) -> float | None:
        """When the next packet is through."""
        times = [float(lane[0][0][0]) for lane in (self._arriving, self._leaving) if lane]
        inner = self._device.timer()
        return min([*times, *([] if inner is None else [inner])], default=None)

    def counters(self) -> dict[str, int]:
        """The device's, and the packets lost at full queues."""
        return {**self._device.counters(), **self._lost}

    def close(self) -> None:
        """Close the device; what is on the link is gone."""
        self._arriving.clear()
        self._leaving.clear()
        self._device.close()
