"""An aggregator's slots in the kernel: whether, in which mode, and its wiring to the event loop.

``auto`` does not guess the mode. It begins in generic mode, which sees what the receive offload or a local sender has
merged, and counts how many packets come in a frame. Where frames hold many packets, walking them is cheaper than any
driver's one call per packet; where they come one by one, the driver's own mode is tried.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import structlog

from inanet.control.addresses import interfaces, is_loopback
from inanet.control.config import AggConfig
from inanet.control.exits import Exit, Failure
from inanet.phy.device import Device
from inanet.proto.reliability import Timing
from inanet.proto.slots import ROW_BYTES
from inanet.wire.endpoint import address_of
from inanet.xdp.attach import Attachment, Unavailable, load
from inanet.xdp.memory import KernelCount, Mode
from inanet.xdp.node import OffloadedNode

_log: Any = structlog.get_logger("inanet.xdp")

#: packets after which ``auto`` looks again, and packets of a frame that make generic mode the better one
ENOUGH = 8192
MERGED = 2.0


class Refused(Failure):
    """A mode that was asked for by name cannot be had."""

    code = Exit.PERMISSION


class Offload:
    """The program of one aggregator and its node. Raises :class:`~inanet.xdp.attach.Unavailable`."""

    def __init__(self, config: AggConfig, device: Device, timing: Timing) -> None:
        node = config.node
        address, _ = address_of(device.endpoint)
        self._refuse(config, address)
        interface = next((name for name, owned in interfaces().items() if owned == address), None)
        if interface is None:
            raise Unavailable(f"driver: {address} is the first address of no interface")
        self._auto = node.xdp == "auto"
        modes: tuple[Mode, ...] = ("generic", "native") if node.xdp == "auto" else (node.xdp,)  # type: ignore[assignment]
        # two at least: that of a map is never empty
        self._shared = load(max(2, node.memory // ROW_BYTES), device.endpoint, *modes)
        try:
            self._attachment = self._attach(interface, modes)
            self.node = OffloadedNode(node.name, self._shared, timing, random.Random(node.name).random)
        except BaseException:
            self._shared.close()
            raise
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = -1
        self._chosen = self._warned = False
        _log.info("aggregating in the kernel", interface=interface, mode=self.mode)

    @staticmethod
    def _refuse(config: AggConfig, address: str) -> None:
        """What the program would bypass, and where it would see nothing."""
        if is_loopback(address):
            raise Unavailable("driver: packets on the loopback interface reach no XDP driver")
        if config.node.transport not in ("udp", "rawip"):
            raise Unavailable(f"driver: transport {config.node.transport} is past the kernel already")
        if config.node.rate is not None:
            raise Unavailable("driver: [node] rate paces what user space sends, the kernel would pass it by")
        if config.impair.active:
            raise Unavailable("driver: [impair] is for what user space receives, the kernel would pass it by")

    def _attach(self, interface: str, modes: tuple[Mode, ...]) -> Attachment:
        """In the first mode that the interface takes."""
        for mode in modes[:-1]:
            try:
                return Attachment(self._shared, interface, mode)
            except Unavailable as reason:
                _log.info("xdp mode not to be had", mode=mode, reason=str(reason))
        return Attachment(self._shared, interface, modes[-1])

    @property
    def mode(self) -> Mode:
        """What the program runs in."""
        return self._attachment.mode

    def watch(self, kick: Callable[[], None]) -> None:
        """Attend to what the program reports, inside the running loop; ``kick`` sends what follows from it."""
        self._loop = asyncio.get_running_loop()
        self._watched = self.node.fileno()

        def readable() -> None:
            assert self._loop is not None
            self.node.attend(self._loop.time())
            self.review()
            kick()

        self._loop.add_reader(self._watched, readable)

    def review(self) -> None:
        """With ``auto``: is this the right mode, and does what the program sends arrive?"""
        if self.node.unheard and not self._warned:
            self._warned = True
            if self._auto and self.mode == "native":
                _log.warning("what native XDP sends does not arrive, going back to generic mode")
                self._change("generic")
            else:
                _log.warning(
                    "what XDP sends does not arrive: sums are forwarded by user space. The other end of a virtual "
                    "cable has to merge packets: ethtool -K DEVICE gro on"
                )
        if not self._auto or self._chosen:
            return
        counts = self._shared.kernel_counts()
        packets = int(counts[KernelCount.BYTES]) // ROW_BYTES
        if packets < ENOUGH:
            return
        self._chosen = True
        merged = packets / max(1, int(counts[KernelCount.FRAMES]))
        if merged < MERGED and self.mode == "generic":
            self._change("native")
        _log.info("xdp mode chosen", mode=self.mode, packets_per_frame=round(merged, 1))

    def _change(self, mode: Mode) -> None:
        """Put the program on in another mode, or leave it as it was. Packets in between are user space's."""
        interface, before = self._attachment.interface, self.mode
        self._attachment.close()
        try:
            self._attachment = Attachment(self._shared, interface, mode)
        except Unavailable as reason:
            _log.info("xdp mode not to be had", mode=mode, reason=str(reason))
            self._attachment = Attachment(self._shared, interface, before)
            return
        self.node.try_again()
        self._warned = False

    def close(self) -> None:
        """Take the program off. Closing twice is fine."""
        if self._loop is not None and self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1
        self._attachment.close()
        self.node.close()


def open_offload(config: AggConfig, device: Device, timing: Timing) -> Offload | None:
    """What ``[node] xdp`` asks for; ``None`` for user space, with the reason in the log where ``auto`` cannot.

    Raises :class:`Refused` where a mode that was named cannot be had.
    """
    if config.node.xdp == "off":
        return None
    try:
        return Offload(config, device, timing)
    except Unavailable as reason:
        if config.node.xdp != "auto":
            raise Refused(f"[node] xdp = {config.node.xdp!r}: {reason}") from None
        _log.warning("aggregating in user space", reason=str(reason))
        return None
