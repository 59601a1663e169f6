"""Decorator that shows every batch that passes to a function: what tests assert on and what debugging
prints."""

from collections.abc import Callable
from enum import Enum

from inanet.phy.device import Device
from inanet.phy.wrapper import Wrapper
from inanet.wire.batch import PacketBatch, Transmission


class Direction(Enum):
    """Which way a batch went, seen from this node."""

    RECEIVED = "received"
    SENT = "sent"


class Tracer(Wrapper):
    """Calls ``watch(direction, batch)`` once per batch, after a receive and after a send.

    Received batches come as :class:`PacketBatch`, sent ones as a :class:`Transmission` of just the packets
    the device took. Both are only valid during the call.
    """

    def __init__(
        self, device: Device, watch: Callable[[Direction, PacketBatch | Transmission], None]
    ) -> None:
        super().__init__(device)
        self._watch = watch

    def receive(self) -> PacketBatch | None:
        """Receive and show."""
        return self._shown(self._device.receive())

    def flush(self, now: float) -> PacketBatch | None:
        """Release held packets of the wrapped device, and show them."""
        return self._shown(self._device.flush(now))

    def _shown(self, batch: PacketBatch | None) -> PacketBatch | None:
        if batch is not None:
            self._watch(Direction.RECEIVED, batch)
        return batch

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Send and show what was taken."""
        taken = self._device.send(transmission, start)
        if taken:
            offsets = transmission.offsets[start : start + taken]
            part = Transmission(transmission.destination, transmission.arena, offsets, transmission.length)
            self._watch(Direction.SENT, part)
        return taken
