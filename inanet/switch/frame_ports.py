"""Ports of frames: a packet socket or a TUN interface with its egress queue, its outbox and its faults; and rings beside them."""

import errno
from collections.abc import Callable
from typing import Protocol

import numpy as np

from inanet.phy.device import Device
from inanet.phy.mmsg import address_in_memory, system_error
from inanet.phy.tun import TunPort
from inanet.phy.vnet import FrameBatch
from inanet.switch.egress import Outbox
from inanet.switch.port import PortOptions
from inanet.switch.rebuild import MESSAGES, FrameSender
from inanet.wire.batch import I64, U64, PacketBatch, Transmission


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
        return None

    def flush(self, now: float) -> PacketBatch | None:
        return None

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Nothing to close."""


class TunFrames:
    """Whole IP packets of a new TUN interface ``name``, virtio-net header first; ``routes`` are dotted addresses that
    the kernel sends into it. See :class:`inanet.phy.tun.TunPort` for what is raised.
    """

    def __init__(self, name: str, *, routes: tuple[str, ...] = (), mtu: int = 1500) -> None:
        self._port = TunPort(name, mtu=mtu)
        self._iovecs: U64 = np.zeros((MESSAGES, 2), np.uint64)
        self._counts = dict.fromkeys(("rx_frames", "rx_bytes", "tx_frames", "tx_bytes", "tx_refused"), 0)
        try:
            for address in routes:
                self._port.route(address)
        except BaseException:
            self._port.close()
            raise

    @property
    def interface(self) -> str:
        """Name of the interface."""
        return self._port.interface

    def fileno(self) -> int:
        """The interface's descriptor; -1 once closed."""
        return self._port.fileno()

    def receive(self) -> FrameBatch | None:
        """What the kernel has routed here, or ``None``."""
        frames = self._port.receive()
        if frames is not None:
            self._counts["rx_frames"] += len(frames)
            self._counts["rx_bytes"] += int(frames.lengths.sum())
        return frames

    def send(self, frames: FrameBatch, start: int = 0) -> int:
        """Hand frames to the kernel's stack, which always takes them."""
        base = address_in_memory(frames.arena)
        for at, length in zip(frames.offsets[start:].tolist(), frames.lengths[start:].tolist(), strict=True):
            self._iovecs[0] = (base + at, length)
            self._write(address_in_memory(self._iovecs), 1, length)
        return len(frames) - start

    def send_messages(self, words: U64, first: int, count: int, sizes: I64) -> int:
        """As for :class:`inanet.phy.port.FramePort`; the kernel takes them all."""
        rows = words[first : first + count, 2:4].tolist()
        for (iovecs, pieces), size in zip(rows, sizes.tolist(), strict=False):
            self._write(iovecs, pieces, size)
        return count

    def _write(self, iovecs: int, pieces: int, size: int) -> None:
        code = self._port.write(iovecs, pieces)
        if code in (errno.EIO, errno.EINVAL):
            # the interface is down, or the kernel does not like the frame: lost, as on any network
            self._counts["tx_refused"] += 1
        elif code:
            raise system_error(code, f"sending at {self.interface}")
        else:
            self._counts["tx_frames"] += 1
            self._counts["tx_bytes"] += size

    def counters(self) -> dict[str, int]:
        """Totals: frames and bytes (virtio-net headers included) each way, ``tx_refused`` frames, ``kernel_overflow``
        frames discarded because the interface's queue was full.
        """
        return {**self._counts, "kernel_overflow": self._port.dropped()}

    def close(self) -> None:
        """Remove the interface; counters stay readable."""
        self._port.close()


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
    """An interface: :class:`inanet.phy.port.FramePort`, :class:`inanet.switch.frame_ports.TunFrames`."""

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
        return self.device.fileno()

    def read(self, now: float) -> bool:
        frames = self.device.receive()
        if frames is None:
            return False
        self._switch.take(self, frames, now)
        return True

    @property
    def blocked(self) -> bool:
        return self.outbox.blocked

    def resume(self) -> None:
        self.outbox.resume()

    def impair(self, kind: int, batch: PacketBatch) -> PacketBatch | None:
        """What the port's faults leave of a batch: of ordinary frames (kind 0), or of a program's packets."""
        if not self.faults:
            return batch
        feed, injector = self.faults[kind]
        feed.put(batch)
        return injector.receive()

    def counters(self) -> dict[str, int]:
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
        return self.device.fileno()

    def read(self, now: float) -> bool:
        frames = self.device.receive()
        if frames is None:
            return False
        self._switch.take(self._port, frames, now)
        return True

    def resume(self) -> None:
        """Nothing waits here."""

    def counters(self) -> dict[str, int]:
        return self.device.counters()
