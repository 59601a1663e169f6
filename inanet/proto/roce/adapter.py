"""The queue pairs of one host behind one device: every batch is examined once, for all of them."""

import numpy as np
from numpy.typing import NDArray

from inanet.proto.roce.parse import parse
from inanet.proto.roce.queue_pair import QueuePair
from inanet.proto.roce.verbs import Event
from inanet.wire.batch import I64, PacketBatch, Transmission
from inanet.wire.drops import DROP_CODES, Drop


class ChannelAdapter:
    """Queue pairs of ``address``, an IPv4 address as an integer. Contract as for :class:`QueuePair`."""

    def __init__(self, address: int) -> None:
        self.address = address
        #: packets dropped before it was known for which queue pair they are, by reason
        self.drops: NDArray[np.int64] = np.zeros(DROP_CODES, np.int64)
        self._pairs: dict[int, QueuePair] = {}
        self._numbers: I64 = np.zeros(0, np.int64)

    def add(self, pair: QueuePair) -> None:
        """Serve a queue pair. Raises ``ValueError`` for another host's and for a number that is taken."""
        number = pair.local.number
        if pair.local.endpoint >> 16 != self.address:
            raise ValueError(f"{pair} does not belong to this host")
        if number in self._pairs:
            raise ValueError(f"queue pair number {number:#x} is taken on this host")
        self._pairs[number] = pair
        self._renumber()

    def remove(self, pair: QueuePair) -> None:
        """No longer serve a queue pair. Raises ``KeyError`` if it is not served."""
        del self._pairs[pair.local.number]
        self._renumber()

    def _renumber(self) -> None:
        self._numbers = np.array(list(self._pairs), np.int64)

    def receive(self, batch: PacketBatch, now: float) -> None:
        """Take what the device has received."""
        fields = parse(batch, self.address, self._numbers, self.drops)
        for pair in self._pairs.values():
            pair.take(batch, fields, now)

    def transmit(self, now: float) -> list[Transmission]:
        """Packets of all queue pairs to send now."""
        return [transmission for pair in self._pairs.values() for transmission in pair.transmit(now)]

    def timer(self) -> float | None:
        """When :meth:`on_timer` wants to be called next."""
        times = [at for pair in self._pairs.values() if (at := pair.timer()) is not None]
        return min(times, default=None)

    def on_timer(self, now: float) -> None:
        """Time has come for some queue pair."""
        for pair in self._pairs.values():
            pair.on_timer(now)

    def events(self) -> list[tuple[QueuePair, Event]]:
        """What happened since the last call, by queue pair."""
        return [(pair, event) for pair in self._pairs.values() for event in pair.events()]

    def drops_by_reason(self) -> dict[str, int]:
        """Packets dropped by the adapter and its queue pairs, by the label of every reason."""
        total = self.drops + sum(pair.drops for pair in self._pairs.values())
        return {reason.label: int(total[reason]) for reason in Drop if reason is not Drop.OK}
