"""Ports of frames: an interface with its egress queue, its outbox and its faults; and rings beside them."""

from collections.abc import Callable
from typing import Protocol

from inanet.phy.device import Device
from inanet.phy.vnet import FrameBatch
from inanet.switch.feed import Feed
from inanet.switch.outbox import Outbox
from inanet.switch.port import PortOptions
from inanet.switch.rebuild import FrameSender
from inanet.wire.batch import PacketBatch


class Taker(Protocol):
    """The switch that ports hand their frames to."""

    @property
    def programs(self) -> int:
        """How many programs it runs."""
        ...

    def take(self, port: "FramedPort", frames: FrameBatch, now: float) -> None:
        """Pass frames that have arrived at a port through the switch."""
        ...


class FrameDevice(FrameSender, Protocol):
    """An interface: :class:`inanet.phy.port.FramePort`, :class:`inanet.switch.tunport.TunFrames`."""

    def fileno(self) -> int:
        """Descriptor to watch."""
        ...

    def receive(self) -> FrameBatch | None:
        """What has arrived, or ``None``."""
        ...

    def counters(self) -> dict[str, int]:
        """Totals by name."""
        ...

    def close(self) -> None:
        """Close it; counters stay readable."""
        ...


class FramedPort:
    """Port ``number`` of a switch, on ``device``."""

    def __init__(
        self,
        switch: "Taker",
        number: int,
        name: str,
        device: FrameDevice,
        options: PortOptions,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.number = number
        self.device = device
        self.queue = options.queue(name)
        self.outbox = Outbox()
        self._switch = switch
        #: what is held back or lost on arrival: ordinary frames, and the packets of each program
        self.faults: list[tuple[Feed, Device]] = []
        if options.faults.active:
            programs = switch.programs
            for kind in range(1 + programs):
                feed = Feed()
                self.faults.append((feed, options.faults.around(feed, number * (1 + programs) + kind, clock)))

    def fileno(self) -> int:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        return self.device.fileno()

    def read(self, now: float) -> bool:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        frames = self.device.receive()
        if frames is None:
            return False
        self._switch.take(self, frames, now)
        return True

    @property
    def blocked(self) -> bool:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        return self.outbox.blocked

    def resume(self) -> None:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        self.outbox.resume()

    def impair(self, kind: int, batch: PacketBatch) -> PacketBatch | None:
        """What the port's faults leave of a batch: of ordinary frames (kind 0), or of a program's packets."""
        if not self.faults:
            return batch
        feed, injector = self.faults[kind]
        feed.put(batch)
        return injector.receive()

    def counters(self) -> dict[str, int]:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        totals = {**self.device.counters(), **self.queue.counters()}
        for _, injector in self.faults:
            for name, value in injector.counters().items():
                if name.startswith("injected"):
                    totals[name] = totals.get(name, 0) + value
        return totals


class FrameSource(Protocol):
    """Where frames come from beside a port's own device: :class:`inanet.phy.ring.FrameRing`."""

    def fileno(self) -> int:
        """Descriptor to watch."""
        ...

    def receive(self) -> FrameBatch | None:
        """What has arrived, or ``None``."""
        ...

    def counters(self) -> dict[str, int]:
        """Totals by name."""
        ...

    def close(self) -> None:
        """Close it; counters stay readable."""
        ...


class RingPort:
    """Frames of ``port`` that arrive through ``ring``. What leaves does so at the port itself."""

    blocked = False

    def __init__(self, switch: Taker, port: FramedPort, ring: FrameSource) -> None:
        self.name = f"{port.name}/ring"
        self.device = ring
        self._switch = switch
        self._port = port

    def fileno(self) -> int:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        return self.device.fileno()

    def read(self, now: float) -> bool:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        frames = self.device.receive()
        if frames is None:
            return False
        self._switch.take(self._port, frames, now)
        return True

    def resume(self) -> None:
        """Nothing waits here."""

    def counters(self) -> dict[str, int]:
        """See :class:`~inanet.switch.port.SwitchPort`."""
        return self.device.counters()
