"""One direction of a link: a queue that drains at a rate, then a wire that delays and loses."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from inanet.sim.burst import Burst
from inanet.switch.egress import EgressQueue

#: What Ethernet, IPv4 and UDP add to a packet on the wire: headers, checksum, preamble and gap, bytes.
UDP_OVERHEAD = 14 + 20 + 8 + 4 + 8 + 12


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """``rate`` bits per second (``None``: no limit), ``delay`` seconds, ``queue`` bytes (``None``: without end, as at a
    host whose sender waits), ``ecn`` bytes from which packets are marked (``None``: never), ``loss`` probability per
    packet, ``overhead`` bytes that the network adds to each packet, ``grain`` packets that move as one.
    """

    rate: float | None = None
    delay: float = 5e-6
    queue: int | None = None
    ecn: int | None = None
    loss: float = 0.0
    overhead: int = UDP_OVERHEAD
    grain: int = 32

    def __post_init__(self) -> None:
        if self.delay < 0 or not 0 <= self.loss < 1 or self.overhead < 0 or self.grain < 1:
            raise ValueError(f"{self}: delay and overhead from 0, loss in [0, 1), grain from 1")
        if self.delay == 0 and self.rate is None:
            raise ValueError(f"{self}: without a rate and a delay time would stand still")


#: Depth of a queue without end, bytes.
_ENDLESS = 1 << 50


class Link:
    """A link from one node to another. ``seed`` decides what is lost. Raises ``ValueError`` for a queue that lets
    nothing pass.
    """

    def __init__(self, name: str, spec: LinkSpec, seed: int) -> None:
        self.name = name
        self.spec = spec
        self._queue = EgressQueue(name, spec.rate, _ENDLESS if spec.queue is None else spec.queue, spec.ecn)
        self._rng = np.random.default_rng(seed)
        self._packets = self._bytes = self._lost = 0

    def backlog(self, now: float) -> float:
        """Bytes that have not left yet."""
        return self._queue.backlog(now)

    def congested(self, now: float) -> bool:
        """Whether the next packet would be marked."""
        return self._queue.congested(now)

    def drained(self, now: float, level: float) -> float:
        """When the backlog will have fallen to ``level`` bytes if nothing is added; ``now`` if it has."""
        if self.spec.rate is None:
            return now
        return now + max(0.0, self.backlog(now) - level) * 8 / self.spec.rate

    def carry(self, burst: Burst, now: float) -> Iterator[tuple[float, Burst]]:
        """Queue a burst; gives the pieces that arrive, each with its time. What the queue has no room for is dropped."""
        spec, offered, length = self.spec, *burst.data.shape
        size = length + spec.overhead
        before = self.backlog(now)
        unmarked, marked = self._queue.admit(offered, size, now)
        count = unmarked + marked
        self._packets += count
        self._bytes += count * size
        if marked or count < offered:
            burst = Burst(burst.source, burst.destination, burst.data[:count], burst.marked[:count].copy())
            burst.marked[unmarked:] = True
        grain = spec.grain
        for first in range(0, count, grain):
            last = min(first + grain, count)
            piece = burst if count <= grain else burst.part(slice(first, last))
            at = now + spec.delay
            if spec.rate is not None:
                at += (before + last * size) * 8 / spec.rate
            if spec.loss:
                there = self._rng.random(last - first) >= spec.loss
                self._lost += last - first - int(there.sum())
                piece = piece.part(there)
                if not len(piece):
                    continue
            yield at, piece

    def counters(self) -> dict[str, int]:
        """``packets`` and ``bytes`` (on the wire) that left, ``marked``, ``dropped`` by the queue, ``lost`` on the wire,
        and the queue's ``peak_bytes``.
        """
        its = self._queue.counters()
        return {
            "packets": self._packets,
            "bytes": self._bytes,
            "marked": its["marked"],
            "dropped": its["dropped"],
            "lost": self._lost,
            "peak_bytes": its["peak_bytes"],
        }
