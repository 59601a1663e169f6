"""Egress queues: how full a port would be at its rate, what that marks and what it drops.

The queue is virtual: it counts the bytes that would stand in it and holds nothing back. What is admitted leaves at
once, so that the rate of a port bounds its throughput while delay stays that of the network around the switch.

A port that cannot send at once keeps what is left in an :class:`Outbox`: copied, bounded, sent in order when there is room.
"""

from collections import deque
from typing import Protocol

import numpy as np

from inanet.kernels.jit import njit
from inanet.phy.device import Device
from inanet.phy.gather import copy_packets
from inanet.wire.batch import I64, U8, Transmission

#: what becomes of a frame
PASSED, MARKED, LOST = 0, 1, 2


@njit(
    "float64(int64[::1], float64, float64, float64, uint8[::1], int64[::1])",
    cache=True,
    nogil=True,
    _nrt=False,
)
def admit_each(sizes: I64, backlog: float, depth: float, ecn: float, fate: U8, counts: I64) -> float:
    """Queue frames of ``sizes`` bytes one behind the other; returns the backlog behind them.

    ``fate[i]`` becomes :data:`PASSED`, :data:`MARKED` (at least ``ecn`` bytes stand before it) or :data:`LOST`
    (it does not fit into ``depth``); ``counts`` (3) is increased by fate. An empty queue takes a frame of any size.
    """
    for i in range(len(sizes)):
        if backlog + sizes[i] > depth and backlog > 0:
            fate[i] = LOST
        else:
            fate[i] = MARKED if backlog >= ecn else PASSED
            backlog += sizes[i]
        counts[fate[i]] += 1
    return backlog


class EgressQueue:
    """The queue of one port: ``rate`` in bits per second, ``depth`` and ``ecn`` (threshold) in bytes.

    ``rate=None`` never queues anything. ``ecn=None`` never marks. Raises ``ValueError`` for a rate or depth that lets
    nothing pass. ``now`` never goes back.
    """

    def __init__(self, name: str, rate: float | None, depth: int = 1 << 20, ecn: int | None = None) -> None:
        if (rate is not None and rate <= 0) or depth <= 0:
            raise ValueError(
                f"port {name}: a rate of {rate} bit/s with a depth of {depth} B lets nothing pass"
            )
        self.name = name
        self.rate = rate
        self.depth = depth
        self.ecn = float("inf") if ecn is None else float(ecn)
        self._backlog = 0.0
        self._at = 0.0
        self._counts: I64 = np.zeros(3, np.int64)
        self._peak = 0.0

    def backlog(self, now: float) -> float:
        """Bytes that stand in the queue."""
        if self.rate is None:
            return 0.0
        if now > self._at:
            if self._backlog:
                left = self._backlog - (now - self._at) * self.rate / 8
                self._backlog = left if left > 0.0 else 0.0
            self._at = now
        return self._backlog

    def admit(self, count: int, size: int, now: float) -> tuple[int, int]:
        """Queue ``count`` fragments of ``size`` bytes each, in order. Returns how many of them pass and how many of
        the following pass marked; the rest is dropped.

        A fragment is marked if at least ``ecn`` bytes stand before it: by its own place in the queue (faults per packet).
        """
        if self.rate is None:
            self._counts[PASSED] += count
            return count, 0
        backlog = self.backlog(now)
        behind = backlog + count * size
        if behind <= self.depth and behind - size < self.ecn:
            # all of them fit and none is marked, as it mostly is
            self._backlog = behind
            self._peak = max(self._peak, behind)
            self._counts[PASSED] += count
            return count, 0
        taken = min(count, max(int(backlog == 0), int((self.depth - backlog) // size)))
        if backlog >= self.ecn:
            unmarked = 0
        elif self.ecn == float("inf"):
            unmarked = taken
        else:
            unmarked = min(taken, int(-((backlog - self.ecn) // size)))
        self._backlog = backlog + taken * size
        self._peak = max(self._peak, self._backlog)
        self._counts[PASSED] += unmarked
        self._counts[MARKED] += taken - unmarked
        self._counts[LOST] += count - taken
        return unmarked, taken - unmarked

    def admit_frames(self, sizes: I64, now: float) -> U8 | None:
        """Queue frames of different sizes (int64); returns their fates, or ``None`` when all pass unmarked."""
        if self.rate is None:
            self._counts[PASSED] += len(sizes)
            return None
        fate = np.empty(len(sizes), np.uint8)
        self._backlog = float(
            admit_each(sizes, self.backlog(now), float(self.depth), self.ecn, fate, self._counts)
        )
        self._peak = max(self._peak, self._backlog)
        return fate

    def calm(self, size: int, now: float) -> bool:
        """Whether ``size`` bytes more would all stand below the threshold, and fit."""
        return self.rate is None or self.backlog(now) + size <= min(self.ecn, self.depth)

    def congested(self, now: float) -> bool:
        """Whether the queue stands above its ECN threshold."""
        return self.rate is not None and self.backlog(now) >= self.ecn

    def expected(self, sizes: I64, share: float, now: float) -> U8 | None:
        """For each of the fragments that are about to be judged, whether it would find the queue above its threshold;
        ``None`` if none would.

        ``share`` of the bytes before it in the batch are expected to have joined the queue by then: most packets of a
        program are absorbed.
        """
        backlog = self.backlog(now)
        if self.rate is None or backlog + share * float(sizes.sum()) < self.ecn:
            return None
        before = np.cumsum(sizes) - sizes
        return (backlog + share * before >= self.ecn).astype(np.uint8)

    def counters(self) -> dict[str, int]:
        """Fragments (frames, where they pass whole) ``passed``, ``marked`` and ``dropped``, and the ``peak_bytes``
        that stood in the queue.
        """
        passed, marked, lost = map(int, self._counts)
        return {"passed": passed + marked, "marked": marked, "dropped": lost, "peak_bytes": int(self._peak)}


#: bytes a port holds for a receiver that does not keep up
BUFFER = 8 << 20


class Sendable(Protocol):
    """Packets or frames that know where they go."""

    def __len__(self) -> int: ...

    def send(self, start: int) -> int:
        """Send number ``start`` and following; returns how many were taken."""
        ...

    def rest(self, start: int) -> tuple["Sendable", int]:
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
        return self._device.send(self._transmission, start)

    def rest(self, start: int) -> tuple["Packets", int]:
        old = self._transmission
        count, length = len(old) - start, old.length
        arena = np.empty(count * length, np.uint8)
        places = np.arange(count, dtype=np.int64) * length
        copy_packets(old.arena, old.offsets[start:], np.full(count, length, np.int64), arena, places)
        return Packets(self._device, Transmission(old.destination, arena, places, length)), count * length
