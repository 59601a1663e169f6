"""A TUN interface as a port of a switch."""

import errno

import numpy as np

from inanet.phy.mmsg import address_in_memory, system_error
from inanet.phy.tun import TunPort
from inanet.phy.vnet import FrameBatch
from inanet.switch.rebuild import MESSAGES
from inanet.wire.batch import I64, U64


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
