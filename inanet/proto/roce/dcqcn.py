"""DCQCN: the rate of a queue pair under congestion notifications, and when packets may leave at that rate.

Source: Zhu et al., Congestion Control for Large-Scale RDMA Deployments (SIGCOMM 2015), section 3 and figure 7; the constants
are those of its section 5. Time enters as ``now`` in seconds, and what timers would have done since the last call is done
then, so the rate has no timers of its own.
"""

import math
from dataclasses import dataclass

#: least time between two notifications of a receiver
NOTIFICATION_INTERVAL = 50e-6


@dataclass(frozen=True, slots=True)
class Dcqcn:
    """Constants of the reaction point; rates in bits per second, times in seconds."""

    #: weight of a notification in the estimate of congestion, and the time after which one that does not come counts
    gain: float = 1 / 256
    estimate_interval: float = 55e-6
    #: the rate rises once per interval and once per so many bytes
    increase_interval: float = 55e-6
    increase_bytes: int = 10_000_000
    #: rises that go half the way back before the target itself rises
    recovery_stages: int = 5
    additive: float = 40e6
    hyper: float = 400e6
    lowest: float = 10e6
    #: bytes that may leave back to back
    burst: int = 65536


class Rate:
    """Paces one queue pair, from ``line_rate`` (bits per second) down and back up to it."""

    def __init__(self, line_rate: float, constants: Dcqcn | None = None) -> None:
        self.constants = constants or Dcqcn()
        self.line_rate = line_rate
        #: bits per second now, and what the next rises aim for
        self.current = self.target = line_rate
        #: estimate of congestion, 0 to 1
        self.alpha = 1.0
        self.notifications = 0
        self._estimated = self._risen = 0.0
        self._bytes = self._time_stages = self._byte_stages = 0
        #: when all that has left would have been sent at the rate of its time
        self._sent_until = 0.0

    @property
    def congested(self) -> bool:
        """Whether the rate is below the line's."""
        return self.current < self.line_rate

    def notify(self, now: float) -> None:
        """A congestion notification: cut the rate, start recovery afresh (equation 1)."""
        self.advance(now)
        constants = self.constants
        if self.notifications:
            silent = int((now - self._estimated) / constants.estimate_interval)
            self.alpha *= (1 - constants.gain) ** silent
        self.notifications += 1
        self.target = self.current
        self.current = max(self.current * (1 - self.alpha / 2), min(constants.lowest, self.line_rate))
        self.alpha += constants.gain * (1 - self.alpha)
        self._estimated = self._risen = now
        self._bytes = self._time_stages = self._byte_stages = 0

    def advance(self, now: float) -> None:
        """Let the rate rise by what time has brought."""
        while self.congested and now - self._risen >= self.constants.increase_interval:
            self._risen += self.constants.increase_interval
            self._time_stages += 1
            self._rise()

    def sent(self, size: int, now: float) -> None:
        """``size`` bytes leave."""
        self._sent_until = max(self._sent_until, now) + size * 8 / self.current
        if self.congested:
            self._bytes += size
            while self.congested and self._bytes >= self.constants.increase_bytes:
                self._bytes -= self.constants.increase_bytes
                self._byte_stages += 1
                self._rise()

    def _rise(self) -> None:
        """One rise: fast recovery, additive or hyper increase (equations 3 and 4)."""
        constants = self.constants
        fewest, most = sorted((self._time_stages, self._byte_stages))
        if fewest > constants.recovery_stages:
            self.target += (fewest - constants.recovery_stages) * constants.hyper
        elif most >= constants.recovery_stages:
            self.target += constants.additive
        self.target = min(self.target, self.line_rate)
        self.current = (self.current + self.target) / 2
        if self.current > self.line_rate * 0.999:
            self.current = self.target = self.line_rate

    def allowance(self, now: float) -> int:
        """Bytes that may leave at ``now``."""
        self.advance(now)
        ahead = max(self._sent_until - now, 0.0) * self.current / 8
        return max(math.floor(self.constants.burst - ahead), 0)

    def ready(self, size: int) -> float:
        """When ``size`` bytes may leave at the rate of now. Sizes above the burst count as the burst."""
        room = max(self.constants.burst - size, 0) * 8 / self.current
        return self._sent_until - room
