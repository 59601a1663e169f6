"""An aggregator's slots in the kernel: whether, in which mode, and its wiring to the event loop."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal

import structlog

from inanet.aio.attachment import ModeChoice, Wanted, asked_for, interface_of, modes
from inanet.config.daemons import AggConfig
from inanet.phy.device import Device
from inanet.proto.common.recovery import Timing
from inanet.proto.tree.node import Node
from inanet.proto.tree.slots import ROW_BYTES
from inanet.wire.endpoint import address_of
from inanet.xdp.attach import Unavailable, load
from inanet.xdp.memory import KernelCount, Mode
from inanet.xdp.slots import KernelSlots

_log: Any = structlog.get_logger("inanet.xdp")


class Offload:
    """The program of one aggregator and its node. Raises :class:`~inanet.xdp.attach.Unavailable`."""

    def __init__(self, config: AggConfig, device: Device, timing: Timing, wanted: Wanted) -> None:
        node = config.node
        # what the program would bypass
        if node.rate is not None:
            raise Unavailable("driver: [node] rate paces what user space sends, the kernel would pass it by")
        if config.impair.active:
            raise Unavailable("driver: [impair] is for what user space receives, the kernel would pass it by")
        interface = interface_of(address_of(device.endpoint)[0], node.transport)
        # two at least: that of a map is never empty
        self._shared = load(max(2, node.memory // ROW_BYTES), device.endpoint, *modes(wanted))
        try:
            self._choice = ModeChoice(self._shared, interface, wanted)
            self.slots = KernelSlots(self._shared)
            self.node = Node(node.name, self.slots, timing, random.Random(node.name).random)
        except BaseException:
            self._shared.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = -1
        self._warned = False
        _log.info("aggregating in XDP", interface=interface, mode=self.mode)

    @property
    def mode(self) -> Mode | Literal["off"]:
        """What the program runs in."""
        return self._choice.mode

    def watch(self, kick: Callable[[], None]) -> None:
        """Attend to what the program reports, inside the running loop; ``kick`` sends what follows from it."""
        self._loop = asyncio.get_running_loop()
        self._watched = self.slots.fileno()

        def readable() -> None:
            assert self._loop is not None
            self.node.attend(self._loop.time())
            self.review()
            kick()

        self._loop.add_reader(self._watched, readable)

    def review(self) -> None:
        """With ``auto``: is this the right mode, and does what the program sends arrive?"""
        if self.slots.unheard and not self._warned:
            self._warned = True
            if self._choice.auto and self.mode == "native":
                _log.warning("what native XDP sends does not arrive, going back to generic mode")
                if self._choice.change("generic"):
                    self._start_again()
            else:
                _log.warning(
                    "what XDP sends does not arrive: sums are forwarded by user space. The other end of a virtual "
                    "cable has to merge packets: ethtool -K DEVICE gro on"
                )
        counts = self._shared.kernel_counts()
        packets = int(counts[KernelCount.BYTES]) // ROW_BYTES
        if self._choice.choose(packets, int(counts[KernelCount.FRAMES])):
            self._start_again()

    def _start_again(self) -> None:
        """In another mode, what did not arrive may do so."""
        self.slots.try_again()
        self._warned = False

    def close(self) -> None:
        """Take the program off. Closing twice is fine."""
        if self._loop is not None and self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1
        self._choice.close()
        self.slots.close()


def open_offload(config: AggConfig, device: Device, timing: Timing) -> Offload | None:
    """As ``[node] xdp`` of an aggregator asks for; see :func:`~inanet.aio.attachment.asked_for`."""
    return asked_for(
        config.node.xdp,
        lambda wanted: Offload(config, device, timing, wanted),
        "aggregating in user space",
    )
