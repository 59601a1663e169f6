"""A device that receives what it is given: how faults are put on packets that have been received already."""

import errno

from inanet.wire.batch import PacketBatch, Transmission


class Feed:
    """See :class:`inanet.phy.device.Device`; it cannot send."""

    endpoint = 0
    rx_budget = 0

    def __init__(self) -> None:
        self._given: PacketBatch | None = None

    def put(self, batch: PacketBatch) -> None:
        """What :meth:`receive` returns next, once."""
        self._given = batch

    def receive(self) -> PacketBatch | None:
        """What was put, or ``None``."""
        given, self._given = self._given, None
        return given

    def fileno(self) -> int:
        """There is none."""
        raise OSError(errno.EBADF, "nothing to watch")

    def send(self, transmission: Transmission, start: int = 0) -> int:
        """Nothing can be sent."""
        raise OSError(errno.EBADF, "a feed only receives")

    def retry_fileno(self) -> int | None:
        """Nothing is sent."""
        return None

    def timer(self) -> float | None:
        """Nothing is held back."""
        return None

    def flush(self, now: float) -> PacketBatch | None:
        """Nothing is held back."""
        return None

    def counters(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """Nothing to close."""
