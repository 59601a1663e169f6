"""A worker's results through the kernel program: whether, and in which mode."""

from typing import Any, Literal

import structlog

from inanet.aio.attachment import ModeChoice, Wanted, asked_for, interface_of
from inanet.config.daemons import WorkerConfig
from inanet.phy.device import Device
from inanet.wire.batch import PacketBatch
from inanet.wire.endpoint import address_of
from inanet.wire.xagg import ROW_BYTES
from inanet.xdp.attach import load_inbox
from inanet.xdp.inbox import InboxCount
from inanet.xdp.memory import Mode
from inanet.xdp.worker import InboxDevice

_log: Any = structlog.get_logger("inanet.xdp")

#: batches between two looks at the mode
_EVERY = 64


class ReceivingDevice(InboxDevice):
    """``device`` with the program in front of it, on the interface that has its address.

    Raises :class:`~inanet.xdp.attach.Unavailable`.
    """

    def __init__(self, config: WorkerConfig, device: Device, wanted: Wanted) -> None:
        interface = interface_of(address_of(device.endpoint)[0], config.node.transport)
        # as many results as the socket's own buffer holds
        inbox = load_inbox(device.rx_budget, device.endpoint)
        try:
            self._choice = ModeChoice(inbox, interface, wanted, merged="off")
        except BaseException:
            inbox.close()
            raise
        super().__init__(device, inbox)
        self._batches = 0
        _log.info("receiving through XDP", interface=interface, mode=self.mode, rows=inbox.rows)

    @property
    def mode(self) -> Mode | Literal["off"]:
        """What the program runs in."""
        return self._choice.mode

    def _take(self) -> PacketBatch | None:
        self._batches += 1
        if self._batches % _EVERY == 0:
            counts = self.inbox.counts()
            self._choice.choose(int(counts[InboxCount.BYTES]) // ROW_BYTES, int(counts[InboxCount.FRAMES]))
            if self.mode == "off":
                self.share_groups()
        return super()._take()

    def close(self) -> None:
        """Take the program off, close the device. Closing twice is fine."""
        self._choice.close()
        super().close()
        self.inbox.close()


def open_receiving(config: WorkerConfig, device: Device) -> ReceivingDevice | None:
    """As ``[node] xdp`` of a worker asks for; see :func:`~inanet.aio.attachment.asked_for`."""
    return asked_for(
        config.node.xdp,
        lambda wanted: ReceivingDevice(config, device, wanted),
        "results through the socket",
    )
