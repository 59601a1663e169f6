"""How long a busy node waits before it reads its device again: interrupt moderation, in user space.

Whoever wakes for every super-frame runs the event loop, the slot engine's entry and the choice of what to send once for
some sixty packets, and takes the processor from the ranks each time. A link of 1 Gbit/s brings one super-frame every half
millisecond, so that is most of what a node does there. Waiting until a few of them lie in the receive buffer costs no
time as long as windows keep neighbours busy meanwhile, and much is still to come.

Rates decide: links that fill a batch before a timer can fire are read as soon as there is something, and so are the
last fragments of a round.
"""

from dataclasses import dataclass
from typing import Any

from numba import types

from inanet.kernels.jit import njit

#: packets that are worth being waited for
BATCH = 496
#: seconds: timers of event loops are no finer than the first, and windows are made for the second
SHORTEST = 0.001
LONGEST = 0.002
#: batches that a round must still lack, or its end would be delayed
STILL_TO_COME = 4


_BATCHES, _LONGEST, _SHORTEST = STILL_TO_COME, LONGEST, SHORTEST


@njit(types.float64(types.int64, types.int64, types.int64, types.float64), cache=True, nogil=True, _nrt=False)
def pause_after(batch: int, packets: int, lacking: int, elapsed: float) -> Any:
    """Seconds to wait for ``batch`` packets where ``packets`` came in the last ``elapsed`` seconds; see :meth:`Moderation.pause`."""
    if packets == 0 or elapsed > 2 * _LONGEST or lacking < _BATCHES * batch:
        # after a time without traffic nobody knows at what rate it comes now
        return 0.0
    pause = min(batch * elapsed / packets, _LONGEST)
    return pause if pause >= _SHORTEST else 0.0


@dataclass(slots=True)
class Moderation:
    """``budget`` is how many fragments the receive buffer holds (:attr:`inanet.phy.device.Device.rx_budget`)."""

    budget: int
    _since: float = 0.0

    @property
    def batch(self) -> int:
        """Packets to wait for: what leaves three quarters of the buffer to what comes meanwhile."""
        return min(BATCH, self.budget // 4)

    def pause(self, packets: int, lacking: int, now: float) -> float:
        """Seconds to wait after ``packets`` were taken, 0 to read as soon as something comes.

        ``lacking`` is how many results the round that is nearest its end still lacks, 0 if there is none.
        """
        elapsed, self._since = now - self._since, now
        return float(pause_after(self.batch, packets, lacking, elapsed))

    def goes_on(self, lacking: int) -> bool:
        """Whether so much is still to come that a turn may wait for it by itself."""
        return lacking >= STILL_TO_COME * self.batch
