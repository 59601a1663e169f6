"""Decorator that holds a rate: a token bucket in front of a device, refilled by a clock, woken by a timer.

The rate counts bytes as queueing disciplines and interface counters do: each packet with its IP, UDP and
Ethernet headers, ``overhead`` bytes beyond what the node sends. A cable also carries 24 bytes of preamble,
checksum and gap per packet, which no counter shows: 1 Gbit/s Ethernet is full at 979 Mbit/s of 1052-byte
fragments over UDP.

A bucket of two super-frames is enough to hold a rate exactly although waking up takes time: one leaves
while the tokens of the next collect, and what collects during the delay is not lost as long as the bucket is
not full. The faster the rate, the less time that is; see :func:`default_burst`.
"""

import math
from collections.abc import Callable

from inanet.phy.device import Device
from inanet.phy.timerfd import Timer
from inanet.phy.udp import MAX_PAYLOAD, SEGMENTS
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import Transmission
from inanet.wire.endpoint import show

ETHERNET_BYTES = 14
#: Ethernet, IPv4 and UDP headers
OVERHEAD = ETHERNET_BYTES + 28
#: Two super-frames of 62 fragments, 67,828 B each on the wire, rounded up. A token bucket further on
#: (``tc tbf``) cuts up what is larger than itself, so this is also the least it should have.
BURST = 140_000
#: how long a node may be busy with what it has received before it sends again, in seconds
BUSY = 1e-3
#: Tokens are compared with this slack, in bytes: the clock's own rounding is no reason to wait again.
_SLACK = 1e-3


def default_burst(rate_bps: float) -> int:
    """Bytes of a bucket that does not overflow while a node is busy: :data:`BUSY` of the rate, at least
    :data:`BURST`.
    """
    return max(BURST, round(rate_bps / 8 * BUSY))


class Pacer(Wrapper):
    """Lets at most ``burst_bytes + rate_bps / 8 * t`` wire bytes pass in any ``t`` seconds.

    ``clock`` gives seconds and must be precise to microseconds (``time.monotonic``; an event loop's own time
    may stand still for a millisecond). ``timer`` fires when tokens for the next super-frame are there; the
    pacer owns it. ``overhead`` is what the network adds to each packet, in bytes. Raises ``ValueError`` for a
    rate or burst that is not positive.
    """

    def __init__(
        self,
        device: Device,
        rate_bps: float,
        burst_bytes: int,
        clock: Callable[[], float],
        timer: Timer,
        *,
        overhead: int = OVERHEAD,
    ) -> None:
        if rate_bps <= 0 or burst_bytes <= 0:
            raise ValueError(f"a rate of {rate_bps} bit/s with bursts of {burst_bytes} B lets nothing pass")
        super().__init__(device)
        self._bytes_per_second = rate_bps / 8
        self._burst = burst_bytes
        self._clock = clock
        self._timer = timer
        self._overhead = overhead
        #: when the bucket is full if nothing is sent until then; at or before now: it is full
        self._full_at = clock()
        self._retry_at: float | None = None
        self._waits = 0

    def set_rate(self, rate_bps: float, burst_bytes: int) -> None:
        """Hold another rate from now on. What has been sent before counts as sent at the old one.

        Raises ``ValueError`` for a rate or burst that is not positive.
        """
        if rate_bps <= 0 or burst_bytes <= 0:
            raise ValueError(f"a rate of {rate_bps} bit/s with bursts of {burst_bytes} B lets nothing pass")
        now = self._clock()
        # the tokens stay, as far as the new bucket holds them
        owed = max(0.0, self._full_at - now) * self._bytes_per_second + burst_bytes - self._burst
        self._bytes_per_second, self._burst = rate_bps / 8, burst_bytes
        self._full_at = now + max(0.0, owed) / self._bytes_per_second
        if self._retry_at is not None:
            # whoever waits may have to wait for longer, or no more: it finds out by trying
            self._retry_at = now
            self._timer.set(0.0)

    @property
    def retry_at(self) -> float | None:
        """When sending can go on, on the pacer's clock; ``None`` unless the last send ran out of tokens."""
        return self._retry_at

    def retry_fileno(self) -> int | None:
        """The timer if tokens are what is missing, else what the wrapped device waits for."""
        return self._device.retry_fileno() if self._retry_at is None else self._timer.fileno()

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Pass on what the tokens allow, in whole super-frames; see :meth:`inanet.phy.device.Device.send`.

        Raises ``ValueError`` for packets larger than the burst: they could never be sent.
        """
        offered = len(transmission) - start
        cost = transmission.length + self._overhead
        if cost > self._burst:
            raise ValueError(
                f"packets of {cost} B to {show(transmission.destination)}, headers included, exceed the burst "
                f"of {self._burst} B: raise the burst"
            )
        now = self._clock()
        if self._retry_at is not None:
            self._retry_at = None
            self._timer.clear()
        allowed = self._allowed(offered, cost, now)
        taken = 0
        if allowed:
            part = transmission if allowed == offered else self._part(transmission, start + allowed)
            taken = self._device.send(part, start)
            # they have left by now, however long that took; tokens for that time came on top of a full bucket
            now = self._clock()
            self._full_at = max(self._full_at, now) + taken * cost / self._bytes_per_second
        if taken == allowed < offered:
            self._wait(offered - taken, cost, now)
        return taken

    @staticmethod
    def _part(transmission: Transmission, end: int) -> Transmission:
        return Transmission(
            transmission.destination, transmission.arena, transmission.offsets[:end], transmission.length
        )

    def _quantum(self, cost: int) -> int:
        """Packets that leave together: as many super-frames as fit a quarter of the bucket, but at least one,
        or half of a bucket that holds less than two.
        """
        superframe = max(1, min(SEGMENTS, MAX_PAYLOAD // max(cost - self._overhead, 1)))
        quarter = self._burst // (4 * cost)
        return max(1, quarter - quarter % superframe, min(superframe, self._burst // (2 * cost)))

    def _allowed(self, offered: int, cost: int, now: float) -> int:
        tokens = self._burst - max(0.0, self._full_at - now) * self._bytes_per_second
        # rounding can leave a little less than nothing, which must not become minus one packet
        affordable = max(0, math.floor((tokens + _SLACK) / cost))
        if affordable >= offered:
            return offered
        # a few packets now would cost as much work as a super-frame a moment later
        return affordable - affordable % self._quantum(cost)

    def _wait(self, left: int, cost: int, now: float) -> None:
        """Ask to be called again when tokens for the next super-frame, or for all that is left, are there."""
        needed = min(left, self._quantum(cost)) * cost
        self._retry_at = self._full_at - (self._burst - needed) / self._bytes_per_second
        self._timer.set(self._retry_at - now)
        self._waits += 1

    def counters(self) -> dict[str, int]:
        """Counters of the wrapped device, and ``paced``: how often sending had to wait for tokens."""
        return {**self._device.counters(), "paced": self._waits}

    def close(self) -> None:
        self._timer.close()
        self._device.close()
