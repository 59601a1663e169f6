"""Ring all-reduce between hosts, as a machine: when each packet may leave, under a congestion control of its own.

It carries no values. A tensor is cut into as many chunks as there are workers. In each of ``2 (n - 1)`` steps a worker sends the
chunk on that it has received in the step before; a packet may leave as soon as the one of the step before that it stands for
is here, so that steps overlap as far as they can. Packets are numbered through all rounds and delivered in order; a gap is
answered by the number that is missing, and the sender goes back to it. The window is DCTCP's: ``alpha`` follows the share of
marked packets with weight 1/16, once per window.

============ ==== ===================================================================
offset       size meaning (little-endian)
============ ==== ===================================================================
0            4    number of the packet; in an acknowledgement the next that is wanted
4            1    0: data, 1: acknowledgement
5            1    flags; ECN as in ATP's header
6            2    in an acknowledgement: packets it is for
8            2    and how many of them were marked
============ ==== ===================================================================
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from inanet.proto.common.events import NodeEvent, RoundDone
from inanet.sim.burst import rows_of
from inanet.wire.atp import Flag
from inanet.wire.batch import PacketBatch, Transmission

HEADER: np.dtype[np.void] = np.dtype(
    [("number", "<u4"), ("kind", "u1"), ("flags", "u1"), ("count", "<u2"), ("marked", "<u2")]
)
#: Bytes of an acknowledgement, as of the smallest Ethernet frame.
ACK_BYTES = 26
_GAIN = 1 / 16


class RingWorker:
    """A worker of a ring of ``workers``; the next one is at the endpoint ``after``, the one before at ``before``.

    A round sums ``size`` bytes in packets of ``payload`` bytes; ``window`` packets at first and ``largest`` at most.
    ``timeout`` seconds without an answer make it go back. Raises ``ValueError`` for a ring that cannot be.
    """

    def __init__(
        self,
        job: int,
        workers: int,
        after: int,
        before: int,
        *,
        size: int,
        payload: int,
        window: int,
        largest: int,
        timeout: float = 1e-3,
    ) -> None:
        if workers < 2 or size < 1 or payload < HEADER.itemsize or not 1 <= window <= largest:
            raise ValueError(
                f"job {job}: a ring of {workers} workers for {size} B in packets of {payload} B, windows of {window} to"
                f" {largest}; at least two workers, a byte, {HEADER.itemsize} B a packet and a window of one"
            )
        self.job = job
        self.after, self.before = after, before
        self.length = payload
        self.chunk = -(-size // (workers * payload))
        self.steps = 2 * (workers - 1)
        self.window, self._largest = float(window), float(largest)
        self.alpha = 0.0
        self.timeout = timeout
        self.resent = 0
        self._round = self._done = 0
        self._received = self._acked = self._next = 0
        #: number at which the window is updated next, and what was answered since the last time
        self._epoch, self._seen, self._marked = 0, 0, 0
        self._went_back = -1
        self._heard: float | None = None
        self._ack: tuple[int, int] | None = None
        self._events: list[NodeEvent] = []

    @property
    def packets(self) -> int:
        """Packets of a round."""
        return self.chunk * self.steps

    def begin(self, now: float) -> None:
        """Start the next round."""
        self._round += 1
        if self._heard is None:
            self._heard = now
        self._finish()

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take packets of the worker before and acknowledgements of the one after."""
        heads = rows_of(batch.arena, batch.offsets, HEADER.itemsize).view(HEADER)[:, 0]
        data = (heads["kind"] == 0) & (batch.sources == np.uint64(self.before))
        if data.any():
            self._take(heads[data])
        acks = heads[(heads["kind"] == 1) & (batch.sources == np.uint64(self.after))]
        for number, count, marked in zip(
            acks["number"].tolist(), acks["count"].tolist(), acks["marked"].tolist(), strict=True
        ):
            self._answered(number, count, marked, now)
        self._finish()

    def _take(self, heads: Any) -> None:
        numbers = heads["number"].astype(np.int64)
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            if run[0] <= self._received <= run[-1]:
                self._received = int(run[-1]) + 1
        marked = int(np.count_nonzero(heads["flags"] & int(Flag.ECN)))
        count, before = self._ack or (0, 0)
        self._ack = (count + len(heads), before + marked)

    def _answered(self, number: int, count: int, marked: int, now: float) -> None:
        if number > self._acked:
            self._acked, self._heard = number, now
        elif number == self._acked < self._next and count and self._went_back != number:
            # nothing new although packets came: one is missing. Those behind it say so as well, once is enough
            self._went_back = number
            self._back()
        self._next = max(self._next, self._acked)
        self._seen += count
        self._marked += marked
        if self._acked >= self._epoch:
            share = min(1.0, self._marked / max(1, self._seen))
            self.alpha += _GAIN * (share - self.alpha)
            self.window = self.window * (1 - self.alpha / 2) if self._marked else self.window + 1
            self.window = min(max(self.window, 1.0), self._largest)
            self._seen = self._marked = 0
            self._epoch = self._acked + int(self.window)

    def _back(self) -> None:
        self.resent += self._next - self._acked
        self._next = self._acked

    def _finish(self) -> None:
        while self._done < self._round and self._received >= (self._done + 1) * self.packets:
            self._done += 1
            self._events.append(RoundDone(self.job, self._done, 0, -1))

    def _limit(self) -> int:
        """The first packet that may not leave yet."""
        if not self._round:
            return 0
        begun = (self._round - 1) * self.packets
        return min(max(self._received, begun) + self.chunk, begun + self.packets)

    def transmit(self, now: float) -> Sequence[Transmission]:
        """What may leave, and what is to be acknowledged."""
        out = []
        if self._ack is not None:
            count, marked = self._ack
            self._ack = None
            head = np.zeros(ACK_BYTES, np.uint8)
            head[: HEADER.itemsize].view(HEADER)[0] = (self._received, 1, 0, count, marked)
            out.append(Transmission(self.before, head, np.zeros(1, np.int64), ACK_BYTES))
        stop = min(self._limit(), self._acked + int(self.window))
        if stop > self._next:
            frames = np.zeros((stop - self._next, self.length), np.uint8)
            numbers = np.arange(self._next, stop, dtype="<u4")
            frames[:, :4] = numbers.view(np.uint8).reshape(-1, 4)
            offsets = np.arange(len(frames), dtype=np.int64) * self.length
            out.append(Transmission(self.after, frames.reshape(-1), offsets, self.length))
            if self._next == self._acked:
                self._heard = now
            self._next = stop
        return out

    def timer(self) -> float | None:
        """When what is unanswered is late; None while nothing is."""
        if self._acked >= self._next or self._heard is None:
            return None
        return self._heard + self.timeout

    def on_timer(self, now: float) -> None:
        """Go back if nothing has been answered for too long."""
        due = self.timer()
        if due is not None and now >= due:
            self._heard = now
            self._back()

    def events(self) -> list[NodeEvent]:
        """Rounds that are done."""
        events, self._events = self._events, []
        return events
