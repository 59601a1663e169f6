"""What a port could not send at once: copied, bounded, sent in order when there is room."""

from collections import deque
from typing import Protocol, Self

import numpy as np

from inanet.phy.device import Device
from inanet.phy.gather import copy_packets
from inanet.wire.batch import Transmission

#: bytes a port holds for a receiver that does not keep up
BUFFER = 8 << 20


class Sendable(Protocol):
    """Packets or frames that know where they go."""

    def __len__(self) -> int: ...

    def send(self, start: int) -> int:
        """Send number ``start`` and following; returns how many were taken."""
        ...

    def rest(self, start: int) -> tuple[Self, int]:
        """A copy of number ``start`` and following, which outlives the arena they lie in, and its bytes."""
        ...


class Outbox:
    """Sends, and keeps what was not taken up to ``buffer`` bytes; beyond that it is lost, the newest first."""

    def __init__(self, buffer: int = BUFFER) -> None:
        self._buffer = buffer
        self._waiting: deque[tuple[Sendable, int, int]] = deque()
        self._held = 0

    @property
    def blocked(self) -> bool:
        """Whether something waits until the port is writable."""
        return bool(self._waiting)

    def send(self, item: Sendable) -> int:
        """Send or keep all of ``item``; returns how many were lost."""
        taken = 0 if self._waiting else item.send(0)
        if taken == len(item):
            return 0
        if self._held >= self._buffer:
            return len(item) - taken
        rest, size = item.rest(taken)
        self._waiting.append((rest, 0, size))
        self._held += size
        return 0

    def resume(self) -> None:
        """Send what waits, as far as it is taken."""
        while self._waiting:
            item, start, size = self._waiting[0]
            start += item.send(start)
            if start < len(item):
                self._waiting[0] = (item, start, size)
                return
            self._waiting.popleft()
            self._held -= size


class Packets:
    """A transmission through a device."""

    def __init__(self, device: Device, transmission: Transmission) -> None:
        self._device = device
        self._transmission = transmission

    def __len__(self) -> int:
        return len(self._transmission)

    def send(self, start: int) -> int:
        """See :class:`Sendable`."""
        return self._device.send(self._transmission, start)

    def rest(self, start: int) -> tuple["Packets", int]:
        """See :class:`Sendable`."""
        old = self._transmission
        count, length = len(old) - start, old.length
        arena = np.empty(count * length, np.uint8)
        places = np.arange(count, dtype=np.int64) * length
        copy_packets(old.arena, old.offsets[start:], np.full(count, length, np.int64), arena, places)
        return Packets(self._device, Transmission(old.destination, arena, places, length)), count * length
