"""Base of the decorators: a device around a device that passes everything on unchanged."""

import errno

from inanet.phy.device import Device, GroupReceiver
from inanet.wire.batch import PacketBatch, Transmission
from inanet.wire.endpoint import show


class Wrapper:
    """Delegates to ``device``, which it owns: closing the wrapper closes it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def wrapped(self) -> Device:
        """What is inside."""
        return self._device

    @property
    def endpoint(self) -> int:
        """Address of the wrapped device."""
        return self._device.endpoint

    @property
    def rx_budget(self) -> int:
        """Receive budget of the wrapped device, in fragments."""
        return self._device.rx_budget

    def fileno(self) -> int:
        """File descriptor of the wrapped device."""
        return self._device.fileno()

    def receive(self) -> PacketBatch | None:
        return self._device.receive()

    def send(self, transmission: Transmission, start: int = 0) -> int:
        return self._device.send(transmission, start)

    def retry_fileno(self) -> int | None:
        return self._device.retry_fileno()

    def join(self, group: int) -> int | None:
        """See :meth:`inanet.phy.device.GroupReceiver.join`; ``OSError`` if the wrapped device cannot."""
        return self._group_receiver(group).join(group)

    def leave(self, group: int) -> None:
        self._group_receiver(group).leave(group)

    def _group_receiver(self, group: int) -> GroupReceiver:
        if not isinstance(self._device, GroupReceiver):
            raise OSError(
                errno.EOPNOTSUPP,
                f"{type(self._device).__name__} at {show(self.endpoint)} cannot receive the group "
                f"{show(group)}: use unicast, or the udp device",
            )
        return self._device

    def timer(self) -> float | None:
        return self._device.timer()

    def flush(self, now: float) -> PacketBatch | None:
        return self._device.flush(now)

    def counters(self) -> dict[str, int]:
        """Counters of the wrapped device."""
        return self._device.counters()

    def close(self) -> None:
        """Close the wrapped device."""
        self._device.close()
